//! An engine that carries out operations when it is told to.

use crate::Step;
use crate::op_sender::OpSender;
use crate::qcow2::own::OwnSender;
use kickless_io::{Buffers, Completion, Errno, OpKind, RangeSyscall, Token, Waker};
use kickless_memory::Marks;
use rustix::fs::{FallocateFlags, fallocate};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// The operations of a queue at a time. It tries again when one has completed.
const OPS_MAX: usize = 12;

/// An operation in flight.
#[derive(Debug)]
struct Op {
    queue: usize,
    slot: u32,
    layer: usize,
    kind: OpKind,
    offset: u64,
    buffers: Buffers,
}

/// The files of a chain, and the operations in flight.
#[derive(Debug)]
pub(super) struct HostileEngine {
    pub(super) files: Vec<File>,
    ops: Vec<Op>,
    /// The bytes that were written.
    pub(super) written: u64,
}

/// Sends the operations of one request.
pub(super) struct HostileSender<'a> {
    pub(super) engine: &'a mut HostileEngine,
    pub(super) queue: usize,
    pub(super) slot: u32,
    pub(super) waker: &'a Waker,
    pub(super) marks: &'a mut Marks,
}

impl OpSender for HostileSender<'_> {
    fn send_to(
        &mut self,
        layer: usize,
        kind: OpKind,
        offset: u64,
        buffers: Buffers,
    ) -> Result<(), (Step, Buffers)> {
        assert!(layer == 0 || kind == OpKind::Read, "a backing image is written");
        if self.engine.in_flight(self.queue) >= OPS_MAX {
            return Err((Step::Busy, buffers));
        }
        let (queue, slot) = (self.queue, self.slot);
        self.engine.ops.push(Op { queue, slot, layer, kind, offset, buffers });
        Ok(())
    }

    fn waker(&self) -> &Waker {
        self.waker
    }

    fn marks(&mut self) -> &mut Marks {
        self.marks
    }

    fn pause_layer(&mut self, _layer: usize) {}
}

impl OwnSender for HostileSender<'_> {
    fn set_slot(&mut self, slot: u32) {
        self.slot = slot;
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
        let op = self.ops.swap_remove(index.checked_rem(count)? as usize);
        let Op { queue, slot, layer, kind, offset, mut buffers } = op;
        let result = match fails {
            Some(errno) => Err(errno),
            None => self.perform(layer, kind, offset, &mut buffers),
        };
        let token = Token { source: queue as u32, slot };
        Some((queue, Completion { token, result, buffers }))
    }

    fn perform(&mut self, layer: usize, kind: OpKind, at: u64, buffers: &mut Buffers) -> Result<u32, Errno> {
        let Some(file) = self.files.get(layer) else { panic!("layer {layer} is unknown") };
        let errno = |error: std::io::Error| error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error);
        match kind {
            OpKind::Read => {
                let mut bytes = vec![0; len(buffers)];
                let done = read_to_end(file, &mut bytes, at).map_err(errno)?;
                put(buffers, &bytes[..done]);
                Ok(done as u32)
            }
            OpKind::Write { .. } => {
                let bytes = contents(buffers);
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

fn len(buffers: &Buffers) -> usize {
    match buffers {
        Buffers::Guest(iov) => iov.len() as usize,
        Buffers::Owned(buffer) => buffer.window().len(),
        Buffers::None => 0,
    }
}

fn put(buffers: &mut Buffers, bytes: &[u8]) {
    match buffers {
        Buffers::Guest(iov) => drop(iov.write(0, bytes, &mut Marks::off())),
        Buffers::Owned(buffer) => {
            let start = buffer.window().start;
            buffer[start..start + bytes.len()].copy_from_slice(bytes);
        }
        Buffers::None => {}
    }
}

fn contents(buffers: &Buffers) -> Vec<u8> {
    let mut bytes = vec![0; len(buffers)];
    match buffers {
        Buffers::Guest(iov) => drop(iov.read(0, &mut bytes)),
        Buffers::Owned(buffer) => bytes.copy_from_slice(&buffer[buffer.window()]),
        Buffers::None => {}
    }
    bytes
}
