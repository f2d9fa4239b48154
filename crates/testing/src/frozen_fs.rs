//! Provides a file system that can be frozen.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

/// Bytes of the file system.
const SIZE: u64 = 256 << 20;

/// An ext4 file system in an image. Dropping it unmounts the file system.
pub struct FileSystem {
    _dir: TempDir,
    mounted: PathBuf,
}

/// A frozen file system. It thaws when this is dropped or the process ends.
pub struct Frozen(Child);

impl FileSystem {
    /// Mounts a new file system.
    ///
    /// # Errors
    /// Returns the reason why it cannot be mounted: no right to mount, no loop device, no such program.
    pub fn mount() -> Result<Self, String> {
        let dir = TempDir::with_prefix("kickless-fs-").map_err(|error| error.to_string())?;
        let (image, mounted) = (dir.path().join("image"), dir.path().join("mounted"));
        File::create(&image).and_then(|file| file.set_len(SIZE)).map_err(|error| error.to_string())?;
        std::fs::create_dir(&mounted).map_err(|error| error.to_string())?;
        run(Command::new("mkfs.ext4").arg("-q").arg(&image))?;
        run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&mounted))?;
        Ok(Self { _dir: dir, mounted })
    }

    /// Returns the directory where it is mounted.
    pub fn path(&self) -> &Path {
        &self.mounted
    }

    /// Freezes the file system: operations that would change it wait.
    ///
    /// A child process freezes it, and thaws it when its pipe to this process closes. A killed process and
    /// its pipe live on while one of its threads waits for the file system. So the child also thaws the file
    /// system when the calling thread ends.
    ///
    /// # Errors
    /// Returns the reason why it cannot be frozen.
    pub fn freeze(&self) -> Result<Frozen, String> {
        let script = "trap '' TERM INT HUP; trap 'exec fsfreeze --unfreeze \"$0\"' USR1
            fsfreeze --freeze \"$0\" || exit; echo; read line; exec fsfreeze --unfreeze \"$0\"";
        let mut beside = Command::new("setpriv");
        beside.args(["--pdeathsig", "USR1", "sh", "-c", script]).arg(&self.mounted);
        let beside = beside.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut frozen = Frozen(beside.map_err(|error| format!("setpriv: {error}"))?);
        let said = frozen.0.stdout.as_mut().map(|said| said.read(&mut [0]));
        if matches!(said, Some(Ok(1))) { Ok(frozen) } else { Err("fsfreeze: failed".into()) }
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        // If a file is still open, the kernel unmounts when it is closed.
        let _ = Command::new("umount").arg("--lazy").arg(&self.mounted).status();
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{}: {error}", command.get_program().display()))?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).trim().into()) }
}
