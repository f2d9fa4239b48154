//! The mode pages: answers to MODE SENSE, and parameter lists of MODE SELECT (SPC-4, sections 6.11, 6.13 and
//! 7.5; SBC-3, section 6.4).

use crate::command::{BlockDescriptor, ModeSelect, ModeSense, PageControl, Pages};
use crate::cut::cut;
use crate::number::{at_most_u32, big_endian};
use crate::sense::Sense;
use crate::unit::Properties;
use kickless_spec::scsi::opcode::{MODE_CACHING, MODE_CONTROL};

const CACHING_LEN: usize = 20;
const CONTROL_LEN: usize = 12;
/// Length of the head of a page. The length in it counts the bytes behind it.
const PAGE_HEAD: usize = 2;
/// The byte of both pages with the bit that changes, and that bit: WCE of caching, D_SENSE of control.
const CHANGEABLE_AT: usize = 2;
const CHANGEABLE: u8 = 0x04;
/// GLTSD: no log pages are saved.
const GLTSD: u8 = 0x02;
/// QUEUE ALGORITHM MODIFIER: commands are executed in any order.
const UNRESTRICTED_ORDER: u8 = 0x10;
/// The device-specific parameter: WP, and DPOFUA.
const WP: u8 = 0x80;
const DPOFUA: u8 = 0x10;
/// The bit LONGLBA of the long header.
const LONGLBA: u8 = 0x01;
/// The bits PS, which MODE SELECT ignores, and SPF of the first byte of a page.
const PS: u8 = 0x80;
const SPF: u8 = 0x40;

/// The values that MODE SELECT changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// Writes may complete before they are durable (WCE).
    pub write_cache: bool,
    /// Sense data are in descriptor format (D_SENSE).
    pub sense_descriptors: bool,
}

impl Mode {
    fn caching(self) -> [u8; CACHING_LEN] {
        let mut page = [0; CACHING_LEN];
        page[..PAGE_HEAD].copy_from_slice(&[MODE_CACHING, (CACHING_LEN - PAGE_HEAD) as u8]);
        page[CHANGEABLE_AT] = if self.write_cache { CHANGEABLE } else { 0 };
        page
    }

    fn control(self) -> [u8; CONTROL_LEN] {
        let mut page = [0; CONTROL_LEN];
        page[..PAGE_HEAD].copy_from_slice(&[MODE_CONTROL, (CONTROL_LEN - PAGE_HEAD) as u8]);
        page[CHANGEABLE_AT] = GLTSD | if self.sense_descriptors { CHANGEABLE } else { 0 };
        page[3] = UNRESTRICTED_ORDER;
        page
    }

    /// Returns the answer to MODE SENSE. `default` has the values after a reset.
    pub fn sense(self, request: &ModeSense, default: Self, disk: &Properties) -> Vec<u8> {
        let values = match request.control {
            PageControl::Default => default,
            _ => self,
        };
        let mut bytes = header(request, disk);
        if matches!(request.pages, Pages::Caching | Pages::All) {
            push(&mut bytes, &values.caching(), request.control);
        }
        if matches!(request.pages, Pages::Control | Pages::All) {
            push(&mut bytes, &values.control(), request.control);
        }
        // The length does not count itself.
        if request.is_long {
            let len = bytes.len() as u16 - 2;
            bytes[..2].copy_from_slice(&len.to_be_bytes());
        } else {
            bytes[0] = bytes.len() as u8 - 1;
        }
        cut(bytes, request.allocation)
    }

    /// Returns the values that a parameter list of MODE SELECT asks for. `list` has all of its bytes.
    ///
    /// The caller changes the cache, and then adds
    /// [`Attention::ModeParametersChanged`](crate::Attention::ModeParametersChanged) for all other nexuses if
    /// the values differ.
    ///
    /// # Errors
    /// The list ends within a header, a descriptor or a page, changes a field that does not change, or has an
    /// unknown page.
    pub fn select(self, request: &ModeSelect, list: &[u8], disk: &Properties) -> Result<Self, Sense> {
        if list.is_empty() {
            return Ok(self);
        }
        let mut at = check_header(request, list, disk)?;
        let mut mode = self;
        while at < list.len() {
            at = mode.take_page(list, at)?;
        }
        Ok(mode)
    }

