//! The properties of a logical unit.

use crate::sense::Sense;
use kickless_spec::hash::fnv1a;

/// The longest serial number. With the vendor and the product, it fits into a designator.
pub const SERIAL_LEN_MAX: usize = 128;

/// The names of a logical unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    vendor: [u8; 8],
    product: [u8; 16],
    revision: [u8; 4],
    serial: String,
}

/// The reason why names are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// A name has a character that SCSI does not have.
    #[error("the {0} has characters that are not printable ASCII")]
    Characters(&'static str),
    /// A name is too long.
    #[error("the {0} has more than {1} characters")]
    Long(&'static str, usize),
    /// There is no serial number.
    #[error("the serial number is empty")]
    NoSerial,
}

impl Identity {
    /// Makes the names. `vendor` has up to 8 characters, `product` 16, `revision` 4, and `serial`, which must
    /// not be empty, [`SERIAL_LEN_MAX`].
    ///
    /// # Errors
    /// A name is too long, or has characters that are not printable ASCII.
    pub fn new(vendor: &str, product: &str, revision: &str, serial: &str) -> Result<Self, IdentityError> {
        if serial.is_empty() {
            return Err(IdentityError::NoSerial);
        }
        check("serial number", serial, SERIAL_LEN_MAX)?;
        Ok(Self {
            vendor: padded("vendor", vendor)?,
            product: padded("product", product)?,
            revision: padded("revision", revision)?,
            serial: serial.to_owned(),
        })
    }

    /// Returns the vendor, filled up with spaces.
    pub fn vendor(&self) -> &[u8; 8] {
        &self.vendor
    }

    /// Returns the product, filled up with spaces.
    pub fn product(&self) -> &[u8; 16] {
        &self.product
    }

    /// Returns the revision, filled up with spaces.
    pub fn revision(&self) -> &[u8; 4] {
        &self.revision
    }

    /// Returns the serial number.
    pub fn serial(&self) -> &str {
        &self.serial
    }

    /// Returns the NAA identifier of the locally assigned form (SPC-4, section 7.8.6.6): 3, and 60 bits of a
    /// hash of the serial number. It is the same in each process and in each version.
    pub fn naa(&self) -> [u8; 8] {
        let hash = fnv1a(self.serial.as_bytes());
        (3 << 60 | (hash ^ hash >> 60) & ((1 << 60) - 1)).to_be_bytes()
    }
}

fn check(what: &'static str, text: &str, len_max: usize) -> Result<(), IdentityError> {
    if !text.bytes().all(|byte| (0x20..0x7f).contains(&byte)) {
        return Err(IdentityError::Characters(what));
    }
    if text.len() > len_max {
        return Err(IdentityError::Long(what, len_max));
    }
    Ok(())
}

fn padded<const N: usize>(what: &'static str, text: &str) -> Result<[u8; N], IdentityError> {
    check(what, text, N)?;
    let mut bytes = [b' '; N];
    bytes[..text.len()].copy_from_slice(text.as_bytes());
    Ok(bytes)
}

/// The properties of a logical unit on which the validity of commands depends, and the answers to them.
///
/// Numbers of blocks are of logical blocks. A limit holds for one command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Properties {
    /// The bytes of a logical block: a power of two from 512 to 4096.
    pub block_size: u32,
    /// The number of logical blocks.
    pub blocks: u64,
    /// The binary logarithm of the number of logical blocks in a physical block, at most 15.
    pub physical_block_exp: u8,
    /// The first logical block that begins a physical block.
    pub lowest_aligned: u16,
    /// Writes are refused.
    pub read_only: bool,
    /// The medium is a disk that does not rotate.
    pub is_solid_state: bool,
    /// The largest number of blocks of a transfer; not 0.
    pub transfer_blocks_max: u32,
    /// The best number of blocks of a transfer; 0 if unknown.
    pub transfer_blocks_best: u32,
    /// The smallest efficient number of blocks of a transfer; 0 if unknown.
    pub transfer_granularity: u16,
    /// The largest number of blocks that COMPARE AND WRITE compares; 0 if there is no such command.
    pub compare_blocks_max: u8,
    /// The largest number of blocks of WRITE SAME; 0 if there is no such command.
    pub write_same_blocks_max: u32,
    /// The limits of UNMAP; `None` if there is no such command.
    pub unmap: Option<UnmapLimits>,
    /// WRITE SAME may free blocks, with its bit UNMAP.
    pub write_same_unmaps: bool,
    /// Freed blocks read as zeroes.
    pub unmapped_reads_zeroes: bool,
    /// The disk may have less space than blocks.
    pub is_thin: bool,
}

