//! The chapter on troubleshooting and the errors. Proves: each variant of each public error has an entry, under
//! a heading that is what it prints, as `Display` and as `Debug`; no entry is for a message that nothing prints.
#![cfg(all(
    feature = "fault",
    feature = "loopback",
    feature = "codec",
    feature = "global",
    feature = "bytemuck",
    any(feature = "rdma-sys", feature = "rdma-mummy-sys")
))]
#![allow(clippy::unwrap_used)]

use std::{
    collections::BTreeSet,
    fmt::{Debug, Display},
    fs, io,
    path::Path,
    time::Duration,
};

use pinpool::{
    Access, AdoptError, AllocError, AttachError, Buf, BuildError, CloseError, Device,
    DeviceChangeError, DeviceError, Exhausted, ExportError, FreeError, Guarantees, LeaseQp,
    LookupError, PodError, Pool, PostError, Problem, RegisterError, SgListError, TokenError,
    codec::FrameError,
    device::SoftError,
    lease::{ExchangeError, LeaseError, Refused},
    loopback::{LoopbackError, Status},
};

const CHAPTER: &str = include_str!("../docs/troubleshooting.md");

/// A heading, in which `…` stands for any text, and what is written below it.
struct Entry {
    heading: String,
    body: String,
}

fn entries() -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    let mut inside = false;
    for line in CHAPTER.lines() {
        if let Some(heading) = line.strip_prefix("### `") {
            let heading = heading.strip_suffix('`').expect("a message in backticks").to_owned();
            entries.push(Entry { heading, body: String::new() });
            inside = true;
        } else if line.starts_with('#') {
            inside = false;
        } else if inside {
            let body = &mut entries.last_mut().unwrap().body;
            *body += line;
            *body += "\n";
        }
    }
    entries
}

impl Entry {
    fn matches(&self, message: &str) -> bool {
        let mut parts = self.heading.split('…');
        let first = parts.next().unwrap_or_default();
        let Some(mut rest) = message.strip_prefix(first) else { return false };
        let mut open = false;
        for part in parts {
            open = part.is_empty();
            match rest.find(part) {
                Some(at) => rest = &rest[at + part.len()..],
                None => return false,
            }
        }
        open || rest.is_empty()
    }

    fn names(&self, variant: &str) -> bool {
        self.body.contains(&format!("`{variant}`"))
    }
}

fn errno(n: i32) -> io::Error {
    io::Error::from_raw_os_error(n)
}

fn deregister() -> RegisterError {
    RegisterError::Deregister {
        call: "ibv_dereg_mr",
        device: "rxe0".into(),
        source: errno(libc_ebusy()),
    }
}

/// EBUSY.
fn libc_ebusy() -> i32 {
    16
}

fn soft_pool(device: &Device) -> Pool {
    let access = Access::LOCAL_WRITE | Access::MW_BIND;
    Pool::builder().device(device.clone()).access(access).capacity(2 << 20).build().unwrap()
}

struct Samples(Vec<(String, String)>);

impl Samples {
    /// An expression that makes an error, by the name before its fields.
    fn add<E: Display + Debug>(&mut self, expression: &str, error: &E) {
        let name = expression.split([' ', '(', '{', '\n']).next().unwrap_or_default();
        // `unwrap`, `expect` and a `main` that returns an error print its `Debug`.
        let its = std::any::type_name::<E>();
        if !["Problem", "Exhausted", "PostError", "AttachError"].iter().any(|t| its.contains(t)) {
            assert_eq!(format!("{error:?}"), error.to_string(), "{name}");
        }
        // A type that needs its parameter is spelt with it.
        let name = name.replace("::<io::Error>", "");
        self.0.push((name, error.to_string()));
    }
}

macro_rules! samples {
    ($($error:expr),* $(,)?) => {{
        let mut all = Samples(Vec::new());
        $(all.add(stringify!($error), &$error);)*
        all
    }};
}

