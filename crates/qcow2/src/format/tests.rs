//! Tests the codecs: against themselves, and against images of QEMU.

use super::bad_image::BadImage;
use super::entry::{
    BadEntry, MEMORY_BITS, Mapping, PlainHosts, RawEntry, counted, decode, decode_l1, encode, encode_l1,
    load_entries, plain_hosts, store_entry,
};
use super::geometry::{Geometry, GuestOffset, HostCluster, HostOffset, SliceIndex, Version};
use super::refcount::{CountTooLarge, decode_block, get, set};
use proptest::prelude::*;

fn geometries() -> impl Strategy<Value = Geometry> {
    let made =
        (any::<bool>(), 9_u32..=21, 0_u32..=6, any::<bool>()).prop_map(|(old, bits, order, extended)| {
            let version = if old { Version::V2 } else { Version::V3 };
            Geometry::new(version, bits, if old { 4 } else { order }, extended && !old && bits >= 14)
        });
    made.prop_map(Result::unwrap)
}

/// Returns a mapping that the geometry permits, with a cluster below 2^56.
fn mapping(geometry: Geometry, kind: u8, place: u64, copied: bool, sets: u64) -> Mapping {
    let host = geometry.host_offset(HostCluster((place % (1 << (56 - geometry.cluster_bits))) | 1));
    let (allocated, zero) = (sets as u32, (sets >> 32) as u32 & !(sets as u32));
    let at = HostOffset(place % (1 << (62 - (geometry.cluster_bits - 8)).min(56)));
    match kind {
        0 if geometry.version == Version::V3 => Mapping::Zero { kept: Some(host), copied },
        1 if geometry.version == Version::V3 => Mapping::Zero { kept: None, copied: false },
        2 => Mapping::Data { host, copied },
        3 => {
            let sectors = 1 + sets % (1 << (geometry.cluster_bits - 8));
            Mapping::Compressed { at, len: (sectors * 512 - at.0 % 512) as u32 }
        }
        4 if geometry.extended
            && (allocated, zero) != (u32::MAX, 0)
            && (allocated, zero) != (0, u32::MAX) =>
        {
            Mapping::Parts { host: Some(host), copied, allocated, zero }
        }
        5 if geometry.extended && zero != 0 && zero != u32::MAX => {
            Mapping::Parts { host: None, copied: false, allocated: 0, zero }
        }
        _ => Mapping::Unallocated,
    }
}

