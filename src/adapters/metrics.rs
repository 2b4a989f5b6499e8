//! A pool's numbers for the `metrics` facade, so that whatever recorder the program has (Prometheus, statsd, …)
//! gets them. Manages names, labels and units; what the numbers mean is `stats.rs`'s. Nothing is recorded unless
//! the user calls: on each scrape, or now and then.

use std::time::Duration;

use ::metrics::{Label, SharedString, Unit, counter, describe_counter, describe_gauge, gauge};

use crate::{
    arena,
    config::Event,
    pool::Pool,
    stats::{CacheStats, Stats},
};

/// A metric: its name, its unit, and what it tells.
type Described = (&'static str, Unit, &'static str);

const GAUGES: &[Described] = &[
    ("pinpool_capacity_bytes", Unit::Bytes, "Bytes of all arenas"),
    ("pinpool_max_capacity_bytes", Unit::Bytes, "Bytes that the pool may grow to"),
    (
        "pinpool_bytes",
        Unit::Bytes,
        "Where the bytes are: live, cached, free and unused sum to the capacity",
    ),
    ("pinpool_buffers", Unit::Count, "Buffers that are out, and how many of them as tokens"),
    (
        "pinpool_high_water_bytes",
        Unit::Bytes,
        "The most bytes that were out of the slabs at one time",
    ),
    ("pinpool_largest_free_bytes", Unit::Bytes, "The longest buffer to be had at once"),
    (
        "pinpool_fragmentation_ratio",
        Unit::Count,
        "Part of the free runs apart from the longest of their arena, 0 to 1",
    ),
    ("pinpool_arenas", Unit::Count, "Arenas, by bytes of a page"),
    ("pinpool_regions", Unit::Count, "Memory regions: arenas, once for each device"),
    ("pinpool_waiting", Unit::Count, "Requests that wait for memory now"),
    (
        "pinpool_table_bytes",
        Unit::Bytes,
        "Bytes of the allocator's own tables, outside registered memory",
    ),
    ("pinpool_class_bytes", Unit::Bytes, "Where a size class's bytes are"),
    (
        "pinpool_class_high_water_bytes",
        Unit::Bytes,
        "The most bytes of a size class that were out of the slabs at one time",
    ),
    (
        "pinpool_access_class_bytes",
        Unit::Bytes,
        "Where an access class's bytes are, its shares included",
    ),
    ("pinpool_share_bytes", Unit::Bytes, "Where the bytes of a share's reserve are"),
    ("pinpool_share_waiting", Unit::Count, "Requests that wait for a share's memory now"),
    (
        "pinpool_process_pinned_bytes",
        Unit::Bytes,
        "VmPin: what RDMA has pinned for the whole process",
    ),
    ("pinpool_process_locked_bytes", Unit::Bytes, "VmLck: what mlock keeps for the whole process"),
    (
        "pinpool_process_memlock_limit_bytes",
        Unit::Bytes,
        "RLIMIT_MEMLOCK; not there when unlimited",
    ),
    (
        "pinpool_process_leaked_bytes",
        Unit::Bytes,
        "Bytes that stay mapped since a device or the system would not let go",
    ),
];

const COUNTERS: &[Described] = &[
    (
        "pinpool_cache_hits_total",
        Unit::Count,
        "Allocs that threads' caches served, at least, by size class",
    ),
    ("pinpool_cache_misses_total", Unit::Count, "Allocs that asked depot or slabs, by size class"),
    (
        "pinpool_depot_hits_total",
        Unit::Count,
        "Misses that a magazine of the depot made good, by size class",
    ),
    (
        "pinpool_refused_total",
        Unit::Count,
        "Allocs refused for want of memory, or that waited in vain",
    ),
    ("pinpool_waits_total", Unit::Count, "Requests that have waited or do"),
    ("pinpool_wait_microseconds_total", Unit::Microseconds, "How long requests waited, together"),
    ("pinpool_growths_total", Unit::Count, "Arenas that came"),
    ("pinpool_shrinks_total", Unit::Count, "Arenas that went"),
    ("pinpool_growth_failures_total", Unit::Count, "Arenas that were to come and did not"),
    (
        "pinpool_growth_microseconds_total",
        Unit::Microseconds,
        "What bringing arenas up took, after the start",
    ),
    ("pinpool_register_calls_total", Unit::Count, "Register calls"),
    ("pinpool_register_microseconds_total", Unit::Microseconds, "What register calls took"),
    ("pinpool_share_waits_total", Unit::Count, "Requests through a share that have waited or do"),
    (
        "pinpool_share_ran_dry_total",
        Unit::Count,
        "How often a share's whole reserve was searched in vain",
    ),
    ("pinpool_share_refused_total", Unit::Count, "Allocs through a share that were refused"),
    ("pinpool_events_total", Unit::Count, "Rare events, by kind"),
];

/// Counts a rare event as `pinpool_events_total`, by its kind: hand it to
/// [`Builder::on_event`](crate::Builder::on_event), alone or out of a function of your own.
///
/// ```
/// # use pinpool::{Device, Pages, Pool};
/// let builder = Pool::builder().device(Device::soft()).capacity(1 << 20).pages(Pages::Base);
/// let pool = builder.on_event(pinpool::count_event).build()?;
/// # Ok::<(), pinpool::BuildError>(())
/// ```
pub fn count_event(event: &Event<'_>) {
    counter!("pinpool_events_total", "event" => event.name()).increment(1);
}

