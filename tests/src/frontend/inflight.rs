//! A front-end that keeps what its back-ends write down of their requests in flight, and comes back to the next one with it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::{Result, bail, ensure};
use kickless_vhost_user::{FrontendMessage as Message, Inflight, Reply};

use crate::frontend::machine::Machine;
use crate::frontend::{Answer, Frontend};

/// The buffer, as the front-end keeps it.
#[derive(Debug)]
pub struct Kept {
    /// What it is like.
    pub described: Inflight,
    /// Its memory.
    pub file: OwnedFd,
}

impl Kept {
    /// A buffer of zeroes that nobody has asked a back-end for, in a file that can be made shorter.
    ///
    /// # Errors
    /// There is no memory.
    pub fn new(described: Inflight) -> Result<Kept> {
        let file = rustix::fs::memfd_create("inflight", rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, described.mmap_offset + described.mmap_size)?;
        Ok(Kept { described, file })
    }

    /// The buffer as a file to read and write.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn file(&self) -> Result<File> {
        Ok(self.file.try_clone()?.into())
    }

    /// SET_INFLIGHT_FD with it.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn message(&self) -> Result<Message> {
        Ok(Message::SetInflightFd(self.described, self.file.try_clone()?))
    }
}

impl Frontend {
    /// GET_INFLIGHT_FD; `None` if it is refused.
    ///
    /// # Errors
    /// It is answered otherwise.
    pub fn get_inflight(&mut self, num_queues: u16, queue_size: u16) -> Result<Option<Kept>> {
        let wanted = Inflight { num_queues, queue_size, ..Inflight::default() };
        match self.ask(&Message::GetInflightFd(wanted))? {
            Reply::Inflight(described, Some(file)) => {
                let same = described.num_queues == num_queues && described.queue_size == queue_size;
                ensure!(same && described.mmap_size > 0, "{described:?} for {wanted:?}");
                Ok(Some(Kept { described, file }))
            }
            Reply::Inflight(_, None) => Ok(None),
            other => bail!("GET_INFLIGHT_FD is answered by {other:?}"),
        }
    }

    /// SET_INFLIGHT_FD.
    ///
    /// # Errors
    /// It is refused.
    pub fn set_inflight(&mut self, kept: &Kept) -> Result<()> {
        match self.attempt(&kept.message()?)? {
            Answer::Done => Ok(()),
            answer => bail!("SET_INFLIGHT_FD: {answer:?}"),
        }
    }
}

impl Machine {
    /// Has the back-end make a buffer and use it, before rings start.
    ///
    /// # Errors
    /// It refuses.
    pub fn keep(&mut self) -> Result<Kept> {
        let shape = *self.shape();
        let Some(kept) = self.frontend.get_inflight(shape.queues, shape.size)? else {
            bail!("GET_INFLIGHT_FD is refused")
        };
        self.frontend.set_inflight(&kept)?;
        Ok(kept)
    }

    /// Connects to the back-end after the one that has died, as QEMU does: it reads no configuration space, and can only say of a ring
    /// where it last heard that it stands. Its rings have yet to start.
    ///
    /// # Errors
    /// The back-end refuses something that it must not.
    pub fn come_back(&mut self, socket: &Path, kept: Option<&Kept>) -> Result<()> {
        // The connection before it is dropped before anything is said: one that lives is served first.
        self.frontend = Frontend::connect(socket)?;
        self.frontend.negotiate(self.shape().features())?;
        if let Some(kept) = kept {
            self.frontend.set_inflight(kept)?;
        }
        self.frontend.share(&[&self.ram])?;
        for queue in &mut self.queues {
            // A split ring says how far it is used, and a packed one does not.
            if queue.places().is_none() {
                queue.set_base(queue.used_idx().into());
            }
        }
        Ok(())
    }
}
