//! `pinpool bench guards`: what a pair costs in a pool without guards, with each, and with all.

use std::time::Instant;

use pinpool::{Device, Guards, Pages, Pool, Track};
use serde_json::{Map, Value, json};

use super::{
    Bench, Report,
    device::{NoThp, PageChoice, in_order},
    facts::Subject,
    figures::{Axis, Panel, Point, Unit},
    interrupted,
    report::{self, Progress, Summary, Table},
};
use crate::cli::{DeviceArgs, Failure, parse_bytes, show_bytes};

/// Compare pools with guards with one that has none.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    device: DeviceArgs,
    /// Buffer sizes, 1 to 1M
    #[arg(long, value_name = "SIZE,..", value_delimiter = ',', value_parser = parse_size)]
    #[arg(default_value = "256,4K,64K")]
    sizes: Vec<usize>,
    /// How many samples of each pool with each size, of 200 pairs each [default: 300, with --quick 50]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    samples: Option<u32>,
    /// The pages that the buffers are on
    #[arg(long, value_enum, default_value_t = PageChoice::Prefer)]
    pages: PageChoice,
}

const METHOD: &str = "\
Method: One pool for each kind of guard, one thread. A pair is an alloc, the store of the buffer's first byte, \
and its drop. A sample is the mean of 200 pairs in a row; the pools take turns, sample by sample, after one that \
is not counted. Figures are medians; the ratio is that of the medians to the pool without guards.

Bias: One thread meets no other at the slabs' lock, which every pair of a guarded pool takes. A pair alone has its \
block in the processor's cache; what a guard reads and writes of blocks that are not costs more. The quarantine \
(1 MiB) has each pair meet another block, as a pool in use does.

Proof: A byte that is written late, and one beyond an end, are told by the pool with all guards before anything is \
timed.";

const LARGEST: usize = 1 << 20;
const QUARANTINE: usize = 1 << 20;
const CAPACITY: usize = 16 << 20;
/// Pairs of one sample.
const RUN: u32 = 200;

fn parse_size(text: &str) -> Result<usize, String> {
    let size = parse_bytes(text)?;
    if !(1..=LARGEST).contains(&size) {
        return Err(format!("sizes go from 1 to {}", show_bytes(LARGEST)));
    }
    Ok(size)
}

/// What is compared, the pool without guards first.
fn sides() -> [(&'static str, Guards, Track); 7] {
    let (none, off) = (Guards::new(), Track::every(0));
    [
        ("off", none, off),
        ("poison", none.poison(true), off),
        ("canary", none.canary(true), off),
        ("quarantine", none.quarantine(QUARANTINE), off),
        ("zero_on_free", none.zero_on_free(true), off),
        ("track", none, Track::all()),
        (
            "all",
            none.poison(true).canary(true).quarantine(QUARANTINE).zero_on_free(true),
            Track::all(),
        ),
    ]
}

#[derive(Default)]
struct Row {
    bytes: usize,
    /// By side: nanoseconds a pair.
    samples: Vec<Vec<f64>>,
}

/// The bench.
pub(crate) struct GuardCosts;

impl Bench for GuardCosts {
    type Args = Args;

    fn name(&self) -> &'static str {
        "guards"
    }

    fn method(&self) -> &'static str {
        METHOD
    }

    fn run(&self, args: &Args, quick: bool) -> Result<Report, Failure> {
        let device = args.device.open()?;
        let pages = args.pages.pages();
        let _no_thp = NoThp::for_pages(pages)?;
        let samples = args.samples.unwrap_or(if quick { 50 } else { 300 });
        let sizes = in_order(&args.sizes);
        prove(&device, pages)?;
        let build = |(_, guards, track)| build(&device, pages, guards, track);
        let pools = sides().into_iter().map(build).collect::<Result<Vec<_>, _>>()?;
        let mut progress = Progress::new(sizes.len());
        let mut rows = Vec::new();
        for bytes in sizes {
            progress.at(show_bytes(bytes));
            let row = measure(&pools, bytes, samples, &progress)?;
            rows.extend((!row.samples[0].is_empty()).then_some(row));
            progress.step_done();
        }
        drop(progress);
        Ok(report(&device, &pools[0], &rows))
    }

    fn panels(&self, object: &Value) -> Vec<Panel> {
        let mut points = Vec::new();
        for row in object["rows"].as_array().into_iter().flatten() {
            let x = row["bytes"].as_f64().unwrap_or_default();
            points.extend(sides().iter().filter_map(|(name, ..)| {
                Some(Point::single(name, x, row[format!("{name}_ns")].as_f64()?))
            }));
        }
        let title = "An alloc and its free, by what the pool is guarded with";
        vec![Panel::new("time", title, Unit::Time, Axis::Bytes, points)]
    }
}