impl<R> Pool<R> {
    /// Sets the pool's numbers as gauges and counters of the program's recorder, under the label `pool = name`:
    /// to be called on each scrape, or now and then. Takes what [`stats`](Pool::stats) takes, and allocates.
    ///
    /// The names begin with `pinpool_`; each has its unit and a description, which are made known by each call. What
    /// is told by size class has the label `block` (bytes; `span` for lengths above the classes).
    ///
    /// ```
    /// # use pinpool::{Device, Pages, Pool};
    /// # let pool = Pool::builder().device(Device::soft()).capacity(1 << 20).pages(Pages::Base).build()?;
    /// let prometheus = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    /// let page = prometheus.handle();
    /// metrics::with_local_recorder(&prometheus, || pool.export_metrics("main")); // or install it for all
    /// assert!(page.render().contains("pinpool_capacity_bytes{pool=\"main\"} 1048576"));
    /// # Ok::<(), pinpool::BuildError>(())
    /// ```
    pub fn export_metrics(&self, name: &str) {
        describe();
        export(&self.stats(), name);
    }
}

fn describe() {
    for &(name, unit, text) in GAUGES {
        describe_gauge!(name, unit, text);
    }
    for &(name, unit, text) in COUNTERS {
        describe_counter!(name, unit, text);
    }
}

/// Labels, the first of which all metrics of a pool have.
#[derive(Clone)]
struct Labels(Vec<Label>);

impl Labels {
    fn with(&self, key: &'static str, value: impl Into<SharedString>) -> Self {
        let mut labels = self.0.clone();
        labels.push(Label::new(key, value.into()));
        Self(labels)
    }

    fn gauge(&self, name: &'static str, value: usize) {
        self.real(name, value as f64);
    }

    fn real(&self, name: &'static str, value: f64) {
        gauge!(name, self.0.clone()).set(value);
    }

    fn counter(&self, name: &'static str, value: u64) {
        counter!(name, self.0.clone()).absolute(value);
    }

    fn time(&self, name: &'static str, value: Duration) {
        self.counter(name, u64::try_from(value.as_micros()).unwrap_or(u64::MAX));
    }

    /// The four places that bytes can be in.
    fn places(&self, name: &'static str, [live, cached, free, unused]: [usize; 4]) {
        for (state, bytes) in
            [("live", live), ("cached", cached), ("free", free), ("unused", unused)]
        {
            self.with("state", state).gauge(name, bytes);
        }
    }
}

fn export(s: &Stats, name: &str) {
    let pool = Labels(vec![Label::new("pool", name.to_owned())]);
    pool.gauge("pinpool_capacity_bytes", s.capacity);
    pool.gauge("pinpool_max_capacity_bytes", s.max_capacity);
    pool.places("pinpool_bytes", [s.live, s.cached, s.free, s.unused]);
    pool.with("state", "live").gauge("pinpool_buffers", s.live_buffers);
    pool.with("state", "in_flight").gauge("pinpool_buffers", s.in_flight);
    pool.gauge("pinpool_high_water_bytes", s.high_water);
    pool.gauge("pinpool_largest_free_bytes", s.largest_free);
    pool.real("pinpool_fragmentation_ratio", s.fragmentation());
    for p in &s.pages {
        pool.with("page_size", p.page_size.to_string()).gauge("pinpool_arenas", p.arenas);
    }
    pool.gauge("pinpool_regions", s.regions);
    pool.gauge("pinpool_waiting", s.waiting);
    pool.gauge("pinpool_table_bytes", s.table_bytes);
    pool.counter("pinpool_refused_total", s.refused);
    pool.counter("pinpool_waits_total", s.waits);
    pool.time("pinpool_wait_microseconds_total", s.wait_time);
    pool.counter("pinpool_growths_total", s.growths);
    pool.counter("pinpool_shrinks_total", s.shrinks);
    pool.counter("pinpool_growth_failures_total", s.growth_failures);
    pool.time("pinpool_growth_microseconds_total", s.growth_time);
    pool.counter("pinpool_register_calls_total", s.register_calls);
    pool.time("pinpool_register_microseconds_total", s.register_time);
    for c in &s.classes {
        let block = if c.block == 0 { "span".to_owned() } else { c.block.to_string() };
        let class = pool.with("block", block);
        class.places("pinpool_class_bytes", [c.live, c.cached, c.free, c.unused]);
        class.gauge("pinpool_class_high_water_bytes", c.high_water);
        let CacheStats { hits, misses, from_depot } = c.caches;
        class.counter("pinpool_cache_hits_total", hits);
        class.counter("pinpool_cache_misses_total", misses);
        class.counter("pinpool_depot_hits_total", from_depot);
    }
    for a in &s.access_classes {
        let b = &a.all;
        let class = pool.with("class", a.name.clone());
        class.places("pinpool_access_class_bytes", [b.live, b.cached, b.free, b.unused]);
    }
    for share in &s.shares {
        let b = &share.reserve;
        let labels = pool.with("class", share.class.clone()).with("share", share.name.clone());
        labels.places("pinpool_share_bytes", [b.live, b.cached, b.free, b.unused]);
        labels.gauge("pinpool_share_waiting", share.waiting);
        labels.counter("pinpool_share_waits_total", share.waits);
        labels.counter("pinpool_share_ran_dry_total", share.ran_dry);
        labels.counter("pinpool_share_refused_total", share.refused);
    }
    // The process's, the same for all its pools.
    let process = Labels(Vec::new());
    process.real("pinpool_process_pinned_bytes", s.pinned as f64);
    process.real("pinpool_process_locked_bytes", s.locked as f64);
    if let Some(limit) = s.memlock_limit {
        process.real("pinpool_process_memlock_limit_bytes", limit as f64);
    }
    process.real("pinpool_process_leaked_bytes", arena::leaked_bytes() as f64);
}
