//! Makes, changes and checks images with QEMU's tools, for tests.

use super::recorded::Recorded;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// A directory with an image, `disk`.
pub(crate) struct QemuImage {
    dir: TempDir,
}

/// The result of `qemu-img check`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct QemuReport {
    pub(crate) leaks: u64,
    pub(crate) corruptions: u64,
    /// Errors that prevent the check, and images that cannot be opened.
    pub(crate) failures: u64,
}

impl QemuImage {
    /// Makes an image with the options of `qemu-img create -o`, if there are any.
    pub(crate) fn create(options: &str, size: &str) -> Self {
        let image = Self { dir: tempfile::tempdir().unwrap() };
        let options = if options.is_empty() { vec![] } else { vec!["-o", options] };
        image.img(&[&["create", "-q", "-f", "qcow2"], &options[..], &["disk", size]].concat());
        image
    }

    /// Makes an image with these bytes.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let image = Self { dir: tempfile::tempdir().unwrap() };
        std::fs::write(image.path(), bytes).unwrap();
        image
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("disk")
    }

    /// Reads the image into memory.
    pub(crate) fn load(&self) -> Recorded {
        Recorded::new(std::fs::read(self.path()).unwrap())
    }

    fn run(&self, program: &str, words: &[&str]) -> Output {
        Command::new(program).args(words).current_dir(self.dir()).output().unwrap()
    }

    /// Runs `qemu-img`. Returns its standard output.
    pub(crate) fn img(&self, words: &[&str]) -> String {
        let output = self.run("qemu-img", words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "qemu-img {words:?}: {said}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs commands of `qemu-io`, which must succeed.
    pub(crate) fn io(&self, commands: &[&str]) {
        let commands: Vec<_> = commands.iter().flat_map(|command| ["-c", command]).collect();
        let output = self.run("qemu-io", &[&["-f", "qcow2"], &commands[..], &["disk"]].concat());
        let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
        assert!(output.status.success(), "qemu-io {commands:?}: {said:?}");
    }

    /// Runs `qemu-img check`.
    pub(crate) fn check(&self) -> QemuReport {
        let output = self.run("qemu-img", &["check", "--output=json", "-f", "qcow2", "disk"]);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let number = |name: &str| {
            let rest = said.split_once(&format!("\"{name}\": ")).map_or("0", |(_, rest)| rest);
            rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse::<u64>().unwrap()
        };
        // 0 to 3: no faults, the check failed, corruptions, leaks.
        let failures = number("check-errors").max(u64::from(output.status.code() == Some(1)));
        QemuReport { leaks: number("leaks"), corruptions: number("corruptions"), failures }
    }

    /// Runs commands of `qemu-io`, and kills it then. All answered writes are flushed.
    pub(crate) fn io_killed(&self, commands: &[&str]) {
        let commands: Vec<_> =
            commands.iter().chain(&["flush", "sigraise 9"]).flat_map(|c| ["-c", c]).collect();
        let output = self.run("qemu-io", &[&["-f", "qcow2"], &commands[..], &["disk"]].concat());
        assert_eq!(output.status.signal(), Some(9), "qemu-io {commands:?}: {output:?}");
    }

    /// Returns the contents of the virtual disk.
    pub(crate) fn contents(&self) -> Vec<u8> {
        self.img(&["convert", "-f", "qcow2", "-O", "raw", "disk", "raw"]);
        std::fs::read(self.dir().join("raw")).unwrap()
    }
}

/// Options of `qemu-img create`: each width and each size of clusters, and all other features.
pub(crate) const OPTIONS: [&str; 26] = [
    "",
    "compat=0.10",
    "compat=0.10,cluster_size=512",
    "compat=0.10,cluster_size=2M",
    "cluster_size=512",
    "cluster_size=1k",
    "cluster_size=2k",
    "cluster_size=4k",
    "cluster_size=32k",
    "cluster_size=1M",
    "cluster_size=2M",
    "refcount_bits=1",
    "refcount_bits=2",
    "refcount_bits=4",
    "refcount_bits=8",
    "refcount_bits=32",
    "refcount_bits=64",
    "refcount_bits=1,cluster_size=512",
    "refcount_bits=64,cluster_size=512",
    "extended_l2=on",
    "extended_l2=on,cluster_size=16k",
    "extended_l2=on,cluster_size=2M",
    "lazy_refcounts=on",
    "compression_type=zstd",
    "preallocation=metadata",
    "preallocation=metadata,extended_l2=on",
];

/// The size of the images that [`fill`] fills.
pub(crate) const SIZE: &str = "8M";

/// Writes data, zeroes and discards. If the width of refcounts permits it, writes compressed clusters, which
/// share clusters of the file, and makes and removes snapshots.
pub(crate) fn fill(image: &QemuImage, options: &str) {
    image.io(&["write -P 1 0 300k", "write -P 2 1M 2M", "write -P 3 3073k 1k"]);
    let is_narrow = |width: &u32| options.contains(&format!("refcount_bits={width}"));
    // QEMU compresses only clusters that are not allocated yet.
    if ![1, 2, 4].iter().any(is_narrow) && !options.contains("preallocation") {
        image.io(&["write -c -P 4 4M 2M"]);
    }
    image.io(&["discard 1M 512k", "write -z 2M 64k", "write -z -u 2304k 64k"]);
    if !is_narrow(&1) {
        image.img(&["snapshot", "-c", "one", "disk"]);
        image.img(&["snapshot", "-c", "two", "disk"]);
        image.io(&["write -P 5 100k 1M", "write -P 6 4100k 64k", "discard 7M 64k"]);
        image.img(&["snapshot", "-d", "one", "disk"]);
    }
}
