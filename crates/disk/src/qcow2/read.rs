//! Reads of a chain: run by run, each from one place.

use super::decode::DecodeState;
use super::layer::{Chain, Place};
use super::runtime::Pin;
use super::sender::LayerSender;
use crate::buffers::TransferBuffers;
use crate::file::{FileState, Unchecked};
use crate::op_sender::OpSender;
use crate::{IoError, Step};
use kickless_io::{Completion, Errno};

/// The number of zeroes to fill in in one step. It takes some tens of microseconds.
pub(crate) const STEP_BYTES: u64 = 1 << 20;

/// The progress of a read.
#[derive(Debug, Default)]
pub(super) struct ReadState {
    /// The next byte on the virtual disk.
    at: u64,
    phase: ReadPhase,
    /// The layer of the current run.
    layer: usize,
    /// The bytes of the current run.
    len: u64,
    /// The current run has its bytes in `front`.
    is_split: bool,
    file: FileState,
    decode: Option<Box<DecodeState>>,
    /// Held while the run may use the place that was found.
    pin: Option<Pin>,
}

/// The next action of a read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ReadPhase {
    #[default]
    Idle,
    /// Find the place of the next run.
    Look,
    /// Transfer the run.
    Transfer,
    /// Read the compressed bytes of a cluster.
    Load,
    /// Wait for the contents of the cluster.
    Decode,
}

impl ReadState {
    /// Begins a read at `at`.
    #[inline]
    pub(super) fn begin(&mut self, at: u64) {
        self.at = at;
        self.phase = ReadPhase::Look;
    }

    /// Makes the operation in flight, if there is one, the last.
    pub(super) fn cancel(&mut self) {
        self.file.cancel();
        if let Some(decode) = &mut self.decode {
            decode.file.cancel();
        }
    }

    /// Ends a cancelled read that waits. It has no operation in flight.
    pub(super) fn give_up(&mut self) -> Step {
        if let Some(decode) = &mut self.decode {
            decode.give_up();
        }
        self.finish(Err(IoError::CANCELLED))
    }

    /// Ends the read.
    #[inline]
    fn finish(&mut self, result: Result<(), IoError>) -> Step {
        self.phase = ReadPhase::Idle;
        self.pin = None;
        if let Some(decode) = &mut self.decode {
            decode.release();
        }
        Step::Done(result)
    }
}

impl Chain {
    /// Continues a read of `main` from the layers from `first` on. `front` is empty between two calls, except
    /// while a run has its bytes there.
    pub(super) fn drive_read<B: TransferBuffers, S: OpSender>(
        &self,
        sender: &mut S,
        (first, shard): (usize, u32),
        (main, front): (&mut B, &mut B),
        state: &mut ReadState,
    ) -> Step {
        let mut zeroed = 0;
        loop {
            let step = match state.phase {
                ReadPhase::Idle => return Step::Busy,
                ReadPhase::Look => {
                    let left = main.left();
                    if left == 0 {
                        return state.finish(Ok(()));
                    }
                    if zeroed >= STEP_BYTES {
                        return Step::More;
                    }
                    // Only the first layer can change.
                    if first == 0
                        && state.pin.is_none()
                        && let Some(image) = self.top()
                    {
                        state.pin = Some(image.pins.enter(shard));
                    }
                    match self.find(first, state.at, left) {
                        Place::Data { layer, host, len } => {
                            (state.layer, state.len, state.is_split) = (layer, len, len < left);
                            state.phase = ReadPhase::Transfer;
                            let buffers = match state.is_split {
                                true => {
                                    main.split_to(len, front, sender.marks());
                                    &mut *front
                                }
                                false => &mut *main,
                            };
                            let sender = &mut LayerSender { sender: &mut *sender, layer };
                            let wanted = Unchecked::Read { at: host.0 };
                            self.layers[layer].file().start_unchecked(
                                sender,
                                buffers,
                                &mut state.file,
                                wanted,
                            )
                        }
                        Place::Zero { len } => {
                            let len = len.min(STEP_BYTES);
                            main.zero(len, sender.marks());
                            main.advance(len, sender.marks());
                            state.at += len;
                            zeroed += len;
                            state.pin = None;
                            continue;
                        }
                        Place::Compressed { layer, at, bytes, cluster, len } => {
                            let Some(image) = self.layers[layer].image() else {
                                return state.finish(Err(IoError::Os(Errno::IO)));
                            };
                            let decode = state.decode.get_or_insert_default();
                            let skip = state.at - (cluster.0 << image.geometry.cluster_bits);
                            decode.begin(at.0, bytes, skip as usize..(skip + len) as usize);
                            (state.layer, state.len) = (layer, len);
                            state.phase = ReadPhase::Load;
                            continue;
                        }
                        place => {
                            state.pin = None;
                            match self.missing(place, sender.waker()) {
                                Step::Done(result) => return state.finish(result),
                                step => return step,
                            }
                        }
                    }
                }
                ReadPhase::Transfer => {
                    let buffers = if state.is_split { &mut *front } else { &mut *main };
                    let sender = &mut LayerSender { sender: &mut *sender, layer: state.layer };
                    self.layers[state.layer].file().retry(sender, buffers, &mut state.file)
                }
                ReadPhase::Load | ReadPhase::Decode => self.drive_decode(sender, main, state),
            };
            if let Some(step) = self.end_run(sender, (main, front), state, step) {
                return step;
            }
        }
    }

