//! A queue pair of a network card, in C.
#![expect(unsafe_code, reason = "functions that C calls by their names")]

use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use driver::{Checksum, Interest, Offload, Protocol, QueuePair, Segmentation};

use crate::card::Card;
use crate::error::{Fault, guard};
use crate::pointer;

/// The checksum in the frame is what its sender made it.
pub const KL_CHECKSUM_IN_FRAME: u32 = 0;
/// The checksum is partial: the frame has only the sum of the pseudo header in its place.
pub const KL_CHECKSUM_PARTIAL: u32 = 1;
/// The back-end has checked the checksum. Only in received frames.
pub const KL_CHECKSUM_VERIFIED: u32 = 2;

/// The frame is not segmented.
pub const KL_SEGMENT_NONE: u32 = 0;
/// TCP over IPv4 is segmented.
pub const KL_SEGMENT_TCPV4: u32 = 1;
/// TCP over IPv6 is segmented.
pub const KL_SEGMENT_TCPV6: u32 = 2;
/// UDP is segmented.
pub const KL_SEGMENT_UDP: u32 = 3;

/// Wait for received frames.
pub const KL_WAIT_RECEIVE: u32 = 0;
/// Wait for room to send.
pub const KL_WAIT_SEND: u32 = 1;
/// Wait for either.
pub const KL_WAIT_ANY: u32 = 2;

/// A frame, from its Ethernet header on. All members but `data` and the lengths are 0 in a plain frame.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Frame {
    /// The bytes of a frame to send, or the room for a received one.
    pub data: *mut c_void,
    /// The number of bytes at `data`, for a received frame. kl_pair_send() ignores it.
    pub capacity: u32,
    /// The length of the frame. If a received frame is longer than `capacity`, only so many bytes are
    /// copied.
    pub length: u32,
    /// KL_CHECKSUM_...
    pub checksum: u32,
    /// The offset of the first byte that a partial checksum covers.
    pub checksum_start: u16,
    /// The offset of a partial checksum from `checksum_start`.
    pub checksum_offset: u16,
    /// KL_SEGMENT_...
    pub segment: u32,
    /// The number of bytes of payload in each segment.
    pub segment_size: u16,
    /// The length of all headers, which each segment repeats, or 0 if it is not known.
    pub header_length: u16,
    /// 1: the packet of TCP has its CWR bit set.
    pub ecn: u32,
    /// Must be 0.
    pub reserved: u32,
}

impl Frame {
    fn offload(&self) -> Result<Offload, Fault> {
        if self.checksum == KL_CHECKSUM_IN_FRAME && self.segment == KL_SEGMENT_NONE {
            return Ok(Offload::default());
        }
        let checksum = match self.checksum {
            KL_CHECKSUM_IN_FRAME => Checksum::InFrame,
            KL_CHECKSUM_PARTIAL => {
                Checksum::Partial { start: self.checksum_start, offset: self.checksum_offset }
            }
            KL_CHECKSUM_VERIFIED => Checksum::Verified,
            _ => return Err(Fault::Argument("checksum is none of KL_CHECKSUM_...")),
        };
        let protocol = match self.segment {
            KL_SEGMENT_NONE => None,
            KL_SEGMENT_TCPV4 => Some(Protocol::TcpV4),
            KL_SEGMENT_TCPV6 => Some(Protocol::TcpV6),
            KL_SEGMENT_UDP => Some(Protocol::Udp),
            _ => return Err(Fault::Argument("segment is none of KL_SEGMENT_...")),
        };
        let segmentation = protocol.map(|protocol| Segmentation {
            protocol,
            size: self.segment_size,
            header_len: self.header_length,
            ecn: self.ecn != 0,
        });
        Ok(Offload { checksum, segmentation })
    }

    fn set_offload(&mut self, offload: Offload) {
        *self = Self { data: self.data, capacity: self.capacity, length: self.length, ..Self::EMPTY };
        match offload.checksum {
            Checksum::InFrame => {}
            Checksum::Partial { start, offset } => {
                self.checksum = KL_CHECKSUM_PARTIAL;
                (self.checksum_start, self.checksum_offset) = (start, offset);
            }
            Checksum::Verified => self.checksum = KL_CHECKSUM_VERIFIED,
        }
        if let Some(Segmentation { protocol, size, header_len, ecn }) = offload.segmentation {
            self.segment = match protocol {
                Protocol::TcpV4 => KL_SEGMENT_TCPV4,
                Protocol::TcpV6 => KL_SEGMENT_TCPV6,
                Protocol::Udp => KL_SEGMENT_UDP,
            };
            (self.segment_size, self.header_length, self.ecn) = (size, header_len, ecn.into());
        }
    }

