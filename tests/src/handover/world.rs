//! Knows the two hosts, the disk and its guest, and makes requests.

use std::collections::VecDeque;

use anyhow::{Context, Result, ensure};
use kickless_testing::Random;

use crate::handover::guest::{Answered, Ask, Guest};
use crate::handover::host::{Host, QUEUES};
use crate::handover::oracle::{Oracle, SECTOR};
use crate::handover::store::Store;
use crate::handover::{Case, Medium, images};

/// Sectors of the disk at first.
pub const SECTORS: usize = 1024;
/// Events that a report has.
const HISTORY_MAX: usize = 120;

/// Two hosts, the disk, and what is known of it.
pub struct World {
    /// The disk.
    pub case: Case,
    /// The bytes under it.
    pub store: Store,
    /// The hosts.
    pub hosts: [Host; 2],
    /// The guest, if there is one.
    pub guest: Option<Guest>,
    /// The host of the guest.
    pub at: usize,
    /// The values of the sectors.
    pub oracle: Oracle,
    /// Decides.
    pub random: Random,
    /// The names of the images, the topmost first.
    pub chain: Vec<String>,
    /// The host whose page cache may have writes of a killed daemon.
    pub unsynced: Option<usize>,
    /// The rings that were not told yet that the server has lost writes.
    pub(super) untold: Option<[bool; QUEUES as usize]>,
    history: VecDeque<String>,
}

impl World {
    /// Makes the disk and starts a daemon on each host.
    ///
    /// # Errors
    /// A daemon does not start.
    pub fn start(case: &Case, store: Store, mut random: Random) -> Result<World> {
        let chain = images::create(case, &store, SECTORS)?;
        let first = Host::start(case, &store, 0, &mut random)?;
        let hosts = [first, Host::start(case, &store, 1, &mut random)?];
        Ok(World {
            case: *case,
            store,
            hosts,
            guest: None,
            at: 0,
            oracle: Oracle::new(SECTORS),
            random,
            chain,
            unsynced: None,
            untold: None,
            history: VecDeque::new(),
        })
    }

    /// Notes an event for a report.
    pub fn note(&mut self, event: String) {
        if self.history.len() == HISTORY_MAX {
            self.history.pop_front();
        }
        self.history.push_back(event);
    }

    /// Returns the last events, and the ends of the daemons' logs.
    pub fn report(&self) -> String {
        let events = self.history.iter().cloned().collect::<Vec<_>>().join("\n  ");
        let [a, b] = self.hosts.each_ref().map(Host::last_words);
        format!("events:\n  {events}\nhost 0:\n{a}\nhost 1:\n{b}")
    }

    /// Returns the guest.
    ///
    /// # Errors
    /// There is none.
    pub fn guest(&mut self) -> Result<&mut Guest> {
        self.guest.as_mut().context("no guest")
    }

    /// Returns whether the daemon of the guest may fail requests and write-backs.
    pub(super) fn may_fail(&self) -> bool {
        self.store.is_full() || self.hosts[self.at].may_fail
    }

    /// Checks whether an answer is possible, and what it says of other answers.
    pub(super) fn check(&mut self, answered: Answered) -> Result<()> {
        let (may_fail, writeback) = (self.may_fail(), self.case.writeback);
        let host = &mut self.hosts[self.at];
        let untold = self.untold.as_mut().map(|rings| &mut rings[usize::from(answered.queue)]);
        if answered.is_ok {
            if answered.is_flush && !answered.is_handed_on {
                let loses = matches!(self.case.medium, Medium::Loops { .. });
                ensure!(
                    !(loses && writeback && host.has_reported),
                    "a flush succeeds after the kernel has lost writes"
                );
                ensure!(
                    !untold.is_some_and(|untold| *untold),
                    "a flush succeeds after the server lost writes"
                );
            }
            return Ok(());
        }
        ensure!(may_fail || answered.may_fail, "a request fails without a reason");
        if answered.is_flush && !answered.is_handed_on {
            host.has_reported = true;
            if let Some(untold) = untold {
                *untold = false;
            }
        }
        Ok(())
    }

    /// Waits for all requests in flight.
    ///
    /// # Errors
    /// An answer is wrong.
    pub fn wait_all(&mut self) -> Result<()> {
        self.wait_for(|_, _| true)
    }

    /// Waits for the requests of the rings that `is_answered` chooses.
    pub(super) fn wait_for(&mut self, is_answered: impl Fn(&Guest, u16) -> bool) -> Result<()> {
        for queue in 0..QUEUES {
            let guest = self.guest.as_mut().context("no guest")?;
            if !is_answered(guest, queue) {
                continue;
            }
            if let Some(answered) = guest.wait(queue, &mut self.oracle)? {
                if !answered.is_ok {
                    self.note(format!("a request of ring {queue} fails"));
                }
                self.check(answered)?;
            }
        }
        Ok(())
    }

    /// Makes these requests, all at once.
    ///
    /// # Errors
    /// An answer is wrong.
    pub fn ask(&mut self, asks: &[Ask]) -> Result<()> {
        self.submit(asks)?;
        self.wait_all()
    }

    /// Submits these requests, one on each ring.
    ///
    /// # Errors
    /// A ring has no room.
    pub fn submit(&mut self, asks: &[Ask]) -> Result<()> {
        for (queue, ask) in (0..).zip(asks) {
            self.note(format!("ring {queue}: {ask:?}"));
            let guest = self.guest.as_mut().context("no guest")?;
            guest.submit(queue, ask, &mut self.oracle)?;
        }
        if self.may_fail() {
            self.guest.iter_mut().for_each(Guest::excuse_pending);
        }
        Ok(())
    }

    /// Reads and compares the whole disk.
    ///
    /// # Errors
    /// A sector has a value that it cannot have.
    pub fn read_all(&mut self) -> Result<()> {
        let sectors = self.oracle.sectors();
        let len = 128 << 10 >> SECTOR.ilog2();
        for first in (0..sectors).step_by(len) {
            self.ask(&[Ask::Read(first..sectors.min(first + len))])?;
        }
        Ok(())
    }

    /// Checks the size that the guest sees.
    ///
    /// # Errors
    /// It is another one.
    pub fn check_size(&mut self) -> Result<()> {
        let (sees, has) = (self.guest()?.capacity()?, self.oracle.sectors());
        ensure!(sees == has, "the guest sees a disk of {sees} sectors, which has {has}");
        Ok(())
    }
}
