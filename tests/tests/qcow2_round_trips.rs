//! Changes qcow2 images by turns with QEMU and with kickless, for each option of `qemu-img create`, with
//! snapshots between. Both must read all that the other one has written.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs;

use kickless_driver::Disk;
use kickless_spec::blk::BlkFeatures;
use kickless_testing::Random;
use kickless_testing::pattern;
use kickless_tests::qcow2::{CheckReport, Qcow2Image};

/// Ends within a cluster of each size.
const SIZE: u64 = (6 << 20) + 3 * 512;
/// Changes by each program in each round.
const CHANGES: u64 = 24;
const ROUNDS: u8 = 3;

/// The state of the image before the first round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    Empty,
    /// Compressed data.
    Compressed,
    /// A shorter backing image with data. The value is its format.
    Over(&'static str),
}

/// One kind of image.
struct Case {
    options: &'static str,
    start: Start,
    /// The number of snapshots, which the width of reference counts limits.
    snapshots: u8,
}

impl Case {
    const fn new(options: &'static str) -> Self {
        Self { options, start: Start::Empty, snapshots: ROUNDS }
    }

    const fn starting(self, start: Start) -> Self {
        Self { start, ..self }
    }

    const fn with_snapshots(self, snapshots: u8) -> Self {
        Self { snapshots, ..self }
    }

    fn option(&self, name: &str) -> Option<&str> {
        self.options
            .split(',')
            .find_map(|option| option.split_once('=').filter(|(key, _)| *key == name))
            .map(|(_, value)| value)
    }

    /// Returns the bytes of a cluster.
    fn cluster(&self) -> u64 {
        self.option("cluster_size").map_or(65536, |size| size.parse().unwrap())
    }

    /// Makes the image. Returns it with its contents.
    fn image(&self) -> (Qcow2Image, Vec<u8>) {
        let options: Vec<_> = if self.options.is_empty() { vec![] } else { vec!["-o", self.options] };
        let mut contents = vec![0; SIZE as usize];
        if self.start == Start::Empty {
            return (Qcow2Image::create(&options, SIZE).unwrap(), contents);
        }
        let image = Qcow2Image::empty().unwrap();
        // One half can be compressed, and the other one cannot.
        let half = SIZE as usize / 2;
        contents[half..].copy_from_slice(&pattern(7, SIZE as usize - half));
        for (number, byte) in contents[..half].iter_mut().enumerate() {
            *byte = (number >> 10) as u8;
        }
        if let Start::Over(format) = self.start {
            contents.truncate(5 << 20);
            fs::write(image.dir().join("raw"), &contents).unwrap();
            image.img(&["convert", "-f", "raw", "-O", format, "raw", "backing"]).unwrap();
            let over = ["create", "-q", "-f", "qcow2", "-b", "backing", "-F", format];
            image.img(&[&over, &options[..], &["disk", &SIZE.to_string()]].concat()).unwrap();
            contents.resize(SIZE as usize, 0);
        } else {
            fs::write(image.dir().join("raw"), &contents).unwrap();
            let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2"];
            image.img(&[&convert, &options[..], &["raw", "disk"]].concat()).unwrap();
        }
        (image, contents)
    }

    /// Takes the image through all rounds.
    fn run(&self) {
        let name = format!("{:?}, {:?}", self.options, self.start);
        let (image, mut contents) = self.image();
        let mut random = Random(17);
        let mut snapshots = Vec::new();
        for round in 0..ROUNDS {
            self.change_by_qemu(&image, &mut contents, &mut random);
            let (daemon, disk) = image.serve().unwrap();
            let mut read = vec![0; SIZE as usize];
            disk.read_at(&mut read, 0).unwrap();
            compare(&read, &contents, &format!("{name}: round {round}, read by kickless"));
            self.change_by_kickless(&disk, &mut contents, &mut random);
            disk.read_at(&mut read, 0).unwrap();
            compare(&read, &contents, &format!("{name}: round {round}, read by kickless after writes"));
            disk.close();
            assert_eq!(daemon.stop().unwrap().0.code(), Some(0), "{name}");
            assert_eq!(image.check().unwrap(), CheckReport::default(), "{name}: round {round}");
            compare(&image.contents().unwrap(), &contents, &format!("{name}: round {round}, read by QEMU"));
            if round < self.snapshots {
                let snapshot = format!("snapshot{round}");
                image.img(&["snapshot", "-c", &snapshot, "disk"]).unwrap();
                snapshots.push((snapshot, contents.clone()));
            }
        }
        for (snapshot, contents) in snapshots {
            compare(&image.snapshot(&snapshot).unwrap(), &contents, &format!("{name}: {snapshot}"));
            image.img(&["snapshot", "-d", &snapshot, "disk"]).unwrap();
        }
        assert_eq!(image.check().unwrap(), CheckReport::default(), "{name}: without snapshots");
    }

    /// Returns a random range, which is often of whole clusters.
    fn range(&self, random: &mut Random) -> (u64, u64) {
        let unit = if random.one_in(2) { self.cluster() } else { 512 };
        let start = random.below(SIZE / unit) * unit;
        let units = 1 + random.below((256 << 10) / unit + 1);
        (start, (units * unit).min(SIZE - start))
    }

    /// Whether a discard leaves zeroes. In version 2, the data of a backing image would come back.
    fn discards(&self) -> bool {
        self.option("compat") != Some("0.10") || !matches!(self.start, Start::Over(_))
    }

