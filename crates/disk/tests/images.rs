//! Tests which files open as disks, which requests a disk accepts, and files that another process changes.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{Worker, guest, image, loop_device, options};
use kickless_disk::{Cache, Disk, DiskSpec, Error, Extent, IoError, Request, Resized, Step};
use kickless_io::EngineKind;
use kickless_memory::{Gpa, Marks};
use kickless_testing::{Random, logged};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::any::Any;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::rc::Rc;

const CACHES: [Cache; 2] = [Cache::None, Cache::Writeback];
const ENGINES: [EngineKind; 3] = [EngineKind::Uring, EngineKind::Aio, EngineKind::Threads];

fn open(path: &Path, cache: Cache, read_only: bool) -> Result<Disk, Error> {
    Disk::open(&DiskSpec::File(path.to_owned()), &options(cache, read_only))
}

/// Returns a disk of `len` bytes of each kind, with its name and the value that keeps it alive, such as its
/// server.
fn disks_of_each_kind(len: u64, read_only: bool) -> Vec<(String, Disk, Box<dyn Any>)> {
    let contents = vec![0; len as usize];
    let image = image(&contents);
    let qcow2 = common::qcow2::Image::of(&contents, &[]);
    let mut specs: Vec<(DiskSpec, Box<dyn Any>)> = vec![
        (DiskSpec::File(image.path().into()), Box::new(image)),
        (DiskSpec::Null(len), Box::new(())),
        (DiskSpec::Memory(len), Box::new(())),
        (qcow2.spec(), Box::new(qcow2)),
    ];
    for kind in common::server::KINDS {
        let server = common::server::Server::start(kind, &contents, &[]);
        specs.push((server.spec(""), Box::new(server)));
    }
    #[cfg(feature = "rbd")]
    {
        let image = common::ceph::Image::of(&contents);
        specs.push((image.spec(""), Box::new(image)));
    }
    let mut disks = Vec::new();
    for (spec, keep_alive) in specs {
        let keep_alive = Rc::new(keep_alive);
        for cache in CACHES {
            let disk = Disk::open(&spec, &options(cache, read_only)).unwrap();
            disks.push((format!("{spec:?} {cache}"), disk, Box::new(keep_alive.clone()) as Box<dyn Any>));
        }
    }
    disks
}

