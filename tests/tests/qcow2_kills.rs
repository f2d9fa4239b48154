//! Kills a daemon repeatedly under the verified I/O of drivers' threads on a qcow2 image. After each kill,
//! QEMU checks the image, and each sector has the last contents that were answered for it, or those of the
//! request in flight. `KICKLESS_KILLS` is the number of kills of each image.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::File;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use kickless_disk::lock::ImageLock;
use kickless_driver::Disk;
use kickless_testing::pattern;
use kickless_testing::{Random, eventually};
use kickless_tests::daemon::DaemonConfig;
use kickless_tests::qcow2::{CheckReport, Qcow2Image, serve};
use rustix::process::Signal;

const SIZE: usize = 16 << 20;
/// Each thread changes every fourth piece, so that threads share clusters and tables.
const THREADS: usize = 4;
const PIECE: usize = 32 << 10;
/// The bytes of clusters that a kill may leak: the reserve and the retired clusters.
const LEAK_MAX: u64 = 192 << 20;

/// A change that a thread asks for.
#[derive(Clone, Debug)]
struct Change {
    range: Range<usize>,
    /// The new contents. `None` stands for zeroes.
    data: Option<Vec<u8>>,
}

impl Change {
    /// Returns a random change of the pieces of a thread. It changes one piece.
    fn random(thread: usize, random: &mut Random) -> Self {
        let piece = random.below((SIZE / PIECE / THREADS) as u64) as usize * THREADS + thread;
        let sectors = (PIECE / 512) as u64;
        let first = random.below(sectors);
        let len = 1 + random.below(sectors - first);
        let (first, len) = if random.one_in(3) { (0, sectors) } else { (first, len) };
        let start = piece * PIECE + first as usize * 512;
        let range = start..start + len as usize * 512;
        let data = (!random.one_in(5)).then(|| pattern(random.next(), range.len()));
        Self { range, data }
    }

    /// Asks the disk for it. Returns whether the disk answered.
    fn send(&self, disk: &Disk, random: &mut Random) -> bool {
        let (start, len) = (self.range.start as u64, self.range.len() as u64);
        match &self.data {
            Some(data) => disk.write_at(data, start).is_ok(),
            None => disk.write_zeroes(start, len, random.one_in(2)).is_ok(),
        }
    }

    fn sector(&self, at: usize) -> &[u8] {
        match &self.data {
            Some(data) => &data[at - self.range.start..][..512],
            None => &[0; 512],
        }
    }

    fn apply(&self, contents: &mut [u8]) {
        for at in self.range.clone().step_by(512) {
            contents[at..at + 512].copy_from_slice(self.sector(at));
        }
    }
}

/// Sends changes until the disk fails. Returns the answered ones, and the one in flight.
fn changes(disk: &Disk, thread: usize, seed: u64, ends: &AtomicBool) -> (Vec<Change>, Option<Change>) {
    let mut random = Random(seed);
    let mut answered = Vec::new();
    loop {
        let change = Change::random(thread, &mut random);
        if !change.send(disk, &mut random) {
            assert!(ends.load(Ordering::SeqCst), "{:?} failed before the kill", change.range);
            return (answered, Some(change));
        }
        answered.push(change);
        if random.one_in(16) && disk.flush().is_err() {
            return (answered, None);
        }
    }
}

/// Compares the image with the answered changes. Sectors of changes in flight may have either contents.
fn judge(image: &Qcow2Image, contents: &mut [u8], in_flight: &[Change], what: &str) {
    let found = image.contents().unwrap();
    assert_eq!(found.len(), contents.len());
    for at in (0..SIZE).step_by(512) {
        let (found, expected) = (&found[at..at + 512], &mut contents[at..at + 512]);
        if found == expected {
            continue;
        }
        let change = in_flight.iter().find(|change| change.range.contains(&at));
        let kept = change.is_some_and(|change| change.sector(at) == found);
        assert!(kept, "{what}: sector {:#x} of {change:?} has other contents: {:?}", at, &found[..16]);
        expected.copy_from_slice(found);
    }
}

