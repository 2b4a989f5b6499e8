/*
 * pinpool: a pinned-memory pool allocator for RDMA.
 *
 * Generated from the library's source; do not edit.
 *
 * Every function answers 0 (PINPOOL_OK) or a code of enum pinpool_status, and leaves a message with the
 * numbers needed to act in pinpool_last_error(), one for each thread. Pointers are checked for null; no
 * panic and no exception comes out of a call.
 *
 * Threads: any thread may call any function with any handle, several at a time, but for pinpool_close,
 * beside which no other call with the same handle may run. A buffer belongs to whoever has its address
 * and may be freed on any thread.
 *
 * Lifetimes: a pool is open from pinpool_open to pinpool_close; buffers are mapped and registered until
 * they are freed. A forked child must not use a pool: calls answer PINPOOL_FORKED there.
 */

#ifndef PINPOOL_H
#define PINPOOL_H

#include <stddef.h>
#include <stdint.h>

/*
 Pages of 2 MiB, arena by arena; base pages for those that cannot have them.
 */
#define PINPOOL_PAGES_PREFER_2M 0

/*
 Pages of 2 MiB, or an error.
 */
#define PINPOOL_PAGES_REQUIRE_2M 1

/*
 Pages of 1 GiB, arena by arena; base pages for those that cannot have them.
 */
#define PINPOOL_PAGES_PREFER_1G 2

/*
 Pages of 1 GiB, or an error.
 */
#define PINPOOL_PAGES_REQUIRE_1G 3

/*
 The system's base pages.
 */
#define PINPOOL_PAGES_BASE 4

/*
 The device's NUMA node, where the system knows one.
 */
#define PINPOOL_NUMA_OF_DEVICE -1

/*
 All nodes in turns, page by page.
 */
#define PINPOOL_NUMA_INTERLEAVE -2

/*
 Wherever the process's own policy has them.
 */
#define PINPOOL_NUMA_ANY -3

/*
 Fills memory with 0xdf while nobody has it, and looks whether it still does when it is handed out: finds writes
 after free, a device's included.
 */
#define PINPOOL_GUARD_POISON 1

/*
 Puts bytes behind the length that was asked for, and looks for them at the free: finds writes beyond the end. The
 `len` of a `pinpool_buf_t` is then what was asked for. Lengths that fill their block take the next larger one.
 */
#define PINPOOL_GUARD_CANARY 2

/*
 Erases what is freed before anybody else can have it; every buffer starts as zeros.
 */
#define PINPOOL_GUARD_ZERO_ON_FREE 4

/*
 What every call answers: 0, or why not.
 */
typedef enum pinpool_status {
    /*
     Done.
     */
    PINPOOL_OK = 0,
    /*
     A pointer that must not be null is null.
     */
    PINPOOL_NULL = 1,
    /*
     An argument makes no sense: a text that is not UTF-8, a struct of unknown size, an unknown number.
     */
    PINPOOL_INVALID = 2,
    /*
     The pool was closed through this handle.
     */
    PINPOOL_CLOSED = 3,
    /*
     There is no such device, or none at all.
     */
    PINPOOL_NO_DEVICE = 4,
    /*
     The device or the system refused a call.
     */
    PINPOOL_DEVICE = 5,
    /*
     What was asked for cannot be on this machine as it is set up; the message lists what to change.
     */
    PINPOOL_SETUP = 6,
    /*
     Nothing is left, in caches neither.
     */
    PINPOOL_EXHAUSTED = 7,
    /*
     Longer than an arena, or aligned to more than that.
     */
    PINPOOL_TOO_LARGE = 8,
    /*
     The pointer is not of this pool.
     */
    PINPOOL_FOREIGN = 9,
    /*
     The pointer points into a block, not to its start.
     */
    PINPOOL_INTERIOR = 10,
    /*
     The buffer is not out: freed before, or never given out.
     */
    PINPOOL_NOT_OUT = 11,
    /*
     This process is a forked child of the one that opened the pool.
     */
    PINPOOL_FORKED = 12,
    /*
     Buffers are still out; the pool goes with the last of them.
     */
    PINPOOL_LIVE = 13,
    /*
     A device would not let go of an arena, which stays mapped.
     */
    PINPOOL_LEAKED = 14,
    /*
     The text does not fit the room given for it.
     */
    PINPOOL_TRUNCATED = 15,
    /*
     A fault of pinpool's own; please report it.
     */
    PINPOOL_INTERNAL = 16,
    /*
     Nothing large enough came free in time.
     */
    PINPOOL_TIMEOUT = 17,
    /*
     The token's flight is over: taken back already, or never begun.
     */
    PINPOOL_TOKEN_STALE = 18,
    /*
     The token is another pool's, or made up.
     */
    PINPOOL_TOKEN_FOREIGN = 19,
    /*
     The token names no buffer that this pool can have: made up, or damaged on its way.
     */
    PINPOOL_TOKEN_INVALID = 20,
} pinpool_status;

