//! The contract of a device that passes to the next process of its host, while its guest goes on.
//!
//! The *old* process serves, the *new* one is to take over. Both can have the device for a moment. Until the
//! new one may begin, it changes nothing that others see: it reads files, maps memory, and asks, but it sends
//! nothing, reads no socket, and sets nothing.
//!
//! | old | new |
//! | --- | --- |
//! | [`refuses`](HandOver::refuses), [`give`](HandOver::give) | the kind makes the device of [`Handed`] |
//! | [`settle`](HandOver::settle) | |
//! | [`hold`](HandOver::hold), rings park, [`give_final`](HandOver::give_final) | [`receive_final`](HandOver::receive_final) |
//! | ends, or [`take_back`](HandOver::take_back) | [`begin`](HandOver::begin), rings run |

use crate::StartError;
use kickless_handover::{Given, Giving, Part};

/// Gives a device to the next process of this host, and takes it back.
///
/// Without defaults, so that a new kind of device answers each question.
pub trait HandOver {
    /// Returns why the device cannot be handed over now, as one sentence. Does not wait.
    fn refuses(&self) -> Option<String>;

    /// Returns the number of changes of the things that [`HandOver::give`] gives, such as a file that was
    /// replaced. If it has changed since, the device is given again.
    fn changes(&self) -> u64;

    /// Adds what the new process makes the device of before the pause, with duplicates of the descriptors.
    /// Rings run, unless the device [gives slowly](HandOver::gives_slowly). Can come more than once.
    ///
    /// # Errors
    /// A descriptor is missing, or the state cannot be had now. The device goes on.
    fn give(&self, to: &mut Giving) -> Result<Part, GiveError>;

    /// Returns whether [`HandOver::give`] takes longer than a pause may. Its rings are parked first then, and
    /// those of other devices after it.
    fn gives_slowly(&self) -> bool;

    /// Does before the pause what would make it long, such as a sync. Rings run. Can wait.
    ///
    /// # Errors
    /// Data cannot reach the medium. The hand-over is given up.
    fn settle(&self) -> Result<(), GiveError>;

    /// Stops threads of the device that read or write what was given. Does not wait. Rings run.
    fn hold(&self);

    /// Returns what has changed until the pause. All rings are parked. The record can have bytes, and no
    /// descriptors. Locks stay.
    ///
    /// # Errors
    /// Data cannot reach the medium, or something is still in flight. [`HandOver::take_back`] comes next.
    fn give_final(&self, to: &mut Giving) -> Result<Part, GiveError>;

    /// Goes on after [`HandOver::settle`], [`HandOver::hold`] or [`HandOver::give_final`], whichever came
    /// last. Does nothing if none of them came. Rings run, or are still parked.
    ///
    /// # Errors
    /// The device cannot be used any more.
    fn take_back(&self) -> Result<(), StartError>;

    /// Takes what the old process has returned from [`HandOver::give_final`]. Its tasks are made, and do not
    /// run.
    ///
    /// # Errors
    /// The state contradicts what was given before, or what this process knows. The new process ends then.
    fn receive_final(&self, state: Part, given: &Given) -> Result<(), StartError>;

    /// Starts what [`HandOver::hold`] has stopped in the old process, which has ended. Rings run next. Does
    /// not wait.
    fn begin(&self);
}

/// The part of its kind of a device that another process gives, and the descriptors that it names.
#[derive(Debug)]
pub struct Handed<'g> {
    /// The result of [`HandOver::give`] in that process.
    pub state: Part,
    /// The descriptors and bytes of its record.
    pub given: &'g mut Given,
}

/// The reason for which a device cannot be given now, as one sentence.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct GiveError(#[from] pub Box<dyn std::error::Error + Send + Sync>);
