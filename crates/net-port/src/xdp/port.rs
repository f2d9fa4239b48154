//! The queues of an interface, one for each pair of rings.

use super::program::{Attached, Sockets};
use super::rings::{FRAMES, OpenError, Rings, XdpLink};
use super::{XdpError, XdpName, privileges};
use kickless_sync::lock;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, netdevice, socket_with, sockopt};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use std::{fmt, io, thread};
use tracing::info;
use xdp::socket::SocketError;

/// The time in which a queue whose socket was closed becomes free. It was below 50 ms on an idle machine.
const RELEASE_LIMIT: Duration = Duration::from_secs(1);
/// The time between two looks at such a queue.
const RELEASE_CHECK: Duration = Duration::from_millis(10);

/// An interface with an XDP program that passes the frames of some queues to this port.
#[derive(Debug)]
pub struct XdpPort {
    interface: String,
    queues: Vec<Arc<Queue>>,
    _program: Attached,
}

/// A queue, which both rings of a pair share. Their tasks are on one worker most of the time, so the lock
/// is free mostly. A thread that announces an address takes it too.
struct Queue {
    /// The socket, for calls that need no ring. It is before the rings, so that it is closed before their
    /// memory ends.
    socket: OwnedFd,
    rings: Mutex<Rings>,
}

impl XdpPort {
    /// Opens queues of an interface for a card with this number of pairs.
    ///
    /// # Errors
    /// There is no such interface or queue, something else uses it, or the privileges do not suffice.
    pub fn open(name: &XdpName, pairs: u16) -> Result<Self, XdpError> {
        let interface = &name.interface;
        let fail = |what, error: io::Error| of_call(interface, what, error);
        let index = index_of(interface)?;
        let end = name.queue.saturating_add(pairs);
        let sockets = Sockets::new(end.into()).map_err(|error| fail("making a map of sockets", error))?;
        // The program is first, because it shows whether the interface is free. Without a socket, frames
        // stay with the host.
        let program = sockets.attach(index).map_err(|error| match Errno::from_io_error(&error) {
            Some(Errno::BUSY | Errno::EXIST) => XdpError::InUse { interface: interface.clone() },
            _ => fail("attaching a program", error),
        })?;
        let mut queues = Vec::new();
        for queue in name.queue..end {
            if !sends(index, queue) {
                return Err(XdpError::NoQueue { interface: interface.clone(), queue });
            }
            let rings = open_rings(index, queue).map_err(|error| of_open(interface, queue, error))?;
            sockets
                .set(queue.into(), rings.as_fd())
                .map_err(|error| fail("giving a queue its socket", error))?;
            let socket =
                rings.as_fd().try_clone_to_owned().map_err(|error| fail("setting up a socket", error))?;
            queues.push(Arc::new(Queue { socket, rings: Mutex::new(rings) }));
        }
        let zero_copy = queues.iter().filter(|queue| lock(&queue.rings).is_zero_copy()).count();
        let copies = zero_copy < queues.len();
        info!(interface, native = program.is_native, copies, "the port has its queues of the interface");
        Ok(Self { interface: interface.clone(), queues, _program: program })
    }

    /// Returns the name of the interface.
    pub fn interface(&self) -> &str {
        &self.interface
    }

    /// Returns the queue of a pair of rings, with a descriptor of its own.
    ///
    /// # Errors
    /// There is no such queue, or the process has no free descriptor.
    pub fn queue(&self, pair: u16) -> io::Result<XdpQueue> {
        let queue = self.queues.get(usize::from(pair)).ok_or(io::ErrorKind::NotFound)?.clone();
        let fd = queue.socket.try_clone()?;
        Ok(XdpQueue { fd, queue })
    }

    /// Returns the number of frames for the card that the kernel has dropped, because the card took none
    /// for too long, or because they were too long.
    pub fn dropped(&self) -> u64 {
        self.queues.iter().map(|queue| queue.dropped()).sum()
    }

    /// Returns whether the interface was deleted or moved since the last call.
    pub fn was_lost(&self) -> bool {
        // Each socket has an error of its own, which a look takes away. So all are looked at.
        self.queues.iter().filter(|queue| queue.is_unbound()).count() > 0
    }
}

impl Queue {
    /// Returns the number of frames for this queue that the kernel has dropped.
    fn dropped(&self) -> u64 {
        // A look into an empty fill ring is counted too, and the frame without memory as dropped.
        sockopt::xdp_statistics(&self.socket)
            .map_or(0, |all| all.rx_dropped + all.rx_ring_full.unwrap_or_default())
    }

    /// Returns whether the kernel has unbound the socket from its interface since the last call.
    fn is_unbound(&self) -> bool {
        sockopt::socket_error(&self.socket) == Ok(Err(Errno::NETDOWN))
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Queue")
    }
}

/// A queue of an interface, for one task. The descriptor is readable while frames wait to be received.
#[derive(Debug)]
pub struct XdpQueue {
    fd: OwnedFd,
    queue: Arc<Queue>,
}

impl XdpQueue {
    /// Begins a turn.
    pub fn turn(&self) -> XdpTurn<'_> {
        XdpTurn(lock(&self.queue.rings))
    }
}

impl AsFd for XdpQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The result of [`XdpTurn::flush`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XdpFlushed {
    /// The kernel has sent frames since the last time, or has begun to.
    pub has_moved: bool,
    /// Frames that the interface has dropped, for example without a carrier.
    pub dropped: u32,
}

/// A queue, for one turn of a task.
pub struct XdpTurn<'a>(MutexGuard<'a, Rings>);

