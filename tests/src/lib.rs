//! Contains the code that the end-to-end tests and the benchmarks share.

pub mod allocations;
pub mod arp;
pub mod attack;
pub mod block_on;
pub mod daemon;
pub mod disk_size;
pub mod driver;
pub mod driver_and_device;
pub mod frontend;
pub mod guest;
pub mod handover;
pub mod hostile_backend;
pub mod manager;
pub mod meter;
pub mod page_server;
pub mod qcow2;
pub mod remote_disks;
pub mod systemd_machine;
pub mod transcript;
pub mod two_processes;
pub mod unit;
pub mod verified_load;
pub mod walk;
