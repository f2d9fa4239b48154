//! The queues of an interface.

use crate::ports::port_thread::PortThread;
use kickless_net_port::{XdpFlushed, XdpLink, XdpPort, XdpTurn};
use std::sync::atomic::{AtomicBool, Ordering};
use tracing::{Span, error, warn};

/// The queues of an interface, and what the log says about it.
#[derive(Debug)]
pub(crate) struct XdpQueues {
    pub(crate) queues: XdpPort,
    is_gone: AtomicBool,
    /// The thread that finds out that the interface is gone.
    pub(super) watch: PortThread,
    /// The span of log lines about the card.
    span: Span,
}

impl XdpQueues {
    pub(crate) fn new(queues: XdpPort) -> Self {
        Self { queues, is_gone: AtomicBool::new(false), watch: PortThread::default(), span: Span::current() }
    }

    /// Returns whether the interface was deleted or moved.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Relaxed)
    }

    /// Logs that the interface is gone, once. The card goes on without it.
    pub(super) fn report_gone(&self) {
        if !self.is_gone.swap(true, Ordering::Relaxed) {
            let interface = self.queues.interface();
            error!(parent: &self.span, interface, "the interface was deleted or moved: the card has no network until its \
                device is opened again");
        }
    }

    /// Tells the kernel of the frames that were added. Logs once that the interface is gone.
    pub(super) fn flush(&self, turn: &mut XdpTurn<'_>) -> XdpFlushed {
        let flushed = turn.flush();
        if turn.link() == XdpLink::Gone {
            self.report_gone();
        }
        flushed
    }

    /// Sends a frame that no ring has, at once or never.
    pub(crate) fn send_once(&self, frame: &[u8]) {
        match self.queues.queue(0) {
            Ok(queue) => {
                let mut turn = queue.turn();
                // Without room, the frame is lost as in a full queue of the network.
                let _ = turn.push(frame.len(), |space| {
                    let at = space.len() - frame.len();
                    space[at..].copy_from_slice(frame);
                    Ok::<_, ()>(frame.len())
                });
                self.flush(&mut turn);
            }
            Err(error) => warn!(parent: &self.span, %error, "the guest's address cannot be announced"),
        }
    }
}
