//! The core of a card: its connection, its memory, its control queue, and the reason of its death.
//!
//! Each pair of queues belongs to one [`QueuePair`](crate::QueuePair), which needs no lock. So another thread
//! never touches the rings of a pair. When the connection was replaced, the core raises its *generation*. A
//! pair compares the generation at each call, and starts its rings on the new connection itself. The death of
//! the card raises the generation too.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use kickless_spec::features::Features;
use kickless_spec::net::{Config, MAC_LEN, NetFeatures, PAIRS_MAX};
use kickless_spec::vhost_user::{ProtocolFeatures as Protocol, RINGS_MAX};
use kickless_sync::lock;

use crate::card::control_queue::{self, ControlQueue};
use crate::card::features;
use crate::card::options::CardOptions;
use crate::card::rings::PairLayout;
use crate::choice::Choice;
use crate::connection::{Connection, RingSetup, Wishes, deadline_after};
use crate::error::Error;
use crate::event::{Event, Kicker};
use crate::link::Link;
use crate::memory::{self, Region, Regions};
use crate::reconnect::Reconnect;

/// The largest number of pairs, which the control queue follows.
const QUEUE_PAIRS_MAX: u16 = (RINGS_MAX - 1) / 2;

/// The state that all handles of a card share.
pub(crate) struct CardCore {
    pub(crate) options: CardOptions,
    pub(crate) link: Link,
    pub(crate) features: Features,
    pub(crate) kicker: Arc<Kicker>,
    pub(crate) region: Arc<Region>,
    regions: Regions,
    pub(crate) layouts: Box<[PairLayout]>,
    session: Mutex<Session>,
    /// Locked before the session.
    control_queue: Option<Mutex<ControlQueue>>,
    /// The number of the control queue.
    control_index: Option<u8>,
    /// The number of the connection. It also changes when the card dies.
    generation: AtomicU64,
    /// For each pair, an event that wakes its owner after a change of the generation.
    wakes: Box<[Event]>,
}

/// The connection, and the state that the back-end knows through it.
struct Session {
    /// The connection, or `None` while it is lost.
    connection: Option<Connection>,
    config: Config,
    /// The number of changes when the configuration space was read.
    changes_seen: u64,
    /// The number of pairs that the card was told to use, to tell it again after a reconnection.
    pairs: Option<u16>,
    /// The beginning of the outages that follow one another without [`CONNECTION_TIME_MIN`] between them, and
    /// the time at which the present connection was made.
    outage: Option<(Instant, Instant)>,
}

/// The time for which a connection must last. A shorter one does not extend the limit for reconnections.
const CONNECTION_TIME_MIN: Duration = Duration::from_secs(1);