proptest! {
    #[test]
    fn an_encoded_entry_is_decoded_again(
        geometry in geometries(), kind in 0_u8..7, place: u64, copied: bool, sets: u64, index in 0_usize..32,
    ) {
        let mapping = mapping(geometry, kind, place, copied, sets);
        let raw = encode(geometry, mapping);
        prop_assert_eq!(decode(geometry, raw), Ok(mapping));
        if !matches!(mapping, Mapping::Compressed { .. }) {
            prop_assert_eq!(raw.word & MEMORY_BITS, 0);
            for bit in [1 << 1, 1 << 2, 1 << 3] {
                let marked = RawEntry { word: raw.word | bit, ..raw };
                prop_assert_eq!(decode(geometry, marked), Err(BadEntry::Reserved));
            }
        }
        let mut bytes = [0; 512];
        store_entry(geometry, &mut bytes, index, raw);
        prop_assert_eq!(load_entries(geometry, &bytes).nth(index), Some(raw));
        prop_assert_eq!(load_entries(geometry, &bytes).filter(|raw| *raw != RawEntry::default()).count(),
            usize::from(mapping != Mapping::Unallocated));
    }

    /// An entry of any bits is refused, or it is encoded as an entry with the same meaning.
    #[test]
    fn any_entry_is_decoded_or_refused(geometry in geometries(), word: u64, clear: u64, bitmap: u64) {
        for raw in [RawEntry { word, bitmap }, RawEntry { word: word & clear, bitmap: 0 }] {
            if let Ok(mapping) = decode(geometry, raw) {
                prop_assert_eq!(decode(geometry, encode(geometry, mapping)), Ok(mapping));
                let clusters = counted(geometry, mapping).count();
                prop_assert!(clusters <= 3, "{clusters} clusters");
            }
            if let Ok(Some((table, copied))) = decode_l1(geometry, raw.word) {
                prop_assert_eq!(encode_l1(table), raw.word | 1 << 63);
                prop_assert_eq!(copied, raw.word >> 63 == 1);
            }
            if let Ok(Some(block)) = decode_block(geometry, raw.word) {
                prop_assert!(block.0 == raw.word && geometry.is_aligned(block));
            }
        }
    }

    /// A look at all entries of a slice says nothing that the single entries do not say.
    #[test]
    fn plain_entries_are_seen_together(
        geometry in geometries(),
        kinds in prop::collection::vec((0_u8..3, any::<u64>(), any::<bool>()), 0..8),
        damage in prop::option::of((0_usize..64, 0_u32..64)),
    ) {
        let mut bytes = [0; 512];
        for (index, (kind, place, copied)) in kinds.into_iter().enumerate() {
            let raw = encode(geometry, mapping(geometry, kind, place, copied, 0));
            store_entry(geometry, &mut bytes, index, raw);
        }
        if let Some((index, bit)) = damage {
            bytes[8 * index..][..8].copy_from_slice(&(1_u64 << bit).to_be_bytes());
        }
        let mappings = load_entries(geometry, &bytes).map(|raw| decode(geometry, raw));
        let hosts: Result<Vec<_>, BadEntry> = mappings.map(|mapping| Ok(match mapping? {
            Mapping::Data { host, .. } | Mapping::Zero { kept: Some(host), .. } => Some(host),
            Mapping::Compressed { .. } | Mapping::Parts { .. } => Some(HostOffset(u64::MAX)),
            Mapping::Unallocated | Mapping::Zero { kept: None, .. } => None,
        })).collect();
        let hosts = hosts.map(|hosts| hosts.into_iter().flatten().collect::<Vec<_>>());
        match plain_hosts(geometry, &bytes) {
            PlainHosts::None => prop_assert_eq!(hosts, Ok(Vec::new())),
            PlainHosts::Within(first, last) => {
                let hosts = hosts.unwrap();
                prop_assert_eq!((hosts.iter().min(), hosts.iter().max()), (Some(&first), Some(&last)));
            }
            PlainHosts::Unknown => prop_assert!(
                geometry.extended || hosts.is_err() || hosts.unwrap().contains(&HostOffset(u64::MAX))
            ),
        }
    }

    #[test]
    fn refcounts_of_each_width(geometry in geometries(), counts in prop::collection::vec(any::<u64>(), 64)) {
        let mut block = vec![0xa5; 512];
        let counts: Vec<_> = counts.iter().map(|count| count & geometry.refcount_max()).collect();
        for (index, count) in (0..).zip(&counts) {
            prop_assert_eq!(set(geometry, &mut block, index, *count), Ok(()));
        }
        for (index, count) in (0..).zip(&counts) {
            prop_assert_eq!(get(geometry, &block, index), *count);
        }
        let used = counts.len() * geometry.refcount_bits() as usize / 8;
        prop_assert!(block[used..].iter().all(|byte| *byte == 0xa5));
        if let Some(large) = geometry.refcount_max().checked_add(1) {
            prop_assert_eq!(set(geometry, &mut block, 0, large), Err(CountTooLarge(large)));
        }
    }
}

/// The standard: the count of the lowest cluster is in the lowest bits of a byte.
#[test]
fn narrow_refcounts_begin_with_the_lowest_bits() {
    for (order, block, counts) in
        [(0, [0b101, 0], [1, 0, 1, 0]), (1, [0b1101_1000, 1], [0, 2, 1, 3]), (2, [0x21, 0x43], [1, 2, 3, 4])]
    {
        let geometry = Geometry::new(Version::V3, 16, order, false).unwrap();
        assert_eq!([0, 1, 2, 3].map(|index| get(geometry, &block, index)), counts);
    }
}

