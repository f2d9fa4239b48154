//! Errors of an operator who names an interface for AF_XDP.

use std::io;

/// The reason for which an interface cannot be used. Each is one sentence for an operator.
#[derive(Debug, thiserror::Error)]
pub enum XdpError {
    /// There is no interface with this name.
    #[error("port xdp:{interface}: there is no such interface")]
    NoInterface {
        /// The interface.
        interface: String,
    },
    /// The kernel was built without AF_XDP, or is older than Linux 5.9.
    #[error("port xdp:{interface}: this kernel has no AF_XDP, which needs Linux 5.9 with CONFIG_XDP_SOCKETS")]
    Unsupported {
        /// The interface.
        interface: String,
    },
    /// The program has too few privileges.
    #[error(
        "port xdp:{interface}: AF_XDP needs privileges that this process lacks ({missing}): start it as root, or give \
         it these with AmbientCapabilities= of systemd"
    )]
    Denied {
        /// The interface.
        interface: String,
        /// The capabilities that the program does not have, with a comma between two.
        missing: String,
    },
    /// The capabilities of the program are not those of the host.
    #[error(
        "port xdp:{interface}: AF_XDP needs the capability CAP_BPF of the host, and this process is in a user namespace: \
         start it outside of that, or choose another port"
    )]
    Namespace {
        /// The interface.
        interface: String,
    },
    /// The interface does not have enough queues.
    #[error(
        "port xdp:{interface}: the interface has no queue {queue}: choose others with num-queue-pairs and queue=N, or \
         give it more with ethtool -L"
    )]
    NoQueue {
        /// The interface.
        interface: String,
        /// The first queue that it does not have.
        queue: u16,
    },
    /// Another socket has the queue.
    #[error("port xdp:{interface}: queue {queue} is in use by another program")]
    QueueInUse {
        /// The interface.
        interface: String,
        /// The queue.
        queue: u16,
    },
    /// Another program of XDP is at the interface.
    #[error(
        "port xdp:{interface}: the interface has an XDP program already, of another program or card (ip link show dev \
         {interface})"
    )]
    InUse {
        /// The interface.
        interface: String,
    },
    /// The process may not have so much memory that the kernel uses too.
    #[error(
        "port xdp:{interface}: a queue needs 8 MiB of locked memory: raise the limit (LimitMEMLOCK= of systemd, ulimit \
         -l) or add the capability CAP_IPC_LOCK"
    )]
    Memory {
        /// The interface.
        interface: String,
    },
    /// The kernel refuses something else.
    #[error("port xdp:{interface}: {what} failed")]
    Call {
        /// The interface.
        interface: String,
        /// The call.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}
