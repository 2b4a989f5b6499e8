/*
 * Misuse is answered by a code, every time, and changes nothing.
 *
 * - null pointers, in every argument of every function
 * - frees: double, foreign, interior, of another pool, after close
 * - options: unknown size, unknown rights, pages and nodes, no capacity, no such device
 * - the handle after close: every function
 * - a pool with a buffer out does not close, and does once it is back
 * - a forked child
 * - tokens: used twice, stale, of another pool, made up, by all threads at once; the address of one in flight
 * - shares: what one has reserved no other takes, and its books; unknown names, nulls, after close
 * - guards: bytes written after free, beyond the end and by nobody's right are told with whose they were, and counted
 * - waits: one woken by another thread's free, one that times out, one for what can never be had
 * - eight threads that free one another's buffers, and one pointer by all of them: one succeeds
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pinpool.h"

#include "check.h"

static pinpool_options_t soft(size_t capacity) {
    pinpool_options_t o;
    pinpool_options_init(&o);
    o.device = "soft";
    o.capacity = capacity;
    o.pages = PINPOOL_PAGES_BASE;
    return o;
}

static pinpool_t *open_soft(size_t capacity) {
    pinpool_options_t o = soft(capacity);
    pinpool_t *pool = NULL;
    ANSWERS(pinpool_open(&o, &pool), PINPOOL_OK);
    CHECK(pool != NULL);
    return pool;
}

static void nulls(void) {
    pinpool_t *pool = (pinpool_t *)&pool;
    pinpool_options_t o = soft(1 << 20);
    pinpool_buf_t buf;
    pinpool_keys_t keys;
    pinpool_stats_t stats;
    size_t got;
    pinpool_options_init(NULL);
    ANSWERS(pinpool_open(NULL, &pool), PINPOOL_NULL);
    CHECK(pool == NULL);
    pool = open_soft(1 << 20);
    ANSWERS(pinpool_open(&o, NULL), PINPOOL_NULL);
    ANSWERS(pinpool_close(NULL), PINPOOL_NULL);
    CHECK(pinpool_pd(NULL) == NULL);
    ANSWERS(pinpool_alloc(NULL, 64, &buf), PINPOOL_NULL);
    ANSWERS(pinpool_alloc(pool, 64, NULL), PINPOOL_NULL);
    ANSWERS(pinpool_alloc_aligned(NULL, 64, 64, &buf), PINPOOL_NULL);
    ANSWERS(pinpool_alloc_aligned(pool, 64, 64, NULL), PINPOOL_NULL);
    ANSWERS(pinpool_alloc_many(NULL, 64, &buf, 1, &got), PINPOOL_NULL);
    ANSWERS(pinpool_alloc_many(pool, 64, NULL, 1, &got), PINPOOL_NULL);
    ANSWERS(pinpool_alloc_many(pool, 64, NULL, 0, NULL), PINPOOL_OK);
    ANSWERS(pinpool_free(NULL, &buf), PINPOOL_NULL);
    ANSWERS(pinpool_free(pool, NULL), PINPOOL_NULL);
    ANSWERS(pinpool_free_many(NULL, &buf, 1), PINPOOL_NULL);
    ANSWERS(pinpool_free_many(pool, NULL, 1), PINPOOL_NULL);
    ANSWERS(pinpool_free_many(pool, NULL, 0), PINPOOL_OK);
    ANSWERS(pinpool_keys(NULL, &buf, &keys), PINPOOL_NULL);
    ANSWERS(pinpool_keys(pool, &buf, NULL), PINPOOL_NULL);
    ANSWERS(pinpool_keys(pool, NULL, &keys), PINPOOL_FOREIGN);
    uint64_t token;
    ANSWERS(pinpool_alloc_wait(NULL, 64, 0, &buf), PINPOOL_NULL);
    ANSWERS(pinpool_alloc_wait(pool, 64, 0, NULL), PINPOOL_NULL);
    ANSWERS(pinpool_into_token(NULL, &buf, &token), PINPOOL_NULL);
    ANSWERS(pinpool_into_token(pool, NULL, &token), PINPOOL_NULL);
    ANSWERS(pinpool_into_token(pool, &buf, NULL), PINPOOL_NULL);
    ANSWERS(pinpool_from_token(NULL, 0, &buf), PINPOOL_NULL);
    ANSWERS(pinpool_from_token(pool, 0, NULL), PINPOOL_NULL);
    ANSWERS(pinpool_stats(NULL, &stats), PINPOOL_NULL);
    ANSWERS(pinpool_stats(pool, NULL), PINPOOL_NULL);
    ANSWERS(pinpool_doctor(NULL, NULL, 0, NULL, NULL), PINPOOL_NULL);
    ANSWERS(pinpool_doctor(&o, NULL, 10, NULL, NULL), PINPOOL_NULL);
    CHECK(strstr(pinpool_last_error(), "null") != NULL);
    ANSWERS(pinpool_close(pool), PINPOOL_OK);
}

static void options(void) {
    pinpool_t *pool = (pinpool_t *)&pool;
    pinpool_options_t o = soft(1 << 20);
    o.size = 8;
    ANSWERS(pinpool_open(&o, &pool), PINPOOL_INVALID);
    CHECK(pool == NULL);
    o = soft(1 << 20);
    o.access = 0x8000;
    ANSWERS(pinpool_open(&o, &pool), PINPOOL_INVALID);
    CHECK(strstr(pinpool_last_error(), "0x8000") != NULL);
    o = soft(1 << 20);
    o.access = 2; /* remote write without local write */
    ANSWERS(pinpool_open(&o, &pool), PINPOOL_INVALID);
    o = soft(1 << 20);
    o.pages = 17;
    ANSWERS(pinpool_open(&o, &pool), PINPOOL_INVALID);
    o = soft(1 << 20);
    o.numa = -17;
    ANSWERS(pinpool_open(&o, &pool), PINPOOL_INVALID);
    o = soft(0);
    ANSWERS(pinpool_open(&o, &pool), PINPOOL_INVALID);
    o = soft((size_t)-1);
    ANSWERS(pinpool_open(&o, &pool), PINPOOL_TOO_LARGE);
    o = soft(1 << 20);
    o.device = "no such device";
    ANSWERS(pinpool_open(&o, &pool), PINPOOL_NO_DEVICE);
    o.device = "\xff\xfe";
    ANSWERS(pinpool_open(&o, &pool), PINPOOL_INVALID);
    pinpool_registrar_t none;
    memset(&none, 0, sizeof none);
    o = soft(1 << 20);
    o.registrar = &none;
    ANSWERS(pinpool_open(&o, &pool), PINPOOL_NULL);
    CHECK(pool == NULL);

    o = soft(1 << 20);
    char text[16];
    size_t needed = 0;
    int fit = -1;
    ANSWERS(pinpool_doctor(&o, NULL, 0, &needed, &fit), PINPOOL_TRUNCATED);
    CHECK(needed > 100 && fit == 1);
    ANSWERS(pinpool_doctor(&o, text, sizeof text, NULL, NULL), PINPOOL_TRUNCATED);
    CHECK(strlen(text) == sizeof text - 1);
    char *all = malloc(needed + 4096);
    ANSWERS(pinpool_doctor(&o, all, needed + 4096, &needed, NULL), PINPOOL_OK);
    CHECK(strlen(all) == needed - 1);
    free(all);
}

