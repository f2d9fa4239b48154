//! One life of a whole disk, with its real requests, from opening the image to its cut.

use super::held::HeldSender;
use super::images::builder::{Shape, below};
use super::images::cut_file::{CutFile, SECTOR};
use super::images::judge::Judge;
use super::images::qemu::QemuImage;
use super::images::stamps::{is_of, stamp_of};
use super::recorder::Recorder;
use crate::buffers::IoBuffers;
use crate::control::DiskControl;
use crate::qcow2::attached::AttachedImages;
use crate::qcow2::disk::Qcow2Disk;
use crate::qcow2::request::Qcow2State;
use crate::{Cache, Extent, IoError, Options, Request, Step, TABLE_OP_SLOTS};
use fastrand::Rng;
use kickless_io::{Completion, Waker};
use kickless_memory::{Gpa, Iov, Marks, View};
use kickless_testing::{SectorModel, Stamp};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use tempfile::TempDir;

/// The requests in flight, and the bytes of guest memory for each.
const REQUESTS_MAX: usize = 8;
const AREA: usize = 64 << 10;
/// The largest number of queues.
const QUEUES_MAX: usize = 3;
/// Steps that all requests take at most without an operation that ends.
const ROUNDS_MAX: u32 = 2000;

/// A queue of the disk.
struct DiskQueue {
    images: AttachedImages,
    waker: Waker,
    /// It stops by force, and gets no further requests until it has stopped.
    is_stopping: bool,
}

/// A request in flight.
struct DiskRequest {
    queue: usize,
    request: Request,
    buffers: IoBuffers,
    state: Qcow2State,
    /// The sectors, by their numbers in the model. Contiguous on the disk.
    first: usize,
    len: usize,
    started: u64,
    /// The number of a write. 0: it leaves zeroes.
    number: u64,
    /// The values of each sector that a read may see.
    readable: Vec<Vec<Stamp>>,
    /// It may be tried again.
    is_ready: bool,
    is_cancelled: bool,
}

/// A disk in use.
pub(super) struct Whole {
    shape: Shape,
    dir: TempDir,
    /// Dropped if it has nothing in flight. Otherwise, closing it waits for that.
    disk: Arc<Qcow2Disk>,
    recorder: Recorder,
    queues: Vec<DiskQueue>,
    memory: Arc<View>,
    requests: BTreeMap<usize, DiskRequest>,
    model: SectorModel,
    rng: Rng,
    /// Clusters that nothing refers to, from the beginning.
    leaks: u64,
}

impl DiskRequest {
    /// Returns the contents that the request leaves in a sector, as an offset on the disk.
    fn stamp(&self, offset: u64) -> Stamp {
        if self.number > 0 { stamp_of(offset, self.number) } else { 0 }
    }

    fn changes(&self) -> bool {
        !matches!(self.request, Request::Read { .. } | Request::Flush)
    }

    fn is_durable(&self) -> bool {
        matches!(self.request, Request::Write { durable: true, .. } | Request::WriteZeroes { durable: true })
    }
}

impl Whole {
    /// Opens an image. Its contents are the model's.
    pub(super) fn open(shape: Shape, file: &[u8], mut rng: Rng) -> Self {
        let judge = Judge { file, shape };
        let (leaks, model) = (judge.check().unwrap().leaks, SectorModel::new(judge.sectors()));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        fs::write(&path, file).unwrap();
        let under = shape.has_backing.then(|| {
            let path = dir.path().join("b");
            let under = File::options().read(true).write(true).create_new(true).open(path).unwrap();
            under.set_len(shape.size()).unwrap();
            for offset in (0..shape.sectors()).map(|sector| shape.offset(sector)) {
                under.write_all_at(&below(shape, offset).to_be_bytes(), offset).unwrap();
            }
            under
        });
        let options = Options { cache: Cache::Writeback, ..Options::default() };
        let disk = Qcow2Disk::open(crate::image_file::Source::Path(&path), &options).unwrap();
        disk.reload(false).unwrap();
        // Opening may have changed the header.
        let image = CutFile::new(fs::read(&path).unwrap(), false);
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let recorder = Recorder::new(image, file, under, rng.fork());
        let mut whole = Self {
            shape,
            dir,
            disk: Arc::new(disk),
            recorder,
            queues: Vec::new(),
            memory: kickless_testing::guest_memory((REQUESTS_MAX * AREA) as u64, 0),
            requests: BTreeMap::new(),
            model,
            rng,
            leaks,
        };
        for _ in 0..whole.rng.usize(1..=QUEUES_MAX) {
            let images = whole.attach();
            whole.queues.push(DiskQueue { images, waker: Waker::new().unwrap(), is_stopping: false });
        }
        whole
    }

