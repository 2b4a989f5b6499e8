//! How things are timed: a repetition is a row of equal slices, each with a time of its own.

use super::clock::{ns_per_tick, ticks};

/// How long a repetition takes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Plan {
    /// Slices of one repetition.
    pub(crate) slices: usize,
    /// Nanoseconds that one slice shall take.
    pub(crate) slice_ns: f64,
    /// Run on threads of its own even where one does, to be compared with more of them.
    pub(crate) threaded: bool,
}

/// One repetition's numbers, in nanoseconds an operation.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Rep {
    pub(crate) min: f64,
    /// The mean over the slices; of single operations the median.
    pub(crate) centre: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
}

/// A case set up for a contender.
pub(crate) trait Runner {
    /// Measures once. One entry for each of the case's [`ops`](super::spec::Case::ops).
    fn rep(&mut self) -> Result<Vec<Rep>, String>;
}

/// The value below which a share of the sorted values lies.
pub(crate) fn percentile(sorted: &[f64], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or(f64::NAN)
}

pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    match n % 2 {
        0 if n > 0 => (values[n / 2 - 1] + values[n / 2]) / 2.0,
        _ => values.get(n / 2).copied().unwrap_or(f64::NAN),
    }
}

/// A slice that is longer by this than most was not the thread's own: schedulers give another program
/// milliseconds.
const LOST_NS: f64 = 500e3;

/// Clock readings at the slices' borders.
pub(crate) struct Marks {
    marks: Vec<u64>,
    per_slice: usize,
}

impl Marks {
    pub(crate) fn new(slices: usize, per_slice: usize) -> Self {
        Self { marks: Vec::with_capacity(slices + 1), per_slice }
    }

    /// Notes the border between two slices.
    #[inline(always)]
    pub(crate) fn mark(&mut self) {
        // Never grows: the room was set for all borders.
        self.marks.push(ticks());
    }

    pub(crate) fn per_slice(&self) -> usize {
        self.per_slice
    }

    pub(crate) fn first(&self) -> u64 {
        self.marks.first().copied().unwrap_or(0)
    }

    pub(crate) fn last(&self) -> u64 {
        self.marks.last().copied().unwrap_or(0)
    }

    /// Each slice's nanoseconds an operation.
    pub(crate) fn slices(&self) -> impl Iterator<Item = f64> {
        let scale = ns_per_tick() / self.per_slice as f64;
        self.marks.windows(2).map(move |m| (m[1] - m[0]) as f64 * scale)
    }

    /// The mean over the slices in which the thread kept its processor. A slice that took so much longer
    /// than others was interrupted by another program; what it lasted says nothing of the contender.
    pub(crate) fn mean(&self) -> f64 {
        let mut slices: Vec<f64> = self.slices().collect();
        let lost = LOST_NS / self.per_slice as f64;
        let limit = median(&mut slices) + lost;
        slices.retain(|&ns| ns <= limit);
        slices.iter().sum::<f64>() / slices.len().max(1) as f64
    }

    pub(crate) fn rep(&self) -> Rep {
        let mut slices: Vec<f64> = self.slices().collect();
        slices.sort_by(f64::total_cmp);
        let centre = self.mean();
        Rep {
            min: centre,
            centre,
            p99: percentile(&slices, 0.99),
            p999: percentile(&slices, 0.999),
        }
    }
}

/// One repetition of something with state.
pub(crate) trait Timed {
    /// Runs `n` times, as fast as it can.
    fn run(&mut self, n: usize);
    /// Operations of one run of one.
    const OPS: usize;
}

/// How often to run for one slice. Also warms up.
pub(crate) fn calibrate<T: Timed>(timed: &mut T, plan: Plan) -> usize {
    let mut n = 1;
    loop {
        let start = ticks();
        timed.run(n);
        let ns = (ticks() - start) as f64 * ns_per_tick();
        if ns >= plan.slice_ns * 8.0 || n >= 1 << 24 {
            return ((n as f64 * plan.slice_ns / ns).round() as usize).max(1);
        }
        n *= 2;
    }
}

/// Times all slices.
#[inline(always)]
pub(crate) fn time<T: Timed>(timed: &mut T, plan: Plan, per_slice: usize) -> Marks {
    let mut marks = Marks::new(plan.slices, per_slice * T::OPS);
    marks.mark();
    for _ in 0..plan.slices {
        timed.run(per_slice);
        marks.mark();
    }
    marks
}

/// A [`Runner`] of anything [`Timed`].
pub(crate) struct Slices<T> {
    timed: T,
    plan: Plan,
    per_slice: Option<usize>,
}

impl<T: Timed> Slices<T> {
    pub(crate) fn new(timed: T, plan: Plan) -> Self {
        Self { timed, plan, per_slice: None }
    }
}

impl<T: Timed> Runner for Slices<T> {
    fn rep(&mut self) -> Result<Vec<Rep>, String> {
        let Self { timed, plan, per_slice } = self;
        let n = *per_slice.get_or_insert_with(|| calibrate(timed, *plan));
        Ok(vec![time(timed, *plan, n).rep()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let v: Vec<f64> = (1..=1000).map(f64::from).collect();
        assert_eq!(percentile(&v, 0.99), 990.0);
        assert_eq!(percentile(&v, 0.999), 999.0);
        assert_eq!(percentile(&v[..3], 0.99), 3.0);
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}