static void frees(void) {
    pinpool_t *pool = open_soft(4 << 20), *other = open_soft(4 << 20);
    size_t lens[] = {1, 64, 100, 4096, 5000, 70000, 1 << 20};
    for (size_t i = 0; i < sizeof lens / sizeof *lens; i++) {
        pinpool_buf_t buf;
        ANSWERS(pinpool_alloc(pool, lens[i], &buf), PINPOOL_OK);
        CHECK(buf.len == lens[i] && !buf.has_rkey && buf.rkey == 0);
        memset(buf.addr, 0x5a, buf.len);
        pinpool_keys_t keys;
        ANSWERS(pinpool_keys(pool, (char *)buf.addr + buf.len - 1, &keys), PINPOOL_OK);
        CHECK(keys.lkey == buf.lkey);
        for (int round = 0; round < 3; round++) {
            ANSWERS(pinpool_free(pool, (char *)buf.addr + 1), PINPOOL_INTERIOR);
            ANSWERS(pinpool_free(pool, &buf), PINPOOL_FOREIGN);
            ANSWERS(pinpool_free(other, buf.addr), PINPOOL_FOREIGN);
            ANSWERS(pinpool_keys(other, buf.addr, &keys), PINPOOL_FOREIGN);
        }
        CHECK(((char *)buf.addr)[lens[i] - 1] == 0x5a);
        ANSWERS(pinpool_free(pool, buf.addr), PINPOOL_OK);
        ANSWERS(pinpool_free(pool, buf.addr), PINPOOL_NOT_OUT);
        ANSWERS(pinpool_free(pool, buf.addr), PINPOOL_NOT_OUT);
    }
    pinpool_buf_t many[40];
    size_t got = 0;
    ANSWERS(pinpool_alloc_many(pool, 4096, many, 40, &got), PINPOOL_OK);
    CHECK(got == 40);
    void *seventh = many[7].addr;
    many[7].addr = many[6].addr;
    void *twentieth = many[20].addr;
    many[20].addr = &got;
    ANSWERS(pinpool_free_many(pool, many, 40), PINPOOL_NOT_OUT);
    /* The message is the first one's, as the code is. */
    char sixth[32];
    snprintf(sixth, sizeof sixth, "%#lx", (unsigned long)(uintptr_t)many[6].addr);
    CHECK(strstr(pinpool_last_error(), sixth) != NULL);
    ANSWERS(pinpool_free(pool, twentieth), PINPOOL_OK);
    ANSWERS(pinpool_free(pool, seventh), PINPOOL_OK);
    pinpool_buf_t buf;
    ANSWERS(pinpool_alloc(pool, 5 << 20, &buf), PINPOOL_TOO_LARGE);
    ANSWERS(pinpool_alloc(pool, (size_t)-1, &buf), PINPOOL_TOO_LARGE);
    ANSWERS(pinpool_alloc_aligned(pool, 8, 4096, &buf), PINPOOL_OK);
    CHECK((uintptr_t)buf.addr % 4096 == 0);
    ANSWERS(pinpool_free(pool, buf.addr), PINPOOL_OK);
    ANSWERS(pinpool_alloc_aligned(pool, 8, 3, &buf), PINPOOL_TOO_LARGE);
    ANSWERS(pinpool_alloc(pool, 0, &buf), PINPOOL_OK);
    ANSWERS(pinpool_free(pool, buf.addr), PINPOOL_OK);
    ANSWERS(pinpool_alloc_many(pool, 1 << 20, many, 40, &got), PINPOOL_OK);
    CHECK(got == 4);
    ANSWERS(pinpool_alloc(pool, 1, &buf), PINPOOL_EXHAUSTED);
    CHECK(strstr(pinpool_last_error(), "4 MiB") != NULL);
    ANSWERS(pinpool_free_many(pool, many, 4), PINPOOL_OK);

    pinpool_stats_t stats = {.size = sizeof stats};
    ANSWERS(pinpool_stats(pool, &stats), PINPOOL_OK);
    CHECK(stats.live == 0 && stats.capacity == 4 << 20);
    CHECK(stats.live + stats.cached + stats.free_bytes + stats.unused == stats.capacity);
    stats.size = 3;
    ANSWERS(pinpool_stats(pool, &stats), PINPOOL_INVALID);
    ANSWERS(pinpool_close(other), PINPOOL_OK);
    ANSWERS(pinpool_close(pool), PINPOOL_OK);
}

