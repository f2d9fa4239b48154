//! Tests of decisions.

use super::*;
use crate::grant::Root;

const IMAGE: &str = "/srv/images/a.img";
const READ_ONLY: &str = "/srv/images/b.img";
const CHAIN: &str = "/srv/images/c.qcow2";
const ADDRESS: &str = "192.0.2.1:10809";

fn image(path: &str, writes: bool, chain: bool) -> Target {
    Target::Image { path: path.into(), writes, chain }
}

fn socket(path: &str) -> Target {
    Target::Socket { path: path.into(), mode: Some(0o660), group: Some("disk".into()) }
}

fn server(host: &str) -> Target {
    Target::Tcp { host: host.into(), port: 10809 }
}

fn passt(argument: &str) -> Target {
    Target::Passt { arguments: vec![argument.into()] }
}

fn root(directory: &str, for_calls: bool) -> Root {
    Root { directory: directory.into(), uses: vec![PathUse::Image, PathUse::Socket], for_calls }
}

fn authority(calls: Calls) -> Authority {
    Authority {
        named: vec![image("/dev/sdb", true, false), server("named"), passt("--pcap=/p")],
        control: vec![socket("/run/control")],
        roots: vec![root("/srv/images", true), root("/dev", false)],
        calls,
        libraries: vec!["rbd".into()],
    }
}

/// Returns a state with one entry for each device: 1 to 3 with images, 4 with a card.
fn state() -> State {
    let mut state = State::new(authority(Calls::Nothing));
    let named = |targets: Vec<Target>| targets.into_iter().map(Granted::named).collect::<Vec<_>>();
    let card = vec![
        Target::Capture { path: "/srv/c.pcapng".into() },
        Target::Unix { path: "/run/peer".into() },
        Target::Tap { name: "vm1".into() },
        passt("-4"),
        server("host"),
    ];
    let entries = [
        (1, vec![image(IMAGE, true, false), socket("/run/1")]),
        (2, vec![image(READ_ONLY, false, false)]),
        (3, vec![image(CHAIN, true, true)]),
        (4, card),
    ];
    for (number, targets) in entries {
        state.enter(number, named(targets)).unwrap();
    }
    state.resolved("host", 10809, &[ADDRESS.parse().unwrap()]);
    state.started(7, &Permit::of(Some(4), Within::Roots));
    state
}

fn open(path: &str, writes: bool) -> Request {
    Request::Image { path: path.into(), writes, is_direct: true }
}

/// Each request with the entry that it belongs to: `None` is the share without an entry.
fn allowed() -> Vec<(Request, Option<u64>)> {
    let path = PathBuf::from;
    let queue = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | libc::IFF_MULTI_QUEUE;
    vec![
        (Request::Enter { entry: 9, targets: vec![image("/etc/passwd", true, true)] }, None),
        (Request::Enter { entry: 1, targets: vec![image(IMAGE, true, true); 8] }, None),
        (Request::Leave { entry: 1 }, None),
        (Request::Leave { entry: 99 }, None),
        (Request::Status { path: path(IMAGE) }, Some(1)),
        (open(IMAGE, true), Some(1)),
        (open(IMAGE, false), Some(1)),
        (open(READ_ONLY, false), Some(2)),
        (open(CHAIN, true), Some(3)),
        // Backing images, which are in directories that are checked afterwards.
        (open("/srv/images/base.img", false), Some(3)),
        (open("../base.img", false), Some(3)),
        (Request::Status { path: path("/elsewhere/base.img") }, Some(3)),
        (Request::Capture { path: path("/srv/c.pcapng") }, Some(4)),
        (Request::CheckSocket { path: path("/run/1") }, Some(1)),
        (Request::Listen { path: path("/run/1"), wait_ms: 0 }, Some(1)),
        (Request::Listen { path: path("/run/control"), wait_ms: u32::MAX }, Some(0)),
        (Request::Unlink { path: path("/run/1"), device: 1, inode: 2 }, Some(1)),
        (Request::RealPath { path: path("/run/1") }, Some(1)),
        (Request::ConnectUnix { path: path("/run/peer") }, Some(4)),
        (Request::Resolve { host: "host".into(), port: 10809 }, Some(4)),
        (Request::ConnectTcp { address: ADDRESS.parse().unwrap() }, Some(4)),
        (Request::Tap { name: "vm1".into(), flags: queue }, Some(4)),
        (Request::Tap { name: "vm1".into(), flags: libc::IFF_TAP }, Some(4)),
        (Request::FindPasst {}, Some(4)),
        (Request::StartPasst { arguments: vec!["-4".into()] }, Some(4)),
        (Request::EndPasst { child: 7, wait_ms: 1 }, Some(4)),
        (Request::BlockFacts { device: 0 }, None),
        (Request::CharSubsystem { device: 0 }, None),
        (Request::Reopen { writes: true, is_direct: true }, None),
        (Request::ReadConfig {}, None),
    ]
}

