//! What is asked on the command line, and how an unfit call is answered: one sentence, exit code 2.

use std::{
    io::{self, Write},
    process::ExitCode,
};

use clap::{Parser, Subcommand, error::ErrorKind};
use pinpool::{Bytes, Device};

use crate::{bench::Asked, doctor, soak, top};

/// Prepares for, and measures, a pinned-memory pool for RDMA on this machine.
#[derive(Parser)]
#[command(name = "pinpool", version, propagate_version = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Subcommand)]
pub(crate) enum Command {
    Doctor(doctor::Args),
    /// Measure what the pool saves.
    #[command(subcommand)]
    Bench(Asked),
    Soak(soak::Args),
    Top(top::Args),
}

impl Cli {
    /// Reads the arguments. Prints help and version, and leaves, where those are asked for.
    pub(crate) fn read() -> Result<Self, Failure> {
        Self::try_parse().map_err(|e| match e.kind() {
            ErrorKind::DisplayHelp
            | ErrorKind::DisplayVersion
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => e.exit(),
            _ => Failure::Usage(sentence(&e.render().to_string())),
        })
    }
}

/// Makes one sentence of clap's paragraphs: what is wrong, its tips, no usage.
fn sentence(rendered: &str) -> String {
    let wrong = rendered
        .split("\n\n")
        .filter(|p| !p.starts_with("Usage:") && !p.starts_with("For more information"))
        .flat_map(|p| p.lines().map(str::trim).filter(|l| !l.is_empty()));
    let mut text = String::new();
    for line in wrong {
        let (glue, line) = match line.strip_prefix("tip: ") {
            Some(tip) => ("; ", tip),
            None => (" ", line),
        };
        if !text.is_empty() {
            text.push_str(glue);
        }
        text.push_str(line);
    }
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    format!("{text} (see --help)")
}

/// Why the program ends with something other than 0.
pub(crate) enum Failure {
    /// The call was wrong, or what it names is not there.
    Usage(String),
    /// Something failed underway.
    Failed(String),
    /// The user interrupted it.
    Interrupted,
}

impl Failure {
    /// Something failed underway, for this reason.
    pub(crate) fn of(reason: impl ToString) -> Self {
        Self::Failed(reason.to_string())
    }

    /// Says it on stderr and gives the exit code.
    pub(crate) fn report(&self) -> ExitCode {
        say(self.text());
        ExitCode::from(match self {
            Self::Usage(_) => 2,
            Self::Failed(_) => 1,
            Self::Interrupted => 130,
        })
    }

    /// What it says.
    pub(crate) fn text(&self) -> &str {
        match self {
            Self::Usage(text) | Self::Failed(text) => text,
            Self::Interrupted => {
                "interrupted; everything was given back, and the report is partial"
            }
        }
    }
}

/// Prints the result on stdout.
pub(crate) fn emit(result: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    writeln!(out, "{}", result.trim_end())
        .and_then(|()| out.flush())
        .map_err(|e| Failure::Failed(format!("the result could not be written to stdout: {e}")))
}

/// Prints a line for the user beside the result. A closed stderr is no reason to stop.
pub(crate) fn say(text: &str) {
    let _ = writeln!(io::stderr(), "pinpool: {text}");
}

#[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
const NONE: &str = "has no RDMA device; `./rxe-setup.sh -- COMMAND` runs a command with a soft one, \
                    and --soft measures without any";

/// Which device.
#[derive(clap::Args)]
pub(crate) struct DeviceArgs {
    /// The verbs device by name, as `ibv_devices` or `rdma link` prints it [default: the first one
    /// with an active port]
    #[arg(long, value_name = "NAME", conflicts_with = "soft")]
    device: Option<String>,
    /// Use the software device: registers in this process with mlock, needs no RDMA. Its figures say
    /// nothing of a NIC
    #[arg(long)]
    soft: bool,
}

impl DeviceArgs {
    /// The flags that ask for the same.
    pub(crate) fn flags(&self) -> Vec<String> {
        let device = self.device.iter().flat_map(|d| ["--device".to_owned(), d.clone()]);
        device.chain(self.soft.then(|| "--soft".to_owned())).collect()
    }

    /// Opens the device asked for; never another one in its place.
    pub(crate) fn open(&self) -> Result<Device, Failure> {
        if self.soft { Ok(Device::soft()) } else { self.open_verbs() }
    }

    /// As [`open`](DeviceArgs::open), but `None` when no device was named and none can be had.
    pub(crate) fn open_if_any(&self) -> Result<Option<Device>, Failure> {
        match self.open() {
            Ok(device) => Ok(Some(device)),
            Err(_) if self.device.is_none() => Ok(None),
            Err(e) => Err(e),
        }
    }

    #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
    fn open_verbs(&self) -> Result<Device, Failure> {
        use pinpool::DeviceError;
        let opened = match &self.device {
            Some(name) => Device::open(name),
            None => Device::first(),
        };
        opened.map_err(|e| match (&self.device, e) {
            (None, DeviceError::NoDevice) => Failure::Usage(format!("this machine {NONE}")),
            (Some(name), DeviceError::NoDevice) => {
                Failure::Usage(format!("there is no {name}, for this machine {NONE}"))
            }
            (Some(name), e @ DeviceError::Verbs { .. }) => {
                Failure::Usage(format!("{name} cannot be opened: {e}"))
            }
            (_, e) => Failure::Usage(e.to_string()),
        })
    }

    #[cfg(not(any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]
    fn open_verbs(&self) -> Result<Device, Failure> {
        let asked = self.device.as_deref().map(|d| format!("{d}: ")).unwrap_or_default();
        Err(Failure::Usage(format!(
            "{asked}this program was built without a verbs binding (feature rdma-sys or \
             rdma-mummy-sys) and knows the software device only; ask for that with --soft"
        )))
    }
}

/// Reads a byte count: a number, and perhaps K, M or G (binary; `KiB` and `KB` mean the same).
pub(crate) fn parse_bytes(text: &str) -> Result<usize, String> {
    let bad = || format!("{text:?} is not a size; write 4096, 64K or 16M");
    let lower = text.trim().to_ascii_lowercase();
    let unit = lower.trim_start_matches(|c: char| c.is_ascii_digit());
    let shift = match unit {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        _ => return Err(bad()),
    };
    let digits = &lower[..lower.len() - unit.len()];
    if digits.is_empty() {
        return Err(bad());
    }
    // A number too long for the machine is out of every range, and is told so.
    let number: usize = digits.parse().unwrap_or(usize::MAX);
    Ok(number.saturating_mul(1 << shift))
}

/// A byte count as people write it.
pub(crate) fn show_bytes(bytes: usize) -> String {
    Bytes(bytes as u64).to_string()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_arguments_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes_are_read_in_binary_units() {
        for (text, bytes) in
            [("4096", 4096), ("4K", 4096), ("64kib", 65536), ("1MB", 1 << 20), ("2g", 2 << 30)]
        {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        assert_eq!(parse_bytes("99999999999999999999999G"), Ok(usize::MAX));
        for text in ["", "K", "-4K", "4.5K", "4 K", "4X", "4KK"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn an_unfit_call_is_answered_with_one_line() {
        let e = Cli::try_parse_from(["pinpool", "bench", "registration", "--jsn"]).err();
        let text = sentence(&e.expect("refused").render().to_string());
        assert!(text.contains("'--jsn'") && text.contains("--json"), "{text}");
        assert!(!text.contains('\n') && !text.contains("Usage"), "{text}");
    }
}
