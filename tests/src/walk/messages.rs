//! Messages of every request of the protocol, with any parameters. The requests that the back-end does not
//! decode are numbers only.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use anyhow::Result;
use kickless_spec::features::Features;
use kickless_spec::vhost_user::{
    FrontendRequest as Code, IotlbAccess, IotlbKind, ProtocolFeatures, TransferDirection, TransferPhase,
};
use kickless_testing::Random;
use kickless_vhost_user::{
    Config, DeviceState, FrontendMessage as Message, Inflight, Iotlb, LogBase, MemoryRegion, VringAddr,
    VringFd, VringState,
};

use crate::driver::memory::Ram;
use crate::walk::descriptors;

/// The requests that the back-end refuses without decoding them.
pub const UNDECODED: [Code; 11] = [
    Code::SetVringEndian,
    Code::CreateCryptoSession,
    Code::CloseCryptoSession,
    Code::PostcopyAdvise,
    Code::PostcopyListen,
    Code::PostcopyEnd,
    Code::GpuSetSocket,
    Code::SetStatus,
    Code::GetStatus,
    Code::GetSharedObject,
    Code::GetShmemConfig,
];

/// The parts of a session that messages name.
pub struct Known<'a> {
    /// The socket.
    pub socket: &'a UnixStream,
    /// The memory of the rings.
    pub ram: &'a Ram,
    /// The features that the back-end offered.
    pub offered: Features,
    /// The protocol features that the back-end offered.
    pub protocol: ProtocolFeatures,
    /// The addresses of a ring of the session.
    pub addresses: VringAddr,
}

/// Returns a number that is often at an edge.
fn edge(random: &mut Random) -> u64 {
    match random.below(8) {
        0 => 0,
        1 => 1,
        2 => u64::MAX,
        3 => 1 << random.below(64),
        4 => (1 << random.below(64)) - 1,
        5 => u64::from(random.next() as u32),
        6 => random.below(4096),
        _ => random.next(),
    }
}

fn index(random: &mut Random) -> u32 {
    if random.one_in(8) { edge(random) as u32 } else { random.below(4) as u32 }
}