fn denied() -> Vec<Request> {
    let path = PathBuf::from;
    let tap = |name: &str, flags| Request::Tap { name: name.into(), flags };
    let start = |arguments: &[&str]| Request::StartPasst {
        arguments: arguments.iter().map(ToString::to_string).collect(),
    };
    let mut denied = vec![
        Request::Enter { entry: 0, targets: vec![socket("/run/control")] },
        Request::Enter { entry: 9, targets: Vec::new() },
        Request::Enter { entry: 9, targets: vec![image(IMAGE, true, true); 9] },
        Request::Leave { entry: 0 },
        open(READ_ONLY, true),
        open("/srv/images/base.img", true),
        open("", true),
        open("/run/1", true),
        Request::Capture { path: path(IMAGE) },
        Request::Capture { path: path("/srv/c.pcapn") },
        Request::CheckSocket { path: path(IMAGE) },
        Request::Listen { path: path("/run/2"), wait_ms: 0 },
        Request::Unlink { path: path(IMAGE), device: 1, inode: 2 },
        Request::Unlink { path: path("/run/peer"), device: 1, inode: 2 },
        Request::RealPath { path: path("/run/2") },
        Request::ConnectUnix { path: path("/run/control") },
        Request::ConnectUnix { path: path("/run/1") },
        Request::Resolve { host: "host".into(), port: 10810 },
        Request::Resolve { host: "other".into(), port: 10809 },
        Request::ConnectTcp { address: "192.0.2.1:22".parse().unwrap() },
        Request::ConnectTcp { address: "192.0.2.2:10809".parse().unwrap() },
        tap("vm2", libc::IFF_TAP),
        tap("vm1", libc::IFF_TUN),
        tap("vm1", libc::IFF_TAP | libc::IFF_TUN),
        tap("vm1", libc::IFF_MULTI_QUEUE),
        tap("vm1", -1),
        start(&[]),
        start(&["-4", "-4"]),
        start(&["-6"]),
        Request::EndPasst { child: 8, wait_ms: 0 },
        Request::Group { name: "disk".into() },
    ];
    for spelling in [
        "/srv/images/../images/a.img",
        "/srv//images/a.img",
        "/srv/images/./a.img",
        "/srv/images/a.img/",
        "srv/images/a.img",
    ] {
        denied.push(open(spelling, true));
        denied.push(Request::Listen { path: spelling.replace("images/a.img", "run/1").into(), wait_ms: 0 });
    }
    denied
}

#[test]
fn only_things_of_entries_can_be_asked_for() {
    let state = state();
    for (request, entry) in allowed() {
        let permit = state.decide(&request);
        assert_eq!(permit.as_ref().map(|permit| permit.entry), Ok(entry), "{request:?}");
    }
    for request in denied() {
        assert_eq!(state.decide(&request), Err(Denied::NotGranted), "{request:?}");
    }
    // Without an image that can have a chain, no file is a backing image.
    let mut state = state;
    state.leave(3);
    assert_eq!(state.decide(&open("/srv/images/base.img", false)), Err(Denied::NotGranted));
}

#[test]
fn the_rights_of_a_socket_come_from_the_grant() {
    let permit = state().decide(&Request::Listen { path: "/run/1".into(), wait_ms: 0 }).unwrap();
    assert_eq!((permit.mode, permit.group.as_deref()), (Some(0o660), Some("disk")));
}

