//! The buffer that survives this process: each ring's requests in flight, for the next process
//! (INFLIGHT_SHMFD).
//!
//! The front-end asks for one with GET_INFLIGHT_FD and keeps it. It gives it back with SET_INFLIGHT_FD each
//! time before it starts rings, to this process or a later one. The queue writes its contents
//! (`kickless_virtqueue`, `device/inflight`). This module makes, accepts and divides it.

use crate::error::{HandOverError, RequestError};
use kickless_handover::{Given, Giving, v1};
use kickless_memory::{Inflight as Buffer, Mapper, Records};
use kickless_spec::ring::QUEUE_SIZE_MAX;
use kickless_spec::vhost_user::{inflight_entry_len, inflight_head_len, inflight_region_len};
use kickless_vhost_user::Inflight as Described;
use kickless_virtqueue::device::Options;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::io;
use std::os::fd::OwnedFd;

/// A buffer that the front-end has sent.
#[derive(Debug)]
pub(crate) struct Inflight {
    buffer: Buffer,
    queues: u16,
    queue_size: u16,
}

impl Inflight {
    /// Makes a buffer for this many rings of this size, with no requests. If the format of rings is not known
    /// yet, it has room for both.
    pub(crate) fn make(
        Described { num_queues, queue_size, .. }: Described,
        (queues_max, queue_size_max): (u16, u16),
        packed: Option<bool>,
    ) -> Result<(Described, OwnedFd), RequestError> {
        let shape = |field, value, max| match value {
            0 => Err(RequestError::InflightShape { field, value, max }),
            _ if value > max => Err(RequestError::InflightShape { field, value, max }),
            _ => Ok(()),
        };
        shape("number of queues", num_queues, queues_max)?;
        shape("queue size", queue_size, queue_size_max)?;
        let region = inflight_region_len(packed.unwrap_or(true), queue_size);
        let mmap_size = region as u64 * u64::from(num_queues);
        let fd = memory(mmap_size).map_err(RequestError::Descriptor)?;
        Ok((Described { mmap_size, mmap_offset: 0, num_queues, queue_size }, fd))
    }

    /// Accepts a buffer that this or another process has made.
    pub(crate) fn take(described: Described, fd: &OwnedFd, mapper: &Mapper) -> Result<Self, RequestError> {
        let Described { mmap_size, mmap_offset, num_queues: queues, queue_size } = described;
        if queue_size == 0 || queue_size > QUEUE_SIZE_MAX {
            let (field, max) = ("queue size", QUEUE_SIZE_MAX);
            return Err(RequestError::InflightShape { field, value: queue_size, max });
        }
        // Packed rings need larger regions. This is checked when a ring starts.
        let needs = inflight_region_len(false, queue_size) as u64 * u64::from(queues);
        if mmap_size < needs {
            return Err(RequestError::InflightSize { has: mmap_size, needs });
        }
        Ok(Self { buffer: mapper.inflight(fd, mmap_offset, mmap_size)?, queues, queue_size })
    }

    /// Returns the buffer as a part of a record.
    pub(crate) fn give(&self, to: &mut Giving) -> Result<v1::Inflight, HandOverError> {
        let Self { buffer, queues, queue_size } = self;
        let file = to.fd(buffer.file().ok_or(HandOverError::FileNotKept)?)?;
        let (offset, len) = (buffer.offset(), buffer.len());
        Ok(v1::Inflight { file, offset, len, queues: *queues, queue_size: *queue_size })
    }

    /// Accepts the buffer of a session of another process.
    pub(crate) fn restore(
        from: &v1::Inflight,
        given: &mut Given,
        mapper: &Mapper,
    ) -> Result<Self, RequestError> {
        let v1::Inflight { file, offset: mmap_offset, len: mmap_size, queues: num_queues, queue_size } =
            *from;
        Self::take(Described { mmap_size, mmap_offset, num_queues, queue_size }, &given.fd(file)?, mapper)
    }

    /// Returns the region of a ring of this shape.
    pub(crate) fn records(&self, index: u16, options: &Options) -> Result<Records, RequestError> {
        let (packed, size) = (options.is_packed(), self.queue_size);
        let region = inflight_region_len(packed, size);
        let len = inflight_head_len(packed) + inflight_entry_len(packed) * usize::from(size);
        let there = index < self.queues && options.size() <= size;
        let records = self.buffer.records(region * usize::from(index), len).filter(|_| there);
        records.ok_or(RequestError::InflightRing { index, size: options.size(), packed })
    }

    /// Returns the size of the largest ring that fits.
    pub(crate) fn queue_size(&self) -> u16 {
        self.queue_size
    }
}