static void after_close(void) {
    pinpool_t *pool = open_soft(1 << 20);
    pinpool_buf_t buf;
    ANSWERS(pinpool_alloc(pool, 64, &buf), PINPOOL_OK);
    for (int i = 0; i < 3; i++) ANSWERS(pinpool_close(pool), PINPOOL_LIVE);
    CHECK(strstr(pinpool_last_error(), "1 buffer") != NULL);
    ANSWERS(pinpool_free(pool, buf.addr), PINPOOL_OK);
    ANSWERS(pinpool_close(pool), PINPOOL_OK);
    pinpool_keys_t keys;
    pinpool_stats_t stats = {.size = sizeof stats};
    size_t got = 7;
    uint64_t token = 7;
    for (int i = 0; i < 3; i++) {
        ANSWERS(pinpool_close(pool), PINPOOL_CLOSED);
        ANSWERS(pinpool_alloc(pool, 64, &buf), PINPOOL_CLOSED);
        ANSWERS(pinpool_alloc_aligned(pool, 64, 64, &buf), PINPOOL_CLOSED);
        ANSWERS(pinpool_alloc_many(pool, 64, &buf, 1, &got), PINPOOL_CLOSED);
        ANSWERS(pinpool_free(pool, buf.addr), PINPOOL_CLOSED);
        ANSWERS(pinpool_free_many(pool, &buf, 1), PINPOOL_CLOSED);
        ANSWERS(pinpool_alloc_wait(pool, 64, UINT64_MAX, &buf), PINPOOL_CLOSED);
        ANSWERS(pinpool_into_token(pool, buf.addr, &token), PINPOOL_CLOSED);
        ANSWERS(pinpool_from_token(pool, token, &buf), PINPOOL_CLOSED);
        ANSWERS(pinpool_keys(pool, buf.addr, &keys), PINPOOL_CLOSED);
        ANSWERS(pinpool_stats(pool, &stats), PINPOOL_CLOSED);
        CHECK(pinpool_pd(pool) == NULL);
    }
}

