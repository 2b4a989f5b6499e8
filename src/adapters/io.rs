//! `std::io` on buffers and parts. Writing adds at the end, within the capacity; reading a part takes off
//! its front. A whole buffer is read through its slice (`&buf[..]`), which keeps the buffer as it is, or
//! through [`std::io::Cursor`].

use std::io;

use super::part::Part;
use crate::buf::Buf;

/// Copies as much of `from` as fits into what `to` has beyond its length; says how much.
macro_rules! append {
    ($to:expr, $from:expr) => {{
        let (to, from): (&mut _, &[u8]) = ($to, $from);
        let len = to.len();
        let n = from.len().min(to.capacity() - len);
        // The capacity has room for `n` more, so this cannot fail.
        if to.set_len(len + n).is_ok() {
            to[len..].copy_from_slice(&from[..n]);
        }
        n
    }};
}

/// Adds at the end, within the capacity: the length grows, the address stays.
///
/// A buffer comes from [`Pool::alloc`](crate::Pool::alloc) with its full length, so call
/// [`clear`](Buf::clear) first to fill it from the start. What does not fit is not written:
/// [`write`](io::Write::write) answers how much was, and `write_all` fails with
/// [`WriteZero`](io::ErrorKind::WriteZero).
impl<R> io::Write for Buf<R> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        Ok(append!(self, from))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// As for [`Buf`].
impl<R> io::Write for Part<R> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        Ok(append!(self, from))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Takes bytes off the front: they are no longer the part's. Capacity and length shrink by them.
impl<R> io::Read for Part<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let n = into.len().min(self.len());
        into[..n].copy_from_slice(&self[..n]);
        self.take_off(n);
        Ok(n)
    }
}

impl<R> io::BufRead for Part<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        Ok(self)
    }

    fn consume(&mut self, n: usize) {
        self.take_off(n);
    }
}
