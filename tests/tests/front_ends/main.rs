//! Replays what the front-ends of Cloud Hypervisor and crosvm say, in their order. Both need KVM themselves.
//! The messages are those of the crate `vhost`, which is the front-end of Cloud Hypervisor. The rings and
//! their driver are those of the other tests.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

mod cloud_hypervisor;
mod crosvm;
mod machine;
