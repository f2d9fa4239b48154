//! An engine that carries out operations when it is told to.

use super::super::held::{HeldOp, HoldOps};
use kickless_io::{Completion, Errno, OpKind, RangeSyscall};
use rustix::fs::{FallocateFlags, fallocate};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// The operations of a queue at a time. It tries again when one has completed.
const OPS_MAX: usize = 12;

/// The files of a chain, and the operations in flight.
#[derive(Debug)]
pub(super) struct HostileEngine {
    pub(super) files: Vec<File>,
    ops: Vec<HeldOp>,
    /// The bytes that were written.
    pub(super) written: u64,
}

impl HoldOps for HostileEngine {
    fn has_room(&mut self, queue: usize) -> bool {
        self.in_flight(queue) < OPS_MAX
    }

    fn hold(&mut self, op: HeldOp) {
        self.ops.push(op);
    }
}

impl HostileEngine {
    pub(super) fn new(files: Vec<File>) -> Self {
        Self { files, ops: Vec::new(), written: 0 }
    }

    pub(super) fn in_flight(&self, queue: usize) -> usize {
        self.ops.iter().filter(|op| op.queue == queue).count()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.ops.is_empty()
    }

    /// Completes an operation, or fails it. Returns its queue.
    pub(super) fn complete(&mut self, index: u64, fails: Option<Errno>) -> Option<(usize, Completion)> {
        let count = self.ops.len() as u64;
        let mut op = self.ops.swap_remove(index.checked_rem(count)? as usize);
        let result = match fails {
            Some(errno) => Err(errno),
            None => self.perform(&mut op),
        };
        Some(op.complete(result))
    }

    fn perform(&mut self, op: &mut HeldOp) -> Result<u32, Errno> {
        let (layer, at) = (op.layer, op.offset);
        let Some(file) = self.files.get(layer) else { panic!("layer {layer} is unknown") };
        let errno = |error: std::io::Error| error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error);
        match op.kind {
            OpKind::Read => {
                let mut bytes = vec![0; op.bytes()];
                let done = read_to_end(file, &mut bytes, at).map_err(errno)?;
                op.put(&bytes[..done]);
                Ok(done as u32)
            }
            OpKind::Write { .. } => {
                let bytes = op.contents();
                self.written += bytes.len() as u64;
                file.write_all_at(&bytes, at).map_err(errno)?;
                Ok(bytes.len() as u32)
            }
            OpKind::Flush => Ok(0),
            OpKind::Range { syscall, len } => {
                let mode = match syscall {
                    RangeSyscall::PunchHole => FallocateFlags::PUNCH_HOLE,
                    RangeSyscall::ZeroRange => FallocateFlags::ZERO_RANGE,
                    RangeSyscall::DeviceDiscard | RangeSyscall::DeviceZeroes => {
                        return Err(Errno::OPNOTSUPP);
                    }
                };
                fallocate(file, mode | FallocateFlags::KEEP_SIZE, at, len).map(|()| 0)
            }
        }
    }
}

/// Reads up to the end of the file. Returns the number of bytes.
pub(super) fn read_to_end(file: &File, bytes: &mut [u8], at: u64) -> std::io::Result<usize> {
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], at + done as u64)? {
            0 => break,
            here => done += here,
        }
    }
    Ok(done)
}
