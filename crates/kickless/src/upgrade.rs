//! A new version takes over from a running one, while the guests go on.

pub(crate) mod background;
mod new;
mod old;

pub(crate) use new::{Upgrade, UpgradeEnd};
pub(crate) use old::HandOver;