#[test]
fn calls_name_files_below_their_roots_only() {
    let admit = |calls, target: Target| State::new(authority(calls)).admit(&target);
    let named = |target: &Target| Ok(Admission::Granted(Granted::named(target.clone())));
    let by_call = |target: &Target| Ok(Admission::Granted(Granted::by_call(target.clone())));
    for calls in [Calls::Nothing, Calls::Files, Calls::All] {
        for target in [
            image("/dev/sdb", true, false),
            image("/dev/sdb", false, false),
            server("named"),
            passt("--pcap=/p"),
        ] {
            assert_eq!(admit(calls, target.clone()), named(&target));
        }
        let library = |name: &str| Target::Library { name: name.into(), files: Vec::new() };
        assert_eq!(admit(calls, library("rbd")), named(&library("rbd")));
        assert_eq!(admit(calls, library("xdp")), Err(NotEntered::Library("xdp".into())));
    }
    let files = [
        (image("/a", true, true), PathUse::Image),
        (socket("/a"), PathUse::Socket),
        (Target::Capture { path: "/a".into() }, PathUse::Capture),
    ];
    for (target, usage) in files {
        assert_eq!(admit(Calls::Nothing, target.clone()), Err(NotEntered::NotNamed));
        for calls in [Calls::Files, Calls::All] {
            assert_eq!(admit(calls, target.clone()), Ok(Admission::IfBelow(usage, "/a".into())));
        }
    }
    // The images themselves have to be below a root.
    assert_eq!(admit(Calls::Nothing, Target::Backing), Err(NotEntered::NotNamed));
    for calls in [Calls::Files, Calls::All] {
        assert_eq!(admit(calls, Target::Backing), by_call(&Target::Backing));
    }
    // Others that listen trust all that may connect, so these have to be below a root too.
    let unix = Target::Unix { path: "/a".into() };
    for calls in [Calls::Nothing, Calls::Files] {
        assert_eq!(admit(calls, unix.clone()), Err(NotEntered::NotNamed));
    }
    assert_eq!(admit(Calls::All, unix), Ok(Admission::IfBelow(PathUse::Socket, "/a".into())));
    for target in [server("other"), Target::Tap { name: "vm2".into() }, passt("-4")] {
        assert_eq!(admit(Calls::Nothing, target.clone()), Err(NotEntered::NotNamed));
        assert_eq!(admit(Calls::Files, target.clone()), Err(NotEntered::NotNamed));
        assert_eq!(admit(Calls::All, target.clone()), by_call(&target));
    }
    assert_eq!(admit(Calls::All, passt("--pcap=/q")), Err(NotEntered::PasstOption));
}

#[test]
fn the_last_valid_file_names_things() {
    let mut state = State::new(authority(Calls::Nothing));
    let target = server("of-file");
    assert_eq!(state.admit(&target), Err(NotEntered::NotNamed));
    state.set_file(vec![target.clone(), socket("/run/of-file")]);
    assert!(matches!(state.admit(&target), Ok(Admission::Granted(_))));
    // Paths of its sockets are compared before they are entered.
    assert_eq!(state.decide(&Request::RealPath { path: "/run/of-file".into() }).unwrap().entry, None);
    state.set_file(Vec::new());
    assert_eq!(state.admit(&target), Err(NotEntered::NotNamed));
}

#[test]
fn files_are_in_roots_or_beside_their_images() {
    let mut state = state();
    let is_within =
        |state: &State, within: &Within, path: &str| state.is_within(within, PathUse::Image, path.as_ref());
    assert!(is_within(&state, &Within::Roots, IMAGE) && is_within(&state, &Within::CallRoots, IMAGE));
    assert!(
        is_within(&state, &Within::Roots, "/dev/sdb") && !is_within(&state, &Within::CallRoots, "/dev/sdb")
    );
    for outside in ["/srv/images2/a", "/srv", "/", "/etc/passwd", "socket:[1]"] {
        assert!(!is_within(&state, &Within::Roots, outside), "{outside}");
    }
    assert!(!state.is_within(&Within::Roots, PathUse::Capture, IMAGE.as_ref()));
    let base = open("/pool/base.img", false);
    let of_chain = state.decide(&open(CHAIN, true)).unwrap();
    let beside = |state: &State| state.decide(&base).unwrap().within;
    assert_eq!(beside(&state), Within::Beside(Vec::new()));
    for (real, is_beside) in [("/pool/c.qcow2", true), ("/dev/dm-1", false), ("/c.qcow2", false)] {
        state.found(&of_chain, CHAIN.as_ref(), real.as_ref());
        let within = beside(&state);
        assert_eq!(is_within(&state, &within, "/pool/base.img"), is_beside, "{real}");
        assert!(is_within(&state, &within, IMAGE) && !is_within(&state, &within, "/dev/sdb"));
    }
    // An image of another entry, which has no chain.
    state.found(&of_chain, IMAGE.as_ref(), "/etc/a".as_ref());
    assert_eq!(beside(&state), Within::Beside(Vec::new()));
}

