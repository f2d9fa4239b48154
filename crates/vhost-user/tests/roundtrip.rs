//! Tests that every message and every reply of both ends arrives unchanged over a real socket.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test may")]

use kickless_spec::features::Features;
use kickless_spec::vhost_user::{
    BackendRequest, FrontendRequest, IotlbAccess, IotlbKind, ProtocolFeatures, TransferDirection,
    TransferPhase,
};
use kickless_vhost_user::{
    BackendMessage, Config, DeviceState, DeviceStateReply, Encoded, Expects, FrontendMessage as Message,
    FrontendReply, Inflight, Iotlb, LogBase, MemoryRegion, MessageError, Refusal, Reply, ReplyTo,
    RequestMessage, Requester, Responder, VringAddr, VringFd, VringState, Wait,
};
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, fstat, memfd_create};
use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

const WAIT: Wait<'static> = Wait::FOREVER;

fn fd() -> OwnedFd {
    memfd_create("passed", MemfdFlags::CLOEXEC).unwrap()
}

/// Returns the content to compare: bytes, and the identity of the file of each descriptor.
fn content(encoded: &Encoded<'_>) -> (Vec<u8>, Vec<u64>) {
    let inodes = encoded.fds.iter().map(|fd| fstat(fd.as_fd()).unwrap().st_ino).collect();
    (encoded.payload.clone(), inodes)
}

/// Sends `message`, compares it with the received one, and returns that.
fn pass<M: RequestMessage>(message: &M, need_reply: bool) -> M {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (mut asks, mut answers) = (Requester::<M>::new(ours), Responder::<M>::new(theirs));
    let expects = asks.send(message, need_reply, &WAIT).unwrap();
    let received = answers.recv(&WAIT).unwrap().unwrap_or_else(|| panic!("{message:?} did not arrive"));
    assert_eq!(content(&received.message.encode()), content(&message.encode()), "{message:?}");
    assert_eq!(M::number(received.message.code()), M::number(message.code()));
    assert_eq!((received.needs_reply(), received.expects()), (need_reply, expects), "{message:?}");
    drop(asks);
    assert!(answers.recv(&WAIT).unwrap().is_none(), "nothing but {message:?} was sent");
    received.message
}

/// Sends `request`, replies with `reply`, and compares the received reply.
fn answer<M: RequestMessage>(request: &M, reply: &M::Reply) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (mut asks, mut answers) = (Requester::<M>::new(ours), Responder::<M>::new(theirs));
    asks.send(request, true, &WAIT).unwrap();
    let header = answers.recv(&WAIT).unwrap().unwrap_or_else(|| panic!("{request:?} did not arrive")).header;
    answers.reply(&header, reply, &WAIT).unwrap();
    let back = asks.recv_reply(request.code(), &WAIT).unwrap();
    assert_eq!(content(&back.encode()), content(&reply.encode()), "{request:?} -> {reply:?}");
}

fn region(seed: u64) -> MemoryRegion {
    let mix = |n: u64| seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(n as u32);
    MemoryRegion { guest_addr: mix(1), size: mix(2), user_addr: mix(3), mmap_offset: mix(4) }
}

fn iotlb(seed: u64) -> Iotlb {
    let kind = IotlbKind::from_raw((seed % 4) as u8 + 1).unwrap();
    let access = match kind {
        // An invalidation has no permissions.
        IotlbKind::Invalidate => IotlbAccess::empty(),
        _ => IotlbAccess::from_bits_truncate((seed / 4) as u8),
    };
    Iotlb { kind, iova: seed, size: !seed, user_addr: seed << 7, access }
}

fn front_end_messages(n: u64, regions: u64, len: usize) -> Vec<Message> {
    let index = (n % 256) as u32;
    let state = VringState { index, num: (n >> 8) as u32 };
    let vring_fd = |with: bool| VringFd { index: index as u8, fd: with.then(fd) };
    let config = Config { offset: (n % 200) as u32, data: vec![n as u8; len], ..Config::default() };
    let inflight =
        Inflight { mmap_size: n | 1, mmap_offset: !n, num_queues: n as u16, queue_size: !n as u16 };
    let table = (0..regions).map(|i| (region(n ^ i), fd())).collect();
    let save = DeviceState { direction: TransferDirection::Save, phase: TransferPhase::Stopped };
    vec![
        Message::GetFeatures,
        Message::SetFeatures(Features::from_bits_retain(n)),
        Message::SetOwner,
        Message::ResetOwner,
        Message::SetMemTable(table),
        Message::SetLogBase(LogBase::Shared { mmap_size: n, mmap_offset: !n, fd: Some(fd()) }),
        Message::SetLogFd(fd()),
        Message::SetVringNum(state),
        Message::SetVringAddr(VringAddr {
            index,
            log: n & 1 == 1,
            desc_addr: n,
            used_addr: !n,
            avail_addr: n << 3,
            log_guest_addr: n >> 3,
        }),
        Message::SetVringBase(state),
        Message::GetVringBase { index },
        Message::GetVringBaseSkipDrain { index },
        Message::SetVringKick(vring_fd(true)),
        Message::SetVringKick(vring_fd(false)),
        Message::SetVringCall(vring_fd(true)),
        Message::SetVringErr(vring_fd(n & 1 == 1)),
        Message::GetProtocolFeatures,
        Message::SetProtocolFeatures(ProtocolFeatures::from_bits_retain(n)),
        Message::GetQueueNum,
        Message::SetVringEnable { index, enable: n & 2 == 2 },
        Message::SendRarp([n as u8; 6]),
        Message::NetSetMtu(n % 65536),
        Message::SetBackendReqFd(fd()),
        Message::IotlbMsg(iotlb(n)),
        Message::GetConfig(config.clone()),
        Message::SetConfig(config),
        Message::GetInflightFd(Inflight { mmap_size: 0, mmap_offset: 0, ..inflight }),
        Message::SetInflightFd(inflight, fd()),
        Message::ResetDevice,
        Message::VringKick { index },
        Message::GetMaxMemSlots,
        Message::AddMemReg(region(n), fd()),
        Message::RemMemReg(region(n)),
        Message::SetDeviceStateFd(save, fd()),
        Message::CheckDeviceState,
    ]
}

