//! Tests front-ends that share more memory than a device needs, or memory whose pages may never come.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kickless_memory::SLOTS_MAX;
use kickless_spec::features::Features;
use kickless_testing::eventually;
use kickless_tests::daemon::{Daemon, child_command};
use kickless_tests::frontend::machine::{Machine, Shape};
use kickless_tests::frontend::{Answer, Frontend, LIMIT};
use kickless_vhost_user::{FrontendMessage as Message, Inflight, LogBase, MemoryRegion};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::process::{getuid, kill_process};
use tempfile::TempDir;

const TIB: u64 = 1 << 40;

/// Creates a file without pages, so that its length costs nothing.
fn sparse(len: u64) -> OwnedFd {
    let file = memfd_create("sparse", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len).unwrap();
    file
}

fn connect(daemon: &Daemon, device: &str) -> Frontend {
    let mut frontend = Frontend::connect(&daemon.socket_of(device)).unwrap();
    frontend.negotiate(Features::VERSION_1).unwrap();
    frontend
}

/// Describes region `number` with `len` bytes of the file.
fn region(number: u64, len: u64, file: impl AsFd) -> Message {
    let start = number * len;
    let region = MemoryRegion { guest_addr: start, size: len, user_addr: start, mmap_offset: 0 };
    Message::AddMemReg(region, file.as_fd().try_clone_to_owned().unwrap())
}

fn log(len: u64, file: impl AsFd) -> Message {
    let fd = Some(file.as_fd().try_clone_to_owned().unwrap());
    Message::SetLogBase(LogBase::Shared { mmap_size: len, mmap_offset: 0, fd })
}

fn inflight(len: u64, file: impl AsFd) -> Message {
    let described = Inflight { mmap_size: len, mmap_offset: 0, num_queues: 1, queue_size: 1 };
    Message::SetInflightFd(described, file.as_fd().try_clone_to_owned().unwrap())
}

fn wait_for_line(daemon: &Daemon, words: &[&str]) {
    let telling = |line: &str| words.iter().all(|word| line.contains(word)).then_some(());
    daemon.log().wait_for(&words.join(", "), LIMIT, telling).unwrap();
}

/// Returns the number of these regions that the back-end accepts before it refuses one.
fn accepted(frontend: &mut Frontend, len: u64, file: &OwnedFd) -> u64 {
    (0..SLOTS_MAX as u64)
        .find(|number| match frontend.attempt(&region(*number, len, file)).unwrap() {
            Answer::Done => false,
            Answer::Refused => true,
            Answer::Dropped => panic!("dropped"),
        })
        .unwrap_or(SLOTS_MAX as u64)
}

#[test]
fn a_greedy_device_leaves_memory_to_others() {
    let disk = "blk-file = 'null:16M'";
    let daemon = Daemon::serve("workers = 1", &[("first", disk), ("second", disk)]).unwrap();
    let (file, mut greedy) = (sparse(2 * TIB), connect(&daemon, "first"));
    assert!(accepted(&mut greedy, 3 * TIB / 2, &file) < 90);
    wait_for_line(&daemon, &["ADD_MEM_REG", "memory-max"]);
    let mut machine = Machine::start(&daemon.socket_of("second"), &Shape::default()).unwrap();
    machine.read(0, 8, 4096).unwrap();
    // The second device gets at least the memory that every device may have.
    let mut second = machine;
    second.stop().unwrap();
    drop(second);
    let mut frontend = connect(&daemon, "second");
    assert!(accepted(&mut frontend, TIB, &file) >= 8);
    drop((frontend, greedy));
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
}

#[test]
fn every_kind_of_memory_is_bounded() {
    let daemon =
        Daemon::serve("workers = 1", &[("disk", "blk-file = 'null:16M'\nmemory-max = '1G'")]).unwrap();
    let (len, file) = (1 << 31, sparse(1 << 31));
    for (message, name) in [
        (region(0, len, &file), "ADD_MEM_REG"),
        (log(len, &file), "SET_LOG_BASE"),
        (inflight(len, &file), "SET_INFLIGHT_FD"),
    ] {
        let mut frontend = connect(&daemon, "disk");
        assert_ne!(frontend.attempt(&message).unwrap(), Answer::Done, "{name}");
        wait_for_line(&daemon, &[name, "memory-max"]);
    }
    let mut frontend = connect(&daemon, "disk");
    frontend.order(&region(0, 1 << 29, &file)).unwrap();
    frontend.order(&inflight(1 << 28, &file)).unwrap();
    drop(frontend);
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
}

/// A device has one descriptor for each file, so that another process can map the same memory. The sandbox
/// lets it duplicate them.
#[test]
fn each_file_of_memory_stays_open_until_it_is_removed() {
    let daemon = Daemon::serve("workers = 1", &[("disk", "blk-file = 'null:16M'")]).unwrap();
    let mut frontend = connect(&daemon, "disk");
    let (len, one, two) = (1 << 20, sparse(1 << 20), sparse(1 << 20));
    let before = daemon.holdings().unwrap();
    let more = || {
        let now = daemon.holdings().unwrap();
        (now.0 - before.0, now.1 - before.1)
    };
    for (number, file, held) in [(0, &one, (1, 1)), (1, &one, (1, 2)), (2, &two, (2, 3))] {
        frontend.order(&region(number, len, file)).unwrap();
        assert_eq!(more(), held);
    }
    frontend.order(&log(len, &two)).unwrap();
    assert_eq!(more(), (2, 4));
    frontend.order(&inflight(len, sparse(len))).unwrap();
    assert_eq!(more(), (3, 5));
    // The answer comes when the file is closed.
    for (number, held) in [(0, (3, 4)), (1, (2, 3))] {
        let Message::AddMemReg(removed, _) = region(number, len, &one) else { unreachable!() };
        frontend.order(&Message::RemMemReg(removed)).unwrap();
        assert_eq!(more(), held);
    }
    drop(frontend);
    daemon.returns_to(before).unwrap();
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
}

