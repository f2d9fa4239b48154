//! A network card without a guest: a front-end, its memory and the driver's ends of its rings.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use kickless_memory::Gpa;
use kickless_spec::features::Features;
use kickless_spec::net::{Header, NetFeatures};
use kickless_testing::parse_test_frame;
use kickless_vhost_user::{Config, FrontendMessage as Message, Reply};

use crate::driver::memory::Ram;
use crate::driver::{Buffer, Queue};
use crate::frontend::machine::RAM_BASE;
use crate::frontend::{Frontend, LIMIT};

/// Length of each buffer: a frame of Ethernet with its header.
const BUFFER_LEN: usize = 2048;
/// Entries of each ring. Its buffers hold less than the longest frame of a driver that accepts GSO frames, so
/// all of them are credit.
const SIZE: u16 = 32;
/// Bytes of memory: the buffers of eight rings, and the rings.
const MEMORY: u64 = 1 << 20;
/// Length of the frames that are sent, with their header.
const SENT_LEN: u32 = 72;

/// How a card's rings are made.
#[derive(Clone, Copy, Debug, Default)]
pub struct CardShape {
    /// The number of pairs of rings.
    pub pairs: u16,
    /// RING_PACKED is negotiated.
    pub packed: bool,
}

impl CardShape {
    /// One pair of split rings, and one pair of packed rings.
    pub const BOTH: [CardShape; 2] =
        [CardShape { pairs: 1, packed: false }, CardShape { pairs: 1, packed: true }];

    /// Returns the features that such a driver wants.
    fn features(self) -> Features {
        let mut own = NetFeatures::MTU
            | NetFeatures::MRG_RXBUF
            | NetFeatures::CSUM
            | NetFeatures::GUEST_CSUM
            | NetFeatures::GUEST_TSO4;
        own.set(NetFeatures::MQ, self.pairs > 1);
        let mut features = Features::VERSION_1
            | Features::EVENT_IDX
            | Features::RING_RESET
            | Features::from_bits_retain(own.bits());
        features.set(Features::RING_PACKED, self.packed);
        features
    }
}

/// A network card, as its front-end and its driver have it.
pub struct Card {
    /// The connection.
    pub frontend: Frontend,
    /// The memory of rings and buffers.
    pub ram: Ram,
    /// The rings of all pairs, by number.
    pub rings: Vec<CardRing>,
}

/// A ring of a card, with a buffer for each entry.
pub struct CardRing {
    /// The driver's end.
    pub queue: Queue,
    buffers: Gpa,
    /// Buffers made available and taken back so far. A card completes them in order.
    made: usize,
    taken: usize,
}

impl Card {
    /// Connects, and starts all rings.
    ///
    /// # Errors
    /// The back-end refuses something.
    pub fn start(socket: &Path, shape: CardShape) -> Result<Card> {
        let mut card = Card::prepare(socket, shape)?;
        for ring in 0..card.rings.len() {
            card.resume(ring)?;
        }
        Ok(card)
    }

    /// Connects, negotiates and shares memory, and makes rings that the back-end does not know yet.
    ///
    /// # Errors
    /// The back-end refuses something.
    pub fn prepare(socket: &Path, shape: CardShape) -> Result<Card> {
        let mut frontend = Frontend::connect(socket)?;
        frontend.negotiate(shape.features())?;
        let mut ram = Ram::new(RAM_BASE, MEMORY)?;
        frontend.share(&[&ram])?;
        let features = frontend.features();
        let rings = (0..2 * shape.pairs).map(|index| CardRing::new(&mut ram, index, SIZE, features));
        let rings = rings.collect::<Result<_>>()?;
        Ok(Card { frontend, ram, rings })
    }

    /// Starts a ring where it stopped, or where it begins.
    ///
    /// # Errors
    /// The back-end refuses.
    pub fn resume(&mut self, ring: usize) -> Result<()> {
        self.frontend.start(&self.rings[ring].queue)
    }

    /// Stops a ring, and takes back the completed buffers. The ring must stop where its completions end.
    ///
    /// # Errors
    /// The back-end refuses, or the ring stops elsewhere.
    pub fn stop(&mut self, ring: usize) -> Result<()> {
        let ring = &mut self.rings[ring];
        let base = self.frontend.stop(&mut ring.queue)?;
        while ring.take(&self.ram)?.is_some() {}
        let completed = ring.position();
        ensure!(base == completed, "the ring stops at {base:#x}, and has completed up to {completed:#x}");
        Ok(())
    }

