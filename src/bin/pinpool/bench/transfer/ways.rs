//! The contenders: ways for both ends of a message to have registered memory.
//!
//! The software device and a NIC alike reach memory by keys alone, so a way is a matter of who registers
//! when: the pool once for ever, the next one for each message, the cache now and then; the last registers
//! one buffer and copies.
//!
//! Who sends knows how long the message is. Who receives does not when it posts its buffer, which is
//! therefore as long as the longest message.

use pinpool::{Access, Buf, Device, LKey, Pages, Pool, RKey, Sge, device::Registration};

use super::reg_cache::RegCache;
use crate::bench::{
    contest::random::Random,
    device::{AppMemory, Counting},
    peer::Peer,
};

/// The rights of all buffers. Messages need only local write; the software device copies by the key for
/// peers.
pub(super) const ACCESS: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE);

/// The way that the others are compared with.
pub(super) const PER_MESSAGE: &str = "register-per-message";

/// One way. Steps marked *timed* count.
pub(super) trait Way {
    /// Its name in the output.
    fn name(&self) -> &'static str;

    /// Makes ready for messages of this length.
    fn begin(&mut self, _len: usize) -> Result<(), String> {
        Ok(())
    }

    /// Chooses what the application would give: its buffers.
    fn choose(&mut self) {}

    /// Gets both ends ready. *Timed.*
    fn ready(&mut self, len: usize) -> Result<(), String>;

    /// Where the application writes its message.
    fn source(&mut self) -> &mut [u8];

    /// Where it finds one.
    fn target(&mut self) -> &mut [u8];

    /// Sends, and waits until it has been received. *Timed.*
    fn send(&mut self, peer: &mut Peer) -> Result<(), String>;

    /// Gives back what [`ready`](Way::ready) took, also if only a part of it was. *Timed.*
    fn done(&mut self) -> Result<(), String>;

    /// Look-ups and those that found something, since `begin`.
    fn hits(&self) -> Option<(u64, u64)> {
        None
    }

    /// Gives everything back.
    fn end(&mut self) -> Result<(), String> {
        Ok(())
    }
}

/// Both ends' buffers come from the pool, in which the application writes and reads its messages.
struct FromPool {
    pool: Pool,
    room: usize,
    ends: Option<[Buf; 2]>,
}

impl Way for FromPool {
    fn name(&self) -> &'static str {
        "pool"
    }

    fn ready(&mut self, len: usize) -> Result<(), String> {
        let alloc = |len| self.pool.alloc(len).map_err(|e| e.to_string());
        self.ends = Some([alloc(len)?, alloc(self.room)?]);
        Ok(())
    }

    fn source(&mut self) -> &mut [u8] {
        self.ends.as_mut().map_or(&mut [], |[from, _]| from)
    }

    fn target(&mut self) -> &mut [u8] {
        self.ends.as_mut().map_or(&mut [], |[_, into]| into)
    }

    fn send(&mut self, peer: &mut Peer) -> Result<(), String> {
        let Some([from, into]) = &self.ends else { return Err("nothing is ready".to_owned()) };
        let rkey = into.keys().rkey.ok_or("the pool's buffer has no rkey")?;
        // SAFETY: both buffers are out, and live beyond the call; nobody else has a reference to them.
        unsafe { peer.send(from.sge(), into.sge(), rkey) }
    }

    fn done(&mut self) -> Result<(), String> {
        self.ends = None;
        Ok(())
    }
}

/// The application's own buffers: so many for each end, each on pages of its own.
struct Own {
    memory: AppMemory,
    buffers: usize,
    /// Bytes of each buffer.
    room: usize,
    /// Bytes of each message.
    len: usize,
    /// Offsets of the two buffers of this message.
    chosen: [usize; 2],
    random: Random,
}

impl Own {
    fn choose(&mut self) {
        let buffers = [(); 2].map(|()| self.random.below(self.buffers));
        self.chosen = self.offsets(buffers);
    }

    /// Where a sender's and a receiver's buffer begin; the senders' lie first, the receivers' after them.
    fn offsets(&self, [from, into]: [usize; 2]) -> [usize; 2] {
        [from, self.buffers + into].map(|buffer| buffer * self.room)
    }

    /// What is registered of a sender's and of a receiver's buffer.
    fn registered(&self) -> [usize; 2] {
        [self.len, self.room]
    }

    /// The message in a chosen buffer.
    fn end(&mut self, end: usize) -> &mut [u8] {
        let (offset, len) = (self.chosen[end], self.len);
        &mut self.memory.bytes_mut()[offset..][..len]
    }

