//! Serves the rings of the hostile back-end.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail};
use kickless_memory::{Area, Gpa, View};
use kickless_spec::blk;
use kickless_spec::ring::{
    DESC_F_INDIRECT, DESC_F_WRITE, EVENT_LEN, RING_ENTRIES, RING_IDX, UsedElem, avail_len, desc_len, used_len,
};
use kickless_virtqueue::device::{Addresses, Metadata, Options, Queue};
use kickless_virtqueue::packed::RingPosition;
use kickless_virtqueue::{Buffer, Chain, ChainId};
use zerocopy::FromBytes;

use crate::hostile_backend::backend_state::BackendState;
use crate::hostile_backend::card;
use crate::hostile_backend::faults::RingFault;

/// The eventfds of a ring.
pub(crate) struct Events {
    pub(crate) kick: OwnedFd,
    pub(crate) call: Option<OwnedFd>,
    pub(crate) err: Option<OwnedFd>,
}

/// A started ring.
pub(crate) struct Ring {
    view: Arc<View>,
    queue: Queue,
    options: Options,
    desc: Area,
    avail: Area,
    used: Area,
    /// Position of the next used descriptor in a packed ring.
    position: RingPosition,
    /// A request that was answered with a fault and is not completed yet: its id, length and number of
    /// descriptors.
    unanswered: Option<(ChainId, u32, u16)>,
    /// Whether the ring has stopped after a fault, because a later correct answer would overwrite the fault.
    /// It then ignores kicks.
    pub(crate) halted: bool,
    pub(crate) events: Events,
}

/// A chain with the result of its request.
struct ServedChain {
    id: ChainId,
    /// Number of written bytes.
    len: u32,
    /// Number of bytes that the chain has room for.
    room: u32,
    descriptors: u16,
}

impl Ring {
    pub(crate) fn new(
        view: &Arc<View>,
        addresses: &Addresses,
        options: Options,
        base: u16,
        events: Events,
    ) -> Result<Ring> {
        let size = options.size();
        let (avail, used) = match options.is_packed() {
            true => (EVENT_LEN, EVENT_LEN),
            false => (avail_len(size, options.event_idx()), used_len(size, options.event_idx())),
        };
        let area = |at, len| view.map().area(at, len, 2).context("a ring outside of the memory");
        let (desc, avail) = (area(addresses.desc, desc_len(size))?, area(addresses.avail, avail)?);
        let used = area(addresses.used, used)?;
        let metadata = Metadata::map(view, addresses, &options)?;
        let queue = Queue::new(options, metadata, base);
        let position = RingPosition::from_bits(base);
        Ok(Ring {
            view: view.clone(),
            queue,
            options,
            desc,
            avail,
            used,
            position,
            unanswered: None,
            halted: false,
            events,
        })
    }

    /// Returns the areas: descriptors, driver and device.
    pub(crate) fn areas(&self) -> [&Area; 3] {
        [&self.desc, &self.avail, &self.used]
    }

    /// Takes all available chains and answers them.
    ///
    /// # Errors
    /// The connection must end.
    pub(crate) fn look(&mut self, shared: &BackendState) -> Result<()> {
        take(&self.events.kick);
        let mut chain = Chain::default();
        while !self.halted {
            while !self.halted {
                match self.queue.pop(&self.view, &mut chain) {
                    Ok(true) => self.serve(&chain, shared)?,
                    Ok(false) => break,
                    Err(error) => {
                        shared.faults().push(error.to_string());
                        return Ok(());
                    }
                }
            }
            if self.queue.publish() {
                self.call();
            }
            if !self.queue.arm() {
                break;
            }
        }
        Ok(())
    }

    fn serve(&mut self, chain: &Chain, shared: &BackendState) -> Result<()> {
        let number = shared.requests.fetch_add(1, Ordering::Release);
        let fault = shared.rules().ring.filter(|(at, _)| *at == number).map(|(_, fault)| fault);
        let is_card = shared.rules().card.is_some();
        let (len, status) = match is_card {
            true => card::carry_out(&self.view, chain, fault)?,
            false => carry_out(&self.view, chain, shared).map(|(data, status)| (data + 1, Some(status)))?,
        };
        let status = match fault {
            Some(RingFault::NoStatus | RingFault::OutOfOrder) => None,
            Some(RingFault::Status(status)) => Some(status),
            _ => status,
        };
        if let (Some(status), Some(last)) = (status, chain.writable().last()) {
            let at = Gpa(last.addr.0 + u64::from(last.len) - 1);
            self.view.map().write(at, &[status])?;
        }
        let buffers = chain.readable().len() + chain.writable().len();
        let served = ServedChain {
            id: chain.id,
            len,
            room: u32::try_from(chain.writable_len())?,
            descriptors: if self.is_indirect() { 1 } else { u16::try_from(buffers)? },
        };
        match fault {
            Some(fault) => self.fault(fault, &served, shared),
            None => {
                if let Some((id, len, descriptors)) = self.unanswered.take() {
                    self.push(id, len, descriptors);
                }
                self.push(served.id, served.len, served.descriptors);
                Ok(())
            }
        }
    }

    /// Returns whether the current request of a packed ring has an indirect table.
    fn is_indirect(&self) -> bool {
        let ahead = self.unanswered.map_or(0, |(_, _, descriptors)| descriptors);
        let at = self.position.after(ahead, self.options.size()).flags_at();
        self.options.is_packed() && self.desc.load_u16(at, Ordering::Relaxed) & DESC_F_INDIRECT != 0
    }

