//! `pinpool top`: the map of a pool in a running process, through the socket that the process serves it on.

use std::{
    io::{self, IsTerminal, Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use crate::cli::{Failure, emit};

/// Show what is where in the pool of a running process
///
/// The process serves it by `Pool::serve_map(SOCKET)` (feature `top`). Looking costs it what `Pool::map` costs, and
/// changes nothing. Shows it again and again, until interrupted, unless told otherwise.
#[derive(clap::Args)]
#[command(after_long_help = "\
Exit code: 0 shown; 1 the process went away; 2 wrong call, or nobody serves a map there.")]
pub(crate) struct Args {
    /// Where the process serves it
    socket: PathBuf,
    /// Show it once
    #[arg(long)]
    once: bool,
    /// Print one JSON object, once, instead of text
    #[arg(long)]
    json: bool,
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = parse_seconds)]
    interval: f64,
}

/// The longest answer that is read.
const LONGEST: u64 = 64 << 20;
const PATIENCE: Duration = Duration::from_secs(10);

fn parse_seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is not a number"))?;
    if (0.1..=86_400.0).contains(&seconds) {
        Ok(seconds)
    } else {
        Err("0.1 to 86400 seconds".to_owned())
    }
}

/// Shows it.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let ask = || look(&args.socket, if args.json { "json" } else { "text" });
    let first = ask().map_err(|e| {
        Failure::Usage(format!("{}: nobody serves a pool's map there: {e}", args.socket.display()))
    })?;
    if args.once || args.json {
        return emit(&first);
    }
    show(&first)?;
    loop {
        thread::sleep(Duration::from_secs_f64(args.interval));
        let next = ask().map_err(|e| {
            Failure::Failed(format!("{}: the process went away: {e}", args.socket.display()))
        })?;
        show(&next)?;
    }
}

/// On a terminal in place of the last one.
fn show(text: &str) -> Result<(), Failure> {
    if io::stdout().is_terminal() {
        // No more lines than there is room for, less the one that the cursor ends on: what comes first matters most.
        let rows = terminal_size::terminal_size().map_or(usize::MAX, |(_, h)| usize::from(h.0));
        let lines: Vec<_> = text.trim_end().lines().take(rows.saturating_sub(1).max(1)).collect();
        // Home, and clear to the end as each line is written.
        let lines = lines.join("\x1b[K\n");
        return emit(&format!("\x1b[H{lines}\x1b[K\x1b[J"));
    }
    emit(text)?;
    emit("")
}

fn look(socket: &Path, how: &str) -> io::Result<String> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(format!("{how}\n").as_bytes())?;
    let mut answer = String::new();
    stream.take(LONGEST).read_to_string(&mut answer)?;
    if answer.is_empty() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it answers nothing"));
    }
    Ok(answer)
}
