//! The disk, and its blocking interface.

use std::cell::Cell;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kickless_spec::blk::{BlkFeatures, Config, ID_LEN};
use kickless_spec::features::Features;

use crate::buffer::{Buffer, Registered};
use crate::core::Core;
use crate::error::{Error, Invalid};
use crate::handle::Handle;
use crate::options::Options;
use crate::queue::Queue;
use crate::reconnect::Reconnect;
use crate::request::{Kind, Notify, Request};
use crate::ring::{Counters, is_delivering};
use crate::waiter::Waiter;

/// The largest number of bytes of one request of a copying transfer. Long transfers overlap requests and
/// copies.
const CHUNK: u64 = 256 << 10;
/// The number of such requests in flight for one caller.
const CHUNKS_AT_ONCE: usize = 8;
/// The longest wait for shared memory that other callers use.
const MEMORY_WAIT: Duration = Duration::from_secs(30);

/// A virtio-blk disk behind a vhost-user back-end.
///
/// Clones share the disk. It is closed when the last clone, queue and future are dropped. Offsets and lengths
/// are in bytes and multiples of 512. Each thread has a queue of its own, as far as there are enough.
#[derive(Clone)]
pub struct Disk(pub(crate) Arc<Handle>);

/// The waiters of the chunks in flight, oldest first. They are in an array, so that a transfer allocates
/// nothing.
#[derive(Default)]
struct PendingChunks {
    free_waiters: [Option<Arc<Waiter>>; CHUNKS_AT_ONCE],
    first: usize,
    len: usize,
}

impl PendingChunks {
    fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn is_full(&self) -> bool {
        self.len == CHUNKS_AT_ONCE
    }

    /// Appends a waiter. There must be room.
    fn push_back(&mut self, waiter: Arc<Waiter>) {
        if let Some(place) = self.free_waiters.get_mut((self.first + self.len) % CHUNKS_AT_ONCE) {
            *place = Some(waiter);
            self.len += 1;
        }
    }

    fn pop_front(&mut self) -> Option<Arc<Waiter>> {
        let waiter = self.free_waiters.get_mut(self.first)?.take()?;
        self.first = (self.first + 1) % CHUNKS_AT_ONCE;
        self.len -= 1;
        Some(waiter)
    }
}

thread_local! {
    /// The number of the thread, which determines its queue.
    static THREAD: Cell<Option<usize>> = const { Cell::new(None) };
}
static THREADS: AtomicUsize = AtomicUsize::new(0);

fn thread_number() -> usize {
    THREAD.get().unwrap_or_else(|| {
        let number = THREADS.fetch_add(1, Ordering::Relaxed);
        THREAD.set(Some(number));
        number
    })
}

impl Disk {
    /// Connects to a back-end and starts its queues.
    ///
    /// # Errors
    /// No back-end listens, it lacks a required feature or breaks the protocol, or the kernel refuses memory.
    pub fn connect(options: Options) -> Result<Self, Error> {
        Ok(Self(Arc::new(Handle { core: Core::open(options)? })))
    }

    #[inline]
    fn core(&self) -> &Arc<Core> {
        &self.0.core
    }

    /// Returns the number of queues.
    pub fn queues(&self) -> usize {
        self.core().rings.len()
    }

    /// Returns a queue by its number, modulo [`Disk::queues`].
    pub fn queue(&self, index: usize) -> Queue {
        Queue { handle: self.0.clone(), index: index % self.queues() }
    }

    /// Returns the queue of the calling thread. Each thread has its own, as far as there are enough.
    pub fn queue_of_thread(&self) -> Queue {
        self.queue(thread_number())
    }

    #[inline]
    pub(crate) fn index_of_thread(&self) -> usize {
        thread_number() % self.queues()
    }

    /// Returns the size of the disk in bytes. Asks the back-end if it has reported a change.
    ///
    /// # Errors
    /// The disk is dead.
    pub fn size(&self) -> Result<u64, Error> {
        self.core().latest_limits().map(|(limits, _)| limits.size)
    }

