//! Files in directories that are allowed, and in others.

use std::fs;
use std::path::Path;
use std::process::Command;

use kickless_testing::eventually;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tempfile::TempDir;

use super::common::{Daemon, LIMIT, PROGRAM, disk};
use super::sandboxed;

#[test]
fn devices_come_and_go() {
    let daemon = sandboxed(&["--allow-root=DIR"]);
    let (image, elsewhere) = (daemon.path("image"), TempDir::new().unwrap());
    fs::write(&image, [0; 4096]).unwrap();
    let add = |socket: &Path, file: &Path| {
        json!({"kind": "blk", "socket-path": socket, "blk-file": file, "name": "b"}).to_string()
    };
    let socket = daemon.path("b.sock");
    for _ in 0..2 {
        let added = daemon.ctl(&["device.add", &add(&socket, &image)]);
        assert!(added.status.success(), "{}", String::from_utf8_lossy(&added.stderr));
        assert!(socket.exists());
        daemon.call("device.remove", json!({"name": "b"}));
        eventually("the socket stays", || !socket.exists());
    }

    // A call names nothing outside of the directories.
    let foreign = elsewhere.path().join("image");
    fs::write(&foreign, [0; 4096]).unwrap();
    let refused = daemon.refused(&["device.add", &add(&socket, &foreign)]);
    assert!(refused.contains("blk-file: ") && refused.contains("--allow-root="), "{refused}");
    let refused = daemon.refused(&["device.add", &add(&elsewhere.path().join("s"), &image)]);
    assert!(refused.contains("socket-path: ") && refused.contains("--allow-root="), "{refused}");
    let link = daemon.path("link");
    std::os::unix::fs::symlink(&foreign, &link).unwrap();
    let refused = daemon.refused(&["device.add", &add(&socket, &link)]);
    assert!(refused.contains("--allow-root="), "{refused}");

    // The configuration file is the operator's, and names what it likes below roots.
    daemon.rewrite(&(disk("a", "") + &disk("c", "")));
    daemon.hang_up();
    daemon.wait_for("the configuration file was read again");
    assert!(daemon.path("c.sock").exists());
    daemon.rewrite(&disk("a", ""));
    daemon.hang_up();
    daemon.wait_for("the configuration file was read again");
    eventually("the socket stays", || !daemon.path("c.sock").exists());
    assert!(fs::read_dir(elsewhere.path()).unwrap().count() == 1);
}

#[test]
fn the_operator_allows_directories() {
    let elsewhere = TempDir::new().unwrap();
    let root = format!("--allow-root={}", elsewhere.path().display());
    let daemon = sandboxed(&[&root]);
    let image = elsewhere.path().join("image");
    fs::write(&image, [0; 4096]).unwrap();
    let socket = elsewhere.path().join("s");
    daemon.call("device.add", json!({"kind": "blk", "socket-path": socket, "blk-file": image}));
    assert!(socket.exists());
    kill_process(Pid::from_child(&daemon.child), Signal::TERM).unwrap();
    assert_eq!(daemon.end(), Some(0));
    assert!(!socket.exists());
}

#[test]
fn a_root_for_all_files_is_a_warning() {
    let daemon = Daemon::serve(&disk("a", ""), &["--allow-root=/"]);
    daemon.wait_for("--allow-root=/ lets calls and images name all files");
    daemon.wait_for("serving");
}

#[test]
fn wrong_roots_are_refused() {
    let mut command = Command::new(PROGRAM);
    command.args(["blk", "--blk-file=null:1M", "--socket-path=/tmp/s", "--sandbox=on", "--allow-root=/none"]);
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        said,
        "kickless: --allow-root=/none: there is no directory /none: make it first, or correct the path\n"
    );
}

#[test]
fn a_container_may_show_little_of_the_host() {
    let script = "mount -t tmpfs none /sys && mount -t proc -o subset=pid none /proc && exec \"$0\" \"$@\"";
    let dir = TempDir::new().unwrap();
    let socket = format!("--socket-path={}", dir.path().join("a.sock").display());
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, PROGRAM, "blk", "--blk-file=null:1M", &socket]);
    let daemon = Daemon::start(command, dir);
    let Ok(line) = daemon.log.recv_timeout(LIMIT) else { panic!("it says nothing") };
    if !line.contains("sandbox") {
        println!("skipped: this needs the right to mount, and Linux 5.8: {line}");
        return;
    }
    daemon.wait_for("serving");
}

#[test]
fn the_configuration_may_be_a_pipe_of_the_shell() {
    let dir = TempDir::new().unwrap();
    let config = disk("a", "").replace("DIR", dir.path().to_str().unwrap());
    let script = format!("exec \"$0\" serve --config=/dev/fd/3 3<<'END'\n{config}\nEND");
    let mut command = Command::new("sh");
    command.args(["-c", &script, PROGRAM]);
    let daemon = Daemon::start(command, dir);
    daemon.wait_for("serving");
    assert!(daemon.path("a.sock").exists());
}

/// An editor writes a new file, and gives it the name of the old one.
#[test]
fn the_configuration_is_replaced_by_another_file_of_its_name() {
    let daemon = sandboxed(&[]);
    let (path, next) = (daemon.path("kickless.toml"), daemon.path("next"));
    daemon.rewrite(&(disk("a", "") + &disk("c", "")));
    fs::rename(&path, &next).unwrap();
    let read = daemon.ctl(&["daemon.reload"]);
    assert!(!read.status.success());
    fs::copy(&next, &path).unwrap();
    daemon.call("daemon.reload", json!({}));
    assert!(daemon.path("c.sock").exists());
}

#[test]
fn names_are_relative_to_the_working_directory() {
    let dir = TempDir::new().unwrap();
    for name in ["image", "other"] {
        fs::write(dir.path().join(name), [0; 4096]).unwrap();
    }
    let mut command = Command::new(PROGRAM);
    command.args(["blk", "--socket-path=a.sock", "--control=control.sock", "--blk-file=image"]);
    command.args(["--cache=writeback"]).current_dir(dir.path());
    let daemon = Daemon::start(command, dir);
    daemon.wait_for("serving");
    let added = json!({"kind": "blk", "socket-path": "./b.sock", "blk-file": "other", "cache": "writeback"});
    daemon.call("device.add", added);
    assert!(daemon.path("b.sock").exists());
}
