//! Properties of devices, from /sys.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::fs::{major, minor};

use crate::answers::BlockFacts;
use crate::client::{client, mismatch};
use crate::file::text;
use crate::reason::note_user;
use crate::wire::{Reply, Request};

/// Returns the properties of the block device with this number. Unknown ones are left out.
///
/// # Errors
/// The process that opens files refuses it.
pub fn block_facts(device: u64) -> io::Result<BlockFacts> {
    let Some(client) = client() else { return Ok(block_facts_here(device)) };
    match client.ask(&Request::BlockFacts { device })? {
        (Reply::Block { facts }, _) => Ok(facts),
        _ => Err(mismatch()),
    }
}

/// Returns the list of the online CPUs, in the kernel's syntax, such as `0-3,8`. It is always a call in this
/// process.
///
/// # Errors
/// The kernel does not tell.
pub fn cpus_online() -> io::Result<String> {
    text(Path::new("/sys/devices/system/cpu/online"))
}

/// Notes what later sentences say about this host: the name of the user of this process, and whether io_uring
/// is disabled. A sandbox takes the right to read them.
pub fn note_host() {
    note_user();
    io_uring_disabled();
}

/// The value of the sysctl `kernel.io_uring_disabled`.
static IO_URING_DISABLED: OnceLock<Option<u32>> = OnceLock::new();

/// Returns the value of the sysctl `kernel.io_uring_disabled`: 0 for no, 1 for all but a group, 2 for yes.
/// Kernels before 6.6 do not have it. The first call reads it.
pub fn io_uring_disabled() -> Option<u32> {
    *IO_URING_DISABLED
        .get_or_init(|| text(Path::new("/proc/sys/kernel/io_uring_disabled")).ok()?.trim().parse().ok())
}

/// Returns the name of the subsystem of the character device with this number, such as `dax`.
///
/// # Errors
/// The kernel does not tell.
pub fn char_subsystem(device: u64) -> io::Result<String> {
    let Some(client) = client() else { return char_subsystem_here(device) };
    match client.ask(&Request::CharSubsystem { device })? {
        (Reply::Text { text }, _) => Ok(text),
        _ => Err(mismatch()),
    }
}

/// Returns the properties of a block device, which this process reads.
pub(crate) fn block_facts_here(device: u64) -> BlockFacts {
    let here = PathBuf::from(format!("/sys/dev/block/{}:{}", major(device), minor(device)));
    let has = |path: PathBuf| path.try_exists().unwrap_or(false);
    // A partition uses the queue of its disk.
    let disk = if has(here.join("partition")) { here.join("..") } else { here.clone() };
    facts_of(|is_of_disk, name| text(&if is_of_disk { disk.join(name) } else { here.join(name) }).ok())
}

/// Returns the properties of a block device from the texts of its files, or of those of its disk.
fn facts_of(read: impl Fn(bool, &Path) -> Option<String>) -> BlockFacts {
    let number = |is_of_disk, name: PathBuf| read(is_of_disk, &name)?.trim().parse().ok();
    let mut facts = BlockFacts {
        is_protected: number(false, "ro".into()) == Some(1_u64),
        is_in_ram: read(true, "uevent".as_ref()).is_some_and(|uevent| names_ram(&uevent)),
        ..BlockFacts::default()
    };
    facts.set_numbers(|name, is_own| match is_own {
        true => number(false, name.into()),
        false => number(true, Path::new("queue").join(name)),
    });
    facts
}

/// Returns whether this is the `uevent` of zram or brd. The absence of tags and of lower devices would not
/// suffice: DRBD has neither, and waits.
fn names_ram(uevent: &str) -> bool {
    let name = uevent.lines().find_map(|line| line.strip_prefix("DEVNAME="));
    let number = name.and_then(|name| name.strip_prefix("zram").or_else(|| name.strip_prefix("ram")));
    number.is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Returns the name of the subsystem of a character device, which this process reads.
///
/// # Errors
/// The kernel does not tell.
pub(crate) fn char_subsystem_here(device: u64) -> io::Result<String> {
    let link = format!("/sys/dev/char/{}:{}/subsystem", major(device), minor(device));
    let target = Path::new(&link).read_link()?;
    let name = target.file_name().and_then(|name| name.to_str());
    name.map(str::to_owned).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_partition_has_its_own_offset_and_the_queue_of_its_disk() {
        let facts = facts_of(|is_of_disk, name| {
            let text = match (is_of_disk, name.to_str()?) {
                (false, "ro") => "1\n",
                (false, "alignment_offset") => "3584\n",
                (true, "queue/discard_max_bytes") => "168\n",
                (true, "queue/logical_block_size") => "many\n",
                (true, "uevent") => "MAJOR=252\nDEVNAME=zram0\n",
                _ => return None,
            };
            Some(text.to_owned())
        });
        assert!(facts.is_protected && facts.is_in_ram);
        let numbers = ["alignment_offset", "discard_max_bytes", "logical_block_size", "other"];
        assert_eq!(numbers.map(|name| facts.number(name)), [Some(3584), Some(168), None, None]);
    }

    #[test]
    fn only_zram_and_brd_are_ram() {
        let names_ram = |name: &str| names_ram(&format!("MAJOR=1\nDEVNAME={name}\nDEVTYPE=disk\n"));
        assert!(["zram0", "ram15"].into_iter().all(names_ram));
        assert!(!["drbd0", "vda", "dm-3", "nvme0n1", "ramdisk"].into_iter().any(names_ram));
        assert!(!super::names_ram(""));
    }

    #[test]
    fn devices_of_this_host() {
        let null = fs::metadata("/dev/null").unwrap().rdev();
        if let Ok(subsystem) = char_subsystem(null) {
            assert_eq!(subsystem, "mem");
        }
        // No block device has this number.
        assert_eq!(block_facts(0).unwrap().number("discard_max_bytes"), None);
        let Ok(devices) = fs::read_dir("/sys/dev/block") else { return };
        for device in devices.flatten() {
            let name = device.file_name().into_string().unwrap();
            let (major, minor) = name.split_once(':').unwrap();
            let facts =
                block_facts(rustix::fs::makedev(major.parse().unwrap(), minor.parse().unwrap())).unwrap();
            assert!(facts.number("logical_block_size").is_some_and(|size| size >= 512), "{name}: {facts:?}");
        }
    }
}
