//! The port `loop`, which returns the frames of the driver on the same pair of rings.

use super::hand_over::Passing;
use super::inbox::{InboxReceive, Inboxes};
use super::port::{Name, OpenPort, Opening, Pairs, Port, PortError, PortKind};
use super::transmit::{Put, Transmit};
use crate::card::state::CardState;
use crate::frame::loop_queue::{Batch, LoopQueue};
use crate::ring::receive_ring::ReceiveRing;
use crate::ring::receive_task::ReceiveTask;
use crate::ring::transmit_ring::TransmitRing;
use crate::ring::transmit_task::TransmitTask;
use kickless_device::{Next, Polled, QueueTask};
use kickless_opener::Target;
use kickless_spec::net::NetFeatures;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

/// The port `loop`.
pub(crate) const LOOP: PortKind = PortKind {
    form: "loop",
    help: "loop returns the frames of guests",
    pairs: Pairs::Usual,
    parse: |text| {
        let mut parts = text.split(',');
        (parts.next() == Some("loop")).then(|| match parts.next() {
            None => Ok(Arc::new(LoopName) as Arc<dyn Name>),
            Some(part) => Err(LoopOption(part.to_owned()).into()),
        })
    },
};

/// The name of a loop port, which has no options.
#[derive(Debug)]
struct LoopName;

/// The error of an option.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a loop port has no option {0:?}")]
struct LoopOption(String);

impl Name for LoopName {
    fn pairs(&self) -> Option<u16> {
        None
    }

    fn mtu_max(&self) -> Option<u16> {
        None
    }

    fn target(&self) -> Option<Target> {
        None
    }

    fn open(&self, opening: &Opening<'_>) -> Result<OpenPort, PortError> {
        let queues = (0..opening.pairs).map(|_| LoopQueue::default()).collect();
        Ok(LoopPort(Arc::new(LoopQueues(queues))).into())
    }
}

impl fmt::Display for LoopName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("loop")
    }
}

/// A loop port that is open.
#[derive(Debug)]
struct LoopPort(Arc<LoopQueues>);

/// The frames of each pair.
#[derive(Debug)]
struct LoopQueues(Vec<LoopQueue>);

impl Inboxes for LoopQueues {
    fn inbox(&self, pair: u16) -> Option<&LoopQueue> {
        self.0.get(usize::from(pair))
    }
}

impl Port for LoopPort {
    fn start(&self, _card: &Arc<CardState>) -> io::Result<()> {
        Ok(())
    }

    fn close(&self) {}

    fn receive(&self, ring: ReceiveRing) -> io::Result<Box<dyn QueueTask>> {
        let port = InboxReceive::new(self.0.clone(), ring.card.clone(), ring.pair)?;
        Ok(ReceiveTask::boxed(ring, port))
    }

    fn transmit(&self, ring: TransmitRing) -> io::Result<Box<dyn QueueTask>> {
        let port = LoopTransmit { queues: self.0.clone(), batch: Batch::default() };
        Ok(TransmitTask::boxed(ring, port))
    }

    fn passing(&self) -> Passing<'_> {
        Passing::Anew
    }

    /// There is nobody to tell.
    fn announce(&self, _frame: &[u8]) {}
}

/// Returns frames to the receive ring of the pair.
struct LoopTransmit {
    queues: Arc<LoopQueues>,
    /// The frames of a turn.
    batch: Batch,
}

impl LoopTransmit {
    #[inline(never)]
    fn send_batch(&mut self, ring: &mut TransmitRing) {
        if ring.keeps_batch(&mut self.batch)
            && let Some(queue) = self.queues.inbox(ring.pair)
        {
            let dropped = queue.send(&mut self.batch) as u64;
            ring.counters().dropped_late.add(dropped);
        }
    }
}

impl Transmit for LoopTransmit {
    const AT_ONCE: bool = false;
    const INTERVAL: Duration = Duration::ZERO;

    #[inline]
    fn put(&mut self, len: usize, write: impl FnOnce(&mut [u8]) -> Put) -> Put {
        self.batch.push_with(len, write)
    }

    #[inline]
    fn accepts(&self) -> NetFeatures {
        NetFeatures::GUEST_OFFLOADS
    }

    #[inline]
    fn make_room(&mut self, ring: &mut TransmitRing, len: usize) -> Result<(), Next> {
        if !self.batch.has_room(len, 1) {
            self.send_batch(ring);
        }
        Ok(())
    }

    fn end(&mut self, ring: &mut TransmitRing, _polled: &mut Polled, _far_side_due: bool) {
        if self.batch.len() > 0 {
            self.send_batch(ring);
        }
    }
}
