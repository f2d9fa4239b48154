//! The lives of the guest, the daemons and the store.

use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use kickless_testing::eventually;
use kickless_vhost_user::{Error, FrontendMessage as Message};

use crate::frontend::Frontend;
use crate::handover::guest::{Ask, Guest};
use crate::handover::host::{QUEUES, Upgraded};
use crate::handover::store::LAYERS;
use crate::handover::world::World;
use crate::handover::{Format, Medium};

/// The result of a stop of all rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// Everything is written back, and the disk is free.
    Free,
    /// A write-back has failed. The daemon keeps the disk, and the guest works on there.
    Kept,
}

impl World {
    /// Fills the store, or gives its space back.
    ///
    /// # Errors
    /// The store cannot be filled.
    pub fn set_full(&mut self, is_full: bool) -> Result<()> {
        self.note(if is_full { "the store is full".into() } else { "the store has room again".into() });
        self.store.set_full(is_full)?;
        if is_full {
            self.hosts.iter_mut().for_each(|host| host.may_fail = true);
            self.guest.iter_mut().for_each(Guest::excuse_pending);
        }
        Ok(())
    }

    /// Lets the NBD server crash.
    pub fn crash(&mut self) {
        let Some(server) = self.store.nbd() else { return };
        // The guest's writes may all be durable although it has not asked for that.
        let loses = server.crash() && self.oracle.has_unflushed();
        self.note(format!("the server crashes{}", if loses { " and loses writes" } else { "" }));
        self.oracle.lost();
        if loses {
            self.untold = Some([true; QUEUES as usize]);
        }
        if let Some(guest) = &mut self.guest {
            self.hosts[self.at].may_fail = true;
            guest.excuse_pending();
        }
    }

    /// Stops all rings. Requests may be in flight.
    ///
    /// # Errors
    /// The daemon does what it must not.
    pub fn stop(&mut self) -> Result<Stopped> {
        self.note(format!("stop at host {}", self.at));
        match self.guest()?.machine.stop() {
            Ok(()) => {
                // A request that the daemon has not taken waits for the next start of its ring.
                self.wait_for(Guest::is_answered)?;
                let all_untold = self.untold.is_some_and(|rings| rings == [true; QUEUES as usize]);
                ensure!(!all_untold, "the rings stop as if the server had not lost writes");
                self.oracle.all_flushed();
                self.unsynced = self.unsynced.filter(|host| *host != self.at);
                Ok(Stopped::Free)
            }
            Err(error) if has_ended(&error) => {
                self.note("the connection ends instead of a reply".into());
                self.check_kept()?;
                Ok(Stopped::Kept)
            }
            Err(error) => Err(error),
        }
    }

    /// Checks that a daemon whose write-back has failed keeps the disk and tells the guest.
    fn check_kept(&mut self) -> Result<()> {
        ensure!(self.may_fail(), "a write-back fails without a reason");
        self.oracle.lost();
        let at = self.at;
        let must_lock = self.store.nbd().is_none();
        ensure!(!(must_lock && self.store.is_free(at)?), "a daemon gives up a disk that is not written back");
        self.hosts[at].keeps = true;
        if self.random.one_in(4) {
            self.terminate(at)?;
            self.restart(at)?;
            return self.reconnect_or_abandon();
        }
        self.untold = self.untold.map(|_| [false; QUEUES as usize]);
        let daemon = self.hosts[at].daemon()?;
        let guest = self.guest.as_mut().context("no guest")?;
        if self.random.one_in(2) {
            guest.reconnect(daemon.socket()).context("the guest comes back after a failed write-back")?;
        } else {
            guest.abandon(&mut self.oracle);
            *guest =
                Guest::start(daemon.socket(), false).context("a guest starts after a failed write-back")?;
        }
        self.wait_all()?;
        self.note("flush, which must fail".into());
        self.submit(&[Ask::Flush])?;
        let guest = self.guest.as_mut().context("no guest")?;
        let answered = guest.wait(0, &mut self.oracle)?.context("no flush")?;
        ensure!(!answered.is_ok, "a flush succeeds after a failed write-back");
        // The kernel does not try again, but the server takes later writes.
        self.hosts[at].keeps = must_lock;
        self.check(answered)
    }

    /// Kills the daemon of a host. A guest there keeps its requests.
    ///
    /// # Errors
    /// The image cannot be opened.
    pub fn kill(&mut self, host: usize) -> Result<()> {
        self.note(format!("SIGKILL at host {host}"));
        self.hosts[host].kill();
        if host == self.at {
            self.untold = None;
            self.guest.iter_mut().for_each(Guest::hand_on_pending);
        }
        let has_cache = matches!(self.case.medium, Medium::Loops { .. });
        if has_cache && host == self.at && self.guest.is_some() {
            self.unsynced = Some(host);
        }
        self.settle(host)
    }

