//! The rings of a card whose port is an interface of the host, through AF_XDP.

mod queues;
mod receive;
mod transmit;
mod watch;

pub(crate) use queues::XdpQueues;
pub(crate) use receive::XdpSource;
pub(crate) use transmit::XdpTransmitTask;
pub(crate) use watch::watch;