    /// Takes the values of the page at `at`. Returns the position behind it.
    fn take_page(&mut self, list: &[u8], at: usize) -> Result<usize, Sense> {
        let [first, len, ..] = list[at..] else { return Err(Sense::LIST_LENGTH) };
        let (caching, control) = (self.caching(), self.control());
        let expected: &[u8] = match first & !PS {
            MODE_CACHING => &caching,
            MODE_CONTROL => &control,
            code if code & SPF != 0 => return Err(invalid(at, 6)),
            _ => return Err(invalid(at, 5)),
        };
        if usize::from(len) != expected.len() - PAGE_HEAD {
            return Err(invalid(at + 1, 7));
        }
        let page = list.get(at..at + expected.len()).ok_or(Sense::LIST_LENGTH)?;
        for (nth, (is, was)) in page.iter().zip(expected).enumerate().skip(PAGE_HEAD) {
            let fixed = if nth == CHANGEABLE_AT { !CHANGEABLE } else { 0xff };
            let wrong = (is ^ was) & fixed;
            if wrong != 0 {
                return Err(invalid(at + nth, wrong.ilog2() as u8));
            }
        }
        let is_set = page[CHANGEABLE_AT] & CHANGEABLE != 0;
        match first & !PS {
            MODE_CACHING => self.write_cache = is_set,
            _ => self.sense_descriptors = is_set,
        }
        Ok(at + expected.len())
    }
}

/// Makes INVALID FIELD IN PARAMETER LIST.
fn invalid(byte: usize, bit: u8) -> Sense {
    // A list has at most 256 bytes.
    Sense::invalid_parameter(u16::try_from(byte).unwrap_or(u16::MAX), bit)
}

/// Adds a page, or the mask of its bits that change.
fn push(bytes: &mut Vec<u8>, page: &[u8], control: PageControl) {
    let at = bytes.len();
    bytes.extend(page);
    if control == PageControl::Changeable {
        bytes[at + PAGE_HEAD..].fill(0);
        bytes[at + CHANGEABLE_AT] = CHANGEABLE;
    }
}

/// Returns the header and the block descriptor. The length in the header is still 0.
fn header(request: &ModeSense, disk: &Properties) -> Vec<u8> {
    let specific = DPOFUA | if disk.read_only { WP } else { 0 };
    let descriptor = match request.descriptor {
        BlockDescriptor::None => Vec::new(),
        BlockDescriptor::Short => short_descriptor(disk).to_vec(),
        BlockDescriptor::Long => long_descriptor(disk).to_vec(),
    };
    let len = descriptor.len() as u8;
    let long_lba = if request.descriptor == BlockDescriptor::Long { LONGLBA } else { 0 };
    let mut bytes = match request.is_long {
        true => vec![0, 0, 0, specific, long_lba, 0, 0, len],
        false => vec![0, 0, specific, len],
    };
    bytes.extend(descriptor);
    bytes
}

/// Returns the block descriptor of 8 bytes (SBC-3, section 6.4).
fn short_descriptor(disk: &Properties) -> [u8; 8] {
    let [a, b, c, d] = at_most_u32(disk.blocks).to_be_bytes();
    let [_, x, y, z] = disk.block_size.to_be_bytes();
    [a, b, c, d, 0, x, y, z]
}

/// Returns the block descriptor of 16 bytes (SBC-3, section 6.4).
fn long_descriptor(disk: &Properties) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&disk.blocks.to_be_bytes());
    bytes[12..].copy_from_slice(&disk.block_size.to_be_bytes());
    bytes
}

/// Checks the header and the block descriptor of a parameter list. Returns the position of the first page.
///
/// The length, the medium type and the device-specific parameter are ignored: a driver returns those that it
/// got from MODE SENSE.
fn check_header(request: &ModeSelect, list: &[u8], disk: &Properties) -> Result<usize, Sense> {
    let (head, len_at) = if request.is_long { (8, 6) } else { (4, 3) };
    let header = list.get(..head).ok_or(Sense::LIST_LENGTH)?;
    let len = big_endian(&header[len_at..]) as usize;
    let expected: &[u8] = match request.is_long && header[4] & LONGLBA != 0 {
        true => &long_descriptor(disk),
        false => &short_descriptor(disk),
    };
    if len == 0 {
        return Ok(head);
    }
    if len != expected.len() {
        return Err(invalid(len_at, 7));
    }
    let descriptor = list.get(head..head + len).ok_or(Sense::LIST_LENGTH)?;
    check_descriptor(descriptor, expected, head)?;
    Ok(head + len)
}

/// Checks that a block descriptor changes nothing. No number of blocks, and the largest one, are the present
/// one (SBC-3, section 6.4).
fn check_descriptor(descriptor: &[u8], expected: &[u8], at: usize) -> Result<(), Sense> {
    // Reserved bytes follow the number of blocks.
    let (count_len, block_size_at) = if expected.len() == 8 { (4, 5) } else { (8, 12) };
    let count = &descriptor[..count_len];
    let is_present = count.iter().all(|byte| *byte == 0) || count.iter().all(|byte| *byte == 0xff);
    if !is_present && *count != expected[..count_len] {
        return Err(invalid(at, 7));
    }
    if descriptor[block_size_at..] != expected[block_size_at..] {
        return Err(invalid(at + block_size_at, 7));
    }
    Ok(())
}
