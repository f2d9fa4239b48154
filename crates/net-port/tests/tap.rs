//! Opens TAPs in network namespaces, and repeats the experiments with the kernel on which the card relies.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use kickless_memory::{Gpa, Iov, Map, Marks, Slot, UserAddr, View, fault};
use kickless_net_port::{Offloads, ReceiveError, SendError, Tap, TapError, TapQueue};
use kickless_spec::net::{GSO_TCPV4, HDR_F_NEEDS_CSUM, Header};
use kickless_testing::{LIMIT, guest_memory, in_network_namespace, ip, memfd, tc};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

const USER: u64 = 1 << 32;
const FRAME_LEN: usize = 60;

/// Returns a broadcast frame with an EtherType for experiments.
fn frame(len: usize) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend([2, 0, 0, 0, 0, 1, 0x88, 0xb5]);
    frame.resize(len, 0x5a);
    frame
}

/// Makes two TAPs at one bridge.
fn bridged() -> [Tap; 2] {
    let taps = ["a", "b"].map(|name| Tap::open(name, 1).unwrap());
    ip("link add bridge type bridge forward_delay 0 mcast_snooping 0");
    ip("link set dev bridge up");
    for name in ["a", "b"] {
        ip(&format!("link set dev {name} up mtu 65521 master bridge"));
    }
    for tap in &taps {
        tap.set(Offloads::empty(), |_| true);
    }
    taps
}

fn wait(fd: impl AsFd, flags: PollFlags) {
    let timeout = Timespec { tv_sec: LIMIT.as_secs().cast_signed(), tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(&fd, flags)], Some(&timeout)), Ok(1), "{flags:?}");
}

/// Receives the next frame of [`frame`]: up to `credit` bytes to guest memory, and up to `rest` behind them.
fn receive(queue: &mut TapQueue, credit: u32, rest: usize) -> (Header, Vec<u8>) {
    let view = guest_memory(1 << 17, USER);
    loop {
        let mut iov = buffers(&view, credit);
        let mut header = Header { num_buffers: 7.into(), ..Header::default() };
        let mut behind = vec![0; rest];
        match queue.receive(&mut header, &mut iov, &mut behind) {
            Ok(len) => {
                let mut bytes = vec![0; len.min(credit as usize)];
                iov.read(0, &mut bytes);
                iov.seal();
                bytes.extend(&behind[..len - bytes.len()]);
                // The kernel may send frames of its own, such as reports of multicast groups.
                if bytes[6..14] == frame(FRAME_LEN)[6..14] || bytes[12] == 8 {
                    return (header, bytes);
                }
            }
            Err(ReceiveError::Empty) => wait(&*queue, PollFlags::IN),
            Err(error) => panic!("{error}"),
        }
    }
}

fn buffers(view: &Arc<View>, len: u32) -> Iov {
    let mut iov = Iov::default();
    iov.push(view, Gpa(0), len).unwrap();
    iov
}

#[test]
fn a_frame_passes_with_its_header_wherever_the_credit_ends() {
    in_network_namespace(|| {
        let taps = bridged();
        let [mut from, mut to] = [&taps[0], &taps[1]].map(|tap| tap.queue(0).unwrap());
        for credit in [0, 1, 14, 59, 60, 61, 4000] {
            from.send_copy(&Header::default(), &frame(FRAME_LEN)).unwrap();
            let (header, bytes) = receive(&mut to, credit, 1000);
            // A TAP does not count buffers. Linux 6.18 writes 0.
            assert_ne!(header.num_buffers.get(), 1);
            assert_eq!(Header { num_buffers: 0.into(), ..header }, Header::default());
            assert_eq!(bytes, frame(FRAME_LEN), "{credit}");
        }
        // A read into short buffers cuts a frame in silence.
        from.send_copy(&Header::default(), &frame(FRAME_LEN)).unwrap();
        assert_eq!(receive(&mut to, 30, 10).1, frame(FRAME_LEN)[..40]);
        from.send_copy(&Header::default(), &frame(1000)).unwrap();
        assert_eq!(receive(&mut to, 500, 1000).1.len(), 1000);
    });
}

