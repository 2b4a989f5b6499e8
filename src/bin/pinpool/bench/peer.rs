//! Moves bytes through the keys of two registered buffers and looks whether they arrived: by queue
//! pairs on a verbs device, by the software device's own peer otherwise.

use std::slice;

use pinpool::{Buf, Device, RemoteBuf, Sge, device::SoftDevice};
#[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
use pinpool::loopback::Pair;

/// One buffer with both its names.
pub(crate) struct End<'a> {
    /// How it is called in messages.
    pub(crate) name: &'static str,
    pub(crate) bytes: &'a mut Buf,
    /// What this host's work requests know it by.
    pub(crate) local: Sge,
    /// What a peer knows it by.
    pub(crate) remote: RemoteBuf,
}

/// What reaches registered memory by its keys.
pub(crate) enum Peer {
    /// The software device.
    Soft(Device),
    /// Two connected queue pairs.
    #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
    Verbs(Box<Pair>),
}

impl Peer {
    /// Connects a peer to the device, in its PD.
    pub(crate) fn connect(device: &Device) -> Result<Self, String> {
        if device.as_soft().is_some() {
            return Ok(Self::Soft(device.clone()));
        }
        #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
        return Pair::connect(device).map(|p| Self::Verbs(Box::new(p))).map_err(|e| e.to_string());
        #[cfg(not(any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]
        Err(format!("no peer for {}", device.info().name))
    }

    /// Writes each buffer to the other and reads it back, by RDMA, and compares every byte. Of each
    /// buffer it uses the key for this host and the one for peers.
    pub(crate) fn verify(&mut self, a: &mut End<'_>, b: &mut End<'_>) -> Result<(), String> {
        self.ready()?;
        self.there_and_back(a, b, 1)?;
        self.there_and_back(b, a, 2)
    }

    /// Fills `near`, writes it to `far`, wipes `near` and reads it back.
    fn there_and_back(
        &mut self,
        near: &mut End<'_>,
        far: &mut End<'_>,
        seed: u64,
    ) -> Result<(), String> {
        fill(near.bytes, seed);
        let fault = |step, problem| format!("RDMA {step} the {} buffer: {problem}", far.name);
        // SAFETY: both buffers are borrowed exclusively, and no reference into them is held.
        unsafe { self.write(near, far) }.map_err(|e| fault("WRITE to", e))?;
        compare(far.bytes, seed).map_err(|e| fault("WRITE to", e))?;
        near.bytes.fill(0);
        // SAFETY: as above.
        unsafe { self.read(near, far) }.map_err(|e| fault("READ from", e))?;
        compare(near.bytes, seed).map_err(|e| fault("READ from", e))
    }

    /// Makes a pair that an earlier error stopped work again.
    fn ready(&mut self) -> Result<(), String> {
        match self {
            Self::Soft(_) => Ok(()),
            #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
            Self::Verbs(pair) if pair.is_stopped() => pair.reset().map_err(|e| e.to_string()),
            #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
            Self::Verbs(_) => Ok(()),
        }
    }

    /// # Safety
    /// Nobody uses the bytes of either end meanwhile.
    unsafe fn write(&mut self, from: &End<'_>, to: &End<'_>) -> Result<(), String> {
        match self {
            Self::Soft(device) => soft_write(soft(device)?, from, to),
            // SAFETY: both buffers are alive and left alone (contract); the call touches neither once
            // it has returned.
            #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
            Self::Verbs(pair) => unsafe { pair.write(from.local, to.remote.addr, to.remote.rkey) }
                .map(drop)
                .map_err(|e| e.to_string()),
        }
    }

    /// # Safety
    /// As for [`write`](Peer::write).
    unsafe fn read(&mut self, into: &End<'_>, from: &End<'_>) -> Result<(), String> {
        match self {
            Self::Soft(device) => soft_read(soft(device)?, into, from),
            // SAFETY: as in `write`.
            #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
            Self::Verbs(pair) => {
                unsafe { pair.read(into.local, from.remote.addr, from.remote.rkey) }
                    .map(drop)
                    .map_err(|e| e.to_string())
            }
        }
    }
}

fn soft(device: &Device) -> Result<&SoftDevice, String> {
    device.as_soft().ok_or_else(|| "not the software device".to_owned())
}
