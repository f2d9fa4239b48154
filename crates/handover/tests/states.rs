//! States are read as they were written, whatever happens to them on the way.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod common;

use common::{Maker, descriptors};
use kickless_handover::v1::{
    Card, CardFinal, Completion, Device, Disk, DiskFinal, Final, Medium, Plan, Ring, RingFinal, Session,
    Shape, Stream, StreamFinal, Tap, TapFinal,
};
use kickless_handover::{Checked, Error, Giving, Part, Record};
use kickless_testing::Random;
use proptest::prelude::*;
use serde_json::Value;
use std::fmt::Debug;
use std::fs;
use std::path::PathBuf;

/// Returns the bytes of a record, and the number of its descriptors.
fn written(maker: Maker, state: &impl Checked) -> (Vec<u8>, usize) {
    let bytes = maker.record(state).to_bytes();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    (bytes, text.matches("{\"fd\":").count())
}

fn read<T: Checked>(bytes: &[u8], fds: usize) -> Result<T, Error> {
    Ok(Record::from_bytes(bytes.to_vec(), descriptors(fds))?.read()?.0)
}

/// Writes and reads a state, and damages it on the way.
fn pass<T: Checked + PartialEq + Debug>(seed: u64, make: impl Fn(&mut Maker) -> T) {
    let mut maker = Maker::new(seed);
    let state = make(&mut maker);
    let (bytes, fds) = written(maker, &state);
    assert_eq!(read::<T>(&bytes, fds).unwrap(), state);
    // A descriptor that is missing, and one that no field names.
    assert!(fds == 0 || read::<T>(&bytes, fds - 1).is_err());
    assert!(read::<T>(&bytes, fds + 1).is_err());
    let mut random = Random(seed);
    let cut = random.below(bytes.len() as u64) as usize;
    assert!(read::<T>(&bytes[..cut], fds).is_err());
    for _ in 0..20 {
        let mut changed = bytes.clone();
        let at = random.below(bytes.len() as u64) as usize;
        changed[at] = match random.below(3) {
            0 => random.next() as u8,
            // Another digit, and another bit.
            1 => b'0' + random.below(10) as u8,
            _ => changed[at] ^ 1 << random.below(8),
        };
        // It may be a state, and is within bounds then. The sentence of an error is one line.
        match read::<T>(&changed, fds) {
            Ok(state) => state.check().unwrap(),
            Err(error) => assert!(!error.to_string().contains(char::is_control), "{error:?}"),
        }
    }
}

