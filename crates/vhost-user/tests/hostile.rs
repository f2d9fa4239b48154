//! Tests of peers that send rubbish, too little, too much, or nothing.
#![expect(clippy::unwrap_used, reason = "a test may")]

use kickless_spec::features::Features;
use kickless_spec::vhost_user::{FrontendRequest as Code, IotlbAccess, IotlbKind};
use kickless_vhost_user::{
    AfterRefusal, Backend, BackendRequester, Channel, Error, Frontend, FrontendMessage as Message,
    FrontendResponder, RequestMessage, Wait,
};
use proptest::prelude::*;
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Makes the tests of this file run one at a time, because they count the file descriptors of the whole
/// process.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let header = [request, flags, payload.len() as u32].map(u32::to_le_bytes).concat();
    [header, payload.to_vec()].concat()
}

fn send(socket: &UnixStream, bytes: &[u8], fds: usize) {
    let files: Vec<OwnedFd> = (0..fds).map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap()).collect();
    let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if fds > 0 {
        assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
    }
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
    assert_eq!(sent, bytes.len());
}

/// Returns a back-end's error for one message. Checks that the back-end has closed the message's file
/// descriptors.
fn verdict(bytes: &[u8], fds: usize) -> Error {
    let (theirs, ours) = UnixStream::pair().unwrap();
    let mut backend = Backend::new(ours);
    let before = open_fds();
    send(&theirs, bytes, fds);
    let error = backend.recv(&Wait::never()).map(|m| m.is_some()).unwrap_err();
    assert_eq!(open_fds(), before, "descriptors of {error} are still open");
    error
}

#[test]
fn each_wrong_message_has_its_error() {
    let _alone = alone();
    let short = message(9, 1, &[0; 12]);
    let cases: [(&[u8], usize, &str, bool); 8] = [
        (&short, 0, "SET_VRING_ADDR: payload is 12 bytes, expected 40", false),
        (&message(1, 1, &[0; 8]), 0, "GET_FEATURES: payload is 8 bytes, expected 0", false),
        (&message(777, 1, &[]), 0, "unknown request 777", false),
        (&message(12, 1, &[0; 8]), 2, "SET_VRING_KICK: 2 file descriptors, expected 1", false),
        (&message(2, 1, &[0; 8]), 1, "SET_FEATURES: 1 file descriptors, expected 0", false),
        (&message(1, 2, &[]), 0, "request 1: protocol version 2, expected 1", true),
        (&message(1, 1 | 4, &[]), 0, "GET_FEATURES: flags are 0x5, expected a request", true),
        (
            &message(2, 1, &[0; 8]),
            9,
            "more than 8 file descriptors with one message, or none left in this process",
            true,
        ),
    ];
    for (bytes, fds, text, fatal) in cases {
        let error = verdict(bytes, fds);
        assert_eq!((error.to_string().as_str(), error.is_fatal()), (text, fatal));
    }
    let huge = [1u32, 1, u32::MAX].map(u32::to_le_bytes).concat();
    let error = verdict(&huge, 0);
    assert!(
        error.is_fatal() && error.to_string().contains("payload of 4294967295 bytes announced"),
        "{error}"
    );
}

#[test]
fn a_memory_table_needs_a_file_for_each_region() {
    let _alone = alone();
    let table = |count: u32| {
        let head = [count, 0].map(u32::to_le_bytes).concat();
        message(5, 1, &[head, vec![0; 32 * count as usize]].concat())
    };
    assert_eq!(verdict(&table(3), 2).to_string(), "SET_MEM_TABLE: 3 regions but 2 file descriptors");
    assert!(!verdict(&table(9), 8).is_fatal());
}

/// QEMU does not set the permissions of an invalidation. A refused one would leave a translation that the
/// guest has taken back.
#[test]
fn an_invalidation_has_no_permissions() {
    let _alone = alone();
    let bytes = |kind: u8, perm: u8| {
        let addresses = [0x1000u64, 0x2000, 0].map(u64::to_le_bytes).concat();
        message(22, 1, &[addresses, vec![perm, kind, 0, 0, 0, 0, 0, 0]].concat())
    };
    for perm in 0..=u8::MAX {
        let (mut theirs, ours) = UnixStream::pair().unwrap();
        theirs.write_all(&bytes(3, perm)).unwrap();
        let Message::IotlbMsg(got) = Backend::new(ours).recv(&Wait::never()).unwrap().unwrap().message else {
            unreachable!()
        };
        let expected = (IotlbKind::Invalidate, 0x1000, 0x2000, IotlbAccess::empty());
        assert_eq!((got.kind, got.iova, got.size, got.access), expected, "{perm}");
    }
    for kind in [1, 2, 4] {
        let error = verdict(&bytes(kind, 4), 0);
        assert_eq!(error.to_string(), "IOTLB_MSG: permissions is 0x4, expected 0 to 3");
        assert!(!error.is_fatal());
    }
}

