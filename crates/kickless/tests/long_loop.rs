//! Adds, limits, resizes, drains and removes many devices of a running daemon, again and again, while others
//! are under verified load.
//!
//! The same load runs without changes first, for half the time, so that each run has its own comparison. The
//! short form takes seconds. The long one is
//!
//!     export KICKLESS_LOOP_SECONDS=600 KICKLESS_LOOP_DEVICES=500
//!     cargo test --release -p kickless --test long_loop -- --nocapture
//!
//! It also fails if a write and a read of a disk of memory (`mem:`, or an image on tmpfs) take more than 50
//! ms, and none does without changes. The end of a direct write to another image waits for a thread of the
//! kernel. It is shown and not judged (docs/measurements/disks.md).
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "a test may")]

mod common;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{Checked, PROGRAM, checked, children};
use kickless_control::Client;
use kickless_driver::{Disk, Options};
use serde_json::{Value, json};
use tempfile::TempDir;

/// After this time, a wait has failed.
const LIMIT: Duration = Duration::from_secs(60);
/// Threads that change devices.
const CHANGERS: usize = 4;
const BLOCK: usize = 4096;
const BLOCKS: u64 = 64;
/// The disks under load: in RAM, on tmpfs, and on the file system of temporary files.
const STEADY: [&str; 3] = ["steady-memory", "steady-tmpfs", "steady-file"];
/// The longest time of a write and a read that is no stall.
const STALL: Duration = Duration::from_millis(50);
/// A run of this length is judged by its longest pair. In a shorter one beside other tests, a thread may wait
/// for a CPU.
const JUDGED_SECONDS: u64 = 30;

