//! A learning Ethernet switch between the cards of this process (`docs/adr/0014`, `docs/adr/0015`).
//!
//! A transmit ring copies frames into a batch of its own, and passes the batch on at the end of its poll
//! ([`port::SwitchPort::forward`]). Each receive ring has an inbox, a bounded queue
//! ([`LoopQueue`](crate::frame::loop_queue::LoopQueue)). A frame is owned by one of these at any time, and
//! none of them is memory of a guest. So a guest that is reset, moved or killed takes nothing along, and no
//! ring waits for another.
//!
//! - `rule.rs` judges a frame by the rules of the port that it came from, on the copy. Pure.
//! - `neighbour.rs` finds the addresses that neighbour discovery of IPv6 names. Pure.
//! - `table.rs` knows behind which port an address is, and `fixed.rs` the addresses that ports have as their
//!   only source. Pure.
//! - `members.rs` lists the ports of each VLAN. Pure.
//! - `port.rs` decides about the frames of a batch, and `delivery.rs` copies them.
//! - `tag.rs` adds and removes VLAN tags. Pure.
//! - `transmit.rs` collects the frames of a ring, and `direct.rs` offers long ones to a receiver on the same
//!   worker.
//! - `card.rs` is the port as its card has it, and `uplink.rs` the TAP that cards share.

mod card;
mod datagrams;
mod delivery;
mod direct;
mod fixed;
#[cfg(fuzzing)]
pub mod fuzzing;
mod members;
#[cfg(all(test, loom))]
mod model;
mod name;
mod neighbour;
mod port;
mod rule;
mod table;
mod tag;
mod transmit;
mod uplink;

pub(crate) use name::SWITCH;
