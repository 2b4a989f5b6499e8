//! What `/proc/self/smaps` says of the mappings under a range: where they lie, what may be done with them
//! and what pages they are made of. Reads alone; judging is the layers' above.

use std::{fs, io};

/// One mapping, or the part of it that lies in the range asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Mapping {
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// As the file has them: `rw-s`.
    pub(crate) rights: String,
    /// Bytes of the pages that it is made of.
    pub(crate) page_size: usize,
    /// Whether it is locked with `mlock`.
    pub(crate) locked: bool,
}

/// The mappings that overlap `start..end`, in order of address, cut to it.
pub(crate) fn under(start: usize, end: usize) -> io::Result<Vec<Mapping>> {
    Ok(parse(&fs::read_to_string("/proc/self/smaps")?, start, end))
}

fn parse(smaps: &str, start: usize, end: usize) -> Vec<Mapping> {
    let mut found: Vec<Mapping> = Vec::new();
    let mut inside = false;
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let Some(first) = words.next() else { continue };
        if let Some((a, b)) = range(first) {
            inside = a < end && start < b;
            if inside {
                found.push(Mapping {
                    start: a.max(start),
                    end: b.min(end),
                    rights: words.next().unwrap_or_default().to_owned(),
                    page_size: 0,
                    locked: false,
                });
            }
            continue;
        }
        let Some(last) = found.last_mut().filter(|_| inside) else { continue };
        match first {
            "KernelPageSize:" => {
                let kib = words.next().and_then(|n| n.parse::<usize>().ok());
                last.page_size = kib.unwrap_or(0) << 10;
            }
            "VmFlags:" => last.locked = words.any(|flag| flag == "lo"),
            _ => {}
        }
    }
    found
}

/// Reads `7f0000000000-7f0000001000`; the names of fields hold no such thing.
fn range(word: &str) -> Option<(usize, usize)> {
    let (a, b) = word.split_once('-')?;
    Some((usize::from_str_radix(a, 16).ok()?, usize::from_str_radix(b, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
00400000-00401000 r--p 00000000 08:01 11 /bin/true
Size:                  4 kB
KernelPageSize:        4 kB
VmFlags: rd mr mw me
7f0000000000-7f0000400000 rw-s 00000000 00:0f 5 /dev/hugepages/x y
KernelPageSize:     2048 kB
VmFlags: rd wr sh mr mw me ms lo ht
7f0000400000-7f0000500000 rw-p 00000000 00:00 0
KernelPageSize:        4 kB
VmFlags: rd wr mr mw me ac
";

    #[test]
    fn mappings_are_cut_to_the_range() {
        let found = parse(SMAPS, 0x7f00_0020_0000, 0x7f00_0040_1000);
        let page = |m: &Mapping| (m.start, m.end, m.rights.clone(), m.page_size, m.locked);
        let should = [
            (0x7f00_0020_0000, 0x7f00_0040_0000, "rw-s".to_owned(), 2 << 20, true),
            (0x7f00_0040_0000, 0x7f00_0040_1000, "rw-p".to_owned(), 4 << 10, false),
        ];
        assert_eq!(found.iter().map(page).collect::<Vec<_>>(), should);
        assert!(parse(SMAPS, 0x401000, 0x7f00_0000_0000).is_empty(), "what only touches is out");
        assert!(parse("garbled\n-\n12-zz", 0, usize::MAX).is_empty());
    }

    #[test]
    fn this_process_s_own_memory_is_found() {
        let byte = Box::new(7u8);
        let at = &raw const *byte as usize;
        let found = under(at, at + 1).expect("procfs");
        assert_eq!((found.len(), found[0].start, found[0].end), (1, at, at + 1));
        assert!(found[0].rights.starts_with("rw") && found[0].page_size >= 4096);
    }
}
