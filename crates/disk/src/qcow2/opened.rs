//! The files of a chain whose headers and tables were read, before the caches are made.

use super::budget::TableBytes;
use super::layer::{Image, RawLayer};
use super::pools::Pools;
use super::runtime::{Pins, Tables};
use crate::FileDisk;
use kickless_qcow2::{Header, HostOffset, Slices, TableParts, TablesOptions, entry::decode_l1};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};

/// The unit of table I/O, unless direct I/O needs a larger one, or clusters are smaller.
const UNIT_BYTES: u64 = 4096;
/// The largest number of bytes that the reserve prepares at a time.
const RESERVE_BYTES: u64 = 64 << 20;

/// One file of a chain.
pub(super) enum OpenedLayer {
    Raw(Box<RawLayer>),
    Qcow2(Box<OpenedImage>),
}

/// An image whose header and tables were read.
pub(super) struct OpenedImage {
    pub(super) file: Arc<FileDisk>,
    pub(super) header: Header,
    pub(super) writable: bool,
    /// The first cluster, if the image is written.
    pub(super) first: Vec<u8>,
    pub(super) l1: Vec<u8>,
    pub(super) refcount_table: Vec<u8>,
    /// The length of the file.
    pub(super) file_bytes: u64,
    /// The end of what is used in the file.
    pub(super) used_bytes: u64,
    /// The places and lengths of the tables of snapshots.
    pub(super) others: Vec<(HostOffset, u64)>,
}

impl OpenedLayer {
    /// Returns the bytes of its L2 tables.
    pub(super) fn tables(&self) -> Option<TableBytes> {
        let Self::Qcow2(image) = self else { return None };
        let geometry = image.header.geometry;
        let bytes = |tables: u64| tables.saturating_mul(geometry.cluster());
        let all = bytes(geometry.l1_entries_for(image.header.size));
        let entries = image.l1.as_chunks::<8>().0.iter();
        let has_table = |word: &&[u8; 8]| decode_l1(geometry, u64::from_be_bytes(**word)) != Ok(None);
        // An image that is written may get all tables.
        let used =
            if image.writable { all } else { bytes(entries.filter(has_table).count() as u64).min(all) };
        Some(TableBytes { used, all })
    }
}

impl OpenedImage {
    /// Makes the layer, with a cache of this size.
    pub(super) fn layer(self, cache_bytes: u64, due: &Arc<AtomicBool>) -> Arc<Image> {
        let Self { file, header, writable, first, l1, refcount_table, file_bytes, used_bytes, others } = self;
        let geometry = header.geometry;
        let unit = UNIT_BYTES.max(file.unit()).min(geometry.cluster());
        let slices = Arc::new(Slices::new(geometry, unit, cache_bytes));
        let pins = Arc::new(Pins::new());
        let options = TablesOptions {
            unit,
            writable,
            discard: writable && file.limits().zeroes_may_unmap,
            device_bytes: file.is_device().then_some(file_bytes),
            reserve_max: RESERVE_BYTES,
            retired_max: None,
        };
        let parts = TableParts { header: &header, first, l1, refcount_table, file_bytes: used_bytes, others };
        let tables = Tables::new(parts, slices.clone(), pins.clone(), options);
        Arc::new(Image {
            geometry,
            compression: header.compression,
            size: AtomicU64::new(header.size),
            slices,
            pins,
            tables: Mutex::new(tables),
            due: due.clone(),
            pools: Pools::new(geometry.cluster()),
            file,
        })
    }
}