    fn change_by_qemu(&self, image: &Qcow2Image, contents: &mut [u8], random: &mut Random) {
        let mut commands = Vec::new();
        for _ in 0..CHANGES {
            let (start, len) = self.range(random);
            let range = start as usize..(start + len) as usize;
            match random.below(6) {
                0 => {
                    commands.push(format!("write -q -z {start} {len}"));
                    contents[range].fill(0);
                }
                1 => {
                    commands.push(format!("write -q -z -u {start} {len}"));
                    contents[range].fill(0);
                }
                2 if self.discards() && start % self.cluster() == 0 && len % self.cluster() == 0 => {
                    commands.push(format!("discard -q {start} {len}"));
                    contents[range].fill(0);
                }
                _ => {
                    let byte = 1 + random.below(255) as u8;
                    commands.push(format!("write -q -P {byte} {start} {len}"));
                    contents[range].fill(byte);
                }
            }
        }
        image.io(&commands).unwrap();
    }

    fn change_by_kickless(&self, disk: &Disk, contents: &mut [u8], random: &mut Random) {
        for feature in [BlkFeatures::DISCARD, BlkFeatures::WRITE_ZEROES] {
            assert_eq!(disk.blk_features().contains(feature), self.discards(), "{}", self.options);
        }
        for _ in 0..CHANGES {
            let (start, len) = self.range(random);
            let range = start as usize..(start + len) as usize;
            match random.below(6) {
                way @ 0..2 if self.discards() => {
                    disk.write_zeroes(start, len, way == 0).unwrap();
                    contents[range].fill(0);
                }
                2 if self.discards() && start % self.cluster() == 0 && len % self.cluster() == 0 => {
                    disk.discard(start, len).unwrap();
                    contents[range].fill(0);
                }
                3 => disk.flush().unwrap(),
                _ => {
                    let data = pattern(random.next(), len as usize);
                    disk.write_at(&data, start).unwrap();
                    contents[range].copy_from_slice(&data);
                }
            }
        }
    }
}

/// Compares two disks. The panic names the first byte that differs.
fn compare(found: &[u8], expected: &[u8], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    // Without optimisation, a search takes a hundred times as long as this.
    if found == expected {
        return;
    }
    let differs = found.iter().zip(expected).position(|(found, expected)| found != expected);
    if let Some(at) = differs {
        panic!("{what}: byte {at:#x} is {}, not {}", found[at], expected[at]);
    }
}

fn run_all(cases: &[Case]) {
    for case in cases {
        case.run();
    }
}

#[test]
fn versions() {
    run_all(&[
        Case::new(""),
        Case::new("compat=1.1,lazy_refcounts=on"),
        Case::new("compat=0.10"),
        Case::new("compat=0.10,cluster_size=4096").starting(Start::Over("raw")),
        Case::new("compat=0.10").starting(Start::Compressed),
    ]);
}

#[test]
fn clusters_of_each_size() {
    run_all(&[
        Case::new("cluster_size=512"),
        Case::new("cluster_size=1024"),
        Case::new("cluster_size=2048"),
        Case::new("cluster_size=4096"),
        Case::new("cluster_size=8192"),
        Case::new("cluster_size=262144"),
        Case::new("cluster_size=2097152"),
    ]);
}

/// Snapshots need reference counts above 1.
#[test]
fn reference_counts_of_each_width() {
    run_all(&[
        Case::new("refcount_bits=1,cluster_size=4096").with_snapshots(0),
        Case::new("refcount_bits=2,cluster_size=4096").with_snapshots(2),
        Case::new("refcount_bits=4,cluster_size=512"),
        Case::new("refcount_bits=8,cluster_size=4096"),
        Case::new("refcount_bits=16,cluster_size=4096"),
        Case::new("refcount_bits=32,cluster_size=512"),
        Case::new("refcount_bits=64,cluster_size=4096"),
    ]);
}

#[test]
fn subclusters() {
    run_all(&[
        Case::new("extended_l2=on,cluster_size=16384"),
        Case::new("extended_l2=on,cluster_size=131072").starting(Start::Over("raw")),
        Case::new("extended_l2=on").starting(Start::Compressed),
        Case::new("extended_l2=on,cluster_size=2097152").starting(Start::Over("qcow2")),
    ]);
}

#[test]
fn preallocated_images() {
    run_all(&[
        Case::new("preallocation=metadata,cluster_size=4096"),
        Case::new("preallocation=falloc"),
        Case::new("preallocation=full,cluster_size=4096"),
        Case::new("preallocation=metadata,extended_l2=on,cluster_size=16384"),
    ]);
}

#[test]
fn compressed_images() {
    run_all(&[
        Case::new("").starting(Start::Compressed),
        Case::new("cluster_size=512").starting(Start::Compressed),
        Case::new("cluster_size=2097152").starting(Start::Compressed),
        Case::new("compression_type=zstd").starting(Start::Compressed),
        Case::new("compression_type=zstd,cluster_size=4096,lazy_refcounts=on").starting(Start::Compressed),
        Case::new("compression_type=zstd,extended_l2=on,cluster_size=131072").starting(Start::Compressed),
    ]);
}

#[test]
fn images_over_others() {
    run_all(&[
        Case::new("").starting(Start::Over("raw")),
        Case::new("cluster_size=512").starting(Start::Over("qcow2")),
        Case::new("cluster_size=4096").starting(Start::Over("qcow2")),
        Case::new("cluster_size=2097152").starting(Start::Over("raw")),
    ]);
}
