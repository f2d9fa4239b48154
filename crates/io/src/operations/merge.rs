//! Several operations that are one for the kernel.
//!
//! Reads of neighbouring bytes of a file that are queued one after the other, and have not been started, can go to the kernel as
//! one with all their buffers, and so can writes. It is for files that are told to ([`crate::Engine::merge`]): a kernel that does it by
//! itself, in its queue of a block device, does it no worse, and where each operation is answered as soon as it is
//! done, one that waits for all of them is answered later.
//!
//! # Each has an end of its own
//! Bytes that were transferred belong to the operations from the first on. One that got some of its bytes is done with so many,
//! like any short transfer. One that got none, because the whole failed or came to an end before it, is done once more by itself, and
//! what comes of that is its own: an error, the end of the file, or nothing wrong at all. A write that is done twice so writes the same
//! bytes twice; no order between operations in flight was promised.

use crate::op::{Buffers, Op, OpKind, View};

/// Bytes of all together: as many pages as one request to a block device holds (`BIO_MAX_VECS`).
pub(super) const BYTES_MAX: u64 = 1 << 20;
/// Segments of all together.
pub(super) const SEGMENTS_MAX: usize = 256;

/// Operations that are one for the kernel, but for the first, which has this.
#[derive(Debug, Default)]
pub(crate) struct Merged {
    /// The places of the others, in order.
    pub(crate) places: Vec<u32>,
    segments: Vec<Segment>,
    bytes: u64,
}

/// `struct iovec`, but an address that can go to another thread.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Segment {
    at: usize,
    len: usize,
}

impl Merged {
    /// Returns how many bytes are to be transferred in all.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns how many segments they have in all.
    pub(super) fn segments(&self) -> usize {
        self.segments.len()
    }

    /// Adds an operation at the end.
    pub(crate) fn add(&mut self, op: &mut Op) {
        let Op { kind, buffers: Buffers::Guest(iov), .. } = op else { return };
        self.bytes += iov.len();
        let segments = if *kind == OpKind::Read { iov.segments_to_fill() } else { iov.segments() };
        for segment in segments {
            let (at, len) = (segment.iov_base.expose_provenance(), segment.iov_len);
            match self.segments.last_mut() {
                Some(last) if last.at + last.len == at => last.len += len,
                _ => self.segments.push(Segment { at, len }),
            }
        }
    }

    /// What the kernel takes. Valid as long as nothing is added and the buffers of all operations stay as they are.
    pub(crate) fn view(&self) -> View {
        match &self.segments[..] {
            [one] => View::One(std::ptr::with_exposed_provenance_mut(one.at), one.len),
            many => View::Many(many.as_ptr().cast(), many.len()),
        }
    }