impl Known<'_> {
    fn file(&self, random: &mut Random) -> Result<OwnedFd> {
        descriptors::any(random, self.socket)
    }

    /// Returns a region of the memory, or one that is not what it says.
    fn region(&self, random: &mut Random) -> Result<(MemoryRegion, OwnedFd)> {
        let (mut region, file) = self.ram.region_and_file()?;
        match random.below(12) {
            0 => region.guest_addr = edge(random),
            1 => region.size = edge(random),
            2 => region.user_addr = edge(random),
            3 => region.mmap_offset = edge(random),
            4 => return Ok((region, self.file(random)?)),
            5 => {
                let at = 1 << (32 + random.below(12));
                let region = MemoryRegion { guest_addr: at, user_addr: at, size: 4096, mmap_offset: 0 };
                return Ok((region, self.file(random)?));
            }
            _ => {}
        }
        Ok((region, file))
    }

    fn vring_fd(&self, random: &mut Random) -> Result<VringFd> {
        let index = if random.one_in(16) { random.next() as u8 } else { random.below(4) as u8 };
        let fd = match random.below(4) {
            0 => None,
            1 => Some(self.file(random)?),
            _ => Some(descriptors::event()?),
        };
        Ok(VringFd { index, fd })
    }

    fn inflight(&self, random: &mut Random) -> Inflight {
        let mmap_size = if random.one_in(2) { 4096 << random.below(6) } else { edge(random) };
        let mmap_offset = if random.one_in(4) { edge(random) } else { 0 };
        let num_queues = if random.one_in(4) { random.next() as u16 } else { random.below(5) as u16 };
        let queue_size = if random.one_in(4) { random.next() as u16 } else { 1 << random.below(11) };
        Inflight { mmap_size, mmap_offset, num_queues, queue_size }
    }

    fn config(&self, random: &mut Random) -> Config {
        let offset = if random.one_in(4) { edge(random) as u32 } else { random.below(64) as u32 };
        let len = if random.one_in(8) { 256 } else { random.below(64) };
        Config { offset, flags: random.below(2) as u32, data: random.bytes(len), spare: 0 }
    }

    /// Returns a message about a ring, in any order with others.
    fn of_ring(&self, random: &mut Random) -> Result<Message> {
        let index = index(random);
        Ok(match random.below(9) {
            0 => Message::SetVringNum(VringState {
                index,
                num: if random.one_in(2) { 1 << random.below(12) } else { edge(random) as u32 },
            }),
            1 => Message::SetVringBase(VringState { index, num: edge(random) as u32 }),
            2 => {
                let mut addresses = VringAddr { index, ..self.addresses };
                match random.below(8) {
                    0 => addresses.desc_addr = edge(random),
                    1 => addresses.avail_addr = edge(random),
                    2 => addresses.used_addr = edge(random),
                    3 => addresses.log = true,
                    4 => addresses.log_guest_addr = edge(random),
                    5 => std::mem::swap(&mut addresses.desc_addr, &mut addresses.used_addr),
                    6 => addresses.avail_addr = addresses.desc_addr,
                    _ => {}
                }
                Message::SetVringAddr(addresses)
            }
            3 => Message::SetVringKick(self.vring_fd(random)?),
            4 => Message::SetVringCall(self.vring_fd(random)?),
            5 => Message::SetVringErr(self.vring_fd(random)?),
            6 => Message::GetVringBase { index },
            7 => Message::GetVringBaseSkipDrain { index },
            _ => Message::SetVringEnable { index, enable: random.one_in(2) },
        })
    }

    /// Returns a message about memory.
    fn of_memory(&self, random: &mut Random) -> Result<Message> {
        Ok(match random.below(8) {
            0 | 1 => {
                let count = if random.one_in(8) { random.below(9) } else { 1 };
                Message::SetMemTable((0..count).map(|_| self.region(random)).collect::<Result<_>>()?)
            }
            2 => {
                let (region, file) = self.region(random)?;
                Message::AddMemReg(region, file)
            }
            3 => Message::RemMemReg(self.region(random)?.0),
            4 => Message::SetLogBase(match random.below(4) {
                0 => LogBase::Address(edge(random)),
                1 => {
                    LogBase::Shared { mmap_size: edge(random), mmap_offset: 0, fd: Some(self.file(random)?) }
                }
                _ => {
                    let file = self.ram.region_and_file()?.1;
                    let (mmap_size, mmap_offset) = (1 << random.below(21), random.below(4096));
                    LogBase::Shared { mmap_size, mmap_offset, fd: Some(file) }
                }
            }),
            5 => Message::SetLogFd(self.file(random)?),
            6 => Message::GetInflightFd(self.inflight(random)),
            _ => Message::SetInflightFd(self.inflight(random), self.file(random)?),
        })
    }

    /// Returns any message that the back-end decodes.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn message(&self, random: &mut Random) -> Result<Message> {
        match random.below(10) {
            0..4 => return self.of_ring(random),
            4 | 5 => return self.of_memory(random),
            _ => {}
        }
        Ok(match random.below(17) {
            0 => Message::GetFeatures,
            1 => {
                let any = Features::from_bits_retain(random.next());
                Message::SetFeatures(if random.one_in(4) { any } else { self.offered & any })
            }
            2 => Message::SetOwner,
            3 => Message::ResetOwner,
            4 => Message::GetProtocolFeatures,
            5 => Message::GetQueueNum,
            6 => Message::SendRarp([2, 0, 0, 0, 6, random.next() as u8]),
            7 => Message::NetSetMtu(edge(random)),
            8 => Message::SetBackendReqFd(match random.below(2) {
                0 => UnixStream::pair()?.0.into(),
                _ => descriptors::other(random)?,
            }),
            9 => Message::IotlbMsg(Iotlb {
                kind: [IotlbKind::Miss, IotlbKind::Update, IotlbKind::Invalidate, IotlbKind::AccessFail]
                    [random.below(4) as usize],
                iova: edge(random),
                size: edge(random),
                user_addr: if random.one_in(2) { self.addresses.desc_addr } else { edge(random) },
                access: IotlbAccess::from_bits_truncate(random.next() as u8),
            }),
            10 => Message::GetConfig(self.config(random)),
            11 => Message::SetConfig(self.config(random)),
            12 => Message::ResetDevice,
            13 => Message::VringKick { index: index(random) },
            14 => Message::GetMaxMemSlots,
            15 => Message::CheckDeviceState,
            _ => {
                let direction = match random.below(2) {
                    0 => TransferDirection::Save,
                    _ => TransferDirection::Load,
                };
                let state = DeviceState { direction, phase: TransferPhase::Stopped };
                Message::SetDeviceStateFd(state, descriptors::other(random)?)
            }
        })
    }
}
