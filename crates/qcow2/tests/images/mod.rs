//! Images for tests: makes them, cuts them, and judges them.
//!
//! The unit tests of this crate and of the crate that carries out its operations include this module. It uses
//! this crate as any other crate does.
#![allow(dead_code, reason = "each crate uses a part of it")]

pub(crate) mod builder;
pub(crate) mod cut_file;
pub(crate) mod failures;
pub(crate) mod judge;
pub(crate) mod lives;
pub(crate) mod qemu;
pub(crate) mod recorded;
pub(crate) mod stamps;
