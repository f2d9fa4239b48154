//! Recognises a raw image that is likely to have another format.
//!
//! The bytes come from the guest, which may write the beginning of any image to its disk. So a match changes
//! only the log. LUKS is not among the formats: an encrypted disk is a raw one.

use super::disk::FileDisk;
use crate::SECTOR;
use crate::buffer_pool::BUFFER_BYTES;
use kickless_io::AlignedBuf;
use rustix::io::{pread, retry_on_intr};
use std::fs::File;
use std::path::Path;

/// The formats by their magic bytes: (offset, bytes, name).
const FORMATS: [(usize, &[u8], &str); 12] = [
    (0, b"QFI\xfb\0\0\0\x01", "qcow"),
    (0, b"QFI\xfb", QCOW2),
    (0, b"QED\0", "QED"),
    (0, b"KDMV", "VMDK"),
    (0, b"COWD", "VMDK"),
    (0, b"# Disk DescriptorFile", "VMDK"),
    (0, b"vhdxfile", "VHDX"),
    (0, VHD_COOKIE, "VHD"),
    (0, b"WithoutFreeSpace", "Parallels"),
    (0, b"WithouFreSpacExt", "Parallels"),
    (0, b"Bochs Virtual HD Image", "Bochs"),
    (0x40, b"\x7f\x10\xda\xbe", "VDI"),
];
const QCOW2: &str = "qcow2";

/// A VHD of fixed size has these bytes only in its last sector.
const VHD_COOKIE: &[u8] = b"conectix";

/// Returns the likely format of an image with these first bytes and this last sector.
fn format(first: &[u8], last: &[u8]) -> Option<&'static str> {
    let has =
        |&&(at, bytes, _): &&(usize, &[u8], _)| first.get(at..).is_some_and(|rest| rest.starts_with(bytes));
    let fixed_vhd = || last.starts_with(VHD_COOKIE).then_some("VHD");
    FORMATS.iter().find(has).map(|(_, _, name)| *name).or_else(fixed_vhd)
}

impl FileDisk {
    /// Logs a warning if a file of `size` bytes, which is served as raw, is likely to have another format.
    pub(super) fn warn_of_format(path: &Path, file: &File, size: u64) {
        // The alignments of direct I/O divide the length of the buffer.
        let Ok(mut buffer) = AlignedBuf::new(BUFFER_BYTES, BUFFER_BYTES) else { return };
        let mut sector = |at: u64| {
            let start = at - at % BUFFER_BYTES as u64;
            let bytes = retry_on_intr(|| pread(file, &mut buffer[..], start)).unwrap_or(0);
            let from = (at - start) as usize;
            let sector = buffer[..bytes].get(from..bytes.min(from + SECTOR as usize));
            sector.unwrap_or_default().to_vec()
        };
        let (first, last) = (sector(0), sector(size - SECTOR));
        let Some(format) = format(&first, &last) else { return };
        let path = path.display();
        if format == QCOW2 {
            tracing::warn!(
                %path, format,
                "the image begins like a qcow2 image, but is served as a raw disk; if it is qcow2, give qcow2:PATH"
            );
        } else {
            tracing::warn!(
                %path, format,
                "the image looks like another format, but is served as a raw disk; `qemu-img convert -O raw` converts it"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_recognised() {
        let first = |at: usize, bytes: &[u8]| [&vec![0; at], bytes, &[0; 64]].concat();
        for (at, bytes, name) in FORMATS {
            assert_eq!(format(&first(at, bytes), &[0; 512]), Some(name));
            assert_eq!(format(&first(at + 1, bytes), &[0; 512]), None, "{name}");
            assert_eq!(format(&bytes[..bytes.len() - 1], &[]).filter(|_| name != "qcow"), None, "{name}");
        }
        assert_eq!(format(&first(0, b"QFI\xfb\0\0\0\x03"), &[]), Some("qcow2"));
        assert_eq!(format(&[0; 512], &first(0, VHD_COOKIE)), Some("VHD"));
        for raw in [&b"LUKS\xba\xbe\0\x02"[..], b"\xeb\x63\x90", b"", b"EFI PART"] {
            assert_eq!(format(&first(0, raw), &first(0, raw)), None);
        }
    }
}
