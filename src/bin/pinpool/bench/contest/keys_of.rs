//! The keys of random live pointers.

use pinpool::{Buf, Pool};

use super::{
    bed::Bed,
    measure::{Plan, Rep, Runner, Timed, calibrate, time},
    opaque::keep,
    random::Random,
    spec::Spec,
};

/// Pointers to go through: few enough to stay in the first cache, so that what is timed is the look-up.
const SAMPLE: usize = 2048;

pub(crate) struct KeysOf {
    look_up: LookUp,
    plan: Plan,
    per_slice: Option<usize>,
    live: Vec<Buf>,
    random: Random,
}

struct LookUp {
    pool: Pool,
    sample: Vec<*const u8>,
}

impl KeysOf {
    pub(crate) fn new(bed: &Bed, spec: &Spec, plan: Plan) -> Result<Self, String> {
        let pool = bed.pool(false)?;
        if pool.arenas().len() != spec.arenas {
            return Err(format!("asked for {} arenas, got {}", spec.arenas, pool.arenas().len()));
        }
        let live = (0..spec.live).map(|_| pool.alloc(spec.bytes)).collect::<Result<Vec<_>, _>>();
        let live = live.map_err(|e| e.to_string())?;
        for buf in live.iter().step_by(spec.live.div_ceil(10_000)) {
            let last = buf.as_ptr().wrapping_add(buf.len() - 1);
            if pool.keys_of(last) != Some(buf.keys()) {
                return Err(format!("the keys of {last:?} are not those of its buffer"));
            }
        }
        let look_up = LookUp { pool, sample: Vec::new() };
        Ok(Self { look_up, plan, per_slice: None, live, random: Random::new(4) })
    }

    fn draw(&mut self) {
        self.look_up.sample.clear();
        for _ in 0..SAMPLE {
            let buf = &self.live[self.random.below(self.live.len())];
            let inside = self.random.below(buf.len());
            self.look_up.sample.push(buf.as_ptr().wrapping_add(inside));
        }
    }
}

impl Timed for LookUp {
    const OPS: usize = SAMPLE;

    #[inline(never)]
    fn run(&mut self, n: usize) {
        for _ in 0..n {
            for &ptr in &self.sample {
                let keys = self.pool.keys_of(ptr);
                if let Some(keys) = keys {
                    keep(ptr, keys.lkey.get(), keys.rkey.map_or(0, |rkey| rkey.get()));
                }
            }
        }
    }
}

impl Runner for KeysOf {
    fn rep(&mut self) -> Result<Vec<Rep>, String> {
        self.draw();
        let Self { look_up, plan, per_slice, .. } = self;
        let n = *per_slice.get_or_insert_with(|| calibrate(look_up, *plan));
        Ok(vec![time(look_up, *plan, n).rep()])
    }
}
