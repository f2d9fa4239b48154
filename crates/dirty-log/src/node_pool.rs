//! The pool that tables come from and go back to.
//!
//! Tables are type-stable: one that was taken out of use is given out again as a table, and is freed only by
//! [`NodePool::trim`], when nobody can have its address. So a harvest, which waits for nobody and is waited for by nobody while it
//! walks, can hold the address of an entry whose table is in use elsewhere by now. All that it does there is to clear the
//! writable bit of a leaf, and that costs a writer one look more and does no harm.
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
struct Tables {
    /// Out of use.
    free: Vec<NonNull<Node>>,
    /// Allocated, in use or not.
    allocated: usize,
}

// SAFETY: it owns the tables in it, and gives each to one caller.
unsafe impl Send for Tables {}

impl NodePool {
    pub(crate) fn new() -> Self {
        Self { tables: Mutex::new(Tables::default()) }
    }

    /// Takes an empty table. Holds the lock for a moment, and never while it waits for another thread.
    pub(crate) fn take(&self) -> NonNull<Node> {
        let mut tables = lock(&self.tables);
        tables.free.pop().unwrap_or_else(|| {
            tables.allocated += 1;
            let node = NonNull::from(Box::leak(Box::new(Node::new())));
            // Entries and the reverse map hold its address as a number.
            node.as_ptr().expose_provenance();
            node
        })
    }

    /// Takes back a table and all below it.
    ///
    /// # Safety
    /// They are from [`NodePool::take`], out of use, and no writer can reach them any more.
    pub(crate) unsafe fn give(&self, node: NonNull<Node>) {
        // SAFETY: tables live until they are trimmed, and this one is not in the pool.
        for entry in unsafe { &node.as_ref().entries } {
            let old = Entry(entry.load(Ordering::Acquire));
            entry.store(0, Ordering::Relaxed);
            if let Some(below) = old.node() {
                // SAFETY: it was reached through the table that nobody reaches.
                unsafe { self.give(below) };
            }
        }
        lock(&self.tables).free.push(node);
    }

    /// Frees the tables that are not in use.
    ///
    /// # Safety
    /// No harvest is walking.
    pub(crate) unsafe fn trim(&self) {
        let free = {
            let mut tables = lock(&self.tables);
            tables.allocated -= tables.free.len();
            std::mem::take(&mut tables.free)
        };
        // Without the lock, which writers want when they split.
        for node in free {
            // SAFETY: from `Box::leak`, in no table, and no harvest has its address.
            drop(unsafe { Box::from_raw(node.as_ptr()) });
        }
    }

    /// Returns how many bytes all tables take.
    pub(crate) fn bytes(&self) -> usize {
        lock(&self.tables).allocated * size_of::<Node>()
    }
}

impl Drop for NodePool {
    fn drop(&mut self) {
        // SAFETY: nobody has a reference to what it belongs to, so nobody walks.
        unsafe { self.trim() };
        debug_assert_eq!(lock(&self.tables).allocated, 0, "a table was not given back");
    }
}
