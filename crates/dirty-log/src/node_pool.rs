//! The pool of translation tables.
//!
//! Tables are type-stable: a table that is out of use is reused as a table. [`NodePool::trim`] frees tables,
//! only when no thread can have their addresses. So a harvest can walk without announcing itself. It may hold
//! the address of an entry whose table is reused in the meantime. It then only clears the writable bit of a
//! leaf there. That costs a writer one more lookup and is harmless.
#![expect(unsafe_code, reason = "island: tables are reached by addresses in entries")]

use crate::entry::Entry;
use crate::node::Node;
use kickless_sync::atomic::Ordering;
use kickless_sync::{Mutex, lock};
use std::ptr::NonNull;

/// All tables.
pub(crate) struct NodePool {
    tables: Mutex<Tables>,
}

#[derive(Default)]
/// The tables that are not in use, and the number of all tables.
struct Tables {
    /// Tables out of use.
    free: Vec<NonNull<Node>>,
    /// Number of allocated tables, in use or not.
    allocated: usize,
}

// SAFETY: it owns its tables, and gives each to one caller.
unsafe impl Send for Tables {}

impl NodePool {
    pub(crate) fn new() -> Self {
        Self { tables: Mutex::new(Tables::default()) }
    }

    /// Takes an empty table. Holds the lock for a short time, and never while it waits for another thread.
    pub(crate) fn take(&self) -> NonNull<Node> {
        let mut tables = lock(&self.tables);
        tables.free.pop().unwrap_or_else(|| {
            tables.allocated += 1;
            let node = NonNull::from(Box::leak(Box::new(Node::new())));
            // Entries and the reverse map hold the address as a number.
            node.as_ptr().expose_provenance();
            node
        })
    }

    /// Takes back a table and all tables below it.
    ///
    /// # Safety
    /// They are from [`NodePool::take`] and out of use, and no writer can reach them any more.
    pub(crate) unsafe fn give(&self, node: NonNull<Node>) {
        // SAFETY: tables live until they are trimmed, and this one is not in the pool.
        for entry in unsafe { &node.as_ref().entries } {
            let old = Entry(entry.load(Ordering::Acquire));
            entry.store(0, Ordering::Relaxed);
            if let Some(below) = old.node() {
                // SAFETY: it was reached through a table that no writer can reach.
                unsafe { self.give(below) };
            }
        }
        lock(&self.tables).free.push(node);
    }

    /// Frees the tables that are out of use.
    ///
    /// # Safety
    /// No harvest is walking.
    pub(crate) unsafe fn trim(&self) {
        let free = {
            let mut tables = lock(&self.tables);
            tables.allocated -= tables.free.len();
            std::mem::take(&mut tables.free)
        };
        // Without the lock, because writers need it for splits.
        for node in free {
            // SAFETY: from `Box::leak`, in no table, and no harvest has its address.
            drop(unsafe { Box::from_raw(node.as_ptr()) });
        }
    }

    /// Returns the bytes of all tables.
    pub(crate) fn bytes(&self) -> usize {
        lock(&self.tables).allocated * size_of::<Node>()
    }
}

impl Drop for NodePool {
    fn drop(&mut self) {
        // SAFETY: there is no reference to the owner of this pool, so no harvest is walking.
        unsafe { self.trim() };
        debug_assert_eq!(lock(&self.tables).allocated, 0, "a table was not given back");
    }
}
