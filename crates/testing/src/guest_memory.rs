//! Creates guest memory.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use kickless_memory::{Gpa, Map, Mapper, UserAddr, View};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

/// Creates a memfd of `len` zero bytes.
pub fn memfd(len: u64) -> OwnedFd {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len).unwrap();
    file
}

/// Creates guest memory of `len` zero bytes in one slot, at guest-physical address 0 and front-end address
/// `user`. As that of a device, it is unmapped by a thread of its own.
pub fn guest_memory(len: u64, user: u64) -> Arc<View> {
    let slot = Mapper::default().slot(memfd(len), 0, Gpa(0), UserAddr(user), len, &[]).unwrap();
    Arc::new(View::new(Map::new(vec![slot]).unwrap()))
}