static void forked(void) {
    pinpool_t *pool = open_soft(1 << 20);
    pinpool_buf_t buf, mine;
    ANSWERS(pinpool_alloc(pool, 64, &buf), PINPOOL_OK);
    uint64_t token, childs;
    pinpool_buf_t flying;
    ANSWERS(pinpool_alloc(pool, 4096, &flying), PINPOOL_OK);
    ANSWERS(pinpool_into_token(pool, flying.addr, &token), PINPOOL_OK);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        ANSWERS(pinpool_alloc(pool, 64, &mine), PINPOOL_FORKED);
        ANSWERS(pinpool_alloc_wait(pool, 64, UINT64_MAX, &mine), PINPOOL_FORKED);
        ANSWERS(pinpool_into_token(pool, buf.addr, &childs), PINPOOL_FORKED);
        ANSWERS(pinpool_from_token(pool, token, &mine), PINPOOL_FORKED);
        ANSWERS(pinpool_close(pool), PINPOOL_FORKED);
        exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    ANSWERS(pinpool_from_token(pool, token, &flying), PINPOOL_OK);
    ANSWERS(pinpool_free(pool, flying.addr), PINPOOL_OK);
    ANSWERS(pinpool_free(pool, buf.addr), PINPOOL_OK);
    ANSWERS(pinpool_close(pool), PINPOOL_OK);
}

enum { THREADS = 8, ROUNDS = 2000, SHARED = 64 };
static struct {
    pinpool_t *pool;
    pthread_barrier_t barrier;
    pinpool_buf_t bufs[SHARED];
    int freed[THREADS];
} race;

static void *racer(void *arg) {
    int me = (int)(intptr_t)arg;
    for (int i = 0; i < ROUNDS; i++) {
        pinpool_buf_t buf;
        ANSWERS(pinpool_alloc(race.pool, 1 + (size_t)(i * 37 % 9000), &buf), PINPOOL_OK);
        memset(buf.addr, me, buf.len);
        ANSWERS(pinpool_free(race.pool, buf.addr), PINPOOL_OK);
    }
    pthread_barrier_wait(&race.barrier);
    for (int i = 0; i < SHARED; i++) {
        int answer = pinpool_free(race.pool, race.bufs[i].addr);
        CHECK(answer == PINPOOL_OK || answer == PINPOOL_NOT_OUT);
        race.freed[me] += answer == PINPOOL_OK;
    }
    return NULL;
}

static void threads(void) {
    race.pool = open_soft(16 << 20);
    pthread_t ids[THREADS];
    size_t got;
    /* Blocks of whole pages, and some that share pages. */
    ANSWERS(pinpool_alloc_many(race.pool, 4096, race.bufs, SHARED / 2, &got), PINPOOL_OK);
    CHECK(got == SHARED / 2);
    ANSWERS(pinpool_alloc_many(race.pool, 100, race.bufs + SHARED / 2, SHARED / 2, &got), PINPOOL_OK);
    CHECK(got == SHARED / 2 && pthread_barrier_init(&race.barrier, NULL, THREADS) == 0);
    for (intptr_t i = 0; i < THREADS; i++) CHECK(pthread_create(&ids[i], NULL, racer, (void *)i) == 0);
    int freed = 0;
    for (int i = 0; i < THREADS; i++) {
        CHECK(pthread_join(ids[i], NULL) == 0);
        freed += race.freed[i];
    }
    CHECK(freed == SHARED);
    ANSWERS(pinpool_close(race.pool), PINPOOL_OK);
}

