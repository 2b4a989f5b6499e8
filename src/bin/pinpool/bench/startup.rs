//! `pinpool bench startup`: how long a pool takes to come up, against threads that map and fault in the
//! same bytes, and against register calls on what those mapped.
#![allow(clippy::disallowed_methods)] // the bare side is what the crate's wrappers are compared with

use std::{
    fs, io,
    ptr::{self, NonNull},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use pinpool::{
    Access, Device, PageSize, Pages, Pool, RegisterError, Stage,
    device::{MrRequest, Registrar},
};
use serde_json::{Value, json};

use super::{
    Bench, Report,
    device::{NoThp, PageChoice, registrar},
    facts::Subject,
    figures::{Axis, Panel, Point, Unit},
    interrupted,
    report::{Progress, Summary, Table},
};
use crate::cli::{DeviceArgs, Failure, parse_bytes, show_bytes};

/// Compare building a pool with mapping and faulting in the same bytes by plain threads.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    device: DeviceArgs,
    /// Bytes of the pool, in whole 2 MiB [default: 8G if that many hugepages are free, else up to 8G, but
    /// no more than half of the memory available; with --quick 512M]
    #[arg(long, value_name = "SIZE", value_parser = parse_capacity)]
    capacity: Option<usize>,
    /// The pages of both sides
    #[arg(long, value_enum, default_value_t = PageChoice::Prefer)]
    pages: PageChoice,
    /// How often each side comes up with each number of threads [default: 5, with --quick 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    reps: Option<u16>,
}

const METHOD: &str = "\
Method: The pool side is all of Builder::build: check, reserve, map, fault in, register, and the pool's \
own tables. The bare side maps the same bytes at once, on pages of the same size, and so many threads \
write to each page of an equal part; it is registered afterwards, in pieces of the pool's arenas, by as \
many threads. Both take turns, with 1 and with 2 threads, after one round of each that is not counted; \
the figures are medians. The register columns add up the times of single calls.

Bias: The bare time holds no registering, the pool's does. With 2 threads the pool registers while it \
faults in, and a call then waits for a processor or for the kernel's lock on the address space, so that \
its register column is no wall time. Base pages are 4 KiB throughout (transparent hugepages are turned \
off for this process). Where the machine is virtual, memory that it has not touched before costs its host \
time; the uncounted round is to have that done with.

Hugepages have to be reserved beforehand: \
`echo 4096 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages` for 8 GiB.";

const HUGE: usize = PageSize::Huge2M.bytes();
const WISHED: usize = 8 << 30;
const THREADS: [usize; 2] = [1, 2];
const ACCESS: Access = Access::LOCAL_WRITE;

fn parse_capacity(text: &str) -> Result<usize, String> {
    let size = parse_bytes(text)?;
    if !(HUGE..=1 << 46).contains(&size) || !size.is_multiple_of(HUGE) {
        return Err(format!("it is no multiple of {} up to 64 TiB", show_bytes(HUGE)));
    }
    Ok(size)
}

/// What is to be brought up.
struct Job {
    device: Device,
    bytes: usize,
    page_size: usize,
    reps: usize,
    /// Until this goes, if pages shall be small.
    _no_thp: Option<NoThp>,
}

impl Job {
    fn of(args: &Args, quick: bool) -> Result<Self, Failure> {
        let device = args.device.open()?;
        let huge = free_hugepages().saturating_mul(HUGE);
        let wished = if quick { 512 << 20 } else { WISHED };
        let (bytes, page_size) = match args.pages {
            PageChoice::Base => (args.capacity.unwrap_or_else(|| fitting(wished)), base_page()),
            PageChoice::Huge2M => (args.capacity.unwrap_or(huge.clamp(HUGE, wished)), HUGE),
            PageChoice::Prefer => {
                let default = || if huge >= wished { wished } else { fitting(wished) };
                let bytes = args.capacity.unwrap_or_else(default);
                (bytes, if huge >= bytes { HUGE } else { base_page() })
            }
        };
        let no_thp = (page_size < HUGE).then(NoThp::new).transpose()?;
        let reps = args.reps.map_or(if quick { 3 } else { 5 }, usize::from);
        Ok(Self { device, bytes, page_size, reps, _no_thp: no_thp })
    }