/// Each variant of each error, with made-up numbers.
fn samples() -> Samples {
    let name = || "rxe0".to_owned();
    let names = || vec!["a".to_owned(), "b".to_owned()];
    let access = Access::LOCAL_WRITE;
    let books = || Box::new(Exhausted::default());
    let growing = {
        let mut books = Exhausted::default();
        (books.capacity, books.max_capacity) = (1, 2);
        Box::new(books)
    };
    let (owner, this) = (1, 2);
    let maps = || Problem::MapCount { needed: 1, used: 2, limit: 3 };
    let (token, addr) = (7, 0x1000);
    let device = Device::soft();
    let other = Device::soft();
    let unknown = {
        let rails = Pool::builder().devices([device.clone(), other]).capacity(2 << 20);
        let buf = rails.build().unwrap().alloc(1).unwrap();
        buf.sge_on(&Device::soft()).unwrap_err()
    };
    let pool = soft_pool(&device);
    let capacity = pool.alloc(1).unwrap().set_len(1 << 20).unwrap_err();
    let qp = LeaseQp::soft(&device).unwrap();
    let revoke = {
        let lease = pool.alloc(64).unwrap().lease(&qp, Access::REMOTE_READ).unwrap();
        let soft = device.as_soft().unwrap();
        soft.fail_windows(0, 5, 5);
        let error = lease.revoke().unwrap_err();
        soft.fail_windows(0, 0, 0);
        error
    };
    let support = Box::new(device.lease_support());

    samples![
        DeviceError::NoDevice,
        DeviceError::NotFound { asked: name(), present: names() },
        DeviceError::Verbs { call: "ibv_open_device", device: name(), source: errno(13) },
        DeviceError::Null("the PD"),
        RegisterError::Register {
            call: "ibv_reg_mr",
            device: name(),
            len: 1,
            access,
            source: errno(12)
        },
        deregister(),
        BuildError::NoDevice,
        BuildError::ZeroCapacity,
        BuildError::CapacityTooLarge { asked: 2, max: 1 },
        BuildError::MaxCapacity { asked: 1, capacity: 2 },
        BuildError::Watermark { asked: 2, max_capacity: 1 },
        BuildError::DuplicateDevice { device: name() },
        BuildError::TooManyDevices { asked: 17, max: 16 },
        BuildError::Thread { source: errno(11) },
        BuildError::ArenaSize { asked: 3, problem: "is not a power of two".into() },
        BuildError::Class { name: name(), problem: "a class needs a name" },
        BuildError::Share {
            name: name(),
            class: name(),
            asked: 1,
            free: 0,
            problem: "a share needs a name"
        },
        BuildError::Access {
            access: Access::REMOTE_WRITE,
            reason: Access::REMOTE_WRITE.conflict().unwrap()
        },
        BuildError::MrTooSmall { device: name(), page_size: 2, max_mr_size: 1 },
        BuildError::TooManyArenas { device: name(), arenas: 2, arena_size: 1, max_mr: 1 },
        BuildError::Memlock { asked: 2, pinned: 0, soft: 1, hard: 1, errno: None },
        BuildError::PageSizeAbsent { asked: 1 << 30, offered: vec![2 << 20] },
        BuildError::Preflight(vec![maps()]),
        BuildError::Preflight(vec![maps(), maps()]),
        BuildError::Reserve { len: 1, source: errno(12) },
        BuildError::Node {
            node: 1,
            problem: "there is no such node".into(),
            fix: "Ask for another".into(),
            needed: 1,
            page_size: 4096,
            free: None,
            errno: None
        },
        BuildError::Back {
            arena: 0,
            arenas: 1,
            len: 1,
            page_size: 2 << 20,
            free_pages: Some(0),
            step: "mapping",
            source: errno(12)
        },
        BuildError::Adopt(AdoptError::Empty),
        BuildError::Export(ExportError::Private),
        BuildError::Register { arena: 0, arenas: 1, source: deregister() },
        AllocError::TooLarge { asked: 2, max: 1 },
        AllocError::Alignment { asked: 3, max: 2 },
        AllocError::Exhausted(books()),
        AllocError::Exhausted(growing),
        AllocError::TimedOut { waited: Duration::ZERO, ahead: 0, books: books() },
        AllocError::BatchInUse { held: 1, len: 2 },
        AllocError::BatchMixed { held: 1, len: 2 },
        AllocError::OtherPool,
        AllocError::ForeignProcess { owner, this },
        Exhausted::default(),
        FreeError::Null,
        FreeError::Foreign { addr, start: 1, end: 2 },
        FreeError::Interior { addr, offset: 1, block: 64 },
        FreeError::OtherReach { addr, remote: true },
        FreeError::OtherReach { addr, remote: false },
        FreeError::NotOut { addr },
        LookupError::NoClass { asked: name(), present: names() },
        LookupError::NoShare { asked: name(), present: vec![] },
        LookupError::NotRemote { class: name(), access },
        LookupError::NotLocal { class: name(), access },
        TokenError::OtherPool { token },
        TokenError::Invalid { token },
        TokenError::NotInFlight { token },
        TokenError::OtherHeap { token },
        TokenError::OtherReach { token, remote: true },
        TokenError::Posted { token },
        TokenError::ForeignProcess { owner, this },
        PostError::<io::Error>::OtherPool,
        PostError::Refused(errno(12)),
        CloseError::Shared(1),
        CloseError::ForeignProcess { owner, this },
        CloseError::Live { buffers: 1, bytes: 64 },
        CloseError::Deregister { arenas: 1, bytes: 1, first: deregister() },
        unknown,
        DeviceChangeError::Known { device: name() },
        DeviceChangeError::Unknown(unknown.clone()),
        DeviceChangeError::Last { device: name() },
        DeviceChangeError::TooMany { max: 16 },
        DeviceChangeError::Refused(Box::new(BuildError::NoDevice)),
        DeviceChangeError::Deregister { device: name(), arenas: 1, bytes: 1, first: deregister() },
        DeviceChangeError::Closed,
        DeviceChangeError::ForeignProcess { owner, this },
        AdoptError::Empty,
        AdoptError::Wraps { addr, len: 1 },
        AdoptError::NotWholePages { addr, len: 1, page_size: 4096 },
        AdoptError::NotMapped { at: addr, len: 1 },
        AdoptError::Protection { at: addr, len: 1, rights: "r--p".into() },
        AdoptError::MixedPages { first: 4096, at: addr, other: 2 << 20 },
        AdoptError::OtherPages { asked: 4096, found: 2 << 20 },
        AdoptError::InUse { start: 1, end: 2 },
        AdoptError::Locked { at: addr, len: 1, device: name() },
        AdoptError::Conflict("the capacity"),
        AdoptError::Unknown(errno(2)),
        ExportError::Private,
        ExportError::ForeignProcess { owner, this },
        ExportError::Layout("no version".into()),
        ExportError::Files { arenas: 2, files: 1 },
        ExportError::OtherFile { arena: 0, len: 2, page_size: 4096, found: 1, found_page: 4096 },
        ExportError::Unsealed { arena: 0 },
        ExportError::NotHugetlbfs { dir: "/tmp".into() },
        ExportError::HugetlbfsPages { dir: "/tmp".into(), found: 2 << 20, asked: 1 << 30 },
        ExportError::System { call: "memfd_create", source: errno(24) },
        capacity,
        SgListError::Full { capacity: 1, len: 1, asked: 1 },
        SgListError::TooLong { len: 1 << 33 },
        SgListError::OutOfRange { offset: 1, len: 1, have: 1 },
        LeaseError::NoWindows { device: name(), why: "it has none".into() },
        LeaseError::NotBindable { access },
        LeaseError::Rights { rights: access, problem: "it permits nothing" },
        LeaseError::Lacking { device: name(), missing: Guarantees::RANGE, support },
        LeaseError::ForeignBuffer { addr, len: 1, device: name() },
        LeaseError::Empty,
        LeaseError::QueuePair { problem: "is null".into() },
        LeaseError::Closed,
        LeaseError::Call { call: "ibv_post_send", device: name(), source: errno(12) },
        LeaseError::Completion {
            operation: "binding a window",
            status: 5,
            text: "flushed",
            vendor_err: 0
        },
        LeaseError::TimedOut { operation: "binding a window", after: Duration::ZERO },
        LeaseError::ForeignProcess,
        Refused::<pinpool::reach::Any> { buf: None::<Buf>, error: LeaseError::Empty },
        revoke,
        ExchangeError::<pinpool::reach::Any> {
            ended: None::<Buf>,
            next: None,
            error: Box::new(LeaseError::Empty)
        },
        LoopbackError::NotVerbs { device: name() },
        LoopbackError::NoActivePort { device: name() },
        LoopbackError::NoGid { device: name(), port: 1 },
        LoopbackError::Verbs { call: "ibv_create_qp", device: name(), source: errno(12) },
        LoopbackError::Completion {
            operation: "RDMA WRITE",
            status: Status::REM_ACCESS_ERR,
            vendor_err: 0
        },
        LoopbackError::TimedOut { operation: "RDMA WRITE", after: Duration::ZERO },
        LoopbackError::Stopped,
        SoftError::UnknownKey(1),
        SoftError::Right { needed: Access::REMOTE_READ, granted: access },
        SoftError::Range { addr: 1, len: 1, start: 2, end: 3 },
        SoftError::Misaligned(1),
        FrameError::Io(errno(104)),
        FrameError::Truncated { missing: 1 },
        FrameError::TooLong { len: 2, max: 1 },
        FrameError::Alloc(AllocError::Exhausted(books())),
        PodError::Alignment { addr, align: 8, ty: "u64" },
        PodError::Length { len: 1, size: 8, ty: "u64" },
        PodError::TooMany { count: 1, size: 8 },
        PodError::Alloc(AllocError::Exhausted(books())),
        AttachError::Attached,
        AttachError::Sizes { first: 2, max_len: 1 },
        AttachError::Thread { errno: 11 },
        Problem::Memlock { asked: 2, pinned: 0, soft: 1, hard: 1 },
        Problem::TooManyArenas { device: name(), arenas: 2, arena_size: 1, max_mr: 1 },
        Problem::MrTooSmall { device: name(), page_size: 2, max_mr_size: 1 },
        Problem::ArenaSize { asked: 3, problem: "is not a power of two".into() },
        Problem::PageSizeAbsent { asked: 1 << 30, offered: vec![2 << 20] },
        Problem::Hugepages {
            page_size: 2 << 20,
            needed: 2,
            free: 1,
            reserved: 0,
            surplus: 0,
            total: 1,
            nodes: vec![],
            forbidden: None
        },
        Problem::Node {
            node: 1,
            problem: "there is no such node".into(),
            fix: "Ask for another".into(),
            needed: 1,
            page_size: 4096,
            free: None
        },
        Problem::HugetlbCgroup {
            page_size: 2 << 20,
            asked: 2,
            used: 0,
            limit: 1,
            file: "/f".into()
        },
        Problem::MemoryCgroup { asked: 2, used: 0, limit: 1, file: "/f".into() },
        maps(),
        Problem::Overcommit { asked: 2, committed: 0, limit: 1 },
        Problem::Memory { asked: 2, available: 1, total: 1 },
        Problem::Device { problem: DeviceError::NoDevice.to_string(), fix: "none".into() },
        Problem::NoActivePort { device: name() },
        Problem::ForkUnsafe,
        Problem::NoMembarrier,
    ]
}

