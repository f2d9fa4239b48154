//! A daemon of disks and cards, with its control sockets.
#![allow(dead_code, reason = "each test uses a part of it")]

#[path = "../../../control/tests/common/rig.rs"]
mod rig;

use kickless_kinds::kinds;
pub(crate) use rig::*;
use serde_json::{Value, json};

impl Rig {
    pub(crate) fn new() -> Self {
        Self::of(kinds())
    }

    /// Returns the description of a disk.
    pub(crate) fn disk(&self, name: &str) -> Value {
        json!({ "name": name, "socket-path": self.path(name), "blk-file": "mem:1M", "num-queues": 1 })
    }
}