    const EMPTY: Self = Self {
        data: ptr::null_mut(),
        capacity: 0,
        length: 0,
        checksum: KL_CHECKSUM_IN_FRAME,
        checksum_start: 0,
        checksum_offset: 0,
        segment: KL_SEGMENT_NONE,
        segment_size: 0,
        header_length: 0,
        ecn: 0,
        reserved: 0,
    };
}

/// The counters of a queue pair.
#[repr(C)]
pub struct PairCounters {
    /// Frames given to the device.
    pub sent_frames: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Frames taken from the device.
    pub received_frames: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Received frames that were dropped because their header of virtio makes no sense.
    pub received_invalid: u64,
    /// Sent frames that were in flight when the back-end went away.
    pub lost_sent: u64,
    /// Frames in the receive queue that were not taken when the back-end went away.
    pub lost_received: u64,
    /// Kicks of the device.
    pub kicks: u64,
    /// Calls of the device.
    pub calls: u64,
}

/// A receive queue and a transmit queue of a card.
///
/// A pair is used by one thread at a time. A call during another call of the same pair fails with -EBUSY.
pub struct Pair {
    pair: Mutex<QueuePair>,
    fd: c_int,
}

/// Calls `run` with the pair.
///
/// # Safety
/// A pointer as the crate's documentation requires.
#[inline]
unsafe fn with_pair(pair: *mut Pair, run: impl FnOnce(&mut QueuePair) -> Result<c_int, Fault>) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise.
        let pair = unsafe { pointer::reference(pair, "pair")? };
        let mut pair: MutexGuard<'_, QueuePair> = match pair.pair.try_lock() {
            Ok(pair) => pair,
            Err(TryLockError::Poisoned(poisoned)) => PoisonError::into_inner(poisoned),
            Err(TryLockError::WouldBlock) => return Err(driver::Error::Busy.into()),
        };
        run(&mut pair)
    })
}

#[inline]
fn count(count: usize) -> Result<c_int, Fault> {
    c_int::try_from(count).map_err(|_| Fault::Overflow("a number of frames"))
}

fn interest(interest: u32) -> Result<Interest, Fault> {
    match interest {
        KL_WAIT_RECEIVE => Ok(Interest::Receive),
        KL_WAIT_SEND => Ok(Interest::Send),
        KL_WAIT_ANY => Ok(Interest::Any),
        _ => Err(Fault::Argument("interest is none of KL_WAIT_...")),
    }
}

fn timeout(timeout_ns: i64) -> Result<Option<Duration>, Fault> {
    match timeout_ns {
        -1 => Ok(None),
        time => {
            let time = u64::try_from(time).map_err(|_| Fault::Argument("timeout_ns is negative"))?;
            Ok(Some(Duration::from_nanos(time)))
        }
    }
}

/// Opens the card's queue pair with this number, from 0 to kl_card_pairs() - 1. A pair can be opened once.
///
/// Fails with -EBUSY if it was opened before.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_pair_open(card: *mut Card, index: u32, pair: *mut *mut Pair) -> c_int {
    guard(|| {
        // SAFETY: pointers as the crate's documentation requires.
        let card = unsafe {
            pointer::put(pair, ptr::null_mut(), "pair")?;
            pointer::reference(card, "card")?
        };
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        if index >= card.card.pairs() {
            return Err(Fault::Argument("the card has no pair with this number"));
        }
        let opened = card.card.pair(index).ok_or(driver::Error::Busy)?;
        let fd = opened.as_fd().as_raw_fd();
        // SAFETY: as above.
        unsafe { pointer::put(pair, pointer::handle(Pair { pair: Mutex::new(opened), fd }), "pair")? };
        Ok(0)
    })
}

/// Closes a pair. Its queues stay with the back-end, and nobody serves them. Ignores null.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_pair_close(pair: *mut Pair) {
    guard(|| {
        // SAFETY: a handle as the crate's documentation requires.
        unsafe { pointer::take_back(pair)? };
        Ok(())
    });
}

