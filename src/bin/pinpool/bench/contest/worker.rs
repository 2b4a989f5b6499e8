//! A contender in a process of its own: jemalloc reads its options once, as it starts, so that it cannot
//! be there tuned and not tuned. The program starts itself anew with the options set, and has that
//! process run one repetition at a time, when it is its turn.
//!
//! The two speak lines: `setup CASE BYTES BYTES_MAX THREADS LIVE SLICES SLICE_NS THREADED` is answered
//! with `ok` or `no`, `rep` with `rep` and four numbers for each operation; anything with `err` and why.
//! Answers carry a mark, since a program may print other things before it gets here.

use std::{
    env,
    io::{self, BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use super::{
    bed::Bed,
    build::Build,
    measure::{Plan, Rep, Runner},
    registry,
    spec::{Case, Spec},
};

const FLAG: &str = "PINPOOL_BENCH_WORKER";
const MARK: &str = "pinpool-worker ";

/// What to set for jemalloc; the variable has the prefix that the crate builds it with.
const CONF: (&str, &str) =
    ("_RJEM_MALLOC_CONF", "tcache_nslots_small_min:256,lg_tcache_nslots_mul:4");

/// Whether this process was started as a worker. It must then call [`serve`] and end.
pub(crate) fn is_worker() -> bool {
    env::var_os(FLAG).is_some()
}

/// Answers until the input ends.
pub(crate) fn serve() -> Result<(), String> {
    let mut runner: Option<Box<dyn Runner>> = None;
    for line in io::stdin().lock().lines() {
        let line = line.map_err(|e| e.to_string())?;
        let answer = match line.split_once(' ') {
            Some(("setup", spec)) => {
                // The last case's memory goes first.
                drop(runner.take());
                match set_up(spec) {
                    Ok(Some(new)) => {
                        runner = Some(new);
                        "ok".to_owned()
                    }
                    Ok(None) => "no".to_owned(),
                    Err(e) => format!("err {}", e.replace('\n', " ")),
                }
            }
            _ => match runner.as_mut().map(|r| r.rep()) {
                Some(Ok(reps)) => write_reps(&reps),
                Some(Err(e)) => format!("err {}", e.replace('\n', " ")),
                None => "err nothing is set up".to_owned(),
            },
        };
        let mut out = io::stdout().lock();
        writeln!(out, "{MARK}{answer}").and_then(|()| out.flush()).map_err(|e| e.to_string())?;
    }
    Ok(())
}

fn set_up(line: &str) -> Result<Option<Box<dyn Runner>>, String> {
    check_options()?;
    let (spec, plan) = read_spec(line).ok_or("a spec that cannot be read")?;
    // It has no pool of its own, and jemalloc needs none.
    let bed = Bed::new(0, 0);
    registry::with("jemalloc", Build { bed: &bed, spec: &spec, plan })
        .unwrap_or_else(|| Err("built without rivals".to_owned()))
}

/// Whether the options have reached jemalloc.
#[cfg(feature = "rivals")]
fn check_options() -> Result<(), String> {
    let (mut value, mut len) = (0isize, size_of::<isize>());
    // SAFETY: the option is a `ssize_t`, and `value` is one, `len` bytes long; nothing is set.
    let failed = unsafe {
        tikv_jemalloc_sys::mallctl(
            c"opt.lg_tcache_nslots_mul".as_ptr(),
            (&raw mut value).cast(),
            &raw mut len,
            std::ptr::null_mut(),
            0,
        )
    };
    match (failed, value) {
        (0, 4) => Ok(()),
        other => Err(format!("jemalloc did not take its options: {other:?}")),
    }
}

#[cfg(not(feature = "rivals"))]
fn check_options() -> Result<(), String> {
    Err("built without rivals".to_owned())
}

fn write_spec(spec: &Spec, plan: Plan) -> String {
    let Spec { case, bytes, bytes_max, threads, live, arenas: _ } = spec;
    let Plan { slices, slice_ns, threaded } = plan;
    let case = case.name();
    format!("{case} {bytes} {bytes_max} {threads} {live} {slices} {slice_ns} {threaded}")
}

fn read_spec(line: &str) -> Option<(Spec, Plan)> {
    let words: Vec<&str> = line.split(' ').collect();
    let [case, bytes, bytes_max, threads, live, slices, slice_ns, threaded] = words[..] else {
        return None;
    };
    let spec = Spec {
        case: Case::from_name(case)?,
        bytes: bytes.parse().ok()?,
        bytes_max: bytes_max.parse().ok()?,
        threads: threads.parse().ok()?,
        live: live.parse().ok()?,
        arenas: 0,
    };
    let plan = Plan {
        slices: slices.parse().ok()?,
        slice_ns: slice_ns.parse().ok()?,
        threaded: threaded.parse().ok()?,
    };
    Some((spec, plan))
}

fn write_reps(reps: &[Rep]) -> String {
    let one = |r: &Rep| format!(" {} {} {} {}", r.min, r.centre, r.p99, r.p999);
    reps.iter().map(one).fold("rep".to_owned(), |line, rep| line + &rep)
}

fn read_reps(line: &str) -> Option<Vec<Rep>> {
    let numbers = line.split(' ').map(str::parse).collect::<Result<Vec<f64>, _>>().ok()?;
    let rep = |c: &[f64]| Rep { min: c[0], centre: c[1], p99: c[2], p999: c[3] };
    Some(numbers.chunks_exact(4).map(rep).collect())
}

/// The other process, seen from the one that the user started.
pub(crate) struct Worker {
    child: Child,
    // Taken by `drop`, so that the child meets its end of input.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts this program anew, with the same arguments.
    pub(crate) fn start() -> Result<Self, String> {
        let program = env::current_exe().map_err(|e| e.to_string())?;
        let mut child = Command::new(program)
            .args(env::args_os().skip(1))
            .env(FLAG, "1")
            .env(CONF.0, CONF.1)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| e.to_string())?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let output = output.ok_or("no output of the worker")?;
        Ok(Self { child, input, output: BufReader::new(output) })
    }

    fn ask(&mut self, line: &str) -> Result<String, String> {
        let input = self.input.as_mut().ok_or("the worker was stopped")?;
        writeln!(input, "{line}").and_then(|()| input.flush()).map_err(|e| e.to_string())?;
        loop {
            let mut answer = String::new();
            if self.output.read_line(&mut answer).map_err(|e| e.to_string())? == 0 {
                return Err("the worker ended".to_owned());
            }
            let Some(answer) = answer.trim_end().strip_prefix(MARK) else { continue };
            return match answer.strip_prefix("err ") {
                Some(e) => Err(e.to_owned()),
                None => Ok(answer.to_owned()),
            };
        }
    }

    /// Sets a case up there; false if it cannot be run.
    pub(crate) fn set_up(&mut self, spec: &Spec, plan: Plan) -> Result<bool, String> {
        Ok(self.ask(&format!("setup {}", write_spec(spec, plan)))? == "ok")
    }

    /// Has the case measured there once.
    pub(crate) fn rep(&mut self) -> Result<Vec<Rep>, String> {
        let answer = self.ask("rep")?;
        let reps = answer.strip_prefix("rep ").and_then(read_reps);
        reps.ok_or_else(|| format!("the worker said {answer:?}"))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.input.take());
        // It ends when its input does; how is of no interest any more.
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_they_were_written() {
        let plan = Plan { slices: 7, slice_ns: 4e3, threaded: true };
        for spec in super::super::spec::Group::Churn.specs() {
            assert_eq!(read_spec(&write_spec(&spec, plan)), Some((spec, plan)));
        }
        let reps = vec![Rep { min: 1.5, centre: 2.25, p99: 3.0, p999: 1e9 }; 2];
        let line = write_reps(&reps);
        assert_eq!(line.strip_prefix("rep ").and_then(read_reps), Some(reps));
    }
}
