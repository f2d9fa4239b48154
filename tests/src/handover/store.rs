//! Holds the bytes under the disk, as two hosts see them.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow};
use kickless_disk::lock::ImageLock;
use kickless_testing::{LoopDevice, Tmpfs, eventually};
use rustix::fs::{Advice, FallocateFlags, fadvise, fallocate};
use tempfile::{NamedTempFile, TempDir};

use crate::guest::image_dir;
use crate::handover::{Case, Format, Medium};
use crate::remote_disks::caching_nbd::CachingNbd;

/// The names of the images, the topmost first.
pub const LAYERS: [&str; 3] = ["disk", "mid", "base"];
/// Bytes of a loop device under a qcow2 image. Only what is used takes space.
const CONTAINER: u64 = 1 << 30;

/// The bytes under the disk. Dropping it removes them.
pub struct Store {
    case: Case,
    is_full: bool,
    kind: Kind,
}

enum Kind {
    File(TempDir),
    Loops(Loops),
    Nbd(CachingNbd),
}

/// Loop devices of two hosts for each image. The fields are dropped in this order.
struct Loops {
    /// Keeps the page cache of each device while no daemon has it open.
    files: [Vec<File>; 2],
    _devices: Vec<LoopDevice>,
    tmpfs: Tmpfs,
}

impl Loops {
    fn make(case: &Case, block: u32, size: u64, space: u64) -> Result<Loops> {
        let tmpfs = Tmpfs::mount(space).map_err(|why| anyhow!("no tmpfs: {why}"))?;
        let dir = tmpfs.path();
        let options = [format!("--sector-size={block}")];
        let options = options.each_ref().map(String::as_str);
        let (mut devices, mut files) = (Vec::new(), [Vec::new(), Vec::new()]);
        for host in 0..2 {
            fs::create_dir(dir.join(host.to_string()))?;
        }
        let bytes = if case.format == Format::Raw { size } else { CONTAINER };
        for name in &LAYERS[..case.layers()] {
            let image = NamedTempFile::new_in(dir)?;
            image.as_file().set_len(bytes)?;
            let first = LoopDevice::new(image, &options).map_err(|why| anyhow!("no loop device: {why}"))?;
            let second = first.another(&options).map_err(|why| anyhow!("no loop device: {why}"))?;
            for (host, device) in [first, second].into_iter().enumerate() {
                device.write_single_pages().map_err(|why| anyhow!(why))?;
                symlink(device.path(), dir.join(host.to_string()).join(name))?;
                files[host].push(File::options().read(true).write(true).open(device.path())?);
                devices.push(device);
            }
        }
        Ok(Loops { files, _devices: devices, tmpfs })
    }

    fn balloon(&self) -> PathBuf {
        self.tmpfs.path().join("balloon")
    }
}

impl Store {
    /// Makes the bytes of a disk of `size` zeroes. The images do not exist yet, unless they are raw. On loop
    /// devices, they have `space` bytes of a file system.
    ///
    /// # Errors
    /// The machine lacks something, such as loop devices.
    pub fn make(case: &Case, size: u64, space: u64) -> Result<Store> {
        let kind = match case.medium {
            Medium::File => {
                let dir = image_dir()?;
                if case.format == Format::Raw {
                    File::create(dir.path().join(LAYERS[0]))?.set_len(size)?;
                }
                Kind::File(dir)
            }
            Medium::Loops { block } => Kind::Loops(Loops::make(case, block, size, space)?),
            Medium::Nbd { can_multi_conn } => Kind::Nbd(CachingNbd::start(size as usize, can_multi_conn)?),
        };
        Ok(Store { case: *case, is_full: false, kind })
    }

    /// Returns the directory in which a host finds the images. An export has none.
    pub fn dir(&self, host: usize) -> Option<PathBuf> {
        match &self.kind {
            Kind::File(dir) => Some(dir.path().to_owned()),
            Kind::Loops(loops) => Some(loops.tmpfs.path().join(host.to_string())),
            Kind::Nbd(_) => None,
        }
    }

