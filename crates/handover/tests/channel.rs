//! Both ends of the channel, and peers that lie.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod common;

use std::env;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Command;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use common::Maker;
use kickless_handover::v1::{Card, CardFinal, Device, Final, Plan, Tap};
use kickless_handover::{Decision, Error, FromOld, Giving, NewEnd, OldEnd, Part, Record};
use nix::unistd::{Uid, getuid, setuid};
use rustix::cmsg_space;
use rustix::fs::{MemfdFlags, fstat, memfd_create};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, sendmsg,
    socketpair,
};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Resource, Rlimit, setrlimit};

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(20);

fn pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

fn soon() -> Instant {
    Instant::now() + LONG
}

fn plan() -> Record {
    Giving::default().record(&Plan::default()).unwrap()
}

fn device() -> Record {
    Giving::default().record(&Device::default()).unwrap()
}

/// Returns the reading ends of pipes, and numbers that tell them apart.
fn pipes(count: usize) -> (Vec<OwnedFd>, Vec<u64>) {
    let pipes: Vec<_> = (0..count).map(|_| pipe_with(PipeFlags::CLOEXEC).unwrap().0).collect();
    let inodes = pipes.iter().map(inode).collect();
    (pipes, inodes)
}

fn inode(fd: &OwnedFd) -> u64 {
    fstat(fd).unwrap().st_ino
}

/// Runs the new process's end until an error, or until it has taken over. Returns what came.
fn take_all(new: OwnedFd) -> (Vec<FromOld>, Result<(), Error>) {
    let (mut new, mut came) = (NewEnd::new(new), Vec::new());
    loop {
        match new.receive(soon()) {
            Ok(FromOld::Last) => return (came, new.take(soon()).map(drop)),
            Ok(message) => came.push(message),
            Err(error) => return (came, Err(error)),
        }
        if let Err(error) = new.confirm(soon()) {
            return (came, Err(error));
        }
    }
}

#[test]
fn all_passes_in_order() {
    let (old, new) = pair();
    let new = thread::spawn(|| take_all(new));
    let mut old = OldEnd::new(old);
    old.plan(2, plan(), soon()).unwrap();
    // More than two messages of descriptors.
    let (queues, inodes) = pipes(300);
    let record = || {
        let mut giving = Giving::default();
        let queues = queues.iter().map(|queue| giving.fd(queue).unwrap()).collect();
        let tap = Tap { name: "tap0".into(), queues, ..Tap::default() };
        let card = Card { port: Part::new(&tap).unwrap(), ..Card::default() };
        giving.record(&Device { own: Part::new(&card).unwrap(), ..Device::default() }).unwrap()
    };
    old.device(5, record(), soon()).unwrap();
    old.device(0, device(), soon()).unwrap();
    old.device(5, record(), soon()).unwrap();
    old.gone(0, soon()).unwrap();
    // It does not fit into a message.
    let frames: Vec<u8> = (0..262_144).map(|at| at as u8).collect();
    let mut giving = Giving::default();
    let card = CardFinal { settings: giving.bytes(&frames).unwrap(), ..CardFinal::default() };
    let record = giving.record(&Final { own: Part::new(&card).unwrap(), ..Final::default() }).unwrap();
    old.final_record(5, record, soon()).unwrap();
    assert!(matches!(old.offer(soon()), Decision::Taken(_)));
    let (came, taken) = new.join().unwrap();
    taken.unwrap();
    let mut came = came.into_iter();
    assert!(matches!(came.next(), Some(FromOld::Plan(_))));
    for expected in [5, 0, 5] {
        let Some(FromOld::Device { number, record }) = came.next() else { panic!() };
        assert_eq!(number, expected);
        let (device, mut given) = record.read::<Device>().unwrap();
        if number == 5 {
            let tap = device.own.read::<Card>().unwrap().port.read::<Tap>().unwrap();
            let queues = tap.queues.into_iter().map(|queue| inode(&given.fd(queue).unwrap()));
            assert!(queues.eq(inodes.iter().copied()));
        }
    }
    assert!(matches!(came.next(), Some(FromOld::Gone { number: 0 })));
    let Some(FromOld::Final { number: 5, record }) = came.next() else { panic!() };
    let (state, given) = record.read::<Final>().unwrap();
    assert_eq!(given.bytes(state.own.read::<CardFinal>().unwrap().settings).unwrap(), frames);
    assert!(came.next().is_none());
}

#[test]
fn records_of_each_size_pass() {
    let (old, new) = pair();
    let new = thread::spawn(|| take_all(new));
    let mut old = OldEnd::new(old);
    old.plan(200, plan(), soon()).unwrap();
    let devices: Vec<Device> = (0..200).map(|seed| Maker::new(seed).device()).collect();
    for seed in 0..200 {
        let mut maker = Maker::new(seed);
        let device = maker.device();
        old.device(seed as u32, maker.record(&device), soon()).unwrap();
    }
    old.refuse("that is enough");
    let (came, refused) = new.join().unwrap();
    assert!(matches!(refused, Err(Error::Refused(why)) if why == "that is enough"));
    let came = came.into_iter().filter_map(|message| match message {
        FromOld::Device { record, .. } => Some(record.read::<Device>().unwrap().0),
        _ => None,
    });
    assert!(came.eq(devices));
}