/*
 A share of an open pool. Any thread may use it, several at a time. It belongs to the pool's handle: after
 `pinpool_close` each call with it answers `PINPOOL_CLOSED`.
 */
typedef struct pinpool_share_t pinpool_share_t;

/*
 A pool. Any thread may use it, several at a time; only `pinpool_close` must not run beside another
 call with the same handle.
 */
typedef struct pinpool_t pinpool_t;

/*
 Registers memory in verbs' place: libfabric, UCX, a PD wrapper of the caller's.

 The functions are called from any thread, several at a time, and never from an alloc or a free. They
 must not call into the pool.
 */
typedef struct pinpool_registrar_t {
    /*
     Handed to each function.
     */
    void *context;
    /*
     A name for messages; copied. May be null.
     */
    const char *name;
    /*
     The largest range that one call may cover; 0 for any.
     */
    uint64_t max_mr_size;
    /*
     Registers `addr .. addr + len`, whole pages of `page_size` that stay mapped until they were
     deregistered, with exactly the rights in `access` (bits of `ibv_access_flags`). Answers 0 and fills
     in the three numbers, or answers an errno and leaves nothing registered.
     */
    int (*register_memory)(void *context,
                           void *addr,
                           size_t len,
                           size_t page_size,
                           uint32_t access,
                           uint64_t *handle,
                           uint32_t *lkey,
                           uint32_t *rkey);
    /*
     Deregisters. Answers 0 once nothing touches the memory any more, for it is unmapped then; an errno
     when that is not certain, and the memory is leaked.
     */
    int (*deregister_memory)(void *context, uint64_t handle);
    /*
     Called once, after the last deregistration. May be null.
     */
    void (*release)(void *context);
} pinpool_registrar_t;

/*
 A reservation that a pool shall have.
 */
typedef struct pinpool_reserve_t {
    /*
     Its name; copied.
     */
    const char *name;
    /*
     Bytes that nobody else can take. All reservations together must leave something of the capacity.
     */
    size_t bytes;
} pinpool_reserve_t;

/*
 Told of what is rare: a pool that was built, grew, could not grow, refused allocs, found damage, was taken down.

 `kind` is its kind in a word (such as "grew", "written_after_free", "written_beyond_end"), `message` a text with the
 numbers; both are valid during the call. It is called on any thread, on several at a time, and for damage and
 refusals inside the alloc or free that met them. It must return.
 */
typedef void (*pinpool_on_event_t)(void *context, const char *kind, const char *message);

/*
 What a pool shall be. Fill it with `pinpool_options_init`, then set what shall differ.
 */
