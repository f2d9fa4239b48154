//! The core of a disk: its queues, its connection, its memory, and the reason of its death.

use std::mem::offset_of;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Instant;

use kickless_spec::blk::{BlkFeatures, CONFIG_WRITEBACK, Config as Space};
use kickless_spec::features::Features;
use kickless_spec::vhost_user::RINGS_MAX;
use kickless_sync::lock;

use crate::block::Blocks;
use crate::buffer::{OwnMemory, Registered};
use crate::connection::{Connection, deadline_after};
use crate::error::Error;
use crate::event::{Event, Kicker};
use crate::layout::Layout;
use crate::limits::Limits;
use crate::link::Link;
use crate::memory::{self, Region, Regions};
use crate::options::Options;
use crate::page_pool::PagePool;
use crate::reconnect::Reconnect;
use crate::ring::{self, Ring};

/// The state that all handles of a disk share.
pub(crate) struct Core {
    pub(crate) options: Options,
    pub(crate) rings: Box<[Ring]>,
    pub(crate) own_memory: Arc<OwnMemory>,
    pub(crate) link: Link,
    pub(crate) features: Features,
    /// Locked before any completion lock. So a callback, which runs under a completion lock, must not lock
    /// it.
    session: Mutex<Session>,
    /// The configuration as it was read last, for callbacks.
    pub(crate) last_config: Mutex<(Limits, Space)>,
    pub(crate) reactor: AtomicBool,
    /// Wakes the reactor thread.
    pub(crate) reactor_event: Arc<Event>,
}

/// The connection, and the state that the back-end knows through it.
pub(crate) struct Session {
    /// The connection, or `None` while it is lost.
    pub(crate) connection: Option<Connection>,
    pub(crate) regions: Regions,
    /// The number of regions that the back-end accepts.
    pub(crate) regions_max: usize,
    pub(crate) space: Space,
    pub(crate) limits: Limits,
    /// The number of changes when the configuration space was read.
    pub(crate) changes_seen: u64,
    /// The caller's choice.
    pub(crate) writeback: Option<bool>,
    /// The time of the first loss of a connection after the last completion, and the number of completions at
    /// that time. While requests are in flight, a further loss without a completion in between does not
    /// change it.
    pub(crate) stuck: Option<(Instant, u64)>,
}

impl Core {
    /// Connects, and starts all queues.
    pub(crate) fn open(options: Options) -> Result<Arc<Self>, Error> {
        let deadline = deadline_after(options.connect_timeout);
        let mut connection = Connection::open(options.wishes(), deadline)?;
        let features = connection.features;
        let space = disk_config(&mut connection)?;
        let limits = Limits::new(features, &space)?.for_queue(options.queue_size)?;
        let count = queue_count(&options, &connection, features, &space);
        let mut layouts: Vec<Layout> = Vec::with_capacity(count);
        let mut end = memory::FIRST;
        for _ in 0..count {
            let layout = Layout::new(end, options.queue_size, features, Blocks::len(options.queue_size))?;
            end = layout.end();
            layouts.push(layout);
        }
        let rings_len = end - memory::FIRST;
        let regions =
            Regions::new(rings_len.saturating_add(options.buffer_memory.max(1)), options.huge_pages)?;
        let own = regions.all().first().cloned().ok_or(Error::NoMemory { len: 0 })?;
        let pool = PagePool::new(end, own.len() - rings_len);
        let own_memory = Arc::new(OwnMemory { region: own, pool });
        let kicker = Arc::new(Kicker::new());
        let rings = layouts.into_iter().enumerate().map(|(index, layout)| {
            let kick = (kicker.clone(), Arc::new(Event::new()?));
            Ring::new(index, layout, own_memory.clone(), limits, kick)
        });
        let rings: Box<[Ring]> = rings.collect::<Result<_, Error>>()?;
        connection.share(regions.all())?;
        let link = Link::new(options.reconnect_limit)?;
        for (index, ring) in (0u8..).zip(&rings) {
            connection.start(index, ring.layout().setup(), &ring.kick(), &ring.call, &link.control.error)?;
        }
        link.watch(&mut connection)?;
        let session = Session {
            regions_max: connection.regions_max,
            connection: Some(connection),
            regions,
            space,
            limits,
            changes_seen: 0,
            writeback: None,
            stuck: None,
        };
        Ok(Arc::new(Self {
            options,
            rings,
            own_memory,
            link,
            features,
            session: Mutex::new(session),
            last_config: Mutex::new((limits, space)),
            reactor: AtomicBool::new(false),
            reactor_event: Arc::new(Event::new()?),
        }))
    }

