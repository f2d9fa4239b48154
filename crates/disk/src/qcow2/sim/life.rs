//! One life of a disk, from opening an image to its cut.

use super::builder::Shape;
use super::image::{Image, SECTOR, WriteId};
use super::judge::{Judge, Verdict};
use super::model::Model;
use super::sender::{Kind, Request};
use crate::qcow2::format::header::Header;
use crate::qcow2::pins::Pins;
use crate::qcow2::qemu::QemuImage;
use crate::qcow2::slices::Slices;
use crate::qcow2::tables::op::{OpId, TableOpKind};
use crate::qcow2::tables::plan::Clear;
use crate::qcow2::tables::rule::{Rule, Rules};
use crate::qcow2::tables::{Parts, Tables, TablesOptions};
use fastrand::Rng;
use kickless_io::{AlignedBuf, Errno, Waker};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A bound of what requests may leak in a life: retired clusters of a few requests.
const LEAKS_OF_REQUESTS: u64 = 64;

/// The owner of an operation.
#[derive(Debug)]
pub(super) enum Target {
    Table(OpId, Option<AlignedBuf>),
    Request(usize),
}

#[derive(Debug)]
enum Work {
    Read { at: u64 },
    Write { id: WriteId, durable: bool },
    Sync { mark: u64 },
}

/// An operation in flight.
#[derive(Debug)]
struct Op {
    target: Target,
    work: Work,
    /// The step before which it does not complete.
    not_before: u64,
}

/// A disk in use.
pub(super) struct Life {
    pub(super) shape: Shape,
    pub(super) image: Image,
    pub(super) model: Model,
    pub(super) tables: Tables,
    pub(super) slices: Arc<Slices>,
    pub(super) pins: Arc<Pins>,
    pub(super) waker: Waker,
    pub(super) requests: BTreeMap<usize, Request>,
    pub(super) rng: Rng,
    pub(super) now: u64,
    pub(super) rule: Option<Rule>,
    ops: Vec<Op>,
    next: usize,
    /// The size that the disk is about to have.
    grows_to: Option<u64>,
    /// The size that was promised.
    size: u64,
    /// The sectors of the last request at a new place.
    last: (usize, usize),
    /// The share of operations that fail.
    failures: f64,
    /// The first fault that was found.
    fault: Option<String>,
    /// The most steps that a request's transfer takes.
    late_max: u64,
    /// Clusters that nothing refers to, from the beginning.
    leaks: u64,
    /// The largest number of clusters of a chunk.
    reserve_max: u64,
}

impl Life {
    /// Opens an image. Its contents are the model's.
    pub(super) fn open(shape: Shape, file: Vec<u8>, rule: Option<Rule>, rng: Rng) -> Self {
        let leaks = Judge { file: &file, shape }.check().unwrap().leaks;
        Self { leaks, rule, ..Self::open_with(shape, file, Rules::without(rule), rng) }
    }

    /// Opens an image with faults.
    pub(super) fn open_unchecked(shape: Shape, file: Vec<u8>, rng: Rng) -> Self {
        Self::open_with(shape, file, Rules::default(), rng)
    }