#[test]
fn files_that_are_no_disks_are_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    mknodat(CWD, at("pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let _listener = UnixListener::bind(at("socket")).unwrap();
    symlink("nowhere", at("link")).unwrap();
    symlink("link-to-itself", at("link-to-itself")).unwrap();
    fs::write(at("empty"), []).unwrap();
    fs::write(at("tiny"), [1; 511]).unwrap();
    for cache in CACHES {
        for read_only in [false, true] {
            let refused = |path: &Path| {
                let error = open(path, cache, read_only).unwrap_err();
                assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
                error
            };
            for name in ["missing", "link", "link-to-itself", "empty/below"] {
                assert!(matches!(refused(&at(name)), Error::Open { .. }), "{name}");
            }
            for (path, kind) in [
                (dir.path().to_owned(), "a directory"),
                (at("pipe"), "a pipe"),
                (at("socket"), "a socket"),
                ("/dev/null".into(), "a character device"),
            ] {
                let error = refused(&path);
                assert!(matches!(error, Error::NotADisk { what, .. } if what == kind), "{error}");
            }
            for name in ["empty", "tiny"] {
                assert!(matches!(refused(&at(name)), Error::Empty { .. }), "{name}");
            }
        }
    }
}

#[test]
fn impossible_sizes_are_refused() {
    for size in [0, 1, 511, 513, u64::MAX] {
        for spec in [DiskSpec::Null(size), DiskSpec::Memory(size)] {
            let error = Disk::open(&spec, &options(Cache::None, false)).unwrap_err();
            assert!(matches!(error, Error::Size(given) if given == size), "{spec:?}: {error}");
        }
    }
    // Larger than the address space.
    let huge = Disk::open(&DiskSpec::Memory(1 << 62), &options(Cache::None, false)).unwrap_err();
    assert!(matches!(huge, Error::Memory { .. }), "{huge}");
}

/// A raw disk whose file is an image of another format is served, and logs one warning.
#[test]
fn a_raw_disk_warns_of_another_format() {
    let warnings = |contents: &[u8]| {
        let image = image(contents);
        let mut lines = Vec::new();
        for cache in CACHES {
            let (disk, log) = logged(|| open(image.path(), cache, false).unwrap());
            let (result, bytes) = Worker::new(&disk, EngineKind::Auto, 4).read(0, contents.len());
            assert!(result == Ok(()) && bytes == contents, "{log}");
            lines.extend(log.lines().filter(|line| line.contains("WARN")).map(str::to_owned));
        }
        lines
    };
    let mut contents = Random(1).bytes(16 << 10);
    assert!(warnings(&contents).is_empty());
    contents[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
    let lines = warnings(&contents);
    assert!(lines.len() == 2 && lines.iter().all(|line| line.contains("qcow2:PATH")), "{lines:?}");
    contents[..8].copy_from_slice(b"LUKS\xba\xbe\0\x02");
    assert!(warnings(&contents).is_empty());
    contents[15 << 10..].fill(0);
    contents[(16 << 10) - 512..][..8].copy_from_slice(b"conectix");
    let lines = warnings(&contents);
    assert!(lines.len() == 2 && lines.iter().all(|line| line.contains("VHD")), "{lines:?}");
}

/// The last bytes of an image, less than a sector, are not part of the disk. The log warns of them.
#[test]
fn an_odd_length_is_rounded_down() {
    let whole = Random(1).bytes(16 << 10);
    for odd in [1, 511] {
        let contents = [&whole[..], &vec![0x77; odd]].concat();
        for cache in CACHES {
            let image = image(&contents);
            let (opened, log) = logged(|| open(image.path(), cache, false));
            let disk = match opened {
                Ok(disk) => disk,
                Err(error) => {
                    // This file system has blocks of more than 512 bytes.
                    assert!(cache == Cache::None && matches!(error, Error::PartialBlock { .. }), "{error}");
                    continue;
                }
            };
            assert!(log.contains("WARN") && log.contains(image.path().to_str().unwrap()), "{log}");
            assert!(log.contains("not a multiple of 512"), "{log}");
            assert_eq!(disk.size(), 16 << 10);
            let mut worker = Worker::new(&disk, EngineKind::Auto, 4);
            let last = (16 << 10) - 512;
            assert_eq!(worker.read(last, 512), (Ok(()), whole[last as usize..].to_vec()));
            assert_eq!(worker.write(last, &[3; 512], 1), Ok(()));
            assert_eq!(worker.read(last, 1024).0, Err(IoError::Range));
            let mut expected = contents.clone();
            expected[last as usize..][..512].fill(3);
            assert!(fs::read(image.path()).unwrap() == expected);
        }
    }
    let whole = image(&whole);
    let (disk, log) = logged(|| open(whole.path(), Cache::None, false));
    assert!(disk.is_ok() && !log.contains("WARN"), "{log}");
}

#[test]
fn requests_must_be_whole_sectors_within_the_disk() {
    const SIZE: u64 = 64 << 10;
    for (name, disk, _keep_alive) in disks_of_each_kind(SIZE, false) {
        assert_eq!((disk.size(), disk.limits().read_only), (SIZE, false), "{name}");
        let mut worker = Worker::new(&disk, EngineKind::Auto, 4);
        for (offset, len, result) in [
            (0, SIZE as usize, Ok(())),
            (SIZE - 512, 512, Ok(())),
            (SIZE, 0, Ok(())),
            (512, 0, Ok(())),
            (0, SIZE as usize + 512, Err(IoError::Range)),
            (SIZE - 512, 1024, Err(IoError::Range)),
            (SIZE, 512, Err(IoError::Range)),
            (SIZE + 512, 0, Err(IoError::Range)),
            (1, 512, Err(IoError::Range)),
            (511, 1024, Err(IoError::Range)),
            (0, 511, Err(IoError::Range)),
            (0, 513, Err(IoError::Range)),
            (i64::MAX as u64 & !511, 512, Err(IoError::Range)),
            (!511, 512, Err(IoError::Range)),
            (!511, 0, Err(IoError::Range)),
        ] {
            assert_eq!(worker.write(offset, &vec![0; len], 0), result, "{name}: write {len} at {offset}");
            assert_eq!(worker.read(offset, len).0, result, "{name}: read {len} at {offset}");
        }
        assert_eq!(worker.flush(), Ok(()));
        if let Disk::File(_) = disk {
            assert_eq!(disk.file().unwrap().metadata().unwrap().len(), SIZE);
        }
    }
}

#[test]
fn a_read_only_disk_takes_no_writes() {
    for (name, disk, _keep_alive) in disks_of_each_kind(64 << 10, true) {
        assert!(disk.limits().read_only);
        let mut worker = Worker::new(&disk, EngineKind::Auto, 4);
        let view = guest(4096);
        for durable in [false, true] {
            for (offset, len) in [(0, 512), (1 << 40, 512), (0, 0), (1, 3)] {
                worker.io(0).buffers_mut().push(&view, Gpa(0), len).unwrap();
                // At once, without an operation.
                let step = worker.start(0, Request::Write { offset, durable });
                assert_eq!(step, Step::Done(Err(IoError::ReadOnly)), "{name}");
                worker.io(0).buffers_mut().clear(&mut Marks::off());
            }
        }
        assert_eq!(worker.read(0, 4096).0, Ok(()), "{name}");
        assert_eq!(worker.flush(), Ok(()), "{name}");
    }
}

#[test]
fn a_write_protected_device_opens_only_for_reading() {
    let contents = Random(2).bytes(64 << 10);
    let device = match loop_device(image(&contents), true) {
        Ok(device) => device,
        Err(why) => return println!("SKIPPED: no loop device with blocks of 4096 bytes: {why}"),
    };
    for cache in CACHES {
        let error = open(device.path(), cache, false).unwrap_err();
        assert!(matches!(error, Error::OpenForWriting { .. }), "{error}");
        assert!(error.to_string().contains("set read-only"), "{error}");
        let disk = open(device.path(), cache, true).unwrap();
        let limits = disk.limits();
        assert_eq!((disk.size(), limits.block_size, limits.read_only), (64 << 10, 4096, true));
        let mut worker = Worker::new(&disk, EngineKind::Auto, 4);
        assert_eq!(worker.write(0, &[0; 512], 0), Err(IoError::ReadOnly));
        // Reads need not be aligned to the blocks.
        assert!(worker.read_into(512 * 3, 512 * 9, 1) == (Ok(()), contents[512 * 3..512 * 12].to_vec()));
    }
}

/// Writes whole blocks and parts of blocks, from aligned and unaligned memory. The kernel counts the flushes
/// of a device.
#[test]
fn durable_writes_are_flushed_and_others_are_not() {
    let device = match loop_device(image(&[0; 64 << 10]), false) {
        Ok(device) => device,
        Err(why) => return println!("SKIPPED: no loop device with blocks of 4096 bytes: {why}"),
    };
    let view = guest(16 << 10);
    for cache in CACHES {
        let disk = open(device.path(), cache, false).unwrap();
        for kind in ENGINES {
            let mut worker = Worker::new(&disk, kind, 4);
            for (at, len) in [(0, 4096), (0, 512), (1, 4096)] {
                for durable in [false, true] {
                    let before = device.flushes();
                    worker.io(0).buffers_mut().push(&view, Gpa(at), len).unwrap();
                    assert_eq!(worker.run(Request::Write { offset: 8192, durable }), Ok(()));
                    worker.io(0).buffers_mut().clear(&mut Marks::off());
                    assert_eq!(device.flushes() > before, durable, "{cache} {kind}: {len} from {at}");
                }
            }
            let before = device.flushes();
            assert_eq!(worker.flush(), Ok(()));
            assert!(device.flushes() > before, "{cache} {kind}");
        }
    }
}

/// Requests to an image that another process truncates fail. None waits for ever.
#[test]
fn requests_to_a_truncated_file_fail() {
    for cache in CACHES {
        for kind in ENGINES {
            for (len, any_error) in [(512 * 3, false), (0, false), (512 * 3 + 100, true)] {
                let image = image(&[5; 64 << 10]);
                let disk = open(image.path(), cache, false).unwrap();
                let mut worker = Worker::new(&disk, kind, 4);
                let other_handle = OpenOptions::new().write(true).open(image.path()).unwrap();
                other_handle.set_len(len).unwrap();
                for misaligned in [0, 512, 1] {
                    for (offset, bytes) in [(0, 8192), (512, 512 * 5), (8192, 512), (32 << 10, 32 << 10)] {
                        let (result, _) = worker.read_into(offset, bytes, misaligned);
                        let is_expected =
                            if any_error { result.is_err() } else { result == Err(IoError::Shrunk) };
                        assert!(is_expected, "{cache} {kind} {len} {offset} {misaligned}: {result:?}");
                    }
                    if len > 0 {
                        assert_eq!(worker.read_into(0, 1024, misaligned), (Ok(()), vec![5; 1024]));
                    }
                }
                assert_eq!(worker.flush(), Ok(()));
                // The write would make the file longer again, with zeroes in place of the guest's data.
                let refused = worker.write((64 << 10) - 512, &[6; 512], 0);
                assert_eq!((refused, other_handle.metadata().unwrap().len()), (Err(IoError::Shrunk), len));
                other_handle.set_len(64 << 10).unwrap();
                assert_eq!(worker.write((64 << 10) - 512, &[6; 512], 0), Ok(()));
                let (result, bytes) = worker.read(0, 64 << 10);
                assert_eq!(result, Ok(()));
                let kept = len as usize;
                assert!(
                    bytes[..kept].iter().all(|&b| b == 5) && bytes[kept..][..512].iter().all(|&b| b == 0)
                );
                assert_eq!(bytes[(64 << 10) - 512..], [6; 512]);
            }
        }
    }
}

/// A worker serves many disks, so each line of the log must name its disk.
#[test]
fn a_line_belongs_to_the_span_that_the_disk_was_opened_in() {
    let image = image(&[5; 64 << 10]);
    let ((), log) = logged(|| {
        let span = tracing::error_span!("device", name = "web");
        let disk = span.in_scope(|| open(image.path(), Cache::None, false).unwrap());
        image.as_file().set_len(32 << 10).unwrap();
        let mut worker = Worker::new(&disk, EngineKind::Auto, 4);
        assert_eq!(worker.read(60 << 10, 512).0, Err(IoError::Shrunk));
        image.as_file().set_len(64 << 10).unwrap();
        assert_eq!(worker.read(60 << 10, 512).0, Ok(()));
    });
    let lines: Vec<_> = log.lines().filter(|line| line.contains("the file of the disk")).collect();
    assert!(lines.len() == 2 && lines.iter().all(|line| line.contains("device{name=\"web\"}")), "{log}");
}

/// Writes, discards and zeroes beyond the end of the file fail once the disk knows that the file became
/// shorter. It learns this from a read or from `refresh_size`.
#[test]
fn requests_beyond_the_end_fail_until_the_file_is_long_again() {
    let (zeroes, discard) = (Request::WriteZeroes { durable: false }, Request::Discard { durable: false });
    for cache in CACHES {
        let image = image(&[5; 64 << 10]);
        let disk = open(image.path(), cache, false).unwrap();
        let len = || image.as_file().metadata().unwrap().len();
        let mut worker = Worker::new(&disk, EngineKind::Auto, 4);
        let run_on_extent = |worker: &mut Worker<'_>, request, offset| {
            worker.io(0).extents_mut().push(Extent { offset, len: 4096, unmap: false });
            worker.run(request)
        };
        for by_refresh in [false, true] {
            image.as_file().set_len(32 << 10).unwrap();
            // The disk does not know yet.
            assert_eq!(worker.write(36 << 10, &[6; 4096], 0), Ok(()));
            assert_eq!(len(), 40 << 10, "the write makes the file longer");
            let ((), log) = logged(|| match by_refresh {
                true => assert!(matches!(disk.refresh_size(), Ok(Resized::Shrunk { .. }))),
                false => assert_eq!(worker.read(60 << 10, 512).0, Err(IoError::Shrunk)),
            });
            assert_eq!(log.contains("become shorter"), !by_refresh, "{log}");
            for offset in [40 << 10, (40 << 10) - 512, 60 << 10] {
                assert_eq!(worker.write(offset, &[6; 4096], 0), Err(IoError::Shrunk), "{offset}");
                for request in [zeroes, discard] {
                    assert_eq!(run_on_extent(&mut worker, request, offset), Err(IoError::Shrunk));
                }
            }
            assert_eq!(len(), 40 << 10);
            // Requests to the rest of the file work. A request beyond the disk's end fails as before.
            assert_eq!(worker.write(36 << 10, &[6; 4096], 0), Ok(()));
            assert_eq!(run_on_extent(&mut worker, zeroes, 0), Ok(()));
            assert_eq!(worker.write(64 << 10, &[6; 512], 0), Err(IoError::Range));
            image.as_file().set_len(64 << 10).unwrap();
            assert_eq!(worker.write(60 << 10, &[6; 4096], 0), Ok(()));
            assert_eq!(worker.read(40 << 10, 512), (Ok(()), vec![0; 512]));
        }
    }
}

#[test]
fn disks_have_identities_of_their_own() {
    let images = [image(&[0; 512]), image(&[0; 512])];
    let disks =
        [&images[0], &images[1], &images[0]].map(|image| open(image.path(), CACHES[1], true).unwrap());
    for disk in &disks {
        let identity = disk.identity();
        assert!((1..=20).contains(&identity.len()) && identity.bytes().all(|b| b.is_ascii_graphic()));
        assert!(disk.file().is_some());
    }
    assert_ne!(disks[0].identity(), disks[1].identity());
    assert_eq!(disks[0].identity(), disks[2].identity());
}

#[test]
fn disks_of_each_kind_write_back_and_reload() {
    for (name, disk, _keep_alive) in
        [false, true].into_iter().flat_map(|read_only| disks_of_each_kind(65536, read_only))
    {
        assert!(disk.write_back().is_ok() && disk.reload(false).is_ok(), "{name}");
    }
}
