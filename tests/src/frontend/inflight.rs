//! Keeps a back-end's in-flight buffer in the front-end, and gives it to the next back-end.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Result, bail, ensure};
use kickless_vhost_user::{FrontendMessage as Message, Inflight, Reply};

use crate::frontend::machine::Machine;
use crate::frontend::{Answer, Frontend};

/// An in-flight buffer, as the front-end keeps it.
#[derive(Debug)]
pub struct InflightBuffer {
    /// Its description in messages.
    pub described: Inflight,
    /// Its memory.
    pub file: OwnedFd,
}

impl InflightBuffer {
    /// Creates a buffer of zeroes without a back-end, in a file that can be truncated.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub fn new(described: Inflight) -> Result<InflightBuffer> {
        let file = rustix::fs::memfd_create("inflight", rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, described.mmap_offset + described.mmap_size)?;
        Ok(InflightBuffer { described, file })
    }

    /// Returns a copy of the buffer, as the destination of a migration gets it.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub fn copy(&self) -> Result<InflightBuffer> {
        let copy = Self::new(Inflight { mmap_offset: 0, ..self.described })?;
        let mut bytes = vec![0; usize::try_from(self.described.mmap_size)?];
        self.file()?.read_exact_at(&mut bytes, self.described.mmap_offset)?;
        copy.file()?.write_all_at(&bytes, 0)?;
        Ok(copy)
    }

    /// Returns the buffer as a file to read and write.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn file(&self) -> Result<File> {
        Ok(self.file.try_clone()?.into())
    }

    /// Returns a SET_INFLIGHT_FD message with this buffer.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn message(&self) -> Result<Message> {
        Ok(Message::SetInflightFd(self.described, self.file.try_clone()?))
    }
}

impl Frontend {
    /// Sends GET_INFLIGHT_FD. Returns `None` if the back-end refuses it.
    ///
    /// # Errors
    /// The back-end sends another answer.
    pub fn get_inflight(&mut self, num_queues: u16, queue_size: u16) -> Result<Option<InflightBuffer>> {
        let wanted = Inflight { num_queues, queue_size, ..Inflight::default() };
        match self.ask(&Message::GetInflightFd(wanted))? {
            Reply::Inflight(described, Some(file)) => {
                let same = described.num_queues == num_queues && described.queue_size == queue_size;
                ensure!(same && described.mmap_size > 0, "{described:?} for {wanted:?}");
                Ok(Some(InflightBuffer { described, file }))
            }
            Reply::Inflight(_, None) => Ok(None),
            other => bail!("GET_INFLIGHT_FD is answered by {other:?}"),
        }
    }

    /// Sends SET_INFLIGHT_FD.
    ///
    /// # Errors
    /// The back-end refuses it.
    pub fn set_inflight(&mut self, kept: &InflightBuffer) -> Result<()> {
        match self.attempt(&kept.message()?)? {
            Answer::Done => Ok(()),
            answer => bail!("SET_INFLIGHT_FD: {answer:?}"),
        }
    }
}

impl Machine {
    /// Asks the back-end for a buffer and sets it. No ring may have started.
    ///
    /// # Errors
    /// The back-end refuses one of the messages.
    pub fn get_and_set_inflight(&mut self) -> Result<InflightBuffer> {
        let shape = *self.shape();
        let Some(kept) = self.frontend.get_inflight(shape.queues, shape.size)? else {
            bail!("GET_INFLIGHT_FD is refused")
        };
        self.frontend.set_inflight(&kept)?;
        Ok(kept)
    }

    /// Connects to the successor of a back-end that has died, as QEMU does: it does not read the
    /// configuration space, and the used index is all that it knows of a stopped ring. The rings are not
    /// started.
    ///
    /// # Errors
    /// The back-end refuses a message that it must accept.
    pub fn reconnect(&mut self, socket: &Path, kept: Option<&InflightBuffer>) -> Result<()> {
        // Drops the old connection first, because a back-end that still runs serves one front-end at a
        // time.
        self.frontend = Frontend::connect(socket)?;
        self.frontend.negotiate_with(self.shape().features(), self.shape().protocol)?;
        if let Some(kept) = kept {
            self.frontend.set_inflight(kept)?;
        }
        self.frontend.share(&[&self.ram])?;
        for queue in &mut self.queues {
            // The used index is in the memory of a split ring, but not of a packed one.
            if queue.positions().is_none() {
                queue.set_base(queue.used_idx().into());
            }
        }
        Ok(())
    }
}
