//! How full a pool is when it first fails: buffers of random sizes come, and some go, until one cannot.

use super::{contender::Handle, random::Random, spec::Spec};

/// Shares of the capacity at the first failure.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Filled {
    /// Bytes of the pool.
    pub(crate) capacity: usize,
    /// Bytes that were asked for.
    pub(crate) requested: f64,
    /// Bytes of the blocks that were given.
    pub(crate) blocks: f64,
}

/// Fills until the first failure, and empties again. For each two that come one goes.
pub(crate) fn fill<H: Handle>(
    handle: &mut H,
    spec: &Spec,
    capacity: usize,
    seed: u64,
) -> Result<Filled, String> {
    let mut random = Random::new(seed);
    let mut live: Vec<(H::Held, usize)> = Vec::new();
    loop {
        if random.below(3) == 0 && !live.is_empty() {
            let (held, bytes) = live.swap_remove(random.below(live.len()));
            handle.put(held, bytes);
            continue;
        }
        let bytes = random.log_uniform(spec.bytes, spec.bytes_max);
        let Some(held) = handle.take(bytes) else { break };
        live.push((held, bytes));
    }
    let requested: usize = live.iter().map(|(_, bytes)| bytes).sum();
    let blocks: Option<usize> = live.iter().map(|(held, _)| H::block_bytes(held)).sum();
    for (held, bytes) in live {
        handle.put(held, bytes);
    }
    let blocks = blocks.ok_or("it does not tell how long its blocks are")?;
    if requested > blocks || blocks > capacity {
        return Err(format!("{requested} bytes in {blocks} of {capacity}: the sums are wrong"));
    }
    let share = |bytes: usize| bytes as f64 / capacity as f64;
    Ok(Filled { capacity, requested: share(requested), blocks: share(blocks) })
}
