//! `pinpool bench lease`: what it costs to let a peer reach one buffer and to take that back, by a lease and
//! by registering the buffer.

use std::{
    ptr::NonNull,
    time::{Duration, Instant},
};

#[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
use pinpool::loopback::Pair;
use pinpool::{Access, Buf, Device, LeaseQp, Pool, device::MrRequest};
use serde_json::{Value, json};

use super::{
    Bench, Report,
    device::{GRANULE, NoThp, PageChoice, in_order, parse_granules, registrar},
    facts::Subject,
    figures::{Axis, Panel, Point, Unit},
    interrupted,
    report::{self, Progress, Summary, Table},
};
use crate::cli::{DeviceArgs, Failure, show_bytes};

/// Compare leasing a buffer of a pool with registering it.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    device: DeviceArgs,
    /// Buffer sizes, 4K to 64M, in whole 4 KiB
    #[arg(long, value_name = "SIZE,..", value_delimiter = ',', value_parser = parse_size)]
    #[arg(default_value = "4K,64K,1M,16M")]
    sizes: Vec<usize>,
    /// How often each side does it with each size, rounded up to whole runs of 20 [default: 500, with
    /// --quick 100]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    samples: Option<u32>,
    /// The pages that the buffers are on
    #[arg(long, value_enum, default_value_t = PageChoice::Prefer)]
    pages: PageChoice,
}

const METHOD: &str = "\
Method: One pool, one queue pair. lease: Lease::exchange, which ends the lease of one buffer and leases \
another of that size, chained in one post, as a server does that always has one out: one lease and one \
revocation, waited for until the new key works and the old one is refused. apart: Buf::lease and \
Lease::revoke, each posted and waited for by itself. register: a buffer's memory is registered with a key \
of its own and deregistered. All grant the peer the same right, to write. The sides take turns, in runs of \
20 after one that is not counted, so that none pays for what the one before it left in the caches; the \
figures are medians, less the least cost of reading the clock.

Bias: One thread, one queue pair, nothing else under way on it. On a device made of software, or in an \
emulated guest, a completion waits for the system to run the device's code. The software device's \
registering is an mlock of pages that are locked already.

Proof: With each size, a byte is written by the peer through a lease before anything is timed.";

const LARGEST: usize = 64 << 20;
/// Samples that a side takes in a row.
const RUN: usize = 20;
const RIGHTS: Access = Access::REMOTE_WRITE;

fn parse_size(text: &str) -> Result<usize, String> {
    parse_granules(text, LARGEST)
}

/// What the peer comes through.
enum Peer {
    Soft,
    #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
    Verbs(Box<Pair>),
}

/// The bench while it runs.
struct Run {
    // Leases end before the pair goes.
    qp: LeaseQp,
    peer: Peer,
    pool: Pool,
    device: Device,
    clock: Duration,
    /// Until this goes, if pages shall be small.
    _no_thp: Option<NoThp>,
}

#[derive(Default)]
struct Row {
    bytes: usize,
    lease: Vec<f64>,
    apart: Vec<f64>,
    register: Vec<f64>,
}

/// The bench.
pub(crate) struct Leases;

impl Bench for Leases {
    type Args = Args;

    fn name(&self) -> &'static str {
        "lease"
    }

    fn method(&self) -> &'static str {
        METHOD
    }

    fn run(&self, args: &Args, quick: bool) -> Result<Report, Failure> {
        let mut run = Run::start(args)?;
        let samples = args.samples.unwrap_or(if quick { 100 } else { 500 });
        let sizes = in_order(&args.sizes);
        let mut progress = Progress::new(sizes.len());
        let mut rows = Vec::new();
        for bytes in sizes {
            progress.at(show_bytes(bytes));
            rows.push(run.row(bytes, samples as usize, &progress)?);
            progress.step_done();
        }
        drop(progress);
        rows.retain(|row| !row.register.is_empty());
        Ok(run.report(&rows))
    }

    fn panels(&self, object: &Value) -> Vec<Panel> {
        let mut points = Vec::new();
        for row in object["rows"].as_array().into_iter().flatten() {
            let x = row["bytes"].as_f64().unwrap_or_default();
            let sides = [
                ("lease + revoke", "lease_ns"),
                ("lease + revoke, posted apart", "apart_ns"),
                ("register + deregister", "register_ns"),
            ];
            points.extend(
                sides
                    .iter()
                    .filter_map(|(name, key)| Some(Point::single(name, x, row[key].as_f64()?))),
            );
        }
        let title = "A key of its own for a buffer, and its end";
        vec![Panel::new("time", title, Unit::Time, Axis::Bytes, points)]
    }
}

