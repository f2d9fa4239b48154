//! One life of a disk, from opening an image to its cut.

use super::ops::SimOp;
use super::request::{RequestKind, SimRequest};
use super::runtime::{SimRuntime, SimWaker};
use crate::format::header::Header;
use crate::images::builder::Shape;
use crate::images::cut_file::{CutFile, SECTOR};
use crate::images::failures::Failures;
use crate::images::judge::{Judge, Verdict};
use crate::images::qemu::QemuImage;
use crate::pins::Pins;
use crate::read::used_bytes;
use crate::slices::Slices;
use crate::tables::plan::Clear;
use crate::tables::rule::{Rule, Rules};
use crate::tables::state::{TableParts, Tables, TablesOptions};
use fastrand::Rng;
use kickless_testing::SectorModel;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A bound of what requests may leak in a life: retired clusters of a few requests.
const LEAKS_OF_REQUESTS: u64 = 64;

/// Free clusters that are enough for all requests of a life on a device.
const ROOM: u64 = 250;
/// Steps that all requests of a life take at most without an operation that ends.
const ROUNDS_MAX: u32 = 2000;
/// The largest number of queues. Each has a waker of its own.
const QUEUES_MAX: usize = 3;

/// A disk in use.
pub(super) struct Life {
    pub(super) shape: Shape,
    pub(super) image: CutFile,
    pub(super) model: SectorModel,
    pub(super) tables: Tables<SimRuntime>,
    pub(super) slices: Arc<Slices>,
    pub(super) pins: Arc<Pins<SimRuntime>>,
    /// The waker of each queue.
    pub(super) wakers: Vec<SimWaker>,
    pub(super) requests: BTreeMap<usize, SimRequest>,
    pub(super) rng: Rng,
    pub(super) now: u64,
    pub(super) rule: Option<Rule>,
    pub(super) ops: Vec<SimOp>,
    pub(super) failures: Failures,
    next: usize,
    /// The size that the disk is about to have.
    grows_to: Option<u64>,
    may_grow: bool,
    /// The size that was promised.
    size: u64,
    /// The sectors of the last request at a new place.
    last: (usize, usize),
    /// The first fault that was found.
    fault: Option<String>,
    /// The most steps that a request's transfer takes.
    pub(super) late_max: u64,
    /// Clusters that nothing refers to, from the beginning.
    leaks: u64,
    /// There may be no room for new clusters.
    is_full: bool,
    /// The largest number of clusters of a chunk.
    reserve_max: u64,
}

impl Life {
    /// Opens an image. Its contents are the model's.
    pub(super) fn open(shape: Shape, file: Vec<u8>, rule: Option<Rule>, rng: Rng) -> Self {
        let leaks = Judge { file: &file, shape }.check().unwrap().leaks;
        Self { leaks, rule, ..Self::open_with(shape, file, Rules::without(rule), rng) }
    }

    /// Opens an image. Nothing fails, and the disk keeps its size.
    pub(super) fn open_quiet(shape: Shape, file: Vec<u8>, rng: Rng) -> Self {
        let mut life = Self::open_with(shape, file, Rules::default(), rng);
        life.failures.end();
        Self { is_full: false, may_grow: false, ..life }
    }

    /// Opens an image with faults.
    pub(super) fn open_unchecked(shape: Shape, file: Vec<u8>, rng: Rng) -> Self {
        Self::open_with(shape, file, Rules::default(), rng)
    }

    fn open_with(shape: Shape, file: Vec<u8>, rules: Rules, mut rng: Rng) -> Self {
        let geometry = shape.geometry;
        let header = Header::parse(&file[..geometry.cluster() as usize], file.len() as u64).unwrap();
        let table = |at: u64, bytes: u64| file[at as usize..][..bytes as usize].to_vec();
        let model = SectorModel::new(Judge { file: &file, shape }.sectors());
        let (slices, pins) = (Arc::new(Slices::new(geometry, 512, 0)), Arc::new(Pins::new()));
        let refcount_table = table(header.refcounts.at.0, header.refcounts.entries * 8);
        let file_bytes = match shape.is_device {
            true => used_bytes(&file.as_slice(), &header, &refcount_table).unwrap(),
            false => file.len() as u64,
        };
        let parts = TableParts {
            header: &header,
            first: table(0, geometry.cluster()),
            l1: table(header.l1.at.0, header.l1.entries * 8),
            refcount_table,
            file_bytes,
            others: if header.snapshots.1 > 0 { vec![(header.snapshots.0, 512)] } else { Vec::new() },
        };
        let reserve_max = rng.choice([2, 4, 24]).unwrap() * geometry.cluster();
        let late_max = rng.choice([30, 150, 600]).unwrap();
        let device_bytes = shape.is_device.then_some(file.len() as u64);
        let options = TablesOptions {
            unit: 512,
            writable: true,
            discard: rng.u8(..4) > 0,
            device_bytes,
            reserve_max,
            retired_max: rng.choice([None, Some(2), Some(6)]).unwrap(),
        };
        let tables = Tables::with_rules(parts, Arc::clone(&slices), Arc::clone(&pins), options, rules);
        let failures = Failures::random(&mut rng);
        let is_full = shape.is_device && Judge { file: &file, shape }.free() < ROOM;
        let queues = rng.usize(1..=QUEUES_MAX);
        Self {
            shape,
            image: CutFile::new(file, shape.is_device),
            model,
            tables,
            slices,
            pins,
            wakers: (0..queues).map(|_| SimWaker::default()).collect(),
            requests: BTreeMap::new(),
            rng,
            now: 1,
            rule: None,
            ops: Vec::new(),
            failures,
            next: 0,
            grows_to: None,
            may_grow: true,
            size: header.size,
            last: (0, 1),
            fault: None,
            late_max,
            leaks: 0,
            is_full,
            reserve_max: reserve_max / geometry.cluster(),
        }
    }

