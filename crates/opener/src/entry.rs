//! The things that a device may use, as this process has entered them.

use std::io;
use std::mem;
use std::time::Duration;

use crate::client::{Client, client, mismatch, without_refusal};
use crate::grant::{Grant, Outside, Reason, Refused};
use crate::perform::{LIBRARY, NOT_NAMED, PASST_OPTION};
use crate::wire::{Reply, Request};

/// The things that a device may use. Dropping it takes the right to use them away.
///
/// It is empty if this process opens files itself.
#[derive(Debug, Default)]
pub struct Entry(Option<u64>);

/// Enters the things that a device needs. Its files can be opened afterwards.
///
/// # Errors
/// The sandbox does not allow one of them.
pub fn enter(grants: &[Grant]) -> Result<Entry, Refused> {
    let mut entry = Entry::default();
    entry.replace(grants)?;
    Ok(entry)
}

impl Entry {
    /// Enters these things in place of those before. Those stay if it fails.
    ///
    /// # Errors
    /// The sandbox does not allow one of them.
    pub fn replace(&mut self, grants: &[Grant]) -> Result<(), Refused> {
        match client() {
            Some(client) => self.replace_at(client, grants),
            None => Ok(()),
        }
    }

    fn replace_at(&mut self, client: &Client, grants: &[Grant]) -> Result<(), Refused> {
        if grants.is_empty() {
            *self = Self::default();
            return Ok(());
        }
        let number = self.0.unwrap_or_else(|| client.number());
        let targets = grants.iter().map(|grant| grant.to.clone()).collect();
        let option = |nth: u8| grants.get(usize::from(nth)).map_or("", |grant| grant.option);
        let failed = |error: io::Error| Refused { option: option(0), reason: Reason::Host(error) };
        let request = Request::Enter { entry: number, targets };
        let answer = client.ask_with(&request, None).map_err(failed)?;
        let (grant, reason) = match answer.0 {
            Reply::Outside { grant, path } => (grant, Outside { path }.into()),
            Reply::Refused { grant, reason: NOT_NAMED, .. } => (grant, Reason::NotNamed),
            Reply::Refused { grant, reason: PASST_OPTION, .. } => (grant, Reason::PasstOption),
            Reply::Refused { grant, reason: LIBRARY, text } => (grant, Reason::Library(text)),
            _ => match without_refusal(answer).map_err(failed)? {
                (Reply::Done {}, _) => {
                    self.0 = Some(number);
                    return Ok(());
                }
                _ => return Err(failed(mismatch())),
            },
        };
        Err(Refused { option: option(grant), reason })
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let (Some(entry), Some(client)) = (mem::take(&mut self.0), client()) {
            // It fails only if the other process has ended or hangs.
            let _ = client.give_back(&Request::Leave { entry }, Duration::ZERO);
        }
    }
}
