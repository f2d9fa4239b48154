//! The images of a chain, and the place of a guest's bytes in them.

use super::decoder::Decoder;
use super::pools::Pools;
use super::runtime::{Pins, TableOp, Tables};
use crate::{FileDisk, IoError, Step};
use kickless_io::{Errno, Waker};
use kickless_qcow2::{
    Compression, Geometry, GuestCluster, GuestOffset, HostOffset, Look, SliceIndex, Slices, Under,
};
use kickless_sync::lock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// An image with all its backing images, the topmost first. It is made when the disk becomes ours, and given
/// up when another program may change the files.
#[derive(Debug)]
pub(super) struct Chain {
    pub(super) layers: Vec<Layer>,
    /// A table of some image has an operation for any queue.
    pub(super) due: Arc<AtomicBool>,
    pub(super) decoder: Arc<Decoder>,
}

/// One file of a chain.
#[derive(Debug)]
pub(super) enum Layer {
    Raw(Box<RawLayer>),
    Qcow2(Arc<Image>),
}

/// A raw backing image.
#[derive(Debug)]
pub(super) struct RawLayer {
    pub(super) file: Arc<FileDisk>,
    /// The bytes that it has, rounded up to whole sectors.
    pub(super) size: u64,
}

/// One image file. All queues share it.
#[derive(Debug)]
pub(super) struct Image {
    pub(super) file: Arc<FileDisk>,
    pub(super) geometry: Geometry,
    pub(super) compression: Compression,
    /// The size of its virtual disk.
    pub(super) size: AtomicU64,
    pub(super) slices: Arc<Slices>,
    pub(super) pins: Arc<Pins>,
    /// Held for microseconds, never while something waits for I/O.
    pub(super) tables: Mutex<Tables>,
    /// The flag of the chain.
    pub(super) due: Arc<AtomicBool>,
    pub(super) pools: Pools,
}

/// The place of a guest's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Bytes of a layer's file.
    Data { layer: usize, host: HostOffset, len: u64 },
    /// Zeroes.
    Zero { len: u64 },
    /// Compressed data of one cluster of a layer.
    Compressed { layer: usize, at: HostOffset, bytes: u32, cluster: GuestCluster, len: u64 },
    /// A layer's slice is not cached.
    Miss { layer: usize, slice: SliceIndex },
    /// An entry of a layer cannot be true.
    Bad { layer: usize },
}

impl Layer {
    pub(super) fn file(&self) -> &Arc<FileDisk> {
        match self {
            Self::Raw(raw) => &raw.file,
            Self::Qcow2(image) => &image.file,
        }
    }

    pub(super) fn image(&self) -> Option<&Arc<Image>> {
        match self {
            Self::Raw(_) => None,
            Self::Qcow2(image) => Some(image),
        }
    }

    /// Returns the size of the layer's disk in bytes.
    pub(super) fn size(&self) -> u64 {
        match self {
            Self::Raw(raw) => raw.size,
            Self::Qcow2(image) => image.size.load(Ordering::Relaxed),
        }
    }
}

impl Image {
    /// Runs `f` on the tables.
    pub(super) fn with_tables<T>(&self, f: impl FnOnce(&mut Tables) -> T) -> T {
        let mut tables = lock(&self.tables);
        let result = f(&mut tables);
        if tables.has_due() {
            // Release. Partner: the swap of `submit_table_ops`. The lock orders the rest.
            self.due.store(true, Ordering::Release);
        }
        result
    }
}

impl Image {
    /// Returns the next operation of the tables, for the queue that asks.
    pub(super) fn next_op(&self) -> Option<TableOp> {
        let mut tables = lock(&self.tables);
        let op = tables.next_op();
        if op.is_none() && tables.has_due() {
            // Work is left. It goes on when other queues have had the lock.
            self.due.store(true, Ordering::Release);
        }
        op
    }
}

impl Chain {
    /// Returns the image that is written.
    pub(super) fn top(&self) -> Option<&Arc<Image>> {
        self.layers.first()?.image()
    }

    /// Returns the place of the bytes at `at`, at most `len`, as the layers from `first` on have them. The
    /// caller holds a pin if the first layer is the one that is written.
    pub(super) fn find(&self, first: usize, at: u64, mut len: u64) -> Place {
        for (layer, of) in self.layers.iter().enumerate().skip(first) {
            let size = of.size();
            if at >= size {
                // A backing image that is too short ends in zeroes. Its own backing image is not asked.
                return Place::Zero { len };
            }
            len = len.min(size - at);
            let image = match of {
                Layer::Raw(_) => return Place::Data { layer, host: HostOffset(at), len },
                Layer::Qcow2(image) => image,
            };
            match image.slices.look(GuestOffset(at), len) {
                Look::Data { host, len, .. } => return Place::Data { layer, host, len },
                Look::Zero { len } => return Place::Zero { len },
                Look::Below { len: here } => len = here,
                Look::Compressed { at, bytes, cluster, len } => {
                    return Place::Compressed { layer, at, bytes, cluster, len };
                }
                Look::Miss(slice) => return Place::Miss { layer, slice },
                Look::Bad => return Place::Bad { layer },
            }
        }
        Place::Zero { len }
    }

    /// Returns what the layers below the first have in the whole clusters at the beginning of `at..at + len`,
    /// and the number of bytes that this holds for. `Err`: something must be loaded first, or is bad.
    pub(super) fn under(&self, image: &Image, at: u64, len: u64) -> Result<(Under, u64), Place> {
        if self.layers.len() == 1 {
            return Ok((Under::Zero, len));
        }
        let cluster = image.geometry.cluster();
        let end = (at + len).next_multiple_of(cluster).min(self.layers[0].size().max(at + len));
        let mut seen = at - at % cluster;
        while seen < end {
            match self.find(1, seen, end - seen) {
                Place::Zero { len } => seen += len,
                Place::Data { .. } | Place::Compressed { .. } => {
                    let zero_end = seen - seen % cluster;
                    if zero_end > at {
                        return Ok((Under::Zero, zero_end - at));
                    }
                    return Ok((Under::Data, len.min(cluster - at % cluster)));
                }
                missing => return Err(missing),
            }
        }
        Ok((Under::Zero, len))
    }

    /// Handles a place that is not known yet. Returns the step of a request that waits for it.
    #[cold]
    pub(super) fn missing(&self, place: Place, waker: &Waker) -> Step {
        let failed = Step::Done(Err(IoError::Os(Errno::IO)));
        match place {
            Place::Miss { layer, slice } => match self.layers[layer].image() {
                Some(image) => match image.with_tables(|tables| tables.want(slice, waker)) {
                    Ok(()) => Step::Busy,
                    Err(errno) => Step::Done(Err(IoError::Os(errno))),
                },
                None => failed,
            },
            Place::Bad { layer } => {
                if let Some(image) = self.layers[layer].image() {
                    image.with_tables(Tables::found_bad);
                }
                failed
            }
            _ => failed,
        }
    }
}

/// Returns the error for the tables.
pub(super) fn errno_of(error: IoError) -> Errno {
    match error {
        IoError::Os(errno) => errno,
        _ => Errno::IO,
    }
}
