//! The uplink of a switch: a TAP as one of its ports, as a trunk.
//!
//! An uplink belongs to no guest, so it has no ring, and a thread of its own carries its frames. The thread
//! sleeps while there are none. Frames to the TAP wait in an inbox, as those for a receive ring do. So a TAP
//! without room costs frames, and no ring waits for it.
//!
//! Frames of the host come with the offloads that the kernel left to do. A card undoes those that its driver
//! does not accept. The kernel does the same in the other direction.

use super::datagrams::Datagrams;
use super::delivery::Forwarder;
use super::port::SwitchPort;
use crate::card::counters::RingCounters;
use crate::frame::header::Checksum;
use crate::frame::loop_queue::{Batch, HEADER};
use crate::offload::may_have_checksum;
use crate::ports::hand_over::{Gate, GivePort, cannot_give, contradicts};
use crate::ports::port_thread::PortThread;
use kickless_device::{GiveError, StartError};
use kickless_handover::{Given, Giving, Part, v1};
use kickless_io::Waker;
use kickless_memory::Iov;
use kickless_net_port::{Offloads, ReceiveError, SendError, Tap, TapQueue};
use kickless_spec::net::{ETHERNET_HEADER_LEN, FRAME_MAX, GSO_UDP_L4, HDR_F_NEEDS_CSUM, Header};
use kickless_sync::lock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use tracing::{Span, error, warn};
use zerocopy::{FromBytes, IntoBytes};

/// The most frames of one turn in each direction, so that neither direction waits long for the other.
const FRAMES_MAX: usize = 64;
/// The length of the longest frame, without its header.
const LEN_MAX: usize = FRAME_MAX - HEADER;
/// Bytes behind the longest frame. A read that fills them has met a frame that is too long.
const SLACK: usize = 64;
/// The pause after a read that failed. An error that stays must not keep a processor busy.
const RETRY: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// The most frames from before the start that are discarded. A TAP keeps 1000 of them (`TUN_READQ_SIZE` is
/// 500).
const STALE_MAX: usize = 1000;

/// The uplinks of the open cards.
static UPLINKS: Mutex<Vec<Weak<Uplink>>> = Mutex::new(Vec::new());

/// An uplink, which several cards may name. It carries frames while a card has a [`Share`].
#[derive(Debug)]
pub(crate) struct Uplink {
    /// The name of the switch.
    name: String,
    tap: Arc<Tap>,
    counters: Arc<RingCounters>,
    /// The number of shares. Locked while the thread starts or ends.
    shares: Mutex<u32>,
    thread: PortThread,
    /// Keeps the thread from frames while another process may take the TAP over.
    gate: Arc<Gate>,
    /// Another process has carried its frames until now, so those in the TAP are to be carried.
    is_continued: AtomicBool,
}

/// A share in an uplink that runs. The uplink stops with the last share.
#[derive(Debug)]
pub(crate) struct Share(Arc<Uplink>);

impl Uplink {
    /// Returns the uplink of the switch `name` to `tap`, which cards with the same TAP share.
    pub(crate) fn of(name: &str, tap: &Arc<Tap>) -> Arc<Self> {
        let mut uplinks = lock(&UPLINKS);
        uplinks.retain(|uplink| uplink.strong_count() > 0);
        let known = uplinks.iter().filter_map(Weak::upgrade).find(|uplink| Arc::ptr_eq(&uplink.tap, tap));
        known.unwrap_or_else(|| {
            let (name, tap) = (name.to_owned(), tap.clone());
            let uplink = Arc::new(Self {
                name,
                tap,
                counters: Arc::default(),
                shares: Mutex::default(),
                thread: PortThread::default(),
                gate: Arc::default(),
                is_continued: AtomicBool::new(false),
            });
            uplinks.push(Arc::downgrade(&uplink));
            uplink
        })
    }

    /// Returns a share in the uplink, which is started if it does not run.
    ///
    /// # Errors
    /// The process has no free descriptor, or cannot have another thread.
    pub(crate) fn share(self: &Arc<Self>) -> io::Result<Share> {
        let mut shares = lock(&self.shares);
        self.thread.start("uplink", |stop| self.task(stop))?;
        *shares += 1;
        Ok(Share(self.clone()))
    }

