//! Finds out that an interface is gone.
//!
//! A send finds that out, but a card that only receives would never: its socket has no event then. So a
//! thread of the card waits for changes of the interfaces of its network namespace. It sleeps otherwise.

use super::queues::XdpQueues;
use kickless_io::Waker;
use kickless_net_port::LinkChanges;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::io;
use std::sync::Arc;
use tracing::warn;

/// Starts the thread of an interface, unless it runs.
///
/// # Errors
/// The process cannot have another thread or descriptor.
pub(super) fn watch(port: &Arc<XdpQueues>) -> io::Result<()> {
    let changes = match LinkChanges::open() {
        Ok(changes) => changes,
        Err(error) => {
            let interface = port.queues.interface();
            warn!(interface, %error, "a card that only receives will not find out that its interface is gone");
            return Ok(());
        }
    };
    let watched = port.clone();
    port.watch.start("xdp", |stop| Ok(move || run(&watched, &changes, &stop)))
}

/// Waits until the interface is gone, or the thread is to end.
fn run(port: &XdpQueues, changes: &LinkChanges, stop: &Waker) {
    loop {
        // The interface can have gone before the thread began.
        changes.clear();
        if port.queues.was_lost() {
            return port.report_gone();
        }
        let mut fds = [PollFd::new(stop, PollFlags::IN), PollFd::new(changes, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) if fds[0].revents().is_empty() => {}
            _ => return,
        }
    }
}