fn killed(options: &[&str], engine: &str, over: bool) {
    let kills = std::env::var("KICKLESS_KILLS").map_or(10, |kills| kills.parse().unwrap());
    let mut contents = vec![0; SIZE];
    let image = if over {
        let image = Qcow2Image::empty().unwrap();
        contents = pattern(5, SIZE);
        std::fs::write(image.dir().join("backing"), &contents).unwrap();
        let create = ["create", "-q", "-f", "qcow2", "-b", "backing", "-F", "raw"];
        image.img(&[&create, options, &["disk"]].concat()).unwrap();
        image
    } else {
        Qcow2Image::create(options, SIZE as u64).unwrap()
    };
    let cluster: u64 = {
        let info: serde_json::Value =
            serde_json::from_str(&image.img(&["info", "--output=json", "disk"]).unwrap()).unwrap();
        info["cluster-size"].as_u64().unwrap()
    };
    let mut random = Random(11);
    let mut snapshot: Option<Vec<u8>> = None;
    let mut answered = 0;
    for kill in 0..kills {
        let config = DaemonConfig { engine: Some(engine.to_owned()), ..image.config() };
        let (daemon, disk) = serve(&config).unwrap();
        let ends = AtomicBool::new(false);
        let moment = Duration::from_millis(random.below(400));
        let seeds: Vec<u64> = (0..THREADS).map(|_| random.next()).collect();
        let results: Vec<_> = thread::scope(|scope| {
            let start = |(thread, seed): (usize, u64)| {
                let (disk, ends) = (&disk, &ends);
                scope.spawn(move || changes(disk, thread, seed, ends))
            };
            let threads: Vec<_> = seeds.into_iter().enumerate().map(start).collect();
            thread::sleep(moment);
            ends.store(true, Ordering::SeqCst);
            daemon.signal(Signal::KILL).unwrap();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        drop((disk, daemon));
        // The kernel may end the I/O of a process, and release its lock, after the process is gone.
        let file = File::options().read(true).write(true).open(image.path()).unwrap();
        eventually("the lock is not released", || ImageLock::acquire(&file, false).is_ok());
        let mut in_flight = Vec::new();
        // Changes of several threads never overlap, so their order does not matter.
        for (changes, last) in results {
            answered += changes.len();
            changes.iter().for_each(|change| change.apply(&mut contents));
            in_flight.extend(last);
        }
        let what = format!("{options:?} after kill {kill}");
        let report = image.check().unwrap();
        assert_eq!(report.corruptions, 0, "{what}: {report:?}");
        // Each kill adds to the leaks of the ones before.
        assert!(report.leaks * cluster <= LEAK_MAX * (kill + 1), "{what}: {report:?}");
        judge(&image, &mut contents, &in_flight, &what);
        if let Some(contents) = &snapshot {
            assert!(image.snapshot("then").unwrap() == *contents, "{what}: the snapshot has changed");
        }
        if kill % 4 == 1 {
            if snapshot.is_some() {
                image.img(&["snapshot", "-d", "then", "disk"]).unwrap();
            }
            image.img(&["snapshot", "-c", "then", "disk"]).unwrap();
            snapshot = Some(contents.clone());
        }
    }
    println!("{options:?}: {kills} kills, {answered} changes");
    assert!(answered > 0);
    // A close in peace afterwards loses nothing either.
    let (daemon, disk) = image.serve().unwrap();
    let mut read = vec![0; SIZE];
    disk.read_at(&mut read, 0).unwrap();
    assert!(read == contents);
    disk.close();
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
    image.img(&["check", "-q", "-r", "leaks", "disk"]).unwrap();
    assert_eq!(image.check().unwrap(), CheckReport::default());
    assert!(image.contents().unwrap() == contents);
}

#[test]
fn default_options() {
    killed(&[], "io_uring", false);
}

#[test]
fn small_clusters() {
    killed(&["-o", "cluster_size=4096"], "threads", false);
}

/// The old version has no bit that says that its reference counts may be wrong.
#[test]
fn version_2() {
    killed(&["-o", "compat=0.10,cluster_size=4096"], "io_uring", false);
}

#[test]
fn over_a_backing_image() {
    killed(&[], "io_uring", true);
}

#[test]
fn subclusters_over_a_backing_image() {
    killed(&["-o", "extended_l2=on"], "threads", true);
}