    fn attach(&self) -> AttachedImages {
        let (chain, generation) = self.disk.chain().unwrap();
        AttachedImages::new(chain, generation, self.rng.clone().u32(..64))
    }

    /// Does one random thing.
    pub(super) fn turn(&mut self) -> Result<(), String> {
        self.recorder.now += 1;
        self.recorder.failures.turn(&mut self.rng);
        self.wake();
        match self.rng.u8(..10) {
            0 | 1 if self.requests.len() < REQUESTS_MAX => self.start(),
            0..5 => {
                let ready = self.ready();
                match self.rng.choice(ready) {
                    Some(id) => self.step(id, None),
                    None => Ok(()),
                }
            }
            5 if self.rng.u8(..40) == 0 => {
                let queue = self.rng.usize(..self.queues.len());
                self.stop(queue);
                Ok(())
            }
            _ => self.complete_one(false),
        }
    }

    /// Makes the requests of queues ready that were signalled. Returns whether there is a queue.
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

    /// Stops a queue by force. It starts again when nothing of it is left.
    fn stop(&mut self, queue: usize) {
        self.queues[queue].is_stopping = true;
        for request in self.requests.values_mut().filter(|request| request.queue == queue) {
            request.state.cancel();
            (request.is_ready, request.is_cancelled) = (true, true);
        }
        self.queues[queue].images.cancel();
        self.recorder.cancel(queue);
    }

    /// Starts a queue again that has stopped.
    fn restart(&mut self, queue: usize) {
        let is_empty = !self.requests.values().any(|request| request.queue == queue);
        if self.queues[queue].is_stopping
            && is_empty
            && self.recorder.in_flight(queue) == 0
            && self.queues[queue].images.in_flight() == 0
        {
            self.queues[queue].images = self.attach();
            self.queues[queue].is_stopping = false;
            self.submit_table_ops(queue);
        }
    }

    fn start(&mut self) -> Result<(), String> {
        let queue = self.rng.usize(..self.queues.len());
        if self.queues[queue].is_stopping {
            return Ok(());
        }
        let id = (0..REQUESTS_MAX).find(|id| !self.requests.contains_key(id)).unwrap();
        let per_cluster = self.shape.geometry.cluster() as usize / SECTOR;
        let per_table = self.shape.used as usize * per_cluster;
        let table = self.rng.usize(..self.shape.tables as usize);
        let (from, to) = if self.rng.u8(..3) == 0 {
            let first = self.rng.usize(..self.shape.used as usize);
            let len = self.rng.usize(1..=(self.shape.used as usize - first).min(3));
            (first * per_cluster, (first + len) * per_cluster)
        } else {
            let first = self.rng.usize(..per_table);
            (first, self.rng.usize(first + 1..=per_table.min(first + 6)))
        };
        let (first, len) = (table * per_table + from, to - from);
        let offset = self.shape.offset(first);
        let (durable, limits) = (self.rng.u8(..3) == 0, self.disk.limits());
        let request = match self.rng.u8(..16) {
            8..11 if limits.write_zeroes.is_some() => Request::WriteZeroes { durable },
            11 if limits.discard.is_some() => Request::Discard { durable },
            12..14 => Request::Flush,
            14..16 => Request::Read { offset },
            _ => Request::Write { offset, durable },
        };
        let mut running = DiskRequest {
            queue,
            request,
            buffers: IoBuffers::default(),
            state: Qcow2State::default(),
            first,
            len,
            started: self.recorder.now,
            number: if matches!(request, Request::Write { .. }) { self.recorder.now } else { 0 },
            readable: Vec::new(),
            is_ready: false,
            is_cancelled: false,
        };
        if matches!(request, Request::Read { .. }) {
            running.readable = (first..first + len).map(|sector| self.model.readable(sector)).collect();
        }
        match request {
            Request::Read { .. } | Request::Write { .. } => {
                running.buffers.guest = self.area(id, len);
                let bytes: Vec<u8> =
                    (0..len).flat_map(|index| sector(running.stamp(offset_of(offset, index)))).collect();
                running.buffers.guest.write(0, &bytes, &mut Marks::off());
            }
            Request::Discard { .. } | Request::WriteZeroes { .. } => {
                let (len, unmap) = ((len * SECTOR) as u64, self.rng.bool());
                running.buffers.extents.push(Extent { offset, len, unmap });
            }
            Request::Flush => {}
        }
        if running.changes() {
            for number in first..first + len {
                let stamp = running.stamp(self.shape.offset(number));
                self.model.start(number, stamp, running.started);
                for read in self.requests.values_mut() {
                    let index = number.checked_sub(read.first);
                    if let Some(values) = index.and_then(|index| read.readable.get_mut(index)) {
                        values.push(stamp);
                    }
                }
            }
        }
        let (mut marks, queue) = (Marks::off(), &mut self.queues[running.queue]);
        let mut sender = HeldSender {
            engine: &mut self.recorder,
            queue: running.queue,
            slot: id as u32,
            waker: &queue.waker,
            marks: &mut marks,
        };
        let step = self.disk.start(
            &mut queue.images,
            &mut sender,
            &mut running.buffers,
            &mut running.state,
            request,
        );
        self.after(id, running, step)
    }

