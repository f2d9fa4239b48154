//! Merging: several operations that are one for the kernel.
//!
//! Some reads are queued in succession, for contiguous bytes of a file, and are not started yet. They can go
//! to the kernel as one with all their buffers. The same holds for writes. This is only done for files for
//! which it is chosen ([`crate::Engine::merge`]). If the kernel merges by itself, in its queue of a block
//! device, this gains nothing. And if each operation is answered as soon as it is done, a merged one is
//! answered later.
//!
//! # Each has its own result
//! Transferred bytes belong to the operations from the first on. An operation that got some of its bytes
//! completes with that number, like any short transfer. One that got none, because the whole failed or ended
//! before it, is done again by itself. Its result is then its own: an error, the end of the file, or success.
//! A write that is done twice in this way writes the same bytes twice. Operations in flight have no order, so
//! this is allowed.

use crate::op::{Buffers, KernelBuffers, Op, OpKind};

/// The most bytes of a merged operation: as many pages as one request to a block device holds
/// (`BIO_MAX_VECS`).
pub(super) const BYTES_MAX: u64 = 1 << 20;
/// The most segments of a merged operation.
pub(super) const SEGMENTS_MAX: usize = 256;

/// The operations that are merged with a first one, which has this.
#[derive(Debug, Default)]
pub(crate) struct Merged {
    /// The slots of the others, in order.
    pub(crate) op_slots: Vec<u32>,
    segments: Vec<Segment>,
    bytes: u64,
}

/// A `struct iovec`, with an address that can go to another thread.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Segment {
    at: usize,
    len: usize,
}

impl Merged {
    /// Returns the bytes of all operations.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of segments of all operations.
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

    /// Returns the memory for the kernel. Valid while nothing is added and the buffers of all operations stay
    /// unchanged.
    pub(crate) fn view(&self) -> KernelBuffers {
        match &self.segments[..] {
            [one] => KernelBuffers::One(std::ptr::with_exposed_provenance_mut(one.at), one.len),
            many => KernelBuffers::Many(many.as_ptr().cast(), many.len()),
        }
    }

    /// Empties it, for another use.
    pub(crate) fn clear(&mut self) {
        self.op_slots.clear();
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

        /// Makes an operation with one buffer at each of these addresses of memory.
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

        /// Merges this many pages. Returns the slot of the first.
        fn merged(&mut self, count: u64) -> u32 {
            let page = self.page(0);
            let first = self.slots.insert(page);
            for number in 1..count {
                let page = self.page(number);
                assert!(self.slots.merge(first, page).is_ok());
            }
            first
        }

        /// Completes a slot. Returns the results, and the operations to do again.
        fn complete(
            &mut self,
            op_slot: u32,
            result: Result<u32, Errno>,
        ) -> (Vec<Result<u32, Errno>>, Vec<u32>) {
            let (mut done, mut again) = (Vec::new(), Vec::new());
            self.slots.complete(op_slot, result, &mut again, |operation, result| {
                assert_eq!(u64::from(operation.token.slot), done.len() as u64 * LEN, "in order");
                done.push(result);
            });
            (done, again)
        }
    }

    #[test]
    fn only_contiguous_operations_merge() {
        let write = |durable| OpKind::Write { durable };
        let mut rig = Rig::new();
        let first = rig.operation(write(false), 8 * LEN, &[(0, LEN)]);
        let fits = rig.operation(write(false), 9 * LEN, &[(8 * LEN, LEN)]);
        assert!(first.can_merge(&fits));
        assert!(!rig.operation(write(false), 9 * LEN, &[]).can_merge(&fits));
        let mut others = vec![
            rig.operation(OpKind::Read, 9 * LEN, &[(8 * LEN, LEN)]),
            rig.operation(write(true), 9 * LEN, &[(8 * LEN, LEN)]),
            rig.operation(write(false), 10 * LEN, &[(8 * LEN, LEN)]),
            rig.operation(write(false), 8 * LEN, &[(8 * LEN, LEN)]),
            rig.operation(write(false), 7 * LEN, &[(8 * LEN, LEN)]),
            rig.operation(write(false), 9 * LEN, &[]),
            rig.operation(write(false), 9 * LEN, &[(0, BYTES_MAX)]),
        ];
        let mut of_other_file = rig.operation(write(false), 9 * LEN, &[(8 * LEN, LEN)]);
        let other = rig.files.insert(Arc::new(File::open("/dev/null").unwrap()), Owner::unique()).0;
        of_other_file.held = rig.files.hold(other).unwrap();
        others.push(of_other_file);
        let mut ours = rig.operation(write(false), 9 * LEN, &[]);
        ours.op.buffers = Buffers::Owned(AlignedBuf::new(4096, 4096).unwrap());
        others.push(ours);
        others.push(InFlight { op: Op { kind: OpKind::Flush, buffers: Buffers::None, ..fits.op }, ..first });
        let mut first = rig.operation(write(false), 8 * LEN, &[(0, LEN)]);
        for other in &others {
            assert!(!first.can_merge(other), "{other:?}");
        }
        first.unmerged = true;
        assert!(!first.can_merge(&rig.operation(write(false), 9 * LEN, &[(8 * LEN, LEN)])));
    }