typedef struct pinpool_options_t {
    /*
     Bytes of this struct, so that it can grow; `pinpool_options_init` sets it.
     */
    size_t size;
    /*
     A verbs device's name, or "soft" for the software device; null for the first verbs device.
     */
    const char *device;
    /*
     A protection domain of the caller's (`struct ibv_pd *`), to use instead of `device`. It must stay
     until the pool is gone, and is never freed here.
     */
    void *pd;
    /*
     What registers memory instead of verbs; overrides both. Copied.
     */
    const struct pinpool_registrar_t *registrar;
    /*
     Rights of all arenas, as bits of `ibv_access_flags`; `IBV_ACCESS_LOCAL_WRITE` unless changed.
     */
    uint32_t access;
    /*
     Rights to have if the device grants them.
     */
    uint32_t optional_access;
    /*
     Bytes to register. Must be set.
     */
    size_t capacity;
    /*
     Bytes of one arena, a power of two; 0 to have it chosen.
     */
    size_t arena_size;
    /*
     One of `PINPOOL_PAGES_…`.
     */
    int pages;
    /*
     A NUMA node's number, or one of `PINPOOL_NUMA_…`.
     */
    int numa;
    /*
     Whether to spread block starts over cache sets (0 or 1).
     */
    int colouring;
    /*
     Bytes that the pool may grow to, an arena at a time, on a thread of its own; 0 for `capacity`: it never
     grows.
     */
    size_t max_capacity;
    /*
     Bytes left, not counting those in buffers, below which it grows; 0 for an eighth of `capacity`.
     */
    size_t low_watermark;
    /*
     `share_count` reservations inside the pool, each with a name of its own; null for none. Copied.
     */
    const struct pinpool_reserve_t *shares;
    /*
     How many there are.
     */
    size_t share_count;
    /*
     What memory is guarded with, `PINPOOL_GUARD_…` together; 0 for nothing. A pool with any guard, quarantine or
     tracking does without the threads' caches: for finding mistakes. What is found is told to `on_event` and counted
     in `pinpool_stats_t`.
     */
    uint32_t guards;
    /*
     Remembers who asked for one of so many allocs, for `pinpool_outstanding` and for what is told of damage; 1 for
     all, 0 for none.
     */
    uint32_t track_every;
    /*
     Keeps what is freed from being handed out again until so many bytes more were freed; 0 for none.
     */
    size_t quarantine;
    /*
     Told of what is rare; null for nobody.
     */
    pinpool_on_event_t on_event;
    /*
     Handed to `on_event`. It must stay until `pinpool_close` closed the handle; where `pinpool_open` fails, until it
     returned.
     */
    void *event_context;
} pinpool_options_t;

/*
 A buffer: whole, inside one memory region.
 */
typedef struct pinpool_buf_t {
    /*
     First byte; what `pinpool_free` takes.
     */
    void *addr;
    /*
     Bytes asked for.
     */
    size_t len;
    /*
     For this host's work requests.
     */
    uint32_t lkey;
    /*
     For peers, if `has_rkey`; else 0.
     */
    uint32_t rkey;
    /*
     1 if the pool's rights let peers do anything, else 0.
     */
    int has_rkey;
} pinpool_buf_t;

/*
 The keys of a memory region.
 */
typedef struct pinpool_keys_t {
    /*
     For this host's work requests.
     */
    uint32_t lkey;
    /*
     For peers, if `has_rkey`; else 0.
     */
    uint32_t rkey;
    /*
     1 if the pool's rights let peers do anything, else 0.
     */
    int has_rkey;
} pinpool_keys_t;

/*
 The books of one share's reserve. Buffers that it was given beyond that are in the pool's.
 */
typedef struct pinpool_share_stats_t {
    /*
     Bytes of this struct, set by the caller before the call, so that it can grow.
     */
    size_t size;
    /*
     Bytes of the reserve.
     */
    size_t reserved;
    /*
     Bytes of blocks of it that are out.
     */
    size_t live;
    /*
     How many buffers of it are out.
     */
    size_t live_buffers;
    /*
     How often the whole reserve was searched in vain.
     */
    uint64_t ran_dry;
    /*
     How often an allocation was refused, since the unreserved memory had nothing either.
     */
    uint64_t refused;
    /*
     How many calls wait for memory now.
     */
    size_t waiting;
    /*
     How many have waited or do, over the pool's life.
     */
    uint64_t waits;
    /*
     How long those that wait no longer did, together, in nanoseconds.
     */
    uint64_t wait_time_ns;
} pinpool_share_stats_t;

