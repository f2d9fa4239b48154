//! The socket of a queue, its memory and its rings, which the crate `xdp` has.
#![expect(unsafe_code, reason = "island: the library cannot tell that its memory outlives its packets")]

use kickless_spec::net::{ETHERNET_HEADER_LEN, Header, VLAN_TAG_LEN};
use rustix::io::{Errno, dup};
use rustix::net::{SendFlags, send, sockopt};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use xdp::error::PacketError;
use xdp::slab::{Slab, StackSlab};
use xdp::socket::{XdpSocket, XdpSocketBuilder};
use xdp::umem::{FrameSize, UmemCfgBuilder};
use xdp::{CompletionRing, Packet, RingConfigBuilder, RxRing, Umem, WakableFillRing, WakableTxRing};

const HEADER: usize = size_of::<Header>();
/// Frames of memory for each direction, and entries of each ring. A worker that comes every 100 us at 10
/// million frames a second finds all of them used.
pub(super) const FRAMES: u32 = 1024;
/// Bytes that the kernel keeps before each frame (`XDP_PACKET_HEADROOM`).
const KERNEL_HEADROOM: usize = 256;
/// The size of a frame in memory: the largest that the kernel takes.
const CHUNK: usize = 4096;
/// The length of the longest frame.
pub const FRAME_LEN_MAX: usize = CHUNK - KERNEL_HEADROOM - HEADER;
/// The largest MTU whose frames are not longer, with the tag of a VLAN.
pub const MTU_MAX: u16 = (FRAME_LEN_MAX - ETHERNET_HEADER_LEN - VLAN_TAG_LEN) as u16;
/// The frames that the kernel sends in one call when it copies them (`TX_BATCH_SIZE`).
const SENT_IN_ONE_CALL: usize = 32;
/// The most calls of one flush, which hold the lock of the queue: enough for the frames of one turn.
const CALLS_MAX: usize = 9;
/// Frames in succession that an interface drops before it counts as down. One alone may have met a full
/// queue.
const REFUSALS_MAX: u32 = 8;
/// Used frames that go back to the kernel together, so that few accesses to its line are needed.
const FILL_BATCH: usize = 16;

/// The state of the interface, as far as the last call has told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum XdpLink {
    /// It takes frames.
    #[default]
    Up,
    /// It is down.
    Down,
    /// It was deleted, or moved to another network namespace.
    Gone,
}

/// The rings of one queue. The fields end in this order, so the memory outlives the socket. The library
/// has slices of the rings, which the kernel writes too: it reads an entry only after the number that
/// publishes it.
pub(super) struct Rings {
    _socket: XdpSocket,
    /// The same socket. The library's has no owner of its descriptor that could be borrowed.
    fd: OwnedFd,
    fill: WakableFillRing,
    receive: RxRing,
    transmit: WakableTxRing,
    completion: CompletionRing,
    memory: Umem,
    /// Frames that were received, and that the kernel has not got back.
    to_fill: usize,
    /// Frames that the kernel has and that it has not completed.
    sending: usize,
    /// The most frames of these that the kernel may not have begun to send.
    unsent: usize,
    /// Calls in succession in which the interface has dropped a frame.
    refusals: u32,
    /// The kernel moves frames without a copy, and may wait to be told of memory.
    is_zero_copy: bool,
    pub(super) link: XdpLink,
}

