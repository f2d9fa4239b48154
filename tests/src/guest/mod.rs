//! Prepares guests: finds the kernel and initramfs that `guest/prepare` makes, and an accelerator.

pub mod cards;
pub mod libvirt;
pub mod migration;
pub mod network;
pub mod qemu;
pub mod qmp;
pub mod scratch;

use std::fs;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use tempfile::TempDir;

use crate::daemon::{child_command, repository, wait_for_exit};

/// The CPU that runs the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// The host's CPU.
    Kvm,
    /// An emulated CPU.
    Tcg,
}

impl Accel {
    /// Returns QEMU's name of the accelerator.
    pub fn name(self) -> &'static str {
        match self {
            Accel::Kvm => "kvm",
            Accel::Tcg => "tcg",
        }
    }
}

/// The files from which guests boot.
#[derive(Debug)]
pub struct Assets {
    dir: PathBuf,
    accel: Accel,
}

impl Assets {
    /// Runs `guest/prepare` and finds the accelerator, once per process.
    ///
    /// # Errors
    /// `guest/prepare` failed; its messages are on standard error.
    pub fn get() -> Result<&'static Assets> {
        static ASSETS: OnceLock<Result<Assets, String>> = OnceLock::new();
        ASSETS
            .get_or_init(|| prepare().map_err(|error| format!("{error:#}")))
            .as_ref()
            .map_err(|e| anyhow!("{e}"))
    }

    /// Returns the path of the kernel image, an EFI program.
    pub fn kernel_image(&self) -> PathBuf {
        self.dir.join("vmlinuz")
    }

    /// Returns the path of the unpacked kernel, which QEMU boots.
    pub fn kernel(&self) -> PathBuf {
        self.dir.join("vmlinux")
    }

    /// Returns the path of the initramfs with fio.
    pub fn tools(&self) -> PathBuf {
        self.dir.join("tools.img")
    }

    /// Returns the path of the small initramfs, without fio.
    pub fn base(&self) -> PathBuf {
        self.dir.join("base.img")
    }

    /// Returns the path of the boot sector: 512 bytes.
    pub fn boot_sector(&self) -> PathBuf {
        self.dir.join("boot-sector.bin")
    }

    /// Returns the accelerator.
    pub fn accel(&self) -> Accel {
        self.accel
    }
}

/// Creates a directory for disk images below `target`, because `/tmp` may be a filesystem without O_DIRECT.
///
/// # Errors
/// The directory cannot be created.
pub fn image_dir() -> Result<TempDir> {
    let target = repository().join("target/guest");
    fs::create_dir_all(&target)?;
    Ok(tempfile::Builder::new().prefix("images-").tempdir_in(target)?)
}

/// Creates an image of `mib` MiB. The first `random_mib` MiB are random bytes, the rest is a hole.
///
/// # Errors
/// The file cannot be written.
pub fn make_image(path: &Path, mib: u64, random_mib: u64) -> Result<()> {
    let mut file = File::create(path)?;
    std::io::copy(&mut File::open("/dev/urandom")?.take(random_mib << 20), &mut file)?;
    file.set_len(mib << 20)?;
    Ok(())
}

/// Returns the SHA-256 of a range of a file, in hexadecimal.
///
/// # Errors
/// The file cannot be read, or there is no `sha256sum`.
pub fn sha256(path: &Path, offset: u64, length: u64) -> Result<String> {
    use std::io::{Seek, SeekFrom};
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(offset))?;
    let mut child = Command::new("sha256sum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut input = child.stdin.take().context("no pipe")?;
    std::io::copy(&mut file.take(length), &mut input)?;
    input.flush()?;
    drop(input);
    let output = child.wait_with_output()?;
    let text = String::from_utf8(output.stdout)?;
    text.split_whitespace().next().map(str::to_owned).context("sha256sum printed nothing")
}

fn prepare() -> Result<Assets> {
    let script = repository().join("guest/prepare");
    let status = Command::new(&script).stdin(Stdio::null()).status().context("cannot run guest/prepare")?;
    ensure!(status.success(), "guest/prepare failed");
    let dir = repository().join("target/guest");
    let accel = accelerator(&dir)?;
    Ok(Assets { dir, accel })
}

/// Returns KVM if this kernel boots under it. With nested or emulated virtualisation, /dev/kvm may open and
/// the guest then hangs early, so this test boots the kernel. It keeps the result until the host boots
/// again.
fn accelerator(dir: &Path) -> Result<Accel> {
    match std::env::var("KICKLESS_ACCEL").as_deref() {
        Ok("kvm") => return Ok(Accel::Kvm),
        Ok("tcg") => return Ok(Accel::Tcg),
        _ => {}
    }
    // The lock keeps two test programs from probing at the same time.
    let lock = File::create(dir.join(".accel.lock"))?;
    lock.lock()?;
    let cache = dir.join("accel");
    let key = format!(
        "{} {}",
        fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim(),
        fs::read_to_string(dir.join("stamp"))?
    );
    let known = fs::read_to_string(&cache).unwrap_or_default();
    if let Some(name) = known.strip_prefix(&key) {
        return Ok(if name == "kvm" { Accel::Kvm } else { Accel::Tcg });
    }
    let accel = if kvm_boots(dir)? { Accel::Kvm } else { Accel::Tcg };
    fs::write(&cache, key + accel.name())?;
    Ok(accel)
}

/// Boots the kernel under KVM within a limit of a few seconds. Returns whether it booted.
fn kvm_boots(dir: &Path) -> Result<bool> {
    const LIMIT: Duration = Duration::from_secs(6);
    if File::options().read(true).write(true).open("/dev/kvm").is_err() {
        return Ok(false);
    }
    let started = Instant::now();
    let mut child = child_command("qemu-system-x86_64")
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
        .args([
            "-machine",
            "q35,accel=kvm",
            "-cpu",
            "host",
            "-m",
            "256M",
            "-serial",
            "null",
            "-serial",
            "stdio",
        ])
        .arg("-kernel")
        .arg(dir.join("vmlinux"))
        .arg("-initrd")
        .arg(dir.join("base.img"))
        .args(["-append", "quiet kl.task=boot"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .context("cannot run QEMU")?;
    let output = child.stdout.take().context("no pipe")?;
    let results = crate::transcript::Transcript::of("KVM probe", output);
    let ended = wait_for_exit(&mut child, LIMIT.saturating_sub(started.elapsed())).is_ok();
    if !ended {
        child.kill()?;
        child.wait()?;
    }
    Ok(ended && !results.wait_for_end(LIMIT)?.iter().all(|line| line != "KL: end=ok"))
}
