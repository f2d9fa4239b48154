//! Makes and reads qcow2 images with `qemu-img`.

use kickless_disk::DiskSpec;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Runs `qemu-img` in `dir`. Returns its standard output.
pub fn qemu_img(dir: &Path, words: &[&str]) -> String {
    let output = Command::new("qemu-img").args(words).current_dir(dir).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "qemu-img {words:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Checks that an image has leaks at most.
pub fn check(path: &Path) {
    let output =
        Command::new("qemu-img").args(["check", "-U", "-q", "-f", "qcow2"]).arg(path).output().unwrap();
    // 3 means leaks, and nothing else.
    let is_whole = matches!(output.status.code(), Some(0 | 3));
    assert!(is_whole, "qemu-img check: {}", String::from_utf8_lossy(&output.stdout));
}

/// A directory with an image, `disk.qcow2`.
pub struct Image {
    pub dir: TempDir,
}

impl Image {
    /// Makes an image with these contents. `options` are for `qemu-img convert`.
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

    /// Runs `qemu-img` in the image's directory. Returns its standard output.
    pub fn img(&self, words: &[&str]) -> String {
        qemu_img(self.dir.path(), words)
    }

    /// Checks the image and returns its contents, both by `qemu-img`. The image may be open elsewhere, and
    /// have a reserve of clusters, which are leaks.
    pub fn contents(&self) -> Vec<u8> {
        check(&self.path());
        self.img(&["convert", "-U", "-f", "qcow2", "-O", "raw", "disk.qcow2", "out"]);
        std::fs::read(self.dir.path().join("out")).unwrap()
    }
}
