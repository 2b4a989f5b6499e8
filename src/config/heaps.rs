//! What of a builder bears on which heaps the pool has: access classes beside the first, and shares, whose
//! parts of the arenas are laid out here. Who allocates from them is the pool's business.

use super::{Asked, Builder, DEFAULT_CLASS};
use crate::{
    access::Access,
    error::BuildError,
    reach::Reach,
    size_class::{self, MAX_BLOCK, PAGE},
};

/// How much of an access class a share reserves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reserve(Amount);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Amount {
    Bytes(usize),
    Buffers { count: usize, len: usize },
}

impl Reserve {
    /// Reserves so many bytes, rounded up to whole pages of 4 KiB.
    ///
    /// How many buffers that comes to depends on their lengths, as it does for a pool of that capacity.
    pub const fn bytes(bytes: usize) -> Self {
        Self(Amount::Bytes(bytes))
    }

    /// Reserves what `count` buffers of `len` bytes take: as long as the share is used for this length
    /// alone, so many can be out at a time, whatever happens to the rest of the pool.
    pub const fn buffers(count: usize, len: usize) -> Self {
        Self(Amount::Buffers { count, len })
    }
}

impl From<usize> for Reserve {
    /// As [`Reserve::bytes`].
    fn from(bytes: usize) -> Self {
        Self::bytes(bytes)
    }
}

/// As the user asked.
#[derive(Default)]
pub(super) struct Wishes {
    classes: Vec<(String, Access, usize)>,
    /// Name of the class, of the share, and how much.
    shares: Vec<(String, String, Reserve)>,
}

/// A piece of a class's address range: offset and length in bytes.
pub(crate) type Range = (usize, usize);

/// How a class is divided.
pub(super) struct Parts {
    pub(super) shares: Vec<SharePlan>,
    /// What no share has reserved.
    pub(super) ranges: Vec<Range>,
}

/// A share as it will be.
#[derive(Debug)]
pub(crate) struct SharePlan {
    pub(crate) name: String,
    /// By offset; at least one.
    pub(crate) ranges: Vec<Range>,
}

impl<R: Reach> Builder<R> {
    /// Adds an access class: arenas of its own, under the same device and PD, registered with exactly
    /// these rights. Pages, arena size, backing and devices are as for the pool; it does not grow.
    ///
    /// The pool has one class from the start, named `"default"`, which [`access`](Builder::access) and
    /// [`capacity`](Builder::capacity) describe. Allocate from others by a handle,
    /// [`Pool::class`](crate::Pool::class).
    ///
    /// ```
    /// use pinpool::{Access, Buf, Device, Pool, reach::{Local, Remote}};
    ///
    /// let pool = Pool::builder()
    ///     .device(Device::soft())
    ///     .capacity(4 << 20) // LOCAL_WRITE: receive buffers
    ///     .class("shared", Access::LOCAL_WRITE | Access::REMOTE_READ, 1 << 20)
    ///     .build()?;
    /// let private = pool.class::<Local>("default")?;
    /// let shared = pool.class::<Remote>("shared")?;
    ///
    /// let buf: Buf<Remote> = pool.alloc_in(&shared, 4096)?;
    /// println!("tell the peer {:?}", buf.remote()); // no Option: there is an rkey
    /// let secret: Buf<Local> = pool.alloc_in(&private, 4096)?; // has no `remote()` at all
    /// # drop((buf, secret));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn class(mut self, name: impl Into<String>, access: Access, capacity: usize) -> Self {
        self.heaps.classes.push((name.into(), access, capacity));
        self
    }

    /// Reserves a share of the default class for whoever allocates through
    /// [`Pool::share`](crate::Pool::share): bytes, or a number of buffers ([`Reserve::buffers`]).
    ///
    /// The reserve counts towards [`capacity`](Builder::capacity). Nobody else is ever given any of it,
    /// however exhausted the rest is; and what no share has reserved serves everybody.
    ///
    /// ```
    /// use pinpool::{Device, Pool, Reserve};
    ///
    /// let pool = Pool::builder()
    ///     .device(Device::soft())
    ///     .capacity(1 << 20)
    ///     .share("send", Reserve::buffers(8, 4096))
    ///     .share("recv", 64 << 10)
    ///     .build()?;
    /// let send = pool.share("send")?;
    /// // Whatever takes all it can get ...
    /// let greedy: Vec<_> = std::iter::from_fn(|| pool.alloc(4096).ok()).collect();
    /// // ... leaves a share its reserve.
    /// let replies: Vec<_> = (0..8).map(|_| send.alloc(4096)).collect::<Result<_, _>>()?;
    /// # drop((greedy, replies));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn share(self, name: impl Into<String>, reserve: impl Into<Reserve>) -> Self {
        self.share_in(DEFAULT_CLASS, name, reserve)
    }

    /// Reserves a share of an access class; see [`share`](Builder::share).
    pub fn share_in(
        mut self,
        class: impl Into<String>,
        name: impl Into<String>,
        reserve: impl Into<Reserve>,
    ) -> Self {
        self.heaps.shares.push((class.into(), name.into(), reserve.into()));
        self
    }
}

