//! The frames between the rings of a card and the thread of its port.

use crate::counters::RingCounters;
use crate::loop_queue::LoopQueue;

/// The frames on their way, and the counters of the thread.
#[derive(Debug, Default)]
pub(crate) struct PeerQueues {
    /// Frames for the receive ring of the card.
    pub(crate) inbox: LoopQueue,
    /// Frames of the transmit ring of the card. Open while there is a connection.
    pub(crate) outbox: LoopQueue,
    pub(crate) counters: RingCounters,
}