/*
 Where a pool's bytes are. At a quiet point live + cached + free + unused = capacity.
 */
typedef struct pinpool_stats_t {
    /*
     Bytes of this struct, set by the caller before the call, so that it can grow.
     */
    size_t size;
    /*
     Bytes of all arenas.
     */
    size_t capacity;
    /*
     Bytes of blocks that are out.
     */
    size_t live;
    /*
     Bytes of free blocks in caches.
     */
    size_t cached;
    /*
     Bytes of free blocks in slabs.
     */
    size_t free_bytes;
    /*
     Bytes of free runs, and what slabs leave over.
     */
    size_t unused;
    /*
     How many buffers are out.
     */
    size_t live_buffers;
    /*
     The longest free run, in bytes.
     */
    size_t largest_free;
    /*
     How many arenas there are.
     */
    size_t arenas;
    /*
     How many register calls the pool has made.
     */
    uint64_t register_calls;
    /*
     Bytes that RDMA has pinned for the whole process (VmPin).
     */
    uint64_t pinned;
    /*
     RLIMIT_MEMLOCK, soft; UINT64_MAX is unlimited.
     */
    uint64_t memlock_limit;
    /*
     Bytes of the allocator's own tables, all outside registered memory.
     */
    size_t table_bytes;
    /*
     Bytes that the pool may grow to.
     */
    size_t max_capacity;
    /*
     How many of the buffers that are out are out as tokens.
     */
    size_t in_flight;
    /*
     How many calls wait for memory now.
     */
    size_t waiting;
    /*
     How many have waited or do, over the pool's life.
     */
    uint64_t waits;
    /*
     How long those that wait no longer did, together, in nanoseconds.
     */
    uint64_t wait_time_ns;
    /*
     In how many buffers' memory somebody was found to have written after their free (`PINPOOL_GUARD_POISON`).
     */
    uint64_t written_after_free;
    /*
     How many buffers were found to be written beyond their end (`PINPOOL_GUARD_CANARY`).
     */
    uint64_t written_beyond_end;
    /*
     Bytes that the quarantine keeps back; part of `cached`.
     */
    size_t quarantined;
} pinpool_stats_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 Says why the last call on this thread that failed did so: a text with the numbers needed to act.

 Never null; empty when none has failed yet. It is valid until the next call of this library on this
 thread that fails, or the thread's end.
 */
const char *pinpool_last_error(void);

/*
 Names a code that a call answered with, as this header does; "unknown" for any other number.

 The text is valid for ever.
 */
const char *pinpool_status_name(int status);

/*
 Fills a struct with the defaults. Null is ignored.

 Requires:
 `options` is null or points to a struct that nobody else uses.
 */
void pinpool_options_init(struct pinpool_options_t *options);

/*
 The version of this library, as in "0.1.0". Valid for ever.
 */
const char *pinpool_version(void);

/*
 Opens a pool: maps, faults in and registers all that `options` ask for. Writes the handle to `*pool`,
 null on an error.

 Requires:
 `options` points to a struct as `pinpool_options_init` fills it, `pool` to a place for the handle.
 */
int pinpool_open(const struct pinpool_options_t *options, struct pinpool_t **pool);

/*
 Gives the protection domain that the pool's memory is registered under (`struct ibv_pd *`), for queue
 pairs; null if the pool is not on a verbs device, or closed. It is valid until `pinpool_close`; destroy
 what was made on it before.

 Requires:
 `pool` is null or came from `pinpool_open`.
 */
void *pinpool_pd(const struct pinpool_t *pool);

/*
 Closes a pool: deregisters, unmaps, and lets the protection domain go.

 Answers `PINPOOL_LIVE` while buffers are out, with their number in the message, and the pool is then as
 before: free them and close again. So it is with `PINPOOL_FORKED`. After any other answer the handle is closed, and every later call
 with it answers `PINPOOL_CLOSED`.

 Requires:
 `pool` is null or came from `pinpool_open`. No other call with this handle runs at the same time.
 */