#[test]
fn frames_are_sent_from_guest_memory() {
    in_network_namespace(|| {
        let taps = bridged();
        let [mut from, mut to] = [&taps[0], &taps[1]].map(|tap| tap.queue(0).unwrap());
        let view = guest_memory(1 << 17, USER);
        for (pieces, len) in [(1, 60), (2, 30), (1023, 8), (60, 1000)] {
            let sent = frame(pieces * len);
            let mut iov = Iov::default();
            for (nth, piece) in sent.chunks(len).enumerate() {
                // A gap keeps two pieces from being joined.
                let at = Gpa((nth * (len + 8)) as u64);
                view.write(at, piece, &mut Marks::off()).unwrap();
                iov.push(&view, at, len as u32).unwrap();
            }
            assert!(!TapQueue::is_too_scattered(&iov));
            from.send(&Header::default(), &iov).unwrap();
            assert_eq!(receive(&mut to, 100_000, 1000).1, sent);
            let at = Gpa((pieces * (len + 8)) as u64);
            for _ in pieces..1024 {
                iov.push(&view, at, 1).unwrap();
            }
            assert!(TapQueue::is_too_scattered(&iov));
            assert_eq!(from.send(&Header::default(), &iov), Err(SendError::Refused(Errno::INVAL)));
        }
    });
}

#[test]
fn the_kernel_refuses_some_headers() {
    in_network_namespace(|| {
        let taps = bridged();
        let mut queue = taps[0].queue(0).unwrap();
        let mut send = |header: Header, len| queue.send_copy(&header, &frame(len));
        let refused = Err(SendError::Refused(Errno::INVAL));
        let hdr_len = |len: u16| Header { hdr_len: len.into(), ..Header::default() };
        for (header, len, verdict) in [
            (Header::default(), 13, refused),
            (Header::default(), 14, Ok(())),
            // The card accepts no frame of this length. The kernel does.
            (Header::default(), 100_000, Ok(())),
            (hdr_len(0), 60, Ok(())),
            (hdr_len(13), 60, refused),
            (hdr_len(14), 60, Ok(())),
            (hdr_len(60), 60, Ok(())),
            (hdr_len(u16::MAX), 60, refused),
            (Header { flags: HDR_F_NEEDS_CSUM, csum_start: 60.into(), ..Header::default() }, 60, refused),
            (Header { flags: 0xfe, ..Header::default() }, 60, Ok(())),
            (Header { gso_type: 2, gso_size: 9.into(), ..Header::default() }, 60, refused),
            (Header { gso_type: GSO_TCPV4, ..Header::default() }, 60, refused),
        ] {
            assert_eq!(send(header, len), verdict, "{header:?} {len}");
        }
    });
}

/// Makes the kernel keep the frames of `a` to one address in a queue in front of `b`.
fn slow_down() {
    assert!(
        std::process::Command::new("bridge")
            .args(["fdb", "add", "02:00:00:00:00:99", "dev", "b", "master", "static"])
            .status()
            .unwrap()
            .success()
    );
    tc("qdisc add dev b root tbf rate 100mbit burst 4000 limit 100000000");
}

#[test]
fn a_full_send_buffer_becomes_writable_again() {
    in_network_namespace(|| {
        let taps = bridged();
        slow_down();
        let mut queue = taps[0].queue(0).unwrap();
        let mut slow = frame(1400);
        slow[..6].copy_from_slice(&[2, 0, 0, 0, 0, 0x99]);
        for _ in 0..3 {
            // The send buffer holds fewer than 1000 of these frames.
            let full = (0..10_000).find_map(|_| queue.send_copy(&Header::default(), &slow).err());
            assert_eq!(full, Some(SendError::Full));
            wait(&queue, PollFlags::OUT);
        }
    });
}

#[test]
fn a_tap_that_is_down_or_gone_says_so() {
    in_network_namespace(|| {
        let tap = Tap::open("tap", 2).unwrap();
        tap.set(Offloads::empty(), |_| true);
        let mut queue = tap.queue(1).unwrap();
        let receive =
            |queue: &mut TapQueue| queue.receive(&mut Header::default(), &mut Iov::default(), &mut [0; 100]);
        assert_eq!(queue.send_copy(&Header::default(), &frame(60)), Err(SendError::Down));
        assert_eq!(receive(&mut queue), Err(ReceiveError::Empty));
        ip("link set tap up");
        assert_eq!(queue.send_copy(&Header::default(), &frame(60)), Ok(()));
        ip("link del tap");
        wait(&queue, PollFlags::IN);
        assert_eq!(receive(&mut queue), Err(ReceiveError::Gone));
        assert_eq!(queue.send_copy(&Header::default(), &frame(60)), Err(SendError::Gone));
        // A TAP that is gone takes no settings, and there is no error.
        tap.set(Offloads::CHECKSUM, |_| false);
    });
}