#[test]
fn entries_that_cannot_be_true() {
    let plain = Geometry::new(Version::V3, 16, 4, false).unwrap();
    let old = Geometry::new(Version::V2, 16, 4, false).unwrap();
    let small = Geometry::new(Version::V3, 9, 4, false).unwrap();
    let extended = Geometry::new(Version::V3, 16, 4, true).unwrap();
    let both = 1 << 63 | 1 << 62;
    for (geometry, word, bitmap, error) in [
        (plain, 0x10002, 0, BadEntry::Reserved),
        (plain, 1 << 56 | 0x10000, 0, BadEntry::Reserved),
        (plain, 0x10000, 1, BadEntry::Reserved),
        (old, 0x10001, 0, BadEntry::Reserved),
        (old, 1, 0, BadEntry::Reserved),
        (extended, 0x10001, 1, BadEntry::Reserved),
        (extended, 1 << 62, 1, BadEntry::Reserved),
        (plain, 0x18000, 0, BadEntry::Alignment(0x18000)),
        (plain, 0x200, 0, BadEntry::Alignment(0x200)),
        (small, 1 << 62 | 1 << 57, 0, BadEntry::Offset(1 << 57)),
        (plain, both, 0, BadEntry::CopiedCompressed),
        (extended, 0x10000, 1 << 32 | 1, BadEntry::BothBits),
        (extended, 0, 1, BadEntry::NoCluster),
    ] {
        assert_eq!(decode(geometry, RawEntry { word, bitmap }), Err(error), "{word:#x}, {bitmap:#x}");
    }
    assert_eq!(decode_l1(plain, 0x10001), Err(BadEntry::Reserved));
    assert_eq!(decode_l1(plain, 0x200), Err(BadEntry::Alignment(0x200)));
    for (word, error) in [
        (0x10001, BadEntry::Reserved),
        (0x10200, BadEntry::Alignment(0x10200)),
        (1 << 56, BadEntry::Offset(1 << 56)),
    ] {
        assert_eq!(decode_block(plain, word), Err(error));
    }
    // QEMU ignores COPIED without a cluster.
    assert_eq!(decode(plain, RawEntry { word: 1 << 63, bitmap: 0 }), Ok(Mapping::Unallocated));
    assert_eq!(decode_l1(plain, 1 << 63), Ok(None));
}

#[test]
fn compressed_data_counts_each_cluster_that_it_touches() {
    let geometry = Geometry::new(Version::V3, 16, 4, false).unwrap();
    let clusters = |at, len| {
        let mapping = Mapping::Compressed { at: HostOffset(at), len };
        counted(geometry, mapping).map(|cluster| cluster.0).collect::<Vec<_>>()
    };
    assert_eq!(clusters(0x10000, 512), [1]);
    assert_eq!(clusters(0x1fe01, 511), [1]);
    assert_eq!(clusters(0x1fe01, 1023), [1, 2]);
}

#[test]
fn geometries_and_their_bounds() {
    let new = Geometry::new;
    let extended = new(Version::V3, 16, 4, true).unwrap();
    assert_eq!(
        (extended.cluster(), extended.table_entries(), extended.table_span()),
        (65536, 4096, 256 << 20)
    );
    assert_eq!((extended.subclusters(), extended.subcluster(), extended.block_entries()), (32, 2048, 32768));
    let place = GuestOffset((256 << 20) * 3 + 65536 * 257 + 5);
    assert_eq!(extended.slice(4096, place), (SliceIndex(49), 1));
    assert_eq!((extended.l1_entries_for(256 << 20), extended.l1_entries_for((256 << 20) + 512)), (1, 2));
    let widest = new(Version::V3, 21, 6, false).unwrap();
    assert_eq!((widest.refcount_max(), widest.table_span()), (u64::MAX, 1 << 39));
    assert_eq!(new(Version::V3, 9, 0, false).unwrap().refcount_max(), 1);
    for bits in [0, 8, 22, 63, u32::MAX] {
        assert_eq!(new(Version::V3, bits, 4, false), Err(BadImage::ClusterBits(bits)));
    }
    for order in [7, u32::MAX] {
        assert_eq!(new(Version::V3, 16, order, false), Err(BadImage::RefcountOrder(order)));
    }
    assert_eq!(new(Version::V2, 16, 3, false), Err(BadImage::RefcountOrder(3)));
    assert_eq!(new(Version::V2, 16, 4, true), Err(BadImage::SmallSubclusters(65536)));
    assert_eq!(new(Version::V3, 13, 4, true), Err(BadImage::SmallSubclusters(8192)));
}
