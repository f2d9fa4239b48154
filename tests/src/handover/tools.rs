//! Changes a disk that no guest uses, as an operator does: with `qemu-img` and its like.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::thread;

use anyhow::{Result, anyhow, ensure};
use kickless_disk::lock::ImageLock;

use crate::frontend::LIMIT;
use crate::handover::guest::Guest;
use crate::handover::images::{commit_without_locks, create_chain, create_image};
use crate::handover::oracle::SECTOR;
use crate::handover::store::LAYERS;
use crate::handover::world::{SECTORS, World};
use crate::handover::{Format, Medium};
use crate::qcow2::qemu_img;

/// Snapshots that an image has at most.
const SNAPSHOTS_MAX: u64 = 3;
/// Images that a chain has at most.
const LAYERS_MAX: usize = 5;
/// The size of a raw disk is a multiple of so many sectors.
const STEP: usize = 8;

impl World {
    /// Does something with the disk at a host. No guest uses it.
    ///
    /// # Errors
    /// A tool fails.
    pub fn use_tool(&mut self, host: usize) -> Result<()> {
        let Some(dir) = self.store.dir(host) else { return Ok(()) };
        self.prepare_tool(host)?;
        if self.case.medium == Medium::File && self.random.one_in(4) {
            self.rename(&dir)?;
        } else if self.case.format == Format::Raw {
            self.change_raw(host)?;
        } else {
            self.change_qcow2(&dir)?;
        }
        self.sync(host)
    }

    /// Lets a program at a host see the disk as it is.
    fn prepare_tool(&mut self, host: usize) -> Result<()> {
        if self.store.is_full() {
            self.set_full(false)?;
        }
        self.clear_for(None)?;
        self.sync(host)
    }

    /// Returns a new size in sectors.
    fn size(&mut self) -> usize {
        let step = match self.case.format {
            Format::Raw => STEP,
            // QEMU keeps what is behind the end in the last cluster, and shows it when the image grows again.
            Format::Qcow2 { cluster, .. } => STEP.max(cluster as usize / SECTOR),
        };
        let sectors = self.random.from(SECTORS as u64 / 4..SECTORS as u64 + 1);
        (sectors as usize).next_multiple_of(step)
    }

    /// Writes to a raw disk, or changes its size.
    fn change_raw(&mut self, host: usize) -> Result<()> {
        let file = self.store.open(host, LAYERS[0])?;
        if self.case.medium == Medium::File && self.random.one_in(2) {
            let sectors = self.size();
            self.note(format!("the file gets {sectors} sectors"));
            file.set_len((sectors * SECTOR) as u64)?;
            self.oracle.resize(sectors);
            return Ok(());
        }
        let first = self.random.below(self.oracle.sectors() as u64) as usize;
        let sectors = first..self.oracle.sectors().min(first + 24);
        self.note(format!("another program writes {sectors:?}"));
        let (change, data) = self.oracle.write(sectors);
        file.write_all_at(&data, (first * SECTOR) as u64)?;
        file.sync_all()?;
        self.oracle.end(&change, true, true);
        Ok(())
    }

    /// Replaces the image by another file of its name: an empty disk, or a new image over the old one.
    fn rename(&mut self, dir: &Path) -> Result<()> {
        if self.case.format != Format::Raw && self.chain.len() < LAYERS_MAX && self.random.one_in(2) {
            let old = format!("old{}", self.random.below(1 << 32));
            self.note(format!("the image gets the name {old}, and a new one is put over it"));
            std::fs::rename(dir.join(LAYERS[0]), dir.join(&old))?;
            create_image(&self.case, dir, LAYERS[0], Some(&old), self.oracle.sectors())?;
            self.chain.insert(1, old);
            // They stay with the old image.
            for name in self.oracle.snapshots().cloned().collect::<Vec<_>>() {
                self.oracle.delete_snapshot(&name);
            }
            return Ok(());
        }
        let sectors = self.size();
        self.note(format!("another image of {sectors} sectors gets its name"));
        create_image(&self.case, dir, "new", None, sectors)?;
        std::fs::rename(dir.join("new"), dir.join(LAYERS[0]))?;
        self.chain.truncate(1);
        self.oracle.replace(sectors);
        Ok(())
    }

    /// Makes all images anew in place.
    fn create_again(&mut self, dir: &Path) -> Result<()> {
        let sectors = self.size();
        let names = &LAYERS[..self.case.layers()];
        self.note(format!("qemu-img create in place, {sectors} sectors"));
        create_chain(&self.case, dir, names, sectors)?;
        self.chain = names.iter().map(ToString::to_string).collect();
        self.oracle.replace(sectors);
        Ok(())
    }

