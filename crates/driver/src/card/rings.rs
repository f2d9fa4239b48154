//! Both rings of a queue pair with their buffers, without a connection.

use std::sync::Arc;

use kickless_spec::net::NetFeatures;

use crate::card::memory::{Frame, FrameMemory};
use crate::card::receive::ReceiveRing;
use crate::card::transmit::{self, Sent, TransmitRing};
use crate::connection::RingSetup;
use crate::error::{Error, Invalid};
use crate::layout::Layout;
use crate::memory::Region;
use crate::offload::Allowed;
use kickless_spec::features::Features;

/// The addresses of a pair in shared memory.
#[derive(Clone, Debug)]
pub(crate) struct PairLayout {
    receive: Layout,
    transmit: Layout,
    buffers: u64,
    buffer_len: u32,
    end: u64,
}

impl PairLayout {
    /// Lays out a pair from the device's address `start` on.
    ///
    /// # Errors
    /// The size of the queues is invalid.
    pub(crate) fn new(start: u64, size: u16, features: Features, buffer_len: u32) -> Result<Self, Error> {
        let indirect = features.contains(Features::INDIRECT_DESC);
        let receive = Layout::new(start, size, features, 0)?;
        let data_len = transmit::data_len(size, buffer_len, indirect);
        let transmit = Layout::new(receive.end(), size, features, data_len)?;
        let buffers = transmit.end();
        let end = buffers + FrameMemory::len(Self::count(size), buffer_len);
        Ok(Self { receive, transmit, buffers, buffer_len, end: end.next_multiple_of(4096) })
    }

    /// Returns the number of buffers. Both rings can be full at once.
    fn count(size: u16) -> u32 {
        2 * u32::from(size)
    }

    /// Returns the first address after the pair.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }
}

/// The frames that were received by one call.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReceivedFrames {
    pub(crate) frames: usize,
    /// The number of their bytes, without headers.
    pub(crate) bytes: u64,
    /// The number of frames that were dropped, because their header makes no sense.
    pub(crate) invalid: u64,
    /// The device wants a kick of the receive ring.
    pub(crate) kick: bool,
}

/// The frames that were received and sent back by one call.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Forwarded {
    pub(crate) received: ReceivedFrames,
    pub(crate) sent: Sent,
    /// The number of frames that could not be sent.
    pub(crate) dropped: u64,
}

/// The frames that a restart has lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lost {
    /// Sent frames that the device had not used.
    pub(crate) sent: u64,
    /// Frames in the receive ring that the owner had not taken.
    pub(crate) received: u64,
}

/// Both rings of a queue pair, and their buffers.
#[derive(Debug)]
pub(crate) struct PairRings {
    region: Arc<Region>,
    pub(crate) memory: FrameMemory,
    pub(crate) receive: ReceiveRing,
    pub(crate) transmit: TransmitRing,
}

impl PairRings {
    /// Makes the rings of pair `index`. The receive ring is full of buffers.
    pub(crate) fn new(
        index: usize,
        layout: &PairLayout,
        region: &Arc<Region>,
        features: NetFeatures,
    ) -> Result<Self, Error> {
        let PairLayout { receive, transmit, buffers, buffer_len, .. } = layout.clone();
        let count = PairLayout::count(receive.size());
        let mut rings = Self {
            memory: FrameMemory::new(region, buffers, count, buffer_len)?,
            receive: ReceiveRing::new(2 * index, receive, region, features)?,
            transmit: TransmitRing::new(
                2 * index + 1,
                transmit,
                region,
                buffer_len,
                Allowed::to_send(features),
            )?,
            region: region.clone(),
        };
        rings.fill();
        Ok(rings)
    }

    fn fill(&mut self) {
        self.receive.refill(&mut self.memory);
        // The caller kicks the device in any case.
        let _ = self.receive.publish();
    }

    /// Returns the set-up of the receive ring and of the transmit ring.
    pub(crate) fn setups(&self) -> [&RingSetup; 2] {
        [self.receive.layout().setup(), self.transmit.layout().setup()]
    }

