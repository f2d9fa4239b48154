//! Images in QEMU's format, made and looked at by QEMU's own tool.

use kickless_disk::DiskSpec;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Runs `qemu-img`; what it prints.
pub fn qemu_img(dir: &Path, words: &[&str]) -> String {
    let output = Command::new("qemu-img").args(words).current_dir(dir).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "qemu-img {words:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// A directory with an image, `disk.qcow2`.
pub struct Image {
    pub dir: TempDir,
}

impl Image {
    /// An image with these contents, made with these options of `qemu-img convert`.
    pub fn of(contents: &[u8], options: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("raw"), contents).unwrap();
        let words = [&["convert", "-f", "raw", "-O", "qcow2"], options, &["raw", "disk.qcow2"]].concat();
        qemu_img(dir.path(), &words);
        Self { dir }
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("disk.qcow2")
    }

    pub fn spec(&self) -> DiskSpec {
        DiskSpec::Qcow2(self.path())
    }

    pub fn img(&self, words: &[&str]) -> String {
        qemu_img(self.dir.path(), words)
    }

    /// What is in it, as QEMU says, which also finds it without fault. Anybody may have it open.
    pub fn contents(&self) -> Vec<u8> {
        self.img(&["check", "-U", "-q", "disk.qcow2"]);
        self.img(&["convert", "-U", "-f", "qcow2", "-O", "raw", "disk.qcow2", "out"]);
        std::fs::read(self.dir.path().join("out")).unwrap()
    }
}
