//! Starts and stops the servers of disks that are not raw images: NBD servers and Ceph clusters.

pub mod caching_nbd;
pub mod ceph;
pub mod nbd;
