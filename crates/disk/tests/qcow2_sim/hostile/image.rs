//! Makes sound images of all kinds, and spoils them.

use super::Input;
use kickless_qcow2::entry::{Mapping, encode, encode_l1, store_entry};
use kickless_qcow2::refcount;
use kickless_qcow2::{Geometry, HostOffset, Version};

/// The places of tables and data, in clusters. The L2 table of the second L1 entry and what it maps are
/// shared with a snapshot, if there is one.
const L1: u64 = 1;
const REFCOUNTS: u64 = 2;
const BLOCK: u64 = 3;
const SNAPSHOTS: u64 = 4;
const SNAPSHOT_L1: u64 = 5;
const L2: u64 = 6;
const SHARED_L2: u64 = 7;
const DATA: u64 = 8;
const SHARED_DATA: u64 = 12;
const COMPRESSED: u64 = 14;
const CLUSTERS: u64 = 16;
/// The L1 entries.
const TABLES: u64 = 4;
/// The place of the backing image's name in the header.
pub(super) const NAME_AT: usize = 400;
/// The words of the header that are spoiled: neither the name of the backing image, nor the version.
const HEADER_WORDS: std::ops::Range<u64> = 3..14;
/// The most spoiled words.
const SPOILED_MAX: u64 = 10;

/// An image, and what is known of it.
#[derive(Debug)]
pub(super) struct HostileImage {
    pub(super) bytes: Vec<u8>,
    pub(super) geometry: Geometry,
    /// The size of the virtual disk.
    pub(super) size: u64,
    /// No word is spoiled.
    pub(super) is_sound: bool,
}

impl HostileImage {
    /// Makes an image over the file `under`, with its format.
    pub(super) fn new(input: &mut Input<'_>, under: Option<(&str, &str)>) -> Self {
        let how = input.byte();
        let bits = [9, 10, 12, 14][usize::from(how & 3)];
        let version = if how & 4 == 0 { Version::V3 } else { Version::V2 };
        let extended = version == Version::V3 && how & 8 != 0 && bits >= 14;
        let order = if version == Version::V2 { 4 } else { u32::from(how >> 5).min(6) };
        // A snapshot needs counts of 2.
        let has_snapshot = how & 16 != 0 && order > 0;
        let geometry = Geometry::new(version, bits, order, extended);
        let Ok(geometry) = geometry else { unreachable!("all these sizes are possible") };
        let flags = input.byte();
        let size = (TABLES - 1) * geometry.table_span() - u64::from(flags & 7) * 512;
        let mut image =
            Self { bytes: vec![0; (CLUSTERS * geometry.cluster()) as usize], geometry, size, is_sound: true };
        image.put_tables(has_snapshot);
        image.put_header(has_snapshot, under, flags);
        let spoiled = input.below(SPOILED_MAX);
        for _ in 0..spoiled {
            image.spoil(input);
        }
        image
    }

