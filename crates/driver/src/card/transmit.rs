//! The transmit ring of a queue pair.

use std::sync::Arc;

use kickless_memory::Area;
use kickless_spec::net::{ETHERNET_HEADER_LEN, FRAME_MAX, Header};
use kickless_virtqueue::driver::{Buffer, Completer, Submitter, Table};

use crate::card::memory::{BufferId, Frame, FrameMemory, HEADER_LEN};
use crate::error::{Error, Invalid};
use crate::layout::Layout;
use crate::memory::Region;
use crate::offload::{Allowed, Checksum, Offload};

const DESCRIPTOR_LEN: usize = 16;

/// The number of frames that the device is shown together. It takes them while the next ones are written.
///
/// A driver that shows all frames of a call at its end lets the device wait, and waits for the device after
/// it. With 32 frames of 64 bytes on their way from one card of a switch to another, groups of 16 gave 1.34
/// times the frames in a packed ring, and groups of 8 gave 1.25 times, where a cache line takes 60 to 70 ns
/// between the processors.
pub(crate) const GROUP_FRAMES: usize = 16;

/// The largest number of descriptors of a frame.
fn chain_max(size: u16, buffer_len: u32) -> usize {
    // A chain has no more descriptors than the queue, even in a table (virtio 1.3, section 2.7.5.3.1).
    FRAME_MAX.div_ceil(buffer_len as usize).min(size.into())
}

/// Returns the number of bytes that the ring needs beside its rings: an indirect table for each id.
pub(crate) fn data_len(size: u16, buffer_len: u32, indirect: bool) -> usize {
    if indirect { usize::from(size) * chain_max(size, buffer_len) * DESCRIPTOR_LEN } else { 0 }
}

/// The frames that were sent by one call.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sent {
    pub(crate) frames: usize,
    /// The number of their bytes, without headers.
    pub(crate) bytes: u64,
    /// The device wants a kick.
    pub(crate) kick: bool,
}

/// The driver's end of a transmit ring.
#[derive(Debug)]
pub(crate) struct TransmitRing {
    /// The number of the queue, for errors.
    queue: usize,
    layout: Layout,
    submitter: Submitter,
    completer: Completer,
    /// The first buffer of the frame in flight under each id.
    frames: Box<[BufferId]>,
    in_flight: u64,
    /// Space for a chain.
    chain: Vec<Buffer>,
    chain_max: usize,
    tables: Option<Area>,
    allowed: Allowed,
}