static void tokens(void) {
    pinpool_t *pool = open_soft(8 << 20), *other = open_soft(8 << 20);
    size_t lens[] = {1, 64, 100, 4096, 5000, 70000, 1 << 20};
    pinpool_stats_t stats = {.size = sizeof stats};
    for (size_t i = 0; i < sizeof lens / sizeof *lens; i++) {
        pinpool_buf_t buf, back, none = {.len = 77};
        uint64_t token, again;
        ANSWERS(pinpool_alloc(pool, lens[i], &buf), PINPOOL_OK);
        memset(buf.addr, 0x5a, buf.len);
        ANSWERS(pinpool_into_token(other, buf.addr, &token), PINPOOL_FOREIGN);
        ANSWERS(pinpool_into_token(pool, (char *)buf.addr + 1, &token), PINPOOL_INTERIOR);
        ANSWERS(pinpool_into_token(pool, buf.addr, &token), PINPOOL_OK);
        CHECK(token >> 63 == 0);
        ANSWERS(pinpool_into_token(pool, buf.addr, &again), PINPOOL_NOT_OUT);
        ANSWERS(pinpool_free(pool, buf.addr), PINPOOL_NOT_OUT);
        ANSWERS(pinpool_from_token(other, token, &none), PINPOOL_TOKEN_FOREIGN);
        ANSWERS(pinpool_stats(pool, &stats), PINPOOL_OK);
        CHECK(stats.in_flight == 1 && stats.live_buffers == 1);
        ANSWERS(pinpool_close(pool), PINPOOL_LIVE);
        ANSWERS(pinpool_from_token(pool, token, &back), PINPOOL_OK);
        CHECK(back.addr == buf.addr && back.lkey == buf.lkey && back.len >= buf.len);
        CHECK(((char *)back.addr)[lens[i] - 1] == 0x5a);
        ANSWERS(pinpool_from_token(pool, token, &none), PINPOOL_TOKEN_STALE);
        /* The next flight of the same buffer has another token; the old one does not redeem it. */
        ANSWERS(pinpool_into_token(pool, back.addr, &again), PINPOOL_OK);
        CHECK(again != token);
        ANSWERS(pinpool_from_token(pool, token, &none), PINPOOL_TOKEN_STALE);
        CHECK(none.len == 77);
        ANSWERS(pinpool_from_token(pool, again, &back), PINPOOL_OK);
        ANSWERS(pinpool_free(pool, back.addr), PINPOOL_OK);
        ANSWERS(pinpool_from_token(pool, again, &back), PINPOOL_TOKEN_STALE);
    }
    /* No invented number gives a buffer when none is in flight. */
    uint64_t number = 88172645463325252u;
    pinpool_buf_t buf;
    int seen[32] = {0};
    for (int i = 0; i < 20000; i++) {
        number ^= number << 13;
        number ^= number >> 7;
        number ^= number << 17;
        uint64_t tried = i % 2 == 0 ? number : number % (1u << 20) | (number >> 40 & 0x1ff) << 54;
        int answer = pinpool_from_token(pool, tried, &buf);
        CHECK(answer >= PINPOOL_TOKEN_STALE && answer <= PINPOOL_TOKEN_INVALID);
        seen[answer]++;
    }
    CHECK(seen[PINPOOL_TOKEN_FOREIGN] > 0 && seen[PINPOOL_TOKEN_STALE] > 0);
    ANSWERS(pinpool_close(other), PINPOOL_OK);
    ANSWERS(pinpool_close(pool), PINPOOL_OK);
}

static struct {
    pinpool_t *pool;
    uint64_t tokens[SHARED];
    pthread_barrier_t barrier;
    int redeemed[THREADS];
} flights;

static void *redeemer(void *arg) {
    int me = (int)(intptr_t)arg;
    pthread_barrier_wait(&flights.barrier);
    for (int i = 0; i < SHARED; i++) {
        pinpool_buf_t buf;
        int answer = pinpool_from_token(flights.pool, flights.tokens[i], &buf);
        CHECK(answer == PINPOOL_OK || answer == PINPOOL_TOKEN_STALE);
        if (answer == PINPOOL_OK) {
            flights.redeemed[me]++;
            ANSWERS(pinpool_free(flights.pool, buf.addr), PINPOOL_OK);
        }
    }
    return NULL;
}

static void one_redeems(void) {
    flights.pool = open_soft(16 << 20);
    pthread_t ids[THREADS];
    for (int i = 0; i < SHARED; i++) {
        pinpool_buf_t buf;
        ANSWERS(pinpool_alloc(flights.pool, i % 2 == 0 ? 4096 : 64, &buf), PINPOOL_OK);
        ANSWERS(pinpool_into_token(flights.pool, buf.addr, &flights.tokens[i]), PINPOOL_OK);
    }
    CHECK(pthread_barrier_init(&flights.barrier, NULL, THREADS) == 0);
    for (intptr_t i = 0; i < THREADS; i++) CHECK(pthread_create(&ids[i], NULL, redeemer, (void *)i) == 0);
    int redeemed = 0;
    for (int i = 0; i < THREADS; i++) {
        CHECK(pthread_join(ids[i], NULL) == 0);
        redeemed += flights.redeemed[i];
    }
    CHECK(redeemed == SHARED);
    ANSWERS(pinpool_close(flights.pool), PINPOOL_OK);
}

static void *waiter(void *arg) {
    pinpool_buf_t *buf = arg;
    ANSWERS(pinpool_alloc_wait(race.pool, buf->len, UINT64_MAX, buf), PINPOOL_OK);
    return NULL;
}

