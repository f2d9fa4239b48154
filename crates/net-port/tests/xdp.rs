//! Runs ports on interfaces with AF_XDP, in network namespaces.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test may")]

use kickless_net_port::{
    InvalidXdp, LinkChanges, ReceiveError, Tap, TapQueue, XDP_FRAME_LEN_MAX, XdpError, XdpLink, XdpName,
    XdpPort, XdpQueue,
};
use kickless_spec::net::Header;
use kickless_testing::{LIMIT, eventually, in_network_namespace, ip};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use std::os::fd::AsFd;

const HEADER: usize = size_of::<Header>();
/// Frames of memory for each direction.
const FRAMES: usize = 1024;

fn frame(len: usize, number: usize) -> Vec<u8> {
    let head = [&[0xff; 6][..], &[2, 0, 0, 0, 0, 9], &[0x88, 0xb5]].concat();
    head.into_iter().chain((0..).map(|n: usize| (n.wrapping_mul(7) + number) as u8)).take(len).collect()
}

fn open(text: &str, pairs: u16) -> Result<XdpPort, XdpError> {
    XdpPort::open(&text.parse().unwrap(), pairs)
}

/// Opens a port of an interface that was just in use. Another test may have forked a program meanwhile, whose
/// process has copies of all descriptors until it runs.
fn open_again(text: &str, pairs: u16) -> XdpPort {
    let mut port = None;
    eventually("the interface is free again", || match open(text, pairs) {
        Err(XdpError::InUse { .. } | XdpError::QueueInUse { .. }) => false,
        opened => {
            port = Some(opened.unwrap());
            true
        }
    });
    port.unwrap()
}

fn send(queue: &XdpQueue, frame: &[u8]) -> bool {
    let mut turn = queue.turn();
    let pushed = turn.push(frame.len(), |space| {
        space[HEADER..].copy_from_slice(frame);
        Ok::<_, ()>(frame.len())
    });
    turn.flush();
    pushed == Some(Ok(()))
}

fn wait_readable(queue: &impl AsFd) {
    let limit = Timespec::try_from(LIMIT).unwrap();
    let mut fds = [PollFd::new(queue, PollFlags::IN)];
    assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "nothing has come");
}

fn receive(queue: &XdpQueue) -> Vec<u8> {
    loop {
        if let Some(frame) = queue.turn().receive(|bytes| bytes[HEADER..].to_vec()) {
            return frame;
        }
        wait_readable(queue);
    }
}

fn receive_from_tap(queue: &mut TapQueue) -> Vec<u8> {
    let mut space = vec![0; 70_000];
    loop {
        match queue.receive_copy(&mut space) {
            Ok(len) => return space[HEADER..HEADER + len].to_vec(),
            Err(ReceiveError::Empty) => wait_readable(queue),
            Err(error) => panic!("{error}"),
        }
    }
}

/// Makes a TAP that is up.
fn tap(name: &str) -> (Tap, TapQueue) {
    let tap = Tap::open(name, 1).unwrap();
    tap.set(kickless_net_port::Offloads::empty(), |_| true);
    ip(&format!("link set {name} mtu 3800 up"));
    let queue = tap.queue(0).unwrap();
    (tap, queue)
}

fn veth() {
    ip("link add left type veth peer name right");
    for name in ["left", "right"] {
        ip(&format!("link set {name} up"));
    }
}

#[test]
fn frames_pass_in_both_directions_over_a_tap() {
    in_network_namespace(|| {
        let (_tap, mut host) = tap("tap0");
        let port = open("tap0", 1).unwrap();
        let queue = port.queue(0).unwrap();
        // More frames than there is memory for, one after the other.
        for number in 0..2 * FRAMES + 100 {
            let sent = frame([14, 60, 1514, 3800][number % 4], number);
            assert!(send(&queue, &sent), "{number}");
            assert_eq!(receive_from_tap(&mut host), sent);
            host.send_copy(&Header::default(), &sent).unwrap();
            assert_eq!(receive(&queue), sent);
        }
        assert_eq!((port.dropped(), queue.turn().link()), (0, XdpLink::Up));
    });
}

#[test]
fn frames_pass_between_the_ends_of_a_veth_pair() {
    in_network_namespace(|| {
        veth();
        let ports = ["left", "right"].map(|name| open(name, 1).unwrap());
        let [left, right] = [&ports[0], &ports[1]].map(|port| port.queue(0).unwrap());
        for number in 0..300 {
            // A veth carries frames up to its MTU.
            for (from, to) in [(&left, &right), (&right, &left)] {
                let sent = [frame(1514, number), frame(60, number + 1)];
                assert!(sent.iter().all(|frame| send(from, frame)));
                assert_eq!(sent.map(|_| receive(to)), [frame(1514, number), frame(60, number + 1)]);
            }
        }
    });
}

