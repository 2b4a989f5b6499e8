//! The machine: its name, and which processor a thread runs on.

use std::{fs, sync::OnceLock};

use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};

/// The processors that this process may use, as it was started.
fn allowed() -> &'static [usize] {
    static ALLOWED: OnceLock<Vec<usize>> = OnceLock::new();
    ALLOWED.get_or_init(|| {
        // Fails where there are more processors than the set has bits: then nothing is pinned.
        let Ok(set) = sched_getaffinity(Pid::from_raw(0)) else { return Vec::new() };
        (0..CpuSet::count()).filter(|&i| set.is_set(i).unwrap_or(false)).collect()
    })
}

/// How many threads run at a time.
pub(crate) fn count() -> usize {
    match allowed().len() {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        n => n,
    }
}

fn set(processors: &[usize]) -> bool {
    let mut set = CpuSet::new();
    let all = processors.iter().all(|&i| set.set(i).is_ok());
    all && !processors.is_empty() && sched_setaffinity(Pid::from_raw(0), &set).is_ok()
}

/// Binds the calling thread to one processor, the `i`th going round; false if that is not permitted.
pub(crate) fn pin(i: usize) -> bool {
    let allowed = allowed();
    !allowed.is_empty() && set(&allowed[i % allowed.len()..][..1])
}

/// Lets the calling thread run where the process might when it started.
pub(crate) fn unpin() {
    set(allowed());
}

/// The processor's name.
pub(crate) fn model() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == "model name").then(|| value.trim().to_owned())
    });
    name.unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// The kernel's release.
pub(crate) fn kernel() -> String {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    release.trim().to_owned()
}