    /// Returns the names and values of the counters.
    pub(crate) fn counters(&self) -> [(&'static str, u64); 3] {
        [
            ("uplink_sent_frames", self.counters.sent_frames.get()),
            ("uplink_received_frames", self.counters.received_frames.get()),
            ("uplink_dropped", dropped(&self.counters)),
        ]
    }

    /// Returns the work of the thread.
    fn task(&self, stop: Waker) -> io::Result<impl FnOnce() + Send + use<>> {
        let inbox = Waker::new()?;
        let port = SwitchPort::join_uplink(&self.name);
        if let Some(frames) = port.inbox(0) {
            frames.set_receiver(Some(inbox.clone()));
        }
        let task = Task {
            port,
            tap: self.tap.clone(),
            queue: self.tap.queue(0)?,
            datagrams: (!self.tap.segments_udp()).then(Datagrams::new),
            counters: self.counters.clone(),
            gate: self.gate.clone(),
            is_continued: self.is_continued.swap(false, Ordering::Relaxed),
            stop,
            inbox,
            outgoing: Batch::default(),
            next: 0,
            start: 0,
            is_full: false,
            incoming: Batch::default(),
            forwarder: Forwarder::default(),
            has_failed: false,
            span: Span::current(),
        };
        Ok(move || task.run())
    }
}

/// Each card that names the uplink gives a duplicate of its TAP. Frames that wait for the TAP are lost.
impl GivePort for Uplink {
    fn changes(&self) -> u64 {
        0
    }

    fn give(&self, to: &mut Giving) -> Result<Part, GiveError> {
        self.tap.give(to).map_err(cannot_give)
    }

    fn hold(&self) {
        self.gate.close();
    }

    fn give_final(&self, _to: &mut Giving) -> Result<Part, GiveError> {
        self.gate.wait_until_idle().map_err(cannot_give)?;
        let (tap, counters) = (self.tap.settings(), self.counters.amounts());
        Part::new(&v1::UplinkFinal { tap, counters }).map_err(cannot_give)
    }

    fn take_back(&self) {
        self.gate.open();
    }

    fn receive_final(&self, state: Part, _given: &Given) -> Result<(), StartError> {
        let v1::UplinkFinal { tap, counters } = state.read().map_err(contradicts)?;
        self.tap.believe(&tap).map_err(contradicts)?;
        self.counters.raise_to(&counters);
        self.is_continued.store(true, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut shares = lock(&self.0.shares);
        *shares -= 1;
        if *shares == 0 {
            self.0.gate.open();
            self.0.thread.end();
        }
    }
}

fn dropped(counters: &RingCounters) -> u64 {
    let all = [
        &counters.sent_refused,
        &counters.sent_down,
        &counters.sent_spoofed,
        &counters.sent_tagged,
        &counters.sent_unforwarded,
        &counters.dropped_late,
        &counters.dropped_unread,
    ];
    all.iter().map(|count| count.get()).sum()
}

/// The work of the thread.
struct Task {
    port: SwitchPort,
    tap: Arc<Tap>,
    queue: TapQueue,
    /// Only on kernels that do not segment UDP.
    datagrams: Option<Datagrams>,
    counters: Arc<RingCounters>,
    gate: Arc<Gate>,
    is_continued: bool,
    stop: Waker,
    /// Wakes the thread for frames in its inbox.
    inbox: Waker,
    /// Frames for the TAP, the number of the next one, and the offset of its header.
    outgoing: Batch,
    next: usize,
    start: usize,
    /// The TAP has no room for the next frame.
    is_full: bool,
    /// Frames from the TAP.
    incoming: Batch,
    forwarder: Forwarder,
    has_failed: bool,
    /// The span of log lines about the card that has started the uplink.
    span: Span,
}

/// The result of one turn in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// There may be more frames.
    More,
    /// There are no more frames, or no room for them.
    Idle,
    /// The TAP cannot be read now.
    Failed,
    /// The TAP was deleted.
    Gone,
}

impl Task {
    fn run(mut self) {
        let gate = self.gate.clone();
        gate.pass(|| {
            // A TAP that was taken over has these settings already.
            self.tap.set(Offloads::all(), |_| true);
            if !self.is_continued {
                self.discard_stale();
            }
        });
        while !self.stop.clear() {
            let turns = gate.pass(|| [self.send(), self.receive()]);
            if turns.contains(&Turn::Gone) {
                error!(parent: &self.span, tap = self.tap.name(), "the TAP was deleted: the switch has no uplink \
                    until all cards that name it are removed and added, or kickless is restarted");
                break;
            }
            if !turns.contains(&Turn::More) {
                self.wait(turns[1] == Turn::Failed);
            }
        }
        let waiting = self.port.inbox(0).map_or(0, |inbox| inbox.set_receiver(None));
        self.counters.dropped_late.add((waiting + self.outgoing.len() - self.next) as u64);
        self.tap.set(Offloads::empty(), |_| false);
    }

