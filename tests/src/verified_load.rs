//! Loads of a driver in this process that check each answer.
#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "a test fails by panicking")]

use std::sync::atomic::{AtomicBool, Ordering};

use kickless_driver::{Interest, Outgoing, Queue, QueuePair, Request};
use kickless_testing::{LIMIT, pattern};

/// The bytes of a request.
pub const BLOCK: usize = 4096;
/// The frames on their way at a time.
const WINDOW: u32 = 32;

/// Writes and reads blocks in turn until `is_over`, and checks each read. Each of the `depth` requests in
/// flight has a block of its own, behind those of earlier queues. Returns the number of requests.
pub fn drive_disk(queue: &Queue, depth: u64, is_over: &AtomicBool) -> u64 {
    let first = queue.index() as u64 * depth;
    let content = |slot: u64, version: u64| pattern((first + slot) << 32 | version, BLOCK);
    let offset = |slot: u64| (first + slot) * BLOCK as u64;
    let mut versions = vec![0; depth as usize];
    let mut is_written = vec![false; depth as usize];
    let next = |slot: u64, version: &mut u64, is_written: &mut bool| {
        let mut buffer = queue.disk().buffer(BLOCK).unwrap();
        *is_written = !*is_written;
        if !*is_written {
            return Request::read(offset(slot), buffer).token(slot);
        }
        *version += 1;
        assert_eq!(buffer.write(0, &content(slot, *version)), BLOCK);
        Request::write(offset(slot), buffer).token(slot)
    };
    let mut batch: Vec<Request> = (0..depth)
        .map(|slot| next(slot, &mut versions[slot as usize], &mut is_written[slot as usize]))
        .collect();
    let (mut requests, mut in_flight) = (0, 0);
    loop {
        in_flight += batch.len();
        queue.submit_or_wait(&mut batch).unwrap();
        if in_flight == 0 {
            return requests;
        }
        let mut done = Vec::new();
        in_flight -= queue.wait(usize::MAX, Some(LIMIT), |completion| done.push(completion)).unwrap();
        assert!(!done.is_empty(), "no request completes");
        for completion in done {
            completion.result.unwrap();
            requests += 1;
            let (slot, at) = (completion.token, completion.token as usize);
            if !is_written[at] {
                let found = completion.data.into_buffer().unwrap().to_vec();
                assert!(found == content(slot, versions[at]), "block {slot}");
            }
            if !is_over.load(Ordering::Relaxed) {
                batch.push(next(slot, &mut versions[at], &mut is_written[at]));
            }
        }
    }
}

/// Returns the frame with this number, of 60 to 9000 bytes.
#[must_use]
pub fn frame(number: u32) -> Vec<u8> {
    let mut bytes = pattern(number.into(), 60 + (number as usize * 577) % 8940);
    bytes[12..14].copy_from_slice(&[0x88, 0xb5]);
    bytes[14..18].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// Sends frames to a port that returns them until `is_over`, and checks that each comes back once, in order
/// and unchanged. Returns their number.
pub fn drive_card(pair: &mut QueuePair, is_over: &AtomicBool) -> u32 {
    let (mut sent, mut received) = (0, 0);
    loop {
        let ends = is_over.load(Ordering::Relaxed);
        let wanted = if ends { 0 } else { WINDOW - (sent - received) };
        let frames: Vec<_> = (sent..sent + wanted).map(frame).collect();
        let batch: Vec<_> = frames.iter().map(|frame| Outgoing::from(&frame[..])).collect();
        if !batch.is_empty() {
            sent += pair.send(&batch).unwrap() as u32;
        }
        let check = |found: &kickless_driver::Frame<'_>| {
            assert!(found.to_vec() == frame(received), "frame {received} is lost, changed or late");
            received += 1;
        };
        let come = pair.receive(usize::MAX, check).unwrap();
        if sent == received && ends {
            return sent;
        }
        if come == 0 {
            assert!(pair.wait(Interest::Receive, Some(LIMIT)).unwrap(), "no frame comes");
        }
    }
}
