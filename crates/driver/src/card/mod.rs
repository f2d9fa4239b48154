//! A network card.

mod control_queue;
mod core;
mod features;
#[cfg(fuzzing)]
pub mod fuzzing;
mod handle;
mod memory;
mod options;
mod pair;
mod receive;
mod rings;
#[cfg(test)]
mod tests;
mod transmit;

use std::sync::{Arc, Mutex};

use kickless_spec::features::Features;
use kickless_spec::net::{MAC_LEN, NetFeatures, S_LINK_UP};
use kickless_sync::lock;

pub use memory::Frame;
pub use options::CardOptions;
pub use pair::{CardCounters, Interest, Outgoing, QueuePair};

use crate::error::Error;
use crate::reconnect::Reconnect;
use core::CardCore;
use handle::CardHandle;

/// A connection to the back-end of a network card, with shared memory and pairs of queues.
///
/// Clones are handles of the same card. The last handle and the last [`QueuePair`] close it.
#[derive(Clone)]
pub struct Card {
    handle: Arc<CardHandle>,
    /// The pairs that were not handed out yet.
    pairs: Arc<[Mutex<Option<QueuePair>>]>,
}

impl Card {
    /// Connects to a back-end and starts its queues.
    ///
    /// # Errors
    /// No back-end listens, it lacks a required feature or breaks the protocol, or the kernel refuses memory.
    pub fn connect(options: CardOptions) -> Result<Self, Error> {
        let handle = Arc::new(CardHandle { core: CardCore::open(options)? });
        let count = handle.core.layouts.len();
        let pairs =
            (0..count).map(|index| QueuePair::start(&handle, index).map(|pair| Mutex::new(Some(pair))));
        let card = Self { pairs: pairs.collect::<Result<_, Error>>()?, handle };
        if card.net_features().contains(NetFeatures::MQ.union(NetFeatures::CTRL_VQ)) {
            // Lossless: there are at most 127 pairs.
            card.set_pairs(count as u16)?;
        }
        Ok(card)
    }

    fn core(&self) -> &Arc<CardCore> {
        &self.handle.core
    }

    /// Returns the number of queue pairs.
    pub fn pairs(&self) -> usize {
        self.pairs.len()
    }

    /// Hands out a pair. Returns `None` if there is no such pair, or if it was handed out before.
    ///
    /// The queues of a pair that is dropped stay with the back-end, and nobody serves them.
    pub fn pair(&self, index: usize) -> Option<QueuePair> {
        lock(self.pairs.get(index)?).take()
    }

    /// Returns the negotiated features of the transport. The bits of [`Card::net_features`] are set in the
    /// same value.
    pub fn features(&self) -> Features {
        self.core().features
    }

    /// Returns the negotiated features of the card.
    pub fn net_features(&self) -> NetFeatures {
        features::of_card(self.core().features)
    }

    /// Returns the MTU. Asks the back-end if it has reported a change.
    ///
    /// # Errors
    /// The card is dead.
    pub fn mtu(&self) -> Result<u16, Error> {
        self.core().mtu()
    }

    /// Returns the address of the card, if it has one.
    ///
    /// # Errors
    /// As [`Card::mtu`].
    pub fn mac(&self) -> Result<Option<[u8; MAC_LEN]>, Error> {
        self.core().mac()
    }

    /// Returns whether the link is up. Asks the back-end if it has reported a change. A card that does not
    /// tell is up.
    ///
    /// # Errors
    /// As [`Card::mtu`].
    pub fn is_link_up(&self) -> Result<bool, Error> {
        let status = self.core().config()?.status.get();
        Ok(!self.net_features().contains(NetFeatures::STATUS) || status & S_LINK_UP != 0)
    }

    /// Returns how often the back-end has reported a change of its configuration space.
    ///
    /// Only threads that wait or poll see these reports.
    pub fn config_changes(&self) -> u64 {
        self.core().link.changes()
    }

    /// Tells the card how many pairs to use, from the first on. A new card uses all.
    ///
    /// # Errors
    /// The back-end does not offer this or refuses, the connection is lost, or the card is dead.
    pub fn set_pairs(&self, pairs: u16) -> Result<(), Error> {
        self.core().set_pairs(pairs)
    }

    /// Returns the reason of the death, if the card is dead.
    pub fn failure(&self) -> Option<Arc<Error>> {
        self.core().link.failure()
    }

    /// Closes the card for all its users: stops all queues. Frames in flight may be sent or not;
    /// [`QueuePair::flush`] waits for them.
    pub fn close(&self) {
        self.core().close();
    }
}

impl std::fmt::Debug for Card {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Card({})", self.core().options.socket.display())
    }
}