/// Calls `with` with the wishes of these options for a back-end.
fn with_wishes<R>(options: &CardOptions, with: impl FnOnce(Wishes<'_>) -> R) -> R {
    with(Wishes {
        socket: &options.socket,
        reply_timeout: options.reply_timeout,
        packed: options.packed,
        event_idx: options.event_idx,
        indirect: options.indirect,
        in_order: options.in_order,
        protocol: Protocol::MTU,
        needs_config: options.control == Choice::On,
        of_config: Features::from_bits_retain(features::OF_CONFIG.bits()),
        device_features: &|offered| features::choose(options, offered),
    })
}

/// Reads the configuration space, if there is one: the fields that all back-ends have.
fn read_config(connection: &mut Connection) -> Result<Config, Error> {
    match connection.has(Protocol::CONFIG) {
        true => connection.config(offset_of!(Config, speed)),
        false => Ok(Config::default()),
    }
}

/// Returns the number of pairs that the back-end has.
fn pairs_of(connection: &Connection, config: &Config) -> Result<u16, Error> {
    if !features::of_card(connection.features).contains(NetFeatures::MQ) {
        return Ok(1);
    }
    if !connection.has(Protocol::CONFIG) {
        // Back-ends of cards count pairs here (as QEMU expects), or rings if they have a control queue to
        // count. The latter have a configuration space.
        return Ok(u16::try_from(connection.queues_max).unwrap_or(u16::MAX));
    }
    let pairs = config.max_virtqueue_pairs.get();
    match (1..=PAIRS_MAX).contains(&pairs) {
        true => Ok(pairs),
        false => Err(Error::ConfigField { field: "max_virtqueue_pairs", value: pairs.into() }),
    }
}

/// Returns the MTU that the configuration space offers.
fn offered_mtu(features: Features, config: &Config) -> Option<u16> {
    features::of_card(features).contains(NetFeatures::MTU).then_some(config.mtu.get())
}

impl CardCore {
    /// Connects, and starts the control queue. The pairs are not started yet.
    pub(crate) fn open(options: CardOptions) -> Result<Arc<Self>, Error> {
        let deadline = deadline_after(options.connect_timeout);
        let mut connection = with_wishes(&options, |wishes| Connection::open(wishes, deadline))?;
        let features = connection.features;
        let net = features::of_card(features);
        let config = read_config(&mut connection)?;
        let pairs_max = pairs_of(&connection, &config)?;
        #[expect(
            clippy::disallowed_methods,
            reason = "it reads /proc, and no sandbox of ours holds a driver"
        )]
        let wanted = match options.pairs {
            0 => thread::available_parallelism()
                .map_or(1, |cpus| u16::try_from(cpus.get()).unwrap_or(u16::MAX)),
            pairs => pairs,
        };
        let pairs = wanted.min(pairs_max).min(QUEUE_PAIRS_MAX);
        let mtu = options.mtu_of(offered_mtu(features, &config));
        let buffer_len = features::buffer_len(net, options.buffer_len, mtu);
        let mut end = memory::FIRST;
        // The control queue follows the last pair that the back-end has.
        let control_index = u8::try_from(u32::from(pairs_max) * 2);
        let control_layout = match net.contains(NetFeatures::CTRL_VQ) {
            true => {
                let layout = control_queue::layout(end, features)?;
                end = layout.end();
                let too_many =
                    |_| Error::ConfigField { field: "max_virtqueue_pairs", value: pairs_max.into() };
                Some((control_index.map_err(too_many)?, layout))
            }
            false => None,
        };
        let mut layouts = Vec::with_capacity(pairs.into());
        for _ in 0..pairs {
            let layout = PairLayout::new(end, options.queue_size, features, buffer_len)?;
            end = layout.end();
            layouts.push(layout);
        }
        let regions = Regions::new(end - memory::FIRST, options.huge_pages)?;
        let region = regions.all().first().cloned().ok_or(Error::NoMemory { len: 0 })?;
        let kicker = Arc::new(Kicker::new());
        let control_index = control_layout.as_ref().map(|(index, _)| *index);
        let control_queue = control_layout
            .map(|(index, layout)| ControlQueue::new(index, layout, &region, kicker.clone()))
            .transpose()?;
        let core = Self {
            link: Link::new(options.reconnect_limit)?,
            features,
            kicker,
            region,
            regions,
            layouts: layouts.into(),
            session: Mutex::new(Session {
                connection: None,
                config,
                changes_seen: 0,
                pairs: None,
                outage: None,
            }),
            control_queue: control_queue.map(Mutex::new),
            control_index,
            generation: AtomicU64::new(0),
            wakes: (0..pairs).map(|_| Event::new()).collect::<Result<_, _>>()?,
            options,
        };
        core.set_up(connection)?;
        Ok(Arc::new(core))
    }

    /// Makes a negotiated connection the present one: shares memory, and starts the control queue.
    fn set_up(&self, mut connection: Connection) -> Result<(), Error> {
        if let Some(mtu) = self.options.mtu
            && connection.has(Protocol::MTU)
        {
            connection.set_mtu(mtu)?;
        }
        connection.share(self.regions.all())?;
        self.link.control.error.take();
        if let Some(control_queue) = &self.control_queue {
            let mut queue = lock(control_queue);
            queue.restart()?;
            let setup = queue.layout().setup();
            connection.start(queue.index, setup, &queue.kick, &queue.call, &self.link.control.error)?;
        }
        self.link.watch(&mut connection)?;
        self.session().connection = Some(connection);
        Ok(())
    }

    fn session(&self) -> MutexGuard<'_, Session> {
        lock(&self.session)
    }

    /// Returns the number of the present connection.
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        // Acquire. Partner: the release in `raise_generation`.
        self.generation.load(Ordering::Acquire)
    }

    fn raise_generation(&self) {
        self.generation.fetch_add(1, Ordering::Release);
        self.wakes.iter().for_each(Event::signal);
    }

    /// Returns the event that wakes the owner of a pair.
    pub(crate) fn wake(&self, pair: usize) -> &Event {
        &self.wakes[pair]
    }

    /// Starts the rings of a pair on the present connection. Returns `false` if the connection is lost.
    ///
    /// # Errors
    /// The back-end refuses.
    pub(crate) fn start_pair(
        self: &Arc<Self>,
        pair: usize,
        setups: [&RingSetup; 2],
        kicks: [&Event; 2],
        calls: [&Event; 2],
    ) -> Result<bool, Error> {
        let mut session = self.session();
        let Some(connection) = session.connection.as_mut() else { return Ok(false) };
        let started = (0..2).try_for_each(|ring| {
            // Lossless: there are at most 127 pairs.
            let index = (2 * pair + ring) as u8;
            connection.start(index, setups[ring], kicks[ring], calls[ring], &self.link.control.error)
        });
        drop(session);
        match started {
            Ok(()) => Ok(true),
            Err(error) if error.is_loss() => {
                self.lost(error);
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the configuration space. Reads it again if it has changed.
    pub(crate) fn config(self: &Arc<Self>) -> Result<Config, Error> {
        let mut session = self.session();
        let changes = self.link.changes();
        if session.changes_seen != changes
            && let Some(connection) = session.connection.as_mut()
        {
            match read_config(connection) {
                Ok(config) => (session.config, session.changes_seen) = (config, changes),
                Err(error) => {
                    drop(session);
                    self.fail(error)?;
                    return Ok(self.session().config);
                }
            }
        }
        Ok(session.config)
    }

    /// Returns the MTU.
    pub(crate) fn mtu(self: &Arc<Self>) -> Result<u16, Error> {
        Ok(self.options.mtu_of(offered_mtu(self.features, &self.config()?)))
    }

    /// Returns the card's address, if the back-end has told it.
    pub(crate) fn mac(self: &Arc<Self>) -> Result<Option<[u8; MAC_LEN]>, Error> {
        let config = self.config()?;
        Ok(features::of_card(self.features).contains(NetFeatures::MAC).then_some(config.mac))
    }

    /// Tells the card how many pairs to use.
    ///
    /// # Errors
    /// There is no control queue or no such command, or the back-end refuses.
    pub(crate) fn set_pairs(self: &Arc<Self>, pairs: u16) -> Result<(), Error> {
        let Some(control_queue) = &self.control_queue else {
            return Err(Error::NotOffered { what: "a control queue" });
        };
        if !features::of_card(self.features).contains(NetFeatures::MQ) {
            return Err(Error::NotOffered { what: "this command" });
        }
        let mut queue = lock(control_queue);
        if self.link.is_dead() {
            return Err(self.link.dead_error());
        }
        // The recovery makes the ring anew, and waits for this lock before it.
        let is_lost = || self.link.is_recovering();
        match queue.set_pairs(pairs, &self.link, self.options.reply_timeout, is_lost) {
            Ok(()) => {
                self.session().pairs = Some(pairs);
                Ok(())
            }
            Err(error @ (Error::CommandRefused | Error::CommandTimeout { .. } | Error::Dead(_))) => {
                Err(error)
            }
            Err(error) => {
                drop(queue);
                self.fail(error)?;
                Err(Error::Closed)
            }
        }
    }
}

impl Reconnect for CardCore {
    fn link(&self) -> &Link {
        &self.link
    }

    fn with_connection<R>(&self, with: impl FnOnce(&mut Option<Connection>) -> R) -> R {
        with(&mut self.session().connection)
    }

    fn queue_indices(&self) -> impl Iterator<Item = u8> {
        // Lossless: there are at most 127 pairs.
        (0..2 * self.layouts.len() as u8).chain(self.control_index)
    }

    fn wake_all(&self) {
        self.raise_generation();
    }

    fn release(self: &Arc<Self>) {
        self.raise_generation();
        self.close_connection();
    }

    fn begin_recovery(&self) -> Instant {
        let mut session = self.session();
        let now = Instant::now();
        let since = match session.outage {
            Some((since, connected)) if connected.elapsed() < CONNECTION_TIME_MIN => since,
            _ => now,
        };
        session.outage = Some((since, now));
        since
    }

    fn reconnect(self: &Arc<Self>, deadline: Instant) -> Result<(), Error> {
        // An earlier attempt may have failed after its connection was set up.
        self.close_connection();
        let deadline = deadline.max(deadline_after(CONNECTION_TIME_MIN));
        let mut connection =
            with_wishes(&self.options, |wishes| Connection::open_again(wishes, deadline, self.features))?;
        let changes = self.link.changes();
        let config = read_config(&mut connection)?;
        let old = self.session().config;
        let pairs = pairs_of(&connection, &config)?;
        let control_moved =
            self.control_queue.is_some() && config.max_virtqueue_pairs != old.max_virtqueue_pairs;
        if usize::from(pairs) < self.layouts.len() || control_moved {
            return Err(Error::Incompatible { what: "another number of queue pairs" });
        }
        let mtu = |config| self.options.mtu_of(offered_mtu(self.features, config));
        let mergeable = features::of_card(self.features).contains(NetFeatures::MRG_RXBUF);
        if mtu(&config) > mtu(&old) && !mergeable {
            return Err(Error::Incompatible { what: "a larger MTU" });
        }
        connection.clear_deadline();
        self.set_up(connection)?;
        let pairs = {
            let mut session = self.session();
            (session.config, session.changes_seen) = (config, changes);
            session.outage = session.outage.map(|(since, _)| (since, Instant::now()));
            session.pairs
        };
        if let (Some(control_queue), Some(pairs)) = (&self.control_queue, pairs) {
            lock(control_queue).set_pairs(pairs, &self.link, self.options.reply_timeout, || false)?;
        }
        Ok(())
    }
}
