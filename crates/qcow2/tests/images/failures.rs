//! Failures of operations, single ones and those that stay.

use fastrand::Rng;
use kickless_qcow2::Errno;

/// The kinds of operations, by which they fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpClass {
    Read,
    Write,
    TableWrite,
    Zero,
    Sync,
}

/// Operations that all fail, until the failure ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    All,
    Writes,
    TableWrites,
    Syncs,
    Zeroes,
    Reads,
}

/// The failures of a life.
#[derive(Debug)]
pub(crate) struct Failures {
    /// The share of operations that fail.
    share: f64,
    broken: Option<Broken>,
    /// Something breaks now and then, and stays so for a while.
    breaks: bool,
    /// An operation has failed.
    pub(crate) has_failed: bool,
}

impl Failures {
    pub(crate) fn random(rng: &mut Rng) -> Self {
        let share = rng.choice([0.0, 0.0, 0.02, 0.1]).unwrap();
        Self { share, broken: None, breaks: rng.u8(..3) == 0, has_failed: false }
    }

    /// Breaks or mends something now and then.
    pub(crate) fn turn(&mut self, rng: &mut Rng) {
        if !self.breaks || rng.u8(..200) > 0 {
            return;
        }
        self.broken = match self.broken {
            Some(_) if rng.bool() => None,
            _ => rng.choice([
                Broken::All,
                Broken::Writes,
                Broken::TableWrites,
                Broken::Syncs,
                Broken::Zeroes,
                Broken::Reads,
            ]),
        };
    }

    /// Lets nothing be zeroed, as if the file system were full.
    pub(crate) fn break_zeroes(&mut self) {
        self.broken = Some(Broken::Zeroes);
    }

    /// Returns whether operations fail in this life.
    pub(crate) fn may_fail(&self) -> bool {
        self.share > 0.0 || self.breaks
    }

    /// Mends everything for good.
    pub(crate) fn end(&mut self) {
        (self.share, self.broken, self.breaks) = (0.0, None, false);
    }

    /// Returns the result of an operation.
    pub(crate) fn result(&mut self, class: OpClass, rng: &mut Rng) -> Result<(), Errno> {
        let is_broken = match (self.broken, class) {
            (Some(Broken::All), _)
            | (Some(Broken::Writes), OpClass::Write | OpClass::TableWrite | OpClass::Zero)
            | (Some(Broken::TableWrites), OpClass::TableWrite)
            | (Some(Broken::Zeroes), OpClass::Zero)
            | (Some(Broken::Syncs), OpClass::Sync)
            | (Some(Broken::Reads), OpClass::Read) => true,
            _ => rng.f64() < self.share,
        };
        self.has_failed |= is_broken;
        let errno = if rng.bool() { Errno::NOSPC } else { Errno::IO };
        if is_broken { Err(errno) } else { Ok(()) }
    }
}
