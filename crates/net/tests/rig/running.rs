//! A ring that a worker runs.

use super::{Guest, Kind, SIZE_MAX};
use kickless_device::{Device, Executor, Kick, TaskHandle, Update};
use kickless_net::Net;
use kickless_testing::LIMIT;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A ring on a worker, with its driver.
pub struct Running {
    pub guest: Guest,
    pub kicks: OwnedFd,
    pub handle: Box<dyn TaskHandle>,
}

impl Running {
    /// Starts a fresh ring.
    pub fn start(executor: &Arc<dyn Executor>, card: &Net, index: u16, kind: Kind) -> Self {
        Self::start_on(executor, card, index, Guest::prepare(kind, SIZE_MAX))
    }

    /// Starts the ring of a guest.
    pub fn start_on(executor: &Arc<dyn Executor>, card: &Net, index: u16, guest: Guest) -> Self {
        let kicks = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let kick = Kick::new(kicks.try_clone().unwrap()).unwrap();
        let vring = guest.vring(index, guest.first_avail(), Some(kick));
        let handle = executor.spawn(card.start_queue(vring, card.features()).unwrap()).unwrap();
        Self { guest, kicks, handle }
    }

    /// Kicks, if the device wants a kick for what the driver has done.
    pub fn kick(&mut self) {
        if std::mem::take(&mut self.guest.kick_wanted) {
            rustix::io::write(&self.kicks, &1u64.to_ne_bytes()).unwrap();
        }
    }

    /// Offers as many buffers as the ring has room for.
    pub fn fill(&mut self) {
        while self.guest.offer(&[1530], true).is_some() {}
        self.kick();
    }

    /// Changes the ring, and waits until the change is made.
    pub fn update(&self, update: Update) {
        self.handle.update(update).recv_timeout(LIMIT).expect("an update does not complete");
    }

    /// Stops the ring, which has nothing to do, and starts it again. It may be on another worker then.
    pub fn restart(&mut self, executor: &Arc<dyn Executor>, card: &Net, index: u16) {
        let stopped = self.handle.stop().recv_timeout(LIMIT).expect("a stop does not complete");
        let kick = Kick::new(self.kicks.try_clone().unwrap()).unwrap();
        let vring = self.guest.vring(index, stopped.next_avail, Some(kick));
        self.handle = executor.spawn(card.start_queue(vring, card.features()).unwrap()).unwrap();
    }
}
