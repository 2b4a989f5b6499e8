//! Threads that come and go: entering a thread's magazines into the pool's list, and taking back what is in
//! them when it ends.

use std::sync::{Arc, Weak};

use super::Core;
use crate::magazine::Local;

impl Core {
    /// Enters a thread's magazines into the registry; `None` once the pool is closed.
    pub(crate) fn attach(&self, local: &Arc<Local>) -> Option<Weak<Self>> {
        let mut registry = self.registry.lock();
        if registry.closed {
            return None;
        }
        registry.locals.push(local.clone());
        Some(self.own.clone())
    }

    /// Takes back what a thread that ends has in its magazines.
    pub(crate) fn detach(&self, local: &Arc<Local>) {
        if self.foreign() {
            return;
        }
        let mut registry = self.registry.lock();
        registry.locals.retain(|l| !Arc::ptr_eq(l, local));
        // SAFETY: called by the thread's own destructor, outside its gate.
        let mut hold = unsafe { local.hold_as_owner() };
        if hold.attached() {
            // Asked under the registry's lock, which whoever emptied the caches had before.
            let waited_for = self.waiters.any();
            hold.drain(&self.depot, |class, m| {
                let kept = if waited_for { Err(m) } else { self.depot.put_full(class, m) };
                if let Err(m) = kept {
                    self.empty_out(class, m);
                }
            });
            hold.detach();
        }
        drop(hold);
        drop(registry);
        self.wake_waiters();
    }
}
