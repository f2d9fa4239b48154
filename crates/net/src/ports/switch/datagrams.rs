//! Segments UDP packets for an uplink whose kernel does not (before Linux 6.2).

use crate::offload::Segments;
use kickless_net_port::{SendError, TapQueue};
use kickless_spec::net::{FRAME_MAX, Header};
use rustix::io::Errno;

/// The datagrams of a packet.
pub(crate) struct Datagrams {
    /// Space for one datagram.
    space: Box<[u8]>,
    /// The segments that are not made yet. `None` between two packets.
    rest: Option<Segments>,
    /// The length of the next datagram in `space`.
    next: usize,
}

impl Datagrams {
    pub(crate) fn new() -> Self {
        let space = vec![0; FRAME_MAX - size_of::<Header>()].into_boxed_slice();
        Self { space, rest: None, next: 0 }
    }

    /// Sends the datagrams of a packet. After [`SendError::Full`], goes on where it was when it gets the same
    /// packet again.
    pub(crate) fn send(
        &mut self,
        queue: &mut TapQueue,
        header: &Header,
        packet: &[u8],
    ) -> Result<(), SendError> {
        if self.rest.is_none() {
            let segments = Segments::of(header, packet).ok_or(SendError::Refused(Errno::INVAL))?;
            self.begin_next(packet, segments);
        }
        while let Some(segments) = self.rest {
            queue.send_copy(&Header::default(), &self.space[..self.next])?;
            self.begin_next(packet, segments);
        }
        Ok(())
    }

    /// Forgets the rest of a packet.
    pub(crate) fn forget(&mut self) {
        self.rest = None;
    }

    fn begin_next(&mut self, packet: &[u8], mut segments: Segments) {
        let next = segments.write_next(packet, &mut self.space);
        self.rest = next.map(|_| segments);
        self.next = next.unwrap_or_default();
    }
}