    /// Replaces a ring that has stopped by an empty one in other memory.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn replace(&mut self, ring: usize) -> Result<CardRing> {
        self.resize(ring, SIZE)
    }

    /// Replaces a ring that has stopped by an empty one with this number of entries, in other memory.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn resize(&mut self, ring: usize, size: u16) -> Result<CardRing> {
        let new = CardRing::new(&mut self.ram, u16::try_from(ring)?, size, self.frontend.features())?;
        Ok(std::mem::replace(&mut self.rings[ring], new))
    }

    /// Makes all free buffers of a receive ring available.
    ///
    /// # Errors
    /// The ring refuses one.
    pub fn fill(&mut self, ring: usize) -> Result<()> {
        self.rings[ring].fill(&self.ram)
    }

    /// Receives a test frame. Returns its number.
    ///
    /// # Errors
    /// No frame comes in time, or the frame is not a test frame.
    pub fn receive(&mut self, ring: usize) -> Result<u64> {
        let deadline = Instant::now() + LIMIT;
        let ring = &mut self.rings[ring];
        loop {
            if let Some(number) = ring.take(&self.ram)? {
                return Ok(number);
            }
            ring.queue.enable_calls();
            let is_ready = ring.queue.used_ready() > 0 || ring.queue.call().wait(deadline)?;
            ensure!(is_ready, "no frame comes");
            ring.queue.call().take();
        }
    }

    /// Connects to a back-end that was started anew, as QEMU does: the used index is all that it knows of a
    /// split ring. Starts all rings.
    ///
    /// # Errors
    /// The back-end refuses something.
    pub fn reconnect(&mut self, socket: &Path, shape: CardShape) -> Result<()> {
        self.frontend = Frontend::connect(socket)?;
        self.frontend.negotiate(shape.features())?;
        self.frontend.share(&[&self.ram])?;
        for ring in &mut self.rings {
            ring.queue.set_base(ring.queue.used_idx().into());
            self.frontend.start(&ring.queue)?;
            // A kick of an outage went to nobody.
            ring.queue.kick();
        }
        Ok(())
    }

    /// Makes all frames of a transmit ring begin with these bytes.
    ///
    /// # Errors
    /// They are longer than a frame.
    pub fn set_frames(&mut self, ring: usize, bytes: &[u8]) -> Result<()> {
        ensure!(size_of::<Header>() + bytes.len() <= SENT_LEN as usize, "frames are shorter");
        let ring = &self.rings[ring];
        for number in 0..usize::from(ring.queue.size()) {
            let at = Gpa(ring.buffer(number).0 + size_of::<Header>() as u64);
            self.ram.map().write(at, bytes)?;
        }
        Ok(())
    }

    /// Sends as many frames as a transmit ring has room for, and takes back those that are used. Returns the
    /// number of the latter.
    ///
    /// # Errors
    /// The device returns a chain that it did not have.
    pub fn send_more(&mut self, ring: usize) -> Result<usize> {
        let ring = &mut self.rings[ring];
        let before = ring.taken;
        while ring.queue.take_used()?.is_some() {
            ring.taken += 1;
        }
        while ring.made - ring.taken < usize::from(ring.queue.size()) {
            ring.offer(&self.ram, SENT_LEN, false)?;
        }
        ring.queue.flush();
        Ok(ring.taken - before)
    }

    /// Makes a frame of each free buffer of a transmit ring available, at the address that the device uses,
    /// which is `distance` from the guest's.
    ///
    /// # Errors
    /// The ring refuses one.
    pub fn send_all(&mut self, ring: usize, distance: u64) -> Result<()> {
        let Self { ram, rings, .. } = self;
        let ring = &mut rings[ring];
        while ring.made - ring.taken < usize::from(ring.queue.size()) {
            ring.offer_at(ram, Gpa(ring.buffer(ring.made).0 + distance), SENT_LEN, false)?;
        }
        ring.queue.flush();
        Ok(())
    }

    /// Sends the frames again that the card has used, and writes nothing but the indices and the available
    /// ring for that. So the card is the slower end. Returns their number.
    ///
    /// # Errors
    /// The device returns a chain that it did not have.
    pub fn send_again(&mut self, ring: usize) -> Result<u16> {
        let queue = &mut self.rings[ring].queue;
        let count = queue.offer_used()?;
        if count > 0 {
            queue.flush();
        }
        Ok(count)
    }

    /// Waits until the card has used all frames of a transmit ring.
    ///
    /// # Errors
    /// The card does not, or returns a chain that it did not have.
    pub fn wait_until_sent(&mut self, ring: usize) -> Result<()> {
        let ring = &mut self.rings[ring];
        let deadline = Instant::now() + LIMIT;
        while ring.taken < ring.made {
            ensure!(Instant::now() < deadline, "{} frames are not taken", ring.made - ring.taken);
            match ring.queue.take_used()? {
                Some(_) => ring.taken += 1,
                None => std::thread::yield_now(),
            }
        }
        Ok(())
    }

    /// Sends a frame, and waits until the card has taken it.
    ///
    /// # Errors
    /// The card does not take it.
    pub fn send(&mut self, ring: usize) -> Result<()> {
        let ring = &mut self.rings[ring];
        ring.offer(&self.ram, SENT_LEN, false)?;
        ring.queue.flush();
        ring.queue.wait_used(Instant::now() + LIMIT).context("a frame is not taken")?;
        ring.taken += 1;
        Ok(())
    }

    /// Sends frames until `is_over`. Returns the number of frames that the card has taken.
    ///
    /// # Errors
    /// The device returns a chain that it did not have.
    pub fn send_until(&mut self, ring: usize, is_over: impl Fn() -> bool) -> Result<u64> {
        let ring = &mut self.rings[ring];
        let mut sent = 0;
        loop {
            ring.offer(&self.ram, SENT_LEN, false)?;
            ring.queue.flush();
            while ring.queue.take_used()?.is_none() {
                if is_over() {
                    return Ok(sent);
                }
                std::thread::yield_now();
            }
            ring.taken += 1;
            sent += 1;
        }
    }

    /// Reads the MTU in the configuration space.
    ///
    /// # Errors
    /// The back-end has no MTU.
    pub fn mtu(&mut self) -> Result<u16> {
        let at = std::mem::offset_of!(kickless_spec::net::Config, mtu);
        let config = Config { offset: at as u32, data: vec![0; 2], ..Config::default() };
        match self.frontend.ask(&Message::GetConfig(config))? {
            Reply::Config(Some(Config { data, .. })) => Ok(u16::from_le_bytes(data[..].try_into()?)),
            other => bail!("GET_CONFIG is answered by {other:?}"),
        }
    }
}

