//! The neighbours of an attacker: a disk and a pair of cards under load, whose data is verified.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use kickless_driver::{Card, CardOptions, Completion, Disk, Options, Outgoing, Queue, QueuePair, Request};

use crate::frontend::LIMIT;
use crate::meter::host::{Role, take_role};

/// Requests in flight of the disk.
const DEPTH: usize = 16;
/// Bytes of a request.
const BLOCK: usize = 4096;
/// Bytes of the disk that the victim uses.
pub const DISK_LEN: u64 = (DEPTH * BLOCK) as u64;
/// The most frames on their way.
const WINDOW: u64 = 64;
/// Frames that the receiver answers by one of its own.
const FRAMES_PER_ANSWER: u64 = 16;
/// The time after which another frame follows a full window.
const PAUSE: Duration = Duration::from_millis(2);
/// The type of the frames. It is for local experiments.
const ETHERTYPE: [u8; 2] = [0x88, 0xb5];

/// The hardware address of the card that sends.
pub const SENDER: [u8; 6] = [2, 0, 0, 0, 7, 1];
/// The hardware address of the card that receives.
pub const RECEIVER: [u8; 6] = [2, 0, 0, 0, 7, 2];

/// Counts what a victim has done.
#[derive(Debug, Default)]
pub struct Load {
    done: AtomicU64,
    worst_ns: AtomicU64,
    lost: AtomicU64,
}

impl Load {
    fn count(&self, since: Instant, now: Instant) {
        self.done.fetch_add(1, Ordering::Relaxed);
        let took = u64::try_from(now.saturating_duration_since(since).as_nanos()).unwrap_or(u64::MAX);
        if took > self.worst_ns.load(Ordering::Relaxed) {
            self.worst_ns.store(took, Ordering::Relaxed);
        }
    }

    /// Returns the number of requests or frames so far.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Returns the number of frames that were lost so far.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Returns the longest time of a request or frame since the last call.
    pub fn take_worst(&self) -> Duration {
        Duration::from_nanos(self.worst_ns.swap(0, Ordering::Relaxed))
    }
}

/// The sockets of the devices of the victims.
pub struct Sockets {
    /// The disk. It writes blocks, reads them back and compares them.
    pub disk: Option<PathBuf>,
    /// The card that sends numbered frames, and the one that checks each byte of them.
    pub cards: Option<[PathBuf; 2]>,
}

/// Devices under load, which one thread drives. Dropping it ends the load.
pub struct Victims {
    /// The load of the disk and that of the cards, as far as there are any.
    pub loads: Vec<(&'static str, Arc<Load>)>,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Victims {
    /// Starts the load. A thread that is measured has a processor, and never sleeps.
    pub fn start(sockets: Sockets, is_measured: bool) -> Victims {
        let mut loads: Vec<(_, Arc<Load>)> = Vec::new();
        loads.extend(sockets.disk.is_some().then(|| ("disk", Arc::default())));
        loads.extend(sockets.cards.is_some().then(|| ("cards", Arc::default())));
        let (shared, is_over) = (loads.clone(), Arc::new(AtomicBool::new(false)));
        let thread = thread::spawn({
            let is_over = is_over.clone();
            move || {
                if is_measured {
                    take_role(Role::Victim);
                }
                drive(&sockets, &shared, is_measured, &is_over)
            }
        });
        Victims { loads, is_over, thread: Some(thread) }
    }

    /// Waits until each victim has done more than it had in flight, so that a request of before counts.
    ///
    /// # Errors
    /// It stands still, or has failed.
    pub fn go_on(&mut self) -> Result<()> {
        let start = Instant::now();
        for (name, load) in self.loads.clone() {
            let before = load.done();
            while load.done() < before + 2 * WINDOW {
                if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
                    self.join()?;
                    return Err(anyhow!("the victims have ended"));
                }
                ensure!(start.elapsed() < LIMIT, "the victim's {name} stands still");
                thread::sleep(Duration::from_micros(200));
            }
        }
        Ok(())
    }

    fn join(&mut self) -> Result<()> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        thread.join().map_err(|_| anyhow!("the thread of the victims panicked"))?
    }

    /// Ends the load, and returns its error.
    ///
    /// # Errors
    /// A request failed, or data was wrong.
    pub fn stop(mut self) -> Result<()> {
        self.is_over.store(true, Ordering::Relaxed);
        self.join()
    }
}

