//! Repairs images, whole and cut off.

use super::image::{ReadImage, WriteImage};
use super::layout::Layout;
use super::repair::repair;
use super::report::{CheckError, Report};
use super::walk::for_each_table;
use super::{WINDOW, check};
use crate::format::bad_image::BadImage;
use crate::format::entry::{load_entries, with_copied};
use crate::format::header::{Header, HeaderChange};
use crate::format::numbers::be64;
use crate::images::qemu::{QemuImage, QemuReport};
use crate::images::recorded::{Change, Recorded};
use kickless_testing::Random;

/// The offset of the incompatible feature bits' last byte.
const FEATURES: usize = 79;

/// Returns an image that was open when QEMU was killed.
fn dirty(options: &str) -> QemuImage {
    let image = QemuImage::create(&format!("lazy_refcounts=on,{options}"), "4M");
    image.io(&["write -P 1 0 300k", "write -P 2 2M 200k"]);
    image.img(&["snapshot", "-c", "one", "disk"]);
    image.io_killed(&["write -P 3 100k 400k", "write -z 2M 64k", "discard 200k 64k"]);
    image
}

fn repair_all(image: &Recorded, window: u64) -> Report {
    repair(image, window, &mut |_, _| {}).unwrap()
}

/// Returns all entries of L2 tables without COPIED.
fn entries(image: &Recorded) -> Vec<(u64, u64)> {
    let layout = Layout::load(image).unwrap();
    let mut entries = Vec::new();
    for_each_table(image, &layout, &mut |_, _, bytes| {
        let raw = load_entries(layout.header.geometry, bytes);
        entries.extend(raw.map(|raw| (with_copied(raw.word, false), raw.bitmap)));
        Ok(())
    })
    .unwrap();
    entries
}

/// Checks that a repaired image is right, by both checks, and has these contents.
fn assert_repaired(image: Recorded, contents: &[u8], name: &str) {
    assert_eq!(check(&image, WINDOW).unwrap(), Report::default(), "{name}");
    let bytes = image.into_bytes();
    assert!(!Header::parse(&bytes, bytes.len() as u64).unwrap().is_dirty(), "{name}");
    let repaired = QemuImage::of(&bytes);
    assert_eq!(repaired.check(), QemuReport::default(), "{name}");
    assert!(repaired.contents() == contents, "{name}: other contents");
}

#[test]
fn images_of_a_killed_qemu_are_repaired() {
    for options in ["cluster_size=64k", "cluster_size=512", "extended_l2=on", "refcount_bits=64"] {
        let image = dirty(options);
        let contents = image.contents();
        let loaded = image.load();
        // QEMU has written the refcounts of the smallest clusters, because its cache is small.
        let is_sound = check(&loaded, WINDOW).unwrap().is_sound();
        assert_eq!(is_sound, options == "cluster_size=512", "{options}");
        let mut last = (0, 0);
        let report = repair(&loaded, 100, &mut |done, all| {
            assert!(done <= all && done >= last.0, "{done} of {all} after {last:?}");
            last = (done, all);
        });
        assert_eq!(report.unwrap().low == 0, is_sound, "{options}");
        assert!(last.1 > 0 && (is_sound || last.0 == last.1), "{options}: {last:?}");
        assert_repaired(loaded, &contents, options);
    }
}

#[test]
fn wrong_refcounts_and_flags_are_repaired() {
    let images = ["cluster_size=512", "refcount_bits=2", "refcount_bits=64"].map(|options| {
        let image = QemuImage::create(options, "2M");
        image.io(&["write -P 1 0 300k", "write -P 2 1M 200k"]);
        image.img(&["snapshot", "-c", "one", "disk"]);
        image.io(&["write -P 3 100k 400k"]);
        (options, image.load().into_bytes(), image.contents())
    });
    for seed in 0..30 {
        let mut random = Random(seed);
        let (options, sound, contents) = &images[random.below(3) as usize];
        let mut bytes = sound.clone();
        let layout = Layout::load(&Recorded::new(sound.clone())).unwrap();
        let cluster = layout.header.geometry.cluster();
        let blocks: Vec<_> = layout.refcounts.iter().filter(|word| **word != 0).collect();
        for _ in 0..random.from(1..20) {
            let at = match random.below(3) {
                // A refcount of a low cluster.
                0 => blocks[random.below(blocks.len() as u64) as usize] + random.below(cluster.min(64)),
                // The flag of an entry with a cluster.
                _ => {
                    let table = layout.tables.keys().nth(random.below(layout.tables.len() as u64) as usize);
                    let at = u64::from(*table.unwrap()) * cluster + random.below(cluster / 8) * 8;
                    let is_used = bytes[at as usize + 1..][..6].iter().any(|byte| *byte != 0);
                    if is_used { at } else { continue }
                }
            };
            bytes[at as usize] ^= 0x80;
        }
        let image = Recorded::new(bytes);
        repair_all(&image, if random.one_in(2) { WINDOW } else { 50 });
        assert_repaired(image, contents, &format!("seed {seed}, {options}"));
    }
}

