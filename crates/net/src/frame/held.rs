//! A frame in memory of the card that waits for chains.

use crate::card::counters::RingCounters;
use crate::frame::header::Checksum;
use crate::frame::taken::Taken;
use crate::offload::{Segments, Undo, complete_checksum, may_have_checksum, received_header, undo};
use crate::ring::receive_ring::ReceiveRing;
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
    /// The longest frame that the driver accepts, header included, and the length of its header.
    len_max: usize,
    header_len: usize,
    held: Held,
}

#[derive(Clone, Copy, Debug, Default)]
enum Held {
    #[default]
    Nothing,
    /// A frame of this length, without its header.
    Frame(usize),
    /// The frame has this length, and these segments of it are to be made.
    Segments(usize, Segments),
}

/// The work on a frame before it is delivered.
#[derive(Clone, Copy, Debug)]
enum Work {
    Nothing,
    Checksum(Checksum),
    Segments(Segments),
}

/// The reason for which a frame is dropped and not held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The card cannot undo its offload: the header does not describe the frame, or the packet would become
    /// too many segments.
    Offload,
    /// Its segments are longer than the driver accepts.
    Long,
}

impl Refusal {
    /// Counts the frame, and charges it.
    pub(crate) fn drop(self, ring: &mut ReceiveRing) -> Taken {
        ring.drop_frame(|counters| match self {
            Self::Offload => counters.dropped_offload.add(1),
            Self::Long => counters.dropped_long.add(1),
        });
        Taken::Dropped
    }
}

impl HeldFrame {
    /// Makes space for frames of any length, for a driver that accepts frames of at most `len_max` bytes.
    /// Both lengths are those of the [`FrameFormat`](crate::ring::receive_ring::FrameFormat).
    pub(crate) fn new(len_max: usize, header_len: usize) -> Self {
        let space = || vec![0; FRAME_MAX + SLACK].into_boxed_slice();
        Self { bytes: space(), segment: space(), len_max, header_len, held: Held::Nothing }
    }