    /// Returns guest memory of some sectors, in segments.
    fn area(&mut self, id: usize, len: usize) -> Iov {
        let (mut iov, mut at) = (Iov::default(), 0);
        while at < len {
            let here = self.rng.usize(1..=len - at);
            let gpa = Gpa((id * AREA + at * SECTOR) as u64);
            iov.push(&self.memory, gpa, (here * SECTOR) as u32).unwrap();
            at += here;
        }
        iov
    }

    /// Continues a request.
    fn step(&mut self, id: usize, completion: Option<Completion>) -> Result<(), String> {
        let mut running = self.requests.remove(&id).unwrap();
        running.is_ready = false;
        let (mut marks, queue) = (Marks::off(), &mut self.queues[running.queue]);
        let mut sender = HeldSender {
            engine: &mut self.recorder,
            queue: running.queue,
            slot: id as u32,
            waker: &queue.waker,
            marks: &mut marks,
        };
        let (images, buffers, state) = (&mut queue.images, &mut running.buffers, &mut running.state);
        let step = state.step((images, self.disk.size()), &mut sender, buffers, completion);
        self.after(id, running, step)
    }

    /// Goes on after a step of a request.
    fn after(&mut self, id: usize, mut running: DiskRequest, step: Step) -> Result<(), String> {
        let queue = running.queue;
        let result = match step {
            Step::Done(result) => self.end(id, &running, result),
            step => {
                running.is_ready |= step == Step::More;
                self.requests.insert(id, running);
                Ok(())
            }
        };
        self.submit_table_ops(queue);
        self.restart(queue);
        result
    }

    /// Starts the operations for the tables that are due.
    fn submit_table_ops(&mut self, number: usize) {
        let queue = &mut self.queues[number];
        if queue.images.is_due() {
            let (mut marks, waker) = (Marks::off(), &queue.waker);
            let engine = &mut self.recorder;
            let mut sender =
                HeldSender { engine, queue: number, slot: TABLE_OP_SLOTS, waker, marks: &mut marks };
            queue.images.submit_table_ops(&mut sender, None);
        }
    }

    /// Completes an operation. The queue tries its requests again after it.
    fn complete_one(&mut self, any: bool) -> Result<(), String> {
        let Some((number, completion)) = self.recorder.complete_one(any) else {
            return Ok(());
        };
        let slot = completion.token.slot;
        if slot < TABLE_OP_SLOTS {
            self.step(slot as usize, Some(completion))?;
        } else {
            let queue = &mut self.queues[number];
            let (mut marks, waker) = (Marks::off(), &queue.waker);
            let engine = &mut self.recorder;
            let mut sender = HeldSender { engine, queue: number, slot, waker, marks: &mut marks };
            queue.images.resume_table_op(&mut sender, None, completion);
        }
        self.polled(number);
        self.restart(number);
        Ok(())
    }

    /// Ends a request with its answer.
    fn end(&mut self, id: usize, running: &DiskRequest, result: Result<(), IoError>) -> Result<(), String> {
        let now = self.recorder.now;
        if result.is_err() && !self.recorder.failures.has_failed && !running.is_cancelled {
            return Err(format!("{:?} ends with {result:?}, and nothing has failed", running.request));
        }
        match running.request {
            Request::Flush if result.is_ok() => self.model.flushed(running.started),
            Request::Read { .. } if result.is_ok() => self.check_read(id, running)?,
            _ => {}
        }
        if !running.changes() {
            return Ok(());
        }
        let is_discard = matches!(running.request, Request::Discard { .. });
        for sector in running.first..running.first + running.len {
            let stamp = running.stamp(self.shape.offset(sector));
            self.model.end(sector, (stamp, running.started), result.is_ok() && !is_discard, now);
            if running.is_durable() && result.is_ok() {
                self.model.written_through(sector, (stamp, running.started));
            }
        }
        Ok(())
    }