/// Returns the number of the daemon's threads that unmap memory.
fn unmapping_threads(daemon: &Daemon) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name == "unmap\n").count()
}

/// Memory is unmapped by a thread of its device, and counts until then. A front-end at the limit can replace
/// its memory and its log all the same, and so can the next front-end. A new log is mapped beside the old
/// one.
#[test]
fn memory_at_the_limit_can_be_replaced_at_once() {
    let disk = "blk-file = 'null:16M'\nmemory-max = '128M'";
    let daemon = Daemon::serve("workers = 1", &[("first", disk), ("second", disk)]).unwrap();
    assert_eq!(unmapping_threads(&daemon), 0);
    let populated = |len: u64| {
        let file = sparse(len);
        fallocate(&file, FallocateFlags::empty(), 0, len).unwrap();
        file
    };
    for round in 0..3 {
        let mut machine = Machine::start(&daemon.socket_of("first"), &Shape::default()).unwrap();
        for _ in 0..4 {
            let (len, file) = (64 << 20, populated(64 << 20));
            let Message::AddMemReg(more, file) = region(100, len, file) else { unreachable!() };
            machine.frontend.order(&Message::AddMemReg(more, file)).unwrap();
            assert_eq!(machine.read(0, 8, 4096).unwrap().len(), 4096);
            machine.frontend.remove(more).unwrap();
        }
        for _ in 0..4 {
            machine.frontend.order(&log(32 << 20, populated(32 << 20))).unwrap();
        }
        eventually(&format!("round {round}"), || unmapping_threads(&daemon) == 1);
    }
    let mut second = Machine::start(&daemon.socket_of("second"), &Shape::default()).unwrap();
    second.read(0, 8, 4096).unwrap();
    // A thread gives itself its name, when it runs for the first time.
    eventually("each device has its own", || unmapping_threads(&daemon) == 2);
    drop(second);
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
}

/// A file on FUSE. Dropping it unmounts the file system.
struct Fuse {
    child: Child,
    path: PathBuf,
    _dir: TempDir,
}

impl Fuse {
    /// Mounts the file. Returns `None` if this machine cannot mount FUSE.
    fn mount(len: u64) -> Option<Fuse> {
        let help = Command::new("qemu-storage-daemon").arg("--help").output().ok()?;
        if !getuid().is_root()
            || !Path::new("/dev/fuse").exists()
            || !String::from_utf8_lossy(&help.stdout).contains("fuse")
        {
            return None;
        }
        let dir = tempfile::Builder::new().prefix("kickless-").tempdir().unwrap();
        let (image, path) = (dir.path().join("image"), dir.path().join("mounted"));
        File::create_new(&image).unwrap().set_len(len).unwrap();
        File::create_new(&path).unwrap();
        let export = format!("type=fuse,id=export,node-name=file,mountpoint={},writable=on", path.display());
        let child = child_command("qemu-storage-daemon")
            .args(["--blockdev", &format!("driver=file,node-name=file,filename={}", image.display())])
            .args(["--export", &export])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut fuse = Fuse { child, path, _dir: dir };
        let deadline = Instant::now() + LIMIT;
        while std::fs::metadata(&fuse.path).unwrap().len() != len {
            if fuse.child.try_wait().unwrap().is_some() {
                return None;
            }
            assert!(Instant::now() < deadline, "nothing is mounted");
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(fuse)
    }

    fn open(&self) -> File {
        File::options().read(true).write(true).open(&self.path).unwrap()
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        let _ = kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.child.wait();
        // The server unmounts the file. This call only matters if the server could not.
        let _ = Command::new("umount").args(["--lazy", "--quiet"]).arg(&self.path).status();
    }
}

#[test]
fn memory_on_fuse_is_refused_by_default() {
    let len = 1 << 20;
    let Some(fuse) = Fuse::mount(len) else {
        eprintln!(
            "skipped: no file system can be mounted by FUSE here (root, /dev/fuse and QEMU's storage daemon)"
        );
        return;
    };
    let disk = "blk-file = 'null:16M'\n";
    let allowed = format!("{disk}allow-slow-memory = true");
    let daemon = Daemon::serve("workers = 1", &[("strict", disk), ("lenient", &allowed)]).unwrap();
    let messages = || {
        let file = fuse.open();
        [
            (region(0, len, &file), "ADD_MEM_REG"),
            (log(len, &file), "SET_LOG_BASE"),
            (inflight(len, &file), "SET_INFLIGHT_FD"),
        ]
    };
    for (message, name) in messages() {
        let mut frontend = connect(&daemon, "strict");
        assert_ne!(frontend.attempt(&message).unwrap(), Answer::Done, "{name}");
        wait_for_line(&daemon, &[name, "FUSE", "allow-slow-memory"]);
    }
    for (message, name) in messages() {
        let mut frontend = connect(&daemon, "lenient");
        assert_eq!(frontend.attempt(&message).unwrap(), Answer::Done, "{name}");
    }
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
}