impl CardRing {
    fn new(ram: &mut Ram, index: u16, size: u16, features: Features) -> Result<CardRing> {
        let queue = Queue::new(ram, index, size, features)?;
        let buffers = ram.take(usize::from(size) * BUFFER_LEN, 16)?;
        Ok(CardRing { queue, buffers, made: 0, taken: 0 })
    }

    /// Returns the index of the next element that the device completes; of a packed ring, its position.
    pub fn position(&self) -> u16 {
        self.queue.positions().map_or(self.queue.next_used(), |(_, used)| used.bits())
    }

    fn buffer(&self, number: usize) -> Gpa {
        Gpa(self.buffers.0 + (number % usize::from(self.queue.size()) * BUFFER_LEN) as u64)
    }

    fn offer(&mut self, ram: &Ram, len: u32, writable: bool) -> Result<()> {
        self.offer_at(ram, self.buffer(self.made), len, writable)
    }

    /// Makes the next buffer available, at the address that the device uses.
    fn offer_at(&mut self, ram: &Ram, addr: Gpa, len: u32, writable: bool) -> Result<()> {
        self.queue.submit(ram, &[Buffer { addr, len, writable }], None)?;
        self.made += 1;
        Ok(())
    }

    fn fill(&mut self, ram: &Ram) -> Result<()> {
        while self.made - self.taken < usize::from(self.queue.size()) {
            self.offer(ram, BUFFER_LEN as u32, true)?;
        }
        self.queue.flush();
        Ok(())
    }

    /// Takes the next test frame, if there is one. Returns its number.
    ///
    /// # Errors
    /// The device returned a chain that it did not have, or a frame that is not a test frame.
    pub fn take(&mut self, ram: &Ram) -> Result<Option<u64>> {
        let Some(used) = self.queue.take_used()? else { return Ok(None) };
        let mut bytes = vec![0; used.len as usize];
        ram.map().read(self.buffer(self.taken), &mut bytes)?;
        self.taken += 1;
        let payload = bytes.get(size_of::<Header>()..).context("a frame is shorter than its header")?;
        let (_, number) = parse_test_frame(payload).context("not a whole test frame")?;
        Ok(Some(number))
    }
}
