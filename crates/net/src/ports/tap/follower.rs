//! Makes a TAP follow the rings of its card: which of its queues are attached, and which offloads it applies.
//!
//! The rings note what they do in [`CardState`]. The thread of the port reads this after each change. A
//! change that comes meanwhile makes it look again, so the TAP ends up with what the rings noted last.

use crate::card::state::CardState;
use crate::ports::card_port::{CardPort, Change, TapPort};
use std::io;
use std::sync::Arc;

/// Starts the thread of a TAP. Does nothing for other ports.
///
/// # Errors
/// The process cannot have another thread.
pub(crate) fn follow(card: &Arc<CardState>) -> io::Result<()> {
    let CardPort::Tap(port) = &card.port else { return Ok(()) };
    let card = card.clone();
    port.start_thread(move || {
        if let CardPort::Tap(port) = &card.port {
            run(&card, port);
        }
    })
}

fn run(card: &CardState, port: &TapPort) {
    loop {
        let change = port.wait_for_change();
        port.tap.set(card.tap_offloads(), |pair| card.receives(pair));
        if change == Change::End {
            return;
        }
    }
}
