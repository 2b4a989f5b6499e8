//! What operators see of a pool on the software device. Proves: every rare event is told once, where it arises;
//! what Prometheus scrapes are the pool's own numbers, each described, and the places of bytes sum; `tracing` gets
//! each event with its numbers.
#![cfg(all(feature = "fault", feature = "metrics", feature = "tracing"))]
#![allow(clippy::unwrap_used)]

mod common;

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex},
    time::Duration,
};

use common::soft;
use metrics_exporter_prometheus::PrometheusBuilder;
use pinpool::{
    Access, Device, Event,
    device::{Fault, FaultyRegistrar},
};

const MIB: usize = 1 << 20;

/// The samples of a page, by name and labels.
fn samples(page: &str) -> HashMap<String, f64> {
    let lines = page.lines().filter(|l| !l.starts_with('#') && !l.is_empty());
    lines
        .map(|l| {
            let (name, value) = l.rsplit_once(' ').unwrap();
            (name.to_owned(), value.parse().unwrap())
        })
        .collect()
}

#[test]
fn prometheus_scrapes_the_pools_own_numbers() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let page = recorder.handle();
    metrics::with_local_recorder(&recorder, || {
        let pool = soft(4 * MIB)
            .class("shared", Access::LOCAL_WRITE | Access::REMOTE_READ, MIB)
            .share("own", MIB / 2)
            .on_event(pinpool::count_event)
            .build()
            .unwrap();
        let other = soft(MIB).build().unwrap();
        let held: Vec<_> = (0..100).map(|_| pool.alloc(4096).unwrap()).collect();
        let span = pool.alloc(MIB).unwrap();
        let token = pool.alloc(64).unwrap().into_token();
        let mine = pool.share("own").unwrap().alloc(1000).unwrap();
        assert!(pool.alloc(3 * MIB).is_err());
        for round in 0..2 {
            pool.export_metrics("main");
            other.export_metrics("other");
            let (text, s) = (page.render(), pool.stats());
            let got = samples(&text);
            let at = |name: &str| *got.get(name).unwrap_or_else(|| panic!("{name}\n{text}"));
            assert_eq!(at("pinpool_capacity_bytes{pool=\"main\"}"), (5 * MIB) as f64);
            assert_eq!(at("pinpool_capacity_bytes{pool=\"other\"}"), MIB as f64);
            let place =
                |state: &str| at(&format!("pinpool_bytes{{pool=\"main\",state=\"{state}\"}}"));
            let all = ["live", "cached", "free", "unused"].map(place);
            assert_eq!(all.iter().sum::<f64>(), (5 * MIB) as f64, "they sum (P5)");
            assert_eq!(all[0], s.live as f64);
            assert_eq!(at("pinpool_buffers{pool=\"main\",state=\"in_flight\"}"), 1.0);
            let large = "pinpool_class_bytes{pool=\"main\",block=\"1048576\",state=\"live\"}";
            assert_eq!(at(large), MIB as f64);
            assert_eq!(
                at(
                    "pinpool_share_bytes{pool=\"main\",class=\"default\",share=\"own\",state=\"live\"}"
                ),
                1024.0
            );
            let misses = "pinpool_cache_misses_total{pool=\"main\",block=\"4096\"}";
            let page_class = s.classes.iter().find(|c| c.block == 4096).unwrap();
            assert_eq!(at(misses), page_class.caches.misses as f64);
            assert_eq!(at("pinpool_refused_total{pool=\"main\"}"), 1.0);
            assert_eq!(at("pinpool_regions{pool=\"main\"}"), 2.0);
            assert_eq!(at("pinpool_arenas{pool=\"main\",page_size=\"4096\"}"), 2.0);
            assert_eq!(at("pinpool_events_total{event=\"built\"}"), 1.0);
            assert_eq!(at("pinpool_events_total{event=\"exhausted\"}"), 1.0);
            assert!(round == 1 || s.live > 0);
            for name in got.keys().map(|k| k.split('{').next().unwrap()) {
                assert!(text.contains(&format!("# HELP {name} ")), "{name} is not described");
            }
        }
        drop((held, span, mine, pool.from_any_token(token)));
        pool.export_metrics("main");
        assert_eq!(samples(&page.render())["pinpool_bytes{pool=\"main\",state=\"live\"}"], 0.0);
    });
}

/// Names of events, in order.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<&'static str>>>);

