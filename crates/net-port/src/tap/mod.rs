//! TAPs: interfaces of the host whose other end is a program.
//!
//! A frame at a TAP has a virtio-net header of 12 bytes before it, in both directions. So a frame that the
//! kernel has not segmented passes whole. `docs/adr/0012-a-frame-is-read-whole.md` has the facts about the
//! kernel that this module and `net` rely on.

mod error;
mod hand_over;
mod queue;
mod shared;
mod sys;

pub use error::TapError;
pub use queue::{ReceiveError, SendError, TapQueue};
pub use sys::NAME_MAX as INTERFACE_NAME_MAX;

use bitflags::bitflags;
use kickless_opener::NoTap;
use kickless_spec::net::Header;
use kickless_sync::lock;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;
use tracing::info;

/// Bytes of sent frames that wait in queues of the host, and beyond which a TAP takes no more. A frame of 64
/// KiB counts twice its length at most, so eight of them may wait.
const SEND_BUFFER: i32 = 1 << 20;
/// The kind of interface: with Ethernet headers, without further bytes before them, with virtio-net headers.
const FLAGS: i32 = KIND | libc::IFF_NO_PI;
/// The part of [`FLAGS`] that the kernel reports. It has another meaning for the bit of IFF_NO_PI then.
const KIND: i32 = libc::IFF_TAP | libc::IFF_VNET_HDR;

bitflags! {
    /// Offloads that the readers of a TAP take, with the kernel's numbers.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Offloads: u32 {
        /// Partial checksums. All others need it.
        const CHECKSUM = libc::TUN_F_CSUM;
        /// Unsegmented TCP over IPv4.
        const TSO4 = libc::TUN_F_TSO4;
        /// Unsegmented TCP over IPv6.
        const TSO6 = libc::TUN_F_TSO6;
        /// Unsegmented TCP with ECN. Needs one of the two before.
        const ECN = libc::TUN_F_TSO_ECN;
        /// Unsegmented UDP. The kernel takes it only for both versions of IP.
        const USO = libc::TUN_F_USO4 | libc::TUN_F_USO6;
    }
}

/// Returns whether the kernel accepts this name of an interface. A `%` would make the kernel choose a number.
pub fn is_interface_name(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_graphic() && !b"/:%,".contains(&byte);
    let is_name = (1..=INTERFACE_NAME_MAX).contains(&name.len()) && name.bytes().all(is_allowed);
    is_name && ![".", ".."].contains(&name)
}

impl Offloads {
    /// Removes the offloads that the kernel does not take without another that is missing.
    fn consistent(mut self) -> Self {
        if !self.intersects(Self::TSO4 | Self::TSO6) {
            self.remove(Self::ECN);
        }
        if self.contains(Self::CHECKSUM) { self } else { Self::empty() }
    }
}

/// A TAP with one queue for each pair of rings. All its calls may wait for the kernel's network
/// configuration.
#[derive(Debug)]
pub struct Tap {
    name: String,
    queues: Vec<OwnedFd>,
    segments_udp: bool,
    settings: Mutex<Settings>,
}

/// The settings that the kernel has now.
#[derive(Debug)]
struct Settings {
    offloads: Offloads,
    /// Whether each queue is attached.
    attached: Vec<bool>,
    /// Queues can be attached and detached. A TAP with one queue is always attached.
    detaches: bool,
    /// The queues are not of a TAP.
    is_socket: bool,
}

