//! The port of a card, with all that its rings share there.

use crate::card::filter::Address;
use crate::frame::loop_queue::LoopQueue;
use crate::ports::switch::{Rule, SwitchPort};
use crate::ports::xdp::XdpQueues;
use kickless_net_port::{NullPort, OpenPort, StreamPort, SwitchName, Tap, XDP_MTU_MAX};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::{fmt, io};
use tracing::{Span, error, warn};

/// The port of a card.
#[derive(Debug)]
pub(crate) enum CardPort {
    /// Discards the frames of the driver, and delivers test frames.
    Null(NullPort),
    /// Returns the frames of each pair.
    Loop(Vec<LoopQueue>),
    /// Has one queue of a TAP for each pair.
    Tap(Box<TapPort>),
    /// Sends frames over a stream socket, and receives them there.
    Stream(StreamPort),
    /// Exchanges frames with other cards of this process.
    Switch(SwitchPort),
    /// Has one queue of an interface for each pair.
    Xdp(Box<XdpQueues>),
}

/// A TAP, and what makes it follow the rings.
///
/// Calls that attach queues or set offloads take a lock of the kernel's network configuration. A worker never
/// makes them: a thread of the card does, after the rings have changed what it looks at
/// (`crate::ports::tap::follower`).
#[derive(Debug)]
pub(crate) struct TapPort {
    pub(crate) tap: Tap,
    follower: Mutex<Follower>,
    changed: Condvar,
    is_gone: AtomicBool,
    has_failed: AtomicBool,
    /// The span of log lines about the card.
    span: Span,
}

/// The reason for which the thread looks at the rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// They have changed.
    Rings,
    /// The thread ends.
    End,
}

#[derive(Debug, Default)]
struct Follower {
    /// The rings have changed since the thread last looked.
    is_due: bool,
    is_ending: bool,
    thread: Option<JoinHandle<()>>,
}

impl CardPort {
    /// Makes the port of a card with this number of pairs, which has an address or not.
    pub(crate) fn new(port: OpenPort, pairs: u16, address: Option<Address>) -> Self {
        match port {
            OpenPort::Null(port) => Self::Null(port),
            OpenPort::Loop => Self::Loop((0..pairs).map(|_| LoopQueue::default()).collect()),
            OpenPort::Tap(tap) => Self::Tap(Box::new(TapPort {
                tap,
                follower: Mutex::default(),
                changed: Condvar::new(),
                is_gone: AtomicBool::new(false),
                has_failed: AtomicBool::new(false),
                span: Span::current(),
            })),
            OpenPort::Stream(port) => Self::Stream(port),
            OpenPort::Xdp(port) => Self::Xdp(Box::new(XdpQueues::new(port))),
            OpenPort::Switch(SwitchName { name, vlan, .. }, _) => {
                Self::Switch(SwitchPort::join(&name, Rule { vlan, address }, pairs))
            }
        }
    }

    /// Makes the port follow the rings, which have changed. Does not wait for it.
    pub(crate) fn changed(&self) {
        if let Self::Tap(port) = self {
            port.lock().is_due = true;
            port.changed.notify_one();
        }
    }

    /// Warns of an MTU of the front-end that the port does not carry. A refusal would leave the guest without
    /// a card.
    pub(crate) fn warn_of_mtu(&self, mtu: u16) {
        if let Self::Xdp(port) = self
            && mtu > XDP_MTU_MAX
        {
            warn!(
                mtu,
                max = XDP_MTU_MAX,
                interface = port.queues.interface(),
                "the front-end has chosen a larger MTU \
                than the port carries: longer frames of the guest are counted as sent_refused"
            );
        }
    }

    /// Returns whether the port was found to be gone for good.
    pub(crate) fn is_gone(&self) -> bool {
        match self {
            Self::Tap(port) => port.is_gone(),
            Self::Xdp(port) => port.is_gone(),
            _ => false,
        }
    }
}

impl TapPort {
    fn lock(&self) -> MutexGuard<'_, Follower> {
        self.follower.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the thread that makes the TAP follow the rings of the card, unless it runs.
    ///
    /// # Errors
    /// The process cannot have another thread.
    pub(crate) fn start_thread(&self, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let mut follower = self.lock();
        if follower.thread.is_none() {
            follower.is_ending = false;
            follower.thread = Some(thread::Builder::new().name("tap".into()).spawn(run)?);
        }
        Ok(())
    }

    /// Waits until the rings have changed, or the thread is to end after a last look at them.
    pub(crate) fn wait_for_change(&self) -> Change {
        let mut follower = self.lock();
        while !follower.is_due && !follower.is_ending {
            follower = self.changed.wait(follower).unwrap_or_else(PoisonError::into_inner);
        }
        follower.is_due = false;
        if follower.is_ending { Change::End } else { Change::Rings }
    }

    /// Ends the thread. No ring runs any more, so the TAP has no offloads and no attached queue afterwards.
    pub(crate) fn end(&self) {
        let mut follower = self.lock();
        let Some(thread) = follower.thread.take() else { return };
        follower.is_ending = true;
        drop(follower);
        self.changed.notify_one();
        // The thread does not panic. If it did, the TAP would keep its settings.
        let _ = thread.join();
    }

    /// Logs that the TAP is gone, once. The card goes on without it.
    pub(crate) fn report_gone(&self) {
        if !self.is_gone.swap(true, Ordering::Relaxed) {
            let name = self.tap.name();
            error!(parent: &self.span, tap = name, "the TAP was deleted: the card has no network until its device is \
                opened again");
        }
    }

    /// Returns whether a ring has found that the TAP is gone.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Relaxed)
    }

    /// Logs the first read that has failed.
    pub(crate) fn report_failed_read(&self, error: &dyn fmt::Display) {
        if !self.has_failed.swap(true, Ordering::Relaxed) {
            warn!(parent: &self.span, tap = self.tap.name(), %error, "a frame of the TAP could not be read; further ones are counted as dropped_unread");
        }
    }
}