    fn pages(&self) -> Pages {
        if self.page_size == HUGE { Pages::Require(PageSize::Huge2M) } else { Pages::Base }
    }

    /// Builds a pool, and gives its times and the lengths of its arenas.
    fn pool(&self, threads: usize, progress: &Progress) -> Result<(Sample, Vec<usize>), Failure> {
        let mut show = progress.shower();
        let builder = Pool::builder()
            .device(self.device.clone())
            .access(ACCESS)
            .capacity(self.bytes)
            .pages(self.pages())
            .start_threads(threads)
            .on_progress(move |p| {
                if p.stage == Stage::FaultIn {
                    show(p.bytes_done as f64 / p.bytes_total as f64);
                }
            });
        let start = Instant::now();
        let pool = builder.build().map_err(Failure::of)?;
        let up = start.elapsed();
        let register = pool.arenas().iter().map(|a| a.register_time).sum();
        let lens = pool.arenas().iter().map(|a| a.len).collect();
        pool.close().map_err(Failure::of)?;
        Ok((Sample { up, register }, lens))
    }

    fn bare(&self, threads: usize, arenas: &[usize]) -> Result<Sample, Failure> {
        let failed = |what, e: io::Error| {
            let (bytes, page) = (show_bytes(self.bytes), show_bytes(self.page_size));
            Failure::Failed(format!("{what} {bytes} on pages of {page} by hand: {e}"))
        };
        let start = Instant::now();
        let mapping = Mapping::new(self.bytes, self.page_size).map_err(|e| failed("mapping", e))?;
        mapping.touch(threads);
        let up = start.elapsed();
        let register =
            mapping.register(threads, arenas, registrar(&self.device)).map_err(Failure::of)?;
        Ok(Sample { up, register })
    }
}

