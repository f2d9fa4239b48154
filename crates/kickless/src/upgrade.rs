//! A new version takes over from a running one, while the guests go on.

pub(crate) mod background;
#[cfg(debug_assertions)]
pub(crate) mod fault;
mod new;
mod old;

pub(crate) use new::{Upgrade, UpgradeEnd};
pub(crate) use old::HandOver;
