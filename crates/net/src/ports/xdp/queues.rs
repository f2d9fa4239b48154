//! The queues of an interface.

use kickless_io::Waker;
use kickless_net_port::{XdpFlushed, XdpLink, XdpPort, XdpTurn};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use tracing::{Span, error, warn};

/// The thread of a port that finds out that its interface is gone (`watch.rs`).
#[derive(Debug)]
pub(super) struct Watch {
    pub(super) stop: Waker,
    pub(super) thread: JoinHandle<()>,
}

/// The queues of an interface, and what the log says about it.
#[derive(Debug)]
pub(crate) struct XdpQueues {
    pub(crate) queues: XdpPort,
    is_gone: AtomicBool,
    /// The thread that finds out that the interface is gone.
    pub(super) watch: Mutex<Option<Watch>>,
    /// The span of log lines about the card.
    span: Span,
}

impl XdpQueues {
    pub(crate) fn new(queues: XdpPort) -> Self {
        Self { queues, is_gone: AtomicBool::new(false), watch: Mutex::default(), span: Span::current() }
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

    /// Ends the thread.
    pub(crate) fn end(&self) {
        let watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Watch { stop, thread }) = watch {
            stop.wake();
            // The thread does not panic. If it did, it would have ended as well.
            let _ = thread.join();
        }
    }
}