static void waits(void) {
    pinpool_stats_t stats = {.size = sizeof stats};
    pinpool_buf_t all, none = {.len = 77}, waited = {.len = 4096};
    pthread_t id;
    race.pool = open_soft(1 << 20);
    ANSWERS(pinpool_alloc(race.pool, 1 << 20, &all), PINPOOL_OK);
    ANSWERS(pinpool_alloc_wait(race.pool, 64, 0, &none), PINPOOL_TIMEOUT);
    ANSWERS(pinpool_alloc_wait(race.pool, 64, 3000000, &none), PINPOOL_TIMEOUT);
    CHECK(strstr(pinpool_last_error(), "waited") != NULL && none.len == 77);
    /* What no wait can bring is refused at once. */
    ANSWERS(pinpool_alloc_wait(race.pool, 2 << 20, UINT64_MAX, &none), PINPOOL_TOO_LARGE);
    CHECK(pthread_create(&id, NULL, waiter, &waited) == 0);
    do {
        sched_yield();
        ANSWERS(pinpool_stats(race.pool, &stats), PINPOOL_OK);
    } while (stats.waiting == 0);
    ANSWERS(pinpool_free(race.pool, all.addr), PINPOOL_OK);
    CHECK(pthread_join(id, NULL) == 0);
    memset(waited.addr, 1, waited.len);
    ANSWERS(pinpool_free(race.pool, waited.addr), PINPOOL_OK);
    ANSWERS(pinpool_stats(race.pool, &stats), PINPOOL_OK);
    CHECK(stats.waiting == 0 && stats.waits >= 2 && stats.wait_time_ns >= 3000000 && stats.live == 0);
    ANSWERS(pinpool_close(race.pool), PINPOOL_OK);
}

/* Memory that comes with growth serves those who wait for it. */
static void growth(void) {
    pinpool_options_t o = soft(1 << 20);
    pinpool_t *pool;
    pinpool_stats_t stats = {.size = sizeof stats};
    o.arena_size = 1 << 20;
    o.max_capacity = 1 << 19;
    ANSWERS(pinpool_open(&o, &pool), PINPOOL_INVALID);
    o.max_capacity = 4 << 20;
    o.low_watermark = 4 << 20;
    ANSWERS(pinpool_open(&o, &pool), PINPOOL_INVALID);
    o.low_watermark = 64 << 10;
    ANSWERS(pinpool_open(&o, &pool), PINPOOL_OK);
    pinpool_buf_t bufs[4];
    for (int i = 0; i < 4; i++) ANSWERS(pinpool_alloc_wait(pool, 1 << 20, UINT64_MAX, &bufs[i]), PINPOOL_OK);
    ANSWERS(pinpool_stats(pool, &stats), PINPOOL_OK);
    CHECK(stats.capacity == 4 << 20 && stats.max_capacity == 4 << 20 && stats.arenas == 4);
    ANSWERS(pinpool_free_many(pool, bufs, 4), PINPOOL_OK);
    ANSWERS(pinpool_close(pool), PINPOOL_OK);
}

