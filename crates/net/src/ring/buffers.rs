//! Reads and writes the buffers of a chain.

use kickless_memory::{Gpa, Marks, Unmapped, View};
use kickless_virtqueue::Buffer;

/// Reads the first bytes of these buffers. Returns the number of bytes read, at most `into.len()`.
///
/// # Errors
/// A buffer is not in guest memory.
#[inline]
pub(crate) fn read(buffers: &[Buffer], view: &View, into: &mut [u8]) -> Result<usize, Unmapped> {
    let len = into.len();
    let mut rest = into;
    for buffer in buffers {
        if rest.is_empty() {
            break;
        }
        let (here, more) = rest.split_at_mut(rest.len().min(buffer.len as usize));
        view.read(buffer.addr, here)?;
        rest = more;
    }
    Ok(len - rest.len())
}

/// Writes as much of `from` as fits into these buffers. Returns the number of buffers written to.
///
/// # Errors
/// A buffer is not in guest memory. The buffers before it are written.
#[inline]
pub(crate) fn write(
    buffers: &[Buffer],
    view: &View,
    marks: &mut Marks,
    from: &[u8],
) -> Result<usize, Unmapped> {
    let mut rest = from;
    for (written, buffer) in buffers.iter().enumerate() {
        if rest.is_empty() {
            return Ok(written);
        }
        let (here, more) = rest.split_at(rest.len().min(buffer.len as usize));
        view.write(buffer.addr, here, marks)?;
        rest = more;
    }
    Ok(buffers.len())
}

/// Returns the address of the first byte of these buffers.
pub(crate) fn first(buffers: &[Buffer]) -> Option<Gpa> {
    buffers.first().map(|buffer| buffer.addr)
}
