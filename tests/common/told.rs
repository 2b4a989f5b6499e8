//! What guarded pools tell, and writing where nobody should, for the tests of guards.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::{
    fs::File,
    os::unix::fs::FileExt,
    sync::{Arc, Mutex},
};

use pinpool::{Builder, Damage, Event, Guards, Outstanding, Pool};

use crate::common::soft;

pub const MIB: usize = 1 << 20;

/// Writes bytes as a device does: by address, behind everybody's back.
pub fn late_write(addr: usize, bytes: &[u8]) {
    let memory = File::options().write(true).open("/proc/self/mem").unwrap();
    memory.write_all_at(bytes, addr as u64).unwrap();
}

/// Reads them so.
pub fn peek(addr: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    File::open("/proc/self/mem").unwrap().read_exact_at(&mut bytes, addr as u64).unwrap();
    bytes
}

/// What a pool has told.
#[derive(Clone, Default)]
pub struct Told(pub Arc<Mutex<Vec<(&'static str, Damage)>>>, pub Arc<Mutex<Vec<Outstanding>>>);

impl Told {
    pub fn hear(&self, builder: Builder) -> Builder {
        let told = self.clone();
        builder.on_event(move |event| match event {
            Event::WrittenAfterFree(damage) => {
                told.0.lock().unwrap().push(("free", (*damage).clone()));
            }
            Event::WrittenBeyondEnd(damage) => {
                told.0.lock().unwrap().push(("end", (*damage).clone()));
            }
            Event::StillOut(report) => told.1.lock().unwrap().push((*report).clone()),
            _ => {}
        })
    }

    pub fn take(&self) -> Vec<(&'static str, Damage)> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }

    /// The only one of that kind that was told.
    pub fn one(&self, kind: &str) -> Damage {
        let mut all = self.take();
        assert_eq!(all.len(), 1, "{all:?}");
        let (k, damage) = all.remove(0);
        assert_eq!(k, kind, "{damage}");
        damage
    }

    pub fn none(&self) {
        let all = self.take();
        assert!(all.is_empty(), "{all:?}");
    }
}

pub fn guarded(capacity: usize, guards: Guards) -> (Pool, Told) {
    let told = Told::default();
    (told.hear(soft(capacity).guards(guards)).build().unwrap(), told)
}
