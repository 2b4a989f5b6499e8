//! Moves bytes through the keys of registered buffers, as RDMA WRITE and READ and as messages, and looks
//! whether they arrived: by queue pairs on a verbs device, by the software device's own peer otherwise.

#[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
use pinpool::loopback::Pair;
use pinpool::{Device, RKey, RemoteBuf, Sge, device::SoftDevice};

/// One registered buffer with both its names.
pub(crate) struct End<'a> {
    name: &'static str,
    bytes: &'a mut [u8],
    local: Sge,
    remote: RemoteBuf,
}

impl<'a> End<'a> {
    /// Puts the three together; `name` is for messages.
    ///
    /// # Safety
    /// `local` and `remote` name exactly these bytes, under a registration that lasts as long as the
    /// result.
    pub(crate) unsafe fn new(
        name: &'static str,
        bytes: &'a mut [u8],
        local: Sge,
        remote: RemoteBuf,
    ) -> Self {
        Self { name, bytes, local, remote }
    }
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
        Err(format!("nothing reaches the memory of {}", device.info().name))
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
        let name = far.name;
        let to = |problem| format!("RDMA WRITE to the {name} buffer: {problem}");
        let from = |problem| format!("RDMA READ from the {name} buffer: {problem}");
        fill(near.bytes, seed);
        self.write(near, far).map_err(to)?;
        compare(far.bytes, seed).map_err(to)?;
        near.bytes.fill(0);
        self.read(near, far).map_err(from)?;
        compare(near.bytes, seed).map_err(from)
    }

    /// Sends a message and waits until it has been received. On the software device the peer copies it.
    ///
    /// # Safety
    /// During the call, if the keys are valid: both ranges stay mapped, nobody writes what `from` names,
    /// and nobody uses what `into` names, whose key for peers is `rkey`.
    pub(crate) unsafe fn send(&mut self, from: Sge, into: Sge, rkey: RKey) -> Result<(), String> {
        match self {
            Self::Soft(device) => {
                let soft = soft(device)?;
                soft.check_local(&from, false).map_err(|e| e.to_string())?;
                soft.check_local(&into, true).map_err(|e| e.to_string())?;
                // SAFETY: the range is registered, so mapped, and nobody writes it (contract).
                let bytes = unsafe {
                    std::slice::from_raw_parts(from.addr as *const u8, from.length as usize)
                };
                // SAFETY: nobody uses the range (contract).
                unsafe { soft.write(rkey, into.addr, bytes) }.map_err(|e| e.to_string())
            }
            #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
            Self::Verbs(pair) => {
                // SAFETY: the caller's guarantees. No receive is posted: each is waited for, or the pair
                // is stopped.
                let done = unsafe { pair.send_recv(from, into) }.map_err(|e| e.to_string())?;
                match done.byte_len == from.length {
                    true => Ok(()),
                    false => Err(format!("{} bytes sent, {} received", from.length, done.byte_len)),
                }
            }
        }
    }

    /// Makes a pair that an earlier error stopped work again.
    pub(crate) fn ready(&mut self) -> Result<(), String> {
        match self {
            #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
            Self::Verbs(pair) if pair.is_stopped() => pair.reset().map_err(|e| e.to_string()),
            _ => Ok(()),
        }
    }

    fn write(&mut self, from: &End<'_>, to: &mut End<'_>) -> Result<(), String> {
        let RemoteBuf { addr, rkey, .. } = to.remote;
        match self {
            Self::Soft(device) => {
                let soft = soft(device)?;
                soft.check_local(&from.local, false)
                    // SAFETY: as for the verbs side below.
                    .and_then(|()| unsafe { soft.write(rkey, addr, from.bytes) })
                    .map_err(|e| e.to_string())
            }
            #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
            Self::Verbs(pair) => {
                // SAFETY: the names are those of the two buffers (contract of `End::new`), which are
                // registered and borrowed exclusively; no reference into them is held across the
                // call, which touches neither once it has returned.
                unsafe { pair.write(from.local, addr, rkey) }.map(drop).map_err(|e| e.to_string())
            }
        }
    }

    fn read(&mut self, into: &mut End<'_>, from: &End<'_>) -> Result<(), String> {
        let RemoteBuf { addr, rkey, .. } = from.remote;
        match self {
            Self::Soft(device) => {
                let soft = soft(device)?;
                soft.check_local(&into.local, true)
                    // SAFETY: as in `write`.
                    .and_then(|()| unsafe { soft.read(rkey, addr, into.bytes) })
                    .map_err(|e| e.to_string())
            }
            #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
            Self::Verbs(pair) => {
                // SAFETY: as in `write`.
                unsafe { pair.read(into.local, addr, rkey) }.map(drop).map_err(|e| e.to_string())
            }
        }
    }
}

fn soft(device: &Device) -> Result<&SoftDevice, String> {
    device.as_soft().ok_or_else(|| "not the software device".to_owned())
}

/// The eight bytes at a place: different from place to place and from seed to seed.
fn word(seed: u64, index: usize) -> [u8; 8] {
    (index as u64 + (seed << 48)).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()
}

fn fill(bytes: &mut [u8], seed: u64) {
    for (i, chunk) in bytes.chunks_mut(8).enumerate() {
        chunk.copy_from_slice(&word(seed, i)[..chunk.len()]);
    }
}

/// Names the first eight bytes that are not as [`fill`] leaves them.
fn compare(bytes: &[u8], seed: u64) -> Result<(), String> {
    let wrong =
        bytes.chunks(8).enumerate().find(|(i, chunk)| **chunk != word(seed, *i)[..chunk.len()]);
    match wrong {
        None => Ok(()),
        Some((i, found)) => {
            let expected = &word(seed, i)[..found.len()];
            Err(format!("bytes at {} are {found:02x?}, expected {expected:02x?}", i * 8))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_byte_is_found_wherever_it_is() {
        let mut bytes = [0; 61];
        fill(&mut bytes, 3);
        assert_eq!(compare(&bytes, 3), Ok(()));
        assert!(compare(&bytes, 4).is_err());
        for i in 0..bytes.len() {
            bytes[i] ^= 1;
            let e = compare(&bytes, 3).expect_err("spoilt");
            assert!(e.starts_with(&format!("bytes at {} are", i / 8 * 8)), "{e}");
            bytes[i] ^= 1;
        }
    }
}
