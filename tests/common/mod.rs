//! Shared by the test files: pools on the software device, and what the process holds.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

#[path = "alone.rs"]
mod alone;

#[allow(unused_imports)] // as above
pub(crate) use self::alone::alone;
use pinpool::{Access, AllocError, Builder, Device, Exhausted, Pages, Pool};

/// Scales a count down where the processor is emulated, or a sanitizer looks on (`PINPOOL_ROUNDS` is set there): those
/// need no luck to see a race.
pub fn scaled(n: usize) -> usize {
    let set = |name| std::env::var_os(name).is_some();
    if set("PINPOOL_GUEST") {
        n / 20
    } else if set("PINPOOL_ROUNDS") {
        n / 4
    } else {
        n
    }
}

/// The books of an alloc that has to be refused since nothing is left.
#[track_caller]
pub fn exhausted<T>(got: Result<T, AllocError>) -> Exhausted {
    match got {
        Err(AllocError::Exhausted(e)) => *e,
        Err(e) => panic!("{e}"),
        Ok(_) => panic!("there was one"),
    }
}

/// A builder on a fresh software device, base pages.
pub fn soft(capacity: usize) -> Builder {
    Pool::builder()
        .device(Device::soft())
        .access(Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE)
        .capacity(capacity)
        .pages(Pages::Base)
}

/// How many buffers of a length a pool has.
pub fn most_of(pool: &Pool, len: usize) -> usize {
    std::iter::from_fn(|| pool.alloc(len).ok()).collect::<Vec<_>>().len()
}

/// A field of /proc/self/status, in KiB.
pub fn status_kib(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with(&format!("{field}:"))).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Whether any mapping of this process overlaps `addr..addr + len` with access.
pub fn mapped(addr: usize, len: usize) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().any(|line| {
        let (range, rest) = line.split_once(' ').unwrap();
        let (a, b) = range.split_once('-').unwrap();
        let (a, b) = (usize::from_str_radix(a, 16).unwrap(), usize::from_str_radix(b, 16).unwrap());
        rest.starts_with("rw") && a < addr + len && addr < b
    })
}

/// The sizes of the kernel's pages under `addr..addr + len`, each once, as smaps has them.
pub fn page_sizes_of(addr: usize, len: usize) -> Vec<usize> {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut inside, mut sizes, mut covered) = (false, Vec::new(), 0);
    for line in smaps.lines() {
        let first = line.split_whitespace().next().unwrap_or_default();
        if let Some((a, b)) = first.split_once('-') {
            let (a, b) =
                (usize::from_str_radix(a, 16).unwrap(), usize::from_str_radix(b, 16).unwrap());
            inside = a < addr + len && addr < b;
            covered += if inside { b.min(addr + len) - a.max(addr) } else { 0 };
        } else if inside && first == "KernelPageSize:" {
            let kb: usize = line.split_whitespace().nth(1).unwrap().parse().unwrap();
            sizes.push(kb << 10);
        }
    }
    assert_eq!(covered, len, "all of the range is mapped");
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// Numbers without a pattern that a test depends on; the same for the same seed.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Log-uniform over `low..=high`.
    pub fn size(&mut self, low: usize, high: usize) -> usize {
        let (a, b) = ((low as f64).ln(), (high as f64).ln());
        let u = self.next() as f64 / u64::MAX as f64;
        (a + (b - a) * u).exp() as usize
    }
}
