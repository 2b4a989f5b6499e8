//! Sets a case up for a contender, and checks it before it is timed.

use std::sync::Arc;

use super::{
    batch::{Batch, Lifo, Shuffled},
    bed::Bed,
    burst::Burst,
    check::check,
    churn::Churn,
    contender::{Contender, Handle},
    fill::{Filled, fill},
    handoff::Handoff,
    keys_of::KeysOf,
    measure::{Plan, Runner, Slices, median},
    pair::Pair,
    registry::Visit,
    spec::{Case, Spec},
    threads::Threads,
};

/// Sets up what is timed; `None` if the contender cannot run the case.
pub(crate) struct Build<'a> {
    pub(crate) bed: &'a Bed,
    pub(crate) spec: &'a Spec,
    pub(crate) plan: Plan,
}

impl Visit for Build<'_> {
    type Out = Result<Option<Box<dyn Runner>>, String>;

    fn visit<C: Contender>(self) -> Self::Out
    where
        C::Shared: Send,
    {
        let Self { bed, spec, plan } = self;
        if !C::runs(spec) {
            return Ok(None);
        }
        let shared = C::shared(bed, spec)?;
        check::<C::Handle>(&shared, spec)?;
        let handle = || C::Handle::new(&shared);
        let bytes = spec.bytes;
        Ok(Some(match spec.case {
            Case::Pair if spec.threads > 1 || plan.threaded => {
                Box::new(Threads::<C>::new(Arc::new(shared), bytes, spec.threads, plan))
            }
            Case::Pair => Box::new(Slices::new(Pair::new(handle()?, bytes), plan)),
            Case::BatchLifo => Box::new(Slices::new(Lifo(Batch::new(handle()?, bytes)), plan)),
            Case::BatchRandom => {
                Box::new(Slices::new(Shuffled(Batch::new(handle()?, bytes)), plan))
            }
            Case::Burst => Box::new(Burst::new(handle()?, bytes, plan)),
            Case::Churn => Box::new(Slices::new(Churn::new(handle()?, spec), plan)),
            Case::Handoff => {
                let handoff = Handoff::<C>::new(Arc::new(shared), bytes, plan);
                handoff.check()?;
                Box::new(handoff)
            }
            Case::KeysOf | Case::Fill => return Ok(None),
        }))
    }
}

/// Sets the look-ups up; they are the pool's alone.
pub(crate) fn keys_of(bed: &Bed, spec: &Spec, plan: Plan) -> Result<Box<dyn Runner>, String> {
    Ok(Box::new(KeysOf::new(bed, spec, plan)?))
}

/// Fills a contender's memory several times, and gives the medians; `None` if it cannot.
pub(crate) struct FillUp<'a> {
    pub(crate) bed: &'a Bed,
    pub(crate) spec: &'a Spec,
    pub(crate) times: usize,
}

impl Visit for FillUp<'_> {
    type Out = Result<Option<Filled>, String>;

    fn visit<C: Contender>(self) -> Self::Out
    where
        C::Shared: Send,
    {
        let Self { bed, spec, times } = self;
        if !C::runs(spec) {
            return Ok(None);
        }
        let shared = C::shared(bed, spec)?;
        check::<C::Handle>(&shared, &Spec { live: 60, ..*spec })?;
        let mut handle = C::Handle::new(&shared)?;
        let all = (0..times).map(|i| fill(&mut handle, spec, bed.capacity(), 100 + i as u64));
        let all = all.collect::<Result<Vec<_>, _>>()?;
        let mid = |f: fn(&Filled) -> f64| median(&mut all.iter().map(f).collect::<Vec<_>>());
        Ok(Some(Filled {
            capacity: bed.capacity(),
            requested: mid(|f| f.requested),
            blocks: mid(|f| f.blocks),
        }))
    }
}
