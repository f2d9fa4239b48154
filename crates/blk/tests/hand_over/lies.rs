//! States that no process writes are refused with a sentence.

use crate::common::{OPTIONS, Pair, Passed, image, of_file, passed_all};
use kickless_device::HandOver;
use kickless_disk::{Cache, Disk, DiskSpec};
use kickless_handover::{Giving, Part, v1};
use kickless_testing::hostile_nbd::{HostileNbd, greet, hello, serve_requests};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixDatagram, UnixStream};

/// The descriptors of an image: of the file, and of the witness.
type Files = (OwnedFd, Option<OwnedFd>);

/// Returns the sentence with which the new process refuses a changed state of an honest one.
fn refused(change: impl Fn(&mut v1::Image, &mut Files)) -> String {
    let image = image();
    let spec = of_file(&image);
    let cached = kickless_disk::Options { cache: Cache::Writeback, ..OPTIONS };
    let pair = Pair::new(Disk::open(&spec, &cached).unwrap(), &spec, &cached);
    let Passed { state, mut given } = pair.give();
    let v1::Disk { config_space, medium } = state.read().unwrap();
    let v1::Medium::Images(mut images) = medium else { panic!("it is no file") };
    let image = &mut images[0];
    let mut take = |fd| given.fd(fd).unwrap();
    let mut files = (take(image.file), image.witness.map(take));
    change(image, &mut files);
    let mut giving = Giving::default();
    image.file = giving.fd(files.0).unwrap();
    image.witness = files.1.map(|witness| giving.fd(witness).unwrap());
    let config_space = giving.bytes(given.bytes(config_space).unwrap()).unwrap();
    let own = Part::new(&v1::Disk { config_space, medium: v1::Medium::Images(images) }).unwrap();
    pair.make(passed_all(giving, own)).err().unwrap_or_default()
}

/// Replaces the file of an image by another one, and says so.
fn replace(image: &mut v1::Image, files: &mut Files, file: File) {
    let stat = file.metadata().unwrap();
    (image.device, image.inode) = (stat.dev(), stat.ino());
    *files = (file.into(), None);
}

#[test]
fn lies_about_a_file_are_refused() {
    assert_eq!(refused(|_, _| ()), "", "the honest state");
    let null = || File::options().read(true).write(true).open("/dev/null").unwrap();
    let read_only = || {
        let path = format!("{}/read-only", env!("CARGO_TARGET_TMPDIR"));
        std::fs::write(&path, [0; 4096]).unwrap();
        File::open(path).unwrap()
    };
    for (sentence, error) in [
        ("of another file", refused(|_, files| files.0 = tempfile::tempfile().unwrap().into())),
        ("of another file", refused(|image, _| image.inode += 1)),
        ("of another file", refused(|_, files| files.1 = Some(null().into()))),
        ("a character device", refused(|image, files| replace(image, files, null()))),
        ("open in another mode", refused(|image, files| replace(image, files, read_only()))),
        ("open in another mode", refused(|image, _| image.alignment = Some((512, 512)))),
        ("another size or other limits", refused(|image, _| image.size = 512)),
        ("another size or other limits", refused(|image, _| image.size = u64::MAX)),
        ("is empty", refused(|image, _| image.size = 0)),
        ("another size or other limits", refused(|image, _| image.punches_holes ^= true)),
        ("alignment cannot be", refused(|image, _| image.alignment = Some((3, 512)))),
    ] {
        assert!(error.contains(sentence), "{sentence:?}: {error:?}");
    }
}

#[test]
fn the_state_of_another_kind_is_refused() {
    let image = image();
    let specs = [of_file(&image), "mem:1M".parse().unwrap(), "null:1M".parse().unwrap()];
    for one in &specs {
        for other in specs.iter().filter(|other| *other != one) {
            let pair = Pair::new(Disk::open(one, &OPTIONS).unwrap(), one, &OPTIONS);
            let given = pair.give();
            let error = Pair::of(pair.old.clone(), other, &OPTIONS).make(given).err().unwrap();
            assert!(error.contains("that of another kind of disk"), "{error}");
            kickless_device::Device::close(&*pair.old).unwrap();
        }
    }
}

/// Memory that can be resized under the new process, and memory of another size.
#[test]
fn lies_about_memory_are_refused() {
    let spec = "mem:1M".parse().unwrap();
    let pair = Pair::new(Disk::open(&spec, &OPTIONS).unwrap(), &spec, &OPTIONS);
    let space = |passed: &Passed| {
        let v1::Disk { config_space, .. } = passed.state.clone().read().unwrap();
        passed.given.bytes(config_space).unwrap().to_vec()
    };
    let honest = pair.give();
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    let mut giving = Giving::default();
    let config_space = giving.bytes(&space(&honest)).unwrap();
    let medium = v1::Medium::Memory { file: giving.fd(&file).unwrap(), len: 1 << 20 };
    let own = Part::new(&v1::Disk { config_space, medium }).unwrap();
    let error = pair.make(passed_all(giving, own)).err().unwrap();
    assert!(error.contains("memory for a disk"), "{error}");
    let larger = Pair::of(pair.old.clone(), &"mem:2M".parse().unwrap(), &OPTIONS);
    let error = larger.make(pair.give()).err().unwrap();
    assert!(error.contains("1048576"), "{error}");
}

