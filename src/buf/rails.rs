//! Buffers of pools on several devices: every key by device.

use super::Buf;
use crate::{
    access::{Keys, RemoteBuf, Sge},
    device::Device,
    error::UnknownDevice,
    reach::Rails,
};

impl Buf<Rails> {
    /// Both keys on one device. Takes no lock.
    ///
    /// # Errors
    /// [`UnknownDevice`] if the pool is not, or no longer, on that device.
    #[inline]
    pub fn keys_on(&self, device: &Device) -> Result<Keys, UnknownDevice> {
        // A live buffer's arena is there.
        self.core().live_keys_on(self.ptr.as_ptr() as usize, device)
    }

    /// The scatter-gather element for the whole length (cut to `u32::MAX` bytes) on one device.
    ///
    /// # Errors
    /// As [`keys_on`](Buf::keys_on).
    #[inline]
    pub fn sge_on(&self, device: &Device) -> Result<Sge, UnknownDevice> {
        let lkey = self.keys_on(device)?.lkey;
        let addr = self.core().wire_addr(self.ptr);
        Ok(Sge { addr, length: u32::try_from(self.len).unwrap_or(u32::MAX), lkey })
    }

    /// The scatter-gather element for `len` bytes from `offset` on one device; `None` if they are not all
    /// inside.
    ///
    /// # Errors
    /// As [`keys_on`](Buf::keys_on).
    pub fn sge_range_on(
        &self,
        device: &Device,
        offset: usize,
        len: u32,
    ) -> Result<Option<Sge>, UnknownDevice> {
        let lkey = self.keys_on(device)?.lkey;
        let end = offset.checked_add(len as usize).filter(|&end| end <= self.len);
        let addr = self.core().wire_addr(self.ptr).wrapping_add(offset as u64);
        Ok(end.map(|_| Sge { addr, length: len, lkey }))
    }

    /// What a peer that comes in through one device needs to reach these bytes; `None` if the pool's access
    /// lets it do nothing. The right that the rkey conveys is over the whole arena.
    ///
    /// # Errors
    /// As [`keys_on`](Buf::keys_on).
    #[inline]
    pub fn remote_on(&self, device: &Device) -> Result<Option<RemoteBuf>, UnknownDevice> {
        let rkey = self.keys_on(device)?.rkey;
        let addr = self.core().wire_addr(self.ptr);
        Ok(rkey.map(|rkey| RemoteBuf { addr, len: self.len as u64, rkey }))
    }
}
