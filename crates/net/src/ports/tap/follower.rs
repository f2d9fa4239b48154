//! Makes a TAP follow the rings of its card: which of its queues are attached, and which offloads it applies.
//!
//! The rings note what they do in [`CardState`]. The thread of the port reads this after each change. A
//! change that comes meanwhile makes it look again, so the TAP ends up with what the rings noted last.

use super::state::{Change, TapState};
use crate::card::state::CardState;
use std::io;
use std::sync::Arc;

/// Starts the thread of a TAP, unless it runs.
///
/// # Errors
/// The process cannot have another thread.
pub(crate) fn follow(card: &Arc<CardState>, tap: &Arc<TapState>) -> io::Result<()> {
    let (card, followed) = (card.clone(), tap.clone());
    tap.start_thread(move || run(&card, &followed))
}

fn run(card: &CardState, tap: &TapState) {
    loop {
        let change = tap.wait_for_change();
        tap.gate.pass(|| tap.tap.set(card.tap_offloads(), |pair| card.receives(pair)));
        if change == Change::End {
            return;
        }
    }
}
