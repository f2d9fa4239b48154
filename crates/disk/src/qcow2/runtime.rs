//! The engine and the workers as the program around the tables of images.

use kickless_io::{AlignedBuf, Waker};
use kickless_qcow2::Runtime;

/// Operations go to the engines of workers, whose requests wait.
#[derive(Clone, Copy, Debug)]
pub(super) enum EngineRuntime {}

impl Runtime for EngineRuntime {
    type Buffer = AlignedBuf;
    type Waker = Waker;

    fn allocate(len: usize, align: usize) -> Option<AlignedBuf> {
        AlignedBuf::new(len, align).ok()
    }

    fn wake(waker: &Waker) {
        waker.wake();
    }

    fn is_same(one: &Waker, other: &Waker) -> bool {
        one.is_same(other)
    }
}

pub(super) type CopyPlan = kickless_qcow2::CopyPlan<EngineRuntime>;
pub(super) type Copying = kickless_qcow2::Copying<EngineRuntime>;
pub(super) type Pin = kickless_qcow2::Pin<EngineRuntime>;
pub(super) type Pins = kickless_qcow2::Pins<EngineRuntime>;
pub(super) type TableOp = kickless_qcow2::TableOp<EngineRuntime>;
pub(super) type TableOpKind = kickless_qcow2::TableOpKind<EngineRuntime>;
pub(super) type Tables = kickless_qcow2::Tables<EngineRuntime>;
