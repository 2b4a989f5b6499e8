//! Filling memory with one byte, and finding where it is no longer that.

use std::ptr::NonNull;

/// Compared at a time.
const CHUNK: usize = 4096;

/// Fills a part of a block.
///
/// # Safety
/// `ptr..ptr + len` is mapped, and nobody's but the caller's. A device may write to it all the same.
pub(super) unsafe fn fill(ptr: NonNull<u8>, len: usize, byte: u8) {
    // SAFETY: mapped, and the caller's (contract).
    unsafe { ptr.as_ptr().write_bytes(byte, len) };
}

/// The first and the last byte (both as offsets from `ptr`) that are not `byte`.
///
/// # Safety
/// As [`fill`].
pub(super) unsafe fn damage(ptr: NonNull<u8>, len: usize, byte: u8) -> Option<(usize, usize)> {
    // SAFETY: the range is mapped and initialised (it was filled), and no code has a reference to it (contract).
    // A device that writes meanwhile is what is looked for: whichever value is read, the answer is a report or
    // none, and no index, length or pointer is made of it.
    let bytes = unsafe { std::slice::from_raw_parts(ptr.as_ptr(), len) };
    let whole = [byte; CHUNK];
    let differs = |chunk: &[u8]| chunk != &whole[..chunk.len()];
    let wrong = |b: &u8| *b != byte;
    let mut chunks = bytes.chunks(CHUNK).enumerate();
    let (at, chunk) = chunks.find(|(_, chunk)| differs(chunk))?;
    // What was seen may have changed since, so neither search relies on finding it again.
    let first = at * CHUNK + chunk.iter().position(wrong).unwrap_or(0);
    let (at, chunk) = bytes.chunks(CHUNK).enumerate().rfind(|(_, chunk)| differs(chunk))?;
    let last = at * CHUNK + chunk.iter().rposition(wrong).unwrap_or(0);
    Some((first, last.max(first)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_and_the_last_damaged_byte_are_found_wherever_they_are() {
        let mut memory = vec![0u8; 3 * CHUNK + 100];
        let len = memory.len();
        let ptr = NonNull::new(memory.as_mut_ptr()).expect("not null");
        // SAFETY: the vector's own bytes, used through this pointer alone below.
        let (look, poke) = unsafe {
            fill(ptr, len, 0xdf);
            (move || damage(ptr, len, 0xdf), move |at: usize, b: u8| ptr.as_ptr().add(at).write(b))
        };
        assert_eq!(look(), None);
        for at in [0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 7, len - 1] {
            poke(at, 0);
            assert_eq!(look(), Some((at, at)));
            poke(len - 1, 1);
            assert_eq!(look(), Some((at, len - 1)));
            poke(at, 0xdf);
            poke(len - 1, 0xdf);
        }
        assert_eq!(look(), None);
    }
}
