//! A program that allocates a lot, under the global allocator and under mimalloc: a JSON parser over 100 MB.
//!
//!     cargo bench --no-default-features --features rivals,global --bench json
//!
//! Two shapes: one document of 100 MB, parsed into a tree and dropped; and 100 MB of lines, each parsed and
//! dropped. Allocators take turns, each turn in a process of its own, since a process has one global allocator;
//! the ratio of a round is one of neighbours in time. Both go through the same `match`, which costs both the
//! same. The pool serves all sizes, on base pages; building and filling it is not timed, as for a service that
//! does so at start-up. That is a bias: mimalloc's first round includes its page faults, so each process parses
//! once before it is timed.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::{
    alloc::{GlobalAlloc, Layout},
    hint::black_box,
    process::Command,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::{Duration, Instant},
};

use pinpool::{Device, Pages, PinnedAlloc, Pool};
use serde_json::Value;

struct Mimalloc;

// SAFETY: mimalloc's aligned calls do what the trait asks, and its `free` takes what any of them gave.
unsafe impl GlobalAlloc for Mimalloc {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: any size and alignment may be asked for.
        unsafe { libmimalloc_sys::mi_malloc_aligned(layout.size(), layout.align()).cast() }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        unsafe { libmimalloc_sys::mi_zalloc_aligned(layout.size(), layout.align()).cast() }
    }

    #[inline]
    unsafe fn dealloc(&self, at: *mut u8, _: Layout) {
        // SAFETY: it came from one of these calls (contract).
        unsafe { libmimalloc_sys::mi_free(at.cast()) }
    }

    #[inline]
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: it came from one of these calls (contract).
        unsafe { libmimalloc_sys::mi_realloc_aligned(at.cast(), size, layout.align()).cast() }
    }
}

static PINNED: PinnedAlloc<Mimalloc> = PinnedAlloc::over(Mimalloc).sizes(1..=usize::MAX);
static USE_PINNED: AtomicBool = AtomicBool::new(false);

/// The one or the other. What was allocated before the choice is mimalloc's either way.
struct Choice;

// SAFETY: each call goes to an allocator that knows the memory: the pinned one passes on what it has not.
unsafe impl GlobalAlloc for Choice {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: passed on.
        unsafe {
            if USE_PINNED.load(Relaxed) { PINNED.alloc(layout) } else { Mimalloc.alloc(layout) }
        }
    }

    #[inline]
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe {
            if USE_PINNED.load(Relaxed) {
                PINNED.dealloc(at, layout)
            } else {
                Mimalloc.dealloc(at, layout)
            }
        }
    }

    #[inline]
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: passed on.
        unsafe {
            if USE_PINNED.load(Relaxed) {
                PINNED.realloc(at, layout, size)
            } else {
                Mimalloc.realloc(at, layout, size)
            }
        }
    }
}

#[global_allocator]
static CHOICE: Choice = Choice;

const BYTES: usize = 100 << 20;
const ROUNDS: usize = 5;

/// One record; lengths of strings and lists vary without a pattern that repeats soon.
fn record(i: usize, to: &mut String) {
    use std::fmt::Write;
    let x = i.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    write!(
        to,
        r#"{{"id":{i},"name":"{:x<w$}","score":{}.{},"tags":["#,
        x % 1_000,
        x % 977,
        x % 89,
        w = 5 + x % 40
    )
    .unwrap();
    for n in 0..x % 7 {
        write!(to, r#"{}"tag {}""#, if n > 0 { "," } else { "" }, x >> (n + 8)).unwrap();
    }
    write!(
        to,
        r#"],"at":{{"x":{},"y":{},"deep":[[{}],null,true]}}}}"#,
        x % 7_919,
        x % 104_729,
        x % 3
    )
    .unwrap();
}

fn documents() -> (String, Vec<String>) {
    let (mut whole, mut lines) = (String::from("["), Vec::new());
    let mut i = 0;
    while whole.len() < BYTES {
        let mut line = String::new();
        record(i, &mut line);
        if i > 0 {
            whole.push(',');
        }
        whole.push_str(&line);
        lines.push(line);
        i += 1;
    }
    whole.push(']');
    (whole, lines)
}

fn timed(mut f: impl FnMut()) -> Duration {
    f();
    let start = Instant::now();
    f();
    start.elapsed()
}

/// One turn: the two times in nanoseconds, on stdout.
fn turn(pinned: bool) {
    let (whole, lines) = documents();
    let pool;
    if pinned {
        pool = Pool::builder()
            .device(Device::soft())
            .capacity(3 << 30)
            .pages(Pages::Base)
            .build()
            .unwrap();
        PINNED.attach(&pool).unwrap();
        USE_PINNED.store(true, Relaxed);
    }
    let tree = timed(|| {
        let value: Value = serde_json::from_str(&whole).unwrap();
        assert_eq!(value.as_array().map(Vec::len), Some(lines.len()));
        drop(black_box(value));
    });
    let line = timed(|| {
        for line in &lines {
            let value: Value = serde_json::from_str(line).unwrap();
            drop(black_box(value));
        }
    });
    assert_eq!(PINNED.overflows(), 0, "the pool was large enough");
    println!("{} {}", tree.as_nanos(), line.as_nanos());
}

fn child(what: &str) -> [f64; 2] {
    let exe = std::env::current_exe().unwrap();
    let out = Command::new(exe).env("PINPOOL_JSON_TURN", what).output().unwrap();
    assert!(out.status.success(), "{out:?}");
    let said = String::from_utf8(out.stdout).unwrap();
    let mut times = said.split_whitespace().map(|n| n.parse::<f64>().unwrap() / 1e6);
    [times.next().unwrap(), times.next().unwrap()]
}

fn main() {
    if let Some(what) = std::env::var_os("PINPOOL_JSON_TURN") {
        return turn(what == "pinned");
    }
    println!("{:>6} {:>22} {:>22}", "", "one document", "line by line");
    println!(
        "{:>6} {:>10} {:>11} {:>10} {:>11}",
        "round", "pinpool", "mimalloc", "pinpool", "mimalloc"
    );
    let mut ratios = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        // Each goes first every other time.
        let (a, b) = if round % 2 == 0 {
            let a = child("pinned");
            (a, child("mimalloc"))
        } else {
            let b = child("mimalloc");
            (child("pinned"), b)
        };
        println!("{round:>6} {:>8.0}ms {:>9.0}ms {:>8.0}ms {:>9.0}ms", a[0], b[0], a[1], b[1]);
        ratios.iter_mut().enumerate().for_each(|(i, r)| r.push(a[i] / b[i]));
    }
    for (ratios, what) in ratios.iter_mut().zip(["one document", "line by line"]) {
        ratios.sort_by(f64::total_cmp);
        let (low, mid, high) = (ratios[0], ratios[ROUNDS / 2], ratios[ROUNDS - 1]);
        println!(
            "{what}: pinpool takes {mid:.2} x mimalloc's time (median; {low:.2} to {high:.2})"
        );
    }
}
