//! Runs a script of requests on an image.

use super::super::held::HeldSender;
use super::Input;
use super::engine::{HostileEngine, read_to_end};
use super::image::{HostileImage, NAME_AT};
use crate::buffers::IoBuffers;
use crate::control::DiskControl;
use crate::qcow2::attached::AttachedImages;
use crate::qcow2::disk::Qcow2Disk;
use crate::qcow2::request::Qcow2State;
use crate::{Cache, Extent, IoError, Options, Request, Step, TABLE_OP_SLOTS};
use kickless_io::{Completion, Errno, Waker};
use kickless_memory::{Gpa, Iov, Marks, View};
use kickless_qcow2::{ReadImage, check};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

const SECTOR: u64 = crate::SECTOR;
/// The requests in flight, and the bytes of guest memory for each.
const REQUESTS_MAX: usize = 6;
const AREA: u64 = 128 << 10;
/// The guest memory that [`requests`] needs.
pub(crate) const MEMORY_BYTES: u64 = REQUESTS_MAX as u64 * AREA;
const QUEUES: usize = 2;
/// The steps of a script.
const STEPS_MAX: u32 = 200;
/// The steps after which all requests must have ended: a hostile image makes a chunk look at 64 units.
const ROUNDS_MAX: u32 = 50_000;
/// Threads decompress. They get so many looks, a millisecond each.
const LOOKS_MAX: u32 = 5000;
/// Bytes of clusters that may be prepared: two chunks of at most 64 MiB, and those behind them.
const PREPARED_MAX: u64 = 192 << 20;
/// Units of counts behind the end of the file that may be skipped, and some for tables.
const UNITS_MAX: u64 = 68;
/// The clusters of the window of a check.
const WINDOW: u64 = 1 << 20;
/// The bytes of the header that name the backing image.
const NAME: std::ops::Range<usize> = 8..24;

/// The events of one input.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    /// The image was opened.
    pub(crate) is_opened: bool,
    /// The requests that failed.
    pub(crate) failed: u64,
}

struct HostileQueue {
    images: AttachedImages,
    waker: Waker,
    is_stopping: bool,
}

struct HostileRequest {
    queue: usize,
    buffers: IoBuffers,
    state: Qcow2State,
    is_ready: bool,
}

/// A disk in use.
struct HostileDisk<'a> {
    disk: Qcow2Disk,
    engine: HostileEngine,
    queues: Vec<HostileQueue>,
    requests: BTreeMap<usize, HostileRequest>,
    memory: &'a Arc<View>,
    image: &'a HostileImage,
    failed: u64,
}

/// Makes an image and its backing image, two files of one directory, and runs requests on them. The memory
/// has [`MEMORY_BYTES`].
///
/// # Panics
/// A request does not end, or a file changes where it must not.
pub(crate) fn requests(memory: &Arc<View>, [path, below]: [&Path; 2], input: &[u8]) -> Seen {
    let input = &mut Input(input);
    let how = input.byte();
    let format = [None, None, Some("raw"), Some("qcow2")][usize::from(how & 3)];
    let name = below.file_name().and_then(|name| name.to_str()).expect("a name");
    let under_bytes = match format {
        Some("qcow2") => HostileImage::new(input, None).bytes,
        _ => vec![7; 5000],
    };
    fs::write(below, &under_bytes).expect("a writable directory");
    let image = HostileImage::new(input, format.map(|format| (name, format)));
    fs::write(path, &image.bytes).expect("a writable directory");
    let cache_size = (how & 4 != 0).then_some(0);
    let options = Options { cache: Cache::Writeback, cache_size, ..Options::default() };
    let mut seen = Seen::default();
    let Ok(disk) = Qcow2Disk::open(crate::image_file::Source::Path(path), &options) else { return seen };
    if disk.reload(false).is_err() {
        return seen;
    }
    seen.is_opened = true;
    let mut files = vec![File::options().read(true).write(true).open(path).expect("it exists")];
    files.extend(format.map(|_| File::open(below).expect("it exists")));
    let engine = HostileEngine::new(files);
    let (queues, requests) = (Vec::new(), BTreeMap::new());
    let mut run = HostileDisk { disk, engine, queues, requests, memory, image: &image, failed: 0 };
    run.attach();
    run.play(input);
    run.drain();
    seen.failed = run.failed;
    drop(run.disk.write_back());
    drop(run);
    assert_eq!(fs::read(below).expect("it exists"), under_bytes, "the backing image has changed");
    judge(&image, path);
    seen
}