#[test]
fn a_turn_sends_any_number_of_frames() {
    in_network_namespace(|| {
        veth();
        let ports = ["left", "right"].map(|name| open(name, 1).unwrap());
        let [left, right] = [&ports[0], &ports[1]].map(|port| port.queue(0).unwrap());
        let mut sent = 0;
        while left.turn().has_room() {
            // A frame that its writer refuses takes no room.
            let refused = left.turn().push(100, |_| Err::<usize, _>("no"));
            assert_eq!(refused, Some(Err("no")));
            let pushed = left.turn().push(100, |space| {
                space[HEADER..HEADER + 60].copy_from_slice(&frame(60, sent));
                Ok::<_, ()>(60)
            });
            assert_eq!(pushed, Some(Ok(())));
            sent += 1;
        }
        assert_eq!(sent, FRAMES);
        assert_eq!(left.turn().push(60, |_| Ok::<_, ()>(60)), None);
        let mut came = 0;
        eventually("all frames come", || {
            left.turn().flush();
            while let Some(bytes) = right.turn().receive(|bytes| bytes[HEADER..].to_vec()) {
                assert_eq!(bytes, frame(60, came));
                came += 1;
            }
            came == sent
        });
        assert!(left.turn().has_room() && !left.turn().is_waiting());
        assert_eq!(left.turn().push(XDP_FRAME_LEN_MAX + 1, |_| Ok::<_, ()>(60)), None);
    });
}

#[test]
fn a_card_that_takes_nothing_costs_frames_only() {
    in_network_namespace(|| {
        let (_tap, host) = tap("tap0");
        let mut host = host;
        let port = open("tap0", 1).unwrap();
        let queue = port.queue(0).unwrap();
        for number in 0..FRAMES + 50 {
            host.send_copy(&Header::default(), &frame(60, number)).unwrap();
        }
        eventually("frames are dropped", || {
            // Reading the counters waits for no turn.
            let _turn = queue.turn();
            port.dropped() == 50
        });
        assert_eq!(receive(&queue), frame(60, 0));
        assert_eq!(queue.turn().discard(), FRAMES as u64 - 1);
        host.send_copy(&Header::default(), &frame(60, 7)).unwrap();
        assert_eq!(receive(&queue), frame(60, 7));
    });
}

#[test]
fn an_interface_that_is_down_or_gone_is_found_out() {
    in_network_namespace(|| {
        veth();
        let port = open("left", 1).unwrap();
        let queue = port.queue(0).unwrap();
        // There is nothing to send.
        assert!(!queue.turn().flush().has_moved);
        ip("link set left down");
        queue.turn().flush();
        assert_eq!(queue.turn().link(), XdpLink::Down);
        ip("link set left up");
        queue.turn().flush();
        assert_eq!(queue.turn().link(), XdpLink::Up);
        let changes = LinkChanges::open().unwrap();
        ip("link set right down");
        wait_readable(&changes);
        changes.clear();
        assert_eq!(poll(&mut [PollFd::new(&changes, PollFlags::IN)], Some(&Timespec::default())), Ok(0));
        assert!(!port.was_lost());
        ip("link del left");
        wait_readable(&changes);
        eventually("the interface is gone", || port.was_lost());
        assert_eq!(queue.turn().link(), XdpLink::Up, "nothing was sent");
        queue.turn().flush();
        assert_eq!(queue.turn().link(), XdpLink::Gone);
        assert_eq!(queue.turn().discard(), 0);
        assert_eq!(port.dropped(), 0);
    });
}

#[test]
fn queues_beside_those_of_the_card_stay_with_the_host() {
    in_network_namespace(|| {
        ip("link add left numrxqueues 3 numtxqueues 3 type veth peer name right numrxqueues 3 numtxqueues 3");
        ip("link set left up");
        ip("link set right up");
        assert!(open("left,queue=2", 1).unwrap().queue(1).is_err());
        let port = open_again("left,queue=1", 2);
        assert!(port.queue(1).is_ok());
        let error = open("right,queue=1", 3).unwrap_err();
        assert!(matches!(error, XdpError::NoQueue { queue: 3, .. }), "{error}");
    });
}

/// The kernel binds a socket to a queue that cannot send.
#[test]
fn a_queue_that_only_receives_is_refused() {
    in_network_namespace(|| {
        ip("link add left numrxqueues 3 numtxqueues 1 type veth peer name right numrxqueues 1 numtxqueues 3");
        let error = open("left,queue=2", 1).unwrap_err();
        assert!(matches!(error, XdpError::NoQueue { queue: 2, .. }), "{error}");
        drop(open_again("left", 1));
    });
}