impl Tap {
    /// Opens the TAP `name` with this number of queues, or makes it. A TAP that it makes disappears with the
    /// last descriptor.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn open(name: &str, queues: u16) -> Result<Self, TapError> {
        let first = Self::open_queue(name, libc::IFF_MULTI_QUEUE)?;
        let mut detaches = true;
        let first = match first {
            Ok(first) => first,
            // The TAP may exist with one queue only.
            Err(Errno::INVAL) => match Self::open_queue(name, 0)? {
                Ok(_) if queues > 1 => return Err(TapError::OneQueue { name: name.into(), queues }),
                Ok(first) => {
                    detaches = false;
                    first
                }
                Err(Errno::INVAL) => return Err(TapError::NotTap { name: name.into() }),
                Err(error) => return Err(TapError::of(name, error)),
            },
            Err(error) => return Err(TapError::of(name, error)),
        };
        // A TAP that was made before stays after the programs that use it.
        if let Ok((_, flags)) = sys::interface(first.as_fd())
            && flags & libc::IFF_PERSIST == 0
        {
            info!(tap = name, "the TAP was not there: it is made, and goes when this program ends");
        }
        let mut fds = vec![first];
        for _ in 1..queues {
            let queue = Self::open_queue(name, libc::IFF_MULTI_QUEUE)?;
            fds.push(queue.map_err(|error| TapError::of(name, error))?);
        }
        let attached = vec![true; fds.len()];
        Self::prepare(name.to_owned(), fds, attached, detaches)
    }

    /// Returns the kernel's refusal of the interface as a value.
    fn open_queue(name: &str, flag: i32) -> Result<Result<OwnedFd, Errno>, TapError> {
        match kickless_opener::tap(name, FLAGS | flag) {
            Ok(queue) => Ok(Ok(queue)),
            Err(NoTap::Device(error)) => Err(TapError::Device(error)),
            Err(NoTap::Interface(error)) => Ok(Err(Errno::from_io_error(&error).unwrap_or(Errno::INVAL))),
        }
    }

    /// Takes queues that another program has opened. Some of them may be detached.
    ///
    /// # Errors
    /// A descriptor is not a queue of a TAP with virtio-net headers, or they are of several TAPs.
    pub fn adopt(fds: Vec<OwnedFd>) -> Result<Self, TapError> {
        let mut found: Option<String> = None;
        let mut attached = Vec::with_capacity(fds.len());
        let mut detaches = false;
        for fd in &fds {
            let Ok((name, flags)) = sys::interface(fd.as_fd()) else { return Err(TapError::NotTapFd) };
            if flags & KIND != KIND {
                return Err(TapError::Mode { name });
            }
            detaches = flags & libc::IFF_MULTI_QUEUE != 0;
            if !detaches && fds.len() > 1 {
                return Err(TapError::OneQueue { name, queues: fds.len() as u16 });
            }
            if let Some(other) = found.take_if(|other| *other != name) {
                return Err(TapError::Several { name, other });
            }
            let flags_of_file = fcntl_getfl(fd).map_err(|error| TapError::of(&name, error))?;
            fcntl_setfl(fd, flags_of_file | OFlags::NONBLOCK).map_err(|error| TapError::of(&name, error))?;
            attached.push(flags & libc::IFF_DETACH_QUEUE == 0);
            found = Some(name);
        }
        let (Some(name), Some(first)) = (found, fds.first()) else { return Err(TapError::NotTapFd) };
        match sys::has_packet_information(first.as_fd()) {
            Ok(false) => Self::prepare(name, fds, attached, detaches),
            Ok(true) => Err(TapError::Mode { name }),
            Err(source) => Err(TapError::Call { name, source }),
        }
    }

    /// Returns a port whose queues are connected datagram sockets instead of a TAP. Each datagram is a frame
    /// with its header. It may segment UDP or not. This is for tests, which need no privilege for it.
    #[doc(hidden)]
    pub fn over_sockets(queues: Vec<OwnedFd>, segments_udp: bool) -> Self {
        let attached = vec![true; queues.len()];
        let settings = Settings { offloads: Offloads::empty(), attached, detaches: false, is_socket: true };
        Self { name: "sockets".into(), queues, segments_udp, settings: Mutex::new(settings) }
    }

    /// Makes a TAP of its queues, of which some are attached. Detaches them if the TAP can do that.
    fn prepare(
        name: String,
        queues: Vec<OwnedFd>,
        attached: Vec<bool>,
        detaches: bool,
    ) -> Result<Self, TapError> {
        let refused = |error: io::Error| TapError::Call { name: name.clone(), source: error };
        let Some(first) = queues.first() else { return Err(TapError::NotTapFd) };
        let first = first.as_fd();
        sys::set_number(first, libc::TUNSETVNETHDRSZ, size_of::<Header>() as i32).map_err(refused)?;
        sys::set_number(first, libc::TUNSETVNETLE, 1).map_err(refused)?;
        sys::set_number(first, libc::TUNSETSNDBUF, SEND_BUFFER).map_err(refused)?;
        let segments_udp = sys::set_offloads(first, (Offloads::CHECKSUM | Offloads::USO).bits()).is_ok();
        sys::set_offloads(first, 0).map_err(refused)?;
        let settings = Settings { offloads: Offloads::empty(), attached, detaches, is_socket: false };
        let tap = Self { name, queues, segments_udp, settings: Mutex::new(settings) };
        tap.set(Offloads::empty(), |_| false);
        Ok(tap)
    }

    /// Returns the name of the interface.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether the kernel segments UDP (USO), which is so from Linux 6.2 on.
    pub fn segments_udp(&self) -> bool {
        self.segments_udp
    }

    /// Returns the queue of a pair of rings, with a descriptor of its own.
    ///
    /// # Errors
    /// There is no such queue, or the process has no free descriptor.
    pub fn queue(&self, pair: u16) -> io::Result<TapQueue> {
        let queue = self.queues.get(usize::from(pair)).ok_or(io::ErrorKind::NotFound)?;
        Ok(TapQueue::new(queue.try_clone()?))
    }

    /// Returns the number of queues.
    pub fn queues(&self) -> u16 {
        self.queues.len() as u16
    }

    /// Sets the offloads that readers take, and attaches each queue for which `is_used` is true. Detaches the
    /// others and discards their frames, if the TAP has several queues.
    ///
    /// A TAP that was deleted refuses this. Its reader finds out by itself, so there is no error.
    pub fn set(&self, offloads: Offloads, is_used: impl Fn(u16) -> bool) {
        let mut settings = lock(&self.settings);
        if settings.is_socket {
            return;
        }
        let mut offloads = offloads.consistent();
        if !self.segments_udp {
            offloads.remove(Offloads::USO);
        }
        if settings.offloads != offloads
            && let Some(first) = self.queues.first()
            && sys::set_offloads(first.as_fd(), offloads.bits()).is_ok()
        {
            settings.offloads = offloads;
        }
        if !settings.detaches {
            return;
        }
        for (pair, queue) in (0..).zip(&self.queues) {
            let wanted = is_used(pair);
            if settings.attached[usize::from(pair)] != wanted && sys::attach(queue.as_fd(), wanted).is_ok() {
                settings.attached[usize::from(pair)] = wanted;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kickless_testing::in_network_namespace;

    /// The kernel reports IFF_NO_PI for any TAP without a filter, so the card finds this out by itself.
    #[test]
    fn a_tap_with_packet_information_is_refused() {
        in_network_namespace(|| {
            for (name, flags, is_ours) in [
                ("with", KIND, false),
                ("without", FLAGS, true),
                ("many", FLAGS | libc::IFF_MULTI_QUEUE, true),
            ] {
                let file = kickless_opener::tap(name, flags).unwrap();
                let (_, reported) = sys::interface(file.as_fd()).unwrap();
                assert_eq!(reported & FLAGS, FLAGS);
                let received = || {
                    let path = format!("/sys/class/net/{name}/statistics/rx_packets");
                    std::fs::read_to_string(path).unwrap_or_default()
                };
                let before = received();
                assert_eq!(sys::has_packet_information(file.as_fd()).unwrap(), !is_ours);
                assert_eq!(received(), before);
                match Tap::adopt(vec![file]) {
                    Ok(tap) => assert!(is_ours && tap.name() == name),
                    Err(error) => assert!(!is_ours && matches!(error, TapError::Mode { .. }), "{error}"),
                }
            }
        });
    }
}
