//! Pairs on several threads at once. The slowest thread's time counts, or where they share processors
//! that from the first start to the last end, and is divided by all pairs: two threads that do not hinder
//! each other show half of what one shows.

use std::{
    sync::{Arc, Barrier},
    thread,
};

use super::{
    clock::ns_per_tick,
    contender::{Contender, Handle},
    cpu,
    measure::{Marks, Plan, Rep, Runner, Timed, median, percentile, time},
    pair::Pair,
};

/// Threads run longer than single cases do, since they never start at quite the same time.
const LONGER: usize = 5;
/// Pairs of one slice before it is known how many fit.
const FIRST: usize = 100;

pub(crate) struct Threads<C: Contender> {
    shared: Arc<C::Shared>,
    bytes: usize,
    threads: usize,
    plan: Plan,
    per_slice: Option<usize>,
}

impl<C: Contender> Threads<C>
where
    C::Shared: Send,
{
    pub(crate) fn new(shared: Arc<C::Shared>, bytes: usize, threads: usize, plan: Plan) -> Self {
        let slices = plan.slices * LONGER / threads.div_ceil(cpu::count()).min(LONGER);
        Self { shared, bytes, threads, plan: Plan { slices, ..plan }, per_slice: None }
    }

    fn run(&self, plan: Plan, per_slice: usize) -> Result<Vec<Marks>, String> {
        let ready = Barrier::new(self.threads);
        let one = |i: usize| -> Result<Marks, String> {
            cpu::pin(i);
            let pair = C::Handle::new(&self.shared).map(|handle| Pair::new(handle, self.bytes));
            let pair = pair.map(|mut pair| {
                pair.run(10_000);
                pair
            });
            ready.wait();
            let marks = pair.map(|mut pair| time(&mut pair, plan, per_slice));
            // Nobody gives its caches back while others are timed.
            ready.wait();
            marks
        };
        let one = &one;
        thread::scope(|s| {
            let all: Vec<_> = (0..self.threads).map(|i| s.spawn(move || one(i))).collect();
            let panicked = |_| "a thread panicked".to_owned();
            all.into_iter().map(|t| t.join().map_err(panicked)?).collect()
        })
    }
}

impl<C: Contender> Runner for Threads<C>
where
    C::Shared: Send,
{
    fn rep(&mut self) -> Result<Vec<Rep>, String> {
        let per_slice = match self.per_slice {
            Some(n) => n,
            None => {
                let short = Plan { slices: self.plan.slices.min(200), ..self.plan };
                let mut slices: Vec<f64> =
                    self.run(short, FIRST)?.iter().flat_map(Marks::slices).collect();
                let n = self.plan.slice_ns / median(&mut slices);
                *self.per_slice.insert((n as usize).max(1))
            }
        };
        let marks = self.run(self.plan, per_slice)?;
        // So many threads run at a time, and each slice counts for its share.
        let abreast = self.threads.min(cpu::count()) as f64;
        let centre = if self.threads <= cpu::count() {
            // Each has a processor to itself, and the slowest is the last.
            marks.iter().map(Marks::mean).fold(0.0, f64::max) / abreast
        } else {
            let first = marks.iter().map(Marks::first).min().unwrap_or(0);
            let last = marks.iter().map(Marks::last).max().unwrap_or(0);
            let pairs = (self.threads * self.plan.slices * per_slice) as f64;
            (last - first) as f64 * ns_per_tick() / pairs
        };
        let mut slices: Vec<f64> = marks.iter().flat_map(Marks::slices).collect();
        slices.iter_mut().for_each(|ns| *ns /= abreast);
        slices.sort_by(f64::total_cmp);
        let (p99, p999) = (percentile(&slices, 0.99), percentile(&slices, 0.999));
        Ok(vec![Rep { min: centre, centre, p99, p999 }])
    }
}
