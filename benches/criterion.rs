//! `cargo bench --bench criterion`: the cases of `pinpool bench alloc` and `churn` that one thread runs,
//! under Criterion: for whoever changes the hot path and wants to know what that did, against the last run
//! (`-- pool` for the pool alone, `-- --save-baseline NAME`, `-- --baseline NAME`).
//!
//! Cases, contenders and checks are the contest's own (`src/bin/pinpool/bench/contest`). There the contenders
//! take turns, which makes ratios sure; here each runs by itself, which makes changes over time visible.
// What other users of the contest need is not used here.
#![allow(dead_code, unused_imports)]

#[path = "../src/bin/pinpool/bench/contest/mod.rs"]
mod contest;

use std::time::Instant;

use contest::{
    Group,
    batch::{Batch, Lifo, Shuffled},
    bed::Bed,
    check::check,
    churn::Churn,
    contender::{Contender, Handle},
    cpu,
    measure::Timed,
    pair::Pair,
    registry::{self, Visit},
    spec::{Case, Spec},
};
use criterion::{
    BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main,
    measurement::WallTime,
};

/// Times one case of one contender.
struct Time<'a, 'c> {
    group: &'a mut BenchmarkGroup<'c, WallTime>,
    bed: &'a Bed,
    spec: &'a Spec,
}

impl Time<'_, '_> {
    fn time<T: Timed>(self, name: &str, mut timed: T) {
        self.group.throughput(Throughput::Elements(T::OPS as u64));
        self.group.bench_function(BenchmarkId::new(name, self.spec.bytes), |bencher| {
            bencher.iter_custom(|n| {
                let start = Instant::now();
                timed.run(n as usize);
                start.elapsed()
            });
        });
    }
}

impl Visit for Time<'_, '_> {
    type Out = Result<(), String>;

    fn visit<C: Contender>(self) -> Result<(), String>
    where
        C::Shared: Send,
    {
        let spec = self.spec;
        if !C::runs(spec) {
            return Ok(());
        }
        let shared = C::shared(self.bed, spec)?;
        check::<C::Handle>(&shared, spec)?;
        let handle = C::Handle::new(&shared)?;
        match spec.case {
            Case::Pair => self.time(C::NAME, Pair::new(handle, spec.bytes)),
            Case::BatchLifo => self.time(C::NAME, Lifo(Batch::new(handle, spec.bytes))),
            Case::BatchRandom => self.time(C::NAME, Shuffled(Batch::new(handle, spec.bytes))),
            Case::Churn => self.time(C::NAME, Churn::new(handle, spec)),
            Case::Burst | Case::Handoff | Case::KeysOf | Case::Fill => {}
        }
        Ok(())
    }
}

fn all(criterion: &mut Criterion) {
    cpu::pin(0);
    let specs = [Group::Alloc, Group::Churn].into_iter().flat_map(Group::specs);
    let cases = [Case::Pair, Case::BatchLifo, Case::BatchRandom, Case::Churn];
    let specs: Vec<Spec> = specs.filter(|s| cases.contains(&s.case)).collect();
    for case in cases {
        let mut group = criterion.benchmark_group(case.name());
        for spec in specs.iter().filter(|s| s.case == case) {
            let bed = Bed::new(spec.capacity(false), spec.arenas);
            for (name, ..) in registry::ALL {
                let time = Time { group: &mut group, bed: &bed, spec };
                // Not in this program without the feature `rivals`; the tuned one never.
                let done = registry::with(name, time).unwrap_or(Ok(()));
                done.unwrap_or_else(|why| panic!("{name}, {}: {why}", case.name()));
            }
        }
        group.finish();
    }
}

criterion_group!(benches, all);
criterion_main!(benches);