    /// Returns the size of a logical block in bytes. Transfers of whole blocks are fastest, but not required.
    ///
    /// # Errors
    /// As [`Disk::size`].
    pub fn block_size(&self) -> Result<u32, Error> {
        self.core().latest_limits().map(|(limits, _)| limits.block_size)
    }

    /// Returns the largest length in bytes of a read or write with one piece of memory.
    ///
    /// # Errors
    /// As [`Disk::size`].
    pub fn len_max(&self) -> Result<u64, Error> {
        self.core().latest_limits().map(|(limits, _)| limits.len_max())
    }

    /// Returns the configuration space. Asks the back-end if it has reported a change.
    ///
    /// # Errors
    /// As [`Disk::size`].
    pub fn config(&self) -> Result<Config, Error> {
        self.core().latest_limits().map(|(_, config)| config)
    }

    /// Returns the negotiated features of the transport. The bits of [`Disk::blk_features`] are set in the
    /// same value.
    pub fn features(&self) -> Features {
        self.core().features
    }

    /// Returns the negotiated features of the disk.
    pub fn blk_features(&self) -> BlkFeatures {
        BlkFeatures::from_bits_truncate(self.core().features.bits())
    }

    /// Returns how often the back-end has reported a change of its configuration space.
    ///
    /// Threads that wait, poll or ask for the size see these reports. A report makes an
    /// [`Events`](crate::Events) readable.
    pub fn config_changes(&self) -> u64 {
        self.core().link.changes()
    }

    /// Turns the device's write cache on or off. Without the cache, a write is durable when it completes.
    ///
    /// # Errors
    /// The back-end does not offer this, or refuses.
    pub fn set_writeback(&self, on: bool) -> Result<(), Error> {
        self.core().set_writeback(on)
    }

    /// Returns the reason of the death, if the disk is dead.
    pub fn failure(&self) -> Option<Arc<Error>> {
        self.core().link.failure()
    }

    /// Returns the counters of all queues together.
    pub fn counters(&self) -> Counters {
        self.core().rings.iter().fold(Counters::default(), |sum, ring| {
            let counters = ring.counters();
            Counters {
                submitted: sum.submitted + counters.submitted,
                completed: sum.completed + counters.completed,
                kicks: sum.kicks + counters.kicks,
                calls: sum.calls.wrapping_add(counters.calls),
            }
        })
    }

    /// Allocates shared memory for requests. It is zeroed only before its first use.
    ///
    /// # Errors
    /// No free piece of that length is left.
    pub fn buffer(&self, len: usize) -> Result<Buffer, Error> {
        let short = Error::NoMemory { len };
        let Ok(len) = u32::try_from(len) else { return Err(short) };
        if len == 0 {
            return Err(Invalid::Empty.into());
        }
        Buffer::take(&self.core().own_memory, len).ok_or(short)
    }

    /// Shares memory of the caller with the back-end: `len` bytes of a file from `offset` on.
    ///
    /// The file is a memfd or any file that can be mapped; `offset` and `len` are multiples of a page. If the
    /// back-end can only replace the whole table of regions, this waits until nothing is in flight.
    ///
    /// # Errors
    /// The file is too short or cannot be mapped, or the back-end accepts no more regions.
    pub fn register(&self, file: impl AsFd, offset: u64, len: u64) -> Result<Registered, Error> {
        self.core().register(file, offset, len)
    }

    /// Stops sharing that memory.
    ///
    /// # Errors
    /// [`Error::Busy`] if buffers of it still exist, in flight or not. Then the next registration removes it.
    pub fn unregister(&self, memory: Registered) -> Result<(), Error> {
        self.core().unregister(memory)
    }

    /// Closes the disk for all its users. Refuses new requests and waits for those in flight.
    ///
    /// The wait ends early if the back-end completes nothing within [`Options::reply_timeout`].
    pub fn close(&self) {
        if is_delivering() {
            return self.core().die(Error::Unplugged);
        }
        self.core().close();
    }