/// `Type::Variant` of each public error of the crate, as the source has them.
fn declared() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            let (mut error, mut name) = (false, None::<String>);
            for line in text.lines() {
                if line.starts_with("#[derive(") {
                    error = line.contains("thiserror::Error");
                } else if let Some(rest) = line.strip_prefix("pub enum ") {
                    let enum_name = rest.split(['<', ' ']).next().unwrap();
                    let wanted = error || enum_name == "Problem";
                    name = wanted.then(|| enum_name.to_owned());
                } else if line.starts_with('}') {
                    name = None;
                } else if let Some(name) = &name {
                    let variant = line.strip_prefix("    ").unwrap_or_default();
                    if variant.starts_with(|c: char| c.is_ascii_uppercase()) {
                        let variant = variant.split(|c: char| !c.is_alphanumeric()).next().unwrap();
                        found.insert(format!("{name}::{variant}"));
                    }
                }
            }
        }
    }
    found
}

/// The names that the samples have in the chapter.
fn entry_name(sample: &str) -> &str {
    match sample {
        "deregister" => "RegisterError::Deregister",
        "maps" => "Problem::MapCount",
        "unknown" => "UnknownDevice",
        "capacity" => "CapacityError",
        "revoke" => "RevokeError",
        "Exhausted::default" => "Exhausted",
        "Refused::<pinpool::reach::Any>" => "Refused",
        "ExchangeError::<pinpool::reach::Any>" => "ExchangeError",
        other => other,
    }
}

#[test]
fn each_error_has_an_entry_under_what_it_prints() {
    let entries = entries();
    let mut missing = Vec::new();
    for (sample, message) in samples().0 {
        let name = entry_name(&sample);
        if !entries.iter().any(|e| e.names(name) && e.matches(&message)) {
            missing.push(format!("{name}: {message}"));
        }
    }
    assert!(missing.is_empty(), "without an entry:\n{}", missing.join("\n"));
}

#[test]
fn each_variant_in_the_source_is_among_the_samples() {
    let samples: BTreeSet<_> =
        samples().0.iter().map(|(name, _)| entry_name(name).to_owned()).collect();
    let declared = declared();
    assert!(declared.len() > 100, "{declared:?}");
    let missing: Vec<_> = declared.difference(&samples).collect();
    assert!(missing.is_empty(), "no sample of {missing:?}");
}

#[test]
fn no_entry_is_for_what_nothing_prints() {
    let samples = samples().0;
    let dead: Vec<_> = entries()
        .into_iter()
        .filter(|e| !samples.iter().any(|(_, message)| e.matches(message)))
        .map(|e| e.heading)
        .collect();
    assert!(dead.is_empty(), "printed by nothing:\n{}", dead.join("\n"));
}
