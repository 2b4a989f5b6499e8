//! Any numbers as tokens and addresses, between true ones: what is out is taken back once, as it was; nothing else is
//! believed; and at the end nothing is missing.
#![no_main]

mod input;

use std::{cell::RefCell, collections::HashMap};

use input::{pick, sorted};
use libfuzzer_sys::{
    arbitrary::{self, Arbitrary},
    fuzz_target,
};
use pinpool::{Access, Buf, Class, Device, Outcome, Pages, Pool, Share, TokenError};

/// A number that is passed for a token.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Number {
    Any(u64),
    /// Of a flight that is on, or was; with bits changed.
    Near {
        which: u8,
        flip: u64,
        add: i16,
    },
    Live(u8),
    Past(u8),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Op {
    Alloc {
        heap: u8,
        len: u32,
    },
    Free(u8),
    Fly(u8),
    Land(Number),
    LandAny(Number),
    Complete(Number),
    /// Posted, and its future dropped or kept.
    Post {
        which: u8,
        keep: bool,
    },
    Raw(u8),
    FromRaw {
        which: u8,
        add: i16,
        any: Option<u64>,
    },
    Look,
}

/// A flight: where the buffer is and how long.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Flight {
    addr: usize,
    len: usize,
}

impl Flight {
    fn of(buf: &Buf) -> Self {
        Self { addr: buf.as_ptr() as usize, len: buf.len() }
    }
}

/// The top bit is the user's.
const USERS: u64 = 1 << 63;

struct World {
    pool: Pool,
    class: Class,
    share: Share,
}

impl World {
    fn new() -> Self {
        let pool = Pool::builder()
            .device(Device::soft())
            .access(Access::LOCAL_WRITE | Access::REMOTE_WRITE)
            .capacity(2 << 20)
            .pages(Pages::Base)
            .class("shared", Access::LOCAL_WRITE, 1 << 20)
            .share("own", 256 << 10)
            .build()
            .expect("a small pool");
        let (class, share) = (pool.class("shared").expect("it"), pool.share("own").expect("it"));
        Self { pool, class, share }
    }

    fn run(&self, ops: &[Op]) {
        let pool = &self.pool;
        let (mut held, mut raw) = (Vec::<Buf>::new(), HashMap::<usize, usize>::new());
        let mut flights = HashMap::<u64, Flight>::new();
        let (mut posted, mut past) = (Vec::new(), Vec::<u64>::new());
        let mut posts = HashMap::<u64, bool>::new();
        for &op in ops.iter().take(400) {
            let number = |n: Number, flights: &HashMap<u64, Flight>, past: &Vec<u64>| {
                let live = sorted(flights);
                match n {
                    Number::Any(n) => n,
                    Number::Live(i) => pick(&live, i).unwrap_or(0),
                    Number::Past(i) => pick(past, i).unwrap_or(1),
                    Number::Near { which, flip, add } => {
                        let near = pick(&live, which).or(pick(past, which)).unwrap_or(flip);
                        (near ^ flip).wrapping_add_signed(add.into())
                    }
                }
            };
            let take = |list: &mut Vec<Buf>, which: u8| {
                (!list.is_empty()).then(|| list.swap_remove(usize::from(which) % list.len()))
            };
            match op {
                Op::Alloc { heap, len } => {
                    let len = len as usize % 100_000;
                    held.extend(match heap % 3 {
                        0 => pool.alloc(len),
                        1 => self.class.alloc(len),
                        _ => self.share.alloc(len),
                    });
                }
                Op::Free(which) => drop(take(&mut held, which)),
                Op::Fly(which) => {
                    let Some(buf) = take(&mut held, which) else { continue };
                    let flight = Flight::of(&buf);
                    let token = buf.into_token();
                    assert_eq!(token & USERS, 0);
                    assert!(flights.insert(token, flight).is_none(), "two flights, one token");
                }
                Op::Land(n) | Op::LandAny(n) => {
                    let token = number(n, &flights, &past);
                    let any = matches!(op, Op::LandAny(_));
                    match if any { pool.from_any_token(token) } else { pool.from_token(token) } {
                        Ok(buf) => {
                            let flight = flights.remove(&(token & !USERS)).expect("a flight");
                            assert_eq!(flight, Flight::of(&buf));
                            past.push(token);
                            held.push(buf);
                        }
                        Err(TokenError::OtherHeap { .. }) if !any => {}
                        Err(e) => {
                            assert!(
                                !flights.contains_key(&token) || posts.contains_key(&token),
                                "{e}"
                            );
                        }
                    }
                }
                Op::Complete(n) => {
                    let token = number(n, &flights, &past);
                    if pool.complete(token, Outcome::default()).is_ok() {
                        // Its future has it now, if that is kept.
                        assert!(flights.remove(&(token & !USERS)).is_some(), "{token:#x}");
                        posts.remove(&(token & !USERS));
                        past.push(token);
                    } else {
                        assert!(!flights.contains_key(&token), "{token:#x}");
                    }
                }
                Op::Post { which, keep } => {
                    let Some(buf) = take(&mut held, which) else { continue };
                    let flight = Flight::of(&buf);
                    let post = pool.post(buf, |_, _| Ok::<(), ()>(())).map_err(|(_, e)| e);
                    let post = post.expect("of this pool");
                    flights.insert(post.token(), flight);
                    posts.insert(post.token(), keep);
                    if keep {
                        posted.push(post);
                    }
                }
                Op::Raw(which) => {
                    let Some(buf) = take(&mut held, which) else { continue };
                    let len = buf.capacity();
                    raw.insert(buf.into_raw().as_ptr() as usize, len);
                }
                Op::FromRaw { which, add, any } => {
                    let near = pick(&sorted(&raw), which).unwrap_or(0);
                    let addr = any.map_or(near.wrapping_add_signed(add.into()), |a| a as usize);
                    // SAFETY: whatever is out raw was given up here, and nobody uses it.
                    match unsafe { pool.from_raw(addr as *mut u8) } {
                        Ok(buf) => {
                            assert_eq!(raw.remove(&addr), Some(buf.capacity()));
                            held.push(buf);
                        }
                        Err(e) => assert!(!raw.contains_key(&addr), "{e}"),
                    }
                }
                Op::Look => {
                    let mut seen: Vec<_> = pool.in_flight().iter().map(|f| f.token).collect();
                    seen.sort_unstable();
                    assert_eq!(seen, sorted(&flights));
                    pool.check();
                }
            }
        }
        // All of it comes back, each once.
        for (token, flight) in flights {
            if posts.contains_key(&token) {
                pool.complete(token, Outcome::default()).expect("it is under way");
                continue;
            }
            let buf = pool.from_any_token(token).expect("its first return");
            assert_eq!(buf.as_ptr() as usize, flight.addr);
            assert_eq!(pool.from_token(token).is_err(), pool.from_any_token(token).is_err());
        }
        drop(posted);
        for (addr, _) in raw {
            // SAFETY: as above.
            unsafe { pool.free_raw(addr as *mut u8) }.expect("it is out");
        }
        drop(held);
        pool.check();
        let s = pool.stats();
        assert_eq!((s.live, s.live_buffers, s.in_flight), (0, 0, 0), "{s:#?}");
    }
}

thread_local! {
    // One for all runs, so that generations go on: what is left of one run must not help the next.
    static WORLD: RefCell<World> = RefCell::new(World::new());
}

fuzz_target!(|ops: Vec<Op>| WORLD.with_borrow(|world| world.run(&ops)));
