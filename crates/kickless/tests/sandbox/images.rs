//! Images that are replaced, come later, have backing images, or come as descriptors.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use kickless_driver::{Disk, Options};
use kickless_testing::{Tmpfs, eventually};
use serde_json::json;
use tempfile::TempDir;

use super::common::{Daemon, PROGRAM, check_sandbox};
use super::sandboxed;

/// The size of a file system of a test: some images, each of which has less than 1 MiB.
const TMPFS_BYTES: u64 = 64 << 20;

const SIZE: usize = 1 << 20;

/// Makes an image whose bytes all have this value.
fn make(path: &Path, byte: u8) {
    fs::write(path, vec![byte; SIZE]).unwrap();
}

/// Makes an image over another one, which has this name in it.
fn make_over(path: &Path, backing: &Path, format: &str) {
    let mut command = Command::new("qemu-img");
    // The name is not looked at, because it may be relative to another directory.
    command.args(["create", "-q", "-f", "qcow2", "-u", "-F", format, "-b"]).arg(backing).arg(path).arg("1M");
    assert!(command.status().unwrap().success());
}

/// Returns the first byte of a disk.
fn first_byte(socket: &Path) -> u8 {
    let disk = Disk::connect(Options::new(socket)).unwrap();
    let mut bytes = [0; 512];
    disk.read_at(&mut bytes, 0).unwrap();
    bytes[0]
}

fn device(name: &str, file: &str) -> String {
    // The temporary directory may be on any file system.
    format!("[[device]]\nsocket-path = 'DIR/{name}.sock'\nblk-file = '{file}'\ncache = 'writeback'\n")
}

#[test]
fn an_image_is_replaced_by_another_of_its_name() {
    let images = TempDir::new().unwrap();
    let image = images.path().join("image");
    make(&image, 1);
    let daemon = Daemon::serve(&device("a", image.to_str().unwrap()), &[]);
    daemon.wait_for("serving");
    let socket = daemon.path("a.sock");
    assert_eq!(first_byte(&socket), 1);
    let next = images.path().join("next");
    make(&next, 2);
    fs::rename(&next, &image).unwrap();
    assert_eq!(first_byte(&socket), 2);

    // A link to another directory is no file of this one any more. The disk goes on with its file.
    let elsewhere = TempDir::new().unwrap();
    make(&elsewhere.path().join("image"), 3);
    fs::remove_file(&image).unwrap();
    symlink(elsewhere.path().join("image"), &image).unwrap();
    assert_eq!(first_byte(&socket), 2);
    assert!(daemon.wait_for("the image was deleted").contains("--allow-root="));
}

/// Makes chains of two images below `top`, whose backing images have relative and absolute names, and names
/// that are links. Those of the last two are in `other`. Returns their paths.
fn make_chains(top: &Path, other: &Path) -> Vec<PathBuf> {
    make(&top.join("base"), 1);
    make(&other.join("base"), 2);
    symlink("base", top.join("link")).unwrap();
    symlink(other.join("base"), top.join("link-out")).unwrap();
    let names = [
        PathBuf::from("base"),
        top.join("base"),
        "link".into(),
        "../".into(),
        other.join("base"),
        "link-out".into(),
    ];
    let chain = |(number, name): (usize, &PathBuf)| {
        let image = top.join(format!("image-{number}"));
        // A relative name that leaves the directory and comes back.
        let name = if name == Path::new("../") {
            name.join(top.file_name().unwrap()).join("base")
        } else {
            name.clone()
        };
        make_over(&image, &name, "raw");
        image
    };
    names.iter().enumerate().map(chain).collect()
}

#[test]
fn chains_are_found() {
    let (top, other) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let mut images = make_chains(top.path(), other.path());
    // A chain of three, and an image whose own path is a link to another directory.
    let third = top.path().join("third");
    make_over(&third, Path::new("image-0"), "qcow2");
    images.insert(4, third);
    let links = TempDir::new().unwrap();
    symlink(top.path().join("image-1"), links.path().join("image")).unwrap();
    images.insert(5, links.path().join("image"));
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let device = |(image, name): (&PathBuf, &str)| {
        device(name, &format!("qcow2:{}", image.display())) + "read-only = true\n"
    };
    let config: String = images.iter().zip(names).map(device).collect();
    let allowed = format!("--allow-root={}", other.path().display());
    let daemon = Daemon::serve(&config, &["--all-or-nothing", &allowed]);
    daemon.wait_for("serving");
    for (number, name) in names.iter().enumerate() {
        let expected = if number < 6 { 1 } else { 2 };
        assert_eq!(first_byte(&daemon.path(&format!("{name}.sock"))), expected, "{name}");
    }
}