impl Told {
    fn hook(&self) -> impl Fn(&Event<'_>) + Send + Sync + 'static {
        let told = self.clone();
        move |e| told.0.lock().unwrap().push(e.name())
    }

    fn take(&self) -> Vec<&'static str> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

#[test]
fn each_event_is_told_once_where_it_arises() {
    let told = Told::default();
    let registrar = FaultyRegistrar::new(&Device::soft())
        .fault(Fault::Register(2, 12))
        .fault(Fault::Deregister(2, 5));
    let pool = soft(MIB)
        .device(Device::custom(registrar.clone()))
        .max_capacity(2 * MIB)
        .shrink_after(Duration::from_secs(1))
        .growth_by_hand()
        .on_event(told.hook())
        .build()
        .unwrap();
    assert_eq!(told.take(), ["built"]);
    let held: Vec<_> = std::iter::from_fn(|| pool.alloc(64 << 10).ok()).collect();
    assert_eq!(told.take(), ["exhausted"]);
    (0..100).for_each(|_| assert!(pool.alloc(64 << 10).is_err()));
    assert!(pool.alloc_wait(4096, Duration::from_micros(10)).is_err());
    assert_eq!(told.take().len(), 0, "once a second");
    assert_eq!(pool.stats().refused, 102);
    pool.tick(Duration::ZERO);
    assert_eq!(told.take(), ["growth_failed"]);
    pool.tick(Duration::from_secs(1));
    assert_eq!(told.take(), ["grew"]);
    drop(held);
    let mut at = Duration::from_secs(1);
    while pool.stats().shrinks == 0 {
        at += Duration::from_millis(200);
        pool.tick(at);
        assert!(at < Duration::from_secs(60));
    }
    assert_eq!(told.take(), ["shrank"]);
    drop(pool);
    assert_eq!(told.take(), ["deregister_failed", "taken_down"]);
    let refused = FaultyRegistrar::new(&Device::soft()).fault(Fault::Register(1, 12));
    let failed = soft(MIB).device(Device::custom(refused)).on_event(told.hook()).build();
    assert!(failed.is_err());
    assert_eq!(told.take(), ["build_failed"]);
}

#[test]
fn a_hook_may_use_the_pool_that_tells_it() {
    let slot: Arc<Mutex<Option<pinpool::Pool>>> = Arc::default();
    let inside = slot.clone();
    let told = Told::default();
    let note = told.hook();
    let pool = soft(MIB)
        .on_event(move |e| {
            note(e);
            let pool = inside.try_lock().ok().and_then(|p| p.clone());
            if let Some(pool) = pool {
                assert!(pool.alloc(MIB).is_err(), "and that is not told again");
                assert!(pool.stats().balanced());
            }
        })
        .build()
        .unwrap();
    *slot.lock().unwrap() = Some(pool.clone());
    let held: Vec<_> = std::iter::from_fn(|| pool.alloc(4096).ok()).collect();
    assert_eq!(told.take(), ["built", "exhausted"]);
    drop(held);
    slot.lock().unwrap().take();
    pool.check();
}

#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl io::Write for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn tracing_gets_each_event_with_its_numbers() {
    let written = Written::default();
    let out = written.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::DEBUG)
        .with_ansi(false)
        .with_writer(move || out.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, || {
        let registrar = FaultyRegistrar::new(&Device::soft())
            .fault(Fault::Register(2, 12))
            .fault(Fault::Deregister(1, 5));
        let pool = soft(MIB)
            .device(Device::custom(registrar))
            .max_capacity(2 * MIB)
            .growth_by_hand()
            .on_event(pinpool::trace_event)
            .build()
            .unwrap();
        let held: Vec<_> = std::iter::from_fn(|| pool.alloc(64 << 10).ok()).collect();
        pool.tick(Duration::ZERO);
        pool.tick(Duration::from_secs(1));
        drop((held, pool));
    });
    let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
    let has = |level: &str, parts: &[&str]| {
        let found = text.lines().any(|l| l.contains(level) && parts.iter().all(|p| l.contains(p)));
        assert!(found, "{level} {parts:?} in\n{text}");
    };
    has("INFO pinpool:", &["the pool was built", "kind=\"built\"", "arenas=1", "capacity=1048576"]);
    has("WARN pinpool:", &["allocs were refused", "asked=65536", "refused=1", "live=1048576"]);
    has("WARN pinpool:", &["could not grow", "failures=1", "len=1048576", "retry_after=100ms"]);
    has("INFO pinpool:", &["the pool grew", "capacity=2097152"]);
    has("ERROR pinpool:", &["deregister", "len=1048576", "its memory is lost"]);
    has("DEBUG pinpool:", &["taken down", "arenas=2"]);
    assert_eq!(text.lines().count(), 6, "{text}");
}
