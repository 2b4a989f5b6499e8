//! The steps of mapping, and what is asked before each of them: whether it shall fail. Without the feature
//! `fault` the answer is no, and is known when the crate is compiled. Makes no system call.

use std::io;

#[cfg(feature = "fault")]
pub use self::faulty::{FaultyMapping, MapFault, MapRecord};

/// A step by which memory comes to a pool or leaves it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
#[cfg_attr(not(feature = "fault"), allow(unreachable_pub))] // public with the feature
pub enum MapStep {
    /// Reserving the address range of all arenas: once a pool.
    Reserve,
    /// Mapping an arena's pages: once for each page size that is tried.
    Map,
    /// Binding an arena to NUMA nodes, where any are wished: as often.
    Bind,
    /// Faulting a part of an arena in, at most 4 MiB or one page: several times an arena, perhaps on several
    /// threads.
    FaultIn,
    /// Mapping one of the pool's own tables, which are not registered: twice a pool, after all arenas stand.
    Table,
    /// Giving memory back: an arena's pages, or the whole range with what is left in it.
    Unmap,
}

/// Asked before each step.
#[derive(Clone, Default, Debug)]
pub(crate) struct StepHook {
    #[cfg(feature = "fault")]
    faults: Option<FaultyMapping>,
}

impl StepHook {
    #[cfg(feature = "fault")]
    pub(crate) fn new(faults: FaultyMapping) -> Self {
        Self { faults: Some(faults) }
    }

    /// The step may be taken, or this error be given in its place.
    #[inline]
    pub(crate) fn before(
        &self,
        step: MapStep,
        addr: usize,
        len: usize,
        page: usize,
    ) -> io::Result<()> {
        #[cfg(feature = "fault")]
        if let Some(faults) = &self.faults {
            return faults.before(MapRecord { step, addr, len, page_size: page });
        }
        let _ = (step, addr, len, page);
        Ok(())
    }
}

#[cfg(feature = "fault")]
mod faulty {
    use std::{io, sync::Arc, thread, time::Duration};

    use parking_lot::Mutex;

    use super::MapStep;

    /// What to break, and when. Calls of a step are counted from 1 over the life of the [`FaultyMapping`].
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[non_exhaustive]
    pub enum MapFault {
        /// The n-th call of this step fails with this errno, without reaching the system; faulting in brings
        /// the first half of its part in before it does, as the system may.
        Fail(MapStep, u64, i32),
        /// Every call of this step that is about pages of so many bytes fails with this errno.
        Refuse(MapStep, usize, i32),
        /// The n-th call of this step takes this much longer, and then does what it would have done.
        Delay(MapStep, u64, Duration),
    }

    /// Makes mapping fail on demand, as [`FaultyRegistrar`](crate::device::FaultyRegistrar) does with
    /// registering: hand it to [`Builder::faulty_mapping`](crate::Builder::faulty_mapping). Clones share
    /// faults and counts, so keep one to watch with.
    ///
    /// ```
    /// use pinpool::{Device, Pages, Pool, device::{FaultyMapping, MapFault, MapStep}};
    ///
    /// const ENOMEM: i32 = 12;
    /// let mapping = FaultyMapping::new().fault(MapFault::Fail(MapStep::FaultIn, 1, ENOMEM));
    /// let builder = Pool::builder().device(Device::soft()).capacity(1 << 20).pages(Pages::Base);
    /// let error = builder.faulty_mapping(&mapping).build().expect_err("no memory");
    /// assert_eq!(error.raw_os_error(), Some(ENOMEM));
    /// assert_eq!(mapping.calls(MapStep::Map), 1);
    /// ```
    #[derive(Clone, Default, Debug)]
    pub struct FaultyMapping {
        shared: Arc<Mutex<Shared>>,
    }

    #[derive(Default, Debug)]
    struct Shared {
        faults: Vec<MapFault>,
        records: Vec<MapRecord>,
    }

    /// What a step was asked to do.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[non_exhaustive]
    pub struct MapRecord {
        /// Which step.
        pub step: MapStep,
        /// First byte; 0 where the system chooses it.
        pub addr: usize,
        /// Bytes; for a table, those that it describes.
        pub len: usize,
        /// Bytes of a page that is to be mapped; 0 where the step is not about pages of one size.
        pub page_size: usize,
    }

    impl FaultyMapping {
        /// Makes one that breaks nothing yet: it counts.
        pub fn new() -> Self {
            Self::default()
        }

        /// Adds a fault.
        pub fn fault(self, fault: MapFault) -> Self {
            self.shared.lock().faults.push(fault);
            self
        }

        /// How many calls of a step there were, failed ones included.
        pub fn calls(&self, step: MapStep) -> u64 {
            self.shared.lock().records.iter().filter(|r| r.step == step).count() as u64
        }

        /// What the steps were asked to do, in order.
        pub fn records(&self) -> Vec<MapRecord> {
            self.shared.lock().records.clone()
        }

        pub(super) fn before(&self, record: MapRecord) -> io::Result<()> {
            let mut shared = self.shared.lock();
            shared.records.push(record);
            // Counted under the lock, so that the n-th call is the n-th of the records.
            let n = shared.records.iter().filter(|r| r.step == record.step).count() as u64;
            let (mut errno, mut delay) = (None, None);
            for fault in &shared.faults {
                match *fault {
                    MapFault::Fail(s, k, e) if s == record.step && k == n => errno = Some(e),
                    MapFault::Refuse(s, page, e)
                        if s == record.step && page == record.page_size =>
                    {
                        errno = Some(e);
                    }
                    MapFault::Delay(s, k, time) if s == record.step && k == n => delay = Some(time),
                    _ => {}
                }
            }
            drop(shared);
            if let Some(time) = delay {
                thread::sleep(time);
            }
            errno.map_or(Ok(()), |e| Err(io::Error::from_raw_os_error(e)))
        }
    }
}
