//! The limits of the device, and the checks that requests keep to them.

use std::ops::RangeInclusive;

use kickless_spec::blk::{BlkFeatures, Config, ID_LEN, SECTOR_SIZE};
use kickless_spec::features::Features;

use crate::buffer::{Buffer, Data};
use crate::error::{Error, Invalid};
use crate::request::{Kind, Request};

/// The largest number of pieces of data in a request. The indirect table of each id has room for them.
pub(crate) const PIECES_MAX: usize = 30;
/// The valid sizes of a logical block: from a sector to the largest that QEMU allows.
const BLOCK_SIZES: RangeInclusive<u32> = SECTOR_SIZE as u32..=2 << 20;

/// The limits of requests, from the features and the configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// The size of the disk in bytes.
    pub(crate) size: u64,
    pub(crate) features: BlkFeatures,
    /// The largest number of bytes in a descriptor.
    pub(crate) piece_len_max: u32,
    /// The largest number of data descriptors in a request.
    pub(crate) pieces_max: usize,
    /// The largest number of bytes in a discard, and in a write-zeroes request.
    discard_max: u64,
    write_zeroes_max: u64,
    /// The best alignment in bytes for the parts of a discard.
    discard_alignment: u64,
    /// The bytes of a logical block.
    pub(crate) block_size: u32,
}

impl Limits {
    /// Computes the limits.
    ///
    /// # Errors
    /// A field has an invalid value.
    pub(crate) fn new(features: Features, config: &Config) -> Result<Self, Error> {
        let features = BlkFeatures::from_bits_truncate(features.bits());
        let has = |feature| features.contains(feature);
        let wrong = |field, value| Err(Error::ConfigField { field, value });
        let sectors = config.capacity.get();
        let Some(size) = sectors.checked_mul(SECTOR_SIZE) else { return wrong("capacity", sectors) };
        let block_size = if has(BlkFeatures::BLK_SIZE) { config.blk_size.get() } else { SECTOR_SIZE as u32 };
        if !block_size.is_power_of_two() || !BLOCK_SIZES.contains(&block_size) {
            return wrong("blk_size", block_size.into());
        }
        // Devices without a limit report zero here, and drivers have long accepted that.
        let piece_len_max = match config.size_max.get() {
            size if has(BlkFeatures::SIZE_MAX) && size != 0 => size,
            _ => !511,
        };
        if u64::from(piece_len_max) < SECTOR_SIZE {
            return wrong("size_max", piece_len_max.into());
        }
        let pieces_max = match config.seg_max.get() as usize {
            count if has(BlkFeatures::SEG_MAX) => count.max(1),
            _ => PIECES_MAX,
        };
        let bytes = |sectors: u32| u64::from(sectors) * SECTOR_SIZE;
        // Zero means no limit here too.
        let range_max = |sectors: u32| bytes(if sectors == 0 { u32::MAX } else { sectors });
        Ok(Self {
            size,
            features,
            piece_len_max,
            pieces_max: pieces_max.min(PIECES_MAX),
            discard_max: range_max(config.max_discard_sectors.get()),
            write_zeroes_max: range_max(config.max_write_zeroes_sectors.get()),
            discard_alignment: bytes(config.discard_sector_alignment.get()),
            block_size,
        })
    }

    /// Adapts the limits to queues of this size: no chain is longer than its queue.
    ///
    /// # Errors
    /// Not even the shortest request fits.
    pub(crate) fn for_queue(self, size: u16) -> Result<Self, Error> {
        match usize::from(size).checked_sub(2) {
            None | Some(0) => Err(Error::QueueSize { size }),
            Some(room) => Ok(Self { pieces_max: self.pieces_max.min(room), ..self }),
        }
    }

    /// Returns the largest length of a read or write with one piece of memory.
    pub(crate) fn len_max(&self) -> u64 {
        u64::from(self.piece_len_max).saturating_mul(self.pieces_max as u64).min(u32::MAX.into()) & !511
    }

    /// Returns the largest length of a discard or write-zeroes request.
    pub(crate) fn range_max(&self, kind: Kind) -> u64 {
        if kind == Kind::Discard { self.discard_max } else { self.write_zeroes_max }
    }

    /// Returns the length of the requests that a transfer is split into. They are whole blocks if a request
    /// can hold one.
    pub(crate) fn chunk_max(&self, most: u64) -> u64 {
        let max = self.len_max().min(most);
        let whole = max - max % u64::from(self.block_size);
        if whole > 0 { whole } else { max }
    }

