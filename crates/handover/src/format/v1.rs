//! Format 1.
//!
//! | record | sent | contents |
//! | --- | --- | --- |
//! | [`Plan`] | once, first | configurations, what the daemon knows |
//! | [`Device`] | for each device, again if it changed | all that is made before the pause, with descriptors |
//! | [`Final`] | for each device, in the pause | indices and numbers, without descriptors |
//!
//! The parts of a device that belong to its kind are [`Disk`] and [`DiskFinal`], or [`Card`] and
//! [`CardFinal`]. A kind that this crate does not know has types of its own.

mod card;
mod device;
mod disk;
mod plan;
mod ring;
mod session;

pub use card::{Capture, Card, CardFinal, Stream, StreamFinal, Tap, TapFinal, UplinkFinal};
pub use device::{Device, Final, Tokens};
pub use disk::{Disk, DiskFinal, Image, ImageFinal, Medium, Nbd, NbdFinal};
pub use plan::{Config, Listener, Passed, Phase, Plan, Planned, SocketName};
pub use ring::{Addresses, Completion, Ring, RingFinal, Shape};
pub use session::{Access, BackendChannel, HalfMessage, Inflight, Log, Miss, Region, Session, SessionFinal};
