//! Tables, and where they come from.
//!
//! Tables are type-stable: one that was taken out of use is given out again as a table, and is freed only by
//! [`Nodes::trim`], when nobody can have its address. So a harvest, which waits for nobody and is waited for by nobody while it
//! walks, can hold the address of an entry whose table is in use elsewhere by now. All that it does there is to clear the
//! writable bit of a leaf, and that costs a writer one look more and does no harm.
#![expect(unsafe_code, reason = "island: tables are reached by addresses in entries")]

use crate::entry::{Entry, FANOUT};
use crate::primitive::{AtomicU64, Mutex, Ordering, lock};
use std::ptr::NonNull;

/// A table.
#[repr(C, align(4096))]
pub(crate) struct Node {
    pub(crate) entries: [AtomicU64; FANOUT],
}

impl Node {
    fn new() -> Self {
        Self { entries: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// Whether nothing is in it.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.iter().all(|entry| entry.load(Ordering::Relaxed) == 0)
    }
}

/// All tables.
pub(crate) struct Nodes {
    pool: Mutex<Pool>,
}

#[derive(Default)]
struct Pool {
    free: Vec<NonNull<Node>>,
    /// Made and not freed.
    alive: usize,
}

// SAFETY: it owns the tables in it, and gives each to one caller.
unsafe impl Send for Pool {}

impl Nodes {
    pub(crate) fn new() -> Self {
        Self { pool: Mutex::new(Pool::default()) }
    }

    /// An empty table. The lock is held for a moment, and never while anybody waits.
    pub(crate) fn take(&self) -> NonNull<Node> {
        let mut pool = lock(&self.pool);
        pool.free.pop().unwrap_or_else(|| {
            pool.alive += 1;
            let node = NonNull::from(Box::leak(Box::new(Node::new())));
            // Entries and the reverse map hold its address as a number.
            node.as_ptr().expose_provenance();
            node
        })
    }

    /// Gives back a table and all below it.
    ///
    /// # Safety
    /// They are from [`Nodes::take`], out of use, and no writer can reach them any more.
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
        lock(&self.pool).free.push(node);
    }

    /// Frees the tables that are not in use.
    ///
    /// # Safety
    /// No harvest is walking.
    pub(crate) unsafe fn trim(&self) {
        let free = {
            let mut pool = lock(&self.pool);
            pool.alive -= pool.free.len();
            std::mem::take(&mut pool.free)
        };
        // Without the lock, which writers want when they split.
        for node in free {
            // SAFETY: from `Box::leak`, in no table, and no harvest has its address.
            drop(unsafe { Box::from_raw(node.as_ptr()) });
        }
    }

    /// Bytes of all tables.
    pub(crate) fn bytes(&self) -> usize {
        lock(&self.pool).alive * size_of::<Node>()
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        // SAFETY: nobody has a reference to what it belongs to, so nobody walks.
        unsafe { self.trim() };
        debug_assert_eq!(lock(&self.pool).alive, 0, "a table was not given back");
    }
}