impl Wishes {
    pub(super) fn has_classes(&self) -> bool {
        !self.classes.is_empty()
    }

    pub(super) fn has_shares(&self) -> bool {
        !self.shares.is_empty()
    }

    /// Names and rights and sizes of all classes, the default one first.
    pub(super) fn classes(&self, default: Asked) -> Result<Vec<(String, Asked)>, BuildError> {
        let mut all: Vec<(String, Asked)> = vec![(DEFAULT_CLASS.to_owned(), default)];
        for (name, access, capacity) in &self.classes {
            let bad = |problem| Err(BuildError::Class { name: name.clone(), problem });
            if name.is_empty() {
                return bad("a class needs a name");
            }
            if name == DEFAULT_CLASS {
                return bad("the class that access() and capacity() describe has that name");
            }
            if all.iter().any(|(n, _)| n == name) {
                return bad("there are two of that name");
            }
            if *capacity == 0 {
                return bad("its capacity is 0: a class needs at least one page of memory");
            }
            let (access, capacity) = (*access, *capacity);
            all.push((name.clone(), Asked { access, capacity, max_capacity: None, ..default }));
        }
        for (i, (class, name, _)) in self.shares.iter().enumerate() {
            let bad = |problem| Err(share_error(class, name, 0, 0, problem));
            if name.is_empty() {
                return bad("a share needs a name");
            }
            if self.shares[..i].iter().any(|(_, n, _)| n == name) {
                return bad("there are two of that name");
            }
            if !all.iter().any(|(n, _)| n == class) {
                return bad("there is no class of that name");
            }
        }
        Ok(all)
    }

    /// Cuts the shares of a class off its arenas, each of which is at `place` of its number. Gives them, and
    /// what is left.
    pub(super) fn lay_out(
        &self,
        class: &str,
        place: impl Fn(usize) -> usize,
        arenas: &[usize],
        pad: usize,
    ) -> Result<Parts, BuildError> {
        // Bytes left at the start of each arena: shares are cut off ends.
        let mut left = arenas.to_vec();
        let mut plans = Vec::new();
        let mut asked: Vec<(&str, Cut)> = Vec::new();
        for (_, name, reserve) in self.shares.iter().filter(|(c, ..)| c == class) {
            let Some(cut) = Cut::of(*reserve, pad) else {
                let problem = "reserves nothing, or more than an address space holds";
                return Err(share_error(class, name, 0, 0, problem));
            };
            asked.push((name, cut));
        }
        // The longest first: those that come later fit into what is left more easily.
        asked.sort_by_key(|(_, cut)| std::cmp::Reverse(cut.bytes));
        for (name, cut) in asked {
            let free: usize = left.iter().sum();
            let refuse = |problem| share_error(class, name, cut.bytes, free, problem);
            if cut.bytes > free {
                return Err(refuse("the class has no more to reserve"));
            }
            let ranges = cut
                .from(&place, &mut left)
                .ok_or_else(|| refuse("its buffers do not fit into what the arenas have left"))?;
            plans.push(SharePlan { name: name.to_owned(), ranges });
        }
        // In the order that they were asked for.
        let rank = |name: &str| self.shares.iter().position(|(_, n, _)| n == name);
        plans.sort_by_key(|p| rank(&p.name));
        let rest = left.iter().enumerate().filter(|&(_, &len)| len > 0);
        let ranges = rest.map(|(i, &len)| (place(i), len)).collect();
        Ok(Parts { shares: plans, ranges })
    }
}

fn share_error(
    class: &str,
    name: &str,
    asked: usize,
    free: usize,
    problem: &'static str,
) -> BuildError {
    BuildError::Share { name: name.to_owned(), class: class.to_owned(), asked, free, problem }
}

/// What is to be cut off: so many bytes, in pieces of whole units but for the last.
#[derive(Clone, Copy)]
struct Cut {
    bytes: usize,
    unit: usize,
}

