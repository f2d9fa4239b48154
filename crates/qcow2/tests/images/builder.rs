//! Makes images to begin with.

use super::cut_file::SECTOR;
use super::stamps::{BELOW, stamp_of};
use fastrand::Rng;
use kickless_qcow2::entry::{Mapping, encode, store_entry};
use kickless_qcow2::refcount;
use kickless_qcow2::{Geometry, HostOffset, Version};
use kickless_testing::Stamp;
use std::collections::BTreeMap;

/// The choices of an image.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) geometry: Geometry,
    /// The number of L2 tables.
    pub(crate) tables: u64,
    /// The clusters at the beginning of each table's span that requests use.
    pub(crate) used: u64,
    pub(crate) has_backing: bool,
    pub(crate) has_snapshot: bool,
    /// Some clusters are compressed, with contents that only the simulator can read.
    pub(crate) has_compressed: bool,
    /// The first cluster behind a gap.
    pub(crate) gap: u64,
    /// Sectors behind the last cluster, with old bytes.
    pub(crate) tail: u64,
    /// The file is a block device, whose length never changes.
    pub(crate) is_device: bool,
    /// The clusters of the gap are free. Otherwise, they are leaks.
    pub(crate) has_holes: bool,
}

impl Shape {
    pub(crate) fn random(rng: &mut Rng) -> Self {
        let extended = rng.u8(..8) == 0;
        let version = if !extended && rng.u8(..4) == 0 { Version::V2 } else { Version::V3 };
        let order = if version == Version::V2 { 4 } else { rng.choice([0, 1, 2, 3, 4, 4, 5, 6, 6]).unwrap() };
        let bits = if extended { 14 } else { rng.u32(9..=10) };
        let geometry = Geometry::new(version, bits, order, extended).unwrap();
        let (entries, table) = (geometry.block_entries(), geometry.cluster() / 8);
        let gap = match rng.u8(..12) {
            // Soon, a block is needed, or a larger refcount table.
            0..4 if entries <= 512 && !extended => entries - rng.u64(20..50),
            4 if entries * table <= 4096 => entries * table - table - rng.u64(20..60),
            _ => 0,
        };
        let is_device = rng.u8(..4) == 0;
        let tail = match rng.u8(..3) {
            _ if is_device => rng.choice([40, 300, 600]).unwrap() * geometry.cluster() / SECTOR as u64,
            0 => rng.u64(1..100),
            _ => 0,
        };
        Self {
            geometry,
            tables: if extended { 2 } else { rng.u64(2..=4) },
            used: if extended { 3 } else { rng.u64(2..=8) },
            has_backing: rng.bool(),
            has_snapshot: order > 0 && rng.bool(),
            has_compressed: true,
            gap,
            tail,
            is_device,
            has_holes: rng.u8(..4) == 0,
        }
    }

    pub(crate) fn size(self) -> u64 {
        self.tables * self.geometry.table_span()
    }

    /// Returns the sectors of the used clusters, as offsets on the virtual disk.
    pub(crate) fn offset(self, sector: usize) -> u64 {
        let per_table = self.used * self.geometry.cluster() / SECTOR as u64;
        let sector = sector as u64;
        sector / per_table * self.geometry.table_span() + sector % per_table * SECTOR as u64
    }

    pub(crate) fn sectors(self) -> usize {
        (self.tables * self.used * self.geometry.cluster()) as usize / SECTOR
    }
}

struct Builder {
    shape: Shape,
    bytes: Vec<u8>,
    next: u64,
    counts: BTreeMap<u64, u64>,
}

impl Builder {
    fn alloc(&mut self, count: u64) -> u64 {
        let first = self.next;
        self.next += 1;
        self.counts.insert(first, count);
        self.bytes.resize((self.next * self.cluster()) as usize, 0);
        first
    }

    fn cluster(&self) -> u64 {
        self.shape.geometry.cluster()
    }