    /// Makes space for frames with at most this length, none of which is ever segmented.
    pub(crate) fn for_whole_frames(len_max: usize, header_len: usize) -> Self {
        let bytes = vec![0; HEADER + len_max].into_boxed_slice();
        Self { bytes, segment: Box::default(), len_max, header_len, held: Held::Nothing }
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
    /// driver with these features in force did not accept.
    ///
    /// # Errors
    /// The driver cannot get the frame. Nothing is held.
    pub(crate) fn hold(&mut self, header: &Header, len: usize, accepted: NetFeatures) -> Result<(), Refusal> {
        let work = self.work_on(header, &self.bytes[HEADER..HEADER + len], accepted)?;
        self.begin(work, header, len, accepted)
    }

    /// Holds a copy of a frame as [`HeldFrame::hold`] does. Copies no packet that cannot be segmented.
    ///
    /// # Errors
    /// As [`HeldFrame::hold`].
    pub(crate) fn copy(
        &mut self,
        header: &Header,
        frame: &[u8],
        accepted: NetFeatures,
    ) -> Result<(), Refusal> {
        let work = self.work_on(header, frame, accepted)?;
        self.space()[..frame.len()].copy_from_slice(frame);
        self.begin(work, header, frame.len(), accepted)
    }

    /// Returns the work on a frame for a driver with these features in force.
    fn work_on(&self, header: &Header, frame: &[u8], accepted: NetFeatures) -> Result<Work, Refusal> {
        match undo(header, frame, accepted) {
            Undo::Nothing => Ok(Work::Nothing),
            Undo::Checksum(at) if may_have_checksum(frame, at) => Ok(Work::Checksum(at)),
            Undo::Checksum(_) => Err(Refusal::Offload),
            Undo::Segments => {
                let segments = Segments::of(header, frame).ok_or(Refusal::Offload)?;
                match self.header_len + segments.len_max(frame) <= self.len_max {
                    true => Ok(Work::Segments(segments)),
                    false => Err(Refusal::Long),
                }
            }
        }
    }

    /// Does the work on the frame in the first `len` bytes of the space, but for its segments.
    fn begin(
        &mut self,
        work: Work,
        header: &Header,
        len: usize,
        accepted: NetFeatures,
    ) -> Result<(), Refusal> {
        self.held = match work {
            Work::Nothing => {
                self.set_header(&received_header(header, accepted));
                Held::Frame(len)
            }
            Work::Checksum(at) => {
                if !complete_checksum(&mut self.bytes[HEADER..HEADER + len], at) {
                    return Err(Refusal::Offload);
                }
                self.set_header(&Header::default());
                Held::Frame(len)
            }
            Work::Segments(segments) => {
                self.segment[..HEADER].fill(0);
                Held::Segments(len, segments)
            }
        };
        Ok(())
    }

    fn set_header(&mut self, header: &Header) {
        // A driver with a shorter header does not have the last field.
        self.bytes[HEADER - self.header_len..HEADER].copy_from_slice(&header.as_bytes()[..self.header_len]);
    }

    /// Delivers what is held. Adds the number of delivered frames to `served`.
    ///
    /// # Errors
    /// The frame waits for chains, as in [`ReceiveRing::deliver`].
    pub(crate) fn deliver(&mut self, ring: &mut ReceiveRing, served: &mut u32) -> Result<(), Next> {
        match self.held {
            Held::Nothing => return Ok(()),
            Held::Frame(len) => {
                let with_header = self.with_header(len);
                *served += u32::from(ring.deliver(&mut self.bytes[with_header])?);
            }
            Held::Segments(len, segments) => self.deliver_segments(ring, len, segments, served)?,
        }
        self.held = Held::Nothing;
        Ok(())
    }

    /// Delivers the segments of the frame. Makes none before there is room for it. If there is never room for
    /// one, drops it and the rest of the packet together.
    fn deliver_segments(
        &mut self,
        ring: &mut ReceiveRing,
        len: usize,
        mut segments: Segments,
        served: &mut u32,
    ) -> Result<(), Next> {
        let frame = HEADER..HEADER + len;
        while let Some(next_len) = segments.next_len(&self.bytes[frame.clone()]) {
            if ring.budget.is_used_up() {
                return Err(Next::More);
            }
            let Some(chains) = ring.room_for(self.header_len + next_len)? else { return Ok(()) };
            segments.write_next(&self.bytes[frame.clone()], &mut self.segment[HEADER..]);
            let with_header = self.with_header(next_len);
            *served += u32::from(ring.deliver_into(&mut self.segment[with_header], chains)?);
            self.held = Held::Segments(len, segments);
        }
        Ok(())
    }

    /// Returns the place of a frame of `len` bytes and of the header before it.
    fn with_header(&self, len: usize) -> Range<usize> {
        HEADER - self.header_len..HEADER + len
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

#[cfg(test)]
mod tests {
    use super::*;
    use kickless_spec::net::{GSO_TCPV4, HDR_F_NEEDS_CSUM};

    #[test]
    fn a_packet_that_is_not_segmented_is_not_copied() {
        let mut packet = vec![2; 12];
        packet.extend([8, 0, 0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        packet.extend([0, 1, 0, 2, 0, 0, 0, 5, 0, 0, 0, 0, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
        packet.resize(54 + 60_000, 7);
        let mut held = HeldFrame::new(HEADER + 1518, HEADER);
        let mut copy = |size: u16| {
            let header = Header {
                flags: HDR_F_NEEDS_CSUM,
                gso_type: GSO_TCPV4,
                gso_size: size.into(),
                csum_start: 34.into(),
                csum_offset: 16.into(),
                ..Header::default()
            };
            let copied = held.copy(&header, &packet, NetFeatures::empty());
            (copied, held.space()[..packet.len()] == packet[..], held.is_held())
        };
        assert_eq!(copy(468), (Err(Refusal::Offload), false, false), "129 segments");
        assert_eq!(copy(1465), (Err(Refusal::Long), false, false));
        assert_eq!(copy(1464), (Ok(()), true, true));
    }
}
