//! Tools that watch every access see a pool's free memory as nobody's, in pools with guards and without: the
//! address sanitizer (`RUSTFLAGS="-Zsanitizer=address --cfg pinpool_asan"`) and valgrind (feature `valgrind`). Each
//! test runs a victim, which does what it must not, in a process of its own under the tool.
#![cfg(any(pinpool_asan, feature = "valgrind"))]
#![allow(clippy::unwrap_used)]

mod common;

use std::process::{Command, Output};

use common::soft;
use pinpool::{Batch, Guards, Pool};

const MIB: usize = 1 << 20;

/// Runs one of the victims below under the tool; all it said.
fn run(victim: &str) -> (Output, String) {
    let exe = std::env::current_exe().unwrap();
    let mut command = if cfg!(feature = "valgrind") {
        let mut valgrind = Command::new("valgrind");
        valgrind.args(["-q", "--error-exitcode=9"]).arg(exe);
        valgrind
    } else {
        Command::new(exe)
    };
    // Leaks are not what is looked for.
    command.args(["--ignored", "--exact", victim]).env("ASAN_OPTIONS", "detect_leaks=0");
    let out = command.output().unwrap();
    let text = [&out.stdout[..], &out.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    (out, text)
}

fn caught(victim: &str) {
    let (out, text) = run(victim);
    assert!(!out.status.success(), "{victim} got away with it: {text}");
    if cfg!(feature = "valgrind") {
        assert!(
            text.contains("Invalid read") || text.contains("Invalid write"),
            "{victim}: {text}"
        );
    } else {
        assert!(text.contains("use-after-poison"), "{victim}: {text}");
    }
}

#[test]
fn who_reads_or_writes_a_freed_buffer_is_caught() {
    for victim in ["reads_freed", "writes_freed_span", "reads_freed_batch", "reads_freed_guarded"] {
        caught(victim);
    }
}

#[test]
fn who_touches_what_nobody_had_yet_is_caught() {
    caught("reads_fresh");
}

#[test]
fn who_writes_beyond_a_length_with_a_canary_is_caught_in_the_act() {
    caught("writes_behind");
}

#[test]
fn who_stays_inside_is_not() {
    let (out, text) = run("stays_inside");
    assert!(out.status.success(), "{text}");
}

fn pool() -> Pool {
    soft(MIB).build().unwrap()
}

#[test]
#[ignore = "a victim"]
fn reads_freed() {
    let pool = pool();
    let buf = pool.alloc(4096).unwrap();
    let p = buf.as_ptr();
    drop(buf);
    // SAFETY: it is not: that is what is to be caught. The memory is mapped.
    std::hint::black_box(unsafe { p.add(100).read_volatile() });
}

#[test]
#[ignore = "a victim"]
fn writes_freed_span() {
    let pool = pool();
    let mut buf = pool.alloc(300_000).unwrap();
    let p = buf.as_mut_ptr();
    drop(buf);
    // SAFETY: as in `reads_freed`.
    unsafe { p.add(200_000).write_volatile(1) };
}

#[test]
#[ignore = "a victim"]
fn reads_freed_batch() {
    let pool = pool();
    // So that the magazine has room for them all.
    let held: Vec<_> = (0..64).map(|_| pool.alloc(4096).unwrap()).collect();
    drop(held);
    let mut batch = Batch::with_capacity(8);
    pool.alloc_many(&mut batch, 4096, 8).unwrap();
    let p = batch.sges().next().unwrap().addr as *const u8;
    // SAFETY: the batch has it.
    std::hint::black_box(unsafe { p.read_volatile() });
    pool.free_many(&mut batch);
    // SAFETY: as in `reads_freed`.
    std::hint::black_box(unsafe { p.read_volatile() });
}

#[test]
#[ignore = "a victim"]
fn reads_freed_guarded() {
    let pool = soft(MIB).guards(Guards::new().poison(true).quarantine(MIB)).build().unwrap();
    let buf = pool.alloc(4096).unwrap();
    let p = buf.as_ptr();
    drop(buf);
    // SAFETY: as in `reads_freed`.
    std::hint::black_box(unsafe { p.read_volatile() });
}

#[test]
#[ignore = "a victim"]
fn reads_fresh() {
    let pool = pool();
    let p = pool.arenas()[0].addr.as_ptr();
    // SAFETY: as in `reads_freed`.
    std::hint::black_box(unsafe { p.add(MIB - 1).read_volatile() });
}

#[test]
#[ignore = "a victim"]
fn writes_behind() {
    let pool = soft(MIB).guards(Guards::new().canary(true)).build().unwrap();
    let mut buf = pool.alloc(4096).unwrap();
    // SAFETY: as in `reads_freed`.
    unsafe { buf.as_mut_ptr().add(4096).write_volatile(1) };
}

/// Every way in and out, by owners alone.
#[test]
#[ignore = "no victim, but runs under the tool"]
fn stays_inside() {
    let guards = Guards::new().poison(true).canary(true).quarantine(8192).zero_on_free(true);
    for builder in [soft(MIB), soft(MIB).guards(guards)] {
        let pool = builder.build().unwrap();
        for round in 0..3 {
            let mut held = Vec::new();
            for len in [0, 1, 63, 64, 1000, 4096, 5000, 40_000, 300_000] {
                let mut buf = pool.alloc(len).unwrap();
                buf.set_len(buf.capacity()).unwrap();
                buf.fill(round);
                held.push(buf);
            }
            let token = held.pop().unwrap().into_token();
            let raw = held.pop().unwrap().into_raw();
            // SAFETY: nobody else knows the pointer.
            held.push(unsafe { pool.from_raw(raw.as_ptr()).unwrap() });
            held.push(pool.from_token(token).unwrap());
            assert!(held.iter().all(|buf| buf.iter().all(|&b| b == round)));
            std::thread::spawn(move || drop(held)).join().unwrap();
            let mut batch = Batch::with_capacity(40);
            pool.alloc_many(&mut batch, 2000, 40).unwrap();
            let mut one = batch.pop().unwrap();
            one.fill(9);
            pool.trim();
            let whole = pool.alloc(MIB / 2).unwrap();
            let _ = (whole.iter().map(|&b| u64::from(b)).sum::<u64>(), pool.check_free());
        }
        pool.check();
    }
}
