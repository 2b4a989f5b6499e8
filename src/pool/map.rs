//! A map of a pool for people: what each arena is and what its pages hold, with the books beside it. Manages
//! gathering and drawing it; the numbers' meaning is `stats.rs`'s, showing it elsewhere the adapters'.

use std::fmt::{self, Write as _};

use super::{Core, Pool, family::Heaps};
use crate::{
    arena::ArenaInfo,
    size_class::{self, CLASSES},
    slab::SlabUse,
    stats::Stats,
    sys::limits,
};

/// How many cells an arena is drawn with.
const CELLS: usize = 64;

/// A pool at one moment, as [`Pool::map`] gives it. Shown, it is a text of a few lines an arena.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PoolMap {
    /// The process that the pool is in.
    pub process: u32,
    /// The books.
    pub stats: Stats,
    /// The arenas, class by class and by address.
    pub arenas: Vec<ArenaMap>,
}

/// One arena, and what lies in it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ArenaMap {
    /// The access class that it is of.
    pub class: String,
    /// What it is made of; keys and times are those of the first device.
    pub info: ArenaInfo,
    /// How many regions it is registered as: one for each device.
    pub regions: usize,
    /// Bytes of blocks that are out of the slabs: in buffers or in caches. Which of the two, only the sums tell.
    pub out: usize,
    /// Bytes of free blocks in slabs.
    pub free: usize,
    /// Bytes of free runs, and what slabs leave over.
    pub unused: usize,
    /// What its pages hold, from its start to its end, in 64 cells (fewer where it has fewer pages), one character
    /// each: `.` free runs; `0` to `9` slabs, by tenths of their blocks that are out, and `#` all of them; `=`
    /// single long blocks.
    pub cells: String,
}

/// What a cell covers.
#[derive(Clone, Copy, Default)]
struct Cell {
    out: f64,
    free: f64,
    long: f64,
}

impl Cell {
    fn glyph(self) -> char {
        let slabs = self.out + self.free;
        if slabs + self.long < 1.0 {
            '.'
        } else if self.long > slabs {
            '='
        } else if self.free < 1.0 {
            '#'
        } else {
            // Less than all of it, so at most 9.
            char::from(b'0' + ((self.out / slabs * 10.0) as u8).min(9))
        }
    }
}

impl ArenaMap {
    fn new(class: &Core, info: ArenaInfo, regions: usize, uses: &[(usize, SlabUse)]) -> Self {
        let start = info.addr.as_ptr() as usize;
        let pages = info.len.div_ceil(size_class::PAGE);
        let mut cells = vec![Cell::default(); CELLS.min(pages).max(1)];
        let width = info.len as f64 / cells.len() as f64;
        let (mut out, mut free) = (0, 0);
        for (at, slab) in uses.iter().filter(|(at, _)| (start..start + info.len).contains(at)) {
            let span = slab.class >= CLASSES;
            let long = slab.blocks == 1;
            let block = if span { slab.len } else { size_class::size_of(slab.class) };
            let (own_out, own_free) = ((slab.blocks - slab.free) * block, slab.free * block);
            out += own_out;
            free += own_free;
            let (from, to) = ((at - start) as f64, (at - start + slab.len) as f64);
            let (first, last) = ((from / width) as usize, (to / width) as usize);
            for (i, cell) in cells.iter_mut().enumerate().take(last + 1).skip(first) {
                let (cell_from, cell_to) = (i as f64 * width, (i + 1) as f64 * width);
                let part = (to.min(cell_to) - from.max(cell_from)).max(0.0) / slab.len as f64;
                match long {
                    true => cell.long += part * own_out as f64,
                    false => {
                        cell.out += part * own_out as f64;
                        cell.free += part * own_free as f64;
                    }
                }
            }
        }
        Self {
            class: class.name.clone(),
            info,
            regions,
            out,
            free,
            unused: info.len.saturating_sub(out + free),
            cells: cells.into_iter().map(Cell::glyph).collect(),
        }
    }
}

impl Heaps<'_> {
    fn map(self) -> Vec<ArenaMap> {
        let mut arenas = Vec::new();
        for (class, shares) in self.classes() {
            // A share's slabs lie in its class's arenas.
            let mut uses = class.slab_uses();
            shares.for_each(|share| uses.extend(share.slab_uses()));
            let Some((infos, regions)) = class.shown().map(|s| (s.infos(), s.devices())) else {
                continue;
            };
            let map = |info| ArenaMap::new(class, info, regions, &uses);
            arenas.extend(infos.into_iter().map(map));
        }
        arenas
    }
}

impl Core {
    fn slab_uses(&self) -> Vec<(usize, SlabUse)> {
        // In a forked child the slabs' lock may be held by a thread that is not there.
        if self.foreign() { Vec::new() } else { self.slabs.uses() }
    }
}

impl<R> Pool<R> {
    /// Draws what is where: the arenas, what their pages hold, and the books. For people; `Display` gives the text.
    ///
    /// Costs what [`stats`](Pool::stats) does, and a look at each slab. The parts are looked at one after the other,
    /// so that under load they may differ a little.
    ///
    /// ```
    /// # use pinpool::{Device, Pages, Pool};
    /// let pool = Pool::builder().device(Device::soft()).capacity(1 << 20).pages(Pages::Base).build()?;
    /// let held: Vec<_> = (0..16).map_while(|_| pool.alloc(32 << 10).ok()).collect();
    /// let map = pool.map();
    /// assert_eq!(map.arenas[0].cells.len(), 64);
    /// println!("{map}");
    /// # Ok::<(), pinpool::BuildError>(())
    /// ```
    pub fn map(&self) -> PoolMap {
        let stats = self.stats();
        PoolMap { process: limits::process_id(), stats, arenas: self.heaps().map() }
    }
}

