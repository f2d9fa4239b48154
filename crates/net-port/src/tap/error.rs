//! Errors of an operator who names a TAP.

use kickless_opener::{NoDescriptor, user_id};
use rustix::io::Errno;
use std::io;

/// The reason for which a TAP cannot be opened. Each is one sentence for an operator.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// There is no /dev/net/tun, or this program may not open it.
    #[error("/dev/net/tun cannot be opened")]
    Device(#[source] io::Error),
    /// The program may not make or open the interface.
    #[error(
        "the TAP {name} is missing, or belongs to another user than {user}: as root, ip link delete {name} if it is \
         there, and ip tuntap add dev {name} mode tap user {user}",
        user = user_id()
    )]
    Denied {
        /// The interface.
        name: String,
    },
    /// Another program uses the interface.
    #[error("the TAP {name} is in use by another program")]
    Busy {
        /// The interface.
        name: String,
    },
    /// The interface is the uplink of another switch.
    #[error("the TAP {name} is the uplink of the switch {switch} already")]
    OtherSwitch {
        /// The interface.
        name: String,
        /// The switch.
        switch: String,
    },
    /// There is another kind of interface with this name.
    #[error("the interface {name} exists and is not a TAP")]
    NotTap {
        /// The interface.
        name: String,
    },
    /// The TAP was made for one queue.
    #[error(
        "the TAP {name} has one queue, and the card has {queues} pairs of queues: make the TAP with multi_queue, or \
         set num-queue-pairs to 1"
    )]
    OneQueue {
        /// The interface.
        name: String,
        /// The number of pairs.
        queues: u16,
    },
    /// The process did not inherit a descriptor.
    #[error("the program inherited no descriptor {fd}")]
    NotInherited {
        /// The number of the descriptor.
        fd: String,
    },
    /// The process has no free descriptor.
    #[error("the descriptor {fd} cannot be duplicated")]
    Descriptor {
        /// The number of the inherited descriptor.
        fd: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The other process gives another interface.
    #[error("the other process gives the TAP {name}, and the port is the TAP {wanted}")]
    Another {
        /// The interface that it gives.
        name: String,
        /// The interface of the port.
        wanted: String,
    },
    /// The other process gives more or fewer queues than the card has.
    #[error(
        "the other process gives {given} queues of the TAP {name}, and the card has {queues} pairs of queues"
    )]
    OtherQueues {
        /// The interface.
        name: String,
        /// The number that it gives.
        given: usize,
        /// The number of pairs.
        queues: u16,
    },
    /// A read of a queue that the other process gives would wait for a frame.
    #[error("the other process gives a queue of the TAP {name} without O_NONBLOCK")]
    Waits {
        /// The interface.
        name: String,
    },
    /// The state of the other process is not valid.
    #[error("the TAP cannot be taken over: {0}")]
    Given(#[from] kickless_handover::Error),
    /// The descriptor of this name is not there.
    #[error(transparent)]
    Named(#[from] NoDescriptor),
    /// A descriptor is not a queue of a TAP or TUN.
    #[error(
        "the descriptor is of no TAP that exists; if the TAP was deleted, remove the device and add it again"
    )]
    NotTapFd,
    /// A descriptor is of a TAP that carries other headers.
    #[error("the interface {name} was not opened as a TAP with IFF_VNET_HDR and IFF_NO_PI")]
    Mode {
        /// The interface.
        name: String,
    },
    /// The descriptors are of several TAPs.
    #[error("the descriptors are queues of two TAPs, {other} and {name}")]
    Several {
        /// The interface of a later descriptor.
        name: String,
        /// The interface of the first one.
        other: String,
    },
    /// The kernel refuses something else.
    #[error("the TAP {name} cannot be opened")]
    Call {
        /// The interface.
        name: String,
        /// The kernel's error.
        source: io::Error,
    },
}

impl TapError {
    pub(super) fn of(name: &str, error: Errno) -> Self {
        let name = name.to_owned();
        match error {
            Errno::PERM | Errno::ACCESS => Self::Denied { name },
            Errno::BUSY => Self::Busy { name },
            error => Self::Call { name, source: error.into() },
        }
    }
}
