//! The port `xdp:IFNAME[,queue=N]`: queues of an interface of the host, through AF_XDP.

mod queues;
mod receive;
mod transmit;
mod watch;

use super::hand_over::Passing;
use super::port::{Name, OpenPort, Opening, Pairs, Port, PortError, PortKind};
use crate::card::state::CardState;
use crate::ring::receive_ring::ReceiveRing;
use crate::ring::receive_task::ReceiveTask;
use crate::ring::transmit_ring::TransmitRing;
use crate::ring::transmit_task::TransmitTask;
use kickless_device::QueueTask;
use kickless_net_port::{XDP_MTU_MAX, XdpName, XdpPort};
use kickless_opener::Target;
use queues::XdpQueues;
use receive::XdpReceive;
use std::sync::Arc;
use std::{fmt, io};
use tracing::warn;
use transmit::XdpTransmit;

/// The port `xdp:IFNAME[,queue=N]`.
pub(crate) const XDP: PortKind = PortKind {
    form: "xdp:IFNAME",
    help: "xdp:IFNAME[,queue=N] takes queues of an interface of the host from N on, through AF_XDP",
    // Each queue of an interface is one less for the host.
    pairs: Pairs::One,
    parse: |text| {
        Some(match text.strip_prefix("xdp:")?.parse::<XdpName>() {
            Ok(name) => Ok(Arc::new(Interface(name))),
            Err(error) => Err(error.into()),
        })
    },
};

/// The interface, and the first of its queues.
#[derive(Debug)]
struct Interface(XdpName);

impl Name for Interface {
    fn pairs(&self) -> Option<u16> {
        None
    }

    fn mtu_max(&self) -> Option<u16> {
        Some(XDP_MTU_MAX)
    }

    fn target(&self) -> Option<Target> {
        Some(Target::Library { name: "xdp".into(), files: Vec::new() })
    }

    fn open(&self, opening: &Opening<'_>) -> Result<OpenPort, PortError> {
        Ok(XdpPort::open(&self.0, opening.pairs)?.into())
    }
}

impl fmt::Display for Interface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "xdp:{}", self.0)
    }
}

/// An interface that is open.
#[derive(Debug)]
struct XdpCard(Arc<XdpQueues>);

impl From<XdpPort> for OpenPort {
    fn from(port: XdpPort) -> Self {
        Self(Arc::new(XdpCard(Arc::new(XdpQueues::new(port)))))
    }
}

impl Port for XdpCard {
    fn start(&self, _card: &Arc<CardState>) -> io::Result<()> {
        watch::watch(&self.0)
    }

    fn close(&self) {
        self.0.watch.end();
    }

    fn receive(&self, ring: ReceiveRing) -> io::Result<Box<dyn QueueTask>> {
        let port = XdpReceive::new(self.0.clone(), ring.pair)?;
        Ok(ReceiveTask::boxed(ring, port))
    }

    fn transmit(&self, ring: TransmitRing) -> io::Result<Box<dyn QueueTask>> {
        let port = XdpTransmit::new(self.0.clone(), ring.pair)?;
        Ok(TransmitTask::boxed(ring, port))
    }

    /// The memory of its frames is memory of this process, which the kernel ties to the socket.
    fn passing(&self) -> Passing<'_> {
        Passing::Refused(
            "a card on an xdp port cannot pass to another process, because its frames are in memory of this one: \
             remove the card before the upgrade, or restart kickless",
        )
    }

    fn announce(&self, frame: &[u8]) {
        self.0.send_once(frame);
    }

    fn mtu_changed(&self, mtu: u16) {
        if mtu > XDP_MTU_MAX {
            warn!(
                mtu,
                max = XDP_MTU_MAX,
                interface = self.0.queues.interface(),
                "the front-end has chosen a larger MTU \
                than the port carries: longer frames of the guest are counted as sent_refused"
            );
        }
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![("dropped_by_kernel", self.0.queues.dropped())]
    }
}
