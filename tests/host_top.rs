//! `pinpool top` and what serves it. Proves: the program shows what the pool of another process holds, as text and as
//! JSON whose numbers sum; the socket is its owner's alone from the first moment and goes with the server; clients
//! that say nothing, nonsense or too much are hung up on and stop nobody else; a dead socket is replaced, a living
//! one and other files are not; a forked child's copy changes nothing.
#![cfg(all(feature = "cli", feature = "fault"))]
#![allow(clippy::unwrap_used)]

mod cli;
mod common;

use std::{
    fs,
    io::{Read, Write},
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    process,
    time::Duration,
};

use cli::run;
use common::soft;
use pinpool::{Access, Pool};

const MIB: usize = 1 << 20;

/// A path that no other test uses.
fn path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("pinpool-top-{}-{name}.sock", process::id()))
}

fn pool() -> Pool {
    soft(2 * MIB)
        .arena_size(MIB)
        .max_capacity(4 * MIB)
        .growth_by_hand()
        .class("shared", Access::LOCAL_WRITE | Access::REMOTE_READ, MIB)
        .share("own \x1b[2J", MIB / 4)
        .build()
        .unwrap()
}

fn ask(path: &PathBuf, line: &[u8]) -> String {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let _ = stream.write_all(line);
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    answer
}

#[test]
fn the_program_shows_what_a_pool_holds() {
    let (pool, path) = (pool(), path("shows"));
    let top = pool.serve_map(&path).unwrap();
    let socket = top.path().to_str().unwrap();
    let small: Vec<_> = (0..1000).map(|_| pool.alloc(64).unwrap()).collect();
    let long = pool.alloc(MIB / 2).unwrap();
    let token = pool.alloc(4096).unwrap().into_token();

    let left = run(&["top", socket, "--once"]);
    assert_eq!((left.code, left.stderr.as_str()), (Some(0), ""));
    let text = &left.stdout;
    for part in [
        format!("process {}", process::id()),
        "3M registered, may grow to 5M".to_owned(),
        "1002 buffers out, 1 in flight, 0 wait".to_owned(),
        "own ?[2J".to_owned(),
        "shared".to_owned(),
        "==========".to_owned(),
    ] {
        assert!(text.contains(&part), "{part:?} in\n{text}");
    }
    assert!(!text.contains('\x1b'), "nothing that moves a cursor:\n{text}");
    let maps: Vec<_> = text.lines().filter(|l| l.trim_start().starts_with('[')).collect();
    assert!(maps.len() == 3 && maps.iter().all(|m| m.trim().len() == 66), "{text}");

    let v = run(&["top", socket, "--json"]).object();
    let n = |v: &serde_json::Value, name: &str| v[name].as_u64().unwrap();
    assert_eq!(n(&v, "live_buffers"), 1002);
    let sum: u64 = ["live", "cached", "free", "unused"].iter().map(|p| n(&v, p)).sum();
    assert_eq!(sum, n(&v, "capacity"));
    let arenas = v["arenas"].as_array().unwrap();
    for a in arenas {
        assert_eq!(n(a, "out") + n(a, "free") + n(a, "unused"), n(a, "len"));
        assert_eq!((n(a, "regions"), n(a, "page_size")), (1, 4096));
    }
    let out: u64 = arenas.iter().map(|a| n(a, "out")).sum();
    assert_eq!(out, n(&v, "live") + n(&v, "cached"), "what arenas have out, by another way");
    assert_eq!(v["shares"][0]["name"], "own \u{1b}[2J");

    drop((small, long, pool.from_token(token)));
    pool.trim();
    let v = run(&["top", socket, "--json"]).object();
    assert_eq!((n(&v, "live"), n(&v, "cached")), (0, 0));
    let cells = v["arenas"][0]["cells"].as_str().unwrap();
    assert!(cells.chars().all(|c| c == '.'), "all free again: {cells}");
    drop(top);
    assert!(!path.exists(), "the socket goes with the server");
    let left = run(&["top", path.to_str().unwrap(), "--once"]);
    left.refused("nobody serves");
    pool.check();
    pool.close().expect("the server's handle is gone");
}

