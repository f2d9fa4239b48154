//! Tests frames for all ports: what they cost, and where a poll ends between two parts of them.

use super::*;
use kickless_device::TaskLocation;

/// A frame for all costs its sender as much as one to each port.
#[test]
fn a_flood_is_charged_for_each_copy() {
    let name = name();
    let ports = [0, 1, 2, 3].map(|_| SwitchPort::join(&name, Rule::default(), 1));
    ports.iter().for_each(open);
    let charged = |frames: &[Vec<u8>]| forward(&ports[0], frames, &mut Forwarder::default(), u32::MAX).copied;
    let (all, short) = ([0xff; 6], frame([0xff; 6], address(1), None, 0));
    let long = [&short[..], &[0; 9000]].concat();
    // As much as frames of the sender's batch, and some for each inbox.
    let inboxes = 3 * TARGET_FRAMES;
    assert_eq!(charged(std::slice::from_ref(&short)), cost_of(&[(3 + inboxes, short.len())]));
    assert_eq!(
        charged(&[long.clone(), short.clone()]),
        cost_of(&[(3, long.len()), (3 + inboxes, short.len())])
    );
    // A full inbox does not make it cheaper.
    let many = vec![short.clone(); 1000];
    charged(&many);
    assert_eq!(charged(&many), cost_of(&[(3000 + inboxes, short.len())]));
    // One destination costs the frames alone, and several cost a decision and one copy of each.
    for number in [1, 2] {
        send(&ports[usize::from(number)], &[frame(all, address(1 + number), None, 0)]);
    }
    let frames = |peers: u8| -> Vec<_> {
        (0..64).map(|n| frame(address(2 + n % peers), address(1), None, 0)).collect()
    };
    let two = 64 + 63 * RUN_FRAMES + 64 / 4 + 2 * TARGET_FRAMES;
    assert_eq!([1, 2].map(|peers| charged(&frames(peers))), [0, cost_of(&[(two, short.len())])]);
    // A receiver that sleeps costs a system call, which is as much as a frame by itself.
    let awake = charged(std::slice::from_ref(&short));
    ports[1..].iter().for_each(|port| port.inbox(0).unwrap().wake_receiver());
    ports[1..].iter().for_each(|port| drop(take(port, 0)));
    ports[1..].iter().for_each(|port| port.inbox(0).unwrap().wake_receiver());
    assert_eq!(charged(std::slice::from_ref(&short)), awake + 3);
    // One on the sender's worker costs as much as two copies.
    let mut forwarder = Forwarder::default();
    forwarder.near.worker_id = Some(1);
    for (port, task) in ports[1..].iter().zip(0..) {
        let inbox = port.inbox(0).unwrap();
        drop(take(port, 0));
        inbox.wake_receiver();
        inbox.set_location(Some(TaskLocation { worker_id: 1, task }));
    }
    let near = forward(&ports[0], &vec![short.clone(); 2], &mut forwarder, u32::MAX).copied;
    let frames_of_both = 6 + inboxes + 3 * NEAR_FRAMES;
    assert_eq!((near, frames_of_both), (cost_of(&[(frames_of_both, short.len())]), 18));
    // Frames that are refused are decided about, each by itself.
    let refused = vec![frame(all, [3; 6], None, 0); 65];
    assert_eq!(charged(&refused), 64 * RUN_FRAMES / 16);
}