fn base_page() -> usize {
    // SAFETY: sysconf reads a constant of the system.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Hugepages that are free and not promised.
fn free_hugepages() -> usize {
    let count = |file: &str| {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{file}");
        fs::read_to_string(path).ok().and_then(|t| t.trim().parse::<usize>().ok()).unwrap_or(0)
    };
    count("free_hugepages").saturating_sub(count("resv_hugepages"))
}

/// Half of the memory available, in whole 64 MiB, up to what is wished.
fn fitting(wished: usize) -> usize {
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = info.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let kb: usize = line.and_then(|l| l.split_whitespace().next()?.parse().ok()).unwrap_or(0);
    const STEP: usize = 64 << 20;
    ((kb << 10) / 2 / STEP * STEP).clamp(STEP, wished)
}

#[derive(Clone, Copy)]
struct Sample {
    /// Until all is there.
    up: Duration,
    /// In register calls.
    register: Duration,
}

/// Memory mapped by hand.
struct Mapping {
    addr: NonNull<u8>,
    len: usize,
    page: usize,
}

// SAFETY: it owns its range, which is written through atomics or before it is shared (`touch`).
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(len: usize, page: usize) -> io::Result<Self> {
        let mut flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        if page == HUGE {
            flags |= libc::MAP_HUGETLB | libc::MAP_HUGE_2MB;
        }
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: without an address the system picks unused space.
        let p = unsafe { libc::mmap(ptr::null_mut(), len, prot, flags, -1, 0) };
        if p == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let addr = NonNull::new(p.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { addr, len, page })
    }

    /// Writes to each page; the system zeroes it then.
    fn touch(&self, threads: usize) {
        let pages = self.len / self.page;
        let part = |i: usize| {
            for n in pages * i / threads..pages * (i + 1) / threads {
                // SAFETY: `n` is below the number of pages, so the byte lies in the mapping; parts do not
                // overlap, so no other thread writes it.
                unsafe { self.addr.add(n * self.page).write_volatile(0) };
            }
        };
        thread::scope(|scope| {
            (1..threads).for_each(|i| drop(scope.spawn(move || part(i))));
            part(0);
        });
    }

    /// Registers it in pieces, and deregisters them; gives the time of the register calls.
    fn register(
        &self,
        threads: usize,
        pieces: &[usize],
        registrar: &dyn Registrar,
    ) -> Result<Duration, RegisterError> {
        let starts: Vec<usize> = pieces
            .iter()
            .scan(0, |at, len| {
                *at += len;
                Some(*at - len)
            })
            .collect();
        let next = AtomicUsize::new(0);
        let all = Mutex::new((Duration::ZERO, Vec::new(), None));
        let work = || {
            // A number is given out once; what it leads to is only read.
            while let Some(i) = Some(next.fetch_add(1, Relaxed)).filter(|&i| i < pieces.len()) {
                // SAFETY: the pieces together are as long as the mapping, so this lies inside it.
                let addr = unsafe { self.addr.add(starts[i]) };
                let len = pieces[i];
                let request = MrRequest { addr, len, page_size: self.page, access: ACCESS };
                let start = Instant::now();
                // SAFETY: mapped and in memory, and deregistered below, before it is unmapped.
                let made = unsafe { registrar.register(&request) };
                let took = start.elapsed();
                let mut all = all.lock().unwrap_or_else(|e| e.into_inner());
                all.0 += took;
                match made {
                    Ok(r) => all.1.push(r.handle),
                    Err(e) => all.2 = all.2.take().or(Some(e)),
                }
            }
        };
        thread::scope(|scope| {
            (1..threads).for_each(|_| drop(scope.spawn(work)));
            work();
        });
        let (time, handles, mut error) = all.into_inner().unwrap_or_else(|e| e.into_inner());
        for handle in handles {
            // SAFETY: registered above with this registrar, once each.
            if let Err(e) = unsafe { registrar.deregister(handle) } {
                error = error.or(Some(e));
            }
        }
        error.map_or(Ok(time), Err)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and nothing refers to it any more.
        unsafe { libc::munmap(self.addr.as_ptr().cast(), self.len) };
    }
}

/// What came up with one number of threads.
#[derive(Default)]
struct Row {
    threads: usize,
    pool: Vec<Sample>,
    bare: Vec<Sample>,
}

impl Row {
    /// Medians in ms: pool, bare, register, bare register.
    fn ms(&self) -> [f64; 4] {
        let median = |samples: &[Sample], part: fn(&Sample) -> Duration| {
            let ms: Vec<f64> = samples.iter().map(|s| part(s).as_secs_f64() * 1e3).collect();
            Summary::of(&ms).map_or(0.0, |s| s.median)
        };
        [
            median(&self.pool, |s| s.up),
            median(&self.bare, |s| s.up),
            median(&self.pool, |s| s.register),
            median(&self.bare, |s| s.register),
        ]
    }
}

pub(crate) struct Startup;

impl Bench for Startup {
    type Args = Args;

    fn name(&self) -> &'static str {
        "startup"
    }

    fn method(&self) -> &'static str {
        METHOD
    }

    fn run(&self, args: &Args, quick: bool) -> Result<Report, Failure> {
        let job = Job::of(args, quick)?;
        let rows = measure(&job)?;
        Ok(Report { object: object(&job, &rows), text: table(&job, &rows), failures: Vec::new() })
    }

    fn panels(&self, object: &Value) -> Vec<Panel> {
        panels(object)
    }
}