    fn push(&mut self, id: ChainId, len: u32, descriptors: u16) {
        self.queue.push(id, len);
        self.position = self.position.after(descriptors, self.options.size());
    }

    fn fault(&mut self, fault: RingFault, of: &ServedChain, shared: &BackendState) -> Result<()> {
        let size = self.options.size();
        self.halted = !matches!(
            fault,
            RingFault::NoStatus | RingFault::Status(_) | RingFault::WrongWrap | RingFault::Header
        );
        match fault {
            RingFault::IdOutOfRange => self.push_used(size.into(), of.len),
            RingFault::IdNotInFlight => self.push_used(u32::from((of.id.head() + 1) % size), of.len),
            RingFault::TooLong => self.push_used(of.id.head().into(), of.room + 1),
            RingFault::Twice => {
                self.push(of.id, of.len, of.descriptors);
                let _ = self.queue.publish();
                self.push_used(of.id.head().into(), of.len);
            }
            RingFault::IndexJump => self.move_index(size + 1),
            RingFault::IndexBack => self.move_index(u16::MAX),
            RingFault::WrongWrap => {
                self.unanswered = Some((of.id, of.len, of.descriptors));
                self.position.wrap = !self.position.wrap;
                self.push_used(of.id.head().into(), of.len);
                self.position.wrap = !self.position.wrap;
            }
            RingFault::NoStatus | RingFault::Status(_) | RingFault::Header | RingFault::Buffers(_) => {
                self.push(of.id, of.len, of.descriptors);
            }
            RingFault::NoHeader => self.push(of.id, of.len.min(11), of.descriptors),
            RingFault::OutOfOrder => {
                // The request after this one.
                let mut chain = Chain::default();
                if self.queue.pop(&self.view, &mut chain)? {
                    shared.requests.fetch_add(1, Ordering::Release);
                    self.push_used(chain.id.head().into(), 1);
                }
            }
            RingFault::RingError => {
                if let Some(err) = &self.events.err {
                    signal(err);
                }
            }
            RingFault::Closed => bail!("a fault closes the connection"),
            RingFault::Silence => {}
        }
        Ok(())
    }

    /// Writes a used element at the next position, and calls.
    fn push_used(&mut self, id: u32, len: u32) {
        if self.options.is_packed() {
            self.desc.write(self.position.at() + 8, &len.to_le());
            self.desc.write(self.position.at() + 12, &(id as u16).to_le());
            let flags = self.position.used() | DESC_F_WRITE;
            self.desc.store_u16(self.position.flags_at(), flags, Ordering::Release);
        } else {
            let index = self.used.load_u16(RING_IDX, Ordering::Relaxed);
            let entry = usize::from(index & (self.options.size() - 1));
            let element = UsedElem { id: id.into(), len: len.into() };
            self.used.write(RING_ENTRIES + size_of::<UsedElem>() * entry, &element);
            self.used.store_u16(RING_IDX, index.wrapping_add(1), Ordering::Release);
        }
        self.call();
    }

    fn move_index(&mut self, by: u16) {
        let index = self.used.load_u16(RING_IDX, Ordering::Relaxed);
        self.used.store_u16(RING_IDX, index.wrapping_add(by), Ordering::Release);
        self.call();
    }

    pub(crate) fn call(&self) {
        if let Some(call) = &self.events.call {
            signal(call);
        }
    }

    /// Returns its position in the form of GET_VRING_BASE.
    pub(crate) fn base(&self) -> u32 {
        let next = u32::from(self.queue.next_avail());
        if self.options.is_packed() { next << 16 | next } else { next }
    }
}

/// Performs the request of a chain. Returns the number of data bytes written, and the status.
fn carry_out(view: &View, chain: &Chain, shared: &BackendState) -> Result<(u32, u8)> {
    let mut readable = Vec::new();
    for Buffer { addr, len } in chain.readable() {
        let mut bytes = vec![0; *len as usize];
        view.read(*addr, &mut bytes)?;
        readable.extend(bytes);
    }
    let (header, data) = blk::Header::read_from_prefix(&readable).ok().context("no header")?;
    let room = usize::try_from(chain.writable_len())?.checked_sub(1).context("no status")?;
    let mut disk = shared.disk();
    let start = usize::try_from(header.sector.get())? * 512;
    let read = match header.kind.get() {
        blk::T_IN => disk.get(start..start + room).context("outside of the disk")?.to_vec(),
        blk::T_OUT => {
            let place = disk.get_mut(start..start + data.len()).context("outside of the disk")?;
            place.copy_from_slice(data);
            Vec::new()
        }
        blk::T_FLUSH => Vec::new(),
        blk::T_GET_ID => b"hostile".iter().copied().chain([0; blk::ID_LEN]).take(room).collect(),
        _ => return Ok((0, blk::S_UNSUPP)),
    };
    let mut rest = read.as_slice();
    for Buffer { addr, len } in chain.writable() {
        let (now, later) = rest.split_at(rest.len().min(*len as usize));
        view.map().write(*addr, now)?;
        rest = later;
    }
    Ok((u32::try_from(read.len())?, blk::S_OK))
}

fn signal(fd: &OwnedFd) {
    // Only a full counter refuses, and a full counter is signalled already.
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

fn take(fd: &OwnedFd) {
    let _ = rustix::io::read(fd, &mut [0; 8]);
}
