//! The rings of the hostile back-end.

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
use kickless_virtqueue::packed::Place;
use kickless_virtqueue::{Buffer, Chain, ChainId};
use zerocopy::FromBytes;

use crate::hostile_backend::lies::RingLie;
use crate::hostile_backend::shared::Shared;

/// What happens to the ring's notifications.
pub(crate) struct Events {
    pub(crate) kick: OwnedFd,
    pub(crate) call: Option<OwnedFd>,
    pub(crate) err: Option<OwnedFd>,
}

/// A ring that runs.
pub(crate) struct Ring {
    view: Arc<View>,
    queue: Queue,
    options: Options,
    desc: Area,
    avail: Area,
    used: Area,
    /// A packed ring: where the next used descriptor goes.
    place: Place,
    /// A request that was not answered truly when it came: id, length, descriptors.
    owed: Option<(ChainId, u32, u16)>,
    /// A lie was told, which the truth about other requests would write over. Kicks are left where they are.
    pub(crate) rests: bool,
    pub(crate) events: Events,
}

/// A chain and what came of it.
struct Served {
    id: ChainId,
    /// Bytes written.
    len: u32,
    /// Bytes that could have been written.
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
        let place = Place::from_bits(base);
        Ok(Ring {
            view: view.clone(),
            queue,
            options,
            desc,
            avail,
            used,
            place,
            owed: None,
            rests: false,
            events,
        })
    }

    /// Its descriptors, the driver's area and the device's.
    pub(crate) fn areas(&self) -> [&Area; 3] {
        [&self.desc, &self.avail, &self.used]
    }

    /// Takes what there is, and answers it.
    ///
    /// # Errors
    /// The connection is to end.
    pub(crate) fn look(&mut self, shared: &Shared) -> Result<()> {
        take(&self.events.kick);
        let mut chain = Chain::default();
        while !self.rests {
            while !self.rests {
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

    fn serve(&mut self, chain: &Chain, shared: &Shared) -> Result<()> {
        let number = shared.requests.fetch_add(1, Ordering::Release);
        let lie = shared.rules().ring.filter(|(at, _)| *at == number).map(|(_, lie)| lie);
        let (data_len, status) = carry_out(&self.view, chain, shared)?;
        let status = match lie {
            Some(RingLie::NoStatus | RingLie::OutOfOrder) => None,
            Some(RingLie::Status(status)) => Some(status),
            _ => Some(status),
        };
        if let (Some(status), Some(last)) = (status, chain.writable().last()) {
            let at = Gpa(last.addr.0 + u64::from(last.len) - 1);
            self.view.map().write(at, &[status])?;
        }
        let buffers = chain.readable().len() + chain.writable().len();
        let served = Served {
            id: chain.id,
            len: data_len + 1,
            room: u32::try_from(chain.writable_len())?,
            descriptors: if self.is_indirect() { 1 } else { u16::try_from(buffers)? },
        };
        match lie {
            Some(lie) => self.lie(lie, &served, shared),
            None => {
                if let Some((id, len, descriptors)) = self.owed.take() {
                    self.push(id, len, descriptors);
                }
                self.push(served.id, served.len, served.descriptors);
                Ok(())
            }
        }
    }

    /// Of a packed ring: whether the request that is served has a table.
    fn is_indirect(&self) -> bool {
        let ahead = self.owed.map_or(0, |(_, _, descriptors)| descriptors);
        let at = self.place.after(ahead, self.options.size()).flags_at();
        self.options.is_packed() && self.desc.load_u16(at, Ordering::Relaxed) & DESC_F_INDIRECT != 0
    }

    fn push(&mut self, id: ChainId, len: u32, descriptors: u16) {
        self.queue.push(id, len);
        self.place = self.place.after(descriptors, self.options.size());
    }

    fn lie(&mut self, lie: RingLie, of: &Served, shared: &Shared) -> Result<()> {
        let size = self.options.size();
        self.rests = !matches!(lie, RingLie::NoStatus | RingLie::Status(_) | RingLie::WrongWrap);
        match lie {
            RingLie::IdOutOfRange => self.say(size.into(), of.len),
            RingLie::IdNotInFlight => self.say(u32::from((of.id.head + 1) % size), of.len),
            RingLie::TooLong => self.say(of.id.head.into(), of.room + 1),
            RingLie::Twice => {
                self.push(of.id, of.len, of.descriptors);
                let _ = self.queue.publish();
                self.say(of.id.head.into(), of.len);
            }
            RingLie::IndexJump => self.move_index(size + 1),
            RingLie::IndexBack => self.move_index(u16::MAX),
            RingLie::WrongWrap => {
                self.owed = Some((of.id, of.len, of.descriptors));
                self.place.wrap = !self.place.wrap;
                self.say(of.id.head.into(), of.len);
                self.place.wrap = !self.place.wrap;
            }
            RingLie::NoStatus | RingLie::Status(_) => self.push(of.id, of.len, of.descriptors),
            RingLie::OutOfOrder => {
                // The one after it.
                let mut chain = Chain::default();
                if self.queue.pop(&self.view, &mut chain)? {
                    shared.requests.fetch_add(1, Ordering::Release);
                    self.say(chain.id.head.into(), 1);
                }
            }
            RingLie::RingError => {
                if let Some(err) = &self.events.err {
                    signal(err);
                }
            }
            RingLie::Closed => bail!("told to close"),
            RingLie::Silence => {}
        }
        Ok(())
    }

    /// Writes a used element at the next place, and calls.
    fn say(&mut self, id: u32, len: u32) {
        if self.options.is_packed() {
            self.desc.write(self.place.at() + 8, &len.to_le());
            self.desc.write(self.place.at() + 12, &(id as u16).to_le());
            let flags = self.place.used() | DESC_F_WRITE;
            self.desc.store_u16(self.place.flags_at(), flags, Ordering::Release);
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

    /// Where it stands.
    pub(crate) fn base(&self) -> u32 {
        let next = u32::from(self.queue.next_avail());
        if self.options.is_packed() { next << 16 | next } else { next }
    }
}

/// Does what a chain asks for; bytes of data written, and the status.
fn carry_out(view: &View, chain: &Chain, shared: &Shared) -> Result<(u32, u8)> {
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
    // Only a full counter refuses, and that one has been signalled.
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

fn take(fd: &OwnedFd) {
    let _ = rustix::io::read(fd, &mut [0; 8]);
}
