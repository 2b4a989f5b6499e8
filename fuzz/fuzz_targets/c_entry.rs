//! The C interface with any arguments that its contract permits: pointers are null or lead to what they should,
//! handles are null, open or closed, numbers and addresses are any. Each call answers with a code that has a name,
//! and what is out is what the caller was given, no more and no less.
#![no_main]

mod input;

use std::{
    collections::HashMap,
    ffi::{CStr, c_char, c_int, c_void},
    mem::MaybeUninit,
    ptr,
};

use input::{Size, pick, sorted};
use libfuzzer_sys::{
    arbitrary::{self, Arbitrary},
    fuzz_target,
};
use pinpool::capi::*;

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Open {
    options: bool,
    place: bool,
    size: Option<u64>,
    device: u8,
    registrar: bool,
    access: u32,
    optional_access: u32,
    capacity: Size,
    arena_size: Option<Size>,
    pages: i8,
    numa: i8,
    colouring: i32,
    max_capacity: Option<Size>,
    low_watermark: Option<Size>,
}

/// An address: of a buffer that is out or was, or near one, or any.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Addr {
    Out(u8),
    Past(u8),
    Near(u8, i16),
    Any(u64),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Op {
    Open(Open),
    /// Another handle from here on: 0 is null, the others in turn, closed ones among them.
    Use(u8),
    Alloc {
        len: u32,
        place: bool,
    },
    Huge {
        len: u64,
    },
    Aligned {
        len: u32,
        align: u64,
        shift: Option<u8>,
        place: bool,
    },
    Wait {
        len: u32,
        ns: u16,
        place: bool,
    },
    Many {
        len: u32,
        n: u8,
        place: bool,
        got: bool,
    },
    Free(Addr),
    FreeMany([Addr; 4], u8),
    Keys(Addr, bool),
    IntoToken(Addr, bool),
    FromToken {
        which: u8,
        any: Option<u64>,
        place: bool,
    },
    Stats {
        size: Option<u64>,
        place: bool,
    },
    Doctor {
        open: Open,
        room: u8,
        text: bool,
        needed: bool,
        fit: bool,
    },
    Pd,
    Text(i32),
    Close,
}

unsafe extern "C" fn register(
    _: *mut c_void,
    addr: *mut c_void,
    len: usize,
    _: usize,
    _: u32,
    handle: *mut u64,
    lkey: *mut u32,
    rkey: *mut u32,
) -> c_int {
    // As some address bits have it: a refusal now and then.
    if (addr as usize >> 21) % 5 == 3 {
        return 12;
    }
    // SAFETY: places for the three numbers (the interface's own contract).
    unsafe { (*handle, *lkey, *rkey) = (addr as u64 ^ len as u64, 7, 8) };
    0
}

unsafe extern "C" fn deregister(_: *mut c_void, _: u64) -> c_int {
    0
}

/// What one handle has given out.
#[derive(Default)]
struct Given {
    out: HashMap<usize, usize>,
    tokens: HashMap<u64, usize>,
    past: Vec<usize>,
}

#[derive(Default)]
struct Caller {
    handles: Vec<(*mut pinpool_t, Given)>,
    /// 0 is null.
    now: usize,
}

/// Every code has a name, and a call that failed has left a text.
fn named(code: c_int) -> c_int {
    // SAFETY: both give strings that end in a zero byte.
    unsafe {
        let name = CStr::from_ptr(pinpool_status_name(code)).to_str().expect("ASCII");
        assert!(name.starts_with("PINPOOL_"), "{code} is {name}");
        assert_ne!(name, "PINPOOL_INTERNAL");
        let text = CStr::from_ptr(pinpool_last_error()).to_str().expect("UTF-8");
        assert!(code == 0 || !text.is_empty());
    }
    code
}

impl Caller {
    fn handle(&self) -> *mut pinpool_t {
        self.now.checked_sub(1).map_or(ptr::null_mut(), |i| self.handles[i].0)
    }

    fn given(&mut self) -> Option<&mut Given> {
        self.now.checked_sub(1).map(|i| &mut self.handles[i].1)
    }

