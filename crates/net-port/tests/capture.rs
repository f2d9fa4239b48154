//! Writes captures, and reads them again.
#![expect(clippy::unwrap_used, reason = "a test may")]

use kickless_net_port::{Capture, CaptureError, Direction};
use kickless_testing::{CaptureContents, FileSystem, eventually, parse_pcapng};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

const WHOLE: u32 = 65_550;

fn add(capture: &Capture, direction: Direction, pair: u16, frames: &[Vec<u8>]) {
    let frames = frames
        .iter()
        .map(|frame| (frame.len(), |into: &mut [u8]| into.copy_from_slice(&frame[..into.len()])));
    capture.add(direction, pair, frames);
}

fn frames(count: usize, len: usize) -> Vec<Vec<u8>> {
    (0..count).map(|number| vec![number as u8; len + number % 4]).collect()
}

fn read(path: &Path) -> CaptureContents {
    parse_pcapng(&fs::read(path).unwrap())
}

/// Reads the whole blocks of a file that is being written.
fn read_present(path: &Path) -> CaptureContents {
    let file = fs::read(path).unwrap();
    let mut end = 0;
    while let Some(len) = file.get(end + 4..end + 8) {
        let len = u32::from_ne_bytes(len.try_into().unwrap()) as usize;
        if end + len > file.len() {
            break;
        }
        end += len;
    }
    parse_pcapng(&file[..end])
}

#[test]
fn frames_of_both_directions_are_in_the_file() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("card.pcapng");
    let capture = Capture::default();
    let sent = frames(10, 60);
    add(&capture, Direction::Inbound, 0, &sent);
    assert!(!capture.is_on());
    capture.begin(&path, "card", WHOLE).unwrap();
    assert!(capture.is_on());
    add(&capture, Direction::Outbound, 0, &sent);
    add(&capture, Direction::Inbound, 3, &sent[..1]);
    // A reader sees frames before the end.
    eventually("the frames are in the file", || read_present(&path).frames.len() == 11);
    capture.end().unwrap();
    assert!(!capture.is_on());
    add(&capture, Direction::Outbound, 0, &sent);
    let contents = read(&path);
    assert_eq!((contents.interface.as_str(), contents.len_max), ("card", WHOLE));
    assert_eq!((contents.received, contents.dropped), (11, 0));
    for (frame, sent) in contents.frames.iter().zip(&sent) {
        assert_eq!((frame.direction, frame.queue, frame.len), (2, 0, sent.len()));
        assert_eq!(frame.bytes, *sent);
    }
    assert_eq!((contents.frames[10].direction, contents.frames[10].queue), (1, 3));
    assert!(contents.frames.is_sorted_by_key(|frame| frame.time));
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    // The next capture overwrites it, and has a part of each frame.
    capture.begin(&path, "", 20).unwrap();
    add(&capture, Direction::Outbound, 0, &sent[5..6]);
    drop(capture);
    let contents = read(&path);
    assert_eq!((contents.interface.as_str(), contents.frames.len()), ("", 1));
    assert_eq!((&contents.frames[0].bytes[..], contents.frames[0].len), (&sent[5][..20], 61));
}

#[test]
fn frames_without_room_are_counted() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("card.pcapng");
    let capture = Capture::default();
    capture.begin(&path, "card", WHOLE).unwrap();
    // The buffer is not taken while a caller adds frames. It has room for 4 MiB.
    add(&capture, Direction::Outbound, 0, &frames(80, 65_000));
    capture.end().unwrap();
    let contents = read(&path);
    assert_eq!((contents.frames.len(), contents.received, contents.dropped), (64, 80, 16));
}

#[test]
fn only_captures_are_overwritten() {
    let dir = TempDir::new().unwrap();
    let path = |name| dir.path().join(name);
    let [one, other] = [(); 2].map(|()| Capture::default());
    fs::write(path("image"), "something else").unwrap();
    fs::write(path("empty"), "").unwrap();
    assert!(Command::new("mkfifo").arg(path("fifo")).status().unwrap().success());
    let begin = |capture: &Capture, name| capture.begin(&path(name), "card", WHOLE);
    assert!(matches!(begin(&one, "image"), Err(CaptureError::Other { .. })));
    assert_eq!(fs::read(path("image")).unwrap(), b"something else");
    assert!(matches!(begin(&one, "fifo"), Err(CaptureError::NoFile { .. })));
    assert!(matches!(begin(&one, "no/file"), Err(CaptureError::File { .. })));
    // The owner of the directory may have put the link there.
    for target in ["empty", "new"] {
        symlink(path(target), path("link")).unwrap();
        assert!(matches!(begin(&one, "link"), Err(CaptureError::Link { .. })));
        fs::remove_file(path("link")).unwrap();
    }
    assert!(fs::read(path("empty")).unwrap().is_empty() && !path("new").exists());
    assert!(begin(&one, "empty").is_ok());
    assert!(matches!(begin(&other, "empty"), Err(CaptureError::InUse { .. })));
    add(&one, Direction::Inbound, 0, &frames(1, 60));
    // The earlier file ends before the next begins.
    assert!(begin(&one, "next").is_ok());
    assert_eq!(read(&path("empty")).frames.len(), 1);
    assert!(begin(&other, "empty").is_ok());
}

/// A file system that is unmounted when this is dropped.
struct Tmpfs(TempDir);

impl Tmpfs {
    fn mount(options: &str) -> Option<Self> {
        let dir = TempDir::new().unwrap();
        let mount =
            Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(dir.path()).output();
        mount.is_ok_and(|output| output.status.success()).then_some(Self(dir))
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_disk_costs_frames_and_the_rest_is_whole() {
    let Some(disk) = Tmpfs::mount("size=64k") else {
        eprintln!("skipped: a file system cannot be mounted");
        return;
    };
    let path = disk.0.path().join("card.pcapng");
    let capture = Capture::default();
    capture.begin(&path, "card", WHOLE).unwrap();
    let added = |count| {
        add(&capture, Direction::Outbound, 0, &frames(count, 1000));
        eventually("the frames are taken", || read_present(&path).received >= count as u64);
    };
    added(10);
    assert_eq!(read_present(&path).dropped, 0);
    added(100);
    capture.end().unwrap();
    let contents = read(&path);
    assert_eq!((contents.frames.len(), contents.received, contents.dropped), (10, 110, 100));
}

#[test]
fn a_file_system_that_hangs_delays_nobody() {
    let mounted = FileSystem::mount().and_then(|disk| {
        let capture = Capture::default();
        let path = disk.path().join("card.pcapng");
        capture.begin(&path, "card", WHOLE).map_err(|error| error.to_string())?;
        let frozen = disk.freeze()?;
        Ok((disk, path, capture, frozen))
    });
    let (_disk, path, capture, frozen) = match mounted {
        Ok(mounted) => mounted,
        Err(why) => {
            eprintln!("skipped: {why}");
            return;
        }
    };
    for _ in 0..4 {
        add(&capture, Direction::Outbound, 0, &frames(60, 65_000));
    }
    assert!(matches!(capture.end(), Err(CaptureError::Busy)));
    drop(frozen);
    eventually("the file is complete", || capture.end().is_ok());
    let contents = read(&path);
    assert!(contents.dropped >= 60 && contents.received == 240, "{}", contents.dropped);
    assert_eq!(contents.frames.len() as u64, 240 - contents.dropped);
}
