//! Batches: operations that go to the kernel by one call of `io_submit`, made by the worker or by a thread.
#![expect(unsafe_code, reason = "island: buffers handed to the kernel")]

use crate::aio::context::{BATCH, Context, Control};
use crate::early_submit;
use rustix::io::Errno;
use std::sync::Arc;

/// Operations that are started together.
#[derive(Debug)]
pub(crate) struct Batch {
    context: Arc<Context>,
    pub(crate) controls: [Control; BATCH],
    pub(crate) count: usize,
    /// The number of operations that the kernel has before this batch. It decides the sizes of the pieces
    /// ([`early_submit::next_piece`]). `None`: the batch is submitted whole.
    pub(crate) in_kernel: Option<usize>,
}

impl Batch {
    pub(crate) fn new(context: Arc<Context>) -> Box<Self> {
        Box::new(Self { context, controls: [Control::default(); BATCH], count: 0, in_kernel: None })
    }

    /// Returns the slots of its operations.
    pub(crate) fn op_slots(&self) -> impl Iterator<Item = u32> {
        self.controls.iter().take(self.count).map(|control| control.data as u32)
    }

    /// Calls [`Context::submit`] for the first `count`.
    pub(crate) fn submit(&mut self) -> Result<usize, Errno> {
        let mut controls = &mut self.controls[..self.count.min(BATCH)];
        // SAFETY, of both calls: the buffers and the file of each operation belong to its slot, which keeps
        // them unchanged until the completion has been reaped. A dropped engine waits for the call and for
        // that, or leaks them.
        let Some(mut in_kernel) = self.in_kernel else {
            // SAFETY: as above.
            return unsafe { self.context.submit(controls) };
        };
        let mut taken = 0;
        while !controls.is_empty() {
            let (piece, rest) = controls.split_at_mut(early_submit::next_piece(controls.len(), in_kernel));
            // SAFETY: as above.
            match unsafe { self.context.submit(piece) } {
                Err(errno) if taken == 0 => return Err(errno),
                // The next call reports the error.
                Err(_) => break,
                Ok(some) => taken += some,
            }
            if taken < self.count.min(BATCH) - rest.len() {
                break;
            }
            in_kernel += piece.len();
            controls = rest;
        }
        Ok(taken)
    }
}

/// A batch that a thread has submitted for an owner.
#[derive(Debug)]
pub(crate) struct Submitted {
    pub(crate) owner: u32,
    pub(crate) batch: Box<Batch>,
    pub(crate) result: Result<usize, Errno>,
}

/// Batches that pass between AIO and the threads that submit them.
#[derive(Debug, Default)]
pub(crate) struct Batches {
    /// Batches to submit, with their owners.
    pub(crate) to_submit: Vec<(u32, Box<Batch>)>,
    pub(crate) submitted: Vec<Submitted>,
}
