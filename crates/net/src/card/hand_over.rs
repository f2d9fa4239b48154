//! Passes a card to the next process of this host.
//!
//! The settings of the driver pass as to another host ([`Device::save`]), with all that the front-end knows
//! and a card on another host does not.

use super::device::Net;
use super::saved_state::SavedState;
use crate::ports::hand_over::{Passing, cannot_give, contradicts};
use kickless_device::{CaptureTo, Device, GiveError, HandOver, Handed, StartError};
use kickless_handover::{Error, Given, Giving, Part, v1};
use kickless_spec::net::MTU_MIN;
use std::iter::zip;
use std::mem;
use std::sync::atomic::Ordering;
use tracing::error;

/// A card as the process gives it that this one takes over from.
#[derive(Debug)]
pub struct HandedCard<'g> {
    card: v1::Card,
    given: &'g mut Given,
}

/// The reason for which a card cannot be taken over. It is one sentence for an operator.
#[derive(Debug, thiserror::Error)]
enum TakeError {
    #[error("the card cannot be taken over: {0}")]
    State(#[from] Error),
    #[error("the other process gives an MTU of {0} bytes")]
    Mtu(u16),
    #[error("the other process gives a capture of a card whose configuration has none")]
    Capture,
    #[error("the other process gives settings of the driver that are no settings of this card")]
    Settings,
}

impl<'g> HandedCard<'g> {
    /// Reads the part of a card.
    ///
    /// # Errors
    /// It is no such part.
    pub fn read(handed: Handed<'g>) -> Result<Self, StartError> {
        let card: v1::Card = handed.state.read().map_err(|error| contradicts(TakeError::from(error)))?;
        if card.mtu < MTU_MIN {
            return Err(contradicts(TakeError::Mtu(card.mtu)));
        }
        Ok(Self { card, given: handed.given })
    }

    /// Returns the part of the port, for [`Opening`](crate::Opening).
    pub fn port(&mut self) -> Handed<'_> {
        Handed { state: mem::take(&mut self.card.port), given: self.given }
    }
}

impl Net {
    /// Takes a card over whose port is open already, before any ring starts. `capture` is that of its
    /// configuration.
    ///
    /// # Errors
    /// The file of the capture cannot be taken over.
    pub fn take_over(
        &self,
        handed: HandedCard<'_>,
        capture: Option<&CaptureTo<'_>>,
    ) -> Result<(), StartError> {
        let HandedCard { card: v1::Card { mtu, capture: file, .. }, given } = handed;
        self.card.mtu.store(mtu, Ordering::Relaxed);
        let Some(file) = file else { return Ok(()) };
        let to = capture.ok_or_else(|| contradicts(TakeError::Capture))?;
        self.card.capture.take_over(to.path, to.len_max, &file, given).map_err(contradicts)
    }
}

impl HandOver for Net {
    fn refuses(&self) -> Option<String> {
        match self.port.passing() {
            Passing::Refused(why) => Some(why.to_owned()),
            Passing::Anew | Passing::Given(_) => None,
        }
    }

    fn changes(&self) -> u64 {
        let of_port = match self.port.passing() {
            Passing::Given(port) => port.changes(),
            Passing::Anew | Passing::Refused(_) => 0,
        };
        self.changes.load(Ordering::Relaxed) + of_port
    }

    fn give(&self, to: &mut Giving) -> Result<Part, GiveError> {
        let port = match self.port.passing() {
            Passing::Given(port) => port.give(to)?,
            Passing::Anew | Passing::Refused(_) => Part::default(),
        };
        let capture = self.card.capture.give(to).map_err(cannot_give)?;
        Part::new(&v1::Card { mtu: self.mtu(), capture, port }).map_err(cannot_give)
    }

    fn gives_slowly(&self) -> bool {
        false
    }

    /// Suspends a capture. Its file is given after that.
    fn settle(&self) -> Result<(), GiveError> {
        if self.card.capture.is_on() {
            self.card.capture.suspend().map_err(cannot_give)?;
            self.changes.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    fn hold(&self) {
        if let Passing::Given(port) = self.port.passing() {
            port.hold();
        }
    }

    fn give_final(&self, to: &mut Giving) -> Result<Part, GiveError> {
        let port = match self.port.passing() {
            Passing::Given(port) => port.give_final(to)?,
            Passing::Anew | Passing::Refused(_) => Part::default(),
        };
        let card = &self.card;
        let state = v1::CardFinal {
            settings: to.bytes(&self.save()).map_err(cannot_give)?,
            settings_are_known: card.settings_are_known.load(Ordering::Relaxed),
            has_control_ring: card.has_control_ring.load(Ordering::Relaxed),
            is_open: self.is_open.load(Ordering::Relaxed),
            features: card.features.load(Ordering::Relaxed),
            announces_in_ns: card.announcements.settles_in_ns(),
            rings: card.counters.iter().map(|ring| ring.amounts()).collect(),
            counters: card.announcements.amounts(),
            capture_dropped: card.capture.dropped(),
            port,
        };
        Part::new(&state).map_err(cannot_give)
    }

    fn take_back(&self) -> Result<(), StartError> {
        if let Passing::Given(port) = self.port.passing() {
            port.take_back();
        }
        self.resume_capture();
        Ok(())
    }

    fn receive_final(&self, state: Part, given: &Given) -> Result<(), StartError> {
        let invalid = |error| contradicts(TakeError::State(error));
        let state: v1::CardFinal = state.read().map_err(invalid)?;
        let card = &self.card;
        let settings = SavedState::load(given.bytes(state.settings).map_err(invalid)?, card.pairs_max);
        let settings = settings.ok_or_else(|| contradicts(TakeError::Settings))?;
        card.set_pairs(settings.pairs);
        card.set_offloads(settings.offloads);
        card.change_filter(|filter| *filter = settings.filter);
        card.settings_are_known.store(state.settings_are_known, Ordering::Relaxed);
        card.has_control_ring.store(state.has_control_ring, Ordering::Relaxed);
        card.features.store(state.features, Ordering::Relaxed);
        card.announcements.go_on(state.announces_in_ns, &state.counters);
        zip(&card.counters, &state.rings).for_each(|(ring, amounts)| ring.raise_to(amounts));
        card.capture.set_dropped(state.capture_dropped);
        self.is_open.store(state.is_open, Ordering::Relaxed);
        match self.port.passing() {
            Passing::Given(port) => port.receive_final(state.port, given)?,
            Passing::Anew | Passing::Refused(_) => {}
        }
        self.port.card_changed(card);
        Ok(())
    }

    fn begin(&self) {
        self.resume_capture();
        if self.is_open.load(Ordering::Relaxed)
            && let Err(why) = self.port.start(&self.card)
        {
            error!(error = %why, "the port of the card cannot be started: its device has to be connected again");
        }
    }
}

impl Net {
    fn resume_capture(&self) {
        if let Err(why) = self.card.capture.resume() {
            error!(error = %why, "the frames of the card are not captured any more");
        }
    }
}
