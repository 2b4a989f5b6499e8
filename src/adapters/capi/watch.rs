//! Guards, tracking and rare events, as C asks for them and is told of them. What each does is the pool's business.

use std::ffi::{CString, c_char, c_int, c_void};

use super::{
    fail::{PINPOOL_INVALID, answered, fail, null},
    options::pinpool_options_t,
    pool::pinpool_t,
    report::write_text,
};
use crate::config::{Builder, Event, Guards, Track};

/// Fills memory with 0xdf while nobody has it, and looks whether it still does when it is handed out: finds writes
/// after free, a device's included.
pub const PINPOOL_GUARD_POISON: u32 = 1;
/// Puts bytes behind the length that was asked for, and looks for them at the free: finds writes beyond the end. The
/// `len` of a `pinpool_buf_t` is then what was asked for. Lengths that fill their block take the next larger one.
pub const PINPOOL_GUARD_CANARY: u32 = 2;
/// Erases what is freed before anybody else can have it; every buffer starts as zeros.
pub const PINPOOL_GUARD_ZERO_ON_FREE: u32 = 4;

/// Told of what is rare: a pool that was built, grew, could not grow, refused allocs, found damage, was taken down.
///
/// `kind` is its kind in a word (such as "grew", "written_after_free", "written_beyond_end"), `message` a text with the
/// numbers; both are valid during the call. It is called on any thread, on several at a time, and for damage and
/// refusals inside the alloc or free that met them. It must return.
pub type pinpool_on_event_t =
    Option<unsafe extern "C" fn(context: *mut c_void, kind: *const c_char, message: *const c_char)>;

/// Where events go.
#[derive(Clone, Copy)]
struct Hook {
    call: unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char),
    context: *mut c_void,
}

// SAFETY: the function may be called from any thread with its context (contract of `pinpool_options_t.on_event`).
unsafe impl Send for Hook {}
// SAFETY: several at a time, too (the same).
unsafe impl Sync for Hook {}

impl Hook {
    fn tell(&self, event: &Event<'_>) {
        let text = |s: String| CString::new(s.replace('\0', "\u{fffd}")).unwrap_or_default();
        let (kind, message) = (text(event.name().to_owned()), text(event.to_string()));
        // SAFETY: the caller's function with its own context; both texts end in a zero and live during the call.
        unsafe { (self.call)(self.context, kind.as_ptr(), message.as_ptr()) };
    }
}

/// The checked options that bear on watching.
pub(super) struct Watching {
    guards: Guards,
    track: Track,
    hook: Option<Hook>,
}

impl Watching {
    pub(super) fn read(o: &pinpool_options_t) -> Result<Self, c_int> {
        const ALL: u32 = PINPOOL_GUARD_POISON | PINPOOL_GUARD_CANARY | PINPOOL_GUARD_ZERO_ON_FREE;
        let unknown = o.guards & !ALL;
        if unknown != 0 {
            let text = format_args!("options.guards has unknown bits {unknown:#x}");
            return Err(fail(PINPOOL_INVALID, text));
        }
        let has = |bit| o.guards & bit != 0;
        let guards = Guards::new()
            .poison(has(PINPOOL_GUARD_POISON))
            .canary(has(PINPOOL_GUARD_CANARY))
            .zero_on_free(has(PINPOOL_GUARD_ZERO_ON_FREE))
            .quarantine(o.quarantine);
        let hook = o.on_event.map(|call| Hook { call, context: o.event_context });
        Ok(Self { guards, track: Track::every(o.track_every), hook })
    }

    pub(super) fn set(self, builder: Builder) -> Builder {
        let builder = builder.guards(self.guards).track(self.track);
        match self.hook {
            Some(hook) => builder.on_event(move |event| hook.tell(event)),
            None => builder,
        }
    }
}

/// Looks at all that was freed, in a pool with `PINPOOL_GUARD_POISON`, and sets `*damaged` to in how many buffers'
/// memory somebody has written since; each is told to `on_event`, and mended. 0 in a pool without.
///
/// # Safety
/// `pool` is null or came from `pinpool_open`, `damaged` is null or points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_check_free(pool: *const pinpool_t, damaged: *mut usize) -> c_int {
    answered(|| {
        // SAFETY: passed on.
        let pool = unsafe { pinpool_t::get(pool) }?;
        if damaged.is_null() {
            return Err(null("the place for the number"));
        }
        // SAFETY: not null, and so a number of the caller's (contract).
        unsafe { damaged.write(pool.check_free()) };
        Ok(())
    })
}

/// Writes to `text`, for people and with its zero byte, how many buffers are out; where `track_every` is set also which
/// calls asked for those that it remembers, on which thread, and how long ago.
///
/// `*needed`, if not null, is set to the bytes that the whole text takes; `PINPOOL_TRUNCATED` says that `room` was
/// less.
///
/// # Safety
/// `pool` is null or came from `pinpool_open`; `text` has `room` bytes, or is null with `room` 0; `needed` is null or
/// points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_outstanding(
    pool: *const pinpool_t,
    text: *mut c_char,
    room: usize,
    needed: *mut usize,
) -> c_int {
    answered(|| {
        // SAFETY: passed on.
        let pool = unsafe { pinpool_t::get(pool) }?;
        if text.is_null() && room > 0 {
            return Err(null("the place for the text"));
        }
        // SAFETY: `text` has `room` bytes, `needed` is null or a number (contract).
        unsafe { write_text(&pool.outstanding().to_string(), text, room, needed) }
    })
}
