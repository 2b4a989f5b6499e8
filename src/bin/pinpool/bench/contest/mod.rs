//! The contest: the pool against floors, general allocators and other pools, in one run, taking turns.
//!
//! `run` goes case by case. It sets the case up for every contender and checks each; then all take turns,
//! one repetition at a time, the first one changing, so that what disturbs the machine meets them alike.
//! This module knows nothing of command lines: the program and the benches of `cargo bench` all have it.

pub(crate) mod batch;
pub(crate) mod bed;
mod build;
mod burst;
pub(crate) mod check;
pub(crate) mod churn;
mod clock;
pub(crate) mod contender;
pub(crate) mod cpu;
mod fill;
mod floor;
mod general;
mod handoff;
mod keys_of;
pub(crate) mod measure;
pub(crate) mod opaque;
pub(crate) mod pair;
mod pools;
mod queues;
pub(crate) mod random;
pub(crate) mod registry;
mod report;
mod ring;
#[cfg(feature = "rivals")]
mod ruapc;
pub(crate) mod spec;
mod threads;
mod worker;

use std::{cell::RefCell, rc::Rc};

use self::{
    bed::Bed,
    build::{Build, FillUp},
    measure::{Plan, Rep, Runner, median},
    registry::{ALL, TUNED},
    report::{Ns, Row, Value},
    spec::{Case, Spec},
    worker::Worker,
};

pub(crate) use self::{
    report::{METHOD, Report},
    spec::Group,
};

/// What the user chose.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// Repetitions for each contender and case.
    pub(crate) reps: usize,
    /// Shorter repetitions, a smaller pool.
    pub(crate) quick: bool,
    /// Only these cases; all if empty.
    pub(crate) cases: Vec<String>,
    /// Only these contenders; all if empty.
    pub(crate) contenders: Vec<String>,
}

impl Options {
    /// Repetitions where the user says nothing.
    pub(crate) fn default_reps(quick: bool) -> usize {
        if quick { 3 } else { 11 }
    }

    /// Says which name is not one, and which there are.
    pub(crate) fn check(&self, groups: &[Group]) -> Result<(), String> {
        let list = |names: &[&str]| names.join(", ");
        let all: Vec<&str> = ALL.iter().map(|(name, ..)| *name).collect();
        if let Some(bad) = self.contenders.iter().find(|c| !all.contains(&c.as_str())) {
            return Err(format!("there is no contender {bad:?}; there are {}", list(&all)));
        }
        let mut cases: Vec<&str> =
            groups.iter().flat_map(|g| g.specs()).map(|s| s.case.name()).collect();
        cases.dedup();
        if let Some(bad) = self.cases.iter().find(|c| !cases.contains(&c.as_str())) {
            return Err(format!(
                "there is no case {bad:?} in this bench; there are {}",
                list(&cases)
            ));
        }
        match self.reps {
            0 => Err("at least one repetition must be asked for".to_owned()),
            _ => Ok(()),
        }
    }

    fn wants(&self, name: &str) -> bool {
        self.contenders.is_empty() || self.contenders.iter().any(|c| c == name)
    }

    fn plan(&self, group: Group) -> Plan {
        let slices = if self.quick { 250 } else { 1000 };
        Plan { slices, slice_ns: 4e3, threaded: group == Group::Threads }
    }
}

/// Whether this process is only to measure for another one, and has done so: it must then end.
pub(crate) fn served() -> Result<bool, String> {
    if !worker::is_worker() {
        return Ok(false);
    }
    cpu::pin(0);
    worker::serve().map(|()| true)
}

/// Runs whole groups of cases. `progress` is told what is under way and the share done, and says whether
/// to go on; if it did not, the report holds what there was until then.
pub(crate) fn run(
    groups: &[Group],
    options: &Options,
    mut progress: impl FnMut(&str, f64) -> bool,
) -> Result<Report, String> {
    options.check(groups)?;
    let mut report = Report::new(groups, options.reps);
    report.pinned = cpu::pin(0);
    let rivals = cfg!(feature = "rivals");
    let absent = ALL.iter().filter(|(name, _, rival)| *rival && !rivals && options.wants(name));
    for (name, ..) in absent {
        report.left_out(name, None, "built without the feature `rivals`");
    }
    let specs: Vec<(Group, Spec)> = groups
        .iter()
        .flat_map(|&group| group.specs().into_iter().map(move |s| (group, s)))
        .collect();
    let wanted = |spec: &Spec| {
        options.cases.is_empty() || options.cases.iter().any(|c| c == spec.case.name())
    };
    let specs: Vec<_> = specs.into_iter().filter(|(_, spec)| wanted(spec)).collect();
    let mut worker = None;
    for (i, (group, spec)) in specs.iter().enumerate() {
        let mut step =
            |share: f64| progress(&report::title(spec), (i as f64 + share) / specs.len() as f64);
        if !step(0.0) {
            break;
        }
        let bed = Bed::new(spec.capacity(options.quick), spec.arenas);
        let go_on = match spec.case {
            Case::Fill => fill_all(&bed, spec, options, &mut report, &mut step),
            _ => time_all(
                &Contest { bed: &bed, spec, plan: options.plan(*group), options },
                &mut worker,
                &mut report,
                &mut step,
            )?,
        };
        report.page_sizes.extend(bed.page_sizes());
        if !go_on {
            break;
        }
    }
    cpu::unpin();
    Ok(report)
}

