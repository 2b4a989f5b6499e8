//! Any options, on a device of any limits that fails at any call: `build` answers with an error that says something,
//! and nothing is left; or with a pool that is what was asked for, whose books fit, and that gives all back.
#![no_main]

mod input;

use std::time::Duration;

use input::Size;
use libfuzzer_sys::{
    arbitrary::{self, Arbitrary},
    fuzz_target,
};
use pinpool::{
    Access, Backing, Builder, Device, Numa, PageSize, Pages, Pool, Reserve,
    device::{Fault, FaultyMapping, FaultyRegistrar, MapFault, MapStep},
};

#[derive(Arbitrary, Debug)]
struct Options {
    device: bool,
    max_mr: Option<u8>,
    max_mr_size: Option<Size>,
    device_node: Option<u8>,
    register_fails: Option<(u8, u8)>,
    refused: u32,
    map_fails: Option<(u8, u8, u8)>,
    access: u32,
    optional: u32,
    capacity: Option<Size>,
    arena_size: Option<Size>,
    arena_shift: Option<u8>,
    pages: u8,
    numa: Option<u32>,
    colouring: bool,
    count_hits: bool,
    max_capacity: Option<Size>,
    low_watermark: Option<Size>,
    shrink_after: Option<u64>,
    start_threads: Option<u16>,
    memfd: bool,
    classes: Vec<(u8, u32, Size)>,
    shares: Vec<(Option<u8>, u8, Wish)>,
}

#[derive(Arbitrary, Debug)]
enum Wish {
    Bytes(Size),
    Buffers(u8, Size),
    Many(usize, usize),
}

/// Few, so that some are equal and some name what is there.
fn name(n: u8) -> &'static str {
    ["", "default", "a", "b", "c", "ä\0\n"][usize::from(n) % 6]
}

fn builder(o: &Options, registrar: &FaultyRegistrar, mapping: &FaultyMapping) -> Builder {
    let mut b = Pool::builder()
        .access(Access::from_bits_truncate(o.access))
        .optional_access(Access::from_bits_truncate(o.optional))
        .colouring(o.colouring)
        .count_hits(o.count_hits)
        .growth_by_hand()
        .faulty_mapping(mapping);
    if o.device {
        b = b.device(Device::custom(registrar.clone()));
    }
    if let Some(size) = o.capacity {
        b = b.capacity(size.bytes());
    }
    match (o.arena_shift, o.arena_size) {
        (Some(shift), _) => b = b.arena_size(1 << (shift % 64)),
        (None, Some(size)) => b = b.arena_size(size.bytes()),
        (None, None) => {}
    }
    b = b.pages(match o.pages % 8 {
        0 => Pages::Prefer(PageSize::Huge2M),
        // Each class then takes a GiB at least, on base pages where there are no others.
        1 if o.classes.is_empty() => Pages::Prefer(PageSize::Huge1G),
        2 => Pages::Require(PageSize::Huge2M),
        3 => Pages::Require(PageSize::Huge1G),
        _ => Pages::Base,
    });
    b = b.numa(match o.numa {
        None => Numa::Any,
        Some(n) if n % 8 == 1 => Numa::OfDevice,
        Some(n) if n % 8 == 2 => Numa::Interleave,
        Some(n) if n % 8 == 3 => Numa::Node(n / 8),
        Some(n) => Numa::Node(n / 8 % 4),
    });
    if let Some(size) = o.max_capacity {
        b = b.max_capacity(size.bytes());
    }
    if let Some(size) = o.low_watermark {
        b = b.low_watermark(size.bytes());
    }
    if let Some(nanos) = o.shrink_after {
        b = b.shrink_after(Duration::from_nanos(nanos));
    }
    if let Some(n) = o.start_threads {
        b = b.start_threads(n.into());
    }
    if o.memfd {
        b = b.backing(Backing::Memfd);
    }
    for &(n, access, size) in o.classes.iter().take(4) {
        b = b.class(name(n), Access::from_bits_truncate(access), size.bytes());
    }
    for (class, n, wish) in o.shares.iter().take(4) {
        let reserve = match *wish {
            Wish::Bytes(size) => Reserve::bytes(size.bytes()),
            Wish::Buffers(count, len) => Reserve::buffers(count.into(), len.bytes()),
            Wish::Many(count, len) => Reserve::buffers(count, len),
        };
        b = match class {
            None => b.share(name(*n), reserve),
            Some(class) => b.share_in(name(*class), name(*n), reserve),
        };
    }
    b
}

fuzz_target!(|o: Options| {
    let mut registrar = FaultyRegistrar::new(&Device::soft());
    if let Some(n) = o.max_mr {
        registrar = registrar.max_mr(n.into());
    }
    if let Some(size) = o.max_mr_size {
        registrar = registrar.max_mr_size(size.bytes() as u64);
    }
    if let Some(node) = o.device_node {
        registrar = registrar.numa_node(node.into());
    }
    if let Some((n, errno)) = o.register_fails {
        registrar = registrar.fault(Fault::Register(n.into(), errno.into()));
    }
    registrar = registrar.fault(Fault::Refuse(Access::from_bits_truncate(o.refused), 22));
    let mut mapping = FaultyMapping::new();
    if let Some((step, n, errno)) = o.map_fails {
        // Not unmapping: what the system would not unmap stays, by design.
        let steps =
            [MapStep::Reserve, MapStep::Map, MapStep::Bind, MapStep::FaultIn, MapStep::Table];
        let step = steps[usize::from(step) % steps.len()];
        mapping = mapping.fault(MapFault::Fail(step, n.into(), errno.into()));
    }
    let leaked = pinpool::leaked_bytes();
    match builder(&o, &registrar, &mapping).build() {
        Ok(pool) => {
            pool.check();
            let s = pool.stats();
            assert!(s.balanced(), "{s:#?}");
            assert!(o.device && s.capacity >= o.capacity.map_or(1, Size::bytes));
            assert!(s.capacity <= s.max_capacity, "{s:#?}");
            assert!(o.max_mr.is_none_or(|n| s.regions <= usize::from(n)));
            let longest = o.max_mr_size.map_or(usize::MAX, Size::bytes);
            assert!(pool.arenas().iter().all(|a| a.len <= longest && a.len % a.page_size == 0));
            assert_eq!(registrar.live(), s.regions as u64);
            let held: Vec<_> = [0, 1, 64, 4096, 5000, 70_000, pool.max_len()]
                .into_iter()
                .filter_map(|len| pool.alloc(len).ok())
                .collect();
            assert!(held.iter().all(|b| pool.keys_of(b.as_ptr()) == Some(b.keys())));
            for n in 0..6 {
                let Ok(share) = pool.share(name(n)) else { continue };
                drop(share.alloc(1));
            }
            for time in 0..3 {
                pool.tick(Duration::from_secs(time));
            }
            drop(held);
            pool.check();
            drop(pool);
        }
        Err(e) => assert!(!e.to_string().is_empty()),
    }
    assert_eq!(registrar.live(), 0, "all is given back");
    assert_eq!(pinpool::leaked_bytes(), leaked);
});