impl TransmitRing {
    pub(crate) fn new(
        queue: usize,
        layout: Layout,
        region: &Arc<Region>,
        buffer_len: u32,
        allowed: Allowed,
    ) -> Result<Self, Error> {
        let (submitter, mut completer) = layout.rings(region)?;
        completer.disable_calls();
        let size = layout.size();
        let chain_max = chain_max(size, buffer_len);
        let tables = match layout.indirect() {
            true => Some(region.area(layout.data(), data_len(size, buffer_len, true), DESCRIPTOR_LEN)?),
            false => None,
        };
        Ok(Self {
            queue,
            submitter,
            completer,
            frames: vec![BufferId::NONE; size.into()].into(),
            in_flight: 0,
            chain: Vec::with_capacity(chain_max),
            chain_max,
            tables,
            allowed,
            layout,
        })
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the number of frames that the device has not used yet.
    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// Makes the ring empty, for a device that does not know it yet. Returns the number of frames that were
    /// in flight. The caller frees all buffers.
    pub(crate) fn restart(&mut self, region: &Arc<Region>) -> Result<u64, Error> {
        (self.submitter, self.completer) = self.layout.rings(region)?;
        self.completer.disable_calls();
        self.frames.fill(BufferId::NONE);
        Ok(std::mem::take(&mut self.in_flight))
    }

    /// Returns the length of the longest frame that fits, without its header.
    pub(crate) fn len_max(&self, memory: &FrameMemory) -> usize {
        (self.chain_max * memory.buffer_len() as usize).min(FRAME_MAX) - HEADER_LEN as usize
    }

    /// Frees the buffers of frames that the device has used.
    ///
    /// # Errors
    /// The device broke the rules of the ring.
    #[inline]
    pub(crate) fn reap(&mut self, memory: &mut FrameMemory) -> Result<(), Error> {
        loop {
            let done = match self.completer.pop() {
                Ok(Some(done)) => done,
                Ok(None) => return Ok(()),
                Err(source) => return Err(Error::InvalidUsed { queue: self.queue, source }),
            };
            // The completer returns only ids in flight, which are in the table.
            let first = std::mem::replace(&mut self.frames[usize::from(done.id)], BufferId::NONE);
            memory.give_back(first);
            self.completer.give_back(done.id);
            self.in_flight = self.in_flight.saturating_sub(1);
        }
    }

    /// Returns the number of frames of one buffer each that can be sent, as far as the ring has room.
    #[inline]
    pub(crate) fn room(&mut self, memory: &FrameMemory) -> usize {
        if memory.has_free() { self.submitter.room() } else { 0 }
    }

    /// Asks the device for a call when it uses the next frame. Returns whether it has used one already.
    pub(crate) fn enable_calls(&mut self) -> bool {
        self.completer.enable_calls()
    }

    pub(crate) fn disable_calls(&mut self) {
        self.completer.disable_calls();
    }

    /// Sends up to `count` frames, as many as there is room for. `len_of` returns the length of each frame,
    /// and `fill` writes it. After an error, [`Sent`] has the frames before the invalid one. The device sees
    /// [`GROUP_FRAMES`] frames at a time.
    #[inline]
    pub(crate) fn send(
        &mut self,
        memory: &mut FrameMemory,
        count: usize,
        mut len_of: impl FnMut(usize) -> usize,
        mut fill: impl FnMut(usize, &mut Frame<'_>),
    ) -> (Sent, Result<(), Invalid>) {
        let (mut sent, mut ended) = (Sent::default(), Ok(()));
        let len_max = self.len_max(memory);
        while sent.frames < count {
            let len = len_of(sent.frames);
            if !(ETHERNET_HEADER_LEN..=len_max).contains(&len) {
                ended = Err(Invalid::FrameLength { len, min: ETHERNET_HEADER_LEN, max: len_max });
                break;
            }
            // Lossless: the length is at most that of the longest frame.
            let Some(first) = memory.take_frame(HEADER_LEN + len as u32) else { break };
            let mut frame = Frame::new(memory, first, len, Offload::default());
            fill(sent.frames, &mut frame);
            match frame.offload().encode(len, self.allowed) {
                Ok(header) => memory.set_header(first, &header),
                Err(error) => {
                    memory.give_back(first);
                    ended = Err(error.into());
                    break;
                }
            }
            if !self.add(memory, first) {
                memory.give_back(first);
                break;
            }
            self.count(&mut sent, len);
        }
        self.publish_rest(&mut sent);
        (sent, ended)
    }

    /// Adds a received frame, without a copy. Returns `false` if there is no room or the frame cannot be
    /// sent. The caller counts it with [`TransmitRing::count`], and calls [`TransmitRing::publish_rest`] at
    /// the end.
    #[inline]
    pub(crate) fn add_received(
        &mut self,
        memory: &FrameMemory,
        first: BufferId,
        len: usize,
        offload: Offload,
    ) -> bool {
        if len < ETHERNET_HEADER_LEN {
            return false;
        }
        let checksum = match offload.checksum {
            Checksum::Verified => Checksum::InFrame,
            checksum => checksum,
        };
        let Ok(header) = (Offload { checksum, ..offload }).encode(len, self.allowed) else { return false };
        memory.set_header(first, &header);
        self.add(memory, first)
    }

    /// Counts an added frame of this length. Shows the device each group of [`GROUP_FRAMES`] frames when it
    /// is complete.
    #[inline]
    pub(crate) fn count(&mut self, sent: &mut Sent, len: usize) {
        sent.frames += 1;
        sent.bytes += len as u64;
        if sent.frames.is_multiple_of(GROUP_FRAMES) {
            sent.kick |= self.submitter.publish();
        }
    }

    /// Shows the device the frames that [`TransmitRing::count`] has not shown.
    #[inline]
    pub(crate) fn publish_rest(&mut self, sent: &mut Sent) {
        sent.kick |= !sent.frames.is_multiple_of(GROUP_FRAMES) && self.submitter.publish();
    }

    #[inline]
    fn add(&mut self, memory: &FrameMemory, first: BufferId) -> bool {
        let added = match memory.is_chain(first) {
            false => {
                let (buffer, len) = (first, memory.parts(first).next().map_or(0, |(_, len)| len));
                let buffer = Buffer { addr: memory.addr(buffer), len, writable: false };
                self.submitter.add(&[buffer], None)
            }
            true => return self.add_chain(memory, first),
        };
        self.note(added.ok(), first)
    }

    #[inline(never)]
    fn add_chain(&mut self, memory: &FrameMemory, first: BufferId) -> bool {
        self.chain.clear();
        for (buffer, len) in memory.parts(first) {
            // A received frame can have more buffers than a chain may have descriptors.
            if self.chain.len() == self.chain_max {
                return false;
            }
            self.chain.push(Buffer { addr: memory.addr(buffer), len, writable: false });
        }
        let Some(id) = self.submitter.next_id() else { return false };
        // With a table, the device has to read from one more place. So tables are used only when descriptors
        // are scarce.
        let scarce = self.chain.len() + usize::from(self.layout.size()) / 2 > self.submitter.room();
        let id = if scarce { self.submitter.next_id().unwrap_or(id) } else { id };
        let table = self.tables.as_ref().filter(|_| scarce).map(|area| {
            let offset = usize::from(id) * self.chain_max * DESCRIPTOR_LEN;
            Table { area, offset, addr: self.layout.data() + offset as u64 }
        });
        let added = self.submitter.add(&self.chain, table);
        self.note(added.ok(), first)
    }

    #[inline]
    fn note(&mut self, id: Option<u16>, first: BufferId) -> bool {
        let Some(place) = id.and_then(|id| self.frames.get_mut(usize::from(id))) else { return false };
        *place = first;
        self.in_flight += 1;
        true
    }
}

const _: () = assert!(size_of::<Header>() == HEADER_LEN as usize);