/// A bridge has no driver that runs the program.
#[test]
fn an_interface_without_a_driver_for_xdp_has_the_program_in_the_network_stack() {
    in_network_namespace(|| {
        ip("link add br0 type bridge");
        veth();
        for (name, shown) in [("br0", " xdpgeneric "), ("left", " xdp ")] {
            ip(&format!("link set {name} up"));
            let _port = open(name, 1).unwrap();
            let output =
                std::process::Command::new("ip").args(["link", "show", "dev", name]).output().unwrap();
            let lines = String::from_utf8(output.stdout).unwrap();
            assert!(lines.contains(shown), "{lines}");
        }
    });
}

#[test]
fn an_interface_without_a_carrier_is_down() {
    in_network_namespace(|| {
        veth();
        let port = open("left", 1).unwrap();
        let queue = port.queue(0).unwrap();
        ip("link set right down");
        let mut dropped = 0;
        for number in 0..100 {
            assert!(
                queue.turn().push(60, |space| {
                    space[HEADER..].copy_from_slice(&frame(60, number));
                    Ok::<_, ()>(60)
                }) == Some(Ok(()))
            );
            dropped += queue.turn().flush().dropped;
            if queue.turn().link() == XdpLink::Down {
                break;
            }
        }
        assert_eq!((queue.turn().link(), dropped), (XdpLink::Down, 8));
        ip("link set right up");
        let right = open("right", 1).unwrap();
        let to = right.queue(0).unwrap();
        eventually("the carrier is back", || {
            queue.turn().flush();
            queue.turn().link() == XdpLink::Up
                && send(&queue, &frame(60, 7))
                && to.turn().receive(|_| ()).is_some()
        });
    });
}

#[test]
fn the_errors_of_an_operator_name_the_port() {
    in_network_namespace(|| {
        veth();
        let error = |text: &str, pairs| open(text, pairs).unwrap_err().to_string();
        assert_eq!(error("none", 1), "port xdp:none: there is no such interface");
        assert_eq!(
            error("left", 2),
            "port xdp:left: the interface has no queue 1: choose others with num-queue-pairs and queue=N, or give it \
             more with ethtool -L"
        );
        let port = open("left", 1).unwrap();
        assert_eq!(
            error("left", 1),
            "port xdp:left: the interface has an XDP program already, of another program or card (ip link show dev \
             left)"
        );
        drop(port);
        // The program has left the interface with its port.
        drop(open_again("left", 1));
        let error: InvalidXdp = "left,queue=x".parse::<XdpName>().unwrap_err();
        assert_eq!(error.to_string(), "the queue of an interface is a number from 0 to 4095");
    });
}

/// Opens a port without these capabilities of the thread.
fn open_without(text: &str, capability: CapabilitySet) -> XdpError {
    let all = capabilities(None).unwrap();
    let mut fewer = all;
    fewer.effective.remove(capability);
    set_capabilities(None, fewer).unwrap();
    let opened = open(text, 1);
    set_capabilities(None, all).unwrap();
    opened.unwrap_err()
}

#[test]
fn missing_privileges_are_named() {
    in_network_namespace(|| {
        veth();
        // The kernel asks for them in several calls.
        for (missing, name) in [
            (CapabilitySet::BPF | CapabilitySet::SYS_ADMIN, "CAP_BPF"),
            (CapabilitySet::NET_RAW, "CAP_NET_RAW"),
            (CapabilitySet::NET_ADMIN | CapabilitySet::SYS_ADMIN, "CAP_NET_ADMIN"),
        ] {
            assert_eq!(
                open_without("left", missing).to_string(),
                format!(
                    "port xdp:left: AF_XDP needs privileges that this process lacks ({name}): start it as root, or give \
                     it these with AmbientCapabilities= of systemd"
                )
            );
        }
        // Threads with the capability of the other tests have no limit.
        let limit = getrlimit(Resource::Memlock);
        setrlimit(Resource::Memlock, Rlimit { current: Some(1 << 20), ..limit }).unwrap();
        let error = open_without("left", CapabilitySet::IPC_LOCK);
        setrlimit(Resource::Memlock, limit).unwrap();
        assert_eq!(
            error.to_string(),
            "port xdp:left: a queue needs 8 MiB of locked memory: raise the limit (LimitMEMLOCK= of systemd, ulimit -l) \
             or add the capability CAP_IPC_LOCK"
        );
    });
}
