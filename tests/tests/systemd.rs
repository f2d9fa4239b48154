//! Runs the unit under a real systemd, in a machine that QEMU emulates: reloads, restarts and a crash under
//! verified load, and what the watchdog and the journal make of them. `KICKLESS_SYSTEMD_ROOT` is a root tree
//! that `tools/systemd-root` has made.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::env;
use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use kickless_tests::daemon::{check_sandbox, child_command, kickless_binary, repository};
use kickless_tests::guest::Assets;
use kickless_tests::transcript::Transcript;
use tempfile::TempDir;

/// The longest time of the trial on an emulated CPU that others use too.
const LIMIT: Duration = Duration::from_secs(500);

const DEVICES: &str = r#"
[[device]]
name = "memory"
socket-path = "/run/kickless/memory.sock"
blk-file = "mem:1M"

[[device]]
name = "file"
socket-path = "/run/kickless/file.sock"
blk-file = "/var/lib/images/disk.img"

[[device]]
name = "card"
socket-path = "/run/kickless/card.sock"
port = "null"
"#;

fn root() -> Option<PathBuf> {
    let root = env::var_os("KICKLESS_SYSTEMD_ROOT");
    let root = root.map_or_else(|| repository().join("target/systemd-root"), PathBuf::from);
    root.join("lib/systemd/systemd").exists().then_some(root)
}

/// Writes the archive of a directory. The kernel unpacks several of them one after the other.
fn pack(directory: &Path, archive: &Path) {
    let script = "find . -mindepth 1 -print0 | cpio --null -o -H newc --quiet -R 0:0 | gzip -1";
    let out = File::create(archive).unwrap();
    let status = Command::new("sh").args(["-c", script]).current_dir(directory).stdout(out).status().unwrap();
    assert!(status.success(), "{status}");
}

/// Makes the files that are put over the root tree.
fn overlay(dir: &Path) {
    let repository = repository();
    let put = |from: &Path, to: &str| {
        let to = dir.join(to);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(from, &to).unwrap();
        // The archive has the permissions of the files.
        let mode = if to.starts_with(dir.join("usr")) { 0o755 } else { 0o644 };
        fs::set_permissions(to, fs::Permissions::from_mode(mode)).unwrap();
    };
    put(&kickless_binary().unwrap(), "usr/bin/kickless");
    put(&repository.join("dist/systemd/kickless.service"), "etc/systemd/system/kickless.service");
    put(&repository.join("dist/systemd/kickless.sysusers.conf"), "etc/sysusers.d/kickless.conf");
    put(&repository.join("tests/fixtures/systemd/trial"), "usr/local/bin/trial");
    put(&repository.join("tests/fixtures/systemd/trial.service"), "etc/systemd/system/trial.service");
    let wants = dir.join("etc/systemd/system/multi-user.target.wants");
    fs::create_dir_all(&wants).unwrap();
    symlink("../trial.service", wants.join("trial.service")).unwrap();
    fs::create_dir_all(dir.join("etc/kickless")).unwrap();
    fs::write(dir.join("etc/kickless/devices.toml"), DEVICES).unwrap();
}

/// Boots the root tree. Returns the lines of its console.
fn boot(root: &Path) -> Vec<String> {
    let dir = TempDir::new().unwrap();
    let over = dir.path().join("over");
    overlay(&over);
    let archives = ["root.img", "over.img"].map(|name| dir.path().join(name));
    pack(root, &archives[0]);
    pack(&over, &archives[1]);
    let [mut image, mut more] =
        archives.each_ref().map(|path| File::options().read(true).append(true).open(path).unwrap());
    std::io::copy(&mut more, &mut image).unwrap();
    let assets = Assets::get().unwrap();
    let mut qemu = child_command("qemu-system-x86_64");
    qemu.args(["-nodefaults", "-no-reboot", "-machine", "q35", "-cpu", "max", "-smp", "2", "-m", "1500"]);
    qemu.args(["-accel", assets.accel().name(), "-display", "none", "-serial", "stdio", "-append"]);
    qemu.arg("console=ttyS0 quiet systemd.show_status=0 rdinit=/lib/systemd/systemd");
    qemu.arg("-kernel").arg(assets.kernel()).arg("-initrd").arg(&archives[0]);
    let mut machine = qemu.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let console = Transcript::of("console", machine.stdout.take().unwrap());
    let is_over = |line: &str| line.contains("TRIAL over").then_some(());
    let over = console.wait_for("the end of the trial", LIMIT, is_over);
    machine.kill().unwrap();
    machine.wait().unwrap();
    let lines = console.lines();
    assert!(over.is_ok(), "{over:?}: {}", lines.join("\n"));
    lines
}

#[test]
fn systemd_reloads_and_restarts_under_load() {
    let Some(root) = root() else {
        println!("skipped: this needs a root tree with systemd, which tools/systemd-root makes");
        return;
    };
    let lines = boot(&root);
    let all = lines.join("\n");
    let found: Vec<&str> = lines.iter().filter_map(|line| line.strip_prefix("TRIAL ")).collect();
    let expected = [
        "start 0 active Serves 3 devices",
        "reload 1 0 moved active",
        "reload 2 0 moved active",
        "reexec 0 moved active",
        "failing 1 same active",
        "restart 1 0 moved active",
        "restart 2 0 moved active",
        "after 0 moved active",
        "store 0",
        "loads good good",
        "crash moved active",
        "again 0 moved active",
        // The watchdog is fed for longer than its interval, and bites a process that has stopped.
        "fed same active",
        "watchdog moved active",
        "restarts 2",
        "stop 0 inactive success 0 0",
        // The reload that failed, and no priority is left in a line.
        "errors 1 1 0",
        "over",
    ];
    assert_eq!(found, expected, "{all}");
    let count = |text: &str| lines.iter().filter(|line| line.contains(text)).count();
    // All restarts were by the store, and so was the stop.
    assert_eq!(
        (count("took over from the store devices=3"), count("stored for the next process")),
        (3, 4),
        "{all}"
    );
    assert_eq!(count("took over devices=3"), 5, "{all}");
    check_sandbox(&lines).unwrap();
}
