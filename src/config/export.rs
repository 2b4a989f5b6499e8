//! What one process tells another so that it can map a pool's memory: files, and how they lie beside one
//! another. Leaves the mapping to the arenas, and the way between the processes to their makers.

use std::{fmt, os::fd::OwnedFd, path::PathBuf, str::FromStr};

use super::plan::{MAX, MAX_ARENAS};
use crate::{error::ExportError, size_class::PAGE};

/// One arena, as it lies in its pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ArenaLayout {
    /// Bytes from the start of the pool's range.
    pub offset: usize,
    /// Bytes of it.
    pub len: usize,
    /// Bytes of each page.
    pub page_size: usize,
}

/// How the arenas of a pool lie in its range, the same in every process that maps them. Its text, one line
/// without line break, is made to be sent: [`Display`](fmt::Display) writes it, [`FromStr`] reads and checks
/// it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExportLayout {
    stride: usize,
    arenas: Vec<ArenaLayout>,
}

const HEAD: &str = "pinpool-share-1";

impl ExportLayout {
    pub(crate) fn new(stride: usize, arenas: Vec<ArenaLayout>) -> Result<Self, ExportError> {
        let bad = |why: String| Err(ExportError::Layout(why));
        if !stride.is_power_of_two() || !(PAGE..=MAX).contains(&stride) {
            return bad(format!("arenas cannot be {stride} bytes apart"));
        }
        if arenas.is_empty() || arenas.len() > MAX_ARENAS {
            return bad(format!("{} arenas", arenas.len()));
        }
        let mut from = 0;
        for (i, a) in arenas.iter().enumerate() {
            let pages = a.page_size.is_power_of_two() && a.page_size >= PAGE;
            if !pages || a.len == 0 || a.len > stride || !a.len.is_multiple_of(a.page_size) {
                return bad(format!("arena {i} has {} bytes in pages of {}", a.len, a.page_size));
            }
            let last = stride.saturating_mul(MAX_ARENAS).min(MAX) - stride;
            if a.offset < from || !a.offset.is_multiple_of(stride) || a.offset > last {
                return bad(format!("arena {i} cannot start at {}", a.offset));
            }
            from = a.offset + stride;
        }
        Ok(Self { stride, arenas })
    }

    /// Bytes from one arena's start to the next: a power of two.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// The arenas, by offset.
    pub fn arenas(&self) -> &[ArenaLayout] {
        &self.arenas
    }
}

impl fmt::Display for ExportLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{HEAD} {}", self.stride)?;
        for ArenaLayout { offset, len, page_size } in &self.arenas {
            write!(f, " {offset}+{len}/{page_size}")?;
        }
        Ok(())
    }
}

impl FromStr for ExportLayout {
    type Err = ExportError;

    /// # Errors
    /// [`ExportError::Layout`] says what is wrong.
    fn from_str(text: &str) -> Result<Self, ExportError> {
        let mut words = text.split_ascii_whitespace();
        if words.next() != Some(HEAD) {
            return Err(ExportError::Layout(format!("it does not start with {HEAD}")));
        }
        let bad = |word: &str| ExportError::Layout(format!("{word:?}"));
        let number = |word: &str| word.parse::<usize>().map_err(|_| bad(word));
        let stride = number(words.next().unwrap_or_default())?;
        let arena = |word: &str| {
            let (offset, rest) = word.split_once('+').ok_or_else(|| bad(word))?;
            let (len, page) = rest.split_once('/').ok_or_else(|| bad(word))?;
            let page_size = number(page)?;
            Ok(ArenaLayout { offset: number(offset)?, len: number(len)?, page_size })
        };
        // One more than may be: enough to be refused.
        let arenas = words.take(MAX_ARENAS + 1).map(arena).collect::<Result<_, ExportError>>()?;
        Self::new(stride, arenas)
    }
}

/// What another process needs to map a pool's memory: [`Pool::export`](crate::Pool::export) gives it,
/// [`Builder::join`](crate::Builder::join) takes it.
///
/// It is sent in two parts: the text of the layout, and the files, either as descriptors (inherited, or
/// passed with `SCM_RIGHTS`, [unix(7)](https://man7.org/linux/man-pages/man7/unix.7.html)), or by a name
/// under which the other process opens them: `/proc/<pid>/fd/<number>`, or their path, if they have one.
#[derive(Debug)]
pub struct PoolExport {
    layout: ExportLayout,
    files: Vec<OwnedFd>,
    paths: Vec<PathBuf>,
    trusted: bool,
}

impl PoolExport {
    /// Puts the parts together on the other side: as many files as the layout has arenas, in its order.
    pub fn new(layout: ExportLayout, files: Vec<OwnedFd>) -> Self {
        Self { layout, files, paths: Vec::new(), trusted: false }
    }

    pub(crate) fn with_paths(mut self, paths: Vec<PathBuf>) -> Self {
        self.paths = paths;
        self
    }

    /// How the arenas lie.
    pub fn layout(&self) -> &ExportLayout {
        &self.layout
    }

    /// The file of each arena; closed on exec unless that is undone (`fcntl(F_SETFD)`).
    pub fn files(&self) -> &[OwnedFd] {
        &self.files
    }

    /// Where each arena's file can be opened; empty where they have no names.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Takes files that are not sealed against shrinking as well. Only files in a hugetlbfs need that.
    ///
    /// Whoever can open such a file for writing can truncate it; the next access to what was cut off is then
    /// a SIGBUS. So trust them all.
    pub fn trust_unsealed(mut self) -> Self {
        self.trusted = true;
        self
    }

    pub(crate) fn into_parts(self) -> (ExportLayout, Vec<OwnedFd>, bool) {
        (self.layout, self.files, self.trusted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena(offset: usize, len: usize, page_size: usize) -> ArenaLayout {
        ArenaLayout { offset, len, page_size }
    }

    #[test]
    fn a_layout_survives_its_text() {
        let arenas = vec![arena(0, 2 << 20, 2 << 20), arena(4 << 20, 8192, 4096)];
        let layout = ExportLayout::new(2 << 20, arenas).expect("a layout");
        let text = layout.to_string();
        assert_eq!(text, "pinpool-share-1 2097152 0+2097152/2097152 4194304+8192/4096");
        assert_eq!(text.parse::<ExportLayout>().expect("read"), layout);
    }

    #[test]
    fn a_layout_that_no_pool_gave_is_refused() {
        for text in [
            "",
            "pinpool-share-2 4096 0+4096/4096",
            "pinpool-share-1",
            "pinpool-share-1 4096",
            "pinpool-share-1 6000 0+4096/4096",
            "pinpool-share-1 0 0+4096/4096",
            "pinpool-share-1 4096 0+8192/4096",
            "pinpool-share-1 4096 0+0/4096",
            "pinpool-share-1 8192 0+4096/0",
            "pinpool-share-1 8192 0+4096/8192",
            "pinpool-share-1 8192 4096+4096/4096",
            "pinpool-share-1 4096 0+4096/4096 0+4096/4096",
            "pinpool-share-1 4096 4096+4096/4096 0+4096/4096",
            "pinpool-share-1 4096 18446744073709547520+4096/4096",
            "pinpool-share-1 4096 4294967296+4096/4096",
            "pinpool-share-1 9223372036854775808 0+4096/4096",
            "pinpool-share-1 4096 0+4096",
            "pinpool-share-1 4096 x+4096/4096",
            "pinpool-share-1 4096 99999999999999999999+4096/4096",
        ] {
            let e = text.parse::<ExportLayout>().expect_err(text);
            assert!(matches!(e, ExportError::Layout(_)), "{text}: {e}");
        }
    }
}