/// Frames for all ports go to as many of them at a time as a poll may cost, and each port gets each frame
/// once and in order.
#[test]
fn a_batch_is_cut_where_its_limit_ends() {
    const PEERS: usize = 100;
    let name = name();
    let sender = SwitchPort::join(&name, Rule::default(), 1);
    let mut peers: Vec<_> = (0..PEERS).map(|_| SwitchPort::join(&name, Rule::default(), 1)).collect();
    peers.iter().for_each(open);
    for (len, count, limit) in [(60, 200, 2), (60, 200, 64), (60_000, 7, 2), (60_000, 7, 64)] {
        let frames: Vec<_> = (0..count)
            .map(|body| {
                let mut frame = frame([0xff; 6], address(1), None, body);
                frame.resize(len, 0);
                frame
            })
            .collect();
        let mut forwarder = Forwarder::default();
        let mut forwarded = forward(&sender, &frames, &mut forwarder, limit);
        let (mut polls, mut received) = (1, vec![Vec::new(); PEERS]);
        loop {
            // Each port beyond the limit is the copies of a flood and one inbox, and a part of a short frame.
            let copies = if len == 60 { 16 } else { 1 };
            let beyond = cost_of(&[(copies, len), (TARGET_FRAMES, 60)]) + 100 * (3 + 1) / 16;
            let most = if polls % 3 == 0 { 8 * limit } else { limit };
            assert!(forwarded.copied <= most + beyond, "{len} {limit}: {forwarded:?}");
            for (peer, received) in peers.iter().zip(&mut received) {
                received.extend(take(peer, 0));
            }
            if !forwarder.has_waiting() {
                break;
            }
            // Another poll may have a larger budget.
            let next = if polls % 3 == 2 { 8 * limit } else { limit };
            forwarded = sender.resume(0, &mut forwarder, next);
            polls += 1;
        }
        assert!(polls > 2, "{polls}");
        for received in received {
            assert!(received == frames, "{len} {limit}: {}", received.len());
        }
    }
    // Ports come and go between two parts of a frame. Those that stay get it once.
    let long = [&frame([0xff; 6], address(1), None, 1)[..], &[0; 60_000]].concat();
    let mut forwarder = Forwarder::default();
    forward(&sender, std::slice::from_ref(&long), &mut forwarder, 64);
    let mut received: Vec<_> = peers.iter().map(|peer| take(peer, 0).len()).collect();
    let begun = received.iter().sum::<usize>();
    assert!(begun > 0 && begun < PEERS / 2);
    peers.drain(..1);
    received.drain(..1);
    peers.push(SwitchPort::join(&name, Rule::default(), 1));
    received.push(0);
    open(&peers[PEERS - 1]);
    while forwarder.has_waiting() {
        sender.resume(0, &mut forwarder, 64);
        for (peer, received) in peers.iter().zip(&mut received) {
            *received += take(peer, 0).len();
        }
    }
    // The new port has the number of the one that is gone, and that had got it.
    assert_eq!(received, [vec![1; PEERS - 1], vec![0]].concat());
}

/// A port gets several frames at once, although one frame for all ports costs more than a poll has.
#[test]
fn frames_for_very_many_ports_arrive_together() {
    let name = name();
    let sender = SwitchPort::join(&name, Rule::default(), 1);
    let peers: Vec<_> = (0..255).map(|_| SwitchPort::join(&name, Rule::default(), 1)).collect();
    peers.iter().for_each(open);
    let floods = vec![frame([0xff; 6], address(1), None, 0); 32];
    // Also behind a frame that goes nowhere.
    let behind = [&[frame(address(1), address(1), None, 0)][..], &floods].concat();
    for frames in [floods, behind] {
        let mut forwarder = Forwarder::default();
        forward(&sender, &frames, &mut forwarder, 2);
        let taken = peers.iter().map(|peer| take(peer, 0).len());
        assert_eq!(taken.take_while(|taken| *taken > 0).collect::<Vec<_>>(), [16, 16]);
    }
}

/// Behind a flood that costs more than a poll has, no other frame is decided about. The flood could not be
/// cut.
#[test]
fn a_flood_before_another_frame_is_cut() {
    let name = name();
    let sender = SwitchPort::join(&name, Rule::default(), 1);
    let peers: Vec<_> = (0..255).map(|_| SwitchPort::join(&name, Rule::default(), 1)).collect();
    peers.iter().for_each(open);
    send(&peers[9], &[frame([0xff; 6], address(2), None, 0)]);
    peers.iter().for_each(|peer| drop(take(peer, 0)));
    let frames = [frame([0xff; 6], address(1), None, 0), frame(address(2), address(1), None, 1)];
    let mut forwarder = Forwarder::default();
    forward(&sender, &frames, &mut forwarder, 2);
    assert!(forwarder.has_waiting());
    assert!(peers.iter().filter(|peer| !take(peer, 0).is_empty()).count() < 16);
}

/// A packet of many segments is as much work as they are, so a poll takes one of them at a time to a port.
#[test]
fn packets_of_many_segments_for_very_many_ports_go_one_by_one() {
    let name = name();
    let sender = SwitchPort::join(&name, Rule::default(), 1);
    let peers: Vec<_> = (0..100).map(|_| SwitchPort::join(&name, Rule::default(), 1)).collect();
    peers.iter().for_each(open);
    let mut packet = frame([0xff; 6], address(1), None, 0);
    packet.resize(HEADER + 182, 0);
    // TCP over IPv4, with segments of one byte.
    packet[..HEADER].copy_from_slice(&[1, 1, 54, 0, 1, 0, 34, 0, 16, 0, 1, 0]);
    assert_eq!(segments_max(&packet), 128);
    let copied = forward(&sender, &vec![packet; 16], &mut Forwarder::default(), 2).copied;
    let taken: Vec<_> = peers.iter().map(|peer| take(peer, 0).len()).take_while(|taken| *taken > 0).collect();
    assert_eq!((taken, copied), (vec![1], 43));
}

