//! The operations of a file's request, and what each needs first.

use super::state::FileState;
use crate::op_sender::{OpSender, Sent};
use crate::{IoError, Step};
use kickless_io::{Buffers, OpKind};

/// Continue at once, or return a step to the device.
pub(super) type Flow = Result<(), Step>;

/// Transfers the rest of the bounce buffer.
pub(super) fn bounce(sender: &mut impl OpSender, state: &mut FileState, kind: OpKind) -> Flow {
    let Some(bounce) = &mut state.bounce else { return Err(Step::Done(Err(IoError::Stuck))) };
    let (at, window) = (bounce.next(), bounce.done..bounce.piece.total as usize);
    let Some(permit) = &mut bounce.permit else { return Err(Step::Done(Err(IoError::Stuck))) };
    let Some(mut buffer) = permit.buffer.take() else { return Err(Step::Done(Err(IoError::Stuck))) };
    buffer.set_window(window);
    queue(sender, kind, at, Buffers::Owned(buffer)).map_err(|(step, back)| {
        if let Buffers::Owned(back) = back {
            permit.buffer = Some(back);
        }
        step
    })
}

/// Sends one operation to the engine. Never continues at once. If the engine is full, the buffers come back.
pub(super) fn queue(sender: &mut impl OpSender, kind: OpKind, offset: u64, buffers: Buffers) -> Sent {
    match sender.send(kind, offset, buffers) {
        Ok(()) => Err((Step::Pending, Buffers::None)),
        Err(back) => Err(back),
    }
}