/// Returns the sentence with which the new process refuses a changed connection of an honest one.
fn refused_connection(change: impl Fn(&mut v1::Nbd, &mut OwnedFd)) -> String {
    let server = HostileNbd::start(2, |_, stream| {
        greet(stream, &hello(false));
        serve_requests(stream, 5);
    });
    let spec = server.uri().parse().unwrap();
    let pair = Pair::new(Disk::open(&spec, &OPTIONS).unwrap(), &spec, &OPTIONS);
    let Passed { state, mut given } = pair.give();
    let v1::Disk { config_space, medium } = state.read().unwrap();
    let v1::Medium::Nbd(mut nbd) = medium else { panic!("it is no connection") };
    let mut socket = given.fd(nbd.socket.unwrap()).unwrap();
    change(&mut nbd, &mut socket);
    let mut giving = Giving::default();
    nbd.socket = Some(giving.fd(socket).unwrap());
    let config_space = giving.bytes(given.bytes(config_space).unwrap()).unwrap();
    let own = Part::new(&v1::Disk { config_space, medium: v1::Medium::Nbd(nbd) }).unwrap();
    pair.make(passed_all(giving, own)).err().unwrap_or_default()
}

#[test]
fn lies_about_a_connection_are_refused() {
    assert_eq!(refused_connection(|_, _| ()), "", "the honest state");
    for (sentence, error) in [
        ("Socket operation", refused_connection(|_, socket| *socket = tempfile::tempfile().unwrap().into())),
        // A read of it would wait.
        ("another kind", refused_connection(|_, socket| *socket = UnixStream::pair().unwrap().0.into())),
        ("another kind", refused_connection(|_, socket| *socket = UnixDatagram::unbound().unwrap().into())),
        ("not a multiple of its block", refused_connection(|nbd, _| nbd.size = 513)),
        ("a disk of 0 bytes", refused_connection(|nbd, _| nbd.size = 0)),
        ("a disk of 18446744073709551104 bytes", refused_connection(|nbd, _| nbd.size = u64::MAX - 511)),
        ("are invalid", refused_connection(|nbd, _| nbd.block_sizes = (3, 0, 1))),
        // It discards.
        ("another size or other limits", refused_connection(|nbd, _| nbd.flags |= 1 << 5)),
        ("the export is read-only", refused_connection(|nbd, _| nbd.flags |= 1 << 1)),
    ] {
        assert!(error.contains(sentence), "{sentence:?}: {error:?}");
    }
}

/// The last state has other images than the first one, or the images are others than the top one names.
#[test]
fn lies_about_a_chain_are_refused() {
    for (given_images, last_images, sentence) in [
        (2, 2, ""),
        (2, 1, "another number of images"),
        (2, 0, "has no image"),
        (1, 1, "was not handed over"),
        (3, 3, "fewer backing images"),
    ] {
        let images = crate::qcow2::images();
        let spec = DiskSpec::Qcow2(images.over.clone());
        let pair = Pair::new(Disk::open(&spec, &OPTIONS).unwrap(), &spec, &OPTIONS);
        let Passed { state, mut given } = pair.give();
        let v1::Disk { config_space, medium } = state.read().unwrap();
        let v1::Medium::Images(all) = medium else { panic!("it has no images") };
        let files: Vec<_> = all.iter().map(|image| given.fd(image.file).unwrap()).collect();
        let mut giving = Giving::default();
        let config_space = giving.bytes(given.bytes(config_space).unwrap()).unwrap();
        let given_images = [0, 1, 1].into_iter().take(given_images);
        let all =
            given_images.map(|of| v1::Image { file: giving.fd(&files[of]).unwrap(), ..all[of].clone() });
        let medium = v1::Medium::Images(all.collect());
        let own = Part::new(&v1::Disk { config_space, medium }).unwrap();
        let new = pair.make(passed_all(giving, own)).unwrap();
        let Passed { state, given } = pair.give_final().unwrap();
        let mut last: v1::DiskFinal = state.read().unwrap();
        last.images.resize(last_images, v1::ImageFinal::default());
        let last = Passed { state: Part::new(&last).unwrap(), given };
        let error = pair.receive(&new, last).err().unwrap_or_default();
        assert!(error.contains(sentence) && error.is_empty() == sentence.is_empty(), "{sentence}: {error}");
        drop(new);
        pair.old.take_back().unwrap();
    }
}