    /// Checks the contents that were read (G3, G4).
    fn check_read(&mut self, id: usize, running: &DiskRequest) -> Result<(), String> {
        let mut bytes = vec![0; running.len * SECTOR];
        self.area(id, running.len).read(0, &mut bytes);
        for (index, bytes) in bytes.as_chunks::<SECTOR>().0.iter().enumerate() {
            let stamp = u64::from_be_bytes(bytes[..8].try_into().unwrap());
            let sector = running.first + index;
            let is_known = running.readable[index].contains(&stamp);
            if !is_of(stamp, self.shape.offset(sector)) || !is_known {
                let values = self.model.values(sector);
                return Err(format!("a read of sector {sector} returns {stamp:x}, not one of {values:x?}"));
            }
        }
        Ok(())
    }

    /// Ends all requests, and all operations. Returns an error if one waits for ever.
    pub(super) fn settle(&mut self) -> Result<(), String> {
        for _ in 0..20_000 {
            self.go_on()?;
            if self.recorder.is_idle() {
                if self.requests.is_empty() {
                    return Ok(());
                }
                let left: Vec<_> = self.requests.values().map(|r| (r.queue, r.request)).collect();
                return Err(format!("requests wait for ever: {left:?}, {:?}", self.recorder.failures));
            }
            self.complete_one(true)?;
        }
        Err(format!("requests never end: {:?}", self.recorder.failures))
    }

    /// Moves all on until each request waits for an operation in flight. Returns an error if one keeps its
    /// worker busy instead.
    fn go_on(&mut self) -> Result<(), String> {
        for _ in 0..ROUNDS_MAX {
            self.recorder.now += 1;
            let is_woken = self.wake();
            let ready = self.ready();
            if ready.is_empty() && !is_woken {
                return Ok(());
            }
            for id in ready {
                if self.requests.contains_key(&id) {
                    self.step(id, None)?;
                }
            }
        }
        Err(format!("requests spin: {:?}", self.recorder.failures))
    }

    /// Ends all requests. From now on, no operation fails.
    pub(super) fn drain(&mut self) -> Result<(), String> {
        self.settle()?;
        self.recorder.failures.end();
        self.settle()
    }

    /// Closes the disk, and returns the file.
    pub(super) fn close(&mut self) -> Result<Vec<u8>, String> {
        self.drain()?;
        let path = self.dir.path().join("disk");
        self.recorder.file.write_all_at(self.recorder.image.now(), 0).unwrap();
        let closed = self.disk.write_back();
        let file = fs::read(path).unwrap();
        let verdict =
            self.judge(&file, SectorModel::may_be_after_kill).map_err(|fault| format!("close: {fault}"))?;
        match closed {
            Err(error) if !self.recorder.failures.has_failed => Err(format!("closing fails: {error}")),
            Ok(()) if verdict > self.leaks && !self.recorder.failures.has_failed => {
                Err(format!("closing leaks {} clusters", verdict - self.leaks))
            }
            _ => Ok(file),
        }
    }

    /// Cuts the disk by a kill.
    pub(super) fn kill(&mut self) -> Result<Vec<u8>, String> {
        let file = self.recorder.image.kill(&mut self.rng);
        self.judge(&file, SectorModel::may_be_after_kill).map_err(|fault| format!("kill: {fault}"))?;
        Ok(file)
    }

    /// Cuts the disk by a power cut.
    pub(super) fn power_cut(&mut self) -> Result<Vec<u8>, String> {
        let file = self.recorder.image.power_cut(&mut self.rng);
        self.judge(&file, SectorModel::may_be_after_power_cut)
            .map_err(|fault| format!("power cut: {fault}"))?;
        Ok(file)
    }

    /// Checks a file, and returns its leaks.
    fn judge(
        &mut self,
        file: &[u8],
        may_be: impl Fn(&SectorModel, usize, u64) -> bool,
    ) -> Result<u64, String> {
        let judge = Judge { file, shape: self.shape };
        let verdict = judge.check()?;
        if self.rng.u16(..500) == 0 {
            let image = QemuImage::of(file);
            fs::write(image.dir().join("b"), [0; SECTOR]).unwrap();
            let report = image.check();
            if report.corruptions + report.failures > 0 {
                return Err(format!("qemu-img check: {report:?}"));
            }
        }
        for (sector, stamp) in judge.sectors().enumerate() {
            if !may_be(&self.model, sector, stamp) {
                let values = self.model.values(sector);
                return Err(format!(
                    "sector {sector} has {stamp:x}, not one of {values:x?}: {:?}",
                    self.shape
                ));
            }
        }
        Ok(verdict.leaks)
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        if !self.recorder.is_idle() || !self.requests.is_empty() {
            std::mem::forget(Arc::clone(&self.disk));
        }
    }
}

fn offset_of(first: u64, index: usize) -> u64 {
    first + (index * SECTOR) as u64
}

fn sector(stamp: Stamp) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    bytes[..8].copy_from_slice(&stamp.to_be_bytes());
    bytes
}
