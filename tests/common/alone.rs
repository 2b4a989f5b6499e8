//! One test at a time, where what is looked at is the whole process's (mappings, `VmPin`, what calls were counted) or
//! the machine's (free hugepages).

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Waits until no other test of this program holds it.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
