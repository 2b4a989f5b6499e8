//! The one switch between the standard library's atomics and loom's, and the asymmetric barrier.

#[cfg(not(loom))]
pub(crate) use std::sync::atomic;

#[cfg(loom)]
pub(crate) use loom::sync::atomic;

#[cfg(not(loom))]
pub(crate) use crate::lock::Mutex;

/// loom's mutex with the interface of the one in `lock`.
#[cfg(loom)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

#[cfg(loom)]
impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}

#[cfg(not(loom))]
pub(crate) use std::thread;

#[cfg(loom)]
pub(crate) use loom::thread;

/// The owner's half of the asymmetric barrier: keeps the compiler from moving a load above an earlier
/// store. The processor is held to it by the other half, [`heavy_barrier`].
#[inline(always)]
pub(crate) fn light_barrier() {
    #[cfg(not(loom))]
    atomic::compiler_fence(atomic::Ordering::SeqCst);
    // loom knows no membarrier; a fence on both sides is what the pair amounts to.
    #[cfg(loom)]
    atomic::fence(atomic::Ordering::SeqCst);
}

/// The thief's half: when it returns, every other thread of the process has executed a full barrier.
/// Where [`asymmetric_barrier_available`] says no it does nothing, and nobody may rely on it.
pub(crate) fn heavy_barrier() {
    #[cfg(not(loom))]
    crate::sys::membarrier::all_threads();
    #[cfg(loom)]
    atomic::fence(atomic::Ordering::SeqCst);
}

/// Where threads sleep until a word changes: the kernel's queue for that word, or loom's model of it.
#[cfg(not(loom))]
#[derive(Debug)]
pub(crate) struct Sleepers;

#[cfg(not(loom))]
impl Sleepers {
    /// Sleeps if the word has this value, until woken. The look and the falling asleep are one step to those
    /// who wake. May return without either.
    pub(crate) fn wait(&self, word: &atomic::AtomicU32, value: u32) {
        crate::sys::futex::wait(word, value);
    }

    /// Wakes one of those that sleep for the word.
    pub(crate) fn wake_one(&self, word: &atomic::AtomicU32) {
        crate::sys::futex::wake_one(word);
    }
}

#[cfg(loom)]
#[derive(Debug)]
pub(crate) struct Sleepers(loom::sync::Mutex<()>, loom::sync::Condvar);

#[cfg(loom)]
impl Sleepers {
    pub(crate) fn new() -> Self {
        Self(loom::sync::Mutex::new(()), loom::sync::Condvar::new())
    }

    pub(crate) fn wait(&self, word: &atomic::AtomicU32, value: u32) {
        let queue = self.0.lock();
        if word.load(atomic::Ordering::Relaxed) == value {
            let _ = queue.and_then(|queue| self.1.wait(queue));
        }
    }

    pub(crate) fn wake_one(&self, _: &atomic::AtomicU32) {
        let _queue = self.0.lock();
        self.1.notify_one();
    }
}

/// Whether the kernel offers the heavy half. Registers the process for it on the first call.
#[cfg(not(loom))]
pub(crate) fn asymmetric_barrier_available() -> bool {
    crate::sys::membarrier::available()
}

/// Keeps an address in a register of its own: accesses through it are then plain `[register + constant]`.
/// Through the segment register or with an index they are slower, and, what counts more, a load that
/// comes soon after a store to the same place does not get its value by the processor's short cut (seen
/// on Intel: 3.6 ns a pair with an index, 1.8 without).
#[inline(always)]
#[cfg(not(loom))]
pub(crate) fn in_register<T>(mut ptr: *const T) -> *const T {
    // It is the address that must stay in a register, not what it points to, so `nomem` is meant.
    #[allow(clippy::pointers_in_nomem_asm_block)]
    #[cfg(not(miri))]
    // SAFETY: no instructions; the operand goes in and comes out unchanged.
    unsafe {
        std::arch::asm!("/* {0} */", inout(reg) ptr, options(pure, nomem, nostack, preserves_flags));
    }
    ptr
}

/// Marks the block that it is called in as unlikely: the compiler weighs branches to blocks that call cold
/// functions, and does so before this one vanishes.
#[cold]
#[inline(always)]
#[cfg(not(loom))]
pub(crate) const fn unlikely() {}