/// Makes zeroed memory that cannot be resized.
fn memory(len: u64) -> io::Result<OwnedFd> {
    let fd = memfd_create("kickless-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&fd, len)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(num_queues: u16, queue_size: u16) -> Described {
        Described { num_queues, queue_size, ..Described::default() }
    }

    #[test]
    fn a_made_buffer_can_be_accepted() {
        for (packed, sizes) in [(false, [64, 4160]), (true, [64, 8256])] {
            for (size, region) in [1, 256].into_iter().zip(sizes) {
                let (made, fd) = Inflight::make(described(3, size), (4, 256), Some(packed)).unwrap();
                assert_eq!((made.mmap_size, made.mmap_offset), (3 * region, 0));
                assert!(ftruncate(&fd, 1).is_err(), "it can be made shorter");
                assert!(ftruncate(&fd, made.mmap_size + 1).is_err(), "it can be made longer");
                let seal = fcntl_add_seals(&fd, SealFlags::FUTURE_WRITE);
                assert!(seal.is_err(), "later processes can be kept from writing");
                let taken = Inflight::take(made, &fd, &Mapper::default()).unwrap();
                let options = |size| match packed {
                    true => Options::packed(size, false, false).unwrap(),
                    false => Options::new(size, false, false).unwrap(),
                };
                for index in 0..3 {
                    let records = taken.records(index, &options(size)).unwrap();
                    assert!(
                        records.len() as u64 <= region
                            && (0..records.len()).step_by(8).all(|at| records.load(at) == 0)
                    );
                    records.store(0, u64::from(index) + 1);
                }
                for index in 0..3 {
                    assert_eq!(taken.records(index, &options(size)).unwrap().load(0), u64::from(index) + 1);
                }
                assert!(taken.records(3, &options(size)).is_err());
                assert!(taken.records(0, &options(2 * size)).is_err());
            }
        }
    }

    #[test]
    fn either_format_fits_where_none_was_negotiated() {
        let (made, fd) = Inflight::make(described(2, 16), (2, 16), None).unwrap();
        let taken = Inflight::take(made, &fd, &Mapper::default()).unwrap();
        assert!(taken.records(1, &Options::packed(16, false, false).unwrap()).is_ok());
        assert!(taken.records(1, &Options::new(16, false, false).unwrap()).is_ok());
        // A buffer for split rings has no room for packed ones.
        let (made, fd) = Inflight::make(described(2, 16), (2, 16), Some(false)).unwrap();
        let taken = Inflight::take(made, &fd, &Mapper::default()).unwrap();
        assert!(taken.records(1, &Options::packed(16, false, false).unwrap()).is_err());
    }

    #[test]
    fn bounds() {
        for (queues, size) in [(0, 16), (3, 16), (2, 0), (2, 17)] {
            assert!(Inflight::make(described(queues, size), (2, 16), None).is_err(), "{queues} {size}");
        }
        let (made, fd) = Inflight::make(described(2, 16), (2, 16), Some(false)).unwrap();
        for wrong in [
            Described { mmap_size: made.mmap_size - 1, ..made },
            Described { mmap_size: made.mmap_size + 1, ..made },
            Described { mmap_size: u64::MAX, ..made },
            Described { mmap_size: 0, num_queues: 0, ..made },
            Described { mmap_offset: 8, ..made },
            Described { mmap_offset: 4, mmap_size: made.mmap_size - 8, num_queues: 1, ..made },
            Described { mmap_offset: u64::MAX, ..made },
            Described { num_queues: u16::MAX, ..made },
            Described { queue_size: 0, ..made },
            Described { queue_size: 32769, ..made },
        ] {
            assert!(Inflight::take(wrong, &fd, &Mapper::default()).is_err(), "{wrong:?}");
        }
        let part = Described { mmap_offset: 8, mmap_size: made.mmap_size - 8, num_queues: 1, ..made };
        assert!(Inflight::take(part, &fd, &Mapper::default()).is_ok());
        // The buffer has room for more entries than a ring can have, or for more than it declares.
        let fd = memory(2 << 20).unwrap();
        let roomy = |queue_size| Described { mmap_size: 2 << 20, ..described(1, queue_size) };
        assert!(matches!(
            Inflight::take(roomy(32769), &fd, &Mapper::default()),
            Err(RequestError::InflightShape { value: 32769, .. })
        ));
        let taken = Inflight::take(roomy(32768), &fd, &Mapper::default()).unwrap();
        let options = Options::new(32768, false, false).unwrap();
        assert!(taken.records(0, &options).is_ok() && taken.records(1, &options).is_err());
    }
}