#[test]
fn a_rejected_message_leaves_the_stream_in_step() {
    let _alone = alone();
    let (mut theirs, ours) = UnixStream::pair().unwrap();
    let mut backend = Backend::new(ours);
    theirs.write_all(&message(9, 1 | 8, &[0; 3])).unwrap();
    theirs.write_all(&message(3, 1, &[])).unwrap();
    let Err(Error::Rejected { header, .. }) = backend.recv(&Wait::FOREVER) else { unreachable!() };
    assert_eq!(backend.refuse(&header, &Wait::FOREVER).unwrap(), AfterRefusal::Continue);
    let next = backend.recv(&Wait::FOREVER).unwrap().unwrap();
    assert!(matches!(next.message, Message::SetOwner));
    let mut frontend = Frontend::new(theirs);
    let code = Message::code_from(9).unwrap();
    let refused = frontend.recv_reply(code, &Wait::FOREVER).unwrap();
    assert!(matches!(refused, kickless_vhost_user::Reply::U64(1)));
}

#[test]
fn the_stream_may_end_at_any_byte() {
    let _alone = alone();
    let whole = message(9, 1, &[0; 40]);
    for len in 0..whole.len() {
        let (mut theirs, ours) = UnixStream::pair().unwrap();
        theirs.write_all(&whole[..len]).unwrap();
        drop(theirs);
        match Backend::new(ours).recv(&Wait::FOREVER) {
            Ok(None) => assert_eq!(len, 0),
            Err(Error::ClosedMidMessage { received }) => assert_eq!(received, len),
            other => unreachable!("{len}: {other:?}"),
        }
    }
}

#[test]
fn a_stalled_peer_can_continue_later() {
    let _alone = alone();
    let (mut theirs, ours) = UnixStream::pair().unwrap();
    let mut backend = Backend::new(ours);
    let whole = message(2, 1, &0x30u64.to_le_bytes());
    theirs.write_all(&whole[..13]).unwrap();
    let stop = eventfd(1, EventfdFlags::CLOEXEC).unwrap();
    assert!(matches!(backend.recv(&Wait::until(stop.as_fd())), Err(Error::Interrupted)));
    let soon = Wait::FOREVER.at_most(Duration::from_millis(5));
    assert!(matches!(backend.recv(&soon), Err(Error::Interrupted)));
    theirs.write_all(&whole[13..]).unwrap();
    let received = backend.recv(&Wait::FOREVER).unwrap().unwrap();
    let Message::SetFeatures(features) = received.message else { unreachable!() };
    assert_eq!(features, Features::from_bits_retain(0x30));
}

#[test]
fn a_peer_that_does_not_read_does_not_block_us() {
    let _alone = alone();
    let (_theirs, ours) = UnixStream::pair().unwrap();
    let mut frontend = Frontend::new(ours);
    // The socket becomes full at some point, between two messages or within one.
    let error = loop {
        if let Err(error) = frontend.send(&Message::SetFeatures(Features::empty()), false, &Wait::never()) {
            break error;
        }
    };
    assert!(matches!(error, Error::Interrupted | Error::SendInterrupted { .. }), "{error}");
}