fn from_environment(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

/// The daemon.
struct Daemon {
    child: Child,
    dir: TempDir,
    /// Has an image on tmpfs.
    _memory: TempDir,
    _log: Checked,
}

/// The things that the daemon and its helpers hold.
#[derive(Clone, Copy, Debug)]
struct Resources {
    descriptors: usize,
    threads: usize,
    /// Mappings of memory that front-ends share.
    shared: usize,
    resident_kib: u64,
}

impl Daemon {
    fn start() -> Self {
        let dir = TempDir::new().unwrap();
        // Without a tmpfs there, both images are on the same file system.
        let memory = tempfile::tempdir_in("/dev/shm").unwrap_or_else(|_| TempDir::new().unwrap());
        let images = [&memory, &dir].map(|dir| dir.path().join("steady.img"));
        for image in &images {
            File::create(image).unwrap().set_len(BLOCKS * BLOCK as u64).unwrap();
        }
        let device = |name: &str, disk: &str| {
            let socket = dir.path().join(name);
            format!(
                "[[device]]\nname = '{name}'\nsocket-path = '{}'\nblk-file = '{disk}'\n",
                socket.display()
            )
        };
        let [on_tmpfs, on_disk] = images.each_ref().map(|image| image.to_str().unwrap());
        let disks = STEADY.iter().zip(["mem:256K", on_tmpfs, on_disk]);
        let config: String = disks.map(|(name, disk)| device(name, disk)).collect();
        let file = dir.path().join("kickless.toml");
        fs::write(&file, format!("[pool]\nworkers = 2\n{config}")).unwrap();
        let mut command = Command::new(PROGRAM);
        command.args(["--log-level=error,kickless::sandbox=warn", "serve", "--config"]).arg(file);
        // One arena, so that memory which is free counts as free wherever a thread freed it.
        command.env("MALLOC_ARENA_MAX", "1").env("RUNTIME_DIRECTORY", dir.path());
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let log = checked(child.stderr.take().unwrap(), |line| eprintln!("{line}"));
        Self { child, dir, _memory: memory, _log: log }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn client(&self) -> Client {
        let since = Instant::now();
        loop {
            match Client::connect(&self.path("control.sock")) {
                Ok(client) => return client,
                Err(error) => assert!(since.elapsed() < LIMIT, "{error}"),
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn connect(&self, name: &str) -> Disk {
        let options = Options {
            reconnect_limit: Duration::ZERO,
            connect_timeout: LIMIT,
            buffer_memory: 1 << 20,
            ..Options::new(self.path(name))
        };
        Disk::connect(options).unwrap()
    }

    fn resources(&self) -> Resources {
        let process = Path::new("/proc").join(self.child.id().to_string());
        let threads = fs::read_dir(process.join("task")).unwrap();
        let names = threads.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
        let maps = fs::read_to_string(process.join("maps")).unwrap();
        let of_all = || self.processes().into_iter();
        let resident = |process: PathBuf| -> u64 {
            let status = fs::read_to_string(process.join("status")).unwrap();
            let resident = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
            resident.trim().trim_end_matches(" kB").parse().unwrap()
        };
        Resources {
            descriptors: of_all().map(|process| fs::read_dir(process.join("fd")).unwrap().count()).sum(),
            // An engine starts threads on demand, up to a fixed number.
            threads: names.filter(|name| !name.starts_with("io-")).count(),
            shared: maps.lines().filter(|line| line.contains("memfd")).count(),
            resident_kib: of_all().map(resident).sum(),
        }
    }

    /// Returns the directories of the daemon and of the helpers that it has started.
    fn processes(&self) -> Vec<PathBuf> {
        let pid = self.child.id();
        children(pid)
            .unwrap()
            .into_iter()
            .chain([pid])
            .map(|pid| Path::new("/proc").join(pid.to_string()))
            .collect()
    }

    /// Waits until the daemon holds no more than before, but for its heap.
    fn wait_until_back(&self, before: Resources) -> Resources {
        let since = Instant::now();
        loop {
            let now = self.resources();
            if now.descriptors <= before.descriptors
                && now.threads <= before.threads
                && now.shared <= before.shared
            {
                return now;
            }
            assert!(since.elapsed() < LIMIT, "{before:?}, {now:?}");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn call(client: &mut Client, method: &str, params: Value) -> Value {
    let Value::Object(params) = params else { panic!("{params}") };
    client.call(method, params).unwrap_or_else(|error| panic!("{method}: {error}"))
}

/// The content of a block.
fn content(device: u64, block: u64, version: u64) -> [u8; BLOCK] {
    let mut bytes = [0; BLOCK];
    let word = (device << 48 | block << 32 | version & 0xffff_ffff).to_le_bytes();
    bytes.chunks_exact_mut(8).for_each(|chunk| chunk.copy_from_slice(&word));
    bytes
}

/// The times for which threads have waited for a CPU: the daemon's workers, and the thread that made this.
/// Empty if the kernel does not count them.
struct CpuWaits(Vec<File>);

impl CpuWaits {
    fn new(daemon: &Daemon) -> Self {
        let tasks = Path::new("/proc").join(daemon.child.id().to_string()).join("task");
        let is_worker = |task: &PathBuf| {
            fs::read_to_string(task.join("comm")).is_ok_and(|name| name.starts_with("worker "))
        };
        let tasks = fs::read_dir(tasks).unwrap().filter_map(|task| Some(task.ok()?.path())).filter(is_worker);
        let tasks = tasks.chain(["/proc/thread-self".into()]);
        Self(tasks.filter_map(|task| File::open(task.join("schedstat")).ok()).collect())
    }

    fn read_ns(&self) -> Vec<u64> {
        let second = |file: &File| {
            let mut text = [0; 64];
            let len = file.read_at(&mut text, 0).unwrap();
            String::from_utf8_lossy(&text[..len]).split(' ').nth(1).unwrap().parse().unwrap()
        };
        self.0.iter().map(second).collect()
    }
}

/// The writes and reads of a disk.
#[derive(Clone, Debug, Default)]
struct Pairs {
    count: u64,
    /// The number above 15 ms, and above [`STALL`].
    long: u64,
    stalls: u64,
    /// The time of the longest.
    ns: u64,
    /// The times for which the workers, and then the driver's thread, waited for a CPU meanwhile. Workers may
    /// have waited for other disks.
    cpu_waits_ns: Vec<u64>,
}

impl Pairs {
    fn text(&self) -> String {
        let ms = |ns: &u64| format!("{:.1}", *ns as f64 / 1e6);
        let waits: Vec<String> = self.cpu_waits_ns.iter().map(ms).collect();
        let (longest, waits, Self { count, long, stalls, .. }) = (ms(&self.ns), waits.join(", "), self);
        format!(
            "{count} pairs, {long} above 15 ms, {stalls} above 50 ms; the longest {longest} ms, in which threads \
             waited for a CPU for {waits} ms"
        )
    }
}

/// Writes and verifies the blocks of a disk until the end. Counts the pairs of a write and a read.
fn verify(daemon: &Daemon, disk: &Disk, device: u64, is_over: &AtomicBool, pairs: &Mutex<Pairs>) -> u64 {
    let cpu_waits = CpuWaits::new(daemon);
    let (mut version, mut before) = (0, cpu_waits.read_ns());
    while !is_over.load(Ordering::Relaxed) || version == 0 {
        for block in 0..BLOCKS {
            let (at, mut read) = (block * BLOCK as u64, [0; BLOCK]);
            let since = Instant::now();
            if version > 0 {
                disk.read_at(&mut read, at).unwrap();
                assert!(read == content(device, block, version), "device {device}, block {block}");
            }
            disk.write_at(&content(device, block, version + 1), at).unwrap();
            let (ns, now) = (since.elapsed().as_nanos() as u64, cpu_waits.read_ns());
            let mut pairs = pairs.lock().unwrap();
            pairs.count += 1;
            pairs.long += u64::from(ns > 15_000_000);
            pairs.stalls += u64::from(u128::from(ns) > STALL.as_nanos());
            if ns > pairs.ns {
                pairs.ns = ns;
                pairs.cpu_waits_ns = now.iter().zip(&before).map(|(now, before)| now - before).collect();
            }
            before = now;
        }
        version += 1;
    }
    version
}

/// Adds the devices with these numbers, uses and changes each, and removes them.
fn change(daemon: &Daemon, numbers: &[u64], round: u64) {
    let mut client = daemon.client();
    for number in numbers {
        let name = format!("d{number}");
        let disk = if number % 2 == 0 { "mem:256K" } else { "null:256K" };
        let config =
            json!({ "name": name, "socket-path": daemon.path(&name), "blk-file": disk, "num-queues": 2 });
        assert_eq!(call(&mut client, "device.add", config)["added"], true);
    }
    for number in numbers {
        let name = format!("d{number}");
        let disk = daemon.connect(&name);
        let block = content(*number, 0, round);
        disk.write_at(&block, 0).unwrap();
        call(&mut client, "device.set", json!({ "name": name, "iops": 5000, "weight": 3 }));
        disk.write_at(&block, BLOCK as u64).unwrap();
        assert_eq!(call(&mut client, "device.resize", json!({ "name": name }))["size"], 256 << 10);
        call(&mut client, "device.drain", json!({ "name": name, "timeout": "30s" }));
        if number % 3 > 0 {
            call(&mut client, "device.resume", json!({ "name": name }));
            let mut read = [0; BLOCK];
            disk.read_at(&mut read, BLOCK as u64).unwrap();
            assert!(number % 2 == 1 || read == block, "{name}");
        }
        // Some are removed while the front-end is connected.
        let disk = (number % 4 > 0).then_some(disk);
        let removed =
            call(&mut client, "device.remove", json!({ "name": name, "mode": "drain", "timeout": "30s" }));
        assert_eq!(removed["removed"], true);
        drop(disk);
        assert!(!daemon.path(&name).exists());
    }
}

#[test]
fn devices_come_change_and_go_and_leave_nothing() {
    let seconds = from_environment("KICKLESS_LOOP_SECONDS", 2);
    let devices = from_environment("KICKLESS_LOOP_DEVICES", 24);
    let daemon = Daemon::start();
    let _ = daemon.client();
    let disks = STEADY.map(|name| daemon.connect(name));
    let numbers: Vec<u64> = (0..devices).collect();
    let parts: Vec<&[u64]> = numbers.chunks(numbers.len().div_ceil(CHANGERS)).collect();
    let round = |round: u64| {
        thread::scope(|scope| {
            parts.iter().for_each(|part| drop(scope.spawn(|| change(&daemon, part, round))))
        });
    };
    // The first round starts threads and grows the heap, which the process keeps.
    round(0);
    let (is_over, pairs) = (AtomicBool::new(false), <[Mutex<Pairs>; STEADY.len()]>::default());
    let (before, rounds, after, quiet) = thread::scope(|scope| {
        // Ends the load also when the test fails.
        let _ending = Ending(&is_over);
        for (device, (disk, pairs)) in (1..).zip(disks.iter().zip(&pairs)) {
            let (daemon, is_over) = (&daemon, &is_over);
            scope.spawn(move || assert!(verify(daemon, disk, 1000 + device, is_over, pairs) > 1));
        }
        // The same load without changes, for comparison.
        thread::sleep(Duration::from_secs(seconds.div_ceil(2)));
        let quiet = pairs.each_ref().map(|pairs| std::mem::take(&mut *pairs.lock().unwrap()));
        let (before, since, mut rounds) = (daemon.resources(), Instant::now(), 0);
        while since.elapsed() < Duration::from_secs(seconds) || rounds < 2 {
            rounds += 1;
            round(rounds);
        }
        (before, rounds, daemon.wait_until_back(before), quiet)
    });
    eprintln!("{rounds} rounds of {devices} devices in {seconds} s: {before:?} before, {after:?} after");
    for (name, (changed, quiet)) in STEADY.iter().zip(pairs.iter().zip(&quiet)) {
        let changed = changed.lock().unwrap();
        eprintln!("{name}, with changes: {}\n{name}, without: {}", changed.text(), quiet.text());
        let is_judged = seconds >= JUDGED_SECONDS && *name != "steady-file";
        assert!(!is_judged || changed.stalls == 0 || quiet.stalls > 0, "{name}: {} stalls", changed.stalls);
    }
    // A leak of 100 bytes for each device would show in the long form, which has some 100 000 of them.
    let grown = after.resident_kib.saturating_sub(before.resident_kib);
    assert!(grown < 4096 + devices * 8, "{before:?}, {after:?}");
    let list = call(&mut daemon.client(), "device.list", json!({}));
    assert_eq!(list.as_array().map(Vec::len), Some(STEADY.len()), "{list}");
}

/// Ends the load when it is dropped.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