impl Cut {
    fn of(Reserve(amount): Reserve, pad: usize) -> Option<Self> {
        let cut = match amount {
            Amount::Bytes(bytes) => {
                Self { bytes: bytes.checked_next_multiple_of(PAGE)?, unit: PAGE }
            }
            Amount::Buffers { count, len } if len > MAX_BLOCK => {
                let unit = len.checked_next_multiple_of(PAGE)?;
                Self { bytes: count.checked_mul(unit)?, unit }
            }
            Amount::Buffers { count, len } => {
                let stride = size_class::stride_of(size_class::class_of(len.max(1)), pad);
                // The slabs' shape depends on the bytes there are, and the bytes on the shape.
                let mut bytes = PAGE;
                loop {
                    let shape = size_class::slab_shape(stride, bytes);
                    let unit = (shape.pages as usize).checked_mul(PAGE)?;
                    let needed = count.div_ceil(shape.blocks as usize).checked_mul(unit)?;
                    if needed <= bytes {
                        let bytes = if count == 0 { 0 } else { bytes };
                        break Self { bytes, unit };
                    }
                    bytes = needed;
                }
            }
        };
        (cut.bytes > 0).then_some(cut)
    }

    /// Out of the end of one arena if one has the room, the last such; else out of several. `None` when
    /// units would be torn.
    fn from(self, place: impl Fn(usize) -> usize, left: &mut [usize]) -> Option<Vec<Range>> {
        if let Some((i, left)) = left.iter_mut().enumerate().rev().find(|(_, l)| **l >= self.bytes)
        {
            *left -= self.bytes;
            return Some(vec![(place(i) + *left, self.bytes)]);
        }
        let mut ranges = Vec::new();
        let mut wanted = self.bytes;
        for (i, left) in left.iter_mut().enumerate().rev() {
            let piece = if *left >= wanted { wanted } else { *left / self.unit * self.unit };
            if piece > 0 {
                *left -= piece;
                wanted -= piece;
                ranges.push((place(i) + *left, piece));
            }
        }
        ranges.sort_unstable();
        (wanted == 0).then_some(ranges)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::size_class::{MAX_SLAB_BLOCK, class_of, size_of, slab_shape};

    const MIB: usize = 1 << 20;

    fn cut(reserve: Reserve, left: &mut [usize]) -> Option<Vec<Range>> {
        Cut::of(reserve, 0).expect("something").from(|i| i * 4 * MIB, left)
    }

    #[test]
    fn a_share_lies_in_one_arena_if_one_has_the_room() {
        let mut left = [4 * MIB, 4 * MIB, MIB];
        assert_eq!(cut(Reserve::bytes(2 * MIB), &mut left), Some(vec![(6 * MIB, 2 * MIB)]));
        assert_eq!(cut(Reserve::bytes(MIB - 1), &mut left), Some(vec![(8 * MIB, MIB)]));
        let all = vec![(0, 4 * MIB), (4 * MIB, 2 * MIB)];
        assert_eq!(cut(Reserve::bytes(6 * MIB), &mut left), Some(all));
        assert_eq!(left, [0, 0, 0]);
    }

    #[test]
    fn reserved_buffers_are_not_torn_between_arenas() {
        let mut left = [4 * MIB, 4 * MIB];
        // Three of 2.5 MiB need three arenas.
        assert_eq!(cut(Reserve::buffers(3, 5 * MIB / 2), &mut left), None);
        let mut left = [4 * MIB, 4 * MIB];
        let one = 5 * MIB / 2;
        let apart = vec![(4 * MIB - one, one), (8 * MIB - one, one)];
        assert_eq!(cut(Reserve::buffers(2, one), &mut left), Some(apart));
    }

    #[test]
    fn so_many_slabs_as_the_buffers_need_fit_the_reserve() {
        for pad in [0, 64] {
            for count in [1, 2, 7, 32, 33, 1000, 100_000] {
                for len in [0, 1, 64, 100, 4096, 4097, 9000, 32 << 10, (32 << 10) + 1, MIB] {
                    let Cut { bytes, unit } =
                        Cut::of(Reserve::buffers(count, len), pad).expect("cut");
                    let size = size_of(class_of(len.max(1)));
                    let padded = size.is_multiple_of(PAGE) && size <= MAX_SLAB_BLOCK;
                    let shape = slab_shape(size + if padded { pad } else { 0 }, bytes);
                    assert_eq!(shape.pages as usize * PAGE, unit);
                    assert!(bytes / unit * shape.blocks as usize >= count, "{count} of {len}");
                    assert!(bytes.is_multiple_of(PAGE));
                    // Not much more than that.
                    assert!(
                        bytes <= 2 * count * (size + pad) + (128 << 10),
                        "{count} of {len}: {bytes}"
                    );
                }
            }
        }
    }

    #[test]
    fn nothing_and_too_much_are_refused() {
        for bad in [
            Reserve::bytes(0),
            Reserve::bytes(usize::MAX),
            Reserve::buffers(0, 64),
            Reserve::buffers(usize::MAX, 64),
            Reserve::buffers(2, usize::MAX),
        ] {
            assert!(Cut::of(bad, 0).is_none(), "{bad:?}");
        }
    }
}