#[test]
fn a_refusal_reaches_the_old_process() {
    let (old, new) = pair();
    let mut old = OldEnd::new(old);
    let new = thread::spawn(|| {
        let mut new = NewEnd::new(new);
        new.receive(soon()).unwrap();
        new.refuse("its port is not known\n");
    });
    let refused = old.plan(1, plan(), soon()).unwrap_err();
    assert_eq!(refused.to_string(), "its port is not known ");
    new.join().unwrap();
    assert!(matches!(old.device(0, device(), soon()), Err(Error::Ended)));

    // It has refused and ended before the old process sends something.
    let (old, new) = pair();
    NewEnd::new(new).refuse("no");
    let refused = OldEnd::new(old).plan(1, plan(), soon());
    assert!(matches!(refused, Err(Error::Refused(why)) if why == "no"));
}

#[test]
fn a_process_that_hangs_is_not_waited_for() {
    let (old, new) = pair();
    let mut old = OldEnd::new(old);
    assert!(matches!(old.plan(0, plan(), Instant::now() + SHORT), Err(Error::TimedOut)));
    // Its queue is full.
    let filled = (0..100_000).find_map(|_| old.gone(0, Instant::now()).err());
    assert!(matches!(filled, Some(Error::TimedOut)), "{filled:?}");
    drop(new);
    let (_old, new) = pair();
    assert!(matches!(NewEnd::new(new).receive(Instant::now() + SHORT), Err(Error::TimedOut)));
}

#[test]
fn a_late_process_does_not_take_over() {
    let (old, new) = pair();
    let mut old = OldEnd::new(old);
    let new = thread::spawn(|| {
        let mut new = NewEnd::new(new);
        new.receive(soon()).unwrap();
        new.confirm(soon()).unwrap();
        assert!(matches!(new.receive(soon()), Ok(FromOld::Last)));
        new
    });
    old.plan(0, plan(), soon()).unwrap();
    let decision = old.offer(Instant::now() + SHORT);
    assert!(matches!(decision, Decision::Kept(Error::TimedOut)), "{decision:?}");
    let late = new.join().unwrap().take(soon()).unwrap_err();
    assert_eq!(late.to_string(), "this process has not taken over in time");
}

#[test]
fn the_end_of_the_old_process_is_seen() {
    let (old, new) = pair();
    let mut old = OldEnd::new(old);
    let new = thread::spawn(|| {
        let mut new = NewEnd::new(new);
        new.receive(soon()).unwrap();
        new.confirm(soon()).unwrap();
        new.receive(soon()).unwrap();
        new.take(soon()).unwrap()
    });
    old.plan(0, plan(), soon()).unwrap();
    let Decision::Taken(handed_over) = old.offer(soon()) else { panic!() };
    let taken = new.join().unwrap();
    assert!(!taken.wait_for_end(Instant::now() + SHORT));
    drop(handed_over);
    assert!(taken.wait_for_end(soon()));
}