#[test]
fn offloads_are_what_the_kernel_takes() {
    in_network_namespace(|| {
        let taps = bridged();
        let [mut from, mut to] = [&taps[0], &taps[1]].map(|tap| tap.queue(0).unwrap());
        let mut frame = vec![0xff; 6];
        frame.extend([2, 0, 0, 0, 0, 1, 8, 0]);
        frame.extend([0x45, 0, 0, 48, 0, 1, 0, 0, 64, 17, 0x66, 0xba, 10, 0, 0, 1, 10, 0, 0, 2]);
        frame.extend([0, 1, 0, 2, 0, 28, 0x14, 0x30]);
        frame.resize(62, 0x5a);
        let partial = Header {
            flags: HDR_F_NEEDS_CSUM,
            csum_start: 34.into(),
            csum_offset: 6.into(),
            ..Header::default()
        };
        // Offloads without one that they need are left out.
        for (offloads, is_partial) in [
            (Offloads::empty(), false),
            (Offloads::TSO4 | Offloads::ECN, false),
            (Offloads::CHECKSUM | Offloads::ECN, true),
            (Offloads::all(), true),
            (Offloads::empty(), false),
        ] {
            taps[1].set(offloads, |_| true);
            from.send_copy(&partial, &frame).unwrap();
            let (header, bytes) = receive(&mut to, 1000, 1000);
            assert_eq!(header.flags & HDR_F_NEEDS_CSUM != 0, is_partial, "{offloads:?}");
            assert_eq!(bytes[40..42] == frame[40..42], is_partial);
        }
    });
}

/// The kernel discards the frames of a detached queue.
#[test]
fn a_detached_queue_receives_nothing() {
    in_network_namespace(|| {
        let from = Tap::open("a", 1).unwrap();
        let to = Tap::open("b", 3).unwrap();
        assert_eq!((to.name(), to.queues()), ("b", 3));
        assert!(to.queue(3).is_err());
        ip("link add bridge type bridge forward_delay 0 mcast_snooping 0");
        for name in ["a", "b"] {
            ip(&format!("link set dev {name} up master bridge"));
        }
        ip("link set dev bridge up");
        from.set(Offloads::empty(), |_| true);
        let mut from = from.queue(0).unwrap();
        let mut queues = [0, 1, 2].map(|pair| to.queue(pair).unwrap());
        from.send_copy(&Header::default(), &frame(60)).unwrap();
        for used in [2, 0, 1] {
            to.set(Offloads::empty(), |pair| pair == used);
            from.send_copy(&Header::default(), &frame(60)).unwrap();
            assert_eq!(receive(&mut queues[usize::from(used)], 60, 1000).1, frame(60));
            for queue in &mut queues {
                let empty = queue.receive(&mut Header::default(), &mut Iov::default(), &mut [0; 100]);
                assert_eq!(empty, Err(ReceiveError::Empty));
            }
        }
    });
}

/// A parent process may have detached the queues that it passes on.
#[test]
fn adopted_queues_are_attached_again() {
    in_network_namespace(|| {
        let from = Tap::open("a", 1).unwrap();
        // A TAP with several queues detaches all until they are used.
        let parent = Tap::open("b", 2).unwrap();
        ip("link add bridge type bridge forward_delay 0 mcast_snooping 0");
        for name in ["a", "b"] {
            ip(&format!("link set dev {name} up master bridge"));
        }
        ip("link set dev bridge up");
        let fds = [0, 1].map(|pair| parent.queue(pair).unwrap().as_fd().try_clone_to_owned().unwrap());
        for is_attached in [false, true] {
            parent.set(Offloads::empty(), |_| is_attached);
            let to = Tap::adopt(fds.iter().map(|fd| fd.try_clone().unwrap()).collect()).unwrap();
            from.set(Offloads::empty(), |_| true);
            for used in [1, 0] {
                to.set(Offloads::empty(), |pair| pair == used);
                from.queue(0).unwrap().send_copy(&Header::default(), &frame(60)).unwrap();
                assert_eq!(receive(&mut to.queue(used).unwrap(), 60, 1000).1, frame(60));
            }
            to.set(Offloads::empty(), |_| false);
            parent.set(Offloads::empty(), |_| false);
        }
    });
}