    fn open_with(shape: Shape, file: Vec<u8>, rules: Rules, mut rng: Rng) -> Self {
        let geometry = shape.geometry;
        let header = Header::parse(&file[..geometry.cluster() as usize], file.len() as u64).unwrap();
        let table = |at: u64, bytes: u64| file[at as usize..][..bytes as usize].to_vec();
        let model = Model::new(Judge { file: &file, shape }.sectors());
        let (slices, pins) = (Arc::new(Slices::new(geometry, 512, 0)), Arc::new(Pins::new()));
        let parts = Parts {
            header: &header,
            first: table(0, geometry.cluster()),
            l1: table(header.l1.at.0, header.l1.entries * 8),
            refcount_table: table(header.refcounts.at.0, header.refcounts.entries * 8),
            file_bytes: file.len() as u64,
        };
        let reserve_max = rng.choice([2, 4, 24]).unwrap() * geometry.cluster();
        let late_max = rng.choice([30, 150, 600]).unwrap();
        let options =
            TablesOptions { unit: 512, discard: rng.bool(), device_bytes: None, reserve_max, rules };
        let tables = Tables::new(parts, Arc::clone(&slices), Arc::clone(&pins), options).unwrap();
        let failures = rng.choice([0.0, 0.0, 0.02, 0.1]).unwrap();
        Self {
            shape,
            image: Image::new(file),
            model,
            tables,
            slices,
            pins,
            waker: Waker::new().unwrap(),
            requests: BTreeMap::new(),
            rng,
            now: 1,
            rule: None,
            ops: Vec::new(),
            next: 0,
            grows_to: None,
            size: header.size,
            last: (0, 1),
            failures,
            fault: None,
            late_max,
            leaks: 0,
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
        if self.waker.clear() {
            self.requests.values_mut().for_each(Request::woken);
        }
        self.grow();
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

    /// Grows the disk now and then.
    fn grow(&mut self) {
        if let Some(Ok(size)) = self.grows_to.and_then(|_| self.tables.grown()) {
            (self.size, self.grows_to) = (size, None);
        }
        if self.rng.u16(..300) == 0 {
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
        let request = Request::new(kind, first, len, self.now);
        if request.changes() {
            for sector in first..first + len {
                self.model.start(sector, request.stamp(self.shape.offset(sector)), self.now);
            }
        }
        self.requests.insert(self.next, request);
    }

    fn random_request(&mut self) -> (Kind, usize, usize) {
        let per_cluster = self.shape.geometry.cluster() as usize / SECTOR;
        let per_table = self.shape.used as usize * per_cluster;
        let table = self.rng.usize(..self.shape.tables as usize);
        let kind = match self.rng.u8(..16) {
            0..8 => Kind::Write { number: self.now, durable: self.rng.u8(..3) == 0 },
            8..10 => Kind::Clear(Clear::Unmap),
            10 => Kind::Clear(Clear::Zero),
            11 => Kind::Clear(Clear::Discard),
            12..14 => Kind::Flush,
            _ => Kind::Read,
        };
        let is_whole = self.last.0.is_multiple_of(per_cluster) && self.last.1.is_multiple_of(per_cluster);
        if (is_whole || !kind.is_whole()) && self.rng.u8(..3) == 0 {
            // The same place again.
            return (kind, self.last.0, self.last.1);
        }
        let (from, to) = if kind.is_whole() || self.rng.u8(..3) == 0 {
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
    pub(super) fn end(&mut self, request: &Request) {
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

    fn submit_due(&mut self) {
        let is_due = self.tables.has_due();
        let Some(op) = self.tables.next_op() else {
            assert!(!is_due || self.rule.is_some(), "an operation is due, and there is none");
            return;
        };
        match op.kind {
            TableOpKind::Read { at, buffer } => {
                self.push(Target::Table(op.id, Some(buffer)), Work::Read { at });
            }
            TableOpKind::Write { at, buffer } => {
                let bytes = buffer[buffer.window()].to_vec();
                self.submit_write(Target::Table(op.id, Some(buffer)), at as usize, bytes, false);
            }
            TableOpKind::Sync => {
                let mark = self.image.sync_begins();
                self.submit_sync(Target::Table(op.id, None), mark);
            }
            TableOpKind::Zero { at, len } => {
                let bytes = vec![0; len as usize];
                self.submit_write(Target::Table(op.id, None), at as usize, bytes, false);
            }
        }
    }

    pub(super) fn submit_write(&mut self, target: Target, at: usize, bytes: Vec<u8>, durable: bool) {
        let id = self.image.submit(at, bytes);
        self.push(target, Work::Write { id, durable });
    }

    pub(super) fn submit_sync(&mut self, target: Target, mark: u64) {
        self.push(target, Work::Sync { mark });
    }

    fn push(&mut self, target: Target, work: Work) {
        let late = match (&target, self.rng.u8(..20)) {
            (_, 0..11) => 0,
            (_, 11..17) => self.rng.u64(..30),
            (Target::Table(..), _) => self.rng.u64(..150),
            (Target::Request(_), _) => self.rng.u64(..self.late_max),
        };
        self.ops.push(Op { target, work, not_before: self.now + late });
    }

    fn complete_one(&mut self) {
        let ripe: Vec<usize> =
            (0..self.ops.len()).filter(|index| self.ops[*index].not_before <= self.now).collect();
        if let Some(index) = self.rng.choice(ripe) {
            let op = self.ops.swap_remove(index);
            self.complete(op);
        }
    }

    fn complete(&mut self, op: Op) {
        let Op { target, work, .. } = op;
        let errno = if self.rng.bool() { Errno::NOSPC } else { Errno::IO };
        let result = if self.rng.f64() < self.failures { Err(errno) } else { Ok(()) };
        let mut read = None;
        match work {
            Work::Read { at } => read = Some(at),
            Work::Write { id, durable: true } if result.is_ok() => self.image.complete_durable(id),
            Work::Write { id, .. } if result.is_ok() => self.image.complete(id),
            Work::Write { id, .. } => self.image.fail(id, &mut self.rng),
            Work::Sync { mark } if result.is_ok() => self.image.synced(mark),
            Work::Sync { .. } => {}
        }
        match target {
            Target::Table(id, mut buffer) => {
                if let (Some(at), Some(buffer)) = (read, &mut buffer) {
                    self.image.read(at as usize, buffer);
                }
                self.tables.complete(id, buffer, result.map(|()| 0));
            }
            Target::Request(id) => {
                let mut request = self.requests.remove(&id).unwrap();
                if matches!(work, Work::Sync { .. }) {
                    let (mark, began) = request.synced(result);
                    self.tables.synced(mark, result);
                    if result.is_ok() {
                        self.model.flushed(began);
                    }
                    self.end(&request);
                } else {
                    request.transferred(result);
                    self.requests.insert(id, request);
                }
            }
        }
    }

    /// Ends all requests without failures. Returns an error if one waits for ever.
    pub(super) fn drain(&mut self) -> Result<(), String> {
        self.failures = 0.0;
        for _ in 0..20_000 {
            self.now += 1;
            if self.waker.clear() {
                self.requests.values_mut().for_each(Request::woken);
            }
            for id in self.ready() {
                self.step(id);
            }
            while self.tables.has_due() {
                self.submit_due();
            }
            if self.ops.is_empty() {
                if self.requests.is_empty() {
                    return Ok(());
                }
                if self.ready().is_empty() && !self.waker.clear() {
                    return Err(format!("a request waits for ever: {:?}", self.requests.values().next()));
                }
                self.requests.values_mut().for_each(Request::woken);
            } else {
                let op = self.ops.swap_remove(self.rng.usize(..self.ops.len()));
                self.complete(op);
            }
        }
        Err(format!("a request never ends: {:?}", self.requests.values().next()))
    }

    /// Closes the disk, and returns its leaks.
    pub(super) fn close(&mut self) -> Result<Verdict, String> {
        self.drain()?;
        self.tables.close();
        self.drain()?;
        match self.tables.closed() {
            Some(Ok(())) => {}
            other => return Err(format!("closing ended with {other:?}: {:?}", self.tables.stats())),
        }
        let file = self.image.now().to_vec();
        let verdict = self.judge(&file, |model, sector, stamp| model.may_be_after_kill(sector, stamp))?;
        match verdict.leaks {
            leaks if leaks > self.leaks => Err(format!("closing leaks {} clusters", leaks - self.leaks)),
            _ => Ok(verdict),
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

    fn judge(&mut self, file: &[u8], may_be: impl Fn(&Model, usize, u64) -> bool) -> Result<Verdict, String> {
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