#[test]
fn each_entry_has_its_share() {
    let mut state = state();
    let (first, other) = (open(IMAGE, true), open(READ_ONLY, false));
    let begin =
        |state: &mut State, request: &Request| state.decide(request).inspect(|permit| state.begin(permit));
    let permits: Vec<_> = (0..SHARE).map(|_| begin(&mut state, &first).unwrap()).collect();
    assert_eq!(begin(&mut state, &first), Err(Denied::Busy));
    // Neither another entry nor its other requests gain a share by leaving.
    let others = begin(&mut state, &other).unwrap();
    state.leave(1);
    assert_eq!(begin(&mut state, &first), Err(Denied::NotGranted));
    state.enter(1, vec![Granted::named(image(IMAGE, true, false))]).unwrap();
    assert_eq!(begin(&mut state, &first), Err(Denied::Busy));
    permits.iter().for_each(|permit| state.finish(permit));
    state.finish(&others);
    assert_eq!((state.beyond, state.common), (0, 0));
    begin(&mut state, &first).unwrap();
    let facts = Request::BlockFacts { device: 0 };
    let common: Vec<_> = (0..COMMON_MAX).map(|_| begin(&mut state, &facts).unwrap()).collect();
    assert_eq!(begin(&mut state, &facts), Err(Denied::Busy));
    assert!(begin(&mut state, &other).is_ok());
    common.iter().for_each(|permit| state.finish(permit));
    assert_eq!(state.common, 0);
}

#[test]
fn entries_have_a_bound_and_one_request_each() {
    let mut state = State::new(authority(Calls::Nothing));
    let grants = |number: u64| vec![Granted::named(image(&format!("/srv/images/{number}"), false, false))];
    let open = |number: u64| open(&format!("/srv/images/{number}"), false);
    let room = ENTRIES_MAX as u64 - 1;
    for number in 1..=room {
        state.enter(number, grants(number)).unwrap();
    }
    assert_eq!(state.enter(room + 1, grants(room + 1)), Err(Denied::Busy));
    state.enter(room, grants(room)).unwrap();
    // All hang that may.
    let mut began = 0;
    for number in 1..room {
        while let Ok(permit) = state.decide(&open(number)) {
            state.begin(&permit);
            began += 1;
        }
    }
    assert_eq!(began, BEYOND_MAX + room as usize - 1);
    assert!(state.decide(&open(room)).is_ok());
    // An entry that left with a request keeps its place until the request is over.
    let permit = Permit::of(Some(1), Within::Roots);
    state.leave(1);
    assert_eq!(state.enter(room + 1, grants(room + 1)), Err(Denied::Busy));
    (0..SHARE).for_each(|_| state.finish(&permit));
    state.enter(room + 1, grants(room + 1)).unwrap();
}

#[test]
fn addresses_last_as_long_as_their_server_is_entered() {
    let mut state = state();
    let connect = |address: &str| Request::ConnectTcp { address: address.parse().unwrap() };
    let other = "192.0.2.9:10809";
    state.enter(5, vec![Granted::named(server("host"))]).unwrap();
    state.resolved("host", 10809, &[other.parse().unwrap()]);
    assert_eq!(state.decide(&connect(ADDRESS)), Err(Denied::NotGranted));
    state.leave(4);
    assert_eq!(state.decide(&connect(other)).unwrap().entry, Some(5));
    state.enter(5, vec![Granted::named(server("host")), Granted::named(passt("-4"))]).unwrap();
    assert!(state.decide(&connect(other)).is_ok());
    state.enter(5, vec![Granted::named(server("host2"))]).unwrap();
    assert_eq!(state.decide(&connect(other)), Err(Denied::NotGranted));
}