/// The kernel reports the whole length of a frame that it could not write to guest memory.
#[test]
fn lost_memory_is_found_by_a_read() {
    fault::guard().unwrap();
    in_network_namespace(|| {
        let taps = bridged();
        let [mut from, mut to] = [&taps[0], &taps[1]].map(|tap| tap.queue(0).unwrap());
        for (len, credit, left) in [(60, 60, 0), (9000, 9000, 0), (9000, 9000, 8192), (9000, 5000, 4096)] {
            let file = memfd(12_288);
            let slot = Slot::map(&file, 0, Gpa(0), UserAddr(USER), 12_288).unwrap();
            let view = Arc::new(View::new(Map::new(vec![slot]).unwrap()));
            let mut iov = buffers(&view, credit);
            rustix::fs::ftruncate(&file, left).unwrap();
            let damages = fault::damages();
            from.send_copy(&Header::default(), &frame(len)).unwrap();
            wait(&to, PollFlags::IN);
            let mut behind = vec![0; 10_000];
            assert_eq!(to.receive(&mut Header::default(), &mut iov, &mut behind), Ok(len));
            assert!(view.damaged().is_some() && fault::damages() > damages, "{len} {left}");
            iov.seal();
        }
    });
}

fn sentence(error: &dyn std::error::Error) -> String {
    let source = error.source().map(|source| format!(": {source}")).unwrap_or_default();
    format!("{error}{source}")
}

#[test]
fn an_operator_is_told_in_a_sentence() {
    in_network_namespace(|| {
        ip("tuntap add dev one mode tap");
        ip("tuntap add dev many mode tap multi_queue");
        ip("tuntap add dev tun mode tun");
        ip("link add bridge type bridge");
        let refused = |name, queues| sentence(&Tap::open(name, queues).unwrap_err());
        assert_eq!(
            refused("one", 2),
            "the TAP one has one queue, and the card has 2 pairs of queues: make the TAP with multi_queue, or set \
             num-queue-pairs to 1"
        );
        for name in ["tun", "bridge"] {
            assert_eq!(refused(name, 1), format!("the interface {name} exists and is not a TAP"));
            assert_eq!(refused(name, 2), format!("the interface {name} exists and is not a TAP"));
        }
        let used = Tap::open("one", 1).unwrap();
        assert_eq!(refused("one", 1), "the TAP one is in use by another program");
        drop(used);
        // It exists with several queues, and one is enough. The kernel has room for 256.
        for queues in [1, 64] {
            assert_eq!(Tap::open("many", queues).unwrap().queues(), queues);
        }
        // A TAP that the program made disappears with it.
        drop(Tap::open("made", 4).unwrap());
        assert!(!std::path::Path::new("/sys/class/net/made").exists());
    });
}

#[test]
fn descriptors_of_other_programs_are_checked() {
    in_network_namespace(|| {
        let refused = |fds: Vec<OwnedFd>| sentence(&Tap::adopt(fds).unwrap_err());
        let file = || OwnedFd::from(std::fs::File::open("/dev/net/tun").unwrap());
        assert_eq!(
            refused(vec![file()]),
            "the descriptor is of no TAP that exists; if the TAP was deleted, remove the device and add it again"
        );
        assert_eq!(refused(vec![std::fs::File::open("/dev/null").unwrap().into()]), refused(vec![file()]));
        assert!(matches!(Tap::adopt(Vec::new()), Err(TapError::NotTapFd)));
        let queues = |name| {
            let tap = Tap::open(name, 2).unwrap();
            [0, 1].map(|pair| tap.queue(pair).unwrap().as_fd().try_clone_to_owned().unwrap())
        };
        let [first, second] = queues("a");
        let [other, _] = queues("b");
        assert_eq!(
            refused(vec![first.try_clone().unwrap(), other]),
            "the descriptors are queues of two TAPs, a and b"
        );
        let tap = Tap::adopt(vec![first, second]).unwrap();
        assert_eq!((tap.name(), tap.queues()), ("a", 2));
    });
}
