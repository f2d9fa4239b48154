//! The engine and the workers as the program around the tables of images.

use super::runtime::Runtime;
use kickless_io::{AlignedBuf, Waker};
use std::os::fd::{AsFd, AsRawFd};

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
        one.as_fd().as_raw_fd() == other.as_fd().as_raw_fd()
    }
}

pub(super) type CopyPlan = super::tables::plan::CopyPlan<EngineRuntime>;
pub(super) type Copying = super::tables::Copying<EngineRuntime>;
pub(super) type Pin = super::pins::Pin<EngineRuntime>;
pub(super) type Pins = super::pins::Pins<EngineRuntime>;
pub(super) type TableOp = super::tables::ops::TableOp<EngineRuntime>;
pub(super) type TableOpKind = super::tables::ops::TableOpKind<EngineRuntime>;
pub(super) type Tables = super::tables::Tables<EngineRuntime>;
