//! Requests on qcow2 images whose tables point anywhere. Each image is refused with a sentence, or each
//! request ends, and the file stays as long as an image of its size may be.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::qcow2::{Image, qemu_img};
use common::{Worker, options, run_on_extent};
use kickless_disk::{Cache, Disk, DiskSpec, Request};
use kickless_io::EngineKind;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};

const CLUSTER: u64 = 64 << 10;
const SIZE: u64 = 4 << 20;
/// The most space of a file: the disk, its tables, and two chunks of the reserve.
const SPACE_MAX: u64 = SIZE + (160 << 20);
/// The longest file. Counts behind the end move it by 64 units of 2048 clusters, as a hole.
const LEN_MAX: u64 = SPACE_MAX + 65 * 2048 * CLUSTER;

/// The tables of an image.
struct Tables {
    bytes: Vec<u8>,
    l1: u64,
    l2: u64,
    table: u64,
    block: u64,
}

impl Tables {
    fn of(bytes: Vec<u8>) -> Self {
        let mut tables = Self { bytes, l1: 0, l2: 0, table: 0, block: 0 };
        (tables.l1, tables.table) = (tables.word(40), tables.word(48));
        tables.l2 = tables.word(tables.l1) & !(1 << 63);
        tables.block = tables.word(tables.table);
        tables
    }

    fn word(&self, at: u64) -> u64 {
        u64::from_be_bytes(self.bytes[at as usize..][..8].try_into().unwrap())
    }

    fn put(&mut self, at: u64, word: u64) {
        self.bytes[at as usize..][..8].copy_from_slice(&word.to_be_bytes());
    }
}

const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;

/// Returns the places that an entry may name.
fn places(tables: &Tables) -> Vec<u64> {
    let end = tables.bytes.len() as u64;
    let known = [0, tables.l1, tables.l2, tables.table, tables.block];
    let odd = [end - CLUSTER, end, end + CLUSTER, 512, CLUSTER + 512, 1 << 50, (1 << 56) - CLUSTER];
    [&known[..], &odd].concat()
}

/// Makes the images: each patch changes some words.
fn patches(tables: &Tables) -> Vec<Vec<(u64, u64)>> {
    let mut patches = Vec::new();
    for place in places(tables) {
        for flags in [0, COPIED] {
            patches.push(vec![(tables.l1, place | flags)]);
            patches.push(vec![(tables.l2, place | flags), (tables.l2 + 8, place | flags)]);
            patches.push(vec![(tables.l2, place | flags | 1)]);
        }
        patches.push(vec![(tables.l2, place | COMPRESSED)]);
        patches.push(vec![(tables.table, place)]);
        // Further blocks, for clusters behind the end.
        patches.push((1..64).map(|index| (tables.table + index * 8, place)).collect());
    }
    let counts = |word| (0..CLUSTER / 8).map(|index| (tables.block + index * 8, word)).collect::<Vec<_>>();
    patches.extend([counts(0), counts(u64::MAX), counts(0x0002_0002_0002_0002)]);
    // All counts behind the end are high, in all blocks that there can be.
    let mut high = counts(u64::MAX);
    high.extend((1..CLUSTER / 8).map(|index| (tables.table + index * 8, tables.block)));
    patches.push(high);
    patches
}

#[test]
fn requests_on_tables_that_point_anywhere_end() {
    let contents: Vec<u8> = (0..SIZE).map(|at| (at / CLUSTER) as u8 + 1).collect();
    let image = Image::of(&contents[..SIZE as usize / 2], &[]);
    image.img(&["resize", "-q", "-f", "qcow2", "disk.qcow2", &SIZE.to_string()]);
    let sound = fs::read(image.path()).unwrap();
    let (mut refused, mut failed) = (0, 0);
    let tables = Tables::of(sound.clone());
    for patch in patches(&tables) {
        let mut hostile = Tables::of(sound.clone());
        patch.iter().for_each(|(at, word)| hostile.put(*at, *word));
        fs::write(image.path(), &hostile.bytes).unwrap();
        let Ok(disk) = Disk::open(&image.spec(), &options(Cache::Writeback, false)) else {
            refused += 1;
            continue;
        };
        if disk.reload(false).is_err() {
            refused += 1;
            continue;
        }
        let mut worker = Worker::new(&disk, EngineKind::Threads, 4);
        for round in 0..3 {
            for at in [0, CLUSTER, SIZE / 2 - 512, SIZE / 2 + CLUSTER, SIZE - 4096] {
                failed += usize::from(worker.write(at + round * 512, &[9; 512], 0).is_err());
                failed += usize::from(worker.read(at, 512).0.is_err());
            }
            for unmap in [true, false] {
                worker.io(0).extents_mut().push(kickless_disk::Extent { offset: 0, len: 3 * CLUSTER, unmap });
                failed += usize::from(worker.run(Request::WriteZeroes { durable: round == 1 }).is_err());
            }
            worker.io(0).extents_mut().push(kickless_disk::Extent { offset: 0, len: SIZE, unmap: true });
            failed += usize::from(worker.run(Request::Discard { durable: false }).is_err());
            failed += usize::from(worker.flush().is_err());
        }
        drop(worker);
        drop(disk);
        let file = fs::metadata(image.path()).unwrap();
        let (len, space) = (file.len(), file.blocks() * 512);
        assert!(len <= LEN_MAX && space <= SPACE_MAX, "{:x?}: {len} bytes, {space} used", patch.first());
    }
    println!("{refused} images are refused, {failed} requests fail");
    assert!(failed > 0);
    // The sound image is served.
    fs::write(image.path(), &sound).unwrap();
    let disk = common::open(&image.spec());
    disk.reload(false).unwrap();
    run_on_extent(&mut common::worker(&disk), Request::WriteZeroes { durable: true }, 0, CLUSTER, true);
}

/// Nine images whose L1 tables have 32 MiB each, which is the most of one image.
#[test]
fn l1_tables_of_a_chain_are_bounded_together() {
    const L1: u64 = 32 << 20;
    let dir = tempfile::tempdir().unwrap();
    let name = |number: u32| format!("image{number}");
    for number in 0..9u32 {
        let create = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=512"];
        let (under, name) = (name(number.saturating_sub(1)), name(number));
        let under = if number > 0 { vec!["-u", "-F", "qcow2", "-b", &under] } else { vec![] };
        qemu_img(dir.path(), &[&create[..], &under, &[&name, "1M"]].concat());
        let file = File::options().write(true).open(dir.path().join(&name)).unwrap();
        // The virtual size, the number of L1 entries, and their place, which is a hole.
        file.write_all_at(&(L1 / 8 * 64 * 512).to_be_bytes(), 24).unwrap();
        file.write_all_at(&(L1 as u32 / 8).to_be_bytes(), 36).unwrap();
        file.write_all_at(&(1u64 << 20).to_be_bytes(), 40).unwrap();
        file.set_len((1 << 20) + L1).unwrap();
    }
    let open = |number| {
        Disk::open(&DiskSpec::Qcow2(dir.path().join(name(number))), &options(Cache::Writeback, true))
    };
    open(7).unwrap();
    let error = open(8).unwrap_err().to_string();
    assert!(error.contains("too large together"), "{error}");
}