/// The second image needs a block for the new blocks themselves.
#[test]
fn missing_refcount_blocks_are_made() {
    for (size, lost) in [("1M", 1..3), ("2M", 2..20)] {
        let image = QemuImage::create("cluster_size=512", size);
        image.io(&[&format!("write -P 7 0 {size}")]);
        let contents = image.contents();
        let (mut bytes, layout) = (image.load().into_bytes(), Layout::load(&image.load()).unwrap());
        let used = layout.refcounts.iter().take_while(|word| **word != 0).count();
        for index in lost.filter(|index| *index < used) {
            bytes[layout.header.refcounts.at.0 as usize + index * 8..][..8].fill(0);
        }
        // The last block counts the end of the file, where the new blocks will be.
        bytes[layout.header.refcounts.at.0 as usize + (used - 1) * 8..][..8].fill(0);
        let image = Recorded::new(bytes);
        assert!(repair_all(&image, WINDOW).low > 100);
        assert_repaired(image, &contents, size);
    }
}

/// Returns the image after a cut: some changes are there, and of those after the last sync, random sectors.
fn cut(start: &[u8], changes: &[Change], random: &mut Random) -> Vec<u8> {
    let image = Recorded::new(start.to_vec());
    let is_power = random.one_in(2);
    let synced = changes.iter().rposition(|change| matches!(change, Change::Sync)).unwrap_or(0);
    for (index, change) in changes.iter().enumerate() {
        let Change::Write { at, bytes: from } = change else { continue };
        for (sector, from) in (0..).zip(from.chunks(512)) {
            if !is_power || index < synced || random.one_in(2) {
                image.write(at + sector * 512, from).unwrap();
            }
        }
    }
    image.into_bytes()
}

#[test]
fn a_repair_that_is_cut_off_starts_again() {
    for (seed, options) in ["cluster_size=512", "cluster_size=4k", "extended_l2=on"].iter().enumerate() {
        let mut random = Random(seed as u64);
        let mut start = dirty(options).load().into_bytes();
        let layout = Layout::load(&Recorded::new(start.clone())).unwrap();
        for (index, block) in (0..).zip(layout.refcounts).filter(|(_, block)| *block != 0) {
            start[block as usize + 10..][..40].fill(0);
            // A block is missing too.
            if index == 1 {
                start[layout.header.refcounts.at.0 as usize + 8..][..8].fill(0);
            }
        }
        let image = Recorded::new(start.clone());
        let expected = entries(&image);
        repair_all(&image, 400);
        let changes = image.changes();
        assert!(changes.len() > 6);
        for count in (0..=changes.len()).flat_map(|count| [count; 4]) {
            let bytes = cut(&start, &changes[..count], &mut random);
            let is_dirty = Header::parse(&bytes, bytes.len() as u64).unwrap().is_dirty();
            let image = Recorded::new(bytes);
            if !is_dirty {
                assert_eq!(
                    check(&image, WINDOW).unwrap(),
                    Report::default(),
                    "{options}, {count}: not whole"
                );
            }
            repair_all(&image, WINDOW);
            assert_eq!(check(&image, WINDOW).unwrap(), Report::default(), "{options}, {count}");
            assert_eq!(entries(&image), expected, "{options}, {count}");
        }
    }
}

/// Returns a word of an image.
fn word(bytes: &[u8], at: u64) -> u64 {
    be64(bytes, at as usize)
}

/// Returns what QEMU makes of an image when it opens it for writing.
fn opened_by_qemu(bytes: &[u8]) -> (QemuReport, Vec<u8>) {
    let image = QemuImage::of(bytes);
    image.io(&["length"]);
    (image.check(), image.load().into_bytes())
}

