//! Several devices: whose keys are asked for, and devices that come and go while the pool serves.
//!
//! A change is queued, and made by the grower, under the lock that growth takes too; whoever asked for it
//! holds its handle.

use std::{collections::VecDeque, fmt, sync::Arc};

use parking_lot::{Condvar, Mutex};

use super::{Core, Pool};
use crate::{
    access::{Keys, PackedKeys},
    arena::{AddError, ArenaInfo, Arenas, Calls, Told},
    config::MOST_DEVICES,
    device::Device,
    error::{DeviceChangeError, UnknownDevice},
    published::RAILS,
    reach::Rails,
    stats::{PageStats, Stats},
    sys::limits,
};

const _: () = assert!(RAILS == MOST_DEVICES);

/// What is told of arenas and devices: a copy, so that looking waits for no registration.
#[derive(Default)]
pub(super) struct Shown {
    pub(super) arenas: usize,
    calls: Calls,
    devices: Vec<ShownDevice>,
}

struct ShownDevice {
    id: usize,
    name: String,
    infos: Vec<ArenaInfo>,
}

impl Shown {
    pub(super) fn of(arenas: &Arenas) -> Self {
        let device = |(rail, id, name): (_, _, &str)| ShownDevice {
            id,
            name: name.to_owned(),
            infos: arenas.infos(rail),
        };
        Self {
            arenas: arenas.standing().count(),
            calls: arenas.calls(),
            devices: arenas.devices().map(device).collect(),
        }
    }

    /// For the books.
    pub(super) fn count_into(&self, stats: &mut Stats) {
        stats.arenas = self.arenas;
        stats.regions = self.devices.iter().map(|d| d.infos.len()).sum();
        let Calls { count, time, longest } = self.calls;
        (stats.register_calls, stats.register_time, stats.longest_register) =
            (count, time, longest);
        for info in self.devices.first().map_or(&[][..], |d| &d.infos) {
            stats.add_pages(PageStats { page_size: info.page_size, arenas: 1, bytes: info.len });
        }
    }

    /// How many devices there are.
    pub(super) fn devices(&self) -> usize {
        self.devices.len()
    }

    /// The arenas on the only device.
    pub(super) fn infos(&self) -> Vec<ArenaInfo> {
        self.devices.first().map_or_else(Vec::new, |d| d.infos.clone())
    }
}

/// A device that is being added to a pool, or removed from it: made by [`Pool::add_device`] and
/// [`Pool::remove_device`]. Dropping it leaves the change to go on.
#[must_use = "whether it worked is only told here"]
pub struct DeviceChange(Arc<Progress>);

#[derive(Default)]
struct Progress {
    done: Mutex<Option<Result<(), DeviceChangeError>>>,
    changed: Condvar,
}

impl Progress {
    fn end(&self, with: Result<(), DeviceChangeError>) {
        self.done.lock().get_or_insert(with);
        self.changed.notify_all();
    }
}

impl DeviceChange {
    /// Waits until it is made or has failed.
    ///
    /// # Errors
    /// [`DeviceChangeError`]; what of the change had been made is then undone as far as the device permits.
    pub fn wait(self) -> Result<(), DeviceChangeError> {
        let mut done = self.0.done.lock();
        loop {
            match done.take() {
                Some(done) => return done,
                None => self.0.changed.wait(&mut done),
            }
        }
    }

    /// Whether [`wait`](DeviceChange::wait) would return at once.
    pub fn is_done(&self) -> bool {
        self.0.done.lock().is_some()
    }
}

impl fmt::Debug for DeviceChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceChange").field("done", &self.is_done()).finish()
    }
}

struct Change {
    add: bool,
    device: Device,
    progress: Arc<Progress>,
}

/// The changes that were asked for and not made yet.
#[derive(Default)]
pub(super) struct Changes {
    queue: Mutex<VecDeque<Change>>,
}

impl Changes {
    /// Says of all that waits that the pool came to its end.
    pub(super) fn close(&self) {
        for change in self.queue.lock().drain(..) {
            change.progress.end(Err(DeviceChangeError::Closed));
        }
    }
}

impl Core {
    /// Makes the changes that were asked for, in order. On the grower's tick.
    pub(super) fn make_changes(&self, told: &mut Vec<Told>) {
        loop {
            let Some(change) = self.grower.changes.queue.lock().pop_front() else { return };
            let made = match change.add {
                true => self.add_now(&change.device, told),
                false => self.remove_now(&change.device, told),
            };
            change.progress.end(made);
        }
    }