    fn addr(&mut self, addr: Addr) -> usize {
        let Some(given) = self.given() else { return 64 };
        match addr {
            Addr::Any(n) => n as usize,
            Addr::Out(i) => pick(&sorted(&given.out), i).unwrap_or(0),
            Addr::Past(i) => pick(&given.past, i).unwrap_or(0),
            Addr::Near(i, add) => {
                let near = pick(&sorted(&given.out), i).unwrap_or(1 << 30);
                near.wrapping_add_signed(add.into())
            }
        }
    }

    fn got(&mut self, buf: pinpool_buf_t, len: usize) {
        assert!(buf.len >= len && !buf.addr.is_null());
        let addr = buf.addr as usize;
        // SAFETY: a buffer of that length, this caller's.
        unsafe { ptr::write_bytes(buf.addr.cast::<u8>(), 0xee, buf.len) };
        let out = &mut self.given().expect("an open handle").out;
        assert!(out.insert(addr, buf.len.max(1)).is_none());
        let mut all: Vec<_> = out.iter().map(|(a, n)| (*a, *n)).collect();
        all.sort_unstable();
        assert!(all.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0), "buffers overlap");
    }

    fn freed(&mut self, addr: usize, code: c_int) {
        let Some(given) = self.given() else { return assert_ne!(code, 0) };
        assert_eq!(given.out.remove(&addr).is_some(), code == 0, "{addr:#x}: {code}");
        if code == 0 {
            given.past.push(addr);
        }
    }
}

fn options(open: &Open, registrar: &pinpool_registrar_t) -> pinpool_options_t {
    let mut o = MaybeUninit::uninit();
    // SAFETY: a place for options, which the call fills.
    let mut o = unsafe {
        pinpool_options_init(o.as_mut_ptr());
        o.assume_init()
    };
    if let Some(size) = open.size {
        o.size = size as usize;
    }
    o.device = match open.device % 4 {
        0 => ptr::null(),
        1 => c"no-such-device".as_ptr(),
        2 => c"\xff\xfe".as_ptr(),
        _ => c"soft".as_ptr(),
    };
    if open.registrar {
        o.registrar = registrar;
    }
    (o.access, o.optional_access) = (open.access, open.optional_access);
    if open.access % 3 == 0 {
        // What a pool can be had with.
        (o.access, o.optional_access) = (7, 0);
    }
    o.capacity = open.capacity.bytes();
    o.arena_size = open.arena_size.map_or(0, Size::bytes);
    o.pages = if open.pages % 2 == 0 { PINPOOL_PAGES_BASE } else { open.pages.into() };
    o.numa = if open.numa % 2 == 0 { PINPOOL_NUMA_ANY } else { open.numa.into() };
    o.colouring = open.colouring;
    o.max_capacity = open.max_capacity.map_or(0, Size::bytes);
    o.low_watermark = open.low_watermark.map_or(0, Size::bytes);
    o
}

fn place<T>(there: bool, to: &mut MaybeUninit<T>) -> *mut T {
    if there { to.as_mut_ptr() } else { ptr::null_mut() }
}

