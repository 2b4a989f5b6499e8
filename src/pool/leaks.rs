//! What is out and whose it is: asked for at any time, and told when the last handle goes.

use std::{collections::HashMap, sync::Arc};

use super::{Core, Pool};
use crate::{
    config::{self, Event},
    outstanding::{OutSite, Outstanding},
    stats::Stats,
};

/// Whether two sites are one: the same call, by the same way if that is known.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    file: &'static str,
    line: u32,
    column: u32,
    stack: Option<String>,
}

impl Outstanding {
    /// Of some heaps of one pool, none of them a forked copy.
    fn of<'a>(heaps: impl Iterator<Item = &'a Core>) -> Self {
        let mut report = Self::default();
        let mut sites: HashMap<Key, OutSite> = HashMap::new();
        let mut tracked = Vec::new();
        for core in heaps {
            let Stats { live_buffers, live, .. } = core.stats();
            report.buffers += live_buffers;
            report.bytes += live;
            core.each_flight(|_| report.in_flight += 1);
            if let Some(guard) = core.guard.as_ref() {
                report.every = guard.tracked();
                guard.each_out(|bytes, owner, since| {
                    if owner.site.is_some() {
                        tracked.push((bytes, owner.clone(), since));
                    }
                });
            }
        }
        // Without any lock: names are looked for, which takes its time. One stack is often many buffers'.
        let mut stacks = HashMap::new();
        for (bytes, owner, since) in tracked {
            let Some(site) = owner.site.clone() else { continue };
            let stack = site
                .backtrace
                .as_ref()
                .map(|b| stacks.entry(Arc::as_ptr(b)).or_insert_with(|| b.to_string()).clone());
            let at = site.location();
            let key = Key { file: at.file(), line: at.line(), column: at.column(), stack };
            let oldest = since.elapsed();
            let one = sites.entry(key).or_insert_with(|| OutSite {
                site,
                buffers: 0,
                bytes: 0,
                oldest,
                owner: owner.clone(),
            });
            one.buffers += 1;
            one.bytes += bytes;
            if oldest > one.oldest {
                (one.oldest, one.owner) = (oldest, owner);
            }
        }
        report.sites = sites.into_values().collect();
        let place = |s: &OutSite| (s.site.location().file(), s.site.location().line());
        report.sites.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| place(a).cmp(&place(b))));
        report
    }
}

/// Tells what is out of a pool whose last handle goes.
pub(super) fn tell_still_out(cores: &[Arc<Core>]) {
    let Some(hook) = cores.first().and_then(|core| core.grower.hook.as_ref()) else { return };
    let report = Outstanding::of(cores.iter().map(|core| &**core));
    if report.buffers > 0 {
        config::tell(Some(hook), &Event::StillOut(&report));
    }
}

impl<R> Pool<R> {
    /// Reports what is out: how many buffers, and, in a pool that [tracks](crate::Builder::track), which place in
    /// the program asked for them, and for how long they have been out. Show it with `{}`.
    ///
    /// Takes locks, as [`stats`](Pool::stats) does, and looks for the names of functions if there are backtraces.
    /// Empty in a forked child.
    ///
    /// ```
    /// use pinpool::{Device, Pool, Track};
    ///
    /// let pool =
    ///     Pool::builder().device(Device::soft()).capacity(1 << 20).track(Track::all()).build()?;
    /// let kept: Vec<_> = (0..3).map(|_| pool.alloc(4096)).collect::<Result<_, _>>()?;
    /// let report = pool.outstanding();
    /// assert_eq!((report.buffers, report.sites[0].buffers), (3, 3));
    /// println!("{report}"); // 3 buffers out, 12 KiB … 3 x, 12 KiB, oldest 40.0µs by "main" (4711): src/main.rs:5:35
    /// # drop(kept);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn outstanding(&self) -> Outstanding {
        Outstanding::of(self.heaps().iter().filter(|core| !core.foreign()))
    }
}
