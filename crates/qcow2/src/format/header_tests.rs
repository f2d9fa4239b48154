//! Tests headers: of QEMU's images, and of images that are refused.

use super::bad_image::BadImage;
use super::entry::{decode, decode_l1, encode, encode_l1, load_entries};
use super::geometry::{HostOffset, Version};
use super::header::{BackingFormat, Compression, Header, HeaderChange};
use super::numbers::be64;
use super::snapshots::{snapshots, snapshots_bytes};
use crate::images::qemu::{OPTIONS, QemuImage, SIZE, fill};

fn parse(bytes: &[u8]) -> Result<Header, BadImage> {
    Header::parse(bytes, bytes.len() as u64)
}

fn load(image: &QemuImage) -> Vec<u8> {
    image.load().into_bytes()
}

/// Returns the number that an option of `qemu-img create` sets.
fn number(options: &str, name: &str) -> Option<u64> {
    let value = options.split(',').find_map(|option| option.strip_prefix(name)?.strip_prefix('='))?;
    let (digits, unit) = value.split_at(value.trim_end_matches(['k', 'M']).len());
    Some(
        digits.parse::<u64>().unwrap()
            << match unit {
                "k" => 10,
                "M" => 20,
                _ => 0,
            },
    )
}

#[test]
fn headers_and_entries_of_each_kind_of_image() {
    for options in OPTIONS {
        let image = QemuImage::create(options, SIZE);
        fill(&image, options);
        let bytes = load(&image);
        let header = parse(&bytes).unwrap();
        let geometry = header.geometry;
        let is_on = |option: &str| options.contains(option);
        let version = if is_on("compat=0.10") { Version::V2 } else { Version::V3 };
        assert_eq!((geometry.version, geometry.extended), (version, is_on("extended_l2")), "{options}");
        assert_eq!(geometry.cluster(), number(options, "cluster_size").unwrap_or(65536), "{options}");
        assert_eq!(Header::first_cluster(&bytes[..24]), Ok(geometry.cluster()), "{options}");
        let width = number(options, "refcount_bits").unwrap_or(16);
        assert_eq!(u64::from(geometry.refcount_bits()), width, "{options}");
        assert_eq!((header.size, header.backing.is_none()), (8 << 20, true), "{options}");
        let zstd = if is_on("zstd") { Compression::Zstd } else { Compression::Zlib };
        assert_eq!(header.compression, zstd, "{options}");
        assert!(!header.is_dirty() && !header.is_corrupt() && header.bitmaps.is_none(), "{options}");
        let (at, count) = header.snapshots;
        assert_eq!(count, u32::from(!is_on("refcount_bits=1")), "{options}");
        let tables = snapshots(&bytes[at.0 as usize..], count, geometry, bytes.len() as u64).unwrap();
        assert_eq!(tables.len(), count as usize, "{options}");
        assert!(tables.iter().all(|table| table.entries == header.l1.entries), "{options}");
        // Each entry that QEMU writes is encoded to the same bytes.
        let mut entries = 0;
        for index in 0..header.l1.entries as usize {
            let word = be64(&bytes, header.l1.at.0 as usize + index * 8);
            let Some((table, copied)) = decode_l1(geometry, word).unwrap() else { continue };
            assert_eq!(encode_l1(table), word | 1 << 63, "{options}");
            assert_eq!(copied, word >> 63 == 1, "{options}");
            let table = &bytes[table.0 as usize..][..geometry.cluster() as usize];
            for raw in load_entries(geometry, table) {
                assert_eq!(encode(geometry, decode(geometry, raw).unwrap()), raw, "{options}");
                entries += 1;
            }
        }
        assert!(entries > 0, "{options}");
    }
}