/// Has both sides come up in turns, until all is done or the user wants no more.
fn measure(job: &Job) -> Result<Vec<Row>, Failure> {
    let mut rows: Vec<Row> =
        THREADS.iter().map(|&threads| Row { threads, ..Row::default() }).collect();
    let mut progress = Progress::new((job.reps + 1) * rows.len() * 2);
    for rep in 0..=job.reps {
        for row in &mut rows {
            if interrupted() {
                break;
            }
            progress.at(format!("{} on {} threads", show_bytes(job.bytes), row.threads));
            let (pool, arenas) = job.pool(row.threads, &progress)?;
            progress.step_done();
            let bare = job.bare(row.threads, &arenas)?;
            progress.step_done();
            // The first round has the machine's memory and the program's code brought up.
            if rep > 0 {
                row.pool.push(pool);
                row.bare.push(bare);
            }
        }
    }
    rows.retain(|row| !row.pool.is_empty());
    Ok(rows)
}

fn speed_up(rows: &[Row]) -> f64 {
    let [one, two] = [0, 1].map(|i: usize| rows.get(i).map_or(f64::NAN, |r| r.ms()[0]));
    one / two
}

fn object(job: &Job, rows: &[Row]) -> Value {
    let hundredths = |ms: f64| (ms * 100.0).round() / 100.0;
    let row = |r: &Row| {
        let [pool, bare, register, bare_register] = r.ms().map(hundredths);
        json!({
            "bytes": job.bytes,
            "page_size": job.page_size,
            "threads": r.threads,
            "pool_ms": pool,
            "bare_ms": bare,
            "register_ms": register,
            "bare_register_ms": bare_register,
        })
    };
    let own = json!({
        "reps": job.reps,
        "rows": rows.iter().map(row).collect::<Vec<_>>(),
        "speed_up": hundredths(speed_up(rows)),
    });
    Subject::of(&job.device).object("startup", own)
}

fn table(job: &Job, rows: &[Row]) -> String {
    let mut table = Table::new(&[
        "\nthreads",
        "pool\nup, ms",
        "bare\nup, ms",
        "\nratio",
        "pool\nregister, ms",
        "bare\nregister, ms",
    ]);
    for row in rows {
        let [pool, bare, register, bare_register] = row.ms();
        table.row(vec![
            row.threads.to_string(),
            format!("{pool:.1}"),
            format!("{bare:.1}"),
            format!("{:.2}", pool / bare),
            format!("{register:.2}"),
            format!("{bare_register:.2}"),
        ]);
    }
    format!(
        "{}\nmemory  {} on pages of {}\n\n{table}\n\
         medians of {}; the pool comes up {:.2} times as fast on 2 threads as on 1",
        Subject::of(&job.device),
        show_bytes(job.bytes),
        show_bytes(job.page_size),
        job.reps,
        speed_up(rows),
    )
}

/// The figures of such an object.
fn panels(object: &Value) -> Vec<Panel> {
    let rows = object["rows"].as_array().map(Vec::as_slice).unwrap_or_default();
    let points = |sides: [(&str, &str); 2]| {
        let mut points = Vec::new();
        for row in rows {
            let threads = row["threads"].as_f64().unwrap_or_default();
            points.extend(sides.iter().filter_map(|(name, key)| {
                Some(Point::single(name, threads, row[key].as_f64()? * 1e6))
            }));
        }
        points
    };
    let bytes = rows.first().and_then(|r| r["bytes"].as_u64()).unwrap_or(0);
    let bytes = show_bytes(bytes as usize);
    let panel =
        |id, title: String, sides| Panel::new(id, &title, Unit::Time, Axis::Threads, points(sides));
    vec![
        panel(
            "up",
            format!("Until {bytes} are there"),
            [
                ("pool: map, fault in, register", "pool_ms"),
                ("plain threads: map, fault in", "bare_ms"),
            ],
        ),
        panel(
            "register",
            format!("In register calls for {bytes}"),
            [("pool", "register_ms"), ("plain register calls", "bare_register_ms")],
        ),
    ]
}