    fn put(&mut self, at: u64, bytes: &[u8]) {
        self.bytes[at as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    fn data(&mut self, count: u64, offset: u64) -> u64 {
        let first = self.alloc(count);
        for within in (0..self.cluster()).step_by(SECTOR) {
            let stamp = stamp_of(offset + within, 0);
            self.put(first * self.cluster() + within, &stamp.to_be_bytes());
        }
        first
    }

    /// Makes the entry of a cluster.
    fn mapping(&mut self, rng: &mut Rng, offset: u64, count: u64) -> Mapping {
        let copied = count == 1;
        let geometry = self.shape.geometry;
        let host = |cluster: u64| HostOffset(cluster << geometry.cluster_bits);
        let zero = geometry.version == Version::V3;
        match rng.u8(..10) {
            0..4 => Mapping::Data { host: host(self.data(count, offset)), copied },
            4 if zero => Mapping::Zero { kept: None, copied: false },
            5 if zero => Mapping::Zero { kept: Some(host(self.data(count, offset + 1))), copied },
            6 if geometry.refcount_order > 1 && self.shape.has_compressed => {
                let cluster = self.alloc(count);
                self.put(cluster * self.cluster(), &stamp_of(offset, 0).to_be_bytes());
                Mapping::Compressed { at: host(cluster), len: SECTOR as u32 }
            }
            7 | 8 if geometry.extended => {
                let (allocated, zero) = (rng.u32(1..), rng.u32(..));
                let zero = zero & !allocated & !1;
                let host = Some(host(self.data(count, offset)));
                Mapping::Parts { host, copied, allocated: allocated & !(1 << 31), zero }
            }
            _ => Mapping::Unallocated,
        }
    }

    /// Makes an L2 table, and returns its cluster.
    fn table(&mut self, rng: &mut Rng, index: u64, is_shared: bool) -> u64 {
        let geometry = self.shape.geometry;
        let table = self.alloc(if is_shared { 2 } else { 1 });
        for cluster in 0..self.shape.used {
            let offset = index * geometry.table_span() + cluster * geometry.cluster();
            let mapping = self.mapping(rng, offset, if is_shared { 2 } else { 1 });
            let at = (table * self.cluster()) as usize;
            let len = self.cluster() as usize;
            store_entry(geometry, &mut self.bytes[at..at + len], cluster as usize, encode(geometry, mapping));
        }
        table
    }
}

/// Makes an image.
pub(crate) fn build(shape: Shape, rng: &mut Rng) -> Vec<u8> {
    let geometry = shape.geometry;
    let cluster = geometry.cluster();
    let mut builder = Builder { shape, bytes: Vec::new(), next: 0, counts: BTreeMap::new() };
    let header = builder.alloc(1);
    let (table, l1, l1_snapshot, snapshot) =
        (builder.alloc(1), builder.alloc(1), builder.next, builder.next + 1);
    if shape.has_snapshot {
        builder.alloc(1);
        builder.alloc(1);
    }
    if shape.gap > 0 {
        if !shape.has_holes {
            builder.counts.extend((builder.next..shape.gap).map(|cluster| (cluster, 1)));
        }
        builder.next = shape.gap;
    }
    for index in 0..shape.tables {
        if rng.u8(..4) == 0 {
            continue;
        }
        let is_shared = shape.has_snapshot && rng.u8(..3) < 2;
        let at = builder.table(rng, index, is_shared) * cluster;
        let flag = if is_shared { 0 } else { 1 << 63 };
        builder.put(l1 * cluster + index * 8, &(at | flag).to_be_bytes());
        if is_shared {
            builder.put(l1_snapshot * cluster + index * 8, &at.to_be_bytes());
        }
    }
    let mut blocks: BTreeMap<u64, u64> = BTreeMap::new();
    loop {
        let entries = geometry.block_entries();
        let Some(block) = builder.counts.keys().map(|c| c / entries).find(|b| !blocks.contains_key(b)) else {
            break;
        };
        let at = builder.alloc(1);
        blocks.insert(block, at);
    }
    for (block, at) in blocks {
        builder.put(table * cluster + block * 8, &(at * cluster).to_be_bytes());
        for (counted, count) in &builder.counts {
            if counted / geometry.block_entries() == block {
                let bytes = &mut builder.bytes[(at * cluster) as usize..][..cluster as usize];
                refcount::set(geometry, bytes, counted % geometry.block_entries(), *count).unwrap();
            }
        }
    }
    let first = header_bytes(shape, [table, l1, snapshot].map(|number| number * cluster));
    builder.put(header * cluster, &first);
    if shape.has_snapshot {
        let mut entry = Vec::new();
        entry.extend((l1_snapshot * cluster).to_be_bytes());
        entry.extend((shape.tables as u32).to_be_bytes());
        entry.extend([0, 1, 0, 1]);
        entry.extend([0; 20]);
        entry.extend(16u32.to_be_bytes());
        entry.extend(0u64.to_be_bytes());
        entry.extend(shape.size().to_be_bytes());
        entry.extend(*b"1s");
        builder.put(snapshot * cluster, &entry);
    }
    for _ in 0..shape.tail {
        // Data of a sector that was freed.
        let mut sector = [0; SECTOR];
        sector[..8].copy_from_slice(&stamp_of(rng.u64(..shape.size()), 0).to_be_bytes());
        builder.bytes.extend(sector);
    }
    builder.bytes
}

fn header_bytes(shape: Shape, [table, l1, snapshot]: [u64; 3]) -> Vec<u8> {
    let geometry = shape.geometry;
    let mut bytes = vec![0; 512];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0, b"QFI\xfb");
    put(4, &if geometry.version == Version::V2 { 2u32 } else { 3 }.to_be_bytes());
    put(20, &geometry.cluster_bits.to_be_bytes());
    put(24, &shape.size().to_be_bytes());
    put(36, &(shape.tables as u32).to_be_bytes());
    put(40, &l1.to_be_bytes());
    put(48, &table.to_be_bytes());
    put(56, &1u32.to_be_bytes());
    if shape.has_snapshot {
        put(60, &1u32.to_be_bytes());
        put(64, &snapshot.to_be_bytes());
    }
    let mut end = 72;
    if geometry.version == Version::V3 {
        put(72, &if geometry.extended { 1u64 << 4 } else { 0 }.to_be_bytes());
        put(96, &geometry.refcount_order.to_be_bytes());
        put(100, &104u32.to_be_bytes());
        end = 104;
    }
    if shape.has_backing {
        // The format of the backing image.
        put(end, &0xe279_2acau32.to_be_bytes());
        put(end + 4, &3u32.to_be_bytes());
        put(end + 8, b"raw");
        put(8, &400u64.to_be_bytes());
        put(16, &1u32.to_be_bytes());
        put(400, b"b");
    }
    bytes
}

/// Returns the contents of the backing image.
pub(crate) fn below(shape: Shape, offset: u64) -> Stamp {
    if shape.has_backing { stamp_of(offset, BELOW) } else { 0 }
}
