//! A byte of guest memory that a request in flight will write.
#![expect(unsafe_code, reason = "island: a pointer into a slot, beside the view that holds the slot")]

use crate::{Gpa, Marks, View, shared};
use std::ptr::NonNull;
use std::sync::Arc;

/// The byte with which a device answers a request, translated once.
///
/// It holds the view that it was translated with, so that its address stays valid even if guest memory
/// changes while the request is in flight. A request slot keeps its `PinnedByte` from request to request. It
/// takes a new reference only when the view has changed.
#[derive(Debug, Default)]
pub struct PinnedByte {
    /// The guest-physical and the host address, in the map of `pin`.
    at: Option<(Gpa, NonNull<u8>)>,
    pin: Option<Arc<View>>,
}

impl PinnedByte {
    /// Chooses the byte at `gpa`. If that is not guest memory, there is no byte.
    #[inline]
    pub fn set(&mut self, view: &Arc<View>, gpa: Gpa) {
        self.at = view.map().contiguous(gpa, 1).map(|host| (gpa, host));
        if !View::is_pinned(&self.pin, view) {
            self.pin = Some(view.clone());
        }
    }

    /// Writes the byte and marks it. Returns `false` if there is no byte.
    #[inline(always)]
    pub fn write(&self, value: u8, marks: &mut Marks) -> bool {
        let (Some((gpa, host)), Some(pin)) = (self.at, &self.pin) else { return false };
        // SAFETY: `set` has found `host` in a slot of `pin`, which never changes and keeps its slots mapped.
        // `pin` is only replaced together with `host`, and `host` is dropped before `pin`.
        unsafe { shared::write_obj(host, &value) };
        marks.wrote_in(pin.map(), gpa, 1);
        true
    }

    /// Releases its view unless that is `current`. There is no byte then. Commits the marks first, as
    /// [`View::unpin_unless`] does.
    #[inline]
    pub fn unpin_unless(&mut self, current: &Arc<View>, marks: &mut Marks) {
        self.at = None;
        View::unpin_unless(&mut self.pin, current, marks);
    }
}

// SAFETY: the pointer is to shared memory that any thread may access, by copies only, and `pin` keeps it
// mapped.
unsafe impl Send for PinnedByte {}
