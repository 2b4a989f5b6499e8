//! Calls of code that is not the crate's own (hooks, wakers, registrars), which may panic where nothing may: in a drop,
//! on the grower's thread, between two steps. Keeps the panic in; what one means is its caller's business.

use std::{
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// Runs `f`; `None` if it panicked.
///
/// Whatever `f` may have left half done is the caller's to judge.
pub(crate) fn contained<T>(f: impl FnOnce() -> T) -> Option<T> {
    let payload = match catch_unwind(AssertUnwindSafe(f)) {
        Ok(done) => return Some(done),
        Err(payload) => payload,
    };
    // What it panicked with may panic in turn when it is dropped, and so on; text does not, and of anything else the
    // second is left alone.
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(payload)))
        && !again.is::<&'static str>()
        && !again.is::<String>()
    {
        mem::forget(again);
    }
    None
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::panic::panic_any;

    use super::*;

    /// Panics when it is dropped.
    struct Twice;

    impl Drop for Twice {
        fn drop(&mut self) {
            panic!("dropping what it panicked with");
        }
    }

    #[test]
    fn a_panic_stays_inside_whatever_its_payload_does() {
        assert_eq!(contained(|| 7), Some(7));
        assert_eq!(contained(|| panic!("once")), None::<()>);
        assert_eq!(contained(|| panic_any(Twice)), None::<()>);
    }
}