    /// Adds a device to every class, or to none.
    fn add_now(&self, device: &Device, told: &mut Vec<Told>) -> Result<(), DeviceChangeError> {
        let classes = self.family.classes();
        for (i, class) in classes.iter().enumerate() {
            if let Err(e) = class.add_here(device, told) {
                for done in classes[..i].iter().rev() {
                    // What the device would not let go of is in `told`.
                    let _ = done.remove_here(device, told);
                }
                return Err(e);
            }
        }
        Ok(())
    }

    /// Removes a device from every class. One that would not let go of a class's arenas is removed all the
    /// same.
    fn remove_now(&self, device: &Device, told: &mut Vec<Told>) -> Result<(), DeviceChangeError> {
        use DeviceChangeError::Deregister;
        let mut failed = None;
        for class in self.family.classes() {
            failed = match (failed, class.remove_here(device, told)) {
                (failed, Ok(())) => failed,
                (
                    Some(Deregister { device, arenas, bytes, first }),
                    Err(Deregister { arenas: more, bytes: bytes_more, .. }),
                ) => {
                    let (arenas, bytes) = (arenas + more, bytes + bytes_more);
                    Some(Deregister { device, arenas, bytes, first })
                }
                (None, Err(e @ Deregister { .. })) => Some(e),
                (failed, Err(e)) => return Err(failed.unwrap_or(e)),
            };
        }
        failed.map_or(Ok(()), Err)
    }

    fn add_here(&self, device: &Device, told: &mut Vec<Told>) -> Result<(), DeviceChangeError> {
        let mut guard = self.arenas.lock();
        let (Some(arenas), Some(table)) = (guard.as_mut(), &self.rails) else {
            return Err(DeviceChangeError::Closed);
        };
        let added = arenas.add_device(device, self.grower.stop_flag(), told);
        self.show(arenas);
        let (rail, standing) = added.map_err(|e| match e {
            AddError::Known => DeviceChangeError::Known { device: device.info().name },
            AddError::TooMany => DeviceChangeError::TooMany { max: MOST_DEVICES },
            AddError::Stopped => DeviceChangeError::Closed,
            AddError::Refused(e) => DeviceChangeError::Refused(Box::new(e)),
        })?;
        for arena in &standing {
            if let Some(&(_, keys)) = arena.keys.iter().find(|k| k.0 == rail) {
                table.set(arena.slot, rail, keys.word());
            }
        }
        table.open(rail, device.id());
        Ok(())
    }

    fn remove_here(&self, device: &Device, told: &mut Vec<Told>) -> Result<(), DeviceChangeError> {
        let mut guard = self.arenas.lock();
        let (Some(arenas), Some(table)) = (guard.as_mut(), &self.rails) else {
            return Err(DeviceChangeError::Closed);
        };
        let Some(rail) = arenas.rail_of(device.id()) else {
            return Err(DeviceChangeError::Unknown(self.unknown(device)));
        };
        let name = device.info().name;
        if arenas.devices().count() == 1 {
            return Err(DeviceChangeError::Last { device: name });
        }
        // From here on nobody is given its keys.
        table.close(rail);
        let before = told.len();
        let left = arenas.drop_rail(rail, told);
        self.show(arenas);
        if left.arenas == 0 {
            return Ok(());
        }
        let first = told[before..].iter().find_map(Told::refusal_again);
        Err(match first {
            Some(first) => DeviceChangeError::Deregister {
                device: name,
                arenas: left.arenas,
                bytes: left.bytes,
                first,
            },
            None => DeviceChangeError::Closed,
        })
    }

    #[cold]
    #[inline(never)]
    fn unknown(&self, device: &Device) -> UnknownDevice {
        let known = self.shown().map(|s| s.devices.iter().map(|d| d.name.clone()).collect());
        UnknownDevice { device: device.info().name, known: known.unwrap_or_default() }
    }

    /// The keys on a device of the arena that an address lies in, if one does. Takes no lock.
    #[inline]
    pub(crate) fn keys_on(
        &self,
        addr: usize,
        device: &Device,
    ) -> Result<Option<Keys>, UnknownDevice> {
        if self.slabs.map().slot_of(addr).is_some() {
            return self.live_keys_on(addr, device).map(Some);
        }
        let known = self.rails.as_ref().and_then(|table| table.find(device.id()));
        known.map(|_| None).ok_or_else(|| self.unknown(device))
    }

