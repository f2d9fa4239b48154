//! The rings of a card whose port is a stream socket.

mod source;
mod transmit;

pub(crate) use source::StreamSource;
pub(crate) use transmit::StreamTransmitTask;