    /// Returns the length of the next request to discard or zero the range from `at` to `end`.
    ///
    /// It ends at the end of a block, because devices may refuse parts of blocks or ignore them.
    pub(crate) fn next_range(&self, kind: Kind, at: u64, end: u64) -> u64 {
        let max = self.range_max(kind);
        if end - at <= max {
            return end - at;
        }
        let block = u64::from(self.block_size);
        let align = if kind == Kind::Discard { self.discard_alignment.max(block) } else { block };
        let over = (at + max) % align;
        if over < max { max - over } else { max }
    }

    /// Checks that the device would accept all of a range, in as many requests as it takes.
    ///
    /// # Errors
    /// The device would refuse at least one request.
    pub(crate) fn check_whole(&self, kind: Kind, offset: u64, len: u64) -> Result<(), Invalid> {
        self.check_kind(kind)?;
        self.check_range(offset, len)
    }

    /// Checks that the device offers this kind of request.
    fn check_kind(&self, kind: Kind) -> Result<(), Invalid> {
        let (feature, what) = match kind {
            Kind::Read | Kind::Write | Kind::GetId => (BlkFeatures::empty(), ""),
            Kind::Flush => (BlkFeatures::FLUSH, "FLUSH"),
            Kind::Discard => (BlkFeatures::DISCARD, "DISCARD"),
            Kind::WriteZeroes => (BlkFeatures::WRITE_ZEROES, "WRITE_ZEROES"),
        };
        if !self.features.contains(feature) {
            return Err(Invalid::NotOffered { what });
        }
        let changes = matches!(kind, Kind::Write | Kind::Discard | Kind::WriteZeroes);
        if changes && self.features.contains(BlkFeatures::RO) { Err(Invalid::ReadOnly) } else { Ok(()) }
    }