#[test]
fn backing_images_and_bitmaps() {
    let image = QemuImage::create("", "1M");
    image.img(&["create", "-q", "-f", "qcow2", "-b", "disk", "-F", "qcow2", "top"]);
    image.img(&["bitmap", "--add", "top", "one"]);
    let bytes = std::fs::read(image.dir().join("top")).unwrap();
    let header = parse(&bytes).unwrap();
    let backing = header.backing.unwrap();
    assert_eq!((backing.name.as_slice(), backing.known_format()), (&b"disk"[..], Ok(BackingFormat::Qcow2)));
    assert_eq!(header.bitmaps.unwrap().count, 1);
    // Without the bit, another program has written to the image, and they mean nothing.
    let mut stale = bytes.clone();
    HeaderChange::ClearAutoclear.apply(&mut stale);
    assert_eq!(parse(&stale).unwrap().bitmaps, None);

    image.img(&["rebase", "-q", "-u", "-f", "qcow2", "-b", "disk", "-F", "raw", "top"]);
    let bytes = std::fs::read(image.dir().join("top")).unwrap();
    let backing = parse(&bytes).unwrap().backing.unwrap();
    assert_eq!(backing.known_format(), Ok(BackingFormat::Raw));
    let missing = super::header::Backing { format: None, ..backing.clone() }.known_format();
    assert_eq!(missing, Err(BadImage::BackingFormatMissing));
    let other = super::header::Backing { format: Some("vmdk".to_owned()), ..backing }.known_format();
    assert_eq!(other.unwrap_err().to_string(), "its format \"vmdk\" is not supported");
}

#[test]
fn changes_of_the_header() {
    let mut bytes = load(&QemuImage::create("", "1M"));
    let before = bytes.clone();
    bytes[79] |= 1;
    bytes[95] |= 2;
    assert!(parse(&bytes).unwrap().is_dirty());
    HeaderChange::ClearAutoclear.apply(&mut bytes);
    HeaderChange::ClearDirty.apply(&mut bytes);
    assert_eq!(bytes, before);
    HeaderChange::SetCorrupt.apply(&mut bytes);
    assert!(parse(&bytes).unwrap().is_corrupt());
    bytes.resize(2 << 20, 0);
    let (l1, at) = (HostOffset(0x70000), HostOffset(0x90000));
    HeaderChange::L1AndSize { l1, entries: 5, size: 2 << 30 }.apply(&mut bytes);
    HeaderChange::Refcounts { at, clusters: 2 }.apply(&mut bytes);
    let header = parse(&bytes).unwrap();
    assert_eq!((header.size, header.l1.at, header.l1.entries), (2 << 30, l1, 5));
    assert_eq!((header.refcounts.at, header.refcounts.entries), (at, 2 * 65536 / 8));
    // All changes are in the first sector.
    assert_eq!(bytes[512..before.len()], before[512..]);

    let mut old = load(&QemuImage::create("compat=0.10", "1M"));
    let before = old.clone();
    for change in [HeaderChange::SetCorrupt, HeaderChange::ClearDirty, HeaderChange::ClearAutoclear] {
        change.apply(&mut old);
    }
    assert_eq!(old, before, "version 2 has no feature bits");
}

/// Changes bytes of a header: an offset, and the new bytes.
type Patch<'a> = (usize, &'a [u8]);

