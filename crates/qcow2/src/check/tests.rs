//! Compares the check with QEMU's.

use super::image::ReadImage;
use super::repair::repair;
use super::report::{CheckError, Report};
use super::{WINDOW, check};
use crate::format::header::Header;
use crate::images::qemu::{OPTIONS, QemuImage, QemuReport, SIZE, fill};
use crate::images::recorded::Recorded;
use kickless_testing::Random;
use std::cell::Cell;
use std::env::{current_exe, var_os};
use std::fs::{File, read_to_string};
use std::io;
use std::os::unix::fs::FileExt;
use std::process::Command;

/// Returns the number of images to damage: `KICKLESS_DAMAGED`, or some.
fn damaged() -> u64 {
    std::env::var("KICKLESS_DAMAGED").map_or(60, |count| count.parse().unwrap())
}

#[test]
fn images_of_each_kind_are_sound() {
    for options in OPTIONS {
        let image = QemuImage::create(options, SIZE);
        assert_eq!(check(&image.load(), WINDOW).unwrap(), Report::default(), "{options}: new");
        fill(&image, options);
        let loaded = image.load();
        for window in [WINDOW, 37] {
            assert_eq!(check(&loaded, window).unwrap(), Report::default(), "{options}: {window}");
        }
    }
}

/// Changes a word of a table. `bytes` is a copy of the sound image, perhaps with damage.
fn damage(sound: &[u8], bytes: &mut [u8], random: &mut Random) {
    let header = Header::parse(sound, sound.len() as u64).unwrap();
    let word = |bytes: &[u8], at: u64| u64::from_be_bytes(bytes[at as usize..][..8].try_into().unwrap());
    let offset = 0x00ff_ffff_ffff_fe00;
    let pick = |at: u64, entries: u64, random: &mut Random| {
        let used: Vec<_> =
            (0..entries).map(|n| at + n * 8).filter(|at| word(sound, *at) & offset != 0).collect();
        used[random.below(used.len() as u64) as usize]
    };
    let cluster = header.geometry.cluster();
    let l1 = pick(header.l1.at.0, header.l1.entries, random);
    let block = pick(header.refcounts.at.0, header.refcounts.entries, random);
    let at = match random.below(8) {
        0 => l1,
        1 => block,
        2..5 => (word(sound, block) & offset) + random.below(cluster.min(64)) / 8 * 8,
        _ => pick(word(sound, l1) & offset, cluster / 8, random),
    };
    let old = word(bytes, at);
    let new = match random.below(5) {
        0 => 0,
        1 => old ^ 1 << 63,
        2 => old ^ 1 << random.below(64),
        3 => old.wrapping_add(cluster * random.below(4)),
        _ => (old & !offset) | (random.below(bytes.len() as u64 / cluster + 2) * cluster),
    };
    bytes[at as usize..][..8].copy_from_slice(&new.to_be_bytes());
}

/// Compares two results for the same image.
fn assert_agreement(ours: &Result<Report, CheckError>, theirs: QemuReport, name: &str) {
    let Ok(report) = ours else {
        return assert!(theirs.failures + theirs.corruptions > 0, "{name}: {ours:?} {theirs:?}");
    };
    assert_eq!(report.is_sound(), theirs.failures + theirs.corruptions == 0, "{name}: {report:?} {theirs:?}");
    // If there are more references than a refcount can say, QEMU counts each of them.
    if report.bad == 0 && report.overlaps == 0 && !name.contains("refcount_bits=1") {
        let Report { leaks, low, copied, .. } = *report;
        let expected = QemuReport { leaks, corruptions: low + copied, failures: 0 };
        assert_eq!(expected, theirs, "{name}: {report:?}");
    }
}