// SAFETY of all calls: pointers are null or lead to places of the right type, handles are null or came from
// `pinpool_open`, buffers that are freed are not used after, and one thread makes all calls.
fn step(c: &mut Caller, op: Op) {
    let registrar = pinpool_registrar_t {
        context: ptr::null_mut(),
        name: c"fuzz".as_ptr(),
        max_mr_size: 0,
        register_memory: Some(register),
        deregister_memory: Some(deregister),
        release: None,
    };
    let pool = c.handle();
    let mut buf = MaybeUninit::<pinpool_buf_t>::uninit();
    match op {
        Op::Open(open) if c.handles.len() < 4 => {
            let o = options(&open, &registrar);
            let mut handle = ptr::null_mut();
            let from = if open.options { &raw const o } else { ptr::null() };
            let to = if open.place { &raw mut handle } else { ptr::null_mut() };
            // SAFETY: see above.
            let code = named(unsafe { pinpool_open(from, to) });
            assert_eq!(handle.is_null(), code != 0);
            if code == 0 {
                c.handles.push((handle, Given::default()));
                c.now = c.handles.len();
            }
        }
        Op::Open(_) => {}
        Op::Use(i) => c.now = usize::from(i) % (c.handles.len() + 1),
        Op::Alloc { len, place: there } => {
            // SAFETY: see above.
            let code = named(unsafe { pinpool_alloc(pool, len as usize, place(there, &mut buf)) });
            if code == 0 {
                // SAFETY: the call has written it.
                c.got(unsafe { buf.assume_init() }, len as usize);
            }
        }
        Op::Huge { len } => {
            let len = (len | 1 << 40) as usize;
            // SAFETY: see above.
            assert_ne!(named(unsafe { pinpool_alloc(pool, len, buf.as_mut_ptr()) }), 0);
        }
        Op::Aligned { len, align, shift, place: there } => {
            let (len, align) = (len as usize, shift.map_or(align as usize, |s| 1 << (s % 64)));
            let to = place(there, &mut buf);
            // SAFETY: see above.
            let code = named(unsafe { pinpool_alloc_aligned(pool, len, align, to) });
            if code == 0 {
                // SAFETY: the call has written it.
                let buf = unsafe { buf.assume_init() };
                assert_eq!(buf.addr as usize % align, 0);
                c.got(buf, len);
            }
        }
        Op::Wait { len, ns, place: there } => {
            let to = place(there, &mut buf);
            // SAFETY: see above.
            let code = named(unsafe { pinpool_alloc_wait(pool, len as usize, ns.into(), to) });
            if code == 0 {
                // SAFETY: the call has written it.
                c.got(unsafe { buf.assume_init() }, len as usize);
            }
        }
        Op::Many { len, n, place: there, got } => {
            let mut bufs = [const { MaybeUninit::<pinpool_buf_t>::uninit() }; 8];
            let (n, mut count) = (usize::from(n % 9), usize::MAX);
            let to = if there { bufs.as_mut_ptr().cast() } else { ptr::null_mut() };
            let places = if got { &raw mut count } else { ptr::null_mut() };
            // Without a count nobody would know what to free.
            let n = if got { n } else { 0 };
            // SAFETY: see above; room for eight.
            let code = named(unsafe { pinpool_alloc_many(pool, len as usize, to, n, places) });
            if code == 0 && got {
                assert!(count <= n && (count > 0 || n == 0));
                for buf in &bufs[..count] {
                    // SAFETY: the call has written as many.
                    c.got(unsafe { buf.assume_init() }, len as usize);
                }
            }
        }
        Op::Free(addr) => {
            let addr = c.addr(addr);
            // SAFETY: see above.
            let code = named(unsafe { pinpool_free(pool, addr as *mut c_void) });
            c.freed(addr, code);
        }
        Op::FreeMany(addrs, n) => {
            let n = usize::from(n) % 5;
            let list = addrs.map(|a| c.addr(a));
            let buf = |addr: usize| pinpool_buf_t {
                addr: addr as *mut c_void,
                len: 0,
                lkey: 0,
                rkey: 0,
                has_rkey: 0,
            };
            let bufs = list.map(buf);
            // SAFETY: see above.
            let code = named(unsafe { pinpool_free_many(pool, bufs.as_ptr(), n) });
            let mut all = true;
            if let Some(given) = c.given() {
                for addr in &list[..n] {
                    let was = given.out.remove(addr).is_some();
                    all &= was;
                    given.past.extend(was.then_some(*addr));
                }
                assert!(code != 0 || all);
            }
        }
        Op::Keys(addr, there) => {
            let addr = c.addr(addr);
            let mut keys = MaybeUninit::uninit();
            let to = place(there, &mut keys);
            // SAFETY: see above.
            let code = named(unsafe { pinpool_keys(pool, addr as *const c_void, to) });
            let out = c.given().is_some_and(|g| g.out.contains_key(&addr));
            assert!(!out || !there || code == 0);
        }
        Op::IntoToken(addr, there) => {
            let addr = c.addr(addr);
            let mut token = 0;
            let to = if there { &raw mut token } else { ptr::null_mut() };
            // SAFETY: see above.
            let code = named(unsafe { pinpool_into_token(pool, addr as *mut c_void, to) });
            if code == 0 {
                let given = c.given().expect("an open handle");
                let len = given.out.remove(&addr).expect("it was out");
                assert!(given.tokens.insert(token, addr).is_none() && len > 0);
            }
        }
        Op::FromToken { which, any, place: there } => {
            let known = c.given().and_then(|g| pick(&sorted(&g.tokens), which));
            let token = any.or(known).unwrap_or(5);
            let to = place(there, &mut buf);
            // SAFETY: see above.
            let code = named(unsafe { pinpool_from_token(pool, token, to) });
            if code == 0 {
                // SAFETY: the call has written it.
                let buf = unsafe { buf.assume_init() };
                let tokens = &mut c.given().expect("an open handle").tokens;
                let was = tokens.remove(&(token & !(1 << 63)));
                assert_eq!(was, Some(buf.addr as usize));
                c.got(buf, 0);
            } else if there {
                assert!(c.given().is_none_or(|g| !g.tokens.contains_key(&token)));
            }
        }
        Op::Stats { size, place: there } => {
            let mut stats = MaybeUninit::<pinpool_stats_t>::zeroed();
            // SAFETY: plain numbers, of which zero is a value.
            let known = size.is_none();
            let size = size.map_or(size_of::<pinpool_stats_t>(), |s| s as usize);
            // SAFETY: as above.
            unsafe { (*stats.as_mut_ptr()).size = size };
            let to = place(there, &mut stats);
            // SAFETY: see above.
            let code = named(unsafe { pinpool_stats(pool, to) });
            if code == 0 && known {
                // SAFETY: the call has written it.
                let s = unsafe { stats.assume_init() };
                let given = c.given().expect("an open handle");
                assert_eq!(s.live_buffers, given.out.len() + given.tokens.len());
                assert_eq!(s.in_flight, given.tokens.len());
                assert_eq!(s.live + s.cached + s.free_bytes + s.unused, s.capacity);
            }
        }
        Op::Doctor { open, room, text, needed, fit } => {
            let o = options(&open, &registrar);
            let from = if open.options { &raw const o } else { ptr::null() };
            let mut room_for = vec![0 as c_char; usize::from(room) * 16];
            let to = if text { room_for.as_mut_ptr() } else { ptr::null_mut() };
            let (mut len, mut fits) = (0, 0);
            let len = if needed { &raw mut len } else { ptr::null_mut() };
            let fits = if fit { &raw mut fits } else { ptr::null_mut() };
            // SAFETY: see above.
            named(unsafe { pinpool_doctor(from, to, room_for.len(), len, fits) });
        }
        Op::Pd => {
            // SAFETY: see above.
            assert!(unsafe { pinpool_pd(pool) }.is_null(), "there is no verbs device here");
        }
        Op::Text(code) => {
            // SAFETY: a string that ends in a zero byte.
            assert!(!unsafe { CStr::from_ptr(pinpool_status_name(code)) }.is_empty());
        }
        Op::Close => close(c),
    }
}