fn back_end_messages(n: u64) -> Vec<BackendMessage> {
    vec![BackendMessage::IotlbMsg(iotlb(n)), BackendMessage::ConfigChange]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn messages(n: u64, regions in 1u64..=8, len in 1usize..=256, need_reply: bool) {
        for message in front_end_messages(n, regions, len) {
            pass(&message, need_reply);
        }
        for message in back_end_messages(n) {
            pass(&message, need_reply);
        }
    }

    #[test]
    fn replies(n: u64, len in 1usize..=256) {
        let state = VringState { index: (n % 256) as u32, num: n as u16 as u32 };
        answer(&Message::GetVringBase { index: state.index }, &Reply::VringBase(state));
        answer(&Message::GetVringBaseSkipDrain { index: state.index }, &Reply::VringBase(state));
        let config = Config { data: vec![n as u8; len], ..Config::default() };
        answer(&Message::GetConfig(config.clone()), &Reply::Config(Some(config.answer(&[1, 2, 3]))));
        answer(&Message::GetConfig(config), &Reply::Config(None));
        let log = Message::SetLogBase(LogBase::Shared { mmap_size: n, mmap_offset: !n, fd: Some(fd()) });
        answer(&log, &Reply::Log { mmap_size: n, mmap_offset: !n });
        let inflight = Inflight { mmap_size: n | 1, mmap_offset: n, num_queues: 1, queue_size: 2 };
        answer(&Message::GetInflightFd(inflight), &Reply::Inflight(inflight, Some(fd())));
        let load = DeviceState { direction: TransferDirection::Load, phase: TransferPhase::Stopped };
        for reply in [
            DeviceStateReply::Accepted,
            DeviceStateReply::Instead(fd()),
            DeviceStateReply::Refused(n as u8 | 1),
        ] {
            answer(&Message::SetDeviceStateFd(load, fd()), &Reply::DeviceState(reply));
        }
        for request in [Message::GetFeatures, Message::SetOwner, Message::IotlbMsg(iotlb(n))] {
            answer(&request, &Reply::U64(n));
        }
        answer(&BackendMessage::ConfigChange, &FrontendReply::Ack(n));
    }
}

/// Checks that each request is tested above, or is not decoded and is refused.
fn all_requests_of<M: RequestMessage>(tested: &[M], codes: &[M::Code]) {
    let tested: HashSet<u32> = tested.iter().map(|message| M::number(message.code())).collect();
    for code in codes {
        let (number, request) = (M::number(*code), M::name(*code));
        let decoded = M::decode(number, &[], Vec::new());
        let is_unsupported =
            matches!(decoded, Err(MessageError::Unsupported { request: name }) if name == request);
        assert_ne!(tested.contains(&number), is_unsupported, "{request}");
    }
}

#[test]
fn all_requests_are_tested() {
    all_requests_of(&front_end_messages(1, 1, 1), FrontendRequest::ALL);
    all_requests_of(&back_end_messages(1), BackendRequest::ALL);
}

/// A request of a newer front-end, or of one for another kind of device, is answered as it expects.
#[test]
fn requests_that_are_not_decoded_are_refused() {
    use FrontendRequest as Code;
    let of = |code, needs_reply| match Message::refusal(Some(code), needs_reply) {
        Refusal::Reply(reply) => format!("{:?}", content(&reply.encode()).0),
        other => format!("{other:?}"),
    };
    let one = format!("{:?}", 1u64.to_le_bytes());
    for (code, unacknowledged, acknowledged) in [
        (Code::SetStatus, "NotExpected", &*one),
        (Code::PostcopyAdvise, "[]", "[]"),
        (Code::GetSharedObject, "[]", "[]"),
        (Code::PostcopyEnd, &one, &one),
        (Code::GetStatus, "Impossible", "Impossible"),
        (Code::CreateCryptoSession, "Impossible", "Impossible"),
    ] {
        assert_eq!((&*of(code, false), &*of(code, true)), (unacknowledged, acknowledged), "{code}");
    }
}

#[test]
fn which_requests_expect_a_reply() {
    assert_eq!(Message::GetFeatures.expects(false), Expects::Reply);
    assert_eq!(Message::SetFeatures(Features::empty()).expects(false), Expects::Nothing);
    assert_eq!(Message::SetFeatures(Features::empty()).expects(true), Expects::Ack);
    assert!(Reply::U64(0).answers(FrontendRequest::GetFeatures));
    assert!(Reply::U64(0).answers(FrontendRequest::SetLogBase));
    assert!(!Reply::U64(0).answers(FrontendRequest::GetVringBase));
}