    /// Lets another process take over from the daemon of a host. A guest there does not notice, and no other
    /// program finds its image free.
    ///
    /// # Errors
    /// The upgrade fails without a reason, or a program finds the image free.
    pub fn upgrade(&mut self, host: usize) -> Result<()> {
        self.note(format!("upgrade at host {host}"));
        let is_used = host == self.at && self.guest.is_some();
        let may_fail = self.store.is_full() || self.hosts[host].may_fail || self.hosts[host].keeps;
        let image = self.store.dir(host).map(|dir| dir.join(LAYERS[0])).filter(|_| is_used);
        let format = if self.case.format == Format::Raw { "raw" } else { "qcow2" };
        let mut was_free = 0;
        let mut open_from_outside = || {
            if let Some(image) = &image {
                let words = ["-f", format, "-c", "quit"];
                was_free +=
                    u32::from(Command::new("qemu-io").args(words).arg(image).output()?.status.success());
            }
            Ok(())
        };
        let upgraded = self.hosts[host].upgrade(&mut self.random, &mut open_from_outside)?;
        self.note(format!("{upgraded:?}"));
        match upgraded {
            Upgraded::Died => {
                self.kill(host)?;
                self.maybe_fail()?;
                self.restart(host)?;
                if is_used {
                    self.reconnect_or_abandon()?;
                }
                return Ok(());
            }
            Upgraded::No { has_fault } => ensure!(has_fault || may_fail, "an upgrade fails without a reason"),
            Upgraded::Yes => {}
        }
        ensure!(was_free == 0, "qemu-io has opened the image of a guest");
        if is_used { self.wait_all() } else { Ok(()) }
    }

    /// Waits until nothing of an ended process is left.
    fn settle(&self, host: usize) -> Result<()> {
        if let Some(server) = self.store.nbd() {
            server.settle();
        } else if host == self.at {
            // Fails if the image cannot be opened.
            self.store.is_free(host)?;
            eventually("the lock is not released", || self.store.is_free(host).is_ok_and(|free| free));
        }
        Ok(())
    }

    /// Ends the daemon of a host by SIGTERM. A guest there keeps its requests.
    ///
    /// # Errors
    /// Its status is wrong.
    pub fn terminate(&mut self, host: usize) -> Result<()> {
        self.note(format!("SIGTERM at host {host}"));
        let may_fail = self.store.is_full() || self.hosts[host].may_fail;
        let (keeps, is_used) = (self.hosts[host].keeps, host == self.at && self.guest.is_some());
        let all_untold = is_used && self.untold.is_some_and(|rings| rings == [true; QUEUES as usize]);
        let status = self.hosts[host].terminate()?;
        match status.code() {
            Some(0) => {
                ensure!(!keeps, "status 0 after a failed write-back");
                ensure!(!all_untold, "status 0 after the server lost writes");
                if is_used {
                    self.oracle.all_flushed();
                    self.unsynced = self.unsynced.filter(|unsynced| *unsynced != host);
                }
            }
            Some(1) => {
                ensure!(may_fail, "status 1 without a reason");
                self.note("its status is 1".into());
                self.oracle.lost();
            }
            _ => bail!("{status}"),
        }
        if host == self.at {
            self.untold = None;
            self.guest.iter_mut().for_each(Guest::hand_on_pending);
        }
        self.settle(host)
    }

    /// Writes the page cache of a host to the store.
    ///
    /// # Errors
    /// It cannot be written, and there is no reason for that.
    pub fn sync(&mut self, host: usize) -> Result<()> {
        let synced = self.store.sync(host);
        if let Err(error) = &synced {
            self.note(format!("the page cache of host {host} cannot be written: {error}"));
            ensure!(self.store.is_full() || self.hosts[host].may_fail, "the store fails without a reason");
            self.oracle.lost();
        }
        self.unsynced = self.unsynced.filter(|unsynced| *unsynced != host);
        Ok(())
    }

    /// Starts the daemon of a host again.
    ///
    /// # Errors
    /// It does not start.
    pub fn restart(&mut self, host: usize) -> Result<()> {
        if self.store.is_full() {
            self.set_full(false)?;
        }
        // Afterwards the kernel has no error to report.
        if self.hosts[host].may_fail && self.random.one_in(2) {
            self.sync(host)?;
            self.hosts[host].may_fail = false;
        }
        if self.store.nbd().is_some() {
            self.hosts[host].may_fail = false;
        }
        self.note(format!("a daemon starts at host {host}"));
        self.hosts[host].restart(&self.case, &self.store, host, &mut self.random)
    }

