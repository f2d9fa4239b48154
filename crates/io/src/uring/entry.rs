//! The ring entry of an operation.

use super::cancel;
use crate::files::Files;
use crate::op::{BYTES_MAX, KernelBuffers, OpKind};
use crate::operations::Operations;
use crate::operations::in_flight::{InFlight, rw_flags};
use io_uring::{opcode, squeue, types};
use std::os::fd::AsRawFd;

/// Returns the ring entry for the operation in `op_slot` and those that are merged with it, or for the
/// request to cancel that is staged as `op_slot`.
pub(super) fn entry(ops: &mut Operations, op_slot: u32) -> Option<squeue::Entry> {
    let Some(operation) = ops.slots.get_mut(op_slot) else { return cancel::entry(op_slot) };
    let (fd, fixed) = file(operation, &ops.files);
    let (kind, offset) = (operation.op.kind, operation.op.offset);
    let rw_flags = rw_flags(operation);
    let short = |len: usize| len.min(BYTES_MAX) as u32;
    let entry = match (kind, operation.view()) {
        (OpKind::Read, KernelBuffers::One(at, len)) => {
            opcode::Read::new(fd, at, short(len)).offset(offset).rw_flags(rw_flags).build()
        }
        (OpKind::Read, KernelBuffers::Many(at, count)) => {
            opcode::Readv::new(fd, at, count as u32).offset(offset).rw_flags(rw_flags).build()
        }
        (OpKind::Write { .. }, KernelBuffers::One(at, len)) => {
            opcode::Write::new(fd, at, short(len)).offset(offset).rw_flags(rw_flags).build()
        }
        (OpKind::Write { .. }, KernelBuffers::Many(at, count)) => {
            opcode::Writev::new(fd, at, count as u32).offset(offset).rw_flags(rw_flags).build()
        }
        // These wait, and go to threads.
        (OpKind::Flush | OpKind::Range { .. }, _) => return None,
    };
    Some(entry.flags(fixed).user_data(u64::from(op_slot)))
}

fn file(operation: &InFlight, files: &Files) -> (types::Fd, squeue::Flags) {
    match files.get(operation.held) {
        Some((_, index, true)) => (types::Fd(index as i32), squeue::Flags::FIXED_FILE),
        Some((file, _, false)) => (types::Fd(file.as_raw_fd()), squeue::Flags::empty()),
        // The kernel completes it with EBADF.
        None => (types::Fd(-1), squeue::Flags::empty()),
    }
}
