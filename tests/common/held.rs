//! A registrar whose register calls can be held: for looking at a pool in the middle of one.
#![allow(dead_code, unreachable_pub)]

use std::{sync::Arc, thread};

use parking_lot::{Condvar, Mutex};
use pinpool::{
    Device, RegisterError,
    device::{DeviceInfo, FaultyRegistrar, MrHandle, MrRequest, Registrar, Registration},
};

/// Clones share everything, so keep one to hold with.
#[derive(Clone)]
pub struct Held {
    pub calls: FaultyRegistrar,
    state: Arc<(Mutex<State>, Condvar)>,
}

#[derive(Default)]
struct State {
    hold: bool,
    waiting: usize,
    panics: bool,
    /// The names of the threads that called.
    threads: Vec<String>,
}

impl Held {
    pub fn new(calls: FaultyRegistrar) -> Self {
        Self { calls, state: Arc::default() }
    }

    pub fn device(&self) -> Device {
        Device::custom(self.clone())
    }

    /// Has register calls wait from now on.
    pub fn hold(&self) {
        self.state.0.lock().hold = true;
    }

    /// Returns once a call waits.
    pub fn await_call(&self) {
        self.state.1.wait_while(&mut self.state.0.lock(), |s| s.waiting == 0);
    }

    /// Lets all go on.
    pub fn release(&self) {
        self.state.0.lock().hold = false;
        self.state.1.notify_all();
    }

    /// Has the next register call, or the one that waits, panic.
    pub fn panic_once(&self) {
        self.state.0.lock().panics = true;
    }

    pub fn threads(&self) -> Vec<String> {
        self.state.0.lock().threads.clone()
    }
}

// SAFETY: every call reaches the registrar behind it unchanged, later perhaps; or panics before that.
unsafe impl Registrar for Held {
    fn info(&self) -> DeviceInfo {
        self.calls.info()
    }

    unsafe fn register(&self, request: &MrRequest) -> Result<Registration, RegisterError> {
        let mut state = self.state.0.lock();
        state.threads.push(thread::current().name().unwrap_or_default().to_owned());
        state.waiting += 1;
        self.state.1.notify_all();
        self.state.1.wait_while(&mut state, |s| s.hold);
        let panics = std::mem::take(&mut state.panics);
        state.waiting -= 1;
        drop(state);
        assert!(!panics, "a registrar that panics");
        // SAFETY: the caller's guarantees, passed on.
        unsafe { self.calls.register(request) }
    }

    unsafe fn deregister(&self, handle: MrHandle) -> Result<(), RegisterError> {
        // SAFETY: the caller's guarantees, passed on.
        unsafe { self.calls.deregister(handle) }
    }
}