static void shares(void) {
    const size_t block = 64 << 10, reserve = 256 << 10;
    pinpool_reserve_t wanted[] = {{"send", reserve}, {"receive", reserve}};
    pinpool_options_t o = soft(1 << 20);
    pinpool_t *pool = NULL;
    const pinpool_share_t *send = NULL, *receive = NULL, *none = (const pinpool_share_t *)&o;
    pinpool_buf_t buf, bufs[64];
    pinpool_share_stats_t books;
    size_t n = 0, i;
    uint64_t token;

    o.shares = wanted;
    o.share_count = 2;
    wanted[0].name = NULL;
    ANSWERS(pinpool_open(&o, &pool), PINPOOL_NULL);
    wanted[0].name = "receive";
    CHECK(pinpool_open(&o, &pool) != PINPOOL_OK && pool == NULL);
    wanted[0].name = "send";
    wanted[0].bytes = 64 << 20;
    CHECK(pinpool_open(&o, &pool) != PINPOOL_OK && pool == NULL);
    wanted[0].bytes = reserve;
    o.shares = NULL;
    ANSWERS(pinpool_open(&o, &pool), PINPOOL_NULL);
    o.shares = wanted;
    ANSWERS(pinpool_open(&o, &pool), PINPOOL_OK);

    ANSWERS(pinpool_share(NULL, "send", &send), PINPOOL_NULL);
    ANSWERS(pinpool_share(pool, NULL, &send), PINPOOL_NULL);
    ANSWERS(pinpool_share(pool, "send", NULL), PINPOOL_NULL);
    ANSWERS(pinpool_share(pool, "sent", &none), PINPOOL_INVALID);
    CHECK(none == NULL && strstr(pinpool_last_error(), "send, receive") != NULL);
    ANSWERS(pinpool_share(pool, "send", &send), PINPOOL_OK);
    ANSWERS(pinpool_share(pool, "receive", &receive), PINPOOL_OK);
    CHECK(send != NULL && receive != NULL && send != receive);
    ANSWERS(pinpool_share_alloc(NULL, 64, &buf), PINPOOL_NULL);
    ANSWERS(pinpool_share_alloc(send, 64, NULL), PINPOOL_NULL);
    ANSWERS(pinpool_share_alloc_wait(NULL, 64, 0, &buf), PINPOOL_NULL);
    ANSWERS(pinpool_share_stats(send, NULL), PINPOOL_NULL);
    books.size = 1;
    ANSWERS(pinpool_share_stats(send, &books), PINPOOL_INVALID);

    /* One direction takes all that it can get, and the other still has what it reserved. */
    while (pinpool_share_alloc(send, block, &bufs[n]) == PINPOOL_OK) n++;
    CHECK(n >= reserve / block && n < 16);
    ANSWERS(pinpool_alloc(pool, block, &buf), PINPOOL_EXHAUSTED);
    ANSWERS(pinpool_share_alloc_wait(send, block, 1000, &buf), PINPOOL_TIMEOUT);
    for (i = 0; i < reserve / block; i++) ANSWERS(pinpool_share_alloc(receive, block, &bufs[n + i]), PINPOOL_OK);
    ANSWERS(pinpool_share_alloc(receive, block, &buf), PINPOOL_EXHAUSTED);
    books.size = sizeof books;
    ANSWERS(pinpool_share_stats(receive, &books), PINPOOL_OK);
    CHECK(books.reserved == reserve && books.live == reserve && books.live_buffers == reserve / block);
    CHECK(books.refused > 0 && books.ran_dry > 0 && books.waiting == 0);

    /* Freed through the pool, from whichever share; twice is told, as ever; tokens too. */
    n += reserve / block;
    ANSWERS(pinpool_into_token(pool, bufs[n - 1].addr, &token), PINPOOL_OK);
    ANSWERS(pinpool_free(pool, bufs[n - 1].addr), PINPOOL_NOT_OUT);
    ANSWERS(pinpool_from_token(pool, token, &bufs[n - 1]), PINPOOL_OK);
    ANSWERS(pinpool_from_token(pool, token, &buf), PINPOOL_TOKEN_STALE);
    ANSWERS(pinpool_close(pool), PINPOOL_LIVE);
    for (i = 0; i < n; i++) {
        ANSWERS(pinpool_free(pool, bufs[i].addr), PINPOOL_OK);
        ANSWERS(pinpool_free(pool, bufs[i].addr), PINPOOL_NOT_OUT);
    }
    ANSWERS(pinpool_share_stats(receive, &books), PINPOOL_OK);
    CHECK(books.live == 0 && books.live_buffers == 0);
    ANSWERS(pinpool_close(pool), PINPOOL_OK);
    ANSWERS(pinpool_share(pool, "send", &none), PINPOOL_CLOSED);
    ANSWERS(pinpool_share_alloc(send, 64, &buf), PINPOOL_CLOSED);
    ANSWERS(pinpool_share_alloc_wait(send, 64, 0, &buf), PINPOOL_CLOSED);
    ANSWERS(pinpool_share_stats(send, &books), PINPOOL_CLOSED);
}

static struct {
    int after_free, beyond_end, taken_down, others;
    char last[1024];
} told;

static void on_event(void *context, const char *kind, const char *message) {
    CHECK(context == &told && kind[0] != 0 && message[0] != 0);
    int *count = strcmp(kind, "written_after_free") == 0   ? &told.after_free
                 : strcmp(kind, "written_beyond_end") == 0 ? &told.beyond_end
                 : strcmp(kind, "taken_down") == 0         ? &told.taken_down
                                                           : &told.others;
    ++*count;
    if (count != &told.others && count != &told.taken_down) snprintf(told.last, sizeof told.last, "%s", message);
}