int pinpool_close(struct pinpool_t *pool);

/*
 Allocates a buffer of `len` bytes, aligned to 64, to whole pages if its block is a multiple of 4 KiB.
 Takes no lock and makes no system call as long as the thread's magazine has one.

 The bytes are zero or what an earlier owner left. A length of 0 gives a buffer that must be freed.
 Whoever has the address owns the buffer, until `pinpool_free`, on any thread.

 Requires:
 `pool` is null or came from `pinpool_open`, `buf` is null or points to a place for a buffer.
 */
int pinpool_alloc(const struct pinpool_t *pool, size_t len, struct pinpool_buf_t *buf);

/*
 Allocates a buffer of `len` bytes that starts at a multiple of `alignment`, a power of two.

 Requires:
 As `pinpool_alloc`.
 */
int pinpool_alloc_aligned(const struct pinpool_t *pool,
                          size_t len,
                          size_t alignment,
                          struct pinpool_buf_t *buf);

/*
 Allocates a buffer of `len` bytes, and waits up to `timeout_ns` nanoseconds until there is one; 0 does not
 wait, and `UINT64_MAX` waits for ever.

 First come, first served: whoever frees, on whichever thread, wakes the first in line; nobody is passed
 by more than 64 that came later. `PINPOOL_TIMEOUT` says that nothing large enough came free, with the
 books in the message. `pinpool_close` must not be called while a call waits.

 Requires:
 As `pinpool_alloc`.
 */
int pinpool_alloc_wait(const struct pinpool_t *pool,
                       size_t len,
                       uint64_t timeout_ns,
                       struct pinpool_buf_t *buf);

/*
 Allocates up to `n` buffers of `len` bytes into `bufs`, and writes to `*got` how many there were. It is
 an error only if not even one could be had.

 Requires:
 As `pinpool_alloc`; `bufs` has room for `n`, `got` points to a number or is null.
 */
int pinpool_alloc_many(const struct pinpool_t *pool,
                       size_t len,
                       struct pinpool_buf_t *bufs,
                       size_t n,
                       size_t *got);

/*
 Frees a buffer, on any thread.

 Every pointer that is not the start of a buffer that is out of this pool is refused, with a code that
 says what is wrong with it, and nothing is changed: null, freed before, foreign, inside a buffer.

 Requires:
 `pool` is null or came from `pinpool_open`. If `addr` is out, nobody uses its bytes any more, no work
 request either.
 */
int pinpool_free(const struct pinpool_t *pool, void *addr);

/*
 Frees `n` buffers. All that can be freed are; the answer is that of the first that could not.

 Requires:
 As `pinpool_free`, for each; `bufs` points to `n` buffers.
 */
int pinpool_free_many(const struct pinpool_t *pool, const struct pinpool_buf_t *bufs, size_t n);

/*
 Writes to `*keys` the keys of the memory region that holds `addr`: any pointer may be asked for, and
 none is followed. `PINPOOL_FOREIGN` if it does not point into this pool. Takes no lock.

 Requires:
 `pool` is null or came from `pinpool_open`, `keys` is null or points to a place for keys.
 */
int pinpool_keys(const struct pinpool_t *pool, const void *addr, struct pinpool_keys_t *keys);

/*
 Finds a share by its name and writes it to `*share`, null on an error. It need not be given back.

 Requires:
 `pool` is null or came from `pinpool_open`, `name` is null or a string, `share` is null or points to a place
 for the share.
 */
int pinpool_share(const struct pinpool_t *pool, const char *name, const struct pinpool_share_t **share);

/*
 As `pinpool_alloc`, from the share's reserve, and when that has nothing left, from what no share has
 reserved. The buffer is freed by `pinpool_free`, and so goes back to where it came from.

 Requires:
 `share` is null or came from `pinpool_share`, `buf` is null or points to a place for a buffer.
 */
int pinpool_share_alloc(const struct pinpool_share_t *share, size_t len, struct pinpool_buf_t *buf);