proptest! {
    #[test]
    fn plans_pass(seed: u64) {
        pass(seed, Maker::plan);
    }

    #[test]
    fn devices_pass(seed: u64) {
        pass(seed, Maker::device);
        pass(seed, Maker::disk);
        pass(seed, Maker::card);
    }

    #[test]
    fn final_records_pass(seed: u64) {
        let device = Maker::new(seed).device();
        let mut maker = Maker::new(seed);
        maker.final_of(&device).check_against(&device).unwrap();
        pass(seed, |maker| maker.final_of(&device));
        pass(seed, Maker::disk_final);
        pass(seed, Maker::card_final);
    }

    #[test]
    fn any_text_is_a_state_or_an_error(text: String, fds in 0..3usize) {
        let mut bytes = Maker::new(0).record(&Plan::default()).to_bytes();
        bytes.truncate(32);
        bytes[16..24].copy_from_slice(&(text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
        let _ = read::<Plan>(&bytes, fds);
        let _ = read::<Device>(&bytes, fds);
    }
}

#[test]
fn each_part_of_a_device_is_read_by_its_type() {
    let mut maker = Maker::new(3);
    let (disk, card) = (maker.disk(), maker.card());
    assert_eq!(Part::new(&disk).unwrap().read::<Disk>().unwrap(), disk);
    assert_eq!(Part::new(&card).unwrap().read::<Card>().unwrap(), card);
    assert!(Part::new(&disk).unwrap().read::<Card>().is_err());
}

#[test]
fn each_descriptor_is_taken_once() {
    let mut giving = Giving::default();
    let null = descriptors(1).pop().unwrap();
    let [first, second] = [giving.fd(&null).unwrap(), giving.fd(&null).unwrap()];
    let bytes = giving.bytes(b"half").unwrap();
    let named = |queues| Tap { name: "tap0".into(), queues, detaches: false, segments_udp: false };
    let record = giving.record(&Stream::default()).unwrap();
    assert!(matches!(record.read::<Stream>(), Err(Error::Descriptor(0))), "it names none");
    let both = |queues: Vec<_>| {
        let mut giving = Giving::default();
        for _ in 0..2 {
            giving.fd(&null).unwrap();
        }
        giving.bytes(b"half").unwrap();
        giving.record(&named(queues)).unwrap().read::<Tap>()
    };
    assert!(matches!(both(vec![first, first]), Err(Error::Descriptor(0))));
    assert!(matches!(both(vec![first]), Err(Error::Descriptor(1))));
    let (tap, mut given) = both(vec![second, first]).unwrap();
    for queue in tap.queues {
        given.fd(queue).unwrap();
        assert!(matches!(given.fd(queue), Err(Error::Descriptor(_))));
    }
    assert_eq!(given.bytes(bytes).unwrap(), b"half");
}

#[test]
fn a_piece_outside_of_the_bytes_is_an_error() {
    let record = |bytes: &[u8]| {
        let mut giving = Giving::default();
        giving.bytes(b"before").unwrap();
        let received = giving.bytes(bytes).unwrap();
        (giving, StreamFinal { received, ..StreamFinal::default() })
    };
    let (giving, state) = record(b"frame");
    let (state, given) = giving.record(&state).unwrap().read::<StreamFinal>().unwrap();
    assert_eq!(given.bytes(state.received).unwrap(), b"frame");
    let (_, longer) = record(b"a longer frame");
    let (giving, _) = record(b"frame");
    let (state, given) = giving.record(&longer).unwrap().read::<StreamFinal>().unwrap();
    assert!(given.bytes(state.received).is_err());
}

/// Returns the error of a state that no process writes.
fn refused(state: &impl Checked) -> String {
    state.check().unwrap_err().to_string()
}

#[test]
fn values_out_of_range_are_refused() {
    let has_enough = |device: &Device| {
        device.session.as_ref().is_some_and(|session| session.regions.len() >= 2 && session.rings.len() >= 2)
    };
    let with_enough = (0..).map(|seed| Maker::new(seed).device()).find(has_enough).unwrap();
    let session = |change: &dyn Fn(&mut Session)| {
        let mut device = with_enough.clone();
        device.check().unwrap();
        change(device.session.as_mut().unwrap());
        refused(&device)
    };
    assert!(session(&|session| session.regions[0].len = 0).contains("region of memory"));
    assert!(session(&|session| session.regions[0].gpa = u64::MAX).contains("region of memory"));
    assert!(session(&|session| session.regions[1].file = 900).contains("file of a region cannot be 900"));
    assert!(session(&|session| session.regions.clear()).contains("file without a region"));
    assert!(session(&|session| session.rings.swap(0, 1)).contains("order of rings"));
    assert!(session(&|session| session.rings[1].size = Some(0)).contains("size of a ring"));
    assert!(session(&|session| session.rings[1].size = Some(32769)).contains("size of a ring"));
    let (mut disk, none) = (Maker::new(1).disk(), Vec::new());
    disk.medium = Medium::Images(none);
    assert!(refused(&disk).contains("number of images"));
    assert!(refused(&Tap::default()).contains("number of queues"));
    let of_tap =
        |attached: &[bool]| TapFinal { attached: attached.into(), offloads: 0 }.check_against(2, false);
    assert!(of_tap(&[true, true]).is_ok());
    assert!(of_tap(&[true]).is_err() && of_tap(&[true, false]).is_err());
    let mut plan = Plan { of_file: vec![Default::default()], ..Plan::default() };
    plan.of_file[0].insert("poll".into(), serde_json::json!({ "fd": 0 }));
    assert!(refused(&plan).contains("option cannot be poll"));
}

#[test]
fn a_ring_continues_only_where_its_set_up_allows() {
    let device = |size, features: Option<u64>, loaded| {
        let json = serde_json::json!({
            "connection": { "fd": 0 }, "features": 0, "features_set": true, "protocol_features": 0,
            "files": [], "regions": [], "logs": false, "rings": [],
        });
        let mut session: Session = serde_json::from_value(json).unwrap();
        session.rings = vec![Ring { size, loaded, runs_with: features, ..Ring::default() }];
        Device { session: Some(session), ..Device::default() }
    };
    let ring_final = |ring: RingFinal| {
        let session = Some(Default::default());
        Final { session, rings: vec![ring], ..Final::default() }
    };
    let at = |next_avail| RingFinal { next_avail: Some(next_avail), ..RingFinal::default() };
    let (split, packed) = (device(Some(8), Some(0), None), device(Some(8), Some(1 << 34), None));
    assert!(ring_final(at(60_000)).check_against(&split).is_ok());
    assert!(ring_final(at(0x8007)).check_against(&packed).is_ok());
    assert!(ring_final(at(0x8008)).check_against(&packed).is_err());
    let loaded = device(Some(8), None, Some(Shape { size: 4, is_packed: true }));
    assert!(ring_final(at(0x8003)).check_against(&loaded).is_ok());
    assert!(ring_final(at(0x8004)).check_against(&loaded).is_err());
    let with = |completions: &[(u16, u16)]| {
        let unpublished = completions.iter().map(|(id, descriptors)| Completion {
            id: *id,
            len: 1,
            descriptors: *descriptors,
        });
        ring_final(RingFinal { unpublished: unpublished.collect(), ..RingFinal::default() })
    };
    assert!(with(&[(7, 0)]).check_against(&split).is_ok());
    assert!(with(&[(8, 0)]).check_against(&split).is_err());
    assert!(with(&[(7, 1)]).check_against(&split).is_err());
    assert!(with(&[(7, 0); 9]).check_against(&split).is_err());
    assert!(with(&[(60_000, 8)]).check_against(&packed).is_ok());
    assert!(with(&[(1, 8), (2, 1)]).check_against(&packed).is_err());
    assert!(with(&[(1, 0)]).check_against(&packed).is_err());
    let stopped = device(Some(8), None, None);
    assert!(with(&[(60_000, 9)]).check_against(&stopped).is_ok(), "its front-end may not have finished");
    assert!(with(&[(1, 0); 40_000]).check_against(&stopped).is_err());
    assert!(Final::default().check_against(&split).is_err(), "it has no session");
    assert!(ring_final(RingFinal { index: 1, ..RingFinal::default() }).check_against(&split).is_err());
}

fn directory() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests", "states", "1"].iter().collect()
}

/// Reads the stored record of a type and writes it again. A released format does not change, so this stays as
/// it is for as long as the format is read.
fn stored<T: Checked>(name: &str) {
    let bytes = fs::read(directory().join(name)).unwrap();
    let text = |bytes: &[u8]| {
        let len = u64::from_le_bytes(bytes[16..24].try_into().unwrap()) as usize;
        let (text, rest) = bytes[32..].split_at(len);
        (serde_json::from_slice::<Value>(text).unwrap(), rest.to_vec())
    };
    let before = text(&bytes);
    let fds = String::from_utf8_lossy(&bytes).matches("{\"fd\":").count();
    let state: T = read(&bytes, fds).unwrap_or_else(|error| panic!("{name}: {error}"));
    let mut giving = Giving::default();
    descriptors(fds).iter().for_each(|fd| drop(giving.fd(fd)));
    giving.bytes(&before.1).unwrap();
    assert_eq!(text(&giving.record(&state).unwrap().to_bytes()), before, "{name}");
}

#[test]
fn stored_records_are_read() {
    stored::<Plan>("plan");
    stored::<Device>("device-of-a-disk");
    stored::<Disk>("disk");
    stored::<Device>("device-of-a-card");
    stored::<Card>("card");
    stored::<Final>("final");
    stored::<DiskFinal>("disk-final");
    stored::<CardFinal>("card-final");
}

/// Writes the stored records anew. A released format must not need this.
#[test]
#[ignore = "it changes the tree"]
fn write_records_to_store() {
    fs::create_dir_all(directory()).unwrap();
    let write = |name: &str, bytes: Vec<u8>| fs::write(directory().join(name), bytes).unwrap();
    // The longest of many: most of its optional fields are there.
    fn longest<T: Checked>(make: impl Fn(&mut Maker) -> T, is_wanted: impl Fn(&T) -> bool) -> Vec<u8> {
        let made = (0..2000).filter_map(|seed| {
            let mut maker = Maker::new(seed);
            let state = make(&mut maker);
            is_wanted(&state).then(|| written(maker, &state).0)
        });
        made.max_by_key(Vec::len).unwrap()
    }
    write("plan", longest(Maker::plan, |_| true));
    let is_disk = |device: &Device| device.own.clone().read::<Disk>().is_ok();
    write("device-of-a-disk", longest(Maker::device, is_disk));
    write("device-of-a-card", longest(Maker::device, |device| !is_disk(device)));
    write("disk", longest(Maker::disk, |_| true));
    write("card", longest(Maker::card, |_| true));
    let device = (0..2000).map(|seed| Maker::new(seed).device());
    let device = device.max_by_key(|device| device.session.as_ref().map_or(0, |session| session.rings.len()));
    write("final", longest(|maker| maker.final_of(device.as_ref().unwrap()), |_| true));
    write("disk-final", longest(Maker::disk_final, |_| true));
    write("card-final", longest(Maker::card_final, |_| true));
}