    pub(super) fn found(&mut self, fault: String) {
        self.fault.get_or_insert(fault);
    }

    pub(super) fn fault(&self) -> Result<(), String> {
        self.fault.clone().map_or(Ok(()), Err)
    }

    /// Does one random thing.
    pub(super) fn turn(&mut self) {
        self.now += 1;
        self.wake();
        self.failures.turn(&mut self.rng);
        self.grow();
        if self.failures.may_fail() && self.rng.u16(..200) == 0 {
            self.failures.has_failed = true;
            self.tables.fail_buffers(self.rng.u32(1..4));
        }
        match self.rng.u8(..10) {
            0 if self.requests.len() < 8 => self.start(),
            0..4 => {
                let ready: Vec<usize> = self.ready();
                if let Some(id) = self.rng.choice(ready) {
                    self.step(id);
                }
            }
            4..6 => self.submit_due(),
            _ => self.complete_one(),
        }
    }

    /// Wakes the requests of the queues that were signalled. Returns whether there are any.
    fn wake(&mut self) -> bool {
        let mut is_woken = false;
        for (queue, waker) in self.wakers.iter().enumerate() {
            if waker.clear() {
                is_woken = true;
                self.requests
                    .values_mut()
                    .filter(|request| request.queue == queue)
                    .for_each(SimRequest::woken);
            }
        }
        is_woken
    }

    /// Grows the disk now and then.
    fn grow(&mut self) {
        if let Some(Ok(size)) = self.grows_to.and_then(|_| self.tables.grown()) {
            (self.size, self.grows_to) = (size, None);
        }
        if self.may_grow && self.rng.u16(..300) == 0 {
            let tables = self.rng.u64(..70);
            let size = self.size + tables * self.shape.geometry.table_span();
            if self.tables.grow(size.max(self.grows_to.unwrap_or(0))).is_ok() {
                self.grows_to.get_or_insert(size);
            }
        }
    }

    fn ready(&self) -> Vec<usize> {
        self.requests.iter().filter(|(_, request)| request.can_go_on()).map(|(id, _)| *id).collect()
    }

    fn start(&mut self) {
        self.next += 1;
        let (kind, first, len) = self.random_request();
        let queue = self.rng.usize(..self.wakers.len());
        let request = SimRequest::new((kind, queue), first, len, self.now);
        if request.changes() {
            for sector in first..first + len {
                self.model.start(sector, request.stamp(self.shape.offset(sector)), self.now);
            }
        }
        self.requests.insert(self.next, request);
    }

    fn random_request(&mut self) -> (RequestKind, usize, usize) {
        let per_cluster = self.shape.geometry.cluster() as usize / SECTOR;
        let per_table = self.shape.used as usize * per_cluster;
        let table = self.rng.usize(..self.shape.tables as usize);
        let kind = match self.rng.u8(..16) {
            0..8 => RequestKind::Write { number: self.now, durable: self.rng.u8(..3) == 0 },
            8..10 => RequestKind::Clear(Clear::Unmap),
            10 => RequestKind::Clear(Clear::Zero),
            11 => RequestKind::Clear(Clear::Discard),
            12..14 => RequestKind::Flush,
            _ => RequestKind::Read,
        };
        if self.rng.u8(..3) == 0 {
            // The same place again.
            return (kind, self.last.0, self.last.1);
        }
        let is_clear = matches!(kind, RequestKind::Clear(_));
        let (from, to) = if self.rng.u8(..3) < if is_clear { 2 } else { 1 } {
            let first = self.rng.usize(..self.shape.used as usize);
            let len = self.rng.usize(1..=(self.shape.used as usize - first).min(3));
            (first * per_cluster, (first + len) * per_cluster)
        } else {
            let first = self.rng.usize(..per_table);
            (first, self.rng.usize(first + 1..=per_table.min(first + 4)))
        };
        self.last = (table * per_table + from, to - from);
        (kind, self.last.0, self.last.1)
    }

    /// Ends a request with its answer.
    pub(super) fn end(&mut self, request: &SimRequest) {
        if let Some(errno) = request.failed
            && !self.failures.has_failed
            && !self.is_full
            && self.rule.is_none()
        {
            self.found(format!("a request fails with {errno:?}, and no operation has: {request:?}"));
        }
        if !request.changes() {
            return;
        }
        for sector in request.first..request.first + request.len {
            let stamp = request.stamp(self.shape.offset(sector));
            self.model.end(sector, (stamp, request.started), request.is_sure(), self.now);
            if request.is_durable() && request.failed.is_none() {
                self.model.written_through(sector, (stamp, request.started));
            }
        }
    }

