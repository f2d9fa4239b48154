//! Tests of the messages.

use std::fmt::Debug;

use proptest::prelude::*;

use super::*;

/// Returns a request of each code, with odd values.
fn requests() -> Vec<Request> {
    let path = || PathBuf::from(OsString::from_vec(b"/a/\xff".to_vec()));
    let addresses = ["127.0.0.1:10809", "[fe80::1%3]:1"].map(|address| address.parse().unwrap());
    let targets = vec![
        Target::Image { path: path(), writes: true, chain: false },
        Target::Capture { path: path() },
        Target::Socket { path: path(), mode: Some(0o660), group: None },
        Target::Socket { path: path(), mode: None, group: Some("disk".into()) },
        Target::Unix { path: path() },
        Target::Tcp { host: "host".into(), port: 10809 },
        Target::Tap { name: "vm1".into() },
        Target::Passt { arguments: vec!["-4".into(), String::new()] },
        Target::Library { name: "rbd".into(), files: vec!["/etc/ceph/ceph.conf".into()] },
        Target::Backing,
    ];
    vec![
        Request::Enter { entry: 1, targets },
        Request::Leave { entry: u64::MAX },
        Request::Status { path: path() },
        Request::Image { path: path(), writes: true, is_direct: false },
        Request::Capture { path: PathBuf::new() },
        Request::Reopen { writes: false, is_direct: true },
        Request::CheckSocket { path: path() },
        Request::Listen { path: path(), wait_ms: 5000 },
        Request::Unlink { path: path(), device: 1, inode: 2 },
        Request::RealPath { path: path() },
        Request::ConnectUnix { path: path() },
        Request::Resolve { host: "host".into(), port: 1 },
        Request::ConnectTcp { address: addresses[0] },
        Request::ConnectTcp { address: addresses[1] },
        Request::Tap { name: "vm1".into(), flags: -1 },
        Request::FindPasst {},
        Request::StartPasst { arguments: Vec::new() },
        Request::EndPasst { child: 7, wait_ms: 2000 },
        Request::BlockFacts { device: 0x800 },
        Request::CharSubsystem { device: 0x103 },
        Request::ReadConfig {},
        Request::Group { name: "disk".into() },
    ]
}

fn replies() -> Vec<Reply> {
    let status = FileStatus { device: 1, inode: 2, special: 3, mode: 4, size: 5 };
    let mut facts = BlockFacts { is_protected: true, ..BlockFacts::default() };
    facts.set_numbers(|name, _| (name == "discard_max_bytes").then_some(168));
    let text = String::from;
    vec![
        Reply::Done {},
        Reply::Errno { errno: 13 },
        Reply::Failed { text: text("no such host") },
        Reply::Explained { errno: 2, text: text("there is no directory /a") },
        Reply::Refused { grant: 1, reason: 2, text: text("rbd") },
        Reply::Outside { grant: 0, path: "/b".into() },
        Reply::Socket { option: 1, problem: 2, number: 3, text: text("a") },
        Reply::Tap { step: 1, errno: 16 },
        Reply::Status { status },
        Reply::Opened { alignment: Alignment::Unknown },
        Reply::Opened { alignment: Alignment::Impossible },
        Reply::Opened { alignment: Alignment::Known { memory: 4, offset: 512 } },
        Reply::Listening { device: 1, inode: 2, mode: 0o660, uid: 3, gid: 4, was_locked: true },
        Reply::Path { path: "/c".into() },
        Reply::Addresses { addresses: vec!["[::1]:1".parse().unwrap(), "1.2.3.4:5".parse().unwrap()] },
        Reply::Found { is_found: true },
        Reply::Started { child: 1, pid: 2 },
        Reply::Ended { status: Some(-1) },
        Reply::Ended { status: None },
        Reply::Block { facts },
        Reply::Text { text: text("dax") },
        Reply::Group { id: 6 },
    ]
}

/// Writes and parses each message, and finds that no part of it is one.
fn round_trip<B: Field + PartialEq + Debug>(bodies: Vec<B>) {
    for (id, body) in (7..).zip(bodies) {
        let bytes = write(id, &body, REQUEST_BYTES_MAX).unwrap();
        for len in 0..bytes.len() {
            assert_eq!(parse::<B>(&bytes[..len]), None, "{len} bytes of {body:?}");
        }
        assert_eq!(parse::<B>(&[&bytes[..], &[0]].concat()), None, "{body:?} and a byte more");
        assert_eq!(parse::<B>(&bytes), Some((id, body)));
    }
}

#[test]
fn messages_are_parsed_as_they_are_written() {
    round_trip(requests());
    round_trip(replies());
}

#[test]
fn texts_have_no_nul_and_messages_an_end() {
    let host = |host: &str| write(0, &Request::Resolve { host: host.into(), port: 1 }, REQUEST_BYTES_MAX);
    assert_eq!(host("a\0b"), Err(Errno::INVAL));
    let mut bytes = host("ab").unwrap();
    assert_eq!(bytes.pop(), Some(0));
    // The last letter.
    *bytes.iter_mut().rev().nth(1).unwrap() = 0;
    bytes.push(0);
    assert_eq!(parse::<Request>(&bytes), None);
    let room = REQUEST_BYTES_MAX - 13;
    assert_eq!(host(&"a".repeat(room)).unwrap().len(), REQUEST_BYTES_MAX);
    for len in [room + 1, 1 << 16, (1 << 16) + 1] {
        assert_eq!(host(&"a".repeat(len)), Err(Errno::NAMETOOLONG), "{len}");
    }
}

proptest! {
    /// Nothing is parsed that would be written in another way.
    #[test]
    fn a_message_has_one_form(code in 0..24_u8, bytes in proptest::collection::vec(0..8_u8, 0..40)) {
        let message = [&[0; 8][..], &[code], &bytes].concat();
        if let Some((id, request)) = parse::<Request>(&message) {
            prop_assert_eq!(write(id, &request, REQUEST_BYTES_MAX).unwrap(), message.clone());
        }
        if let Some((id, reply)) = parse::<Reply>(&message) {
            prop_assert_eq!(write(id, &reply, REPLY_BYTES_MAX).unwrap(), message);
        }
    }
}