/// Checks the file afterwards.
fn judge(image: &HostileImage, path: &Path) {
    let (file, geometry) = (File::open(path).expect("it exists"), image.geometry);
    let unit = geometry.cluster().min(4096) * 8 / u64::from(geometry.refcount_bits()) * geometry.cluster();
    let most = image.bytes.len() as u64 + PREPARED_MAX + UNITS_MAX * unit;
    let now = JudgedFile(file);
    assert!(now.bytes() <= most, "{} bytes, at most {most}", now.bytes());
    let mut first = [0; 512];
    now.read(0, &mut first).expect("it can be read");
    assert_eq!(first[NAME], image.bytes[NAME], "the place of the backing image's name has changed");
    assert_eq!(first[NAME_AT..], image.bytes[NAME_AT..512], "the backing image's name has changed");
    if image.is_sound {
        let report = check(&now, WINDOW);
        let report = report.unwrap_or_else(|error| panic!("a sound image became unsound: {error}"));
        assert!(report.is_sound(), "a sound image has {report:?}");
    }
}

/// A file that is checked. It may be long, and sparse.
struct JudgedFile(File);

impl ReadImage for JudgedFile {
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        into.fill(0);
        read_to_end(&self.0, into, at).map(drop)
    }

    fn bytes(&self) -> u64 {
        self.0.metadata().map_or(0, |meta| meta.len())
    }
}