/// A frame for all ports is cut also if other frames of the batch are before it.
#[test]
fn a_flood_behind_other_frames_is_cut() {
    const PEERS: usize = 100;
    let name = name();
    let sender = SwitchPort::join(&name, Rule::default(), 1);
    let peers: Vec<_> = (0..PEERS).map(|_| SwitchPort::join(&name, Rule::default(), 1)).collect();
    peers.iter().for_each(open);
    send(&peers[0], &[frame([0xff; 6], address(2), None, 0)]);
    peers.iter().for_each(|peer| drop(take(peer, 0)));
    let long = [&frame([0xff; 6], address(1), None, 0)[..], &[0; 60_000]].concat();
    for first in [address(1), address(2), [0xff; 6]] {
        let first = frame(first, address(1), None, 1);
        let mut forwarder = Forwarder::default();
        let mut forwarded = forward(&sender, &[first.clone(), long.clone()], &mut forwarder, 64);
        let most = 64 + cost_of(&[(1, long.len()), (4 * (TARGET_FRAMES + 1), 60)]);
        let mut received = vec![Vec::new(); PEERS];
        loop {
            assert!(forwarded.copied <= most, "{forwarded:?}");
            for (peer, received) in peers.iter().zip(&mut received) {
                received.extend(take(peer, 0));
            }
            if !forwarder.has_waiting() {
                break;
            }
            forwarded = sender.resume(0, &mut forwarder, 64);
        }
        for (peer, received) in received.iter().enumerate() {
            let gets_first = first[HEADER] == 0xff || (peer == 0 && first[HEADER + 5] == 2);
            assert_eq!(received.len(), 1 + usize::from(gets_first));
            assert!(
                received.last() == Some(&long) && received[0] == *if gets_first { &first } else { &long }
            );
        }
    }
}

/// A port that has got a frame for an unknown address, and answers before the others get it, gets no second
/// copy.
#[test]
fn a_begun_flood_stays_one() {
    let name = name();
    let ports: Vec<_> = (0..8).map(|_| SwitchPort::join(&name, Rule::default(), 1)).collect();
    ports.iter().for_each(open);
    let question = [&frame(address(2), address(1), None, 0)[..], &[0; 60_000]].concat();
    let later = frame(address(2), address(1), None, 1);
    for frames in [&[question.clone()][..], &[question.clone(), later]] {
        let mut forwarder = Forwarder::default();
        forward(&ports[0], frames, &mut forwarder, 2);
        assert!(forwarder.has_waiting());
        send(&ports[1], &[frame(address(1), address(2), None, 0)]);
        while forwarder.has_waiting() {
            ports[0].resume(0, &mut forwarder, 2);
        }
        let received = [1, 2, 3, 4, 5, 6, 7].map(|port: usize| take(&ports[port], 0).len());
        assert_eq!(received, [frames.len(), 1, 1, 1, 1, 1, 1]);
        // The address is unknown again.
        lock(&ports[0].switch.state).table.leave(ports[1].number);
        lock(&ports[0].switch.state).table.join(ports[1].number, RESERVE);
    }
}

/// A frame for very many ports costs as much in parts as at once.
#[test]
fn the_parts_of_a_flood_cost_what_it_costs() {
    let name = name();
    let ports: Vec<_> = (0..500).map(|_| SwitchPort::join(&name, Rule::default(), 1)).collect();
    ports.iter().for_each(open);
    let short = [frame([0xff; 6], address(1), None, 0)];
    let whole = forward(&ports[0], &short, &mut Forwarder::default(), u32::MAX).copied;
    let mut forwarder = Forwarder::default();
    let (mut cost, mut polls) = (forward(&ports[0], &short, &mut forwarder, 2).copied, 1);
    while forwarder.has_waiting() {
        cost += ports[0].resume(0, &mut forwarder, 2).copied;
        polls += 1;
    }
    assert!(polls <= whole / 2 + 1 && cost <= whole + polls, "{polls} {cost} {whole}");
    assert!(ports[1..].iter().all(|port| take(port, 0).len() == 2));
}