/// Sends copies of the first of `count` frames, as many as there is room for, with at most one kick. Returns
/// their number, which may be 0.
///
/// Fails with -EINVAL if the first frame that was not sent is too short or too long, or its offload was not
/// negotiated. Those before it were sent; kl_pair_counters() tells their number.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_pair_send(pair: *mut Pair, frames: *const Frame, count: usize) -> c_int {
    // SAFETY: pointers as the crate's documentation requires.
    unsafe {
        with_pair(pair, |pair| {
            let frames = pointer::array(frames, count, "frames")?;
            for frame in frames {
                pointer::array(frame.data.cast::<u8>(), frame.length as usize, "data")?;
                frame.offload()?;
            }
            let sent = pair.send_with(
                frames.len(),
                |at| frames[at].length as usize,
                |at, place| {
                    let frame = &frames[at];
                    // Both were checked above.
                    let bytes = pointer::array(frame.data.cast::<u8>(), frame.length as usize, "data");
                    place.write(0, bytes.unwrap_or_default());
                    place.set_offload(frame.offload().unwrap_or_default());
                },
            )?;
            self::count(sent)
        })
    }
}

/// Copies up to `max` received frames to the places that `frames` names, and sets all members but `data` and
/// `capacity`. Returns their number, which may be 0. Does not wait.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_pair_receive(pair: *mut Pair, frames: *mut Frame, max: usize) -> c_int {
    // SAFETY: pointers as the crate's documentation requires.
    unsafe {
        with_pair(pair, |pair| {
            let given = pointer::array(frames.cast_const(), max, "frames")?;
            for frame in given {
                pointer::room(frame.data.cast::<u8>(), frame.capacity as usize, "data")?;
            }
            let mut at = 0;
            let received = pair.receive(max, |frame| {
                // There are at most `max` frames.
                let place = frames.add(at);
                at += 1;
                let mut into = place.read();
                // C's memory has valid bytes, and they are only written to. The place was checked above.
                if let Ok(room) = pointer::room(into.data.cast::<u8>(), into.capacity as usize, "data") {
                    frame.read(0, room.assume_init_mut());
                }
                // Lossless: no frame is longer than all buffers of a queue.
                into.length = frame.len() as u32;
                into.set_offload(frame.offload());
                place.write(into);
            })?;
            self::count(received)
        })
    }
}

/// Waits until there may be a received frame (KL_WAIT_RECEIVE), room to send (KL_WAIT_SEND), or either
/// (KL_WAIT_ANY). Returns 1, or 0 after `timeout_ns` nanoseconds; -1 means no limit.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_pair_wait(pair: *mut Pair, interest: u32, timeout_ns: i64) -> c_int {
    // SAFETY: a pointer as the crate's documentation requires.
    unsafe { with_pair(pair, |pair| Ok(pair.wait(self::interest(interest)?, timeout(timeout_ns)?)?.into())) }
}

/// Waits until the device has used all sent frames. Returns 1, or 0 after `timeout_ns` nanoseconds; -1 means
/// no limit.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_pair_flush(pair: *mut Pair, timeout_ns: i64) -> c_int {
    // SAFETY: a pointer as the crate's documentation requires.
    unsafe { with_pair(pair, |pair| Ok(pair.flush(timeout(timeout_ns)?)?.into())) }
}

/// Returns the number of sent frames that the device has not used yet.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_pair_in_flight(pair: *mut Pair) -> c_int {
    // SAFETY: a pointer as the crate's documentation requires.
    unsafe { with_pair(pair, |pair| count(usize::try_from(pair.in_flight()?).unwrap_or(usize::MAX))) }
}

/// Returns a descriptor for poll() or epoll, which becomes readable when what kl_pair_arm() names may be
/// there. It belongs to the handle and is closed with it.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_pair_fd(pair: *mut Pair) -> c_int {
    guard(|| {
        // SAFETY: a pointer as the crate's documentation requires.
        Ok(unsafe { pointer::reference(pair, "pair")? }.fd)
    })
}

/// Asks the device to signal the descriptor of kl_pair_fd(). Returns 1 if the caller may sleep on it, or 0 if
/// what `interest` (KL_WAIT_...) names is there already. Call it before each sleep.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_pair_arm(pair: *mut Pair, interest: u32) -> c_int {
    // SAFETY: a pointer as the crate's documentation requires.
    unsafe { with_pair(pair, |pair| Ok(pair.arm(self::interest(interest)?)?.into())) }
}

/// Writes the counters of the pair to `counters`.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_pair_counters(pair: *mut Pair, counters: *mut PairCounters) -> c_int {
    // SAFETY: pointers as the crate's documentation requires.
    unsafe {
        with_pair(pair, |pair| {
            let now = pair.counters();
            let copy = PairCounters {
                sent_frames: now.sent_frames,
                sent_bytes: now.sent_bytes,
                received_frames: now.received_frames,
                received_bytes: now.received_bytes,
                received_invalid: now.received_invalid,
                lost_sent: now.lost_sent,
                lost_received: now.lost_received,
                kicks: now.kicks,
                calls: now.calls,
            };
            pointer::put(counters, copy, "counters")?;
            Ok(0)
        })
    }
}