    /// Lets the guest go on with the new daemon of its host, or ends it.
    ///
    /// # Errors
    /// The daemon does what it must not.
    pub fn reconnect_or_abandon(&mut self) -> Result<()> {
        if self.random.one_in(4) {
            self.abandon();
            return Ok(());
        }
        self.note("the guest connects again".into());
        let daemon = self.hosts[self.at].daemon()?;
        let guest = self.guest.as_mut().context("no guest")?;
        guest.reconnect(daemon.socket())?;
        self.wait_all()
    }

    /// Ends the guest, with its requests in flight.
    pub fn abandon(&mut self) {
        self.note("the guest is gone".into());
        if let Some(mut guest) = self.guest.take() {
            guest.abandon(&mut self.oracle);
        }
    }

    /// Replaces daemons that keep the disk, and writes page caches for another host or another program.
    ///
    /// # Errors
    /// A daemon ends with another status than 1.
    pub fn clear_for(&mut self, host: Option<usize>) -> Result<()> {
        for other in 0..2 {
            if self.hosts[other].keeps {
                self.terminate(other)?;
                self.restart(other)?;
            }
            if self.unsynced == Some(other) && host != Some(other) {
                self.sync(other)?;
            }
        }
        Ok(())
    }

    /// Starts a new guest at a host.
    ///
    /// # Errors
    /// The daemon refuses, or the disk has another size or other values.
    pub fn start_guest(&mut self, host: usize) -> Result<()> {
        self.clear_for(Some(host))?;
        self.note(format!("a guest starts at host {host}"));
        // It is told only if the guest before it was not.
        self.untold = self.untold.filter(|rings| *rings == [true; QUEUES as usize]);
        self.at = host;
        let keeps_inflight = self.random.one_in(2);
        match Guest::start(self.hosts[host].daemon()?.socket(), keeps_inflight) {
            Ok(guest) => self.guest = Some(guest),
            Err(error) if self.store.is_full() => {
                self.note(format!("it does not start: {error:#}"));
                return Ok(());
            }
            Err(error) => return Err(error),
        }
        self.check_size()?;
        if self.random.one_in(2) { self.read_all() } else { Ok(()) }
    }

    /// Ends the guest, which stops its rings, or whose connection ends.
    ///
    /// # Errors
    /// The daemon does what it must not.
    pub fn quit(&mut self) -> Result<()> {
        if self.may_fail() || self.random.one_in(2) {
            if self.stop()? == Stopped::Free {
                self.abandon();
            }
            return Ok(());
        }
        self.note("its connection ends".into());
        self.abandon();
        // The daemon answers when the old connection is over.
        let mut next = Frontend::connect(self.hosts[self.at].daemon()?.socket())?;
        next.number(&Message::GetFeatures)?;
        ensure!(self.store.is_free(self.at)?, "the disk is not free after the end of its connection");
        self.oracle.all_flushed();
        self.unsynced = self.unsynced.filter(|host| *host != self.at);
        Ok(())
    }

    /// Moves the guest to the other host, or begins to and cancels.
    ///
    /// # Errors
    /// A daemon does what it must not.
    pub fn move_guest(&mut self) -> Result<()> {
        if self.stop()? == Stopped::Kept {
            return Ok(());
        }
        let (from, to) = (self.at, 1 - self.at);
        if self.random.one_in(6) {
            self.crash();
        }
        let socket = self.hosts[to].daemon()?.socket().to_owned();
        let guest = self.guest.as_mut().context("no guest")?;
        let left = guest.machine.move_to(&socket)?;
        if self.random.one_in(6) {
            guest.machine.frontend = left;
            self.note("the migration is cancelled".into());
            return self.resume_here();
        }
        self.note(format!("move from host {from} to host {to}"));
        (self.at, self.untold) = (to, None);
        let left = Some(left).filter(|_| self.random.one_in(2));
        let resumed = self.guest()?.resume_moved();
        drop(left);
        self.check_resumed(resumed)
    }

    /// Starts the rings again that have stopped at this host.
    ///
    /// # Errors
    /// The daemon refuses.
    pub fn resume_here(&mut self) -> Result<()> {
        let resumed = self.guest()?.machine.resume();
        self.check_resumed(resumed)
    }

    fn check_resumed(&mut self, resumed: Result<()>) -> Result<()> {
        match resumed {
            Err(error) if self.store.is_full() => {
                self.note(format!("the rings do not start: {error:#}"));
                self.abandon();
                Ok(())
            }
            Err(error) => Err(error),
            Ok(()) => self.wait_all(),
        }
    }
}

/// Returns whether a connection has ended.
fn has_ended(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(Error::Closed | Error::ClosedMidMessage { .. }))
        || error.downcast_ref::<Error>().is_some_and(|error| error.to_string().contains("reset"))
}
