//! A libvirtd of a test, with a file system of its own for its configuration, state and sockets, and the
//! guests that it starts. Dropping it kills all of them.

use std::fs::{self, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use crate::daemon::{child_command, repository, wait_for_exit};
use crate::guest::{Assets, image_dir};
use crate::transcript::Transcript;

/// Limit for one command. The first one waits until libvirt has run QEMU to learn what it can do.
const LIMIT: Duration = Duration::from_secs(120);

/// The user and the group under which Debian's libvirt runs QEMU. `libvirt-daemon-system` adds them, and the
/// test has them in files of its own.
pub const QEMU_USER: u32 = 64055;

/// Does not touch the host's AppArmor and cgroups, which the host may lack. The user and the group of QEMU
/// are the defaults.
const QEMU_CONF: &str = "\
security_driver = \"none\"
stdio_handler = \"file\"
cgroup_controllers = [ ]
namespaces = [ ]
remember_owner = 0
";

const LIBVIRTD_CONF: &str = "\
auth_unix_rw = \"none\"
log_outputs = \"3:stderr\"
";

/// Mounts the directories of the test and becomes the first process of a PID namespace, which reaps the
/// guests. When it ends, they do. The guests have emulated CPUs. libvirt would try a KVM that does not work
/// anew for each command, so the user of QEMU has none.
const SCRIPT: &str = "\
set -e
mount --bind \"$1/etc\" /etc/libvirt
mount --bind \"$1/passwd\" /etc/passwd
mount --bind \"$1/group\" /etc/group
for dir in lib log cache; do mount --bind \"$1/$dir\" \"/var/$dir\"; done
[ ! -e /dev/kvm ] || mount --bind \"$1/no-kvm\" /dev/kvm
mount --bind \"$2\" \"$1/run/kickless\"
mount --rbind \"$1/run\" /run
libvirtd &
wait $!
";

/// A running libvirtd.
pub struct Libvirt {
    libvirtd: Child,
    log: Transcript,
    results: UnixListener,
    dir: TempDir,
}

impl Libvirt {
    /// Returns why libvirtd cannot run here.
    pub fn is_missing() -> Option<String> {
        for program in ["libvirtd", "virsh", "unshare", "bash"] {
            if Command::new(program).arg("--version").stdout(Stdio::null()).status().is_err() {
                return Some(format!("there is no {program}"));
            }
        }
        let words = ["--mount", "--pid", "--fork", "--mount-proc", "true"];
        let unshared = Command::new("unshare").args(words).stderr(Stdio::null()).status();
        let is_root = rustix::process::geteuid().is_root();
        (!is_root || !unshared.is_ok_and(|status| status.success()))
            .then(|| "libvirtd needs root and mount namespaces".to_owned())
    }

    /// Starts it. Its guests see `sockets` as `/run/kickless`. They boot with the tasks of a file.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(sockets: &Path, tasks: &Path) -> Result<Libvirt> {
        let dir = image_dir()?;
        let root = dir.path();
        for name in ["etc", "lib/libvirt/boot", "log/libvirt", "cache", "run/kickless"] {
            fs::create_dir_all(root.join(name))?;
        }
        for path in [root, sockets] {
            fs::set_permissions(path, Permissions::from_mode(0o755))?;
        }
        fs::write(root.join("etc/libvirtd.conf"), LIBVIRTD_CONF)?;
        fs::write(root.join("etc/qemu.conf"), QEMU_CONF)?;
        for (name, line) in [("passwd", "x:64055:64055::/:/bin/false"), ("group", "x:64055:")] {
            let others = fs::read_to_string(Path::new("/etc").join(name))?;
            let others = others.lines().filter(|line| !line.starts_with("libvirt-qemu:"));
            let others: String = others.map(|line| format!("{line}\n")).collect();
            fs::write(root.join(name), format!("{others}libvirt-qemu:{line}\n"))?;
        }
        fs::write(root.join("no-kvm"), "")?;
        fs::set_permissions(root.join("no-kvm"), Permissions::from_mode(0o000))?;
        // libvirt gives the files of a guest to its user, so these are copies.
        let assets = Assets::get()?;
        fs::copy(assets.kernel(), root.join("lib/libvirt/boot/vmlinux"))?;
        make_initramfs(&assets.tools(), tasks, &root.join("lib/libvirt/boot"))?;
        let socket = root.join("run/results");
        let results = UnixListener::bind(&socket)?;
        results.set_nonblocking(true)?;
        fs::set_permissions(socket, Permissions::from_mode(0o666))?;
        let mut libvirtd = child_command("unshare")
            .args([
                "--mount",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "bash",
                "-c",
                SCRIPT,
                "bash",
            ])
            .args([root, sockets])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let log = Transcript::of("libvirtd", libvirtd.stderr.take().context("no pipe")?);
        let mut libvirt = Libvirt { libvirtd, log, results, dir };
        libvirt.wait_until_ready()?;
        Ok(libvirt)
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        while !self.virsh(&["version"]).is_ok_and(|text| text.contains("QEMU")) {
            let ended = self.libvirtd.try_wait()?;
            ensure!(ended.is_none() && Instant::now() < deadline, "libvirtd: {}", self.last_words());
            thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Runs a command of `virsh`, as an operator does. Returns its output. Files of the host are those that
    /// libvirtd sees, but for the XML of devices and domains.
    ///
    /// # Errors
    /// It fails; the message has what it said.
    pub fn virsh(&self, words: &[&str]) -> Result<String> {
        let socket = self.dir.path().join("run/libvirt/libvirt-sock");
        let mut virsh = child_command("virsh")
            .args(["--connect", &format!("qemu+unix:///system?socket={}", socket.display())])
            .args(words)
            .current_dir(fixtures())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let said = Transcript::of("virsh", virsh.stdout.take().context("no pipe")?);
        let errors = Transcript::of("virsh", virsh.stderr.take().context("no pipe")?);
        let status = wait_for_exit(&mut virsh, LIMIT);
        if status.is_err() {
            virsh.kill()?;
            virsh.wait()?;
        }
        let errors = errors.wait_for_end(LIMIT)?.join("\n");
        ensure!(status.with_context(|| format!("{words:?}"))?.success(), "virsh {words:?}: {errors}");
        Ok(said.wait_for_end(LIMIT)?.join("\n"))
    }

    /// Waits until the QEMU of a guest has connected its second serial port. Returns the lines of the guest,
    /// and the host's end for writing.
    ///
    /// # Errors
    /// It does not connect.
    pub fn accept_results(&self) -> Result<(Transcript, UnixStream)> {
        let deadline = Instant::now() + LIMIT;
        loop {
            match self.results.accept() {
                Ok((port, _)) => {
                    port.set_nonblocking(false)?;
                    return Ok((Transcript::of("results", port.try_clone()?), port));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
            if Instant::now() >= deadline {
                bail!("QEMU does not connect: {}", self.last_words());
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns the last lines of libvirtd, of QEMU and of the guest's console, for the message of a failed
    /// test.
    pub fn last_words(&self) -> String {
        const SHOWN: usize = 40;
        let logs = ["log/libvirt/qemu/web.log", "log/libvirt/console"].map(|name| self.dir.path().join(name));
        let mut text = self.log.lines().join("\n");
        for log in logs {
            let bytes = fs::read(log).unwrap_or_default();
            let lines = String::from_utf8_lossy(&bytes);
            let lines: Vec<&str> = lines.lines().collect();
            text += &format!("\n{}", lines[lines.len().saturating_sub(SHOWN)..].join("\n"));
        }
        text
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("{}", self.last_words());
        }
        // The kernel kills the first process of the namespace with it, and all others with that.
        let _ = self.libvirtd.kill();
        let _ = self.libvirtd.wait();
        let _ = self.log.wait_for_end(LIMIT);
    }
}

/// Returns the directory with the XML of domains and devices.
pub fn fixtures() -> PathBuf {
    repository().join("tests/fixtures/libvirt")
}

/// Writes an initramfs with further tasks of the guest.
fn make_initramfs(base: &Path, tasks: &Path, dir: &Path) -> Result<()> {
    let script =
        "cp \"$2\" tasks && (cat \"$1\"; echo tasks | cpio -o -H newc --quiet) >initramfs && rm tasks";
    let status =
        Command::new("sh").args(["-ec", script, "sh"]).args([base, tasks]).current_dir(dir).status()?;
    ensure!(status.success(), "{script}: {status}");
    Ok(())
}
