//! Measures what a hostile device costs its neighbours.
//!
//! A daemon serves *victims*, which are a disk and two cards under verified load, and the devices of an
//! *attacker*, which behaves as one row of a table says. `docs/measurements/neighbours.md` has the figures,
//! and says how the processors are divided.
//!
//! Another behaviour is one more [`Behaviour`](behaviour::Behaviour) in the table of its kind ([`frames`],
//! [`memory`], [`queues`], [`messages`], [`control`]): its devices, and a function that sets it up and
//! returns its step. Each step does a *deed* and counts it. An attack without deeds fails, because it
//! measured nothing.

pub mod behaviour;
pub mod control;
pub mod frames;
pub mod host;
pub mod memory;
pub mod messages;
pub mod queues;
pub mod report;
pub mod turn;
pub mod victim;
