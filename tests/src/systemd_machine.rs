//! Boots a root tree with systemd as the first process, in a machine that QEMU emulates.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use std::{env, io};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::daemon::{child_command, repository};
use crate::guest::Assets;
use crate::transcript::Transcript;

/// The longest time of a trial on an emulated CPU that others use too.
const LIMIT: Duration = Duration::from_secs(1200);

/// Files that are put over a root tree.
pub struct Overlay {
    dir: TempDir,
    root: PathBuf,
}

impl Overlay {
    /// Makes an overlay that starts the program `trial`. Returns `None` without a root tree, which
    /// `KICKLESS_SYSTEMD_ROOT` names, and `tools/systemd-root` makes.
    ///
    /// # Errors
    /// A file cannot be copied.
    pub fn new(trial: &Path) -> Result<Option<Self>> {
        let root = env::var_os("KICKLESS_SYSTEMD_ROOT");
        let root = root.map_or_else(|| repository().join("target/systemd-root"), PathBuf::from);
        if !root.join("lib/systemd/systemd").exists() {
            return Ok(None);
        }
        let overlay = Self { dir: TempDir::new()?, root };
        overlay.put(trial, "usr/local/bin/trial")?;
        let unit = repository().join("tests/fixtures/systemd/trial.service");
        overlay.put(&unit, "etc/systemd/system/trial.service")?;
        let wants = overlay.path("etc/systemd/system/multi-user.target.wants");
        fs::create_dir_all(&wants)?;
        symlink("../trial.service", wants.join("trial.service"))?;
        Ok(Some(overlay))
    }

    /// Returns the place of a file of the tree.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join("over").join(name)
    }

    /// Copies a file. Those below `usr` are programs.
    ///
    /// # Errors
    /// It cannot be copied.
    pub fn put(&self, from: &Path, to: &str) -> Result<()> {
        let mode = if to.starts_with("usr/") { 0o755 } else { 0o644 };
        let to = self.path(to);
        fs::create_dir_all(to.parent().context("a file is in a directory")?)?;
        fs::copy(from, &to).with_context(|| from.display().to_string())?;
        // The archive has the permissions of the files.
        Ok(fs::set_permissions(to, Permissions::from_mode(mode))?)
    }

    /// Boots the tree with the files over it, and waits for the line `TRIAL over`. Returns the lines of the
    /// console.
    ///
    /// # Errors
    /// The machine cannot be started, or the line does not come in time.
    pub fn boot(&self) -> Result<Vec<String>> {
        let archives = ["root.img", "over.img"].map(|name| self.dir.path().join(name));
        pack(&self.root, &archives[0])?;
        pack(&self.path(""), &archives[1])?;
        // The kernel unpacks one after the other.
        io::copy(&mut File::open(&archives[1])?, &mut File::options().append(true).open(&archives[0])?)?;
        let assets = Assets::get()?;
        let mut qemu = child_command("qemu-system-x86_64");
        qemu.args(["-nodefaults", "-no-reboot", "-machine", "q35", "-cpu", "max", "-smp", "2", "-m", "1500"]);
        qemu.args(["-accel", assets.accel().name(), "-display", "none", "-serial", "stdio", "-append"]);
        qemu.arg("console=ttyS0 quiet systemd.show_status=0 rdinit=/lib/systemd/systemd");
        qemu.arg("-kernel").arg(assets.kernel()).arg("-initrd").arg(&archives[0]);
        let mut machine = qemu.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let console = Transcript::of("console", machine.stdout.take().context("no pipe")?);
        let is_over = |line: &str| line.contains("TRIAL over").then_some(());
        let over = console.wait_for("the end of the trial", LIMIT, is_over);
        machine.kill()?;
        machine.wait()?;
        let lines = console.lines();
        over.with_context(|| lines.join("\n"))?;
        Ok(lines)
    }
}

/// Returns what the trial has found: its lines `TRIAL`, without this word.
#[must_use]
pub fn found(lines: &[String]) -> Vec<&str> {
    lines.iter().filter_map(|line| line.strip_prefix("TRIAL ")).collect()
}

/// Writes the archive of a directory.
fn pack(directory: &Path, archive: &Path) -> Result<()> {
    let script = "find . -mindepth 1 -print0 | cpio --null -o -H newc --quiet -R 0:0 | gzip -1";
    let out = File::create(archive)?;
    let status = Command::new("sh").args(["-c", script]).current_dir(directory).stdout(out).status()?;
    ensure!(status.success(), "{}: {status}", directory.display());
    Ok(())
}