/// A byte count in four or five characters, rounded.
struct Short(usize);

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u32, char); 4] = [(40, 'T'), (30, 'G'), (20, 'M'), (10, 'K')];
        let unit = UNITS.into_iter().find(|u| self.0 >> u.0 > 0);
        let text = match unit {
            None => self.0.to_string(),
            Some((shift, name)) if self.0.is_multiple_of(1 << shift) => {
                format!("{}{name}", self.0 >> shift)
            }
            Some((shift, name)) => format!("{:.1}{name}", self.0 as f64 / (1u64 << shift) as f64),
        };
        f.pad(&text)
    }
}

impl fmt::Display for PoolMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = &self.stats;
        write!(f, "process {}: {} registered", self.process, Short(s.capacity))?;
        if s.max_capacity > s.capacity {
            write!(f, ", may grow to {}", Short(s.max_capacity))?;
        }
        let (live, cached, free) = (Short(s.live), Short(s.cached), Short(s.free));
        writeln!(f, "; live {live}, cached {cached}, free {free}, unused {}", Short(s.unused))?;
        write!(f, "{} buffers out, {} in flight, {} wait", s.live_buffers, s.in_flight, s.waiting)?;
        writeln!(
            f,
            "; high water {}, largest free {}, fragmentation {:.0} %",
            Short(s.high_water),
            Short(s.largest_free),
            s.fragmentation() * 100.0
        )?;
        let misses = s.caches.misses;
        write!(f, "{misses} cache misses, {} waited, {} refused", s.waits, s.refused)?;
        writeln!(
            f,
            "; {} growths, {} failed, {} shrinks",
            s.growths, s.growth_failures, s.shrinks
        )?;
        writeln!(f)?;
        self.write_arenas(f)?;
        if !s.shares.is_empty() {
            writeln!(f)?;
            self.write_shares(f)?;
        }
        writeln!(f)?;
        self.write_classes(f)
    }
}

impl PoolMap {
    fn write_arenas(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:>5}  {:<12} {:>16} {:>7} {:>6} {:>4} {:>4} {:>7} {:>7} {:>7}",
            "arena", "class", "address", "length", "pages", "node", "keys", "out", "free", "unused"
        )?;
        for (i, a) in self.arenas.iter().enumerate() {
            let node = a.info.node.map_or("-".to_owned(), |n| n.to_string());
            writeln!(
                f,
                "{i:>5}  {:<12} {:>16} {:>7} {:>6} {node:>4} {:>4} {:>7} {:>7} {:>7}",
                printable(&a.class),
                format!("{:x}", a.info.addr.as_ptr() as usize),
                Short(a.info.len),
                Short(a.info.page_size),
                a.regions,
                Short(a.out),
                Short(a.free),
                Short(a.unused)
            )?;
            writeln!(f, "       [{}]", a.cells)?;
        }
        writeln!(
            f,
            "       . free   0-9 tenths of a slab's blocks out   # all out   = one long block"
        )
    }

    fn write_shares(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<12} {:<12} {:>8} {:>8} {:>8} {:>8} {:>8}",
            "share", "class", "reserve", "live", "waiting", "waited", "refused"
        )?;
        for s in &self.stats.shares {
            writeln!(
                f,
                "{:<12} {:<12} {:>8} {:>8} {:>8} {:>8} {:>8}",
                printable(&s.name),
                printable(&s.class),
                Short(s.reserve.capacity),
                Short(s.reserve.live),
                s.waiting,
                s.waits,
                s.refused
            )?;
        }
        Ok(())
    }

    fn write_classes(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:>8} {:>9} {:>8} {:>8} {:>8} {:>8} {:>10} {:>10}",
            "block", "buffers", "live", "cached", "free", "unused", "high water", "misses"
        )?;
        for c in self.stats.classes.iter() {
            let block = if c.block == 0 { "longer".to_owned() } else { Short(c.block).to_string() };
            writeln!(
                f,
                "{block:>8} {:>9} {:>8} {:>8} {:>8} {:>8} {:>10} {:>10}",
                c.live_buffers,
                Short(c.live),
                Short(c.cached),
                Short(c.free),
                Short(c.unused),
                Short(c.high_water),
                c.caches.misses
            )?;
        }
        Ok(())
    }
}

/// A name of the user's, without what would move a terminal's cursor, and not too long for its column.
fn printable(name: &str) -> String {
    let mut text = String::new();
    for c in name.chars().take(12) {
        match c.is_control() {
            true => text.push('?'),
            false => {
                let _ = text.write_char(c);
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short() {
        for (bytes, text) in [
            (0, "0"),
            (1023, "1023"),
            (1024, "1K"),
            (1536, "1.5K"),
            (32 << 20, "32M"),
            (1 << 40, "1T"),
        ] {
            assert_eq!(Short(bytes).to_string(), text);
        }
        assert_eq!(format!("{:>5}|", Short(4096)), "   4K|");
    }

    #[test]
    fn cells_tell_what_they_hold() {
        let cell = |out, free, long| Cell { out, free, long }.glyph();
        assert_eq!(cell(0.0, 0.0, 0.0), '.');
        assert_eq!(cell(0.0, 4096.0, 0.0), '0');
        assert_eq!(cell(4095.0, 1.0, 0.0), '9');
        assert_eq!(cell(4096.0, 0.0, 0.0), '#');
        assert_eq!(cell(100.0, 0.0, 4096.0), '=');
    }

    #[test]
    fn names_move_no_cursor() {
        assert_eq!(printable("a\x1b[2J\nb"), "a?[2J?b");
    }
}
