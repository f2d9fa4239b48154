//! A frame in memory of the card that waits for chains.

use crate::counters::RingCounters;
use crate::offload::{Segments, Undo, complete_checksum, may_have_checksum, received_header, undo};
use crate::receive_ring::ReceiveRing;
use kickless_device::Next;
use kickless_spec::net::{FRAME_MAX, Header, NetFeatures};
use std::ops::Range;
use zerocopy::IntoBytes;

const HEADER: usize = size_of::<Header>();
/// Bytes behind the longest frame. A read that fills them has met a frame that is too long.
const SLACK: usize = 64;

/// Space for the longest frame, and for a segment of it. Allocates only when it is made.
pub(crate) struct HeldFrame {
    /// Space for a header that ends at [`HEADER`], then for the frame.
    bytes: Box<[u8]>,
    /// Space for a segment, with a header before it.
    segment: Box<[u8]>,
    /// Length of the headers that the driver takes.
    header_len: usize,
    held: Held,
}

#[derive(Clone, Copy, Debug, Default)]
enum Held {
    #[default]
    Nothing,
    /// A frame of this length, without its header.
    Frame(usize),
    /// The frame has this length, and the current segment the other one.
    Segments { frame: usize, segment: usize, next: Segments },
}

impl HeldFrame {
    /// Makes space for frames of any length.
    pub(crate) fn new(header_len: usize) -> Self {
        let space = || vec![0; FRAME_MAX + SLACK].into_boxed_slice();
        Self { bytes: space(), segment: space(), header_len, held: Held::Nothing }
    }

    /// Makes space for frames with at most this length, none of which is ever segmented.
    pub(crate) fn for_whole_frames(len_max: usize, header_len: usize) -> Self {
        let bytes = vec![0; HEADER + len_max].into_boxed_slice();
        Self { bytes, segment: Box::default(), header_len, held: Held::Nothing }
    }

    /// Returns whether a frame waits.
    pub(crate) fn is_held(&self) -> bool {
        !matches!(self.held, Held::Nothing)
    }

    /// Returns the space for a frame, behind its header.
    pub(crate) fn space(&mut self) -> &mut [u8] {
        &mut self.bytes[HEADER..]
    }

    /// Returns the space for a frame and the header before it.
    pub(crate) fn space_with_header(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Holds the frame that is in the first `len` bytes of [`HeldFrame::space`]. Undoes the offloads that a
    /// driver with these features in force did not accept. Returns `false` if the header does not describe
    /// the frame, and nothing is held then.
    #[must_use]
    pub(crate) fn hold(&mut self, header: &Header, len: usize, accepted: NetFeatures) -> bool {
        let frame = &mut self.bytes[HEADER..HEADER + len];
        match undo(header, frame, accepted) {
            Undo::Nothing => {
                self.set_header(&received_header(header, accepted));
                self.held = Held::Frame(len);
            }
            Undo::Checksum(at) => {
                if !may_have_checksum(frame, at) || !complete_checksum(frame, at) {
                    return false;
                }
                self.set_header(&Header::default());
                self.held = Held::Frame(len);
            }
            Undo::Segments => {
                let Some(segments) = Segments::of(header, frame) else { return false };
                self.segment[..HEADER].fill(0);
                self.held = Held::Segments { frame: len, segment: 0, next: segments };
                self.next_segment();
            }
        }
        true
    }

    fn set_header(&mut self, header: &Header) {
        // A driver with a shorter header does not have the last field.
        self.bytes[HEADER - self.header_len..HEADER].copy_from_slice(&header.as_bytes()[..self.header_len]);
    }

    /// Makes the next segment, or forgets the frame after the last one.
    fn next_segment(&mut self) {
        if let Held::Segments { frame, segment, next } = &mut self.held {
            let whole = &self.bytes[HEADER..HEADER + *frame];
            match next.write_next(whole, &mut self.segment[HEADER..]) {
                Some(len) => *segment = len,
                None => self.held = Held::Nothing,
            }
        }
    }

    /// Delivers what is held. Returns the number of frames.
    ///
    /// # Errors
    /// The frame waits for chains, as in [`ReceiveRing::deliver`]. Adds the number of frames that were
    /// delivered before to `served`.
    pub(crate) fn deliver(&mut self, ring: &mut ReceiveRing, served: &mut u32) -> Result<(), Next> {
        let header_len = self.header_len;
        let with_header = |len: usize| -> Range<usize> { HEADER - header_len..HEADER + len };
        loop {
            let frame = match self.held {
                Held::Nothing => return Ok(()),
                Held::Frame(len) => &mut self.bytes[with_header(len)],
                Held::Segments { segment, .. } => {
                    // One frame can have 65 000 segments.
                    if ring.budget.is_used_up() {
                        return Err(Next::More);
                    }
                    &mut self.segment[with_header(segment)]
                }
            };
            *served += u32::from(ring.deliver(frame)?);
            match self.held {
                Held::Segments { .. } => self.next_segment(),
                _ => self.held = Held::Nothing,
            }
        }
    }

    /// Drops what is held for a pair that the driver does not use any more, and counts it.
    pub(crate) fn drop_unused(&mut self, ring: &ReceiveRing) {
        if self.is_held() && ring.is_unused() {
            self.held = Held::Nothing;
            ring.counters().dropped_unused.add(1);
        }
    }

    /// Drops what is held, and counts it.
    pub(crate) fn drop_late(&mut self, counters: &RingCounters) {
        if self.is_held() {
            self.held = Held::Nothing;
            counters.dropped_late.add(1);
        }
    }
}