    /// Returns the value of `--blk-file` for a host.
    pub fn disk(&self, host: usize) -> OsString {
        let Some(dir) = self.dir(host) else {
            return self.nbd().map(CachingNbd::uri).unwrap_or_default().into();
        };
        let mut name = OsString::from(if self.case.format == Format::Raw { "" } else { "qcow2:" });
        name.push(dir.join(LAYERS[0]));
        name
    }

    /// Returns the NBD server.
    pub fn nbd(&self) -> Option<&CachingNbd> {
        match &self.kind {
            Kind::Nbd(server) => Some(server),
            _ => None,
        }
    }

    /// Opens an image at a host.
    ///
    /// # Errors
    /// It does not exist, as those of an export.
    pub fn open(&self, host: usize, layer: &str) -> Result<File> {
        let path = self.dir(host).context("no image")?.join(layer);
        Ok(File::options().read(true).write(true).open(path)?)
    }

    /// Returns whether no process of a host has the disk. An export has no locks.
    ///
    /// # Errors
    /// The image cannot be opened.
    pub fn is_free(&self, host: usize) -> Result<bool> {
        if self.nbd().is_some() {
            return Ok(true);
        }
        Ok(ImageLock::acquire(&self.open(host, LAYERS[0])?, false).is_ok())
    }

    /// Returns whether the store can be full. It must get whole pages then, because a loop device does not
    /// report a page that is written in part.
    pub fn can_be_full(&self) -> bool {
        matches!(self.case.medium, Medium::Loops { block } if block == 4096 || self.case.writeback)
    }

    /// Returns whether the store is full.
    pub fn is_full(&self) -> bool {
        self.is_full
    }

    /// Takes all free space, or gives it back.
    ///
    /// # Errors
    /// The space cannot be taken.
    pub fn set_full(&mut self, is_full: bool) -> Result<()> {
        let Kind::Loops(loops) = &self.kind else { return Ok(()) };
        if is_full {
            let balloon = File::create(loops.balloon())?;
            let mut len = 0;
            // The kernel may write its page cache meanwhile, so this takes several attempts.
            eventually("the file system is not full", || {
                let more = loops.tmpfs.free_bytes();
                if more > 0 && fallocate(&balloon, FallocateFlags::empty(), len, more).is_ok() {
                    len += more;
                }
                more == 0
            });
        } else {
            fs::remove_file(loops.balloon())?;
            // A program that another test starts may have the descriptor until it executes.
            eventually("the file system is still full", || loops.tmpfs.free_bytes() > 0);
        }
        self.is_full = is_full;
        Ok(())
    }

    /// Reads the first `len` bytes of each image into the page cache of a host, as a backup does.
    ///
    /// # Errors
    /// An image cannot be read.
    pub fn read_ahead(&self, host: usize, len: u64) -> Result<()> {
        let Kind::Loops(loops) = &self.kind else { return Ok(()) };
        for file in &loops.files[host] {
            let mut file = file;
            file.rewind()?;
            io::copy(&mut file.take(len), &mut io::sink())?;
        }
        Ok(())
    }

    /// Writes the page cache of a host to the store, and drops it. An operator does so before another host or
    /// another program uses the images.
    ///
    /// # Errors
    /// The store takes not all.
    pub fn sync(&self, host: usize) -> Result<()> {
        let Kind::Loops(loops) = &self.kind else { return Ok(()) };
        // Each error must be taken.
        let synced: Vec<_> = loops.files[host].iter().map(File::sync_all).collect();
        for file in &loops.files[host] {
            fadvise(file, 0, None, Advice::DontNeed)?;
        }
        Ok(synced.into_iter().collect::<Result<_, _>>()?)
    }
}

impl Case {
    /// Returns the number of images.
    pub fn layers(&self) -> usize {
        match self.format {
            Format::Raw => 1,
            Format::Qcow2 { layers, .. } => layers,
        }
    }
}