    fn put(&mut self, at: u64, bytes: &[u8]) {
        self.bytes[at as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    fn host(&self, cluster: u64) -> HostOffset {
        HostOffset(cluster << self.geometry.cluster_bits)
    }

    /// Returns the bytes of a cluster.
    fn cluster(&mut self, cluster: u64) -> &mut [u8] {
        let (at, len) = (self.host(cluster).0, self.geometry.cluster());
        &mut self.bytes[at as usize..][..len as usize]
    }

    fn map(&mut self, table: u64, index: u64, mapping: Mapping) {
        let geometry = self.geometry;
        store_entry(geometry, self.cluster(table), index as usize, encode(geometry, mapping));
    }

    fn put_tables(&mut self, has_snapshot: bool) {
        let geometry = self.geometry;
        let last = geometry.table_entries() - 1;
        let data = |host, copied| Mapping::Data { host, copied };
        self.map(L2, 0, data(self.host(DATA), true));
        self.map(L2, 1, data(self.host(DATA + 1), true));
        if geometry.version == Version::V3 {
            self.map(L2, 3, Mapping::Zero { kept: Some(self.host(DATA + 2)), copied: true });
            self.map(L2, 4, Mapping::Zero { kept: None, copied: false });
        }
        if geometry.extended {
            let (host, zero) = (Some(self.host(DATA + 3)), 0xff00);
            self.map(L2, 5, Mapping::Parts { host, copied: true, allocated: 0xff, zero });
        } else {
            self.map(L2, last, data(self.host(DATA + 3), true));
        }
        self.map(L2, 6, Mapping::Compressed { at: self.host(COMPRESSED), len: 512 });
        // One block of deflated data, stored: too short, so that it fails, or is padded, as the reader likes.
        self.put(self.host(COMPRESSED).0, &[1, 4, 0, 0xfb, 0xff, 1, 2, 3, 4]);
        let is_only = !has_snapshot;
        self.map(SHARED_L2, 0, data(self.host(SHARED_DATA), is_only));
        self.map(SHARED_L2, last, data(self.host(SHARED_DATA + 1), is_only));
        for cluster in DATA..COMPRESSED {
            self.cluster(cluster).fill(cluster as u8);
        }
        self.put(self.host(L1).0, &encode_l1(self.host(L2)).to_be_bytes());
        let shared = self.host(SHARED_L2).0.to_be_bytes();
        let owned = encode_l1(self.host(SHARED_L2)).to_be_bytes();
        self.put(self.host(L1).0 + 8, if has_snapshot { &shared } else { &owned });
        if has_snapshot {
            self.put(self.host(SNAPSHOT_L1).0 + 8, &shared);
            self.put_snapshot();
        }
        self.put(self.host(REFCOUNTS).0, &self.host(BLOCK).0.to_be_bytes());
        let mut counts = vec![1; CLUSTERS as usize];
        counts[CLUSTERS as usize - 1] = 0;
        for (cluster, count) in counts.iter_mut().enumerate() {
            let cluster = cluster as u64;
            let is_shared = cluster == SHARED_L2 || (SHARED_DATA..COMPRESSED).contains(&cluster);
            let is_kept = (cluster == DATA + 2) && geometry.version == Version::V2;
            let is_of_snapshot = cluster == SNAPSHOTS || cluster == SNAPSHOT_L1;
            if is_shared && has_snapshot {
                *count = 2;
            } else if is_kept || is_of_snapshot && !has_snapshot {
                *count = 0;
            }
        }
        for (cluster, count) in counts.into_iter().enumerate() {
            let is_set = refcount::set(geometry, self.cluster(BLOCK), cluster as u64, count);
            assert!(is_set.is_ok(), "2 needs two bits");
        }
    }

    /// Makes the snapshot table: one entry, with the name `1s`.
    fn put_snapshot(&mut self) {
        let mut entry = Vec::new();
        entry.extend(self.host(SNAPSHOT_L1).0.to_be_bytes());
        entry.extend((TABLES as u32).to_be_bytes());
        entry.extend([0, 1, 0, 1]);
        entry.extend([0; 20]);
        entry.extend(16u32.to_be_bytes());
        entry.extend(0u64.to_be_bytes());
        entry.extend(self.size.to_be_bytes());
        entry.extend(*b"1s");
        self.put(self.host(SNAPSHOTS).0, &entry);
    }

    fn put_header(&mut self, has_snapshot: bool, under: Option<(&str, &str)>, flags: u8) {
        let geometry = self.geometry;
        let is_new = geometry.version == Version::V3;
        self.put(0, b"QFI\xfb");
        self.put(4, &if is_new { 3u32 } else { 2 }.to_be_bytes());
        self.put(20, &geometry.cluster_bits.to_be_bytes());
        self.put(24, &self.size.to_be_bytes());
        self.put(36, &(TABLES as u32).to_be_bytes());
        self.put(40, &self.host(L1).0.to_be_bytes());
        self.put(48, &self.host(REFCOUNTS).0.to_be_bytes());
        self.put(56, &1u32.to_be_bytes());
        if has_snapshot {
            self.put(60, &1u32.to_be_bytes());
            self.put(64, &self.host(SNAPSHOTS).0.to_be_bytes());
        }
        let mut end = 72;
        if is_new {
            let is_dirty = u64::from(flags & 8 != 0);
            let (is_zstd, is_extended) = (u64::from(flags & 16 != 0), u64::from(geometry.extended));
            self.put(72, &(is_dirty | is_zstd << 3 | is_extended << 4).to_be_bytes());
            self.put(96, &geometry.refcount_order.to_be_bytes());
            self.put(100, &112u32.to_be_bytes());
            self.put(104, &[is_zstd as u8]);
            end = 112;
        }
        if let Some((name, format)) = under {
            // The format of the backing image.
            self.put(end, &0xe279_2acau32.to_be_bytes());
            self.put(end + 4, &(format.len() as u32).to_be_bytes());
            self.put(end + 8, format.as_bytes());
            self.put(8, &(NAME_AT as u64).to_be_bytes());
            self.put(16, &(name.len() as u32).to_be_bytes());
            self.put(NAME_AT as u64, name.as_bytes());
        }
    }

    /// Replaces a word of a table.
    fn spoil(&mut self, input: &mut Input<'_>) {
        self.is_sound = false;
        let words = self.geometry.cluster() / 8;
        let table = input.below(9);
        let index = match (table, input.byte()) {
            (0, index) => HEADER_WORDS.start + u64::from(index) % (HEADER_WORDS.end - HEADER_WORDS.start),
            (_, index @ 0..200) => u64::from(index) % 16 % words,
            (_, index) => words - 1 - u64::from(index) % 8,
        };
        let flags = input.byte();
        let place = match flags & 3 {
            0 | 1 => self.host(input.below(CLUSTERS + 2)).0,
            2 => input.word(),
            _ => [1 << 50, (1 << 56) - self.geometry.cluster(), 512, u64::MAX << 9][input.below(4) as usize],
        };
        let word = place | u64::from(flags >> 6) << 62 | u64::from(flags >> 5 & 1);
        self.put(self.host(table).0 + index * 8, &word.to_be_bytes());
    }
}
