//! The chains that an earlier device had in flight.

use std::collections::VecDeque;

/// The chains that an earlier device had in flight, until they are popped again.
#[derive(Debug)]
pub(in crate::device) struct Resubmissions<C> {
    /// The chains to resubmit, the next one last.
    chains: Vec<C>,
    /// The resubmitted chains that are credit, oldest first. The region names them from their first pop on.
    credit: VecDeque<C>,
}

impl<C> Resubmissions<C> {
    /// Takes over these chains, the next one last.
    pub(super) fn new(chains: Vec<C>) -> Self {
        Self { chains, credit: VecDeque::new() }
    }

    /// Returns the number of chains to resubmit.
    pub(in crate::device) fn len(&self) -> u16 {
        self.chains.len() as u16
    }

    /// Returns the chains to resubmit, the next one last.
    pub(in crate::device) fn chains(&self) -> &[C] {
        &self.chains
    }

    /// Removes the next chain to resubmit, because it was popped.
    pub(in crate::device) fn popped(&mut self) {
        self.chains.pop();
    }

    /// Moves the next chain to resubmit to the credit.
    pub(in crate::device) fn popped_as_credit(&mut self) {
        self.credit.extend(self.chains.pop());
    }

    /// Returns the number of resubmitted chains that are credit.
    pub(in crate::device) fn credit(&self) -> u16 {
        self.credit.len() as u16
    }

    /// Removes the oldest of the credit. Returns false if there is none.
    pub(in crate::device) fn use_credit(&mut self) -> bool {
        self.credit.pop_front().is_some()
    }

    /// Moves the newest of the credit back to the chains to resubmit, and returns it.
    pub(in crate::device) fn unpop(&mut self) -> Option<&C> {
        self.chains.push(self.credit.pop_back()?);
        self.chains.last()
    }
}