    /// Fails all requests in flight and all later ones at once, as if the disk had been pulled out.
    pub fn unplug(&self) {
        self.core().die(Error::Unplugged);
    }

    /// Runs one request. Waits for room in the queue, and then until the request is done. Returns its memory.
    ///
    /// # Errors
    /// The request is invalid or failed, or the disk is dead.
    pub fn run(&self, request: Request) -> Result<crate::Data, Error> {
        let ring = &self.core().rings[self.index_of_thread()];
        let (result, data) = self.core().run(ring, request)?;
        self.check_result(result).map(|()| data)
    }

    pub(crate) fn check_result(&self, result: Result<(), crate::Failure>) -> Result<(), Error> {
        match result {
            Ok(()) => Ok(()),
            Err(crate::Failure::Dead) => Err(self.core().link.dead_error()),
            Err(failure) => Err(failure.into()),
        }
    }

    /// Reads all of `into` from `offset` on, by copies through shared memory.
    ///
    /// # Errors
    /// The range is invalid, a read failed, or the disk is dead. After a failed read, the content of `into`
    /// is unknown.
    pub fn read_at(&self, into: &mut [u8], offset: u64) -> Result<(), Error> {
        let mut rest = into;
        self.in_chunks(
            Kind::Read,
            offset,
            rest.len() as u64,
            |_, _| {},
            |buffer| {
                let (now, later) = std::mem::take(&mut rest).split_at_mut(buffer.len());
                buffer.read(0, now);
                rest = later;
            },
        )
    }

    /// Writes all of `from` at `offset`, by copies through shared memory.
    ///
    /// # Errors
    /// The range is invalid, a write failed, or the disk is dead. After a failed write, the content of the
    /// range is unknown.
    pub fn write_at(&self, from: &[u8], offset: u64) -> Result<(), Error> {
        self.in_chunks(
            Kind::Write,
            offset,
            from.len() as u64,
            |at, buffer| {
                let at = usize::try_from(at).unwrap_or(usize::MAX);
                let part = from.get(at..).and_then(|rest| rest.get(..buffer.len()));
                buffer.write(0, part.unwrap_or_default());
            },
            |_| {},
        )
    }

    /// Splits a read or write into chunks, several in flight at once. `fill` prepares the buffer of a chunk
    /// at its offset. `empty` gets completed chunks in order.
    fn in_chunks(
        &self,
        kind: Kind,
        offset: u64,
        len: u64,
        fill: impl Fn(u64, &mut Buffer),
        mut empty: impl FnMut(&Buffer),
    ) -> Result<(), Error> {
        if len == 0 {
            return Ok(());
        }
        let core = self.core();
        let ring = &core.rings[self.index_of_thread()];
        if is_delivering() {
            return Err(Error::InCallback);
        }
        let (limits, _) = core.limits()?;
        // Checks the whole range first, so that an invalid range has no effect.
        limits.check_whole(kind, offset, len)?;
        let chunk_max = limits.chunk_max(CHUNK);
        let mut waiting = PendingChunks::default();
        let mut ended = Ok(());
        let (mut sent, mut done) = (0, 0);
        while done < len {
            if ended.is_ok() && sent < len && !waiting.is_full() {
                let chunk = (len - sent).min(chunk_max);
                // Other callers free their memory without our help. The memory of our own chunks becomes free
                // only if this loop goes on.
                let Some(mut buffer) = self.buffer_for(chunk, waiting.is_empty()) else {
                    if waiting.is_empty() {
                        return Err(Error::NoMemory { len: chunk as usize });
                    }
                    (ended, sent) = self.finish(&mut waiting, &mut done, &mut empty, ended, sent);
                    continue;
                };
                fill(sent, &mut buffer);
                let mut request = match kind {
                    Kind::Read => Request::read(offset.saturating_add(sent), buffer),
                    _ => Request::write(offset.saturating_add(sent), buffer),
                };
                let waiter = ring.free_waiters.take();
                request.notify = Notify::Waiter(waiter.clone());
                match core.submit_or_wait(ring, &mut request) {
                    Ok(()) => {
                        waiting.push_back(waiter);
                        sent += chunk;
                    }
                    Err(error) => ended = Err(error),
                }
            } else if waiting.is_empty() {
                break;
            } else {
                (ended, sent) = self.finish(&mut waiting, &mut done, &mut empty, ended, sent);
            }
        }
        ended
    }

