//! A daemon of toys.
#![allow(dead_code, reason = "each test uses a part of it")]

mod rig;
#[path = "../../../daemon/tests/common/toy.rs"]
mod toy;

use kickless_daemon::Kinds;
pub(crate) use rig::*;
use serde_json::{Value, json};

impl Rig {
    pub(crate) fn new() -> Self {
        Self::of(toys())
    }

    /// Returns the description of a device.
    pub(crate) fn toy(&self, name: &str) -> Value {
        json!({ "name": name, "socket-path": self.path(name), "toy": "car" })
    }
}

/// Returns the kinds of a daemon of toys.
pub(crate) fn toys() -> Kinds {
    Kinds::new(toy::ToyKind(toy::make_toy))
}
