//! What a process has of the system's: memory, descriptors, mappings, threads. Read from `/proc`.

use std::fs;

/// At one moment.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Held {
    /// Bytes in memory, in KiB.
    pub(super) rss_kib: u64,
    pub(super) descriptors: u64,
    pub(super) mappings: u64,
    pub(super) threads: u64,
}

impl Held {
    /// Of this process, now; what cannot be read is 0.
    pub(super) fn now() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let field = |name: &str| {
            let line = status.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|l| l.split_whitespace().next()?.parse().ok()).unwrap_or(0)
        };
        let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
        Self {
            rss_kib: field("VmRSS"),
            descriptors: fs::read_dir("/proc/self/fd").map_or(0, |d| d.count() as u64),
            mappings: maps.lines().count() as u64,
            threads: field("Threads"),
        }
    }

    /// The larger of each.
    pub(super) fn max(self, other: Self) -> Self {
        Self {
            rss_kib: self.rss_kib.max(other.rss_kib),
            descriptors: self.descriptors.max(other.descriptors),
            mappings: self.mappings.max(other.mappings),
            threads: self.threads.max(other.threads),
        }
    }
}
