//! The processes that have locked images, as they were at the start of this one.
//!
//! QEMU and this program lock single bytes of an image with locks of open file descriptions. The kernel does
//! not say which process has such a lock (`l_pid` and /proc/locks have -1), except in the `fdinfo` of a
//! descriptor that has it. A sandbox takes the right to look there, so the program looks before.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use rustix::fs::{fstat, major, minor};

use crate::file::status_of;
use crate::name::name_here;

/// The bytes of an image that QEMU locks: a hundred for permissions in use, and a hundred for those denied to
/// others (QEMU `block/file-posix.c`).
const LOCK_BYTES: std::ops::Range<u64> = 100..300;

/// The locked images, and their processes.
static NOTED: Mutex<Vec<(Image, Holder)>> = Mutex::new(Vec::new());

/// The major and the minor number of a device, and an inode.
type Image = (u32, u32, u64);

/// A process that has locked an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    pid: u32,
    name: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} ({})", self.pid, self.name)
    }
}

fn image(device: u64, inode: u64) -> Image {
    (major(device), minor(device), inode)
}

/// Notes which processes have locked the images with these paths. Opens none of the images.
pub fn note_holders<'p>(images: impl IntoIterator<Item = &'p Path>) {
    let all = locked(&fs::read_to_string("/proc/locks").unwrap_or_default());
    let found = images.into_iter().filter_map(|path| name_here(path).and_then(status_of).ok());
    let wanted: BTreeSet<Image> =
        found.map(|file| image(file.device, file.inode)).filter(|image| all.contains(image)).collect();
    if !wanted.is_empty() {
        *NOTED.lock().unwrap_or_else(PoisonError::into_inner) = holders(&wanted);
    }
}

/// Forgets the processes, because they may have ended by now.
pub fn forget_holders() {
    NOTED.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

/// Returns the process that had locked this image when the processes were noted.
pub fn holder(of: impl AsFd) -> Option<Holder> {
    let file = fstat(of).ok()?;
    let of = image(file.st_dev, file.st_ino);
    let noted = NOTED.lock().unwrap_or_else(PoisonError::into_inner);
    noted.iter().find(|(image, _)| *image == of).map(|(_, holder)| holder.clone())
}

/// Returns the images of the locks in a text of /proc, whose lines are such as
/// `1: OFDLCK ADVISORY READ -1 08:01:1234 100 100`.
fn locked(locks: &str) -> BTreeSet<Image> {
    let parse = |line: &str| {
        let of = line.split_once(": ")?.1;
        let mut fields =
            of.split_whitespace().skip_while(|field| !field.contains("LCK") && *field != "POSIX");
        let (place, first) = (fields.nth(4)?, fields.next()?);
        let mut numbers = place.split(':');
        let device = [numbers.next()?, numbers.next()?].map(|hex| u32::from_str_radix(hex, 16).ok());
        let inode = numbers.next()?.parse().ok()?;
        let is_ours = LOCK_BYTES.contains(&first.parse().ok()?);
        Some((device[0]?, device[1]?, inode)).filter(|_| is_ours)
    };
    locks.lines().filter_map(parse).collect()
}

/// Finds the processes with locks on these images. This process may not look at all of them.
fn holders(wanted: &BTreeSet<Image>) -> Vec<(Image, Holder)> {
    let mut found = Vec::new();
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let path = process.path();
        let mut has = BTreeSet::new();
        for descriptor in fs::read_dir(path.join("fdinfo")).into_iter().flatten().flatten() {
            has.append(&mut locked(&fs::read_to_string(descriptor.path()).unwrap_or_default()));
        }
        let name = fs::read_to_string(path.join("comm")).unwrap_or_default();
        let holder = Holder { pid, name: name.trim_end().to_owned() };
        found.extend(has.intersection(wanted).map(|image| (*image, holder.clone())));
    }
    found
}

#[cfg(test)]
mod tests {
    use nix::fcntl::{FcntlArg, fcntl};
    use nix::libc;
    use tempfile::NamedTempFile;

    use super::*;

    #[test]
    fn locks_of_the_kernel() {
        let text = "1: OFDLCK ADVISORY  READ  -1 08:01:1234 100 100\n\
                    2: POSIX  ADVISORY  WRITE 77 00:2b:5 201 201\n\
                    3: FLOCK  ADVISORY  WRITE 77 00:2b:6 0 EOF\n\
                    3: OFDLCK ADVISORY  READ  -1 00:2b:7 0 EOF\n\
                    4: -> OFDLCK ADVISORY READ -1 00:2b:8 101 101\n";
        let all: Vec<_> = locked(text).into_iter().collect();
        assert_eq!(all, [(0, 0x2b, 5), (0, 0x2b, 8), (8, 1, 1234)]);
        assert_eq!(
            locked("pos:\t0\nflags:\t02\nlock:\t1: OFDLCK ADVISORY  READ  -1 08:01:9 203 203\n").len(),
            1
        );
    }

    #[test]
    fn the_process_with_the_lock_is_found() {
        let image = NamedTempFile::new().unwrap();
        note_holders([image.path()]);
        assert_eq!(holder(image.as_file()), None);
        let lock = libc::flock {
            l_type: libc::F_RDLCK as i16,
            l_whence: libc::SEEK_SET as i16,
            l_start: 101,
            l_len: 1,
            l_pid: 0,
        };
        fcntl(image.as_file(), FcntlArg::F_OFD_SETLK(&lock)).unwrap();
        note_holders([image.path()]);
        // Some file systems have another number in a file's status than in its locks.
        if let Some(Holder { pid, .. }) = holder(image.as_file()) {
            assert_eq!(pid, std::process::id());
        }
        forget_holders();
        assert_eq!(holder(image.as_file()), None);
    }
}
