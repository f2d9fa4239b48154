//! Frames that are delivered into several buffers: from memory of this process, or from that of their sender.

use crate::frame::header::set_num_buffers;
use kickless_device::PARCEL_HEAD_LEN;
use kickless_memory::{Gpa, Marks, Unmapped, View};
use kickless_virtqueue::Buffer;

/// A frame with its complete header, whose bytes are taken in their order.
pub(crate) trait GatheredFrame {
    /// Returns the length, header included.
    fn len(&self) -> usize;

    /// Sets the number of buffers in the header. No bytes are written yet.
    fn set_num_buffers(&mut self, buffers: u16);

    /// Writes the next `len` bytes to `to`, and marks the range. So many are left.
    ///
    /// # Errors
    /// A part of either range is not guest memory. The frame cannot be used any more, and a part of the bytes
    /// may be written.
    fn write_next(&mut self, view: &View, to: Gpa, len: usize, marks: &mut Marks) -> Result<(), Unmapped>;
}

/// A frame in memory of this process.
pub(crate) struct Bytes<'a> {
    frame: &'a mut [u8],
    /// The number of bytes that are written.
    done: usize,
}

impl<'a> Bytes<'a> {
    pub(crate) fn new(frame: &'a mut [u8]) -> Self {
        Self { frame, done: 0 }
    }
}

impl GatheredFrame for Bytes<'_> {
    fn len(&self) -> usize {
        self.frame.len()
    }

    fn set_num_buffers(&mut self, buffers: u16) {
        set_num_buffers(self.frame, buffers);
    }

    #[inline]
    fn write_next(&mut self, view: &View, to: Gpa, len: usize, marks: &mut Marks) -> Result<(), Unmapped> {
        let start = self.done;
        self.done += len;
        view.write(to, &self.frame[start..self.done], marks)
    }
}

/// A frame in several buffers of its sender, whose first bytes are those that the sender has judged. The
/// others are read once, when they are written to the receiver's buffers.
pub(crate) struct Pieces<'a> {
    head: [u8; PARCEL_HEAD_LEN],
    len: usize,
    /// The number of bytes that are written.
    done: usize,
    from: &'a View,
    /// The buffers with the other bytes that are left, and the number of bytes at the beginning of the first
    /// one that are not.
    buffers: &'a [Buffer],
    skip: u32,
}

impl<'a> Pieces<'a> {
    /// Makes a frame of `len` bytes, header included, of its head and these buffers.
    pub(crate) fn new(
        head: &[u8; PARCEL_HEAD_LEN],
        from: &'a View,
        mut buffers: &'a [Buffer],
        len: u32,
    ) -> Self {
        let mut skip = len.min(PARCEL_HEAD_LEN as u32);
        while let [first, rest @ ..] = buffers
            && first.len <= skip
        {
            (skip, buffers) = (skip - first.len, rest);
        }
        Self { head: *head, len: len as usize, done: 0, from, buffers, skip }
    }
}