/// The limits of UNMAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnmapLimits {
    /// The largest number of blocks of all ranges together, or [`UnmapLimits::NO_LIMIT`]; not 0.
    pub blocks_max: u32,
    /// The largest number of ranges; not 0.
    pub ranges_max: u32,
    /// The preferred number of blocks of a range, and of the alignment of its begin; 0 if unknown.
    pub granularity: u32,
    /// The first block that is aligned.
    pub alignment: u32,
}

impl UnmapLimits {
    /// The value of [`blocks_max`](Self::blocks_max) that is no limit (SBC-3, block limits VPD page).
    pub const NO_LIMIT: u32 = u32::MAX;
}

/// Consecutive blocks that are within the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// The first block.
    pub first: u64,
    /// The number of blocks.
    pub count: u64,
}

impl Blocks {
    /// Returns the offset of the first byte on the disk.
    pub fn offset(self, block_size: u32) -> u64 {
        self.first.saturating_mul(block_size.into())
    }

    /// Returns the length in bytes.
    pub fn len(self, block_size: u32) -> u64 {
        self.count.saturating_mul(block_size.into())
    }

    /// Returns whether there are no blocks.
    pub fn is_empty(self) -> bool {
        self.count == 0
    }
}

impl Properties {
    /// Makes those of an empty disk that only reads and writes, and has no limits.
    pub const fn plain(block_size: u32) -> Self {
        Self {
            block_size,
            blocks: 0,
            physical_block_exp: 0,
            lowest_aligned: 0,
            read_only: false,
            is_solid_state: false,
            transfer_blocks_max: u32::MAX,
            transfer_blocks_best: 0,
            transfer_granularity: 0,
            compare_blocks_max: 0,
            write_same_blocks_max: 0,
            unmap: None,
            write_same_unmaps: false,
            unmapped_reads_zeroes: false,
            is_thin: false,
        }
    }

    /// Returns these blocks if all are within the disk. No blocks just behind its end are within it.
    ///
    /// # Errors
    /// LOGICAL BLOCK ADDRESS OUT OF RANGE.
    pub fn range(&self, first: u64, count: u64) -> Result<Blocks, Sense> {
        match first.checked_add(count) {
            Some(end) if end <= self.blocks => Ok(Blocks { first, count }),
            _ => Err(Sense::OUT_OF_RANGE),
        }
    }

    /// Returns whether blocks of the disk can be freed (LBPME).
    pub fn can_unmap(&self) -> bool {
        self.unmap.is_some() || self.unmaps_by_write_same()
    }

    /// Returns whether WRITE SAME can free blocks.
    pub fn unmaps_by_write_same(&self) -> bool {
        self.write_same_unmaps && self.write_same_blocks_max != 0
    }
}

/// The thing that the address of a request leads to.
#[derive(Clone, Copy, Debug)]
pub enum Unit<'a> {
    /// A disk.
    Disk(&'a Properties),
    /// The REPORT LUNS well-known logical unit.
    ReportLuns,
    /// Nothing, of a target that has other logical units. REQUEST SENSE answers with
    /// [`Sense::NO_SUCH_UNIT`], and there are neither unit attentions nor reservations. For a target without
    /// any logical unit, the response is `S_BAD_TARGET`.
    Absent,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_padded_and_checked() {
        let identity = Identity::new("KICKLESS", "DISK", "1", "disk-1").unwrap();
        assert_eq!((identity.vendor(), identity.product()), (b"KICKLESS", b"DISK            "));
        assert_eq!((identity.revision(), identity.serial()), (b"1   ", "disk-1"));
        let refused = |vendor, product, revision, serial: &str| {
            Identity::new(vendor, product, revision, serial).unwrap_err()
        };
        assert_eq!(refused("KICKLESSS", "", "", "s"), IdentityError::Long("vendor", 8));
        assert_eq!(refused("", "12345678901234567", "", "s"), IdentityError::Long("product", 16));
        assert_eq!(refused("", "", "12345", "s"), IdentityError::Long("revision", 4));
        assert_eq!(refused("", "", "", ""), IdentityError::NoSerial);
        let long = "s".repeat(SERIAL_LEN_MAX + 1);
        assert_eq!(refused("", "", "", &long), IdentityError::Long("serial number", SERIAL_LEN_MAX));
        for text in ["a\nb", "ö", "\u{7f}"] {
            assert_eq!(refused("", "", "", text), IdentityError::Characters("serial number"));
        }
    }

    /// A change would give each disk of each guest a new name.
    #[test]
    fn identifiers_never_change() {
        let naa = |serial| u64::from_be_bytes(Identity::new("", "", "", serial).unwrap().naa());
        assert_eq!(naa("disk-1") >> 60, 3);
        assert_ne!(naa("disk-1"), naa("disk-2"));
        // The hash of "a" is af63dc4c8601ec8c.
        assert_eq!(naa("a"), 0x3f63_dc4c_8601_ec86);
    }
}
