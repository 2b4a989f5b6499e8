//! A small store whose values peers read by RDMA READ, without a word to the server: a hash map and vectors
//! that know nothing of RDMA, in registered memory.
//!
//! `cargo run --features allocator-api2,loopback --example kv [DEVICE | --soft]`

#![allow(clippy::print_stdout)]

use std::error::Error;

use allocator_api2::vec::Vec as PoolVec;
use hashbrown::{DefaultHashBuilder, HashMap};
use pinpool::{Access, Device, Pool, RemoteBuf, loopback::Pair};

struct Store<'a> {
    pool: &'a Pool,
    values: HashMap<String, PoolVec<u8, &'a Pool>, DefaultHashBuilder, &'a Pool>,
}

impl<'a> Store<'a> {
    fn new(pool: &'a Pool) -> Self {
        Self { pool, values: HashMap::new_in(pool) }
    }

    fn put(&mut self, key: &str, value: &[u8]) -> Result<(), Box<dyn Error>> {
        let mut own = PoolVec::new_in(self.pool);
        // The pool is as large as it is: running out is an error here, not an abort.
        own.try_reserve_exact(value.len()).map_err(|_| "the store is full")?;
        own.extend_from_slice(value);
        self.values.insert(key.into(), own);
        Ok(())
    }

    /// Where a peer finds the value: the answer to its one question.
    fn find(&self, key: &str) -> Option<RemoteBuf> {
        self.pool.remote_of(self.values.get(key)?)
    }
}

/// What the peer does with the answer: reads the value, straight from the store's memory.
fn fetch(device: &Device, peer: &Pool, from: RemoteBuf) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut into = peer.alloc(from.len as usize)?;
    if let Some(soft) = device.as_soft() {
        // SAFETY: the store changes nothing meanwhile.
        unsafe { soft.read(from.rkey, from.addr, &mut into)? };
        return Ok(into.to_vec());
    }
    let mut pair = Pair::connect(device)?;
    // SAFETY: the store changes nothing meanwhile, and the peer's buffer is this call's alone.
    unsafe { pair.read(into.sge(), from.addr, from.rkey)? };
    Ok(into.to_vec())
}

fn main() -> Result<(), Box<dyn Error>> {
    let device = match std::env::args().nth(1).as_deref() {
        None => Device::first()?,
        Some("--soft") => Device::soft(),
        Some(name) => Device::open(name)?,
    };
    let pool =
        |access| Pool::builder().device(device.clone()).access(access).capacity(32 << 20).build();
    let (server, peer) =
        (pool(Access::LOCAL_WRITE | Access::REMOTE_READ)?, pool(Access::LOCAL_WRITE)?);

    let mut store = Store::new(&server);
    for i in 0..1_000u32 {
        store.put(&format!("key {i}"), &vec![i as u8; 1 + i as usize * 37])?;
    }
    store.put("key 7", b"put again")?;
    for key in ["key 0", "key 7", "key 999"] {
        let from = store.find(key).ok_or("not there")?;
        let value = fetch(&device, &peer, from)?;
        assert_eq!(value[..], store.values[key][..]);
        println!("{key}: {} bytes read from {:#x} with {:?}", value.len(), from.addr, from.rkey);
    }
    assert!(store.find("key 1000").is_none());
    println!("{} values in {} bytes of registered memory", store.values.len(), server.stats().live);
    Ok(())
}