/// Entries that cannot be true stay as QEMU leaves them, or become the zeroes that QEMU makes of them. All
/// references that can be true are counted.
#[test]
fn bad_entries_stay_or_become_zeroes_as_in_qemu() {
    const COPIED: u64 = 1 << 63;
    const COMPRESSED: u64 = 1 << 62;
    /// The number of an entry without a cluster.
    const ENTRY: u64 = 20;
    for options in ["cluster_size=64k", "extended_l2=on"] {
        let image = dirty(options).load().into_bytes();
        let header = Header::parse(&image, image.len() as u64).unwrap();
        let (l1, offset) = (header.l1.at.0, !COPIED);
        let l2 = word(&image, l1) & offset;
        let entry = l2 + ENTRY * header.geometry.entry_bytes();
        let used = word(&image, l2 + header.geometry.entry_bytes()) & offset;
        // The place, the word, the bitmap of extended entries, and whether the entry becomes zeroes.
        let mut cases = vec![
            (entry, used | 2, 1, false),
            (entry, used | 512, 1, false),
            (entry, COPIED | 1 << 40, 1, false),
            (entry, COMPRESSED | COPIED | used, 0, false),
            (entry, COMPRESSED | 1 << 40, 0, false),
            (entry, COPIED | l1, 1, false),
            (l1, COPIED | l2 | 2, 0, false),
            (l1, COPIED | 1 << 40, 0, false),
        ];
        let zeroes = if header.geometry.extended { (512, u64::from(u32::MAX - 5) << 32) } else { (513, 0) };
        cases.push((entry, COPIED | used | zeroes.0, zeroes.1, true));
        for (at, damage, bitmap, is_zeroed) in cases {
            let name = format!("{options}, {damage:#x} at {at:#x}");
            let mut bytes = image.clone();
            bytes[at as usize..][..8].copy_from_slice(&damage.to_be_bytes());
            if header.geometry.extended && at == entry {
                bytes[at as usize + 8..][..8].copy_from_slice(&bitmap.to_be_bytes());
            }
            let start = bytes.clone();
            let repaired = Recorded::new(bytes);
            let report = repair_all(&repaired, 100);
            assert_eq!(report.bad + report.overlaps == 0, is_zeroed, "{name}: {report:?}");
            let left = check(&repaired, WINDOW).unwrap();
            assert_eq!((left.low, left.copied), (0, 0), "{name}: {left:?}");
            let ours = repaired.into_bytes();
            let (by_qemu, theirs) = opened_by_qemu(&start);
            for at in (at..at + header.geometry.entry_bytes()).step_by(8) {
                let [ours, theirs] = [&ours, &theirs].map(|bytes| with_copied(word(bytes, at), false));
                assert_eq!(ours, theirs, "{name}");
            }
            assert_eq!(word(&ours, at) & offset != damage & offset, is_zeroed, "{name}");
            let ours = QemuImage::of(&ours);
            let found = ours.check();
            assert_eq!(QemuReport { leaks: 0, ..found }, QemuReport { leaks: 0, ..by_qemu }, "{name}");
            if at == entry {
                ours.io(&["read -P 3 100k 100k", "read -P 3 300k 200k"]);
            } else if damage >> 40 & 1 != 0 {
                // The clusters that the lost table refers to are not free.
                assert!(found.leaks > 5, "{name}");
            }
        }
    }
}

#[test]
fn damage_beyond_repair_is_refused() {
    let image = dirty("cluster_size=64k").load().into_bytes();
    let header = Header::parse(&image, image.len() as u64).unwrap();
    let refused = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = image.clone();
        change(&mut bytes);
        let image = Recorded::new(bytes.clone());
        let error = repair(&image, WINDOW, &mut |_, _| {}).unwrap_err();
        assert!(image.changes().is_empty(), "{error}");
        assert_eq!(image.bytes(), bytes.len() as u64);
        error
    };
    let (l1, table) = (header.l1.at.0, header.refcounts.at.0);
    // The L1 entry refers to the refcount table, and that to the L1 table, to an impossible place, and beyond
    // the file.
    for (at, word) in [(l1, table), (table, l1), (table, 12345), (table, 1 << 40)] {
        let error = refused(&|bytes| bytes[at as usize..][..8].copy_from_slice(&word.to_be_bytes()));
        assert!(matches!(error, CheckError::Damaged), "{error}");
        assert!(error.to_string().contains("qemu-img check -r all"));
    }
    let error = refused(&|bytes| HeaderChange::SetCorrupt.apply(bytes));
    assert!(matches!(error, CheckError::Bad(BadImage::Corrupt)), "{error}");
    assert_eq!(image[FEATURES], 1);
}