    fn sge(&self, end: usize, lkey: LKey) -> Sge {
        let addr = self.memory.bytes()[self.chosen[end]..].as_ptr() as u64;
        Sge { addr, length: self.registered()[end] as u32, lkey }
    }

    /// Sends from one chosen buffer to the other.
    ///
    /// # Safety
    /// The keys are those of these two buffers.
    unsafe fn send(&self, peer: &mut Peer, keys: [(LKey, RKey); 2]) -> Result<(), String> {
        let [from, into] = [0, 1].map(|end| self.sge(end, keys[end].0));
        // SAFETY: both lie in the memory that this owns, apart from each other, and `self` is borrowed;
        // no reference into them is held.
        unsafe { peer.send(from, into, keys[1].1) }
    }
}

/// Both ends register for each message, and deregister after it.
struct PerMessage {
    own: Own,
    registrar: Counting,
    made: [Option<Registration>; 2],
}

impl Way for PerMessage {
    fn name(&self) -> &'static str {
        PER_MESSAGE
    }

    fn begin(&mut self, len: usize) -> Result<(), String> {
        self.own.len = len;
        Ok(())
    }

    fn choose(&mut self) {
        self.own.choose();
    }

    fn ready(&mut self, _: usize) -> Result<(), String> {
        let lens = self.own.registered();
        for ((made, offset), len) in self.made.iter_mut().zip(self.own.chosen).zip(lens) {
            // SAFETY: `done` deregisters it.
            let done = unsafe { self.own.memory.register(&self.registrar, offset, len) };
            *made = Some(done.map_err(|e| e.to_string())?);
        }
        Ok(())
    }

    fn source(&mut self) -> &mut [u8] {
        self.own.end(0)
    }

    fn target(&mut self) -> &mut [u8] {
        self.own.end(1)
    }

    fn send(&mut self, peer: &mut Peer) -> Result<(), String> {
        let [Some(from), Some(into)] = &self.made else { return Err("nothing is ready".into()) };
        // SAFETY: `ready` registered exactly these.
        unsafe { self.own.send(peer, [from, into].map(|r| (r.lkey, r.rkey))) }
    }

    fn done(&mut self) -> Result<(), String> {
        let mut first = Ok(());
        for made in self.made.iter_mut().filter_map(Option::take) {
            // SAFETY: `ready` registered it with this registrar, and `take` lets nobody do this again.
            let done = unsafe { self.own.memory.deregister(&self.registrar, made.handle) };
            first = first.and(done);
        }
        first.map_err(|e| e.to_string())
    }
}

impl Drop for PerMessage {
    fn drop(&mut self) {
        // Whoever wants to know of a failure has called it before.
        let _ = self.done();
    }
}

/// Both ends look their buffers up in a registration cache.
struct Cached {
    own: Own,
    cache: RegCache,
    keys: Option<[(LKey, RKey); 2]>,
}

impl Cached {
    fn look_up(&mut self, end: usize) -> Result<(LKey, RKey), String> {
        let len = self.own.registered()[end];
        let Own { memory, chosen, .. } = &mut self.own;
        self.cache.keys(memory, chosen[end], len).map_err(|e| e.to_string())
    }
}

impl Way for Cached {
    fn name(&self) -> &'static str {
        "registration-cache"
    }

    /// Warms the cache up: it then hits as often as it ever will.
    fn begin(&mut self, len: usize) -> Result<(), String> {
        self.end()?;
        self.own.len = len;
        for buffer in 0..self.own.buffers {
            self.own.chosen = self.own.offsets([buffer; 2]);
            self.ready(len)?;
        }
        (self.cache.hits, self.cache.look_ups) = (0, 0);
        Ok(())
    }

    fn choose(&mut self) {
        self.own.choose();
    }

    fn ready(&mut self, _: usize) -> Result<(), String> {
        self.keys = Some([self.look_up(0)?, self.look_up(1)?]);
        Ok(())
    }

    fn source(&mut self) -> &mut [u8] {
        self.own.end(0)
    }

    fn target(&mut self) -> &mut [u8] {
        self.own.end(1)
    }

    fn send(&mut self, peer: &mut Peer) -> Result<(), String> {
        let keys = self.keys.ok_or("nothing is ready")?;
        // SAFETY: the cache gave them for these buffers a moment ago; it holds two entries or more, and so
        // still has both.
        unsafe { self.own.send(peer, keys) }
    }

    fn done(&mut self) -> Result<(), String> {
        self.keys = None;
        Ok(())
    }

    fn hits(&self) -> Option<(u64, u64)> {
        Some((self.cache.hits, self.cache.look_ups))
    }

    fn end(&mut self) -> Result<(), String> {
        self.cache.clear(&mut self.own.memory).map_err(|e| e.to_string())
    }
}