    /// Waits for the oldest chunk.
    fn finish(
        &self,
        waiting: &mut PendingChunks,
        done: &mut u64,
        empty: &mut impl FnMut(&Buffer),
        ended: Result<(), Error>,
        sent: u64,
    ) -> (Result<(), Error>, u64) {
        let Some(waiter) = waiting.pop_front() else { return (ended, sent) };
        let (result, data) = self.core().wait_for_outcome(&self.core().rings[self.index_of_thread()], waiter);
        *done += data.len();
        let judged = self.check_result(result);
        if ended.is_ok() && judged.is_ok() {
            data.pieces().iter().for_each(empty);
        }
        (ended.and(judged), sent)
    }

    fn buffer_for(&self, len: u64, wait: bool) -> Option<Buffer> {
        let len = u32::try_from(len).ok()?;
        let memory = &self.core().own_memory;
        if !wait {
            return Buffer::take(memory, len);
        }
        let addr = memory.pool.take_or_wait(len.into(), MEMORY_WAIT)?;
        Some(Buffer::from_taken(memory, addr, len))
    }

    /// Makes all completed writes durable. Without a write cache, does nothing.
    ///
    /// # Errors
    /// The flush failed, or the disk is dead.
    pub fn flush(&self) -> Result<(), Error> {
        if !self.blk_features().contains(BlkFeatures::FLUSH) {
            return Ok(());
        }
        self.run(Request::flush()).map(drop)
    }

    /// Discards a range. Later reads of it return unknown data.
    ///
    /// # Errors
    /// The range is invalid, the back-end does not offer this or fails, or the disk is dead.
    pub fn discard(&self, offset: u64, len: u64) -> Result<(), Error> {
        self.in_ranges(Kind::Discard, offset, len, Request::discard)
    }

    /// Makes a range read as zeroes. With `unmap`, the disk may free its space.
    ///
    /// # Errors
    /// As [`Disk::discard`].
    pub fn write_zeroes(&self, offset: u64, len: u64, unmap: bool) -> Result<(), Error> {
        self.in_ranges(Kind::WriteZeroes, offset, len, |offset, len| {
            Request::write_zeroes(offset, len, unmap)
        })
    }

    fn in_ranges(
        &self,
        kind: Kind,
        offset: u64,
        len: u64,
        request: impl Fn(u64, u64) -> Request,
    ) -> Result<(), Error> {
        if len == 0 {
            return Ok(());
        }
        let (limits, _) = self.core().limits()?;
        limits.check_whole(kind, offset, len)?;
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let now = limits.next_range(kind, at, end);
            self.run(request(at, now))?;
            at += now;
        }
        Ok(())
    }

    /// Returns the identity string of the disk.
    ///
    /// # Errors
    /// The back-end fails, or the disk is dead.
    pub fn get_id(&self) -> Result<String, Error> {
        let data = self.run(Request::get_id(self.buffer(ID_LEN)?))?;
        let id = data.into_buffer().map(|buffer| buffer.to_vec()).unwrap_or_default();
        let len = id.iter().position(|byte| *byte == 0).unwrap_or(id.len());
        Ok(String::from_utf8_lossy(id.get(..len).unwrap_or_default()).into_owned())
    }
}

impl Queue {
    /// Returns the disk of the queue.
    pub fn disk(&self) -> Disk {
        Disk(self.handle.clone())
    }
}