    /// Makes the rings anew, for a device that does not know them yet.
    ///
    /// # Errors
    /// The rings cannot be made.
    pub(crate) fn restart(&mut self) -> Result<Lost, Error> {
        // Frames that the last device has used count as sent. Its errors do not matter any more.
        let _ = self.transmit.reap(&mut self.memory);
        let mut received = 0;
        while let Ok(Some(frame)) = self.receive.pop(&mut self.memory) {
            self.memory.give_back(frame.first);
            received += 1;
        }
        received += u64::from(self.receive.restart(&self.region)?);
        let sent = self.transmit.restart(&self.region)?;
        self.memory.reset();
        self.fill();
        Ok(Lost { sent, received })
    }

    /// Sends frames. See [`TransmitRing::send`].
    ///
    /// # Errors
    /// The device broke the rules of the ring.
    #[inline]
    pub(crate) fn send(
        &mut self,
        count: usize,
        len_of: impl FnMut(usize) -> usize,
        fill: impl FnMut(usize, &mut Frame<'_>),
    ) -> Result<(Sent, Result<(), Invalid>), Error> {
        self.transmit.reap(&mut self.memory)?;
        Ok(self.transmit.send(&mut self.memory, count, len_of, fill))
    }

    /// Passes up to `max` received frames to `each`. May leave frames that come meanwhile.
    ///
    /// # Errors
    /// The device broke the rules of the ring.
    #[inline]
    pub(crate) fn receive(
        &mut self,
        max: usize,
        mut each: impl FnMut(&Frame<'_>),
    ) -> Result<ReceivedFrames, Error> {
        let mut done = ReceivedFrames::default();
        while done.frames as u64 + done.invalid < max as u64 {
            let Some(received) = self.receive.pop(&mut self.memory)? else { break };
            match received.offload {
                Some(offload) => {
                    each(&Frame::new(&self.memory, received.first, received.len, offload));
                    done.frames += 1;
                    done.bytes += received.len as u64;
                }
                None => done.invalid += 1,
            }
            self.memory.give_back(received.first);
            if self.receive.ends_call(done.frames) {
                break;
            }
        }
        // The device sees the buffers together.
        self.receive.refill(&mut self.memory);
        done.kick = self.receive.publish();
        Ok(done)
    }

    /// Passes up to `max` received frames to `each`, and sends those back for which it returns `true`. May
    /// leave frames that come meanwhile.
    ///
    /// # Errors
    /// The device broke the rules of a ring.
    #[inline]
    pub(crate) fn forward(
        &mut self,
        max: usize,
        mut each: impl FnMut(&mut Frame<'_>) -> bool,
    ) -> Result<Forwarded, Error> {
        let mut done = Forwarded::default();
        self.transmit.reap(&mut self.memory)?;
        let mut room = 0;
        while done.received.frames as u64 + done.received.invalid < max as u64 {
            if room == 0 {
                room = self.transmit.room(&self.memory);
            }
            // A frame that waits for room stays in the receive ring.
            if room == 0 {
                break;
            }
            let Some(received) = self.receive.pop(&mut self.memory)? else { break };
            let Some(offload) = received.offload else {
                done.received.invalid += 1;
                self.memory.give_back(received.first);
                continue;
            };
            // A frame in several buffers takes an unknown number of descriptors.
            room = if self.memory.is_chain(received.first) { 0 } else { room - 1 };
            let mut frame = Frame::new(&self.memory, received.first, received.len, offload);
            let sends = each(&mut frame);
            let offload = frame.offload();
            done.received.frames += 1;
            done.received.bytes += received.len as u64;
            if sends && self.transmit.add_received(&self.memory, received.first, received.len, offload) {
                self.transmit.count(&mut done.sent, received.len);
            } else {
                done.dropped += u64::from(sends);
                self.memory.give_back(received.first);
            }
            if self.receive.ends_call(done.received.frames) {
                break;
            }
        }
        self.receive.refill(&mut self.memory);
        self.transmit.publish_rest(&mut done.sent);
        done.received.kick = self.receive.publish();
        Ok(done)
    }
}
