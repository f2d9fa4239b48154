//! The null port, which discards the frames of the driver and delivers test frames.

pub(crate) mod receive;