fn close(c: &mut Caller) {
    let pool = c.handle();
    let open = c.given().map(|g| g.out.len() + g.tokens.len());
    // SAFETY: see above.
    let code = named(unsafe { pinpool_close(pool) });
    if open.is_some_and(|n| n > 0) {
        assert_eq!(code, PINPOOL_LIVE_CODE, "with buffers out it stays open");
    }
}

/// As the header has it.
const PINPOOL_LIVE_CODE: c_int = 13;

fuzz_target!(|ops: Vec<Op>| {
    let mut c = Caller::default();
    // A pool to begin with, so that not every run has to find the way to one.
    let first = Open {
        options: true,
        place: true,
        size: None,
        device: 3,
        registrar: false,
        access: 0,
        optional_access: 0,
        capacity: Size::Arenas(2),
        arena_size: None,
        pages: 0,
        numa: 0,
        colouring: 0,
        max_capacity: None,
        low_watermark: None,
    };
    step(&mut c, Op::Open(first));
    ops.iter().take(200).for_each(|&op| step(&mut c, op));
    // All of it goes back, and every pool closes.
    for i in 0..c.handles.len() {
        c.now = i + 1;
        let pool = c.handle();
        let given = c.given().expect("a handle");
        let (tokens, out) = (sorted(&given.tokens), sorted(&given.out));
        for token in tokens {
            let mut buf = MaybeUninit::<pinpool_buf_t>::uninit();
            // SAFETY: see `step`.
            let code = unsafe { pinpool_from_token(pool, token, buf.as_mut_ptr()) };
            assert_eq!(code, 0);
            // SAFETY: the call has written it; nobody else has the buffer.
            assert_eq!(unsafe { pinpool_free(pool, buf.assume_init().addr) }, 0);
        }
        for addr in out {
            // SAFETY: see `step`.
            assert_eq!(unsafe { pinpool_free(pool, addr as *mut c_void) }, 0);
        }
        c.given().map(std::mem::take);
        close(&mut c);
    }
});