/// Makes an end of a connection. Returns a function that receives once and says whether there may be more.
type End = fn(UnixStream) -> Box<dyn FnMut() -> bool>;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn any_stream_ends_and_leaks_nothing(
        pieces in prop::collection::vec(
            (prop_oneof![
                prop::collection::vec(any::<u8>(), 1..80),
                (0u32..48, prop_oneof![Just(1u32), Just(9), Just(5), any::<u32>()],
                    prop::collection::vec(any::<u8>(), 0..80))
                    .prop_map(|(request, flags, payload)| message(request, flags, &payload)),
            ], 0usize..10),
            1..8,
        ),
        cut in 1usize..64,
    ) {
        // Everything is sent before anything is read. The kernel's overhead for each part counts against the
        // socket's buffer.
        let cut = cut.max(pieces.iter().map(|(bytes, _)| bytes.len()).sum::<usize>() / 100);
        let _alone = alone();
        let before = open_fds();
        {
            let ends: [End; 4] = [
                |s| { let mut end = Backend::new(s); Box::new(move || goes_on(end.recv(&Wait::FOREVER).map(|m| m.is_some()))) },
                |s| { let mut end = FrontendResponder::new(s); Box::new(move || goes_on(end.recv(&Wait::FOREVER).map(|m| m.is_some()))) },
                |s| {
                    let mut end = Frontend::new(s);
                    let mut request = 0;
                    Box::new(move || {
                        request = request % 44 + 1;
                        let Some(code) = Message::code_from(request) else { return true };
                        goes_on(end.recv_reply(code, &Wait::FOREVER).map(|_| true))
                    })
                },
                |s| {
                    let mut end = BackendRequester::new(s);
                    let mut request = 0;
                    Box::new(move || {
                        request = request % 10 + 1;
                        let Some(code) = kickless_vhost_user::BackendMessage::code_from(request) else { return true };
                        goes_on(end.recv_reply(code, &Wait::FOREVER).map(|_| true))
                    })
                },
            ];
            for end in ends {
                let (theirs, ours) = UnixStream::pair().unwrap();
                for (bytes, fds) in &pieces {
                    for (n, part) in bytes.chunks(cut).enumerate() {
                        send(&theirs, part, if n == 0 { *fds } else { 0 });
                    }
                }
                drop(theirs);
                let mut step = end(ours);
                while step() {}
            }
        }
        prop_assert_eq!(open_fds(), before);
    }
}

fn goes_on(received: Result<bool, Error>) -> bool {
    match received {
        Ok(more) => more,
        Err(error) => !error.is_fatal(),
    }
}

/// A message of which one process has received a part is completed by another one, with its descriptors.
#[test]
fn half_a_message_passes_to_another_process() {
    let _alone = alone();
    let bytes = message(Message::number(Code::SetVringCall), 1, &[0; 8]);
    for len in 0..bytes.len() {
        let (theirs, ours) = UnixStream::pair().unwrap();
        let mut first = Channel::new(ours.try_clone().unwrap());
        let second = Channel::new(ours);
        let (part, rest) = bytes.split_at(len);
        if len > 0 {
            send(&theirs, part, 1);
        }
        assert!(matches!(first.recv(&Wait::never()), Err(Error::Interrupted)));
        let half = first.half_message();
        assert_eq!((half.is_some(), first.received()), (len > 0, len));
        let (received, fds) = half.map_or_else(Default::default, |half| {
            (half.bytes, half.fds.iter().map(|fd| fd.try_clone().unwrap()).collect())
        });
        assert_eq!(received, part);
        let mut second = second.with_half_message(&received, fds).unwrap();
        send(&theirs, rest, usize::from(len == 0));
        let frame = second.recv(&Wait::never()).unwrap().unwrap();
        assert_eq!((frame.payload.len(), frame.fds.len()), (8, 1), "{len}");
    }
}

#[test]
fn another_process_may_lie_about_half_a_message() {
    let _alone = alone();
    let before = open_fds();
    let half = |bytes: &[u8], fds: usize| {
        let fds = (0..fds).map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap()).collect();
        Channel::new(UnixStream::pair().unwrap().0).with_half_message(bytes, fds).map(drop)
    };
    let whole = message(Message::number(Code::SetVringCall), 1, &[0; 8]);
    assert!(half(&whole[..19], 8).is_ok() && half(&[], 0).is_ok());
    assert!(matches!(half(&whole, 1), Err(Error::NotHalf)));
    assert!(matches!(half(&[&whole[..], &[1]].concat(), 1), Err(Error::NotHalf)));
    assert!(matches!(half(&[], 1), Err(Error::NotHalf)));
    assert!(matches!(half(&whole[..19], 9), Err(Error::TooManyFds)));
    assert!(matches!(half(&message(1, 2, &[]), 0), Err(Error::Version { .. })));
    assert_eq!(open_fds(), before);
}