impl Run {
    fn start(args: &Args) -> Result<Self, Failure> {
        let device = args.device.open()?;
        let pages = args.pages.pages();
        let no_thp = NoThp::for_pages(pages)?;
        let largest = args.sizes.iter().copied().max().unwrap_or(GRANULE);
        // The buffer, the next one, and a page to write from.
        let capacity = (2 * largest + (2 << 20)).next_multiple_of(2 << 20);
        let pool = Pool::builder()
            .device(device.clone())
            .access(Access::LOCAL_WRITE | Access::MW_BIND)
            .capacity(capacity)
            .arena_size(capacity.next_power_of_two())
            .pages(pages)
            .build()
            .map_err(Failure::of)?;
        let (peer, qp) = connect(&device)?;
        Ok(Self { qp, peer, pool, device, clock: report::clock_cost(), _no_thp: no_thp })
    }

    /// What is to be said.
    fn report(&self, rows: &[Row]) -> Report {
        let page_size = self.pool.arenas()[0].page_size;
        let support = self.qp.support().to_string();
        let stats = self.qp.stats();
        let subject = Subject::of(&self.device);
        let own = json!({
            "page_size": page_size,
            "rows": rows.iter().map(Row::json).collect::<Vec<_>>(),
            "windows": stats.windows,
            "leases": stats.leased,
            "support": support,
        });
        let mut table = Table::new(&[
            "size",
            "lease +\nrevoke",
            "posted\napart",
            "register +\nderegister",
            "lease /\nregister",
        ]);
        rows.iter().for_each(|row| table.row(row.cells()));
        let text = format!(
            "{subject}\npages   {}\nwindows {support}; {} of them served {} leases\n\n{table}",
            show_bytes(page_size),
            stats.windows,
            stats.leased,
        );
        Report { object: subject.object("lease", own), text, failures: Vec::new() }
    }

    /// Measures one size, until it has its samples or the user wants no more.
    fn row(&mut self, bytes: usize, samples: usize, progress: &Progress) -> Result<Row, Failure> {
        let mut row = Row { bytes, ..Row::default() };
        let mut buf = self.pool.alloc(bytes).map_err(Failure::of)?;
        let mut other = self.pool.alloc(bytes).map_err(Failure::of)?;
        buf = self.prove(buf)?;
        self.qp.reserve(2).map_err(Failure::of)?;
        let ns = |d: Duration| d.saturating_sub(self.clock).as_nanos() as f64;
        while row.register.len() < samples {
            if interrupted() {
                break;
            }
            for i in 0..=RUN {
                let (took, back) = self.apart(buf)?;
                buf = back;
                row.apart.extend((i > 0).then(|| ns(took)));
            }
            let mut lease = buf.lease(&self.qp, RIGHTS).map_err(Failure::of)?;
            for i in 0..=RUN {
                let start = Instant::now();
                let (ended, next) = lease.exchange(other, RIGHTS).map_err(Failure::of)?;
                let took = start.elapsed();
                (other, lease) = (ended, next);
                row.lease.extend((i > 0).then(|| ns(took)));
            }
            buf = lease.revoke().map_err(Failure::of)?;
            for i in 0..=RUN {
                let took = self.register(&buf)?;
                row.register.extend((i > 0).then(|| ns(took)));
            }
            progress.share(row.register.len() as f64 / samples as f64);
        }
        Ok(row)
    }

