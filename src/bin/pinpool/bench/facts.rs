//! Facts that figures depend on: about the machine, the process and the device.

use std::{fmt, fs};

use pinpool::{Device, device::DeviceInfo};
use serde_json::{Value, json};

use crate::cli::show_bytes;

/// The device and the machine that figures are from.
pub(crate) struct Subject {
    pub(crate) device: DeviceInfo,
    pub(crate) environment: Environment,
}

impl Subject {
    /// Looks around.
    pub(crate) fn of(device: &Device) -> Self {
        Self { device: device.info(), environment: Environment::read() }
    }

    /// A bench's object: what it is about, what the bench has to say, and the processors.
    pub(crate) fn object(&self, bench: &str, own: Value) -> Value {
        let Self { device, environment } = self;
        let mut object = json!({
            "bench": bench,
            "device": device.name,
            "transport": device.transport,
            "kernel": environment.kernel,
        });
        let rest = json!({ "cpu": environment.cpu, "cpus": environment.cpus });
        for part in [own, rest] {
            if let (Value::Object(object), Value::Object(part)) = (&mut object, part) {
                object.extend(part);
            }
        }
        object
    }
}

/// The first lines of what a bench says to people.
impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, environment: Environment { kernel, cpu, cpus, .. } } = self;
        let (name, transport) = (&device.name, &device.transport);
        write!(f, "device  {name} ({transport})\nkernel  {kernel}\ncpu     {cpus} × {cpu}")
    }
}

/// Facts about the machine that figures depend on.
pub(crate) struct Environment {
    /// The kernel's release.
    pub(crate) kernel: String,
    /// The processor's name.
    pub(crate) cpu: String,
    /// How many of them this process may use.
    pub(crate) cpus: usize,
    /// `RLIMIT_MEMLOCK`, soft and hard; `None` is unlimited.
    pub(crate) memlock: [Option<u64>; 2],
    /// Transparent hugepages: `always`, `madvise`, `never`, or off for this process.
    pub(crate) thp: Option<String>,
}

impl Environment {
    /// Looks around.
    pub(crate) fn read() -> Self {
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
        Self {
            kernel: kernel.trim().to_owned(),
            cpu: cpu_name(),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            memlock: memlock_of(&limits),
            thp: thp(),
        }
    }

    /// The limit as people write it.
    pub(crate) fn show_memlock(&self) -> String {
        let [soft, hard] = self.memlock.map(|l| match l {
            None => "unlimited".to_owned(),
            Some(bytes) => show_bytes(usize::try_from(bytes).unwrap_or(usize::MAX)),
        });
        if soft == hard { soft } else { format!("{soft} soft, {hard} hard") }
    }

    /// The limit as an object; null is unlimited.
    pub(crate) fn memlock_json(&self) -> Value {
        json!({ "soft": self.memlock[0], "hard": self.memlock[1] })
    }
}

fn cpu_name() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|l| {
        let (key, value) = l.split_once(':')?;
        matches!(key.trim(), "model name" | "Model" | "cpu").then(|| value.trim().to_owned())
    });
    name.unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// The setting in brackets is the one that holds.
fn thp() -> Option<String> {
    if nix::sys::prctl::get_thp_disable() == Ok(true) {
        return Some("off for this process".to_owned());
    }
    let all = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok()?;
    Some(all.split_once('[')?.1.split_once(']')?.0.to_owned())
}

fn memlock_of(limits: &str) -> [Option<u64>; 2] {
    let line = limits.lines().find_map(|l| l.strip_prefix("Max locked memory")).unwrap_or_default();
    let mut values = line.split_whitespace().map(|v| v.parse().ok());
    [(); 2].map(|()| values.next().flatten())
}

/// A field of `/proc/self/status` that counts memory, in bytes; 0 where there is none.
pub(crate) fn status_bytes(field: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix(field)?.strip_prefix(':'));
    let kb: Option<u64> = line.and_then(|l| l.split_whitespace().next()?.parse().ok());
    kb.unwrap_or(0) << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memlock_limit_is_read() {
        let line =
            "Max locked memory         8388608              unlimited            bytes     \n";
        assert_eq!(memlock_of(line), [Some(8 << 20), None]);
        assert_eq!(memlock_of(""), [None, None]);
    }
}
