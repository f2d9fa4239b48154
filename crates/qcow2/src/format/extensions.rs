//! The header extensions.

use super::bad_image::BadImage;
use super::geometry::HostOffset;
use super::numbers::{be32, be64};

/// The types of extensions.
const END: u32 = 0;
const BACKING_FORMAT: u32 = 0xe279_2aca;
const FEATURE_NAMES: u32 = 0x6803_f857;
const BITMAPS: u32 = 0x2385_2875;
const ENCRYPTION: u32 = 0x0537_be77;

/// The bytes of an extension's type and length.
const HEAD: usize = 8;
/// Extensions begin at multiples of it.
const ALIGNMENT: usize = 8;
/// The longest name of a format in QEMU.
const FORMAT_MAX: usize = 15;
/// The bytes of an entry of the feature name table: a kind, a bit, a name.
const FEATURE_BYTES: usize = 48;
/// The kind of incompatible features.
const INCOMPATIBLE: u8 = 0;
/// The limits of QEMU: bitmaps, and bytes of the directory's entry of a bitmap on average.
const BITMAPS_MAX: u32 = 65535;
const BITMAP_ENTRY_MAX: u64 = 1024;

/// The directory of the persistent bitmaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bitmaps {
    /// The number of bitmaps.
    pub count: u32,
    /// The place of the directory.
    pub at: HostOffset,
    /// The size of the directory in bytes.
    pub bytes: u64,
}

/// The extensions with a meaning here. Others are allowed.
#[derive(Debug, Default)]
pub(super) struct Extensions {
    /// The format of the backing image.
    pub(super) backing_format: Option<String>,
    /// The persistent bitmaps, whether consistent or not.
    pub(super) bitmaps: Option<Bitmaps>,
    /// The header of encrypted data is there.
    pub(super) encryption: bool,
    /// The names of incompatible features, by bit.
    pub(super) names: Vec<(u8, String)>,
}

/// Parses the extensions in the range of the first cluster between the header and the backing image's name.
pub(super) fn parse(mut bytes: &[u8]) -> Result<Extensions, BadImage> {
    let mut found = Extensions::default();
    // As in QEMU, a rest that is too short for an extension is no error.
    while bytes.len() >= HEAD {
        let (kind, len) = (be32(bytes, 0), be32(bytes, 4) as usize);
        if kind == END {
            break;
        }
        let contents = bytes[HEAD..].get(..len).ok_or(BadImage::ExtensionLength(kind))?;
        match kind {
            BACKING_FORMAT => found.backing_format = Some(format(contents)?),
            FEATURE_NAMES => found.names = names(contents),
            BITMAPS => found.bitmaps = Some(bitmaps(contents)?),
            ENCRYPTION => found.encryption = true,
            _ => {}
        }
        bytes = bytes.get(HEAD + len.next_multiple_of(ALIGNMENT)..).unwrap_or_default();
    }
    Ok(found)
}

fn format(contents: &[u8]) -> Result<String, BadImage> {
    let name = std::str::from_utf8(contents).ok().filter(|_| contents.len() <= FORMAT_MAX);
    name.map(str::to_owned).ok_or(BadImage::Extension("for the format of its backing image"))
}

fn names(contents: &[u8]) -> Vec<(u8, String)> {
    let entries = contents.chunks_exact(FEATURE_BYTES).filter(|entry| entry[0] == INCOMPATIBLE);
    let name = |bytes: &[u8]| {
        // The name ends at a zero, and goes to the log.
        let bytes = bytes.iter().take_while(|byte| **byte != 0);
        bytes.map(|byte| if matches!(byte, b' '..=b'~') { char::from(*byte) } else { '?' }).collect()
    };
    entries.map(|entry| (entry[1], name(&entry[2..]))).collect()
}

fn bitmaps(contents: &[u8]) -> Result<Bitmaps, BadImage> {
    let (count, bytes) = (be32(contents, 0), be64(contents, 8));
    let is_possible = contents.len() == 24
        && (1..=BITMAPS_MAX).contains(&count)
        && be32(contents, 4) == 0
        && bytes <= u64::from(count) * BITMAP_ENTRY_MAX;
    match is_possible {
        true => Ok(Bitmaps { count, at: HostOffset(be64(contents, 16)), bytes }),
        false => Err(BadImage::Extension("for persistent bitmaps")),
    }
}