impl GatheredFrame for Pieces<'_> {
    fn len(&self) -> usize {
        self.len
    }

    fn set_num_buffers(&mut self, buffers: u16) {
        set_num_buffers(&mut self.head, buffers);
    }

    #[inline]
    fn write_next(&mut self, view: &View, to: Gpa, len: usize, marks: &mut Marks) -> Result<(), Unmapped> {
        let unmapped = Unmapped { addr: to.0, len: len as u64 };
        let mut written = 0;
        if let Some(head @ [_, ..]) = self.head[..self.len.min(PARCEL_HEAD_LEN)].get(self.done..) {
            written = len.min(head.len());
            view.write(to, &head[..written], marks)?;
        }
        while written < len {
            let [first, rest @ ..] = self.buffers else { return Err(unmapped) };
            let left = (first.len - self.skip) as usize;
            let here = left.min(len - written);
            let target = to.checked_add(written as u64).ok_or(unmapped)?;
            let source = first.addr.checked_add(self.skip.into()).ok_or(unmapped)?;
            view.copy_from(target, self.from, source, here as u64, marks)?;
            written += here;
            if here < left {
                // Lossless, because it is less than the length of a buffer.
                self.skip += here as u32;
            } else {
                (self.buffers, self.skip) = (rest, 0);
            }
        }
        self.done += len;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kickless_spec::net::HEADER_NUM_BUFFERS;
    use kickless_testing::guest_memory;
    use proptest::prelude::*;

    const MEMORY: u64 = 1 << 16;

    /// Cuts `len` bytes, or some more, into buffers with gaps in between.
    fn buffers(len: usize) -> impl Strategy<Value = Vec<Buffer>> {
        let piece = prop_oneof![1..4u32, 10..14u32, 100..140u32, 1000..3000u32];
        prop::collection::vec((piece, 0..70u64), 0..24).prop_map(move |pieces| {
            let (mut addr, mut room) = (4096, 0);
            let mut buffers = Vec::new();
            for (piece, gap) in pieces {
                if room >= len {
                    break;
                }
                addr += gap;
                buffers.push(Buffer { addr: Gpa(addr), len: piece });
                addr += u64::from(piece);
                room += piece as usize;
            }
            if room < len {
                buffers.push(Buffer { addr: Gpa(addr + 64), len: (len - room) as u32 });
            }
            buffers
        })
    }

    /// Returns the bytes of these buffers.
    fn read(view: &View, buffers: &[Buffer], len: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        for buffer in buffers {
            let mut here = vec![0; buffer.len as usize];
            view.read(buffer.addr, &mut here).unwrap();
            bytes.extend(here);
        }
        bytes.truncate(len);
        bytes
    }

    /// Writes a frame into these buffers one after the other.
    fn write(mut frame: impl GatheredFrame, view: &View, buffers: &[Buffer]) -> Result<(), Unmapped> {
        frame.set_num_buffers(0x0201);
        let mut left = frame.len();
        for buffer in buffers {
            let here = left.min(buffer.len as usize);
            frame.write_next(view, buffer.addr, here, &mut Marks::off())?;
            left -= here;
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        /// The guest has changed the head after it was judged.
        #[test]
        fn a_frame_arrives_as_it_was_judged(
            (len, from, to) in (14..6000usize).prop_flat_map(|len| (Just(len), buffers(len), buffers(len))),
        ) {
            let [sender, receiver] = [(); 2].map(|()| guest_memory(MEMORY, 0));
            let bytes: Vec<u8> = (0..MEMORY).map(|at| (at % 251) as u8).collect();
            sender.write(Gpa(0), &bytes, &mut Marks::off()).unwrap();
            let mut expected = read(&sender, &from, len);
            let judged = len.min(PARCEL_HEAD_LEN);
            expected[..judged].fill(0xaa);
            let head = [0xaa; PARCEL_HEAD_LEN];
            write(Pieces::new(&head, &sender, &from, len as u32), &receiver, &to).unwrap();
            expected[HEADER_NUM_BUFFERS..HEADER_NUM_BUFFERS + 2].copy_from_slice(&[1, 2]);
            prop_assert!(read(&receiver, &to, len) == expected);
            // As it does from memory of this process, and nothing else is written.
            let other = guest_memory(MEMORY, 0);
            write(Bytes::new(&mut expected), &other, &to).unwrap();
            let all = [Buffer { addr: Gpa(0), len: MEMORY as u32 }];
            prop_assert!(read(&receiver, &all, MEMORY as usize) == read(&other, &all, MEMORY as usize));
        }
    }

    #[test]
    fn a_buffer_outside_of_memory_is_an_error() {
        let view = guest_memory(MEMORY, 0);
        let inside = Buffer { addr: Gpa(4096), len: 1000 };
        let outside =
            [MEMORY, MEMORY - 999, u64::MAX - 999, u64::MAX].map(|addr| Buffer { addr: Gpa(addr), ..inside });
        let pass = |from: &[Buffer], to: &[Buffer]| {
            write(Pieces::new(&[0; PARCEL_HEAD_LEN], &view, from, 3000), &view, to)
        };
        assert_eq!(pass(&[inside; 3], &[inside; 3]), Ok(()));
        assert!(pass(&[inside; 2], &[inside; 3]).is_err(), "too few bytes");
        for buffer in outside {
            for number in 0..3 {
                let mut buffers = [inside; 3];
                buffers[number] = buffer;
                assert!(pass(&buffers, &[inside; 3]).is_err(), "from {buffer:?}");
                assert!(pass(&[inside; 3], &buffers).is_err(), "to {buffer:?}");
            }
        }
    }
}