#[test]
fn the_socket_is_the_owners_alone() {
    let (pool, path) = (pool(), path("rights"));
    let _top = pool.serve_map(&path).unwrap();
    assert_eq!(fs::symlink_metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn strange_clients_are_hung_up_on_and_stop_nobody() {
    let (pool, path) = (pool(), path("strange"));
    let _top = pool.serve_map(&path).unwrap();
    for line in
        [&b"\n"[..], b"", b"GET / HTTP/1.1\r\n", b"text", b"TEXT\n", b"\0\xff\n", &[b'x'; 100_000]]
    {
        let mut stream = UnixStream::connect(&path).unwrap();
        let _ = stream.write_all(line);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty(), "{line:?}");
        assert!(ask(&path, b"text\n").contains("registered"));
    }
    // Many that say nothing, some of which stay, and some that do not read.
    let silent: Vec<_> = (0..3).map(|_| UnixStream::connect(&path).unwrap()).collect();
    for _ in 0..3 {
        drop(UnixStream::connect(&path).unwrap());
        let mut deaf = UnixStream::connect(&path).unwrap();
        deaf.write_all(b"json\n").unwrap();
    }
    assert!(ask(&path, b"json\n").starts_with('{'), "once those are given up");
    drop(silent);
    pool.check();
}

#[test]
fn only_what_nobody_serves_is_replaced() {
    let (pool, path) = (pool(), path("stale"));
    let too_long = "x".repeat(200);
    assert_eq!(pool.serve_map(&too_long).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    let nowhere = pool.serve_map("/no/such/folder/x.sock").unwrap_err();
    assert_eq!(nowhere.kind(), std::io::ErrorKind::NotFound);
    assert!(nowhere.to_string().contains("/no/such/folder/x.sock"), "{nowhere}");
    // Left by a process that is no more.
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let top = pool.serve_map(&path).unwrap();
    let second = pool.serve_map(&path).unwrap_err();
    assert_eq!(second.kind(), std::io::ErrorKind::AddrInUse);
    let text = second.to_string();
    assert!(text.contains(path.to_str().unwrap()) && text.contains("served already"), "{text}");
    assert!(ask(&path, b"text\n").contains("registered"), "and the first goes on");
    // Somebody put another thing in its place: that stays.
    fs::remove_file(&path).unwrap();
    fs::write(&path, "mine").unwrap();
    let text = pool.serve_map(&path).unwrap_err().to_string();
    assert!(text.contains("no socket"), "{text}");
    drop(top);
    assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
    fs::remove_file(&path).unwrap();
}

#[test]
fn a_forked_childs_copy_changes_nothing() {
    let (pool, path) = (pool(), path("fork"));
    let top = pool.serve_map(&path).unwrap();
    // SAFETY: the child drops its copy, which only compares process numbers, and leaves.
    match unsafe { libc::fork() } {
        0 => {
            drop(top);
            // SAFETY: ends the process at once.
            unsafe { libc::_exit(0) }
        }
        child => {
            let mut status = -1;
            // SAFETY: a place for a number.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert_eq!(status, 0);
        }
    }
    assert!(ask(&path, b"text\n").contains("registered"));
    drop(top);
    assert!(!path.exists());
}

#[test]
fn a_map_is_drawn_under_load() {
    let (pool, path) = (pool(), path("load"));
    let _top = pool.serve_map(&path).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for seed in 0..3 {
            let (pool, stop) = (&pool, &stop);
            scope.spawn(move || {
                let mut rng = common::Rng(seed);
                let mut held = Vec::new();
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    held.extend(pool.alloc(rng.size(1, 100_000)));
                    held.truncate(rng.below(40));
                }
            });
        }
        for _ in 0..30 {
            let v: serde_json::Value = serde_json::from_str(&ask(&path, b"json\n")).unwrap();
            assert_eq!(v["arenas"].as_array().unwrap().len(), 3);
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    pool.check();
}