static void guards(void) {
    pinpool_options_t o = soft(1 << 20);
    pinpool_t *pool;
    pinpool_buf_t buf, back;
    pinpool_stats_t s = {.size = sizeof s};
    uint64_t token;
    size_t damaged = 9, needed = 0;
    char text[4096];

    o.guards = 1u << 31;
    ANSWERS(pinpool_open(&o, &pool), PINPOOL_INVALID);
    CHECK(strstr(pinpool_last_error(), "guards") != NULL);
    o.guards = PINPOOL_GUARD_POISON | PINPOOL_GUARD_CANARY | PINPOOL_GUARD_ZERO_ON_FREE;
    o.quarantine = 64 << 10;
    o.track_every = 1;
    o.on_event = on_event;
    o.event_context = &told;
    ANSWERS(pinpool_open(&o, &pool), PINPOOL_OK);
    CHECK(told.others > 0); /* it was built */

    ANSWERS(pinpool_alloc(pool, 1000, &buf), PINPOOL_OK);
    CHECK(buf.len == 1000);
    memset(buf.addr, 1, buf.len);
    ANSWERS(pinpool_outstanding(pool, text, sizeof text, &needed), PINPOOL_OK);
    CHECK(strncmp(text, "1 buffers out", 13) == 0 && needed == strlen(text) + 1);
    ANSWERS(pinpool_outstanding(pool, text, 4, NULL), PINPOOL_TRUNCATED);
    CHECK(strcmp(text, "1 b") == 0);
    ANSWERS(pinpool_outstanding(pool, NULL, 4, NULL), PINPOOL_NULL);
    ANSWERS(pinpool_outstanding(NULL, text, sizeof text, NULL), PINPOOL_NULL);

    /* All that a token says is the buffer's may be written. */
    ANSWERS(pinpool_into_token(pool, buf.addr, &token), PINPOOL_OK);
    ANSWERS(pinpool_from_token(pool, token, &back), PINPOOL_OK);
    CHECK(back.addr == buf.addr && back.len >= 1000);
    memset(back.addr, 2, back.len);
    ANSWERS(pinpool_free(pool, back.addr), PINPOOL_OK);
    CHECK(told.beyond_end == 0 && told.after_free == 0);

    /* In quarantine nobody has it; so a late write is found, and mended. */
    ((char *)buf.addr)[10] = 3;
    ANSWERS(pinpool_check_free(pool, NULL), PINPOOL_NULL);
    ANSWERS(pinpool_check_free(NULL, &damaged), PINPOOL_NULL);
    ANSWERS(pinpool_check_free(pool, &damaged), PINPOOL_OK);
    CHECK(damaged == 1 && told.after_free == 1 && strstr(told.last, "offset 10 of the buffer of 1000") != NULL);
    ANSWERS(pinpool_check_free(pool, &damaged), PINPOOL_OK);
    CHECK(damaged == 0);

    ANSWERS(pinpool_alloc(pool, 1000, &buf), PINPOOL_OK);
    for (size_t i = 0; i < buf.len; i++) CHECK(((char *)buf.addr)[i] == 0);
    ((char *)buf.addr)[1000] = 4;
    ANSWERS(pinpool_free(pool, buf.addr), PINPOOL_OK);
    CHECK(told.beyond_end == 1 && strstr(told.last, "offset 1000 of the buffer of 1000") != NULL);
    ANSWERS(pinpool_free(pool, buf.addr), PINPOOL_NOT_OUT);

    ANSWERS(pinpool_stats(pool, &s), PINPOOL_OK);
    CHECK(s.written_after_free == 1 && s.written_beyond_end == 1 && s.quarantined >= 2000 && s.live == 0);
    ANSWERS(pinpool_close(pool), PINPOOL_OK);
    CHECK(told.taken_down == 1 && told.after_free == 1 && told.beyond_end == 1);
    ANSWERS(pinpool_check_free(pool, &damaged), PINPOOL_CLOSED);
    ANSWERS(pinpool_outstanding(pool, text, sizeof text, NULL), PINPOOL_CLOSED);
}

static int registered, fail_at, released;

static int reg(void *context, void *addr, size_t len, size_t page, uint32_t access, uint64_t *handle,
               uint32_t *lkey, uint32_t *rkey) {
    CHECK(context == &registered && addr != NULL && len % page == 0 && access == 1);
    if (registered + 1 == fail_at) return ENOSPC;
    *handle = (uint64_t)++registered;
    *lkey = 100 + (uint32_t)registered;
    *rkey = 200 + (uint32_t)registered;
    return 0;
}

static int dereg(void *context, uint64_t handle) {
    CHECK(context == &registered && handle > 0);
    registered--;
    return 0;
}

static void release(void *context) {
    CHECK(context == &registered && registered == 0);
    released++;
}

static void callbacks(void) {
    pinpool_registrar_t r = {.context = &registered, .name = "mine", .register_memory = reg,
                             .deregister_memory = dereg, .release = release};
    pinpool_options_t o = soft(4 << 20);
    o.registrar = &r;
    o.arena_size = 1 << 20;
    pinpool_t *pool;
    pinpool_buf_t buf;
    ANSWERS(pinpool_open(&o, &pool), PINPOOL_OK);
    CHECK(registered == 4 && released == 0);
    ANSWERS(pinpool_alloc(pool, 4096, &buf), PINPOOL_OK);
    CHECK(buf.lkey > 100 && buf.lkey <= 104);
    ANSWERS(pinpool_free(pool, buf.addr), PINPOOL_OK);
    ANSWERS(pinpool_close(pool), PINPOOL_OK);
    CHECK(registered == 0 && released == 1);
    fail_at = 3;
    ANSWERS(pinpool_open(&o, &pool), PINPOOL_DEVICE);
    CHECK(registered == 0 && released == 2);
    CHECK(strstr(pinpool_last_error(), "mine") != NULL && strstr(pinpool_last_error(), "No space") != NULL);
}

int main(void) {
    CHECK(pinpool_last_error()[0] == 0);
    nulls();
    options();
    frees();
    after_close();
    callbacks();
    forked();
    threads();
    tokens();
    one_redeems();
    shares();
    guards();
    waits();
    growth();
    printf("misuse: every call answered (pinpool %s)\n", pinpool_version());
    return 0;
}
