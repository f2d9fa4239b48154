//! The rings of a card whose port is a stream socket.

mod receive;
mod transmit;

pub(crate) use receive::StreamSource;
pub(crate) use transmit::StreamTransmitTask;