/// One case, with all that its contenders are set up from.
struct Contest<'a> {
    bed: &'a Bed,
    spec: &'a Spec,
    plan: Plan,
    options: &'a Options,
}

/// A contender in the ring.
struct Entry {
    name: &'static str,
    runner: Box<dyn Runner>,
    reps: Vec<Vec<Rep>>,
}

impl Contest<'_> {
    /// Sets all contenders up; those that fail are left out, and the report says why.
    fn entries(&self, worker: &mut Option<Elsewhere>, report: &mut Report) -> Vec<Entry> {
        let mut entries = Vec::new();
        for (name, ..) in ALL.iter().filter(|(name, ..)| self.options.wants(name)) {
            let runner = match *name {
                TUNED => self.tuned(worker),
                "pool" if self.spec.case == Case::KeysOf => {
                    build::keys_of(self.bed, self.spec, self.plan).map(Some)
                }
                name => {
                    let Self { bed, spec, plan, .. } = *self;
                    registry::with(name, Build { bed, spec, plan }).unwrap_or(Ok(None))
                }
            };
            match runner {
                Ok(Some(runner)) => entries.push(Entry { name, runner, reps: Vec::new() }),
                Ok(None) => {}
                Err(why) => report.left_out(name, Some(self.spec), &why),
            }
        }
        entries
    }

    /// Sets the case up in the other process.
    fn tuned(&self, worker: &mut Option<Elsewhere>) -> Result<Option<Box<dyn Runner>>, String> {
        if !cfg!(feature = "rivals") || self.spec.case == Case::KeysOf {
            return Ok(None);
        }
        let there = match worker {
            Some(there) => there.clone(),
            None => worker.insert(Elsewhere(Rc::new(RefCell::new(Worker::start()?)))).clone(),
        };
        let ready = there.0.borrow_mut().set_up(self.spec, self.plan)?;
        Ok(ready.then(|| Box::new(there) as Box<dyn Runner>))
    }
}

/// What the other process has set up.
#[derive(Clone)]
struct Elsewhere(Rc<RefCell<Worker>>);

impl Runner for Elsewhere {
    fn rep(&mut self) -> Result<Vec<Rep>, String> {
        self.0.borrow_mut().rep()
    }
}

/// Times one case; false if it was told to stop: the contenders then have the repetitions they got.
fn time_all(
    contest: &Contest<'_>,
    worker: &mut Option<Elsewhere>,
    report: &mut Report,
    step: &mut impl FnMut(f64) -> bool,
) -> Result<bool, String> {
    let mut entries = contest.entries(worker, report);
    let (n, reps) = (entries.len(), contest.options.reps);
    let mut go_on = true;
    // The first round warms up.
    'rounds: for round in 0..=reps {
        for turn in 0..n {
            go_on = step((round * n + turn) as f64 / ((reps + 1) * n) as f64);
            if !go_on {
                break 'rounds;
            }
            let entry = &mut entries[(round + turn) % n];
            let rep = entry.runner.rep();
            let rep =
                rep.map_err(|e| format!("{}, {}: {e}", contest.spec.case.name(), entry.name))?;
            if round > 0 {
                entry.reps.push(rep);
            }
        }
    }
    for entry in entries.into_iter().filter(|e| !e.reps.is_empty()) {
        for (i, op) in contest.spec.case.ops().iter().enumerate() {
            let pick = |f: fn(&Rep) -> f64| -> Vec<f64> {
                entry.reps.iter().map(|rep| f(&rep[i])).collect()
            };
            let mid = |f| median(&mut pick(f));
            let ns = Ns {
                min: pick(|r| r.min).into_iter().fold(f64::INFINITY, f64::min),
                median: mid(|r| r.centre),
                p99: mid(|r| r.p99),
                p999: mid(|r| r.p999),
            };
            report.rows.push(Row {
                spec: *contest.spec,
                contender: entry.name,
                op: *op,
                value: Value::Ns(ns),
            });
        }
    }
    Ok(go_on)
}

/// Fills up one contender after the other; false if it was told to stop.
fn fill_all(
    bed: &Bed,
    spec: &Spec,
    options: &Options,
    report: &mut Report,
    step: &mut impl FnMut(f64) -> bool,
) -> bool {
    for (i, (name, ..)) in ALL.iter().filter(|(name, ..)| options.wants(name)).enumerate() {
        if !step(i as f64 / ALL.len() as f64) {
            return false;
        }
        let visit = FillUp { bed, spec, times: options.reps };
        match registry::with(name, visit).unwrap_or(Ok(None)) {
            Ok(None) => {}
            Ok(Some(filled)) => report.rows.push(Row {
                spec: *spec,
                contender: name,
                op: None,
                value: Value::Filled(filled),
            }),
            Err(why) => report.left_out(name, Some(spec), &why),
        }
    }
    true
}