#[test]
fn images_that_are_refused() {
    let sound = load(&QemuImage::create("", "1M"));
    let old = load(&QemuImage::create("compat=0.10", "1M"));
    // The header extensions begin at 112, with the feature names.
    let names = 112 + 8;
    let extension = |kind: u32, len: u32| [kind.to_be_bytes(), len.to_be_bytes()].concat();
    let cases: &[(&[Patch], &str)] = &[
        (&[(0, b"QFJ")], "it is not a qcow2 image"),
        (&[(7, &[4])], "it has version 4 of the format, and only 2 and 3 are supported"),
        (&[(23, &[8])], "its clusters of 2^8 bytes are not between 512 bytes and 2 MiB"),
        (&[(99, &[7])], "its reference counts of 2^7 bits are not possible in this version of the format"),
        (&[(23, &[13]), (79, &[16])], "its clusters of 8192 bytes are too small for subclusters"),
        (&[(103, &[103])], "its header of 103 bytes has an impossible length"),
        (&[(101, &[1, 0, 8])], "its header of 65544 bytes has an impossible length"),
        (
            &[(112, &extension(7, 65536))],
            "a header extension of type 0x7 does not fit into the first cluster",
        ),
        (
            &[(112, &extension(0xe279_2aca, 16))],
            "its header extension for the format of its backing image is damaged",
        ),
        (&[(112, &extension(0x2385_2875, 24))], "its header extension for persistent bitmaps is damaged"),
        (&[(35, &[1])], "it is encrypted, which is not supported"),
        (&[(112, &extension(0x0537_be77, 16))], "it is encrypted, which is not supported"),
        (&[(79, &[4])], "its data is in another file, which is not supported"),
        (&[(78, &[1])], "it has incompatible features that are not supported: bit 8"),
        (
            &[(72, &[0x80]), (78, &[1]), (names, b"\0\x08colour\xff\x1b\0x")],
            "it has incompatible features that are not supported: colour??, bit 63",
        ),
        (&[(79, &[8]), (104, &[2])], "its compression method 2 is not supported"),
        (&[(104, &[1])], "its header contradicts itself about the compression method"),
        (&[(79, &[8])], "its header contradicts itself about the compression method"),
        (&[(24, &[0x80])], "its size of 9223372036855824384 bytes is impossible"),
        (
            &[(24, &[1])],
            "its level 1 table has 1 entries, and its size of 72057594038976512 bytes needs more",
        ),
        (&[(36, &[0x40])], "its level 1 table has 8589934600 bytes, and at most 33554432 are supported"),
        (&[(46, &[2])], "its level 1 table cannot be at offset 0x30200"),
        (&[(40, &[0x7f])], "its level 1 table cannot be at offset 0x7f00000000030000"),
        (&[(40, &[0; 8])], "its level 1 table cannot be at offset 0x0"),
        (&[(45, &[0x40])], "its level 1 table cannot be at offset 0x400000"),
        (&[(56, &[0; 4])], "it has no refcount table"),
        (&[(58, &[1])], "its refcount table has 16842752 bytes, and at most 8388608 are supported"),
        (&[(55, &[1])], "its refcount table cannot be at offset 0x10001"),
        (&[(60, &[1])], "it has 16777216 snapshots, and at most 65536 are supported"),
        (&[(63, &[1]), (71, &[1])], "its snapshot table cannot be at offset 0x1"),
        (&[(13, &[1]), (19, &[200])], "the name of its backing image is damaged"),
        (&[(14, &[0x10]), (18, &[4]), (0x1000, &[b'a'; 1024])], "the name of its backing image is damaged"),
    ];
    for (patches, expected) in cases {
        let mut bytes = sound.clone();
        for (at, patch) in *patches {
            bytes[*at..at + patch.len()].copy_from_slice(patch);
        }
        assert_eq!(parse(&bytes).unwrap_err().to_string(), *expected);
        // The sentence does not depend on more bytes than the first cluster.
        let first = Header::parse(&bytes[..65536], bytes.len() as u64);
        assert_eq!(first.unwrap_err().to_string(), *expected);
    }
    // Each length of the file.
    for bytes in [&sound, &old] {
        for len in (0..300).chain([512, 65535, 65536, bytes.len() - 1]) {
            assert!(parse(&bytes[..len]).is_err(), "{len}");
        }
    }
    assert_eq!(parse(&sound[..100]).unwrap_err(), BadImage::Short);
}

#[test]
fn snapshot_tables_that_are_refused() {
    let image = QemuImage::create("", "1M");
    for name in ["one", "two"] {
        image.img(&["snapshot", "-c", name, "disk"]);
    }
    let bytes = load(&image);
    let header = parse(&bytes).unwrap();
    let ((at, count), len) = (header.snapshots, bytes.len() as u64);
    let table = bytes[at.0 as usize..].to_vec();
    let read = |table: &[u8], count| snapshots(table, count, header.geometry, len);
    let used = snapshots_bytes(&table, count).unwrap().unwrap();
    assert_eq!(read(&table[..used], count).unwrap().len(), 2);
    for short in 0..used {
        assert_eq!(snapshots_bytes(&table[..short], count), Ok(None), "{short}");
        assert!(read(&table[..short], count).is_err(), "{short}");
    }
    let patched = |at: usize, byte: u8| {
        let mut table = table.clone();
        table[at] = byte;
        read(&table, count).unwrap_err().to_string()
    };
    assert_eq!(patched(37, 1), "the entry of snapshot number 0 is damaged");
    assert_eq!(patched(7, 1), format!("its level 1 table cannot be at offset {:#x}", be64(&table, 0) | 1));
    assert_eq!(patched(8, 1), "its level 1 table has 134217736 bytes, and at most 33554432 are supported");
    // 65536 entries with the longest names have more than 64 MiB.
    let long = [[0; 12].as_slice(), &[0xff; 4], &[0; 24], &[0; 2 * 65535 + 2]].concat().repeat(600);
    let error = snapshots_bytes(&long, 65536).unwrap_err().to_string();
    assert!(error.ends_with("and at most 67108864 are supported"), "{error}");
}