#[test]
fn damaged_images_fail_in_both_checks() {
    let options = ["cluster_size=512", "", "refcount_bits=1", "refcount_bits=64", "extended_l2=on"];
    let images = options.map(|options| {
        let image = QemuImage::create(options, "1M");
        image.io(&["write -P 1 0 100k", "write -c -P 2 128k 128k", "write -P 3 700k 50k"]);
        if options != "refcount_bits=1" {
            image.img(&["snapshot", "-c", "one", "disk"]);
            image.io(&["write -P 4 50k 100k", "write -z 64k 64k"]);
        }
        std::fs::read(image.path()).unwrap()
    });
    let (mut sound, mut repaired) = (0, 0);
    for seed in 0..damaged() {
        let mut random = Random(seed);
        let which = random.below(images.len() as u64) as usize;
        let mut bytes = images[which].clone();
        for _ in 0..random.from(1..4) {
            damage(&images[which], &mut bytes, &mut random);
        }
        let theirs = QemuImage::of(&bytes).check();
        let image = Recorded::new(bytes);
        let ours = check(&image, WINDOW);
        assert_agreement(&ours, theirs, &format!("seed {seed}, {:?}", options[which]));
        sound += u64::from(ours.as_ref().is_ok_and(Report::is_sound));
        assert_eq!(ours.ok(), check(&image, 11).ok(), "seed {seed}: the window matters");
        // A repair leaves entries that cannot be true, and nothing else.
        if repair(&image, 11, &mut |_, _| {}).is_ok() {
            let Report { low, copied, leaks, bad, overlaps } = check(&image, WINDOW).unwrap();
            assert_eq!((low, copied), (0, 0), "seed {seed}");
            assert!(leaks == 0 || bad + overlaps > 0, "seed {seed}: {leaks} leaks");
            repaired += 1;
        }
    }
    assert!(sound < damaged() / 2, "the damage is too small");
    assert!(repaired > damaged() / 4, "{repaired} of them are repaired");
}

/// A file that is too large for memory.
struct Sparse {
    file: File,
    /// The number of reads.
    reads: Cell<u64>,
}

impl ReadImage for Sparse {
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.reads.set(self.reads.get() + 1);
        let mut done = 0;
        while done < into.len() {
            match self.file.read_at(&mut into[done..], at + done as u64)? {
                0 => break,
                bytes => done += bytes,
            }
        }
        into[done..].fill(0);
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.file.metadata().unwrap().len()
    }
}

/// Returns the largest memory that this process has used, in bytes.
fn peak() -> u64 {
    let status = read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// A disk of 100 TiB, in a file that is long enough for two windows.
///
/// It runs in a process of its own, because other tests use memory too.
#[test]
fn memory_is_bounded_by_the_window() {
    const ALONE: &str = "KICKLESS_TEST_ALONE";
    if var_os(ALONE).is_none() {
        let mut alone = Command::new(current_exe().unwrap());
        alone.args(["--exact", "qcow2::check::tests::memory_is_bounded_by_the_window"]).env(ALONE, "");
        assert!(alone.status().unwrap().success());
        return;
    }
    let image = QemuImage::create("", "100T");
    image.io(&["write -P 1 0 64k", "write -P 2 50T 64k", "write -P 3 99T 64k"]);
    let sparse = Sparse {
        file: File::options().read(true).write(true).open(image.path()).unwrap(),
        reads: Cell::new(0),
    };
    assert_eq!(check(&sparse, WINDOW).unwrap(), Report::default());
    let reads = sparse.reads.replace(0);
    let before = peak();
    sparse.file.set_len((WINDOW + 1000) << 16).unwrap();
    assert_eq!(check(&sparse, WINDOW).unwrap(), Report::default());
    assert!(sparse.reads.get() > reads, "only one window");
    assert!(sparse.reads.get() < 3 * reads + 100, "{} reads after {reads}", sparse.reads.get());
    // Counters of 64 MiB, and a bitmap of 2 MiB.
    assert!(peak() - before < 100 << 20, "{} bytes", peak() - before);
    // A hostile image could make the check read for days.
    assert!(matches!(check(&sparse, 1), Err(CheckError::TooLarge)));
    // Clusters beyond the limit of the check.
    sparse.file.set_len((1 << 47) + (1 << 16)).unwrap_or_default();
    if sparse.bytes() > 1 << 47 {
        assert!(matches!(check(&sparse, WINDOW), Err(CheckError::TooLarge)));
    }
}