    /// Discards frames that the TAP has kept since an earlier uplink.
    fn discard_stale(&mut self) {
        let (mut header, mut space) = (Header::default(), [0; ETHERNET_HEADER_LEN]);
        for _ in 0..STALE_MAX {
            if self.queue.receive(&mut header, &mut Iov::default(), &mut space).is_err() {
                return;
            }
        }
    }

    /// Sleeps until there is something to do.
    fn wait(&mut self, has_failed: bool) {
        let readiness = match (has_failed, self.is_full) {
            (true, _) => PollFlags::empty(),
            (false, true) => PollFlags::IN | PollFlags::OUT,
            (false, false) => PollFlags::IN,
        };
        // While a frame waits for the TAP, the inbox is not looked at.
        if !self.is_full
            && let Some(inbox) = self.port.inbox(0)
        {
            inbox.wake_receiver();
        }
        let mut fds = vec![PollFd::new(&self.stop, PollFlags::IN), PollFd::new(&self.inbox, PollFlags::IN)];
        if !has_failed {
            fds.push(PollFd::from_borrowed_fd(self.queue.as_fd(), readiness));
        }
        // An error is a signal: the next turn looks at everything.
        let _ = poll(&mut fds, has_failed.then_some(&RETRY));
        self.inbox.clear();
    }

    /// Sends frames of the inbox to the TAP.
    fn send(&mut self) -> Turn {
        for _ in 0..FRAMES_MAX {
            if self.next == self.outgoing.len() {
                (self.next, self.start) = (0, 0);
                if let Some(inbox) = self.port.inbox(0) {
                    inbox.receive(&mut self.outgoing);
                }
            }
            let Some(frame) = self.outgoing.frame(self.next, self.start) else { return Turn::Idle };
            let Ok((header, _)) = Header::read_from_prefix(frame) else { return Turn::Idle };
            let (len, bytes) = (frame.len(), &frame[HEADER..]);
            let at = Checksum { start: header.csum_start.get(), offset: header.csum_offset.get() };
            let is_safe = header.flags & HDR_F_NEEDS_CSUM == 0 || may_have_checksum(bytes, at);
            let sent = match &mut self.datagrams {
                // The kernel would complete it wherever it is.
                _ if !is_safe => Err(SendError::Refused(Errno::INVAL)),
                Some(datagrams) if header.gso_type == GSO_UDP_L4 => {
                    datagrams.send(&mut self.queue, &header, bytes)
                }
                _ => self.queue.send_copy(&header, bytes),
            };
            self.is_full = sent == Err(SendError::Full);
            match sent {
                Ok(()) => self.counters.sent_frames.add(1),
                Err(SendError::Full) => return Turn::Idle,
                Err(SendError::Refused(_)) => self.counters.sent_refused.add(1),
                Err(SendError::Down) => self.counters.sent_down.add(1),
                Err(SendError::Gone) => return Turn::Gone,
            }
            // The rest of a packet that was refused is not sent with the next one.
            if let Some(datagrams) = &mut self.datagrams {
                datagrams.forget();
            }
            self.next += 1;
            self.start += len;
        }
        Turn::More
    }