#[test]
fn backing_images_in_other_directories_are_refused() {
    let (top, other) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let outside = make_chains(top.path(), other.path()).split_off(4);
    for image in outside {
        let socket = top.path().join("socket");
        let output = Command::new(PROGRAM)
            .args(["blk", "--cache=writeback", "--read-only"])
            .arg(format!("--socket-path={}", socket.display()))
            .arg(format!("--blk-file=qcow2:{}", image.display()))
            .output()
            .unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        let real = other.path().canonicalize().unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("its backing image"), "{said}");
        assert!(said.contains(&format!("add --allow-root={}, or one above it", real.display())), "{said}");
        assert!(!socket.exists());
        check_sandbox(&said);
    }
}

/// The directory comes later too.
#[test]
fn a_disk_comes_later() {
    let daemon = Daemon::serve(&device("a", "DIR/to/come/image"), &[]);
    assert!(daemon.wait_for("unavailable").contains("there is no directory"));
    fs::create_dir_all(daemon.path("to/come")).unwrap();
    make(&daemon.path("to/come/image"), 7);
    daemon.wait_for("serving");
    assert_eq!(first_byte(&daemon.path("a.sock")), 7);
}

#[test]
fn a_disk_comes_with_a_file_system() {
    let images = TempDir::new().unwrap();
    let directory = images.path().join("mounted");
    fs::create_dir(&directory).unwrap();
    let image = directory.join("image");
    let daemon = Daemon::serve(&device("a", image.to_str().unwrap()), &[]);
    daemon.wait_for("unavailable");
    let Ok(_mounted) = Tmpfs::mount_at(&directory, TMPFS_BYTES) else {
        println!("skipped: this needs the right to mount");
        return;
    };
    make(&image, 7);
    daemon.wait_for("serving");
    assert_eq!(first_byte(&daemon.path("a.sock")), 7);
}

/// The kernel does not look at a rule of a directory that is under a mount point.
#[test]
fn a_file_system_over_an_image_needs_the_directory_above() {
    let images = TempDir::new().unwrap();
    let directory = images.path().join("mounted");
    fs::create_dir(&directory).unwrap();
    let image = directory.join("image");
    make(&image, 1);
    let config = device("a", image.to_str().unwrap());
    let allowed = format!("--allow-root={}", images.path().display());
    let daemons = [&[][..], &[allowed.as_str()]].map(|arguments| Daemon::serve(&config, arguments));
    daemons.iter().for_each(|daemon| drop(daemon.wait_for("serving")));
    let Ok(_mounted) = Tmpfs::mount_at(&directory, TMPFS_BYTES) else {
        println!("skipped: this needs the right to mount");
        return;
    };
    make(&image, 2);
    let [refused, allowed] = &daemons;
    refused.ctl(&["device.resize", "{\"name\": \"a\"}"]);
    let line = refused.wait_for("outside of the directories that the sandbox allows");
    assert!(line.contains("/mounted, or one above it"), "{line}");
    assert_eq!(first_byte(&allowed.path("a.sock")), 2);
}

#[test]
fn a_descriptor_is_of_any_directory() {
    let daemon = sandboxed(&[]);
    let elsewhere = TempDir::new().unwrap();
    let image = elsewhere.path().join("image");
    make(&image, 9);
    for cache in ["none", "writeback"] {
        let script = "exec \"$0\" ctl --fd=image=5 device.add \"$1\" 5<>\"$2\"";
        let socket = daemon.path("b.sock");
        let disk = json!({"name": "b", "socket-path": socket, "blk-file": "fd:image", "cache": cache});
        let mut command = Command::new("sh");
        command.args(["-c", script, PROGRAM, &disk.to_string()]).arg(&image).stdin(Stdio::null());
        let output = command.env("RUNTIME_DIRECTORY", daemon.dir.path()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(first_byte(&socket), 9);
        Disk::connect(Options::new(&socket)).unwrap().write_at(&[9; 512], 512).unwrap();
        daemon.call("device.remove", json!({"name": "b"}));
    }
}

/// A disk grows while it runs: the right to do so stays with its descriptor.
#[test]
fn an_image_grows() {
    let images = TempDir::new().unwrap();
    let image = images.path().join("image");
    let mut plain = Command::new("qemu-img");
    let made = plain.args(["create", "-q", "-f", "qcow2"]).arg(&image).arg("1M").status().unwrap();
    assert!(made.success());
    let daemon = Daemon::serve(&device("a", &format!("qcow2:{}", image.display())), &[]);
    daemon.wait_for("serving");
    let grow = || daemon.ctl(&["device.resize", "{\"name\": \"a\", \"size\": \"2M\"}"]);
    let disk = Disk::connect(Options::new(daemon.path("a.sock"))).unwrap();
    eventually("it does not grow", || grow().status.success());
    eventually("the guest sees no growth", || disk.size().unwrap() == 2 << 20);
    disk.write_at(&[7; 512], (2 << 20) - 512).unwrap();
}