    /// Continues a read after the completion of an operation.
    pub(super) fn resume_read<B: TransferBuffers, S: OpSender>(
        &self,
        sender: &mut S,
        (first, shard): (usize, u32),
        (main, front): (&mut B, &mut B),
        state: &mut ReadState,
        completion: Completion,
    ) -> Step {
        let file = self.layers[state.layer].file();
        let step = {
            let sender = &mut LayerSender { sender: &mut *sender, layer: state.layer };
            match (state.phase, &mut state.decode) {
                (ReadPhase::Load, Some(decode)) => {
                    file.resume(sender, &mut decode.local, &mut decode.file, completion)
                }
                _ => {
                    let buffers = if state.is_split { &mut *front } else { &mut *main };
                    file.resume(sender, buffers, &mut state.file, completion)
                }
            }
        };
        if state.phase == ReadPhase::Load && step == Step::Done(Ok(())) {
            self.submit_decode(sender.waker(), state);
        } else if let Some(step) = self.end_run(sender, (main, front), state, step) {
            return step;
        }
        self.drive_read(sender, (first, shard), (main, front), state)
    }

    /// Goes on after a step of a run. `None`: there is a next run.
    #[inline]
    fn end_run<B: TransferBuffers>(
        &self,
        sender: &mut impl OpSender,
        (main, front): (&mut B, &mut B),
        state: &mut ReadState,
        step: Step,
    ) -> Option<Step> {
        let Step::Done(result) = step else { return Some(step) };
        if state.is_split {
            main.join(front, sender.marks());
            state.is_split = false;
        }
        if let Err(error) = result {
            return Some(state.finish(Err(error)));
        }
        state.at += state.len;
        state.pin = None;
        state.phase = ReadPhase::Look;
        None
    }

    /// Continues with a compressed cluster.
    #[cold]
    fn drive_decode<B: TransferBuffers, S: OpSender>(
        &self,
        sender: &mut S,
        main: &mut B,
        state: &mut ReadState,
    ) -> Step {
        let (Some(image), Some(decode)) = (self.layers[state.layer].image(), &mut state.decode) else {
            return Step::Done(Err(IoError::Os(Errno::IO)));
        };
        if state.phase == ReadPhase::Load {
            let sender = &mut LayerSender { sender: &mut *sender, layer: state.layer };
            let step = match decode.prepare(image, sender.waker()) {
                Err(step) => step,
                Ok(None) => image.file.retry(sender, &mut decode.local, &mut decode.file),
                Ok(Some(wanted)) => {
                    image.file.start_unchecked(sender, &mut decode.local, &mut decode.file, wanted)
                }
            };
            if step != Step::Done(Ok(())) {
                return step;
            }
            self.submit_decode(sender.waker(), state);
            return Step::Busy;
        }
        match decode.take() {
            None => Step::Busy,
            Some(Err(error)) => Step::Done(Err(error)),
            Some(Ok(bytes)) => {
                main.write(bytes, sender.marks());
                let len = bytes.len() as u64;
                main.advance(len, sender.marks());
                decode.release();
                Step::Done(Ok(()))
            }
        }
    }

    /// Passes the compressed bytes to the decoder.
    fn submit_decode(&self, waker: &kickless_io::Waker, state: &mut ReadState) {
        state.phase = ReadPhase::Decode;
        if let (Some(image), Some(decode)) = (self.layers[state.layer].image(), &mut state.decode) {
            decode.submit(image, &self.decoder, waker);
        }
    }
}