    /// Empties it, to be used again.
    pub(crate) fn clear(&mut self) {
        self.places.clear();
        self.segments.clear();
        self.bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::Files;
    use crate::files::shares::Shares;
    use crate::operations::in_flight::InFlight;
    use crate::operations::slots::Slots;
    use crate::{AlignedBuf, Errno, FileId, Owner, Token};
    use kickless_memory::{Gpa, Iov, View as Memory};
    use kickless_testing::guest_memory;

    use std::fs::File;
    use std::sync::Arc;

    const LEN: u64 = 4096;

    struct Rig {
        memory: Arc<Memory>,
        files: Files,
        file: FileId,
        slots: Slots,
    }

    impl Rig {
        fn new() -> Self {
            let mut files = Files::new(Shares::new(1 << 20, 0, 0));
            let file = files.insert(Arc::new(File::open("/dev/null").unwrap()), Owner::unique()).0;
            Self { memory: guest_memory(4 << 20, 0), files, file, slots: Slots::new(1000) }
        }

        /// With one buffer at each of these places in memory.
        fn operation(&mut self, kind: OpKind, offset: u64, buffers: &[(u64, u64)]) -> InFlight {
            let mut iov = Iov::default();
            for (at, len) in buffers {
                iov.push(&self.memory, Gpa(*at), *len as u32).unwrap();
            }
            let op = Op { file: self.file, kind, offset, buffers: Buffers::Guest(iov) };
            let token = Token { source: 0, slot: offset as u32 };
            InFlight::new(token, self.files.hold(self.file).unwrap(), op, false)
        }

        fn page(&mut self, number: u64) -> InFlight {
            // Every other page of memory, so that each has a segment of its own.
            self.operation(OpKind::Read, number * LEN, &[(2 * number * LEN, LEN)])
        }

        /// So many pages as one, and the place of the first.
        fn merged(&mut self, count: u64) -> u32 {
            let page = self.page(0);
            let first = self.slots.insert(page);
            for number in 1..count {
                let page = self.page(number);
                assert!(self.slots.join(first, page).is_ok());
            }
            first
        }

        /// Which slots end with what, and how many are done again.
        fn complete(
            &mut self,
            place: u32,
            result: Result<u32, Errno>,
        ) -> (Vec<Result<u32, Errno>>, Vec<u32>) {
            let (mut done, mut again) = (Vec::new(), Vec::new());
            self.slots.complete(place, result, &mut again, |operation, result| {
                assert_eq!(u64::from(operation.token.slot), done.len() as u64 * LEN, "in order");
                done.push(result);
            });
            (done, again)
        }
    }

    #[test]
    fn only_what_goes_on_at_the_end() {
        let write = |durable| OpKind::Write { durable };
        let mut rig = Rig::new();
        let first = rig.operation(write(false), 8 * LEN, &[(0, LEN)]);
        let fits = rig.operation(write(false), 9 * LEN, &[(8 * LEN, LEN)]);
        assert!(first.takes(&fits));
        assert!(!rig.operation(write(false), 9 * LEN, &[]).takes(&fits));
        let mut others = vec![
            rig.operation(OpKind::Read, 9 * LEN, &[(8 * LEN, LEN)]),
            rig.operation(write(true), 9 * LEN, &[(8 * LEN, LEN)]),
            rig.operation(write(false), 10 * LEN, &[(8 * LEN, LEN)]),
            rig.operation(write(false), 8 * LEN, &[(8 * LEN, LEN)]),
            rig.operation(write(false), 7 * LEN, &[(8 * LEN, LEN)]),
            rig.operation(write(false), 9 * LEN, &[]),
            rig.operation(write(false), 9 * LEN, &[(0, BYTES_MAX)]),
        ];
        let mut elsewhere = rig.operation(write(false), 9 * LEN, &[(8 * LEN, LEN)]);
        let other = rig.files.insert(Arc::new(File::open("/dev/null").unwrap()), Owner::unique()).0;
        elsewhere.held = rig.files.hold(other).unwrap();
        others.push(elsewhere);
        let mut ours = rig.operation(write(false), 9 * LEN, &[]);
        ours.op.buffers = Buffers::Owned(AlignedBuf::new(4096, 4096).unwrap());
        others.push(ours);
        others.push(InFlight { op: Op { kind: OpKind::Flush, buffers: Buffers::None, ..fits.op }, ..first });
        let mut first = rig.operation(write(false), 8 * LEN, &[(0, LEN)]);
        for other in &others {
            assert!(!first.takes(other), "{other:?}");
        }
        first.alone = true;
        assert!(!first.takes(&rig.operation(write(false), 9 * LEN, &[(8 * LEN, LEN)])));
    }

    #[test]
    fn up_to_the_limits() {
        let mut rig = Rig::new();
        let first = rig.merged(BYTES_MAX / LEN);
        let more = rig.page(BYTES_MAX / LEN);
        assert!(rig.slots.join(first, more).is_err());
        assert_eq!(rig.slots.used() as u64, BYTES_MAX / LEN);
        // As many segments as there are operations, of few bytes.
        let mut rig = Rig::new();
        let sector =
            |rig: &mut Rig, number: u64| rig.operation(OpKind::Read, number * 512, &[(number * 1024, 512)]);
        let only = sector(&mut rig, 0);
        let first = rig.slots.insert(only);
        for number in 1..=SEGMENTS_MAX as u64 {
            let next = sector(&mut rig, number);
            assert_eq!(rig.slots.join(first, next).is_ok(), number < SEGMENTS_MAX as u64, "{number}");
        }
        let mut rig = Rig::new();
        let sectors = |number: u64| (number * 1024, 512);
        let half: Vec<_> = (0..SEGMENTS_MAX as u64 / 2 + 1).map(sectors).collect();
        let (bytes, kind) = (half.len() as u64 * 512, OpKind::Read);
        let (a, b) = (rig.operation(kind, 0, &half), rig.operation(kind, bytes, &half));
        assert!(!a.takes(&b));
    }

    #[test]
    fn the_kernel_takes_all_buffers() {
        let mut rig = Rig::new();
        let first = rig.merged(3);
        let View::Many(_, 3) = rig.slots.get_mut(first).unwrap().view() else { panic!("three segments") };
        // Neighbours in memory are one.
        let operation = rig.operation(OpKind::Read, 0, &[(0, LEN)]);
        let first = rig.slots.insert(operation);
        let operation = rig.operation(OpKind::Read, LEN, &[(LEN, LEN)]);
        assert!(rig.slots.join(first, operation).is_ok());
        let View::One(at, len) = rig.slots.get_mut(first).unwrap().view() else { panic!("one segment") };
        assert_eq!((at.is_null(), len as u64), (false, 2 * LEN));
    }

    #[test]
    fn each_ends_with_what_is_its_own() {
        let mut rig = Rig::new();
        for bytes in 0..=4 * LEN as u32 {
            let first = rig.merged(4);
            let (done, mut again) = rig.complete(first, Ok(bytes));
            let whole = bytes / LEN as u32;
            let part = bytes % LEN as u32;
            let mut expected = vec![Ok(LEN as u32); whole as usize];
            expected.extend((part > 0).then_some(Ok(part)));
            assert_eq!(done, expected, "{bytes} bytes");
            assert_eq!(done.len() + again.len(), 4);
            // Each by itself, with the same error or another one.
            for place in again.drain(..) {
                let operation = rig.slots.get_mut(place).unwrap();
                assert!(operation.alone && operation.merged.is_none());
                let (mut left, mut results) = (Vec::new(), Vec::new());
                rig.slots.complete(place, Err(Errno::IO), &mut left, |_, result| results.push(result));
                assert_eq!((left.len(), &results[..]), (0, &[Err(Errno::IO)][..]));
            }
            assert_eq!(rig.slots.used(), 0);
        }
        let first = rig.merged(4);
        let (done, again) = rig.complete(first, Err(Errno::IO));
        assert_eq!((done.len(), again.len()), (0, 4));
        let mut taken = 0;
        again.iter().for_each(|place| rig.slots.take(*place, |_| taken += 1));
        assert_eq!((taken, rig.slots.used()), (4, 0));
        let first = rig.merged(4);
        rig.slots.take(first, |_| taken += 1);
        assert_eq!((taken, rig.slots.used()), (8, 0));
    }

    /// Those that got nothing end as cancelled, and the others with what is their own.
    #[test]
    fn cancelled_parts_are_not_done_again() {
        let cancelled = Err(Errno::CANCELED);
        let page = Ok(LEN as u32);
        for (result, expected) in [
            (Err(Errno::INTR), [cancelled; 4]),
            (cancelled, [cancelled; 4]),
            (Ok(0), [cancelled; 4]),
            (Ok(LEN as u32 + 1), [page, Ok(1), cancelled, cancelled]),
            (Ok(4 * LEN as u32), [page; 4]),
        ] {
            let mut rig = Rig::new();
            let first = rig.merged(4);
            rig.slots.iter_mut().for_each(|operation| operation.cancelled = true);
            let (done, again) = rig.complete(first, result);
            assert_eq!((&done[..], again.len(), rig.slots.used()), (&expected[..], 0, 0), "{result:?}");
        }
        // One that was merged with no other.
        let results = [Errno::INTR, Errno::AGAIN, Errno::IO].map(|errno| {
            let mut rig = Rig::new();
            let page = InFlight { cancelled: true, ..rig.page(0) };
            let place = rig.slots.insert(page);
            rig.complete(place, Err(errno)).0
        });
        assert_eq!(results.concat(), [cancelled, cancelled, Err(Errno::IO)]);
    }
}
