//! 1,024 buffers out, then all back, every operation timed by itself. The clock's own time is in each;
//! the floor shows how much that is.

use super::{
    clock::{ns_per_tick, ticks},
    contender::{Handle, out},
    measure::{Plan, Rep, Runner, percentile},
    opaque::unknown,
    spec::BURST,
};

/// A repetition has one burst for so many slices of the plan.
const SLICES: usize = 32;

pub(crate) struct Burst<H: Handle> {
    handle: H,
    bytes: usize,
    rounds: usize,
    held: Vec<H::Held>,
    taken: Vec<u32>,
    put: Vec<u32>,
}

impl<H: Handle> Burst<H> {
    pub(crate) fn new(handle: H, bytes: usize, plan: Plan) -> Self {
        let rounds = (plan.slices / SLICES).max(8);
        let room = || Vec::with_capacity(rounds * BURST);
        let held = Vec::with_capacity(BURST);
        Self { handle, bytes, rounds, held, taken: room(), put: room() }
    }

    #[inline(never)]
    fn run(&mut self) {
        self.handle.begin();
        for _ in 0..BURST {
            let bytes = unknown(self.bytes);
            let start = ticks();
            let held = out(&mut self.handle, bytes);
            self.taken.push((ticks() - start) as u32);
            self.held.push(held);
        }
        for held in self.held.drain(..) {
            let bytes = unknown(self.bytes);
            let start = ticks();
            self.handle.put(held, bytes);
            self.put.push((ticks() - start) as u32);
        }
    }
}

fn summary(ticks: &[u32]) -> Rep {
    let mut ns: Vec<f64> = ticks.iter().map(|&t| f64::from(t) * ns_per_tick()).collect();
    ns.sort_by(f64::total_cmp);
    Rep {
        min: ns.first().copied().unwrap_or(f64::NAN),
        centre: percentile(&ns, 0.5),
        p99: percentile(&ns, 0.99),
        p999: percentile(&ns, 0.999),
    }
}

impl<H: Handle> Runner for Burst<H> {
    fn rep(&mut self) -> Result<Vec<Rep>, String> {
        // The samples' own pages come first.
        self.taken.clear();
        self.put.clear();
        self.run();
        self.taken.clear();
        self.put.clear();
        for _ in 0..self.rounds {
            self.run();
        }
        Ok(vec![summary(&self.taken), summary(&self.put)])
    }
}