    /// Receives frames from the TAP, and passes them on.
    fn receive(&mut self) -> Turn {
        let mut turn = Turn::More;
        for _ in 0..FRAMES_MAX {
            if !self.incoming.has_room(FRAME_MAX + SLACK, 1) {
                break;
            }
            let space = self.incoming.push(FRAME_MAX + SLACK);
            let mut header = Header::default();
            match self.queue.receive(&mut header, &mut Iov::default(), &mut space[HEADER..]) {
                Ok(len @ ETHERNET_HEADER_LEN..=LEN_MAX) => {
                    // As a driver receives it in one buffer.
                    header.num_buffers = 1.into();
                    space[..HEADER].copy_from_slice(header.as_bytes());
                    self.incoming.shorten(HEADER + len);
                    self.counters.received_frames.add(1);
                    continue;
                }
                Ok(_) => {
                    self.incoming.pop();
                    self.counters.dropped_unread.add(1);
                    continue;
                }
                Err(ReceiveError::Empty) => turn = Turn::Idle,
                Err(ReceiveError::Gone) => turn = Turn::Gone,
                Err(ReceiveError::Failed(error)) => {
                    if !std::mem::replace(&mut self.has_failed, true) {
                        warn!(parent: &self.span, tap = self.tap.name(), %error, "a frame of the TAP could not be read");
                    }
                    self.counters.dropped_unread.add(1);
                    turn = Turn::Failed;
                }
            }
            self.incoming.pop();
            break;
        }
        // No worker waits for this thread, so it carries all frames at once.
        let forwarded = self.port.forward(0, &mut self.incoming, &mut self.forwarder, u32::MAX);
        forwarded.count(&self.counters);
        turn
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ports::switch::rule::Rule;
    use rustix::net::sockopt::set_socket_send_buffer_size;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::os::unix::net::UnixDatagram;
    use std::time::Duration;

    /// Appends a packet of UDP in datagrams of `size` bytes.
    fn push_udp(frames: &mut Batch, payload: usize, size: u16, body: u8) {
        let header = Header {
            flags: HDR_F_NEEDS_CSUM,
            gso_type: GSO_UDP_L4,
            gso_size: size.into(),
            csum_start: 34.into(),
            csum_offset: 6.into(),
            ..Header::default()
        };
        let mut packet = [&[0xff; 6][..], &[2, 0, 0, 0, 0, 1, 8, 0, 0x45, 0]].concat();
        packet.extend((28 + payload as u16).to_be_bytes());
        packet.extend([0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 1, 1, 2, 2]);
        packet.extend((8 + payload as u16).to_be_bytes());
        packet.extend([0, 0]);
        packet.resize(42 + payload, body);
        frames.push(HEADER + packet.len()).copy_from_slice(&[header.as_bytes(), &packet].concat());
    }

    #[test]
    fn a_refused_packet_leaves_nothing_to_the_next_one() {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, peer) = socketpair(AddressFamily::UNIX, SocketType::DGRAM, flags, None).unwrap();
        // The first datagram of the first packet is too long for the socket.
        set_socket_send_buffer_size(&ours, 4096).unwrap();
        let peer = UnixDatagram::from(peer);
        peer.set_nonblocking(false).unwrap();
        peer.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let uplink = Uplink::of("test of refused packets", &Arc::new(Tap::over_sockets(vec![ours], false)));
        let share = uplink.share().unwrap();
        let sender = SwitchPort::join("test of refused packets", Rule::default(), 1);
        let mut frames = Batch::default();
        push_udp(&mut frames, 40_000, 20_000, 1);
        push_udp(&mut frames, 1000, 500, 2);
        sender.forward(0, &mut frames, &mut Forwarder::default(), u32::MAX);
        for _ in 0..2 {
            let mut datagram = [0; 2000];
            let len = peer.recv(&mut datagram).unwrap();
            assert_eq!((len, datagram[HEADER + 42]), (HEADER + 42 + 500, 2));
        }
        drop(share);
        assert_eq!((uplink.counters.sent_refused.get(), uplink.counters.sent_frames.get()), (1, 1));
    }
}