/*
 As `pinpool_alloc_wait`, from the share: a buffer freed to the reserve wakes those who wait for that share,
 one freed to the unreserved memory anybody. `pinpool_close` must not be called while a call waits.

 Requires:
 As `pinpool_share_alloc`.
 */
int pinpool_share_alloc_wait(const struct pinpool_share_t *share,
                             size_t len,
                             uint64_t timeout_ns,
                             struct pinpool_buf_t *buf);

/*
 Sums up a share's books. Takes locks, and sends every thread through its slow path once.

 Requires:
 `share` is null or came from `pinpool_share`, `stats` is null or points to a struct whose `size` is set.
 */
int pinpool_share_stats(const struct pinpool_share_t *share, struct pinpool_share_stats_t *stats);

/*
 Gives a buffer up for a token, to ride in a work request's `wr_id`, and writes it to `*token`. Until
 `pinpool_from_token` takes it back, the buffer is out and nobody gets it; `pinpool_free` refuses its
 address. The token's top bit is 0 and stays so: it is the caller's to use.

 A token that is lost leaks its buffer; `in_flight` of the books counts it.

 Requires:
 `pool` is null or came from `pinpool_open`, `token` is null or points to a place for a number. Nobody but
 this call gives up `addr`.
 */
int pinpool_into_token(const struct pinpool_t *pool, void *addr, uint64_t *token);

/*
 Takes back the buffer that `pinpool_into_token` gave up, once, on any thread: at the completion that carries
 the token. `buf->len` is the length of the whole block, which is at least what was asked for.

 Any number may be passed, and is checked: `PINPOOL_TOKEN_STALE` for one that was used before,
 `PINPOOL_TOKEN_FOREIGN` for another pool's, `PINPOOL_TOKEN_INVALID` for one that no buffer of this pool can
 have; nothing is then changed. Of several calls with one token exactly one succeeds.

 Requires:
 `pool` is null or came from `pinpool_open`, `buf` is null or points to a place for a buffer.
 */
int pinpool_from_token(const struct pinpool_t *pool, uint64_t token, struct pinpool_buf_t *buf);

/*
 Looks at all that was freed, in a pool with `PINPOOL_GUARD_POISON`, and sets `*damaged` to in how many buffers'
 memory somebody has written since; each is told to `on_event`, and mended. 0 in a pool without.

 Requires:
 `pool` is null or came from `pinpool_open`, `damaged` is null or points to a number.
 */
int pinpool_check_free(const struct pinpool_t *pool,
                       size_t *damaged);

/*
 Writes to `text`, for people and with its zero byte, how many buffers are out; where `track_every` is set also which
 calls asked for those that it remembers, on which thread, and how long ago.

 `*needed`, if not null, is set to the bytes that the whole text takes; `PINPOOL_TRUNCATED` says that `room` was
 less.

 Requires:
 `pool` is null or came from `pinpool_open`; `text` has `room` bytes, or is null with `room` 0; `needed` is null or
 points to a number.
 */
int pinpool_outstanding(const struct pinpool_t *pool,
                        char *text,
                        size_t room,
                        size_t *needed);

/*
 Sums up where the pool's bytes are. Takes locks, and sends every thread through its slow path once.

 Requires:
 `pool` is null or came from `pinpool_open`, `stats` is null or points to a struct whose `size` is set.
 */
int pinpool_stats(const struct pinpool_t *pool, struct pinpool_stats_t *stats);

/*
 Looks the machine over for the pool that `options` describe, without building it, and writes a text for
 people to `text`, zero byte included.

 `*needed`, if not null, is set to the bytes that the whole text takes; `PINPOOL_TRUNCATED` says that
 `room` was less. `*fit`, if not null, is set to 1 if such a pool can be built here, else to 0.

 Requires:
 `options` is as for `pinpool_open`; `text` has `room` bytes, or is null with `room` 0; the others are
 null or point to numbers.
 */
int pinpool_doctor(const struct pinpool_options_t *options,
                   char *text,
                   size_t room,
                   size_t *needed,
                   int *fit);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PINPOOL_H */