    /// Ends all requests, and all operations. Returns an error if one waits for ever.
    pub(super) fn settle(&mut self) -> Result<(), String> {
        for _ in 0..20_000 {
            self.go_on()?;
            if self.ops.is_empty() {
                return match self.requests.values().next() {
                    None => Ok(()),
                    Some(left) => Err(format!("a request waits for ever: {left:?}, {:?}", self.failures)),
                };
            }
            let op = self.ops.swap_remove(self.rng.usize(..self.ops.len()));
            self.complete(op);
        }
        Err(format!("a request never ends: {:?}, {:?}", self.requests.values().next(), self.failures))
    }

    /// Moves all on until each request waits for an operation in flight. Returns an error if one keeps its
    /// worker busy instead.
    fn go_on(&mut self) -> Result<(), String> {
        for _ in 0..ROUNDS_MAX {
            self.now += 1;
            let is_woken = self.wake();
            let ready = self.ready();
            if !is_woken && ready.is_empty() && !self.tables.has_due() {
                return Ok(());
            }
            ready.into_iter().for_each(|id| self.step(id));
            self.submit_due();
        }
        Err(format!("requests spin: {:?}, {:?}", self.requests, self.failures))
    }

    /// Ends all requests. From now on, no operation fails.
    pub(super) fn drain(&mut self) -> Result<(), String> {
        self.settle()?;
        self.failures.end();
        self.tables.fail_buffers(0);
        self.settle()
    }

    /// Closes the disk, and returns the file.
    pub(super) fn close(&mut self) -> Result<Vec<u8>, String> {
        self.settle()?;
        if self.rng.bool() {
            // A close that fails ends as well. It is not tried again.
            self.tables.close();
            self.settle()?;
            if self.tables.closed().is_none() {
                return Err(format!("closing does not end: {:?}, {:?}", self.tables.stats(), self.failures));
            }
            return self.kill();
        }
        self.drain()?;
        self.tables.close();
        self.settle()?;
        match self.tables.closed() {
            Some(Ok(())) => {}
            other => return Err(format!("closing ended with {other:?}: {:?}", self.tables.stats())),
        }
        let file = self.image.now().to_vec();
        let verdict = self.judge(&file, |model, sector, stamp| model.may_be_after_kill(sector, stamp))?;
        match verdict.leaks {
            leaks if leaks > self.leaks => Err(format!("closing leaks {} clusters", leaks - self.leaks)),
            _ => Ok(file),
        }
    }

    /// Cuts the disk by a kill.
    pub(super) fn kill(&mut self) -> Result<Vec<u8>, String> {
        let file = self.image.kill(&mut self.rng);
        self.judge(&file, |model, sector, stamp| model.may_be_after_kill(sector, stamp))
            .and_then(|verdict| self.check_leaks(verdict))
            .map_err(|fault| format!("kill: {fault}"))?;
        Ok(file)
    }

    /// Cuts the disk by a power cut.
    pub(super) fn power_cut(&mut self) -> Result<Vec<u8>, String> {
        let file = self.image.power_cut(&mut self.rng);
        self.judge(&file, |model, sector, stamp| model.may_be_after_power_cut(sector, stamp))
            .map_err(|fault| format!("power cut: {fault}"))?;
        Ok(file)
    }

    /// Asks QEMU's check now and then.
    fn check(&mut self, file: &[u8]) -> Result<(), String> {
        if self.rng.u16(..500) == 0 {
            let image = QemuImage::of(file);
            std::fs::write(image.dir().join("b"), [0; SECTOR]).unwrap();
            let report = image.check();
            if report.corruptions + report.failures > 0 {
                return Err(format!("qemu-img check: {report:?}"));
            }
        }
        Ok(())
    }

    fn judge(
        &mut self,
        file: &[u8],
        may_be: impl Fn(&SectorModel, usize, u64) -> bool,
    ) -> Result<Verdict, String> {
        let judge = Judge { file, shape: self.shape };
        let verdict = judge.check()?;
        self.check(file)?;
        if judge.size() < self.size {
            return Err(format!("the size is {}, not {}", judge.size(), self.size));
        }
        for (sector, stamp) in judge.sectors().enumerate() {
            if !may_be(&self.model, sector, stamp) {
                return Err(format!(
                    "sector {sector} has {stamp:x}, at {}: {:x?} {:?}",
                    self.now,
                    self.model.values(sector),
                    self.shape
                ));
            }
        }
        Ok(verdict)
    }

    /// Checks that a cut leaks no more than the reserve, what is retired, and what requests have taken.
    fn check_leaks(&self, verdict: Verdict) -> Result<(), String> {
        let max = self.leaks + 3 * self.reserve_max + LEAKS_OF_REQUESTS;
        if verdict.leaks > max { Err(format!("{} leaks, at most {max}", verdict.leaks)) } else { Ok(()) }
    }
}
