//! Threads that come and go: entering a thread's magazines into the pool's list, and taking back what is in
//! them when it ends.

use std::sync::{Arc, Weak};

use super::Core;
use crate::magazine::Local;

impl Core {
    /// Enters a thread's magazines into the registry; `None` once the pool is closed.
    pub(crate) fn attach(&self, local: &Arc<Local>) -> Option<Weak<Self>> {
        // Room is made without the lock (`lock.rs`); what was outgrown goes without it, too.
        let mut roomy = Vec::new();
        loop {
            let mut registry = self.registry.lock();
            if registry.closed {
                return None;
            }
            let len = registry.locals.len();
            if len == registry.locals.capacity() {
                if len >= roomy.capacity() {
                    drop(registry);
                    roomy = Vec::with_capacity(2 * len + 4);
                    continue;
                }
                roomy.append(&mut registry.locals);
                std::mem::swap(&mut roomy, &mut registry.locals);
            }
            registry.locals.push(local.clone());
            return Some(self.own.clone());
        }
    }

    /// Takes back what a thread that ends has in its magazines.
    pub(crate) fn detach(&self, local: &Arc<Local>) {
        if self.foreign() {
            return;
        }
        let mut registry = self.registry.lock();
        registry.locals.retain(|l| !Arc::ptr_eq(l, local));
        // SAFETY: called by the thread's own destructor, outside all gates.
        let mut hold = unsafe { local.hold_as_owner(&self.depot) };
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
