//! Two devices over one disk, as in two processes.

use kickless_blk::{Blk, HandedDisk, Options};
use kickless_device::{Device, Driver, HandOver, Handed};
use kickless_disk::lock::check;
use kickless_disk::{Cache, Disk, DiskSpec};
use kickless_handover::{Given, Giving, Part, v1};
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::NamedTempFile;

pub(crate) const OPTIONS: kickless_disk::Options =
    kickless_disk::Options { read_only: false, cache: Cache::None, cache_size: None };
pub(crate) const FILE_OPTIONS: [kickless_disk::Options; 2] =
    [OPTIONS, kickless_disk::Options { cache: Cache::Writeback, ..OPTIONS }];

/// Makes an image of 1 MiB. On a file system with direct I/O, where the tests have one.
pub(crate) fn image() -> NamedTempFile {
    let image = NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    image.as_file().set_len(1 << 20).unwrap();
    image
}

pub(crate) fn of_file(image: &NamedTempFile) -> DiskSpec {
    DiskSpec::File(image.path().into())
}

pub(crate) fn device_options() -> Options {
    Options { serial: "pair".to_owned(), queues_max: 4, queue_size_max: crate::rig::SIZE, lock: true }
}

/// The state of a device on its way.
pub(crate) struct Passed {
    pub(crate) state: Part,
    pub(crate) given: Given,
}

/// Returns the part of a kind as the other process reads it.
pub(crate) fn passed_all(giving: Giving, own: Part) -> Passed {
    let record = giving.record(&v1::Device { own, ..v1::Device::default() }).unwrap();
    let (device, given) = record.read::<v1::Device>().unwrap();
    Passed { state: device.own, given }
}

/// A device, and the one that takes it over.
pub(crate) struct Pair {
    pub(crate) old: Arc<Blk>,
    spec: DiskSpec,
    options: kickless_disk::Options,
    new: Option<Arc<Blk>>,
    pub(crate) expects_lock: bool,
}

impl Pair {
    /// Makes a device whose guest runs.
    pub(crate) fn new(disk: Disk, spec: &DiskSpec, options: &kickless_disk::Options) -> Self {
        let old = Arc::new(Blk::new(disk, device_options()));
        old.reset(Driver::Fresh);
        old.open().unwrap();
        Self::of(old, spec, options)
    }

    pub(crate) fn of(old: Arc<Blk>, spec: &DiskSpec, options: &kickless_disk::Options) -> Self {
        Self { old, spec: spec.clone(), options: *options, new: None, expects_lock: true }
    }

    /// Gives the device, while rings run.
    pub(crate) fn give(&self) -> Passed {
        self.assert_locked();
        assert_eq!(self.old.refuses(), None);
        let mut giving = Giving::default();
        let own = self.old.give(&mut giving).unwrap();
        passed_all(giving, own)
    }

    /// Makes the device in the new process.
    pub(crate) fn make(&self, mut passed: Passed) -> Result<Arc<Blk>, String> {
        let handed = Handed { state: passed.state, given: &mut passed.given };
        let handed = HandedDisk::new(&self.spec, &self.options, handed).map_err(|error| error.to_string())?;
        let device = Blk::of_handed(handed, device_options());
        self.assert_locked();
        device.check_handed().map_err(|error| error.to_string())?;
        Ok(Arc::new(device))
    }

    /// Returns the last state of the old device, whose rings are parked.
    pub(crate) fn give_final(&self) -> Result<Passed, String> {
        self.old.settle().map_err(|error| error.to_string())?;
        self.give_final_unsettled()
    }

    /// Returns the last state without a sync before it.
    pub(crate) fn give_final_unsettled(&self) -> Result<Passed, String> {
        self.old.hold();
        let mut giving = Giving::default();
        let own = self.old.give_final(&mut giving).map_err(|error| error.to_string())?;
        self.assert_locked();
        Ok(passed_all(giving, own))
    }

    pub(crate) fn receive(&self, new: &Blk, last: Passed) -> Result<(), String> {
        let received = new.receive_final(last.state, &last.given).map_err(|error| error.to_string());
        self.assert_locked();
        received
    }

    /// Lets the new device go on.
    pub(crate) fn finish(&mut self, new: &Arc<Blk>) {
        let last = self.give_final().unwrap();
        self.receive(new, last).unwrap();
        new.begin();
        self.assert_locked();
        self.new = Some(new.clone());
    }

    /// Passes a device without rings.
    pub(crate) fn pass(&mut self) -> Arc<Blk> {
        let new = self.make(self.give()).unwrap();
        self.finish(&new);
        new
    }

    /// Ends the old process, and returns the new device.
    pub(crate) fn end_old(&mut self) -> Arc<Blk> {
        let none = DiskSpec::Null(512);
        let none = Disk::open(&none, &OPTIONS).unwrap();
        self.old = Arc::new(Blk::new(none, device_options()));
        self.assert_locked();
        self.new.take().unwrap()
    }

    /// Checks that no other program can write to an image of the disk.
    pub(crate) fn assert_locked(&self) {
        for path in images(&self.spec).into_iter().filter(|_| self.expects_lock) {
            let other = File::open(&path).unwrap();
            assert!(check(&other, false).is_err(), "{} is not locked", path.display());
        }
    }
}

/// Returns the images of a disk, those under the first one too if they are beside it.
fn images(spec: &DiskSpec) -> Vec<PathBuf> {
    match spec {
        DiskSpec::File(path) => [path.clone()].into_iter().filter(|path| path.exists()).collect(),
        DiskSpec::Qcow2(path) => {
            let under = path.with_file_name("under");
            [path.clone(), under].into_iter().filter(|path| path.exists()).collect()
        }
        DiskSpec::Fault(_, under) => images(under),
        _ => Vec::new(),
    }
}
