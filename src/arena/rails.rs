//! Devices that come and go while arenas stand: registering all of them on one more, deregistering all of
//! them on one. Which look-ups know the device meanwhile is the pool's business.

use std::{
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Instant,
};

use super::{Arenas, Leftover, Rail, Region, Standing, Told};
use crate::{
    access::Access,
    config::{self, MOST_DEVICES},
    contained::contained,
    device::{Device, MrRequest},
    error::BuildError,
};

/// Why a device was not added.
#[derive(Debug)]
pub(crate) enum AddError {
    Known,
    TooMany,
    Stopped,
    Refused(BuildError),
}

impl Arenas {
    /// The rail of a device.
    pub(crate) fn rail_of(&self, id: usize) -> Option<usize> {
        self.rails.iter().position(|r| r.as_ref().is_some_and(|r| r.device.id() == id))
    }

    /// The devices: rail, number, name.
    pub(crate) fn devices(&self) -> impl Iterator<Item = (usize, usize, &str)> + '_ {
        let named = |(rail, r): (usize, _)| {
            let Rail { device, info } = Option::as_ref(r)?;
            Some((rail, device.id(), info.name.as_str()))
        };
        self.rails.iter().enumerate().filter_map(named)
    }

    /// Registers every arena on one device more, and says at which rail, with all keys. After an error, or when
    /// told to stop, nothing is left on it.
    pub(crate) fn add_device(
        &mut self,
        device: &Device,
        stop: &AtomicBool,
        told: &mut Vec<Told>,
    ) -> Result<(usize, Vec<Standing>), AddError> {
        if self.rail_of(device.id()).is_some() {
            return Err(AddError::Known);
        }
        let rail = match self.rails.iter().position(Option::is_none) {
            Some(rail) => rail,
            None if self.rails.len() < MOST_DEVICES => {
                self.rails.push(None);
                self.rails.len() - 1
            }
            None => return Err(AddError::TooMany),
        };
        let info = device.info();
        let lens: Vec<usize> = self.list.iter().map(|a| a.len).collect();
        let longest = lens.iter().copied().max().unwrap_or(0);
        if let Some(error) = config::refuse_device(&info, &lens, longest) {
            return Err(AddError::Refused(error));
        }
        self.rails[rail] = Some(Rail { device: device.clone(), info });
        for at in 0..self.list.len() {
            let done = match stop.load(Relaxed) {
                true => Err(AddError::Stopped),
                false => self.register_on(at, rail),
            };
            if let Err(error) = done {
                self.drop_rail(rail, told);
                return Err(error);
            }
        }
        Ok((rail, self.standing().collect()))
    }

    fn register_on(&mut self, at: usize, rail: usize) -> Result<(), AddError> {
        let Some(Rail { device, info }) = &self.rails[rail] else { return Err(AddError::Stopped) };
        let (device, info) = (device.clone(), info.clone());
        let arena = &self.list[at];
        let (slot, slots, len) = (arena.slot, self.plan.slots(), arena.len);
        let offset = self.offset(slot);
        let request = MrRequest {
            // SAFETY: the offset is inside the reservation.
            addr: unsafe { self.reservation.base().add(offset) },
            len: arena.len,
            page_size: arena.page_size,
            access: self.plan.access,
        };
        let optional = self.plan.optional(arena.page_size);
        let start = Instant::now();
        let call = |access: Access| {
            // SAFETY: the arena stands, mapped and in memory, and is unmapped only after every region of it
            // was deregistered (`let_go`).
            unsafe { device.registrar().register(&MrRequest { access, ..request }) }
        };
        let ask = || super::start::with_or_without(self.plan.access, optional, call);
        // After a panic it is not known whether it is registered: the memory stays, whatever comes.
        let (done, calls) = contained(ask).unwrap_or((Err(None), 1));
        self.calls.count += calls;
        self.calls.took(start.elapsed());
        match done {
            Ok(registration) => {
                let region = Region { rail, registration, time: start.elapsed() };
                self.list[at].regions.push(region);
                Ok(())
            }
            Err(source) => {
                let error = match source {
                    Some(source) => super::start::explain(&info, slot, slots, len, source),
                    None => {
                        self.list[at].stuck = true;
                        super::panicked(slot, slots, len)
                    }
                };
                Err(AddError::Refused(error))
            }
        }
    }

    /// Deregisters every arena on one device. What it will not let go of stays mapped when the arena goes.
    pub(crate) fn drop_rail(&mut self, rail: usize, told: &mut Vec<Told>) -> Leftover {
        let mut left = Leftover::default();
        for at in (0..self.list.len()).rev() {
            let arena = &mut self.list[at];
            let Some(region) = arena.regions.iter().position(|r| r.rail == rail) else { continue };
            let region = arena.regions.remove(region);
            let (offset, len) = (arena.slot * self.plan.stride, arena.len);
            if !self.deregister(region, offset, len, told) {
                self.list[at].stuck = true;
                left.arenas += 1;
                left.bytes += len;
            }
        }
        self.rails[rail] = None;
        left
    }
}
