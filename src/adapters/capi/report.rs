//! What can be looked at from C: the books, and the doctor's text.

use std::{
    ffi::{c_char, c_int},
    ptr::{self, NonNull},
    time::Duration,
};

use super::{
    fail::{PINPOOL_INVALID, PINPOOL_TRUNCATED, answered, code_of_build, fail, null, place},
    options::{Wanted, pinpool_options_t},
    pool::pinpool_t,
};
use crate::doctor::{DoctorOptions, doctor};

/// Where a pool's bytes are. At a quiet point live + cached + free + unused = capacity.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pinpool_stats_t {
    /// Bytes of this struct, set by the caller before the call, so that it can grow.
    pub size: usize,
    /// Bytes of all arenas.
    pub capacity: usize,
    /// Bytes of blocks that are out.
    pub live: usize,
    /// Bytes of free blocks in caches.
    pub cached: usize,
    /// Bytes of free blocks in slabs.
    pub free_bytes: usize,
    /// Bytes of free runs, and what slabs leave over.
    pub unused: usize,
    /// How many buffers are out.
    pub live_buffers: usize,
    /// The longest free run, in bytes.
    pub largest_free: usize,
    /// How many arenas there are.
    pub arenas: usize,
    /// How many register calls the pool has made.
    pub register_calls: u64,
    /// Bytes that RDMA has pinned for the whole process (VmPin).
    pub pinned: u64,
    /// RLIMIT_MEMLOCK, soft; UINT64_MAX is unlimited.
    pub memlock_limit: u64,
    /// Bytes of the allocator's own tables, all outside registered memory.
    pub table_bytes: usize,
    /// Bytes that the pool may grow to.
    pub max_capacity: usize,
    /// How many of the buffers that are out are out as tokens.
    pub in_flight: usize,
    /// How many calls wait for memory now.
    pub waiting: usize,
    /// How many have waited or do, over the pool's life.
    pub waits: u64,
    /// How long those that wait no longer did, together, in nanoseconds.
    pub wait_time_ns: u64,
    /// In how many buffers' memory somebody was found to have written after their free (`PINPOOL_GUARD_POISON`).
    pub written_after_free: u64,
    /// How many buffers were found to be written beyond their end (`PINPOOL_GUARD_CANARY`).
    pub written_beyond_end: u64,
    /// Bytes that the quarantine keeps back; part of `cached`.
    pub quarantined: usize,
}

/// Sums up where the pool's bytes are. Takes locks, and sends every thread through its slow path once.
///
/// # Safety
/// `pool` is null or came from `pinpool_open`, `stats` is null or points to a struct whose `size` is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_stats(
    pool: *const pinpool_t,
    stats: *mut pinpool_stats_t,
) -> c_int {
    answered(|| {
        // SAFETY: passed on.
        let pool = unsafe { pinpool_t::get(pool) }?;
        // SAFETY: passed on.
        let stats = unsafe { place_for_books(stats) }?;
        let s = pool.stats();
        let found = pinpool_stats_t {
            size: size_of::<pinpool_stats_t>(),
            capacity: s.capacity,
            live: s.live,
            cached: s.cached,
            free_bytes: s.free,
            unused: s.unused,
            live_buffers: s.live_buffers,
            largest_free: s.largest_free,
            arenas: s.arenas,
            register_calls: s.register_calls,
            pinned: s.pinned,
            memlock_limit: s.memlock_limit.unwrap_or(u64::MAX),
            table_bytes: s.table_bytes,
            max_capacity: s.max_capacity,
            in_flight: s.in_flight,
            waiting: s.waiting,
            waits: s.waits,
            wait_time_ns: nanos(s.wait_time),
            written_after_free: s.guards.written_after_free,
            written_beyond_end: s.guards.written_beyond_end,
            quarantined: s.guards.quarantined,
        };
        // SAFETY: not null, and of this version, by its size.
        unsafe { stats.write(found) };
        Ok(())
    })
}

/// A struct of the caller's for books, of the version that this library knows.
///
/// # Safety
/// `stats` is null or points to a struct that begins with its size, which is set.
pub(super) unsafe fn place_for_books<T>(stats: *mut T) -> Result<NonNull<T>, c_int> {
    let stats = place(stats, "the place for the books")?;
    let known = size_of::<T>();
    // SAFETY: not null, and every version of the struct begins with its size (contract).
    let size = unsafe { stats.cast::<usize>().read() };
    if size == known {
        return Ok(stats);
    }
    Err(fail(PINPOOL_INVALID, format_args!("stats.size is {size}, this library knows {known}")))
}

/// A time as C has it.
pub(super) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Looks the machine over for the pool that `options` describe, without building it, and writes a text for
/// people to `text`, zero byte included.
///
/// `*needed`, if not null, is set to the bytes that the whole text takes; `PINPOOL_TRUNCATED` says that
/// `room` was less. `*fit`, if not null, is set to 1 if such a pool can be built here, else to 0.
///
/// # Safety
/// `options` is as for `pinpool_open`; `text` has `room` bytes, or is null with `room` 0; the others are
/// null or point to numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_doctor(
    options: *const pinpool_options_t,
    text: *mut c_char,
    room: usize,
    needed: *mut usize,
    fit: *mut c_int,
) -> c_int {
    answered(|| {
        if text.is_null() && room > 0 {
            return Err(null("the place for the text"));
        }
        // SAFETY: passed on.
        let wanted = unsafe { Wanted::read(options) }?;
        let report = doctor(&wanted.doctor_options()).map_err(|e| fail(code_of_build(&e), e))?;
        if !fit.is_null() {
            // SAFETY: not null, and so a number of the caller's (contract).
            unsafe { fit.write(c_int::from(report.is_fit())) };
        }
        // SAFETY: `text` has `room` bytes, `needed` is null or a number (contract).
        unsafe { write_text(&report.to_string(), text, room, needed) }
    })
}

/// Writes as much of a text as there is room for, with a zero byte, and says how much room all of it takes.
///
/// # Safety
/// `text` has `room` bytes, or `room` is 0; `needed` is null or points to a number.
pub(super) unsafe fn write_text(
    found: &str,
    text: *mut c_char,
    room: usize,
    needed: *mut usize,
) -> Result<(), c_int> {
    let all = found.len() + 1;
    if !needed.is_null() {
        // SAFETY: not null, and so a number of the caller's (contract).
        unsafe { needed.write(all) };
    }
    if room > 0 {
        let n = found.len().min(room - 1);
        // SAFETY: `text` has `room` bytes, which is more than `n`; they overlap nothing of ours.
        unsafe {
            ptr::copy_nonoverlapping(found.as_ptr().cast(), text, n);
            text.add(n).write(0);
        }
    }
    if all > room {
        let message = format_args!("the text takes {all} bytes, there is room for {room}");
        return Err(fail(PINPOOL_TRUNCATED, message));
    }
    Ok(())
}

impl Wanted {
    fn doctor_options(&self) -> DoctorOptions<'_> {
        DoctorOptions {
            device: Some(&self.device),
            capacity: self.capacity,
            arena_size: self.arena_size,
            pages: self.pages,
            access: self.access,
            numa: self.numa,
            ..DoctorOptions::default()
        }
    }
}