    /// The keys on a device of an arena that is there. Takes no lock.
    #[inline]
    pub(crate) fn live_keys_on(&self, addr: usize, device: &Device) -> Result<Keys, UnknownDevice> {
        let slot = self.slabs.map().slot_at(addr);
        if let Some(table) = &self.rails
            && let Some(rail) = table.find(device.id())
            && let Some(keys) = table.get(slot, rail)
        {
            let keys = PackedKeys::from_word(keys);
            return Ok(Keys { lkey: keys.lkey(), rkey: self.remote.then_some(keys.rkey()) });
        }
        self.class_keys_on(addr, device)
    }

    /// A share's table is its class's.
    #[cold]
    #[inline(never)]
    fn class_keys_on(&self, addr: usize, device: &Device) -> Result<Keys, UnknownDevice> {
        match self.class() {
            Some(class) => class.live_keys_on(addr, device),
            None => Err(self.unknown(device)),
        }
    }
}

impl Pool<Rails> {
    /// The keys on `device` of the region that holds `ptr`; `None` if it does not point into this pool's
    /// arenas. Any pointer may be asked for, and none is followed. Takes no lock.
    ///
    /// # Errors
    /// [`UnknownDevice`] if the pool is not, or no longer, on that device.
    #[inline]
    pub fn keys_of_on<T: ?Sized>(
        &self,
        ptr: *const T,
        device: &Device,
    ) -> Result<Option<Keys>, UnknownDevice> {
        let addr = ptr.cast::<u8>() as usize;
        match self.core().keys_on(addr, device) {
            Ok(None) => self.keys_elsewhere_on(addr, device),
            found => found,
        }
    }

    #[cold]
    fn keys_elsewhere_on(
        &self,
        addr: usize,
        device: &Device,
    ) -> Result<Option<Keys>, UnknownDevice> {
        self.heaps().class_at(addr).map_or(Ok(None), |class| class.keys_on(addr, device))
    }

    /// The arenas as one device has them.
    ///
    /// # Errors
    /// [`UnknownDevice`].
    pub fn arenas_on(&self, device: &Device) -> Result<Vec<ArenaInfo>, UnknownDevice> {
        let mut all = Vec::new();
        for (class, _) in self.heaps().classes() {
            let infos = class.shown().and_then(|shown| {
                let found = shown.devices.iter().find(|d| d.id == device.id());
                found.map(|d| d.infos.clone())
            });
            all.extend(infos.ok_or_else(|| class.unknown(device))?);
        }
        Ok(all)
    }

    /// The names of the devices that the pool is on.
    pub fn device_names(&self) -> Vec<String> {
        let shown = self.core().shown();
        shown.map_or_else(Vec::new, |s| s.devices.iter().map(|d| d.name.clone()).collect())
    }

    /// Registers every arena on one device more, in the background, while the pool serves. Its keys can be had
    /// once [`DeviceChange::wait`] has returned.
    ///
    /// # Errors
    /// By the handle: [`DeviceChangeError::Known`], [`TooMany`](DeviceChangeError::TooMany),
    /// [`Refused`](DeviceChangeError::Refused) with the numbers, [`Closed`](DeviceChangeError::Closed). Nothing
    /// is then registered on it, and the pool is as before.
    pub fn add_device(&self, device: &Device) -> DeviceChange {
        self.change(true, device)
    }

    /// Takes the pool off a device, in the background, while it serves on the others. Once
    /// [`DeviceChange::wait`] has returned, nothing of the pool is registered on it, and its PD, if nobody else
    /// has it, is free.
    ///
    /// Work requests in flight on that device lose their memory region: end them first.
    ///
    /// # Errors
    /// By the handle: [`DeviceChangeError::Unknown`], [`Last`](DeviceChangeError::Last), and
    /// [`Deregister`](DeviceChangeError::Deregister) when the device would not let go: it is removed all the
    /// same, and the arenas stay mapped for ever.
    pub fn remove_device(&self, device: &Device) -> DeviceChange {
        self.change(false, device)
    }

    fn change(&self, add: bool, device: &Device) -> DeviceChange {
        // The default class's grower makes the changes of all.
        let core = self.heaps().classes().next().map_or(self.core(), |(class, _)| class);
        let change = DeviceChange(Arc::default());
        if core.foreign() {
            let (owner, this) = (core.process, limits::process_id());
            change.0.end(Err(DeviceChangeError::ForeignProcess { owner, this }));
            return change;
        }
        let (device, progress) = (device.clone(), change.0.clone());
        core.grower.changes.queue.lock().push_back(Change { add, device, progress });
        if let Err(source) = core.grower.start(&core.own) {
            let error = crate::error::BuildError::Thread { source };
            change.0.end(Err(DeviceChangeError::Refused(Box::new(error))));
        }
        core.grower.ring();
        change
    }
}
