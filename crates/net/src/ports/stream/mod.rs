//! The port `stream:PATH`: a program that listens on a unix socket, with the framing of QEMU's `-netdev
//! stream`.

mod receive;
mod transmit;

use super::hand_over::{GivePort, Passing, cannot_give, contradicts};
use super::port::{Name, OpenPort, Opening, Pairs, Port, PortError, PortKind};
use crate::card::state::CardState;
use crate::ring::receive_ring::ReceiveRing;
use crate::ring::receive_task::ReceiveTask;
use crate::ring::transmit_ring::TransmitRing;
use crate::ring::transmit_task::TransmitTask;
use kickless_device::{GiveError, Handed, QueueTask, StartError};
use kickless_handover::{Given, Giving, Part};
use kickless_net_port::StreamPort;
use kickless_opener::Target;
use receive::StreamReceive;
use std::path::PathBuf;
use std::sync::Arc;
use std::{fmt, io};
use tracing::warn;
use transmit::StreamTransmit;

/// The longest path of a unix socket, without the zero behind it.
const SOCKET_PATH_MAX: usize = 107;

/// The port `stream:PATH`.
pub(crate) const STREAM: PortKind = PortKind {
    form: "stream:PATH",
    help: "stream:PATH connects to a program that listens on a unix socket, with the framing of QEMU's -netdev stream",
    pairs: Pairs::One,
    parse: |text| {
        let path = text.strip_prefix("stream:")?;
        Some(match (1..=SOCKET_PATH_MAX).contains(&path.len()) && !path.contains('\0') {
            true => Ok(Arc::new(StreamName(path.into()))),
            false => Err(InvalidPath.into()),
        })
    },
};

/// The path of the socket.
#[derive(Debug)]
struct StreamName(PathBuf);

/// The error of a path that is empty, or too long for a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the path of a stream has 1 to {SOCKET_PATH_MAX} bytes")]
struct InvalidPath;

impl Name for StreamName {
    fn pairs(&self) -> Option<u16> {
        Some(1)
    }

    fn mtu_max(&self) -> Option<u16> {
        None
    }

    fn target(&self) -> Option<Target> {
        Some(Target::Unix { path: self.0.clone() })
    }

    fn open(&self, opening: &Opening<'_>) -> Result<OpenPort, PortError> {
        open(StreamPort::to(&self.0)?, opening)
    }
}

/// Opens a port, which goes on with the connection that another process gives.
pub(super) fn open(port: StreamPort, opening: &Opening<'_>) -> Result<OpenPort, PortError> {
    if let Some(Handed { state, given }) = opening.take_handed() {
        port.take_over(state, given)?;
    }
    Ok(port.into())
}

impl fmt::Display for StreamName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream:{}", self.0.display())
    }
}

impl Port for StreamPort {
    fn start(&self, _card: &Arc<CardState>) -> io::Result<()> {
        StreamPort::start(self)
    }

    fn close(&self) {
        self.end();
    }

    fn receive(&self, ring: ReceiveRing) -> io::Result<Box<dyn QueueTask>> {
        let port = StreamReceive(self.receiver()?);
        Ok(ReceiveTask::boxed(ring, port))
    }

    fn transmit(&self, ring: TransmitRing) -> io::Result<Box<dyn QueueTask>> {
        let port = StreamTransmit::new(self.sender()?);
        Ok(TransmitTask::boxed(ring, port))
    }

    fn passing(&self) -> Passing<'_> {
        Passing::Given(self)
    }

    fn announce(&self, frame: &[u8]) {
        match self.sender() {
            Ok(sender) => {
                let mut outgoing = sender.turn();
                if outgoing.has_room() {
                    outgoing.push(frame);
                    outgoing.flush();
                }
            }
            Err(error) => warn!(%error, "the guest's address cannot be announced"),
        }
    }
}

/// Only tasks read and write the socket. The thread can connect until this process ends: that connection ends
/// with it, and the new process makes another one.
impl GivePort for StreamPort {
    fn changes(&self) -> u64 {
        StreamPort::changes(self)
    }

    fn give(&self, to: &mut Giving) -> Result<Part, GiveError> {
        StreamPort::give(self, to).map_err(cannot_give)
    }

    fn hold(&self) {}

    fn give_final(&self, to: &mut Giving) -> Result<Part, GiveError> {
        StreamPort::give_final(self, to).map_err(cannot_give)
    }

    fn take_back(&self) {}

    fn receive_final(&self, state: Part, given: &Given) -> Result<(), StartError> {
        self.go_on(state, given).map_err(contradicts)
    }
}