    fn change_qcow2(&mut self, dir: &Path) -> Result<()> {
        self.check_image(dir)?;
        let snapshots: Vec<String> = self.oracle.snapshots().cloned().collect();
        let disk = LAYERS[0];
        match self.random.below(9) {
            0 | 1 if snapshots.len() as u64 == SNAPSHOTS_MAX => {
                self.note(format!("qemu-img snapshot -d {}", snapshots[0]));
                qemu_img(dir, &["snapshot", "-q", "-d", &snapshots[0], disk])?;
                self.oracle.delete_snapshot(&snapshots[0]);
            }
            0 | 1 => {
                let name = format!("s{}", self.random.below(1 << 32));
                self.note(format!("qemu-img snapshot -c {name}"));
                qemu_img(dir, &["snapshot", "-q", "-c", &name, disk])?;
                self.oracle.take_snapshot(&name);
            }
            2 | 3 if !snapshots.is_empty() => {
                let name = &snapshots[self.random.below(snapshots.len() as u64) as usize];
                self.note(format!("qemu-img snapshot -a {name}"));
                qemu_img(dir, &["snapshot", "-q", "-a", name, disk])?;
                self.oracle.apply_snapshot(name);
            }
            4 | 5 => {
                let sectors = self.size();
                self.note(format!("qemu-img resize to {sectors} sectors"));
                let size = (sectors * SECTOR).to_string();
                qemu_img(dir, &["resize", "-q", "--shrink", "-f", "qcow2", disk, &size])?;
                self.oracle.resize(sectors);
            }
            8 => self.create_again(dir)?,
            // A snapshot would change with the image under it.
            _ if !snapshots.is_empty() || self.chain.len() == 1 => {}
            6 => {
                self.note("qemu-img commit".into());
                qemu_img(dir, &["commit", "-q", "-f", "qcow2", disk])?;
            }
            _ if self.chain.len() > 2 => {
                self.note("qemu-img rebase".into());
                let under = &self.chain[2];
                qemu_img(dir, &["rebase", "-q", "-f", "qcow2", "-b", under, "-F", "qcow2", disk])?;
                self.chain.remove(1);
            }
            _ => {}
        }
        Ok(())
    }

    /// Checks that an image is whole.
    fn check_image(&self, dir: &Path) -> Result<()> {
        // Status 3 means leaked clusters only.
        let words = ["check", "-q", "-f", "qcow2", LAYERS[0]];
        let output = Command::new("qemu-img").args(words).current_dir(dir).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        let first = said.lines().next().unwrap_or_default();
        ensure!(matches!(output.status.code(), Some(0 | 3)), "qemu-img check: {first}");
        Ok(())
    }

    /// Starts a guest while `qemu-img commit` still moves the second image into the third. The guest must
    /// wait, and see the result.
    ///
    /// # Errors
    /// A tool fails, or the guest sees something else.
    pub fn start_during_commit(&mut self, host: usize) -> Result<()> {
        let (Some(dir), [_, middle, base, ..]) = (self.store.dir(host), &self.chain[..]) else {
            return Ok(());
        };
        let (middle, base) = (middle.clone(), base.clone());
        self.prepare_tool(host)?;
        if self.oracle.snapshots().next().is_none() {
            // The image in the middle has the data then.
            qemu_img(&dir, &["commit", "-q", "-f", "qcow2", LAYERS[0]])?;
        }
        self.note(format!("a guest starts at host {host} during a commit of {middle}"));
        // This lock stands for the one of qemu-img, which would have to be stopped at the right moment.
        let lock = ImageLock::acquire(&self.store.open(host, &middle)?, false)?;
        let daemon = self.hosts[host].daemon()?;
        let (log, seen, socket) = (daemon.log(), daemon.log().len(), daemon.socket());
        let started = thread::scope(|scope| -> Result<_> {
            let guest = scope.spawn(|| Guest::start(socket, false));
            let waits = |line: &str| line.contains("waiting for the image's lock").then_some(());
            let waited = log.wait_from(seen, "waiting", LIMIT, waits);
            let committed = commit_without_locks(&self.case, &dir, &middle, &base);
            drop(lock);
            let started = guest.join().map_err(|_| anyhow!("a panic"))?;
            waited.and(committed)?;
            Ok(started)
        })?;
        // A guest that waits for more than three seconds is refused.
        let Ok(guest) = started else { return Ok(()) };
        (self.guest, self.at) = (Some(guest), host);
        self.check_size()?;
        self.read_all()
    }
}