impl Drop for Victims {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let _ = self.join();
    }
}

fn drive(
    sockets: &Sockets,
    loads: &[(&'static str, Arc<Load>)],
    is_measured: bool,
    is_over: &AtomicBool,
) -> Result<()> {
    let mut disk = sockets.disk.as_deref().map(DiskLoop::start).transpose()?;
    let cards = sockets.cards.as_ref().map(|[sender, receiver]| CardLoop::start(sender, receiver));
    let mut cards = cards.transpose()?;
    while !is_over.load(Ordering::Relaxed) {
        let mut count = 0;
        if let (Some(disk), Some((_, load))) = (&mut disk, loads.first()) {
            count += disk.turn(load).context("the victim's disk")?;
        }
        if let (Some(cards), Some((_, load))) = (&mut cards, loads.last()) {
            count += cards.turn(load).context("the victim's cards")?;
        }
        if count == 0 && !is_measured {
            // Other tests need the processor.
            thread::sleep(Duration::from_micros(50));
        }
    }
    Ok(())
}

/// Connects to a disk.
///
/// # Errors
/// Nothing listens in time, or the back-end refuses a message.
pub fn connect_disk(socket: &Path) -> Result<Disk> {
    let (connect_timeout, reconnect_limit) = (LIMIT, Duration::ZERO);
    let options = Options { connect_timeout, reconnect_limit, reactor: false, ..Options::new(socket) };
    Ok(Disk::connect(Options { queues: 1, reply_timeout: LIMIT, buffer_memory: 2 << 20, ..options })?)
}

/// Connects to a card.
///
/// # Errors
/// Nothing listens in time, or the back-end refuses a message.
pub fn connect_card(socket: &Path) -> Result<(Card, QueuePair)> {
    let (connect_timeout, reconnect_limit) = (LIMIT, Duration::ZERO);
    let options = CardOptions { connect_timeout, reconnect_limit, ..CardOptions::new(socket) };
    let card = Card::connect(CardOptions { reply_timeout: LIMIT, ..options })?;
    let pair = card.pair(0).context("the pair is taken")?;
    Ok((card, pair))
}

/// A block of the disk, and the request for it that is in flight.
#[derive(Clone, Copy)]
struct Slot {
    version: u64,
    is_write: bool,
    since: Instant,
}

/// The load of a disk.
struct DiskLoop {
    _disk: Disk,
    queue: Queue,
    slots: [Slot; DEPTH],
    batch: Vec<Request>,
    done: Vec<Completion>,
}

impl DiskLoop {
    fn start(socket: &Path) -> Result<DiskLoop> {
        let disk = connect_disk(socket)?;
        let mut batch = Vec::with_capacity(DEPTH);
        let mut block = [0; BLOCK];
        for slot in 0..DEPTH {
            let mut buffer = disk.buffer(BLOCK)?;
            fill(&mut block, slot, 0);
            buffer.write(0, &block);
            batch.push(Request::write((slot * BLOCK) as u64, buffer).token(slot as u64));
        }
        let queue = disk.queue(0);
        queue.submit_or_wait(&mut batch)?;
        let slots = [Slot { version: 0, is_write: true, since: Instant::now() }; DEPTH];
        Ok(DiskLoop { _disk: disk, queue, slots, batch, done: Vec::with_capacity(DEPTH) })
    }

    /// Takes what is done, and submits as many requests. Returns their number.
    fn turn(&mut self, load: &Load) -> Result<usize> {
        let done = &mut self.done;
        let count = self.queue.poll(DEPTH, |completion| done.push(completion))?;
        if count == 0 {
            return Ok(0);
        }
        let (mut block, mut found) = ([0; BLOCK], [0; BLOCK]);
        let now = Instant::now();
        for completion in self.done.drain(..) {
            let number = completion.token as usize;
            let slot = &mut self.slots[number];
            completion.result?;
            load.count(slot.since, now);
            let mut buffer = completion.data.into_buffer().context("a request lost its buffer")?;
            if !slot.is_write {
                fill(&mut block, number, slot.version);
                buffer.read(0, &mut found);
                ensure!(found == block, "block {number} of version {} has other bytes", slot.version);
                slot.version += 1;
                fill(&mut block, number, slot.version);
                buffer.write(0, &block);
            }
            slot.is_write = !slot.is_write;
            let at = (number * BLOCK) as u64;
            let request = match slot.is_write {
                true => Request::write(at, buffer),
                false => Request::read(at, buffer),
            };
            slot.since = now;
            self.batch.push(request.token(number as u64));
        }
        self.queue.submit_or_wait(&mut self.batch)?;
        Ok(count)
    }
}

/// Fills a block with bytes that follow from its number and its version.
fn fill(block: &mut [u8; BLOCK], number: usize, version: u64) {
    let seed = (version << 8 | number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let (words, _) = block.as_chunks_mut::<8>();
    for (at, word) in words.iter_mut().enumerate() {
        *word = seed.wrapping_add(at as u64).to_le_bytes();
    }
}

/// Writes the frame with this number to the beginning of `bytes`. Returns its length.
fn write_frame(bytes: &mut [u8; 1514], number: u64) -> usize {
    let len = 64 + (number.wrapping_mul(97) % 1400) as usize;
    bytes[..6].copy_from_slice(&RECEIVER);
    bytes[6..12].copy_from_slice(&SENDER);
    bytes[12..14].copy_from_slice(&ETHERTYPE);
    bytes[14..22].copy_from_slice(&number.to_le_bytes());
    bytes[22..len].fill(number as u8);
    len
}

/// The load of two cards.
struct CardLoop {
    _cards: [Card; 2],
    from: QueuePair,
    to: QueuePair,
    /// Numbers begin at 1. `next` was not sent yet, and `last` has come.
    next: u64,
    last: u64,
    times: [Instant; 1024],
    last_sent: Instant,
    unanswered: u64,
}

impl CardLoop {
    fn start(sender: &Path, receiver: &Path) -> Result<CardLoop> {
        let ((sending, from), (receiving, to)) = (connect_card(sender)?, connect_card(receiver)?);
        let now = Instant::now();
        let (cards, times) = ([sending, receiving], [now; 1024]);
        Ok(CardLoop { _cards: cards, from, to, next: 1, last: 0, times, last_sent: now, unanswered: 0 })
    }

    /// Sends what the window has room for, and takes what comes. Returns the number of frames.
    fn turn(&mut self, load: &Load) -> Result<usize> {
        let mut frame = [0; 1514];
        let now = Instant::now();
        // Each frame of the window may be lost, so another one follows after a while.
        let is_probe = self.next - self.last > WINDOW && now - self.last_sent > PAUSE;
        while self.next - self.last <= WINDOW || is_probe {
            let len = write_frame(&mut frame, self.next);
            if self.from.send(&[Outgoing::from(&frame[..len])])? == 0 {
                break;
            }
            self.times[(self.next % 1024) as usize] = now;
            (self.next, self.last_sent) = (self.next + 1, now);
            if is_probe {
                break;
            }
        }
        self.from.receive(64, |_| {})?;
        let Self { to, next, last, times, unanswered, .. } = self;
        let (mut verdict, mut found, before) = (Ok(()), [0; 1514], *last);
        let count = to.receive(64, |received| {
            let len = received.read(0, &mut found);
            if len < 22 || found[6..12] != SENDER || received.len() > found.len() {
                // A frame of another card.
                return;
            }
            let mut number = [0; 8];
            number.copy_from_slice(&found[14..22]);
            let number = u64::from_le_bytes(number);
            if number <= *last || number >= *next {
                verdict = Err(anyhow!("frame {number} comes after {last} and before {next}"));
                return;
            }
            let wanted = write_frame(&mut frame, number);
            if len != wanted || found[..len] != frame[..wanted] {
                verdict = Err(anyhow!("frame {number} was changed"));
            }
            load.lost.fetch_add(number - *last - 1, Ordering::Relaxed);
            load.count(times[(number % 1024) as usize], Instant::now());
            (*last, *unanswered) = (number, *unanswered + 1);
        })?;
        verdict?;
        if self.unanswered >= FRAMES_PER_ANSWER && self.last > before {
            self.unanswered = 0;
            let answer = [&SENDER[..], &RECEIVER, &ETHERTYPE, &[0; 50]].concat();
            self.to.send(&[Outgoing::from(&answer[..])])?;
        }
        Ok(count)
    }
}
