//! Sends the operations of a request to the file of one layer.

use crate::op_sender::{OpSender, Sent};
use crate::{IoError, Step};
use kickless_io::{Buffers, OpKind, Waker};
use kickless_memory::Marks;

/// Sends the operations of a request to the file of one layer.
pub(super) struct LayerSender<'a, S> {
    pub(super) sender: &'a mut S,
    pub(super) layer: usize,
}

/// Sends operations to the file of the image that is written.
#[inline]
pub(super) fn top<S: OpSender>(sender: &mut S) -> LayerSender<'_, S> {
    LayerSender { sender, layer: 0 }
}

impl<S: OpSender> OpSender for LayerSender<'_, S> {
    #[inline]
    fn send(&mut self, kind: OpKind, offset: u64, buffers: Buffers) -> Sent {
        self.sender.send_to(self.layer, kind, offset, buffers)
    }

    fn send_to(&mut self, layer: usize, kind: OpKind, offset: u64, buffers: Buffers) -> Sent {
        self.sender.send_to(layer, kind, offset, buffers)
    }

    fn waker(&self) -> &Waker {
        self.sender.waker()
    }

    fn marks(&mut self) -> &mut Marks {
        self.sender.marks()
    }

    fn pause(&mut self) {
        self.sender.pause_layer(self.layer);
    }

    fn pause_layer(&mut self, layer: usize) {
        self.sender.pause_layer(layer);
    }
}

/// Refuses all operations of a cancelled request, which then ends.
pub(super) struct CancelledSender<'a>(pub(super) &'a mut dyn OpSender);

impl OpSender for CancelledSender<'_> {
    fn send_to(&mut self, _layer: usize, _kind: OpKind, _offset: u64, buffers: Buffers) -> Sent {
        Err((Step::Done(Err(IoError::CANCELLED)), buffers))
    }

    fn waker(&self) -> &Waker {
        self.0.waker()
    }

    fn marks(&mut self) -> &mut Marks {
        self.0.marks()
    }

    fn pause_layer(&mut self, layer: usize) {
        self.0.pause_layer(layer);
    }
}