/// Runs the next test in a process of its own.
#[test]
fn descriptors_wait_for_room() {
    let mut command = Command::new(env::current_exe().unwrap());
    let output = command.args(["--exact", "with_little_room", "--ignored"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
#[ignore = "it changes the limits of its process"]
fn with_little_room() {
    const DEVICES: u32 = 200;
    const ROOM: u64 = 64;
    if getuid().is_root() {
        // The limit does not hold for root.
        setuid(Uid::from_raw(65534)).unwrap();
    }
    let limit = Some(ROOM);
    setrlimit(Resource::Nofile, Rlimit { current: limit, maximum: limit }).unwrap();
    // The memory of each record is a descriptor.
    let record = || {
        let mut giving = Giving::default();
        giving.bytes(b"frame").unwrap();
        giving.record(&Final::default()).unwrap()
    };
    let (old, new) = pair();
    let (go_on, may_go_on) = channel::<()>();
    let new = thread::spawn(move || {
        let mut new = NewEnd::new(new);
        for _ in 0..=DEVICES {
            new.receive(soon()).unwrap();
            new.confirm(soon()).unwrap();
        }
        may_go_on.recv().unwrap();
        for number in 0..DEVICES {
            let FromOld::Final { number: came, record } = new.receive(soon()).unwrap() else { panic!() };
            assert_eq!(came, number);
            record.read::<Final>().unwrap();
        }
        assert!(matches!(new.receive(soon()), Ok(FromOld::Last)));
        new.take(soon()).unwrap()
    });
    let mut old = OldEnd::new(old);
    old.plan(DEVICES, plan(), soon()).unwrap();
    (0..DEVICES).for_each(|number| old.device(number, device(), soon()).unwrap());
    let sent = (0..DEVICES).take_while(|number| old.final_record(*number, record(), Instant::now()).is_ok());
    let sent = sent.count() as u32;
    assert!((1..DEVICES).contains(&sent), "{sent} were sent");
    go_on.send(()).unwrap();
    (sent..DEVICES).for_each(|number| old.final_record(number, record(), soon()).unwrap());
    assert!(matches!(old.offer(soon()), Decision::Taken(_)));
    new.join().unwrap();
}

/// Sends a message as no end of this crate does.
fn send_raw(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).unwrap();
}

/// Returns a message: kind, descriptors, number, length, body.
fn message(kind: u16, fds: u16, number: u32, len: u32, body: &[u8]) -> Vec<u8> {
    let (kind, fds) = (kind.to_le_bytes(), fds.to_le_bytes());
    [&kind[..], &fds, &number.to_le_bytes(), &len.to_le_bytes(), body].concat()
}

const IN_MEMORY: u32 = u32::MAX;

#[test]
fn an_old_process_that_lies_is_refused() {
    let memory = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    let (pipes, _) = pipes(253);
    let many: Vec<_> = pipes.iter().map(AsFd::as_fd).collect();
    let text = b"{}";
    for (bytes, fds, expected) in [
        (&b""[..], &many[..0], "it has ended"),
        (b"short", &[], "too few bytes"),
        (&message(77, 0, 0, 0, b""), &[], "an unknown message"),
        (&message(1, 0, 0, 3, text), &[], "another length"),
        (&message(1, 0, 0, 32_769, &[b' '; 32_769]), &[], "too many bytes"),
        (&message(2, 0, 0, 2, text), &[], "a device out of order"),
        (&message(11, 0, 0, 0, b""), &[], "that it serves out of order"),
        (&message(1, 1, 0, 2, text), &[], "other descriptors than it says"),
        (&message(1, 0, 0, 2, text), &many[..1], "other descriptors than it says"),
        (&message(1, 129, 0, 2, text), &many[..127], "other descriptors than it says"),
        (&message(1, 128, 0, 2, text), &many[..], "a descriptor did not arrive"),
        (&message(1, 5000, 0, 2, text), &many[..128], "5000 descriptors"),
        (&message(1, 0, 0, IN_MEMORY, b""), &[], "other descriptors than it says"),
        (&message(1, 1, 0, IN_MEMORY, b""), &[memory.as_fd()], "its memory is not sealed"),
        (&message(1, 1, 0, IN_MEMORY, b""), &many[..1], "its memory is not sealed"),
    ] {
        let (old, new) = pair();
        send_raw(&old, bytes, fds);
        let error = NewEnd::new(new).receive(soon()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error} for {expected}");
    }
}

#[test]
fn the_rest_of_descriptors_has_to_be_what_was_said() {
    let (pipes, _) = pipes(200);
    let many: Vec<_> = pipes.iter().map(AsFd::as_fd).collect();
    for (more, fds, expected) in [
        (message(6, 72, 0, 0, b""), &many[..71], "other descriptors"),
        (message(6, 72, 0, 0, b""), &many[..73], "other descriptors"),
        (message(6, 72, 1, 0, b""), &many[..72], "more descriptors out of order"),
        (message(4, 72, 0, 0, b""), &many[..72], "the final state of a device out of order"),
    ] {
        let (old, new) = pair();
        send_raw(&old, &message(1, 200, 0, 2, b"{}"), &many[..128]);
        send_raw(&old, &more, fds);
        let error = NewEnd::new(new).receive(soon()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error} for {expected}");
    }
}

#[test]
fn descriptors_of_a_lie_are_closed() {
    let (old, new) = pair();
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    send_raw(&old, &message(1, 2, 0, 2, b"{}"), &[writer.as_fd()]);
    drop(writer);
    assert!(NewEnd::new(new).receive(soon()).is_err());
    assert_eq!(rustix::io::read(&reader, &mut [0; 1][..]), Ok(0));
}

#[test]
fn a_new_process_that_lies_is_refused() {
    for (bytes, expected) in [
        (message(11, 0, 0, 0, b""), "that it serves out of order"),
        (message(9, 0, 0, 0, b""), "an answer to a device out of order"),
        (message(8, 0, 7, 0, b""), "an answer to the plan out of order"),
        (message(8, 3, 0, 0, b""), "an answer to the plan out of order"),
        (b"?".to_vec(), "too few bytes"),
    ] {
        let (old, new) = pair();
        send_raw(&new, &bytes, &[]);
        let error = OldEnd::new(old).plan(0, plan(), soon()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error} for {expected}");
    }
}