impl HostileDisk<'_> {
    fn attach(&mut self) {
        self.queues.clear();
        for shard in 0..QUEUES {
            let Some((chain, generation)) = self.disk.chain() else { return };
            let images = AttachedImages::new(chain, generation, shard as u32);
            let waker = Waker::new().expect("descriptors");
            self.queues.push(HostileQueue { images, waker, is_stopping: false });
        }
    }

    fn play(&mut self, input: &mut Input<'_>) {
        for _ in 0..STEPS_MAX {
            if input.is_empty() || self.queues.is_empty() {
                return;
            }
            self.wake();
            match input.byte() % 32 {
                0..12 => self.start(input),
                12..16 => {
                    let ready = self.ready();
                    if let Some(id) = ready.get(input.below(ready.len().max(1) as u64) as usize) {
                        self.step(*id, None);
                    }
                }
                16..26 => {
                    let index = input.below(64);
                    self.complete(index, None);
                }
                26 | 27 => {
                    let errno = [Errno::IO, Errno::NOSPC][input.below(2) as usize];
                    self.complete(input.below(64), Some(errno));
                }
                28 => {
                    let queue = input.below(QUEUES as u64) as usize;
                    self.stop(queue);
                }
                29 => self.drain(),
                30 => {
                    self.drain();
                    let more = (input.below(1 << 16) * SECTOR) << (input.byte() % 16);
                    // The image may have no room for it, or be damaged.
                    drop(self.disk.grow(self.disk.size().saturating_add(more)));
                }
                _ => {
                    self.drain();
                    drop(self.disk.write_back());
                    if self.disk.reload(false).is_err() {
                        self.queues.clear();
                        return;
                    }
                    self.attach();
                }
            }
        }
    }

    fn start(&mut self, input: &mut Input<'_>) {
        let queue = input.below(QUEUES as u64) as usize;
        let Some(id) = (0..REQUESTS_MAX).find(|id| !self.requests.contains_key(id)) else { return };
        if self.queues[queue].is_stopping {
            return;
        }
        let (kind, place) = (input.byte(), input.byte());
        let geometry = self.image.geometry;
        let per_cluster = geometry.cluster() / SECTOR;
        let sectors = self.disk.size() / SECTOR;
        // Near the beginnings of tables, their ends, and the end of the disk.
        let base = match place % 8 {
            0..3 => 0,
            3 => geometry.table_span() / SECTOR - per_cluster,
            4 | 5 => geometry.table_span() / SECTOR,
            6 => 2 * geometry.table_span() / SECTOR - per_cluster,
            _ => sectors - per_cluster.min(sectors),
        };
        let (cluster, within) = (u64::from(place >> 3) % 8, input.below(per_cluster));
        let first = (base + cluster * per_cluster + within).min(sectors - 1);
        let most = if kind & 64 == 0 { AREA / SECTOR } else { per_cluster * 8 };
        let len = (1 + input.below(most)).min(sectors - first);
        let (offset, durable) = (first * SECTOR, kind & 128 != 0);
        let request = match kind % 16 {
            0..8 => Request::Write { offset, durable },
            8..10 => Request::Read { offset },
            10..12 => Request::Flush,
            12 | 13 => Request::WriteZeroes { durable },
            _ => Request::Discard { durable },
        };
        let mut buffers = IoBuffers::default();
        match request {
            Request::Write { .. } | Request::Read { .. } => {
                let mut iov = Iov::default();
                let len = (len * SECTOR).min(AREA) as u32;
                let gpa = Gpa(id as u64 * AREA);
                iov.push(self.memory, gpa, len).expect("the memory has it");
                // A header, as a guest would write it to name another file.
                iov.write(0, b"QFI\xfb\0\0\0\x03\0\0\0\0\0\0\x01\0", &mut Marks::off());
                buffers.guest = iov;
            }
            Request::Flush => {}
            _ => buffers.extents.push(Extent { offset, len: len * SECTOR, unmap: kind & 32 != 0 }),
        }
        let mut running = HostileRequest { queue, buffers, state: Qcow2State::default(), is_ready: false };
        let (mut marks, queue) = (Marks::off(), &mut self.queues[queue]);
        let (engine, waker) = (&mut self.engine, &queue.waker);
        let mut sender =
            HeldSender { engine, queue: running.queue, slot: id as u32, waker, marks: &mut marks };
        let HostileRequest { buffers, state, .. } = &mut running;
        let step = self.disk.start(&mut queue.images, &mut sender, buffers, state, request);
        self.after(id, running, step);
    }

    fn wake(&mut self) -> bool {
        let mut is_woken = false;
        for queue in 0..self.queues.len() {
            if self.queues[queue].waker.clear() {
                is_woken = true;
                self.polled(queue);
            }
        }
        is_woken
    }

    /// Makes the requests of a queue ready, as its poll does.
    fn polled(&mut self, queue: usize) {
        for request in self.requests.values_mut().filter(|request| request.queue == queue) {
            request.is_ready = true;
        }
        self.submit_table_ops(queue);
    }

    fn ready(&self) -> Vec<usize> {
        self.requests.iter().filter(|(_, request)| request.is_ready).map(|(id, _)| *id).collect()
    }

    fn step(&mut self, id: usize, completion: Option<Completion>) {
        let Some(mut running) = self.requests.remove(&id) else { panic!("request {id} has ended") };
        running.is_ready = false;
        let (mut marks, queue) = (Marks::off(), &mut self.queues[running.queue]);
        let (engine, waker) = (&mut self.engine, &queue.waker);
        let mut sender =
            HeldSender { engine, queue: running.queue, slot: id as u32, waker, marks: &mut marks };
        let (images, HostileRequest { buffers, state, .. }) = (&mut queue.images, &mut running);
        let step = state.step((images, self.disk.size()), &mut sender, buffers, completion);
        self.after(id, running, step);
    }

    fn after(&mut self, id: usize, mut running: HostileRequest, step: Step) {
        let queue = running.queue;
        match step {
            Step::Done(result) => self.failed += u64::from(result.is_err_and(|e| e != IoError::CANCELLED)),
            step => {
                running.is_ready |= step == Step::More;
                self.requests.insert(id, running);
            }
        }
        self.submit_table_ops(queue);
        self.restart(queue);
    }

    /// Starts the operations for the tables that are due.
    fn submit_table_ops(&mut self, number: usize) {
        let queue = &mut self.queues[number];
        if queue.images.is_due() {
            let (mut marks, engine, waker) = (Marks::off(), &mut self.engine, &queue.waker);
            let mut sender =
                HeldSender { engine, queue: number, slot: TABLE_OP_SLOTS, waker, marks: &mut marks };
            queue.images.submit_table_ops(&mut sender, None);
        }
    }

    fn complete(&mut self, index: u64, fails: Option<Errno>) {
        let Some((number, completion)) = self.engine.complete(index, fails) else { return };
        let slot = completion.token.slot;
        if slot < TABLE_OP_SLOTS {
            self.step(slot as usize, Some(completion));
        } else {
            let queue = &mut self.queues[number];
            let (mut marks, engine, waker) = (Marks::off(), &mut self.engine, &queue.waker);
            let mut sender = HeldSender { engine, queue: number, slot, waker, marks: &mut marks };
            queue.images.resume_table_op(&mut sender, None, completion);
        }
        self.polled(number);
        self.restart(number);
    }

    /// Stops a queue by force. It starts again when nothing of it is left.
    fn stop(&mut self, queue: usize) {
        self.queues[queue].is_stopping = true;
        for request in self.requests.values_mut().filter(|request| request.queue == queue) {
            request.state.cancel();
            request.is_ready = true;
        }
        self.queues[queue].images.cancel();
    }

    fn restart(&mut self, number: usize) {
        let is_empty = !self.requests.values().any(|request| request.queue == number);
        let queue = &mut self.queues[number];
        let is_idle = self.engine.in_flight(number) == 0 && queue.images.in_flight() == 0;
        if queue.is_stopping && is_empty && is_idle {
            let Some((chain, generation)) = self.disk.chain() else { return };
            queue.images = AttachedImages::new(chain, generation, number as u32);
            queue.is_stopping = false;
            self.submit_table_ops(number);
        }
    }

    /// Ends all requests, and all operations.
    fn drain(&mut self) {
        let mut looks = 0;
        for round in 0..ROUNDS_MAX {
            let is_woken = self.wake();
            let ready = self.ready();
            for id in &ready {
                if self.requests.contains_key(id) {
                    self.step(*id, None);
                }
            }
            if !self.engine.is_idle() {
                self.complete(u64::from(round), None);
            } else if ready.is_empty() && !is_woken {
                if self.requests.is_empty() {
                    return;
                }
                looks += 1;
                assert!(looks < LOOKS_MAX, "requests wait for ever");
                sleep(Duration::from_millis(1));
            }
        }
        panic!("requests never end");
    }
}
