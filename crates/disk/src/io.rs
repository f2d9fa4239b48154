//! A request in flight: its buffers, and the state of the kind of disk that serves it.

use crate::Extent;
use crate::buffers::{IoBuffers, TransferBuffers};
use crate::fault::FaultState;
use crate::file::FileState;
use crate::memory::MemoryState;
use crate::offload::OffloadState;
use crate::qcow2::request::Qcow2State;
use kickless_memory::Iov;

/// Holds one request from start to end.
///
/// A device embeds one in each request slot and reuses it. It then keeps the capacity of its buffers and the
/// reference to the memory map. All requests of one `Io` must go to the same disk, which keeps state for the
/// next request here.
///
/// Dropping it while it waits ([`Step::Busy`](crate::Step::Busy)) gives up the request. While it is
/// [`Step::Pending`](crate::Step::Pending), the engine has the buffers, and the completion must still be
/// awaited.
#[derive(Debug, Default)]
pub struct Io {
    pub(crate) buffers: IoBuffers,
    pub(crate) state: IoState,
}

/// The state of a request, by the kind of disk that serves it.
#[derive(Debug, Default)]
pub(crate) enum IoState {
    /// No request has needed a state yet.
    #[default]
    None,
    File(FileState),
    Memory(MemoryState),
    Offload(Box<OffloadState>),
    Qcow2(Box<Qcow2State>),
    Fault(Box<FaultyState>),
}

/// The state of a request of a disk with faults.
#[derive(Debug, Default)]
pub(crate) struct FaultyState {
    pub(crate) faults: FaultState,
    /// The state of the disk that has the faults.
    pub(crate) under: IoState,
}

impl Io {
    /// Returns the guest's buffers. Fill them before a request starts, clear them ([`Iov::clear`]) after it
    /// ends, and leave them alone in between.
    pub fn buffers_mut(&mut self) -> &mut Iov {
        &mut self.buffers.guest
    }

    /// Returns the guest's buffers. They are empty while the engine has them.
    pub fn buffers(&self) -> &Iov {
        &self.buffers.guest
    }

    /// Returns the extents of a request on ranges. Fill them in any order before it starts. They are empty
    /// when it ends.
    pub fn extents_mut(&mut self) -> &mut Vec<Extent> {
        &mut self.buffers.extents
    }

    /// Frees the memory of extents whose request is not started.
    pub fn drop_extents(&mut self) {
        self.buffers.drop_extents();
    }

    /// Returns the number of extents.
    pub fn extents_len(&self) -> usize {
        self.buffers.extents.len()
    }

    /// Returns whether a request has started and not ended.
    pub fn is_active(&self) -> bool {
        self.state.is_active()
    }
}

impl IoState {
    fn is_active(&self) -> bool {
        match self {
            Self::None => false,
            Self::File(file) => file.is_active(),
            Self::Memory(memory) => memory.is_active(),
            Self::Offload(offload) => offload.is_active(),
            Self::Qcow2(qcow2) => qcow2.is_active(),
            Self::Fault(faulty) => faulty.faults.is_held() || faulty.under.is_active(),
        }
    }

    /// Cancels the request, if it has operations in an engine.
    pub(crate) fn cancel(&mut self) {
        match self {
            Self::File(file) => file.cancel(),
            Self::Fault(faulty) => faulty.under.cancel(),
            Self::Qcow2(qcow2) => qcow2.cancel(),
            Self::None | Self::Memory(_) | Self::Offload(_) => {}
        }
    }

    /// Returns the state of a file's request. Makes one for the first request.
    #[inline]
    pub(crate) fn file(&mut self) -> &mut FileState {
        match self {
            Self::File(file) => file,
            other => {
                *other = Self::File(FileState::default());
                other.file()
            }
        }
    }

    /// Returns the state of a request in RAM. Makes one for the first request.
    #[inline]
    pub(crate) fn memory(&mut self) -> &mut MemoryState {
        match self {
            Self::Memory(memory) => memory,
            other => {
                *other = Self::Memory(MemoryState::default());
                other.memory()
            }
        }
    }

    /// Returns the state of a library's request. Makes one for the first request.
    pub(crate) fn offload(&mut self) -> &mut OffloadState {
        match self {
            Self::Offload(offload) => offload,
            other => {
                *other = Self::Offload(Box::default());
                other.offload()
            }
        }
    }

    /// Returns the state of an image's request. Makes one for the first request.
    #[inline]
    pub(crate) fn qcow2(&mut self) -> &mut Qcow2State {
        match self {
            Self::Qcow2(qcow2) => qcow2,
            other => {
                *other = Self::Qcow2(Box::default());
                other.qcow2()
            }
        }
    }

    /// Returns the state of a request with faults. Makes one for the first request.
    pub(crate) fn faulty(&mut self) -> &mut FaultyState {
        match self {
            Self::Fault(faulty) => faulty,
            other => {
                *other = Self::Fault(Box::default());
                other.faulty()
            }
        }
    }
}
