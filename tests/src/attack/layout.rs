//! The files of an attack: those that devices have, others beside them, and some that change meanwhile.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::Result;
use rustix::fs::{CWD, FileType, Mode, mknodat};

/// The bytes of each disk.
const DISK_BYTES: u64 = 1 << 20;
/// The file that no device may read, and its text.
const SECRET: (&str, &str) = ("secret/file", "secret");
/// A file that the sandbox must not remove, and its text.
const PLAIN: (&str, &str) = ("sockets/plain", "plain");

/// The devices: the option of each beside its name and its socket.
const DEVICES: &[(&str, &str, &str)] = &[
    ("disk", "sockets/disk", "blk-file = 'DIR/disks/image'"),
    ("read-only", "sockets/read-only", "blk-file = 'DIR/disks/read-only'\nread-only = true"),
    ("becomes-link", "becomes-link/disk", "blk-file = 'DIR/disks/becomes-link'"),
    ("becomes-pipe", "sockets/pipe", "blk-file = 'DIR/disks/becomes-pipe'"),
    ("card", "sockets/card", "port = 'loop'\ncapture = 'DIR/captures/named'"),
    ("other-card", "sockets/other-card", "port = 'loop'\ncapture = 'DIR/captures/becomes-link'"),
];
/// A device that may read other files too: those beside its image, and those below roots for calls.
const CHAIN: (&str, &str, &str) = ("chain", "sockets/chain", "blk-file = 'qcow2:DIR/chain/top'");

/// Makes the files of an attack in an empty directory. Paths of the configuration begin with `seen_as`. With
/// `has_chain`, a device can name backing images.
///
/// # Errors
/// A file cannot be made.
pub fn make(directory: &Path, seen_as: &Path, has_chain: bool) -> Result<()> {
    for name in ["disks", "sockets", "captures", "secret", "run", "chain", "control", "config"] {
        fs::create_dir(directory.join(name))?;
    }
    for name in ["image", "read-only", "other", "becomes-link", "becomes-pipe"] {
        fs::File::create(directory.join("disks").join(name))?.set_len(DISK_BYTES)?;
    }
    for (name, text) in [SECRET, PLAIN] {
        fs::write(directory.join(name), text)?;
    }
    symlink("../secret/file", directory.join("disks/link"))?;
    symlink("run", directory.join("becomes-link"))?;
    fs::write(directory.join("chain/top"), empty_qcow2())?;
    let mut config = String::new();
    for (name, socket, options) in DEVICES.iter().chain(has_chain.then_some(&CHAIN)) {
        config += &format!("[[device]]\nname = '{name}'\nsocket-path = 'DIR/{socket}'\n{options}\n");
    }
    let config = config.replace("DIR", &seen_as.display().to_string());
    fs::write(directory.join("config/file"), config)?;
    // Other names of the file, below the directories that calls may use.
    for name in ["disks/config", "captures/config"] {
        fs::hard_link(directory.join("config/file"), directory.join(name))?;
    }
    Ok(())
}

/// Does what other users of the directories could do while devices are served: puts a link and a pipe in the
/// place of disks, and links in the place of a capture and of the directory of a socket.
///
/// # Errors
/// A file cannot be changed.
pub fn change(directory: &Path) -> Result<()> {
    let path = |name: &str| directory.join(name);
    for name in ["disks/becomes-link", "captures/becomes-link"] {
        fs::remove_file(path(name))?;
        symlink("../secret/file", path(name))?;
    }
    fs::remove_file(path("disks/becomes-pipe"))?;
    mknodat(CWD, path("disks/becomes-pipe"), FileType::Fifo, Mode::RUSR, 0)?;
    fs::remove_file(path("becomes-link"))?;
    Ok(symlink("secret", path("becomes-link"))?)
}

/// Returns whether the files that no device has are as before.
///
/// # Errors
/// A file cannot be read.
pub fn is_untouched(directory: &Path) -> Result<bool> {
    let has_text = |(name, text): (&str, &str)| Ok(fs::read_to_string(directory.join(name))? == text);
    let texts: Result<Vec<bool>> = [SECRET, PLAIN].into_iter().map(has_text).collect();
    let secrets = fs::read_dir(directory.join("secret"))?.count();
    let other = fs::metadata(directory.join("disks/other"))?.len();
    Ok(texts?.into_iter().all(|is_same| is_same) && secrets == 1 && other == DISK_BYTES)
}

/// Returns the tables of an empty qcow2 image: header, table of reference counts, block of reference counts
/// and first table of clusters, each with a cluster of its own.
fn empty_qcow2() -> Vec<u8> {
    const CLUSTER_BITS: u32 = 16;
    const CLUSTER: usize = 1 << CLUSTER_BITS;
    let mut image = vec![0; 4 * CLUSTER];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"QFI\xfb");
    put(4, &2_u32.to_be_bytes());
    put(20, &CLUSTER_BITS.to_be_bytes());
    put(24, &DISK_BYTES.to_be_bytes());
    // The first table has an entry, and is in the last cluster.
    put(36, &1_u32.to_be_bytes());
    put(40, &(3 * CLUSTER as u64).to_be_bytes());
    // The table of reference counts has a cluster.
    put(48, &(CLUSTER as u64).to_be_bytes());
    put(56, &1_u32.to_be_bytes());
    put(CLUSTER, &(2 * CLUSTER as u64).to_be_bytes());
    for cluster in 0..4 {
        put(2 * CLUSTER + 2 * cluster, &1_u16.to_be_bytes());
    }
    image
}
