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

    /// Checks the image and returns its contents, both by `qemu-img`. The image may be open elsewhere.
    pub fn contents(&self) -> Vec<u8> {
        self.img(&["check", "-U", "-q", "disk.qcow2"]);
        self.img(&["convert", "-U", "-f", "qcow2", "-O", "raw", "disk.qcow2", "out"]);
        std::fs::read(self.dir.path().join("out")).unwrap()
    }
}