fn build(device: &Device, pages: Pages, guards: Guards, track: Track) -> Result<Pool, Failure> {
    let builder = Pool::builder().device(device.clone()).capacity(CAPACITY).pages(pages);
    builder.guards(guards).track(track).build().map_err(Failure::of)
}

/// Has a guard find what it is there for.
fn prove(device: &Device, pages: Pages) -> Result<(), Failure> {
    let [.., (_, guards, track)] = sides();
    let pool = build(device, pages, guards, track)?;
    let mut buf = pool.alloc(1000).map_err(Failure::of)?;
    let first = buf.as_mut_ptr();
    // SAFETY: inside the block, which is of 1 KiB and lies in the pool's arena; it is the canary that is overwritten.
    unsafe { first.add(1000).write_volatile(1) };
    drop(buf);
    // SAFETY: mapped as long as the pool is, and nobody's: this thread is the only one with the pool.
    unsafe { first.write_volatile(1) };
    if pool.check_free() != 1 || pool.stats().guards.written_beyond_end != 1 {
        return Err(Failure::of("a guard did not find what was written where nobody should"));
    }
    Ok(())
}

fn measure(
    pools: &[Pool],
    bytes: usize,
    samples: u32,
    progress: &Progress,
) -> Result<Row, Failure> {
    let mut row = Row { bytes, samples: vec![Vec::new(); pools.len()] };
    for n in 0..=samples {
        if interrupted() {
            break;
        }
        for (pool, samples) in pools.iter().zip(&mut row.samples) {
            let start = Instant::now();
            for _ in 0..RUN {
                let mut buf = pool.alloc(bytes).map_err(Failure::of)?;
                buf[0] = 1;
            }
            let took = start.elapsed().as_nanos() as f64 / f64::from(RUN);
            samples.extend((n > 0).then_some(took));
        }
        progress.share(f64::from(n) / f64::from(samples));
    }
    Ok(row)
}

impl Row {
    fn medians(&self) -> Vec<f64> {
        self.samples.iter().map(|s| Summary::of(s).map_or(0.0, |s| s.median)).collect()
    }

    fn json(&self) -> Value {
        let medians = self.medians();
        let mut row = Map::new();
        row.insert("bytes".to_owned(), self.bytes.into());
        for ((name, ..), &median) in sides().iter().zip(&medians) {
            row.insert(format!("{name}_ns"), report::rounded(median));
        }
        for ((name, ..), &median) in sides().iter().zip(&medians).skip(1) {
            row.insert(format!("{name}_ratio"), report::rounded(median / medians[0]));
        }
        row.insert("samples".to_owned(), self.samples[0].len().into());
        Value::Object(row)
    }

    fn cells(&self) -> Vec<String> {
        let medians = self.medians();
        let side = |(i, &ns): (usize, &f64)| match i {
            0 => report::show_ns(ns),
            _ => format!("{} {:.0} x", report::show_ns(ns), ns / medians[0]),
        };
        let all = medians.iter().enumerate().map(side);
        [show_bytes(self.bytes)].into_iter().chain(all).collect()
    }
}

fn report(device: &Device, pool: &Pool, rows: &[Row]) -> Report {
    let subject = Subject::of(device);
    let page_size = pool.arenas()[0].page_size;
    let own = json!({
        "page_size": page_size,
        "quarantine": QUARANTINE,
        "rows": rows.iter().map(Row::json).collect::<Vec<_>>(),
    });
    let heads = ["size", "off", "poison", "canary", "quarantine", "zero on\nfree", "track", "all"];
    let mut table = Table::new(&heads);
    rows.iter().for_each(|row| table.row(row.cells()));
    let text = format!(
        "{subject}\npages   {}\n\n{table}\na pair, and how many times that of a pool without guards",
        show_bytes(page_size),
    );
    Report { object: subject.object("guards", own), text, failures: Vec::new() }
}