impl Drop for Cached {
    fn drop(&mut self) {
        // As above.
        let _ = self.end();
    }
}

/// Each end copies between the application's buffer and a registered one.
struct Bounce {
    own: Own,
    /// Registered once, long enough for both ends.
    bounce: Buf,
}

impl Way for Bounce {
    fn name(&self) -> &'static str {
        "bounce-buffer"
    }

    fn begin(&mut self, len: usize) -> Result<(), String> {
        self.own.len = len;
        Ok(())
    }

    fn choose(&mut self) {
        self.own.choose();
    }

    fn ready(&mut self, _: usize) -> Result<(), String> {
        Ok(())
    }

    fn source(&mut self) -> &mut [u8] {
        self.own.end(0)
    }

    fn target(&mut self) -> &mut [u8] {
        self.own.end(1)
    }

    fn send(&mut self, peer: &mut Peer) -> Result<(), String> {
        let len = self.own.len;
        let half = self.bounce.len() / 2;
        self.bounce[..len].copy_from_slice(self.own.end(0));
        let part = |at: usize, len: usize| self.bounce.sge_range(at, len as u32);
        let (Some(from), Some(into)) = (part(0, len), part(half, half)) else {
            return Err("the message is longer than the bounce buffer".to_owned());
        };
        let rkey = self.bounce.keys().rkey.ok_or("the bounce buffer has no rkey")?;
        // SAFETY: two parts of a buffer that is ours, apart from each other; no reference into it is held.
        unsafe { peer.send(from, into, rkey) }?;
        self.own.end(1).copy_from_slice(&self.bounce[half..][..len]);
        Ok(())
    }

    fn done(&mut self) -> Result<(), String> {
        Ok(())
    }
}

/// What the ways are made for.
pub(super) struct Needs {
    /// Bytes of each buffer that receives.
    pub(super) longest: usize,
    /// The application's buffers at each end.
    pub(super) buffers: usize,
    /// Ranges in the registration cache.
    pub(super) cached: usize,
    pub(super) pages: Pages,
}

/// All ways on one device, the pool first, with the pool and what counts its and the others'
/// registrations.
pub(super) struct Ways {
    pub(super) ways: Vec<Box<dyn Way>>,
    pub(super) pool: Pool,
    pub(super) counts: [Counting; 2],
}

impl Ways {
    /// Builds them all on pages of one size.
    pub(super) fn build(device: &Device, needs: &Needs) -> Result<Self, String> {
        let counts = [Counting::new(device), Counting::new(device)];
        let [of_pool, of_others] = &counts;
        let Needs { longest, buffers, cached, pages } = *needs;
        let pool = |registrar: &Counting, bytes: usize| {
            Pool::builder()
                .device(Device::custom(registrar.clone()))
                .access(ACCESS)
                .capacity(bytes.max(2 << 20))
                .pages(pages)
                .build()
                .map_err(|e| e.to_string())
        };
        let own = |seed| -> Result<Own, String> {
            let memory = AppMemory::new(2 * buffers * longest, pages, ACCESS);
            Ok(Own {
                memory: memory.map_err(|e| e.to_string())?,
                buffers,
                room: longest,
                len: 0,
                chosen: [0; 2],
                random: Random::new(seed),
            })
        };
        // As much as the application has, and room for what a thread keeps at hand beside what is out.
        let shared = pool(of_pool, (2 * buffers).max(8) * longest)?;
        let bounce = pool(of_others, 2 * longest)?;
        let bounce = bounce.alloc(2 * longest).map_err(|e| e.to_string())?;
        let ways: Vec<Box<dyn Way>> = vec![
            Box::new(FromPool { pool: shared.clone(), room: longest, ends: None }),
            Box::new(PerMessage { own: own(11)?, registrar: of_others.clone(), made: [None; 2] }),
            Box::new(Cached {
                own: own(11)?,
                cache: RegCache::new(of_others.clone(), cached),
                keys: None,
            }),
            Box::new(Bounce { own: own(11)?, bounce }),
        ];
        Ok(Self { ways, pool: shared, counts })
    }
}