    /// Locks the session with the back-end.
    pub(crate) fn session(&self) -> MutexGuard<'_, Session> {
        debug_assert!(!ring::is_delivering(), "a callback has a queue's lock already");
        lock(&self.session)
    }

    /// Returns the limits of requests and the configuration space. Reads them again if they have changed.
    ///
    /// In a callback, returns the values that were read last.
    pub(crate) fn limits(self: &Arc<Self>) -> Result<(Limits, Space), Error> {
        if ring::is_delivering() {
            return if self.link.is_dead() {
                Err(self.link.dead_error())
            } else {
                Ok(*lock(&self.last_config))
            };
        }
        let mut session = self.session();
        let changes = self.link.changes();
        if session.changes_seen != changes
            && let Some(connection) = session.connection.as_mut()
        {
            let read = disk_config(connection).and_then(|space| {
                Ok((Limits::new(self.features, &space)?.for_queue(self.options.queue_size)?, space))
            });
            let (limits, space) = match read {
                Ok(read) => read,
                Err(error) => {
                    let old = (session.limits, session.space);
                    drop(session);
                    return self.fail(error).map(|()| old);
                }
            };
            (session.space, session.limits, session.changes_seen) = (space, limits, changes);
            *lock(&self.last_config) = (limits, space);
            self.rings.iter().for_each(|ring| ring.set_limits(limits));
        }
        Ok((session.limits, session.space))
    }

    /// Does the same as [`Core::limits`], after a look at what the back-end has reported. Nothing else looks
    /// at that while the caller submits no request and has no reactor.
    pub(crate) fn latest_limits(self: &Arc<Self>) -> Result<(Limits, Space), Error> {
        if !ring::is_delivering() {
            self.check_connection();
        }
        self.limits()
    }

    /// Turns the device's write cache on or off.
    pub(crate) fn set_writeback(self: &Arc<Self>, on: bool) -> Result<(), Error> {
        let offered = BlkFeatures::from_bits_truncate(self.features.bits());
        if !offered.contains(BlkFeatures::CONFIG_WCE) {
            return Err(Error::NotOffered { what: "a switch for its write cache" });
        }
        if ring::is_delivering() {
            return Err(Error::InCallback);
        }
        let mut session = self.session();
        let told = session.connection.as_mut().map_or(Ok(()), |connection| set_writeback(connection, on));
        if !matches!(told, Err(Error::Refused { .. })) {
            session.writeback = Some(on);
            session.space.writeback = on.into();
            lock(&self.last_config).1.writeback = on.into();
        }
        drop(session);
        told.or_else(|error| self.fail(error))
    }

    /// Shares `len` bytes of a file from `offset` on.
    pub(crate) fn register(
        self: &Arc<Self>,
        file: impl AsFd,
        offset: u64,
        len: u64,
    ) -> Result<Registered, Error> {
        self.unregister_unused()?;
        let mut session = self.session();
        if self.link.is_dead() {
            return Err(self.link.dead_error());
        }
        let max = session.regions_max;
        let region = session.regions.add(file, offset, len, max)?;
        match self.change_memory(session, |connection| connection.add(&region)) {
            Ok(()) => Ok(Registered(region)),
            Err(error) => {
                self.session().regions.remove(&region);
                Err(error)
            }
        }
    }

    /// Removes the regions that have no user any more.
    pub(crate) fn unregister_unused(self: &Arc<Self>) -> Result<(), Error> {
        if ring::is_delivering() {
            return Err(Error::InCallback);
        }
        loop {
            let mut session = self.session();
            let Some(region) = session.regions.unused() else { return Ok(()) };
            session.regions.remove(&region);
            self.change_memory(session, |connection| connection.remove(&region))?;
        }
    }

    /// Removes a region.
    ///
    /// # Errors
    /// [`Error::Busy`] if a buffer of it still exists.
    pub(crate) fn unregister(self: &Arc<Self>, region: Registered) -> Result<(), Error> {
        let known: Arc<Region> = region.0.clone();
        drop(region);
        // This reference and the one in the list of regions.
        if Arc::strong_count(&known) > 2 {
            return Err(Error::Busy);
        }
        drop(known);
        self.unregister_unused()
    }

    /// Tells the back-end about a change of memory. Without slots, sends the whole table while nothing is in
    /// flight.
    fn change_memory(
        self: &Arc<Self>,
        mut session: MutexGuard<'_, Session>,
        change: impl FnOnce(&mut Connection) -> Result<(), Error>,
    ) -> Result<(), Error> {
        // While the connection is lost, nothing is sent: the next connection gets all regions.
        let Session { connection: Some(connection), regions, .. } = &mut *session else { return Ok(()) };
        let changed = if connection.has_slots() {
            change(connection)
        } else {
            self.rings.iter().for_each(|ring| ring.set_held(true));
            let changed = self.wait_until_quiet().and_then(|()| connection.share(regions.all()));
            self.rings.iter().for_each(|ring| ring.set_held(false));
            changed
        };
        drop(session);
        changed.or_else(|error| self.fail(error))
    }

    /// Waits until nothing is in flight.
    ///
    /// # Errors
    /// This would wait for ever: the connection is lost, or the device broke a ring.
    fn wait_until_quiet(&self) -> Result<(), Error> {
        while self.rings.iter().any(|ring| ring.in_flight() > 0) {
            self.rings.iter().try_for_each(Ring::drain_for_all)?;
            if self.link.is_dead() {
                return Err(self.link.dead_error());
            }
            if self.link.is_recovering() || self.link.control.poll_events().closed {
                return Err(Error::Closed);
            }
            thread::yield_now();
        }
        Ok(())
    }

    /// Fails all requests on another thread, because this one holds a lock that is needed.
    pub(crate) fn fail_all_on_thread(self: &Arc<Self>) {
        let core = self.clone();
        // If no thread can be started, requests in flight stay until a thread polls and finds the disk dead.
        let spawned = thread::Builder::new().name("kickless-fail_all".into()).spawn(move || core.fail_all());
        drop(spawned);
    }

    /// Fails all requests, and closes the connection.
    pub(crate) fn fail_all(&self) {
        self.reactor_event.signal();
        self.rings.iter().for_each(Ring::kill);
        self.close_connection();
    }

    /// Returns the number of completed requests of all queues.
    pub(crate) fn completed(&self) -> u64 {
        self.rings.iter().map(Ring::completed).sum()
    }
}

/// Returns the number of queues to use.
#[expect(clippy::disallowed_methods, reason = "it reads /proc, and no sandbox of ours holds a driver")]
fn queue_count(options: &Options, connection: &Connection, features: Features, space: &Space) -> usize {
    let wanted = match options.queues {
        0 => thread::available_parallelism().map_or(1, usize::from),
        queues => queues.into(),
    };
    let several = BlkFeatures::from_bits_truncate(features.bits()).contains(BlkFeatures::MQ);
    let device = if several { usize::from(space.num_queues.get()) } else { 1 };
    wanted.min(device).min(connection.queues_max).clamp(1, RINGS_MAX.into())
}

/// Reads the configuration space. Fields that are new in version 1.2 of the standard or later are zero.
pub(crate) fn disk_config(connection: &mut Connection) -> Result<Space, Error> {
    // Old back-ends refuse a request for more fields than they know.
    connection.config(offset_of!(Space, max_secure_erase_sectors))
}

/// Sets `writeback` in the configuration space.
pub(crate) fn set_writeback(connection: &mut Connection, on: bool) -> Result<(), Error> {
    connection.set_config(CONFIG_WRITEBACK as u32, vec![on.into()])
}
