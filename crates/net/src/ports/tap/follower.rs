//! Makes a TAP follow the rings of its card: which of its queues are attached, and which offloads it applies.
//!
//! The rings note what they do in [`CardState`]. The thread of the port reads this after each change. A
//! change that comes meanwhile makes it look again, so the TAP ends up with what the rings noted last.

use super::state::TapState;
use crate::card::state::CardState;
use crate::ports::port_thread::PortThread;
use kickless_io::Waker;
use rustix::event::{PollFd, PollFlags, poll};
use std::io;
use std::sync::Arc;

/// Starts the thread of a TAP, unless it runs.
///
/// # Errors
/// The process cannot have another thread or descriptor.
pub(crate) fn follow(thread: &PortThread, card: &Arc<CardState>, tap: &Arc<TapState>) -> io::Result<()> {
    thread.start("tap", |stop| {
        let (card, tap, changed) = (card.clone(), tap.clone(), tap.waker()?.clone());
        Ok(move || run(&card, &tap, &changed, &stop))
    })
}

/// Looks at the rings after each change, and when the thread is to end. No ring runs then any more, so the
/// TAP has no offloads and no attached queue afterwards.
fn run(card: &CardState, tap: &TapState, changed: &Waker, stop: &Waker) {
    let mut is_ending = false;
    while !is_ending {
        let mut fds = [PollFd::new(stop, PollFlags::IN), PollFd::new(changed, PollFlags::IN)];
        // After an error, one look more does no harm.
        let _ = poll(&mut fds, None);
        is_ending = stop.clear();
        changed.clear();
        tap.tap.set(card.tap_offloads(), |pair| card.receives(pair));
    }
}