impl XdpTurn<'_> {
    /// Passes the next received frame to `take`, behind space for a virtio-net header. Returns `None` if
    /// there is none.
    pub fn receive<R>(&mut self, take: impl FnOnce(&mut [u8]) -> R) -> Option<R> {
        self.0.receive(take)
    }

    /// Discards the frames that were received. Returns their number.
    pub fn discard(&mut self) -> u64 {
        let mut discarded = 0;
        // Others come meanwhile. The kernel has memory for so many at a time.
        while discarded < FRAMES.into() && self.0.receive(|_| ()).is_some() {
            discarded += 1;
        }
        discarded
    }

    /// Returns whether there is memory for another frame to send.
    pub fn has_room(&mut self) -> bool {
        self.0.has_room()
    }

    /// Adds a frame, which [`XdpTurn::flush`] sends. `write` gets space for a virtio-net header and for a
    /// frame of `len_max` bytes, which has any bytes. It writes the frame and returns its length. Returns
    /// `None` if there is no room, or if `len_max` is more than
    /// [`XDP_FRAME_LEN_MAX`](crate::XDP_FRAME_LEN_MAX).
    ///
    /// # Errors
    /// `write` has failed. The frame is not sent then.
    pub fn push<E>(
        &mut self,
        len_max: usize,
        write: impl FnOnce(&mut [u8]) -> Result<usize, E>,
    ) -> Option<Result<(), E>> {
        self.0.push(len_max, write)
    }

    /// Tells the kernel of the frames that were added, or finds out whether the interface takes frames. Never
    /// waits.
    pub fn flush(&mut self) -> XdpFlushed {
        let (has_moved, dropped) = self.0.flush();
        XdpFlushed { has_moved, dropped }
    }

    /// Returns whether the kernel has not begun to send all frames. It begins in a later [`XdpTurn::flush`].
    pub fn is_waiting(&self) -> bool {
        self.0.is_waiting()
    }

    /// Returns what the last call told about the interface.
    pub fn link(&self) -> XdpLink {
        self.0.link
    }
}

/// Returns whether an interface has a transmit queue of this number, as far as it tells. The kernel binds
/// a socket to a queue that only receives, too, and then sends nothing.
fn sends(interface: u32, queue: u16) -> bool {
    xdp::nic::NicIndex::new(interface)
        .queue_counts()
        .map_or(true, |counts| counts.tx_count() == 0 || u32::from(queue) < counts.tx_count())
}

/// Opens the rings of a queue. Waits for the kernel, which takes a queue from a closed socket on a thread
/// of its own.
fn open_rings(interface: u32, queue: u16) -> Result<Rings, OpenError> {
    let begin = Instant::now();
    loop {
        match Rings::open(interface, queue.into()) {
            Err(OpenError::Socket(SocketError::Bind(error)))
                if Errno::from_io_error(&error) == Some(Errno::BUSY) && begin.elapsed() < RELEASE_LIMIT =>
            {
                thread::sleep(RELEASE_CHECK);
            }
            opened => return opened,
        }
    }
}

fn index_of(interface: &str) -> Result<u32, XdpError> {
    let call = |error: Errno| of_call(interface, "looking for the interface", error.into());
    // The kernel looks for interfaces through any socket.
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None).map_err(call)?;
    match netdevice::name_to_index(&socket, interface) {
        Ok(index) => Ok(index),
        Err(Errno::NODEV) => Err(XdpError::NoInterface { interface: interface.to_owned() }),
        Err(error) => Err(call(error)),
    }
}

fn of_open(interface: &str, queue: u16, error: OpenError) -> XdpError {
    let (what, error) = match error {
        OpenError::Socket(SocketError::Bind(error)) => match Errno::from_io_error(&error) {
            Some(Errno::INVAL) => return XdpError::NoQueue { interface: interface.to_owned(), queue },
            Some(Errno::BUSY) => return XdpError::QueueInUse { interface: interface.to_owned(), queue },
            _ => ("binding a socket to a queue", error),
        },
        OpenError::Socket(SocketError::SocketCreation(error)) => ("making a socket", error),
        OpenError::Socket(
            SocketError::SetSockOpt { inner, .. }
            | SocketError::GetSockOpt { inner, .. }
            | SocketError::RingMap { inner, .. },
        ) => match Errno::from_io_error(&inner) {
            Some(Errno::NOBUFS) => return XdpError::Memory { interface: interface.to_owned() },
            _ => ("setting up the memory of a socket", inner),
        },
        OpenError::Memory(error) => ("setting up the memory of a socket", io::Error::other(error)),
        OpenError::Call(error) => ("setting up a socket", error),
    };
    of_call(interface, what, error)
}

fn of_call(interface: &str, what: &'static str, error: io::Error) -> XdpError {
    let interface = interface.to_owned();
    match Errno::from_io_error(&error) {
        Some(Errno::PERM | Errno::ACCESS) => match privileges::missing() {
            Some(missing) => XdpError::Denied { interface, missing },
            None if privileges::are_of_namespace() => XdpError::Namespace { interface },
            // Something else than a capability, such as a filter of system calls.
            None => XdpError::Call { interface, what, source: error },
        },
        Some(Errno::AFNOSUPPORT | Errno::NOSYS) => XdpError::Unsupported { interface },
        Some(Errno::NODEV) => XdpError::NoInterface { interface },
        _ => XdpError::Call { interface, what, source: error },
    }
}