    #[test]
    fn merges_up_to_the_limits() {
        let mut rig = Rig::new();
        let first = rig.merged(BYTES_MAX / LEN);
        let more = rig.page(BYTES_MAX / LEN);
        assert!(rig.slots.merge(first, more).is_err());
        assert_eq!(rig.slots.used() as u64, BYTES_MAX / LEN);
        // As many segments as operations, of few bytes each.
        let mut rig = Rig::new();
        let sector =
            |rig: &mut Rig, number: u64| rig.operation(OpKind::Read, number * 512, &[(number * 1024, 512)]);
        let only = sector(&mut rig, 0);
        let first = rig.slots.insert(only);
        for number in 1..=SEGMENTS_MAX as u64 {
            let next = sector(&mut rig, number);
            assert_eq!(rig.slots.merge(first, next).is_ok(), number < SEGMENTS_MAX as u64, "{number}");
        }
        let mut rig = Rig::new();
        let sectors = |number: u64| (number * 1024, 512);
        let half: Vec<_> = (0..SEGMENTS_MAX as u64 / 2 + 1).map(sectors).collect();
        let (bytes, kind) = (half.len() as u64 * 512, OpKind::Read);
        let (a, b) = (rig.operation(kind, 0, &half), rig.operation(kind, bytes, &half));
        assert!(!a.can_merge(&b));
    }

    #[test]
    fn the_kernel_takes_all_buffers() {
        let mut rig = Rig::new();
        let first = rig.merged(3);
        let KernelBuffers::Many(_, 3) = rig.slots.get_mut(first).unwrap().view() else {
            panic!("three segments")
        };
        // Contiguous memory is one segment.
        let operation = rig.operation(OpKind::Read, 0, &[(0, LEN)]);
        let first = rig.slots.insert(operation);
        let operation = rig.operation(OpKind::Read, LEN, &[(LEN, LEN)]);
        assert!(rig.slots.merge(first, operation).is_ok());
        let KernelBuffers::One(at, len) = rig.slots.get_mut(first).unwrap().view() else {
            panic!("one segment")
        };
        assert_eq!((at.is_null(), len as u64), (false, 2 * LEN));
    }

    #[test]
    fn each_operation_has_its_own_result() {
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
            // Each completes by itself, with the same error or another one.
            for op_slot in again.drain(..) {
                let operation = rig.slots.get_mut(op_slot).unwrap();
                assert!(operation.unmerged && operation.merged.is_none());
                let (mut left, mut results) = (Vec::new(), Vec::new());
                rig.slots.complete(op_slot, Err(Errno::IO), &mut left, |_, result| results.push(result));
                assert_eq!((left.len(), &results[..]), (0, &[Err(Errno::IO)][..]));
            }
            assert_eq!(rig.slots.used(), 0);
        }
        let first = rig.merged(4);
        let (done, again) = rig.complete(first, Err(Errno::IO));
        assert_eq!((done.len(), again.len()), (0, 4));
        let mut taken = 0;
        again.iter().for_each(|op_slot| rig.slots.take(*op_slot, |_| taken += 1));
        assert_eq!((taken, rig.slots.used()), (4, 0));
        let first = rig.merged(4);
        rig.slots.take(first, |_| taken += 1);
        assert_eq!((taken, rig.slots.used()), (8, 0));
    }

    /// Operations that got nothing end as cancelled, and the others with their own results.
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
        // An operation that was not merged.
        let results = [Errno::INTR, Errno::AGAIN, Errno::IO].map(|errno| {
            let mut rig = Rig::new();
            let page = InFlight { cancelled: true, ..rig.page(0) };
            let op_slot = rig.slots.insert(page);
            rig.complete(op_slot, Err(errno)).0
        });
        assert_eq!(results.concat(), [cancelled, cancelled, Err(Errno::IO)]);
    }
}