/// The step of [`Rings::open`] that failed.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(super) enum OpenError {
    /// The socket.
    Socket(#[from] xdp::socket::SocketError),
    /// The memory.
    Memory(#[from] xdp::error::Error),
    /// A mapping or a descriptor.
    Call(#[from] io::Error),
}

impl Rings {
    /// Opens a socket for a queue of an interface.
    pub(super) fn open(interface: u32, queue: u32) -> Result<Self, OpenError> {
        let memory = UmemCfgBuilder {
            frame_size: FrameSize::FourK,
            head_room: HEADER as u32,
            frame_count: 2 * FRAMES,
            ..UmemCfgBuilder::default()
        };
        let memory = Umem::map(memory.build()?)?;
        let rings = RingConfigBuilder {
            rx_count: FRAMES,
            tx_count: FRAMES,
            fill_count: FRAMES,
            completion_count: FRAMES,
        };
        let mut builder = XdpSocketBuilder::new()?;
        let (rings, flags) = builder.build_wakable_rings(&memory, rings.build()?)?;
        let socket = builder.bind(xdp::nic::NicIndex::new(interface), queue, flags)?;
        // SAFETY: the socket is open during this call.
        let fd = dup(unsafe { BorrowedFd::borrow_raw(socket.raw_fd()) }).map_err(io::Error::from)?;
        let (Some(receive), Some(transmit)) = (rings.rx_ring, rings.tx_ring) else {
            return Err(io::Error::from(io::ErrorKind::Unsupported).into());
        };
        let (fill, completion) = (rings.fill_ring, rings.completion_ring);
        let mut rings = Self {
            _socket: socket,
            fd,
            fill,
            receive,
            transmit,
            completion,
            memory,
            to_fill: FRAMES as usize,
            sending: 0,
            unsent: 0,
            refusals: 0,
            is_zero_copy: false,
            link: XdpLink::Up,
        };
        rings.is_zero_copy = sockopt::xdp_options(&rings.fd)
            .is_ok_and(|options| options.contains(rustix::net::xdp::XdpOptionsFlags::XDP_OPTIONS_ZEROCOPY));
        rings.fill();
        Ok(rings)
    }

    /// Returns whether the kernel moves frames without a copy.
    pub(super) fn is_zero_copy(&self) -> bool {
        self.is_zero_copy
    }

    /// Gives the kernel frames to receive into.
    fn fill(&mut self) {
        // SAFETY: the memory is a field behind the socket, so it ends later.
        let filled = unsafe { self.fill.enqueue(&mut self.memory, self.to_fill, self.is_zero_copy) };
        // The call that tells the kernel fails after all frames were added, for example while the
        // interface is down.
        self.to_fill -= filled.unwrap_or(self.to_fill);
    }

    /// Passes the next received frame to `take`, behind space for a virtio-net header. Returns `None` if
    /// there is none.
    pub(super) fn receive<R>(&mut self, take: impl FnOnce(&mut [u8]) -> R) -> Option<R> {
        let mut slab = StackSlab::<1>::new();
        // SAFETY: the packet goes back to the memory below, which is a field of the same struct.
        let received = unsafe { self.receive.recv(&self.memory, &mut slab) };
        let packet = (received > 0).then(|| slab.pop_back()).flatten();
        let Some(mut packet) = packet else {
            if self.to_fill > 0 {
                self.fill();
            }
            return None;
        };
        let result = packet.adjust_head(-(HEADER as i32)).is_ok().then(|| take(&mut packet));
        self.memory.free_packet(packet);
        self.to_fill += 1;
        if self.to_fill >= FILL_BATCH {
            self.fill();
        }
        result
    }

    /// Takes back the frames that the kernel has sent. Returns whether there were some.
    fn reap(&mut self) -> bool {
        let completed = self.completion.dequeue(&mut self.memory, FRAMES as usize);
        self.sending -= completed;
        self.unsent = self.unsent.min(self.sending);
        completed > 0
    }

    /// Returns whether there is memory for another frame to send.
    pub(super) fn has_room(&mut self) -> bool {
        if self.sending == FRAMES as usize {
            self.reap();
        }
        self.sending < FRAMES as usize
    }

    /// Adds a frame, which [`Rings::flush`] sends. `write` gets space for a virtio-net header and for a
    /// frame of `len_max` bytes. It writes the frame and returns its length. Returns `None` if there is
    /// no room for so long a frame.
    pub(super) fn push<E>(
        &mut self,
        len_max: usize,
        write: impl FnOnce(&mut [u8]) -> Result<usize, E>,
    ) -> Option<Result<(), E>> {
        if len_max > FRAME_LEN_MAX || !self.has_room() {
            return None;
        }
        // SAFETY: the packet goes to the kernel or back to the memory below, a field behind the socket.
        let mut packet = unsafe { self.memory.alloc() }?;
        let len = extend(&mut packet, len_max).map(|()| write(&mut packet));
        let is_cut = match &len {
            Ok(Ok(len)) => cut(&mut packet, len_max, *len).is_ok(),
            _ => false,
        };
        if !is_cut {
            self.memory.free_packet(packet);
            return len.ok().map(|written| written.map(|_| ()));
        }
        let mut slab = StackSlab::<1>::new();
        slab.push_front(packet);
        // SAFETY: the memory is a field behind the socket, so it ends later.
        let sent = unsafe { self.transmit.send(&mut slab, false) };
        if !sent.is_ok_and(|sent| sent > 0) {
            // The kernel has completed a frame before it took it out of the ring.
            if let Some(packet) = slab.pop_back() {
                self.memory.free_packet(packet);
            }
            return None;
        }
        self.sending += 1;
        self.unsent += 1;
        Some(Ok(()))
    }

    /// Tells the kernel of the frames that were added. Returns whether frames have moved, and the number
    /// that the interface has dropped.
    pub(super) fn flush(&mut self) -> (bool, u32) {
        let (mut has_moved, mut dropped) = (self.reap(), 0);
        let calls = (self.unsent / SENT_IN_ONE_CALL + 1).min(CALLS_MAX);
        for _ in 0..calls {
            let sent = send(&self.fd, &[], SendFlags::DONTWAIT);
            if sent != Err(Errno::BUSY) {
                self.refusals = 0;
            }
            match sent {
                Ok(_) => {
                    // With copies, the kernel has taken all frames. Without, it was only woken.
                    has_moved |= self.reap() | (self.unsent > 0 && !self.is_zero_copy);
                    (self.unsent, self.link) = (0, XdpLink::Up);
                    return (has_moved, dropped);
                }
                // The interface has no room, or the kernel has sent its batch.
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::INTR) => self.link = XdpLink::Up,
                // The driver has dropped a frame. It drops each one without a carrier.
                Err(Errno::BUSY) => {
                    (self.refusals, dropped) = (self.refusals + 1, dropped + 1);
                    if self.refusals >= REFUSALS_MAX {
                        self.link = XdpLink::Down;
                    }
                }
                Err(Errno::NXIO) => self.link = XdpLink::Gone,
                Err(_) => self.link = XdpLink::Down,
            }
            has_moved |= self.reap();
            if self.link != XdpLink::Up {
                break;
            }
        }
        (has_moved, dropped)
    }

    /// Returns whether the kernel has not begun to send frames that were added.
    pub(super) fn is_waiting(&self) -> bool {
        self.unsent > 0
    }
}

impl AsFd for Rings {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Makes an empty packet one with a header and `len_max` bytes. The casts are lossless, because both are
/// short.
fn extend(packet: &mut Packet, len_max: usize) -> Result<(), PacketError> {
    packet.adjust_head(-(HEADER as i32))?;
    packet.adjust_tail(len_max as i32)
}

/// Removes the header of such a packet, and the bytes behind `len`.
fn cut(packet: &mut Packet, len_max: usize, len: usize) -> Result<(), PacketError> {
    packet.adjust_head(HEADER as i32)?;
    packet.adjust_tail(-(len_max.saturating_sub(len) as i32))
}