    /// Returns the piece of a read or write that has one piece of memory and needs one data descriptor, the
    /// usual kind.
    #[inline]
    pub(crate) fn plain_piece<'a>(&self, request: &'a Request) -> Option<&'a Buffer> {
        match (request.kind, &request.data) {
            (Kind::Read | Kind::Write, Data::One(buffer)) if buffer.len() <= self.piece_len_max as usize => {
                Some(buffer)
            }
            _ => None,
        }
    }

    /// Returns the piece of a request of the usual kind that the device would accept. [`Limits::check`] would
    /// then return 1.
    #[inline]
    pub(crate) fn accepted_plain_piece<'a>(&self, request: &'a Request) -> Option<&'a Buffer> {
        let buffer = self.plain_piece(request)?;
        let (offset, len) = (request.offset, buffer.len() as u64);
        let accepts = (request.kind == Kind::Read || !self.features.contains(BlkFeatures::RO))
            && len != 0
            && (offset | len) & (SECTOR_SIZE - 1) == 0
            && len <= self.size
            && offset <= self.size - len;
        accepts.then_some(buffer)
    }

    /// Checks that the device would accept the request. Returns the number of data descriptors that it needs.
    pub(crate) fn check(&self, request: &Request) -> Result<usize, Invalid> {
        match request.kind {
            Kind::Read | Kind::Write => {
                if request.kind == Kind::Write && self.features.contains(BlkFeatures::RO) {
                    return Err(Invalid::ReadOnly);
                }
                self.check_range(request.offset, request.data.len())?;
                self.check_pieces(request)
            }
            _ => self.check_other(request),
        }
    }

    #[inline]
    fn check_range(&self, offset: u64, len: u64) -> Result<(), Invalid> {
        if (offset | len) & (SECTOR_SIZE - 1) != 0 {
            return Err(Invalid::Unaligned { offset, len });
        }
        if len == 0 {
            return Err(Invalid::Empty);
        }
        match offset.checked_add(len) {
            Some(end) if end <= self.size => Ok(()),
            _ => Err(Invalid::OutOfRange { offset, len, size: self.size }),
        }
    }

    #[inline]
    fn check_pieces(&self, request: &Request) -> Result<usize, Invalid> {
        let mut pieces = 0;
        for buffer in request.data.pieces() {
            let len = buffer.len();
            pieces += if len <= self.piece_len_max as usize {
                1
            } else {
                len.div_ceil(self.piece_len_max as usize)
            };
            if len == 0 {
                return Err(Invalid::Empty);
            }
        }
        if pieces > self.pieces_max {
            return Err(Invalid::TooManyPieces { pieces, max: self.pieces_max });
        }
        Ok(pieces)
    }

    fn check_other(&self, request: &Request) -> Result<usize, Invalid> {
        self.check_kind(request.kind)?;
        let exactly = |len: usize| {
            self.check_pieces(request)?;
            if request.data.len() == len as u64 {
                return Ok(request.data.pieces().len());
            }
            Err(Invalid::TooLong { len: request.data.len(), max: len as u64 })
        };
        match request.kind {
            Kind::Flush => Ok(0),
            Kind::GetId => exactly(ID_LEN),
            Kind::Discard | Kind::WriteZeroes => {
                self.check_range(request.offset, request.range.len)?;
                let max = self.range_max(request.kind);
                if request.range.len > max {
                    return Err(Invalid::TooLong { len: request.range.len, max });
                }
                // The range counts as data. The driver stores it beside the header.
                Ok(1)
            }
            Kind::Read | Kind::Write => Ok(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> Config {
        Config {
            capacity: 8.into(),
            size_max: 1024.into(),
            seg_max: 2.into(),
            max_discard_sectors: 4.into(),
            ..Config::default()
        }
    }

    fn limits(features: BlkFeatures, config: &Config) -> Result<Limits, Error> {
        Limits::new(Features::from_bits_retain(features.bits()), config)
    }

    #[test]
    fn ranges() {
        let disk = limits(BlkFeatures::DISCARD, &config()).unwrap();
        assert_eq!(disk.size, 4096);
        assert_eq!(disk.check(&Request::discard(0, 2048)), Ok(1));
        let check = |offset, len| disk.check(&Request::discard(offset, len)).unwrap_err();
        assert_eq!(check(0, 4096), Invalid::TooLong { len: 4096, max: 2048 });
        assert_eq!(check(1, 512), Invalid::Unaligned { offset: 1, len: 512 });
        assert_eq!(check(0, 0), Invalid::Empty);
        for (offset, len) in [(3584, 1024), (4096, 512), (!511, 512), (!511, !511)] {
            assert_eq!(check(offset, len), Invalid::OutOfRange { offset, len, size: 4096 });
        }
        assert_eq!(
            disk.check(&Request::write_zeroes(0, 512, true)),
            Err(Invalid::NotOffered { what: "WRITE_ZEROES" })
        );
        assert_eq!(disk.check(&Request::flush()), Err(Invalid::NotOffered { what: "FLUSH" }));
        let read_only = limits(BlkFeatures::DISCARD | BlkFeatures::RO, &config()).unwrap();
        assert_eq!(read_only.check(&Request::discard(0, 512)), Err(Invalid::ReadOnly));
    }

    #[test]
    fn parts_of_a_range_are_whole_blocks() {
        let config = Config {
            capacity: 1024.into(),
            blk_size: 4096.into(),
            size_max: 4608.into(),
            seg_max: 3.into(),
            max_discard_sectors: 50.into(),
            discard_sector_alignment: 16.into(),
            ..config()
        };
        let features = BlkFeatures::BLK_SIZE | BlkFeatures::SEG_MAX | BlkFeatures::SIZE_MAX;
        let disk = limits(features, &config).unwrap();
        let split = |kind, mut at, end| {
            let mut ends = Vec::new();
            while at < end {
                at += disk.next_range(kind, at, end);
                ends.push(at / 512);
            }
            ends
        };
        assert_eq!(split(Kind::Discard, 4096, 120 * 512), [48, 96, 120]);
        assert_eq!(split(Kind::Discard, 0, 50 * 512), [50]);
        // Without a limit in the configuration space, one request takes all.
        assert_eq!(split(Kind::WriteZeroes, 512, 1024 * 512), [1024]);
        assert_eq!((disk.len_max(), disk.chunk_max(1 << 20), disk.chunk_max(512)), (13824, 12288, 512));
    }

    #[test]
    fn invalid_fields_are_refused() {
        let wrong = |features, config: Config| match limits(features, &config) {
            Err(Error::ConfigField { field, .. }) => field,
            other => panic!("{other:?}"),
        };
        let huge = Config { capacity: u64::MAX.into(), ..config() };
        assert_eq!(wrong(BlkFeatures::empty(), huge), "capacity");
        for size in [0u32, 100, 256, 513, 4 << 20, 1 << 31] {
            let odd = Config { blk_size: size.into(), ..config() };
            assert_eq!(wrong(BlkFeatures::BLK_SIZE, odd), "blk_size");
        }
        let small = Config { size_max: 511.into(), ..config() };
        assert_eq!(wrong(BlkFeatures::SIZE_MAX, small), "size_max");
        let none = Config { size_max: 0.into(), seg_max: 0.into(), ..config() };
        let none = limits(BlkFeatures::SIZE_MAX | BlkFeatures::SEG_MAX, &none).unwrap();
        assert_eq!((none.piece_len_max, none.pieces_max), (!511, 1));
        let both = BlkFeatures::SEG_MAX | BlkFeatures::SIZE_MAX;
        assert_eq!(limits(both, &config()).unwrap().len_max(), 2048);
    }
}