    fn apart(&self, buf: Buf) -> Result<(Duration, Buf), Failure> {
        let start = Instant::now();
        let lease = buf.lease(&self.qp, RIGHTS).map_err(Failure::of)?;
        let buf = lease.revoke().map_err(Failure::of)?;
        Ok((start.elapsed(), buf))
    }

    /// Registers the buffer's own memory once more, and deregisters it.
    fn register(&self, buf: &Buf) -> Result<Duration, Failure> {
        let registrar = registrar(&self.device);
        let addr = NonNull::new(buf.as_ptr().cast_mut()).ok_or_else(|| Failure::of("null"))?;
        let page_size = self.pool.arenas()[0].page_size;
        let access = Access::LOCAL_WRITE | RIGHTS;
        let request = MrRequest { addr, len: buf.len(), page_size, access };
        let start = Instant::now();
        // SAFETY: the buffer's bytes, whole base pages, are mapped as long as it lives, and are
        // deregistered below.
        let made = unsafe { registrar.register(&request) }.map_err(Failure::of)?;
        // SAFETY: registered just now, and passed once.
        unsafe { registrar.deregister(made.handle) }.map_err(Failure::of)?;
        Ok(start.elapsed())
    }

    /// Has the peer write a byte to the leased buffer.
    fn prove(&mut self, mut buf: Buf) -> Result<Buf, Failure> {
        const MARK: u8 = 0x5a;
        buf[0] = 0;
        let mut from = self.pool.alloc(GRANULE).map_err(Failure::of)?;
        from[0] = MARK;
        let lease = buf.lease(&self.qp, RIGHTS).map_err(Failure::of)?;
        let to = lease.remote();
        match &mut self.peer {
            Peer::Soft => {
                let soft =
                    self.device.as_soft().ok_or_else(|| Failure::of("not the software device"))?;
                // SAFETY: nobody has a reference to the leased bytes.
                unsafe { soft.write(to.rkey, to.addr, &from[..1]) }.map_err(Failure::of)?;
            }
            #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
            Peer::Verbs(pair) => {
                let one = from.sge_range(0, 1).ok_or_else(|| Failure::of("no byte"))?;
                // SAFETY: both buffers outlive the call, and nobody uses their bytes meanwhile.
                unsafe { pair.write(one, to.addr, to.rkey) }.map_err(Failure::of)?;
            }
        }
        let buf = lease.revoke().map_err(Failure::of)?;
        if buf[0] != MARK {
            return Err(Failure::of("a byte written through a lease did not arrive"));
        }
        Ok(buf)
    }
}

fn connect(device: &Device) -> Result<(Peer, LeaseQp), Failure> {
    #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
    if device.as_verbs().is_some() {
        let mut pair = Pair::connect(device).map_err(Failure::of)?;
        let qp = LeaseQp::of_pair(device, &mut pair).map_err(Failure::of)?;
        return Ok((Peer::Verbs(Box::new(pair)), qp));
    }
    Ok((Peer::Soft, LeaseQp::soft(device).map_err(Failure::of)?))
}

impl Row {
    /// Medians: lease, apart, register.
    fn medians(&self) -> [f64; 3] {
        [&self.lease, &self.apart, &self.register].map(|s| Summary::of(s).map_or(0.0, |s| s.median))
    }

    fn json(&self) -> Value {
        let [lease, apart, register] = self.medians().map(report::rounded);
        json!({
            "bytes": self.bytes,
            "lease_ns": lease,
            "register_ns": register,
            "apart_ns": apart,
            "samples": self.lease.len(),
        })
    }

    fn cells(&self) -> Vec<String> {
        let [lease, apart, register] = self.medians();
        vec![
            show_bytes(self.bytes),
            report::show_ns(lease),
            report::show_ns(apart),
            report::show_ns(register),
            format!("{:.2}", lease / register),
        ]
    }
}
