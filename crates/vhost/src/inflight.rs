//! The buffer that outlives us: what each ring has in flight, for whoever goes on after us (INFLIGHT_SHMFD).
//!
//! The front-end asks for one with GET_INFLIGHT_FD, keeps it, and gives it back with SET_INFLIGHT_FD each time before it starts rings, to
//! us or to a process after us. What is written to it is the queue's business (`kickless_virtqueue`, `device/inflight`); here it
//! is made, taken and divided.

use crate::error::Refusal;
use kickless_memory::{Inflight as Buffer, Mapper, Records};
use kickless_spec::ring::QUEUE_SIZE_MAX;
use kickless_spec::vhost_user::{inflight_entry_len, inflight_head_len, inflight_region_len};
use kickless_vhost_user::Inflight as Described;
use kickless_virtqueue::device::Options;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::io;
use std::os::fd::OwnedFd;

/// A buffer that the front-end has given us.
#[derive(Debug)]
pub(crate) struct Inflight {
    buffer: Buffer,
    queues: u16,
    queue_size: u16,
}

impl Inflight {
    /// A buffer for so many rings of this size, in which nothing was begun. Where the format of rings is not known yet, it has room
    /// for either.
    pub(crate) fn make(
        Described { num_queues, queue_size, .. }: Described,
        (queues_max, queue_size_max): (u16, u16),
        packed: Option<bool>,
    ) -> Result<(Described, OwnedFd), Refusal> {
        let shape = |field, value, max| match value {
            0 => Err(Refusal::InflightShape { field, value, max }),
            _ if value > max => Err(Refusal::InflightShape { field, value, max }),
            _ => Ok(()),
        };
        shape("number of queues", num_queues, queues_max)?;
        shape("queue size", queue_size, queue_size_max)?;
        let region = inflight_region_len(packed.unwrap_or(true), queue_size);
        let mmap_size = region as u64 * u64::from(num_queues);
        let fd = memory(mmap_size).map_err(Refusal::Descriptor)?;
        Ok((Described { mmap_size, mmap_offset: 0, num_queues, queue_size }, fd))
    }

    /// Takes a buffer that we or somebody else has made.
    pub(crate) fn take(described: Described, fd: &OwnedFd, mapper: &Mapper) -> Result<Self, Refusal> {
        let Described { mmap_size, mmap_offset, num_queues: queues, queue_size } = described;
        if queue_size == 0 || queue_size > QUEUE_SIZE_MAX {
            let (field, max) = ("queue size", QUEUE_SIZE_MAX);
            return Err(Refusal::InflightShape { field, value: queue_size, max });
        }
        // Of packed rings the regions are larger: that is looked at when a ring starts.
        let needs = inflight_region_len(false, queue_size) as u64 * u64::from(queues);
        if mmap_size < needs {
            return Err(Refusal::InflightSize { has: mmap_size, needs });
        }
        Ok(Self { buffer: mapper.inflight(fd, mmap_offset, mmap_size)?, queues, queue_size })
    }

    /// The region of a ring of this shape.
    pub(crate) fn records(&self, index: u16, options: &Options) -> Result<Records, Refusal> {
        let (packed, size) = (options.is_packed(), self.queue_size);
        let region = inflight_region_len(packed, size);
        let len = inflight_head_len(packed) + inflight_entry_len(packed) * usize::from(size);
        let there = index < self.queues && options.size() <= size;
        let records = self.buffer.records(region * usize::from(index), len).filter(|_| there);
        records.ok_or(Refusal::InflightRing { index, size: options.size(), packed })
    }
}

/// Memory of zeroes that nobody can make shorter.
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
    fn what_was_made_can_be_taken() {
        for (packed, sizes) in [(false, [64, 4160]), (true, [64, 8256])] {
            for (size, region) in [1, 256].into_iter().zip(sizes) {
                let (made, fd) = Inflight::make(described(3, size), (4, 256), Some(packed)).unwrap();
                assert_eq!((made.mmap_size, made.mmap_offset), (3 * region, 0));
                assert!(ftruncate(&fd, 1).is_err(), "it can be made shorter");
                assert!(ftruncate(&fd, made.mmap_size + 1).is_err(), "it can be made longer");
                let seal = fcntl_add_seals(&fd, SealFlags::FUTURE_WRITE);
                assert!(seal.is_err(), "it can be kept from those who come after");
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
        // And one for split rings has no room for packed ones.
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
        // Room for more than there can be, or for more than is said to be there.
        let fd = memory(2 << 20).unwrap();
        let roomy = |queue_size| Described { mmap_size: 2 << 20, ..described(1, queue_size) };
        assert!(matches!(
            Inflight::take(roomy(32769), &fd, &Mapper::default()),
            Err(Refusal::InflightShape { value: 32769, .. })
        ));
        let taken = Inflight::take(roomy(32768), &fd, &Mapper::default()).unwrap();
        let options = Options::new(32768, false, false).unwrap();
        assert!(taken.records(0, &options).is_ok() && taken.records(1, &options).is_err());
    }
}
