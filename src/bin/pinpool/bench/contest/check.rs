//! What must be right before anything is timed: buffers apart from one another, their contents kept, and
//! whatever else a contender can tell.

use super::{contender::Handle, random::Random, spec::Spec};

struct One<T> {
    held: T,
    bytes: usize,
    tag: u8,
}

/// Takes some buffers, fills them, gives half back, takes others, and looks at all.
pub(crate) fn check<H: Handle>(shared: &H::Shared, spec: &Spec) -> Result<(), String> {
    let mut handle = H::new(shared)?;
    let mut random = Random::new(5);
    let n = (spec.live + 4).min(64);
    let mut out: Vec<One<H::Held>> = Vec::new();
    for round in 0..4 {
        while out.len() < n {
            let bytes = random.log_uniform(spec.bytes, spec.bytes_max);
            let held = handle.take(bytes).ok_or("no memory for the check")?;
            H::check(shared, &held, bytes)?;
            let tag = random.below(256) as u8;
            // SAFETY: the buffer is ours and `bytes` long.
            unsafe { H::addr(&held).write_bytes(tag, bytes) };
            out.push(One { held, bytes, tag });
        }
        apart(&out.iter().map(|o| (H::addr(&o.held) as usize, o.bytes)).collect::<Vec<_>>())?;
        for one in &out {
            // SAFETY: the buffer is ours, `bytes` long, and was filled above.
            let bytes = unsafe { std::slice::from_raw_parts(H::addr(&one.held), one.bytes) };
            if bytes.iter().any(|&b| b != one.tag) {
                return Err("a buffer's contents changed while it was out".to_owned());
            }
        }
        random.shuffle(&mut out);
        let keep = if round == 3 { 0 } else { n / 2 };
        out.drain(keep..).for_each(|one| handle.put(one.held, one.bytes));
    }
    Ok(())
}

fn apart(buffers: &[(usize, usize)]) -> Result<(), String> {
    let mut sorted = buffers.to_vec();
    sorted.sort_unstable();
    match sorted.windows(2).find(|w| w[0].0 + w[0].1 > w[1].0) {
        None => Ok(()),
        Some(w) => Err(format!("two live buffers overlap: {:#x} and {:#x}", w[0].0, w[1].0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlaps_are_found() {
        assert!(apart(&[(100, 10), (0, 100), (110, 1)]).is_ok());
        assert!(apart(&[(100, 10), (0, 101)]).is_err());
        assert!(apart(&[(5, 1), (5, 1)]).is_err());
    }
}
