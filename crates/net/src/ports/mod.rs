//! The ports of cards, a folder for each.

pub(crate) mod card_port;
pub(crate) mod loop_source;
pub(crate) mod null;
pub(crate) mod port_poll;
pub(crate) mod stream;
pub(crate) mod switch;
pub(crate) mod tap;
pub(crate) mod timer;
pub(crate) mod xdp;
