//! Frames that lie: headers of virtio and of packets that do not belong together, buffers of any length, and
//! commands of the control queue.

use kickless_spec::net::{
    self, GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP, GSO_UDP_L4, HDR_F_NEEDS_CSUM, Header,
};
use kickless_spec::ring::DESC_F_WRITE;
use kickless_testing::Random;

use crate::walk::requests::{DATA, NOWHERE, Place, SLOT};
use crate::walk::ring::Piece;

/// Bytes between the beginnings of two frames in the data.
const STRIDE: usize = 2048;
/// Kinds of segmentation. Most frames need none.
const GSO: [u8; 8] =
    [GSO_NONE, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP, GSO_UDP_L4, GSO_TCPV4 | GSO_ECN, 0x7f];

impl Place {
    /// Fills the data with beginnings of frames of several protocols.
    pub fn write_templates(&self, random: &mut Random) {
        let types: [&[u8]; 8] = [
            // IPv4 with TCP, IPv4 with UDP, IPv6 with TCP, IPv6 with extension headers.
            &[8, 0, 0x45, 0, 0xff, 0, 0, 1, 0, 0, 64, 6],
            &[8, 0, 0x45, 0, 0, 60, 0, 1, 0x20, 0, 64, 17],
            &[0x86, 0xdd, 0x60, 0, 0, 0, 0, 40, 6, 64],
            &[0x86, 0xdd, 0x60, 0, 0, 0, 4, 0, 60, 64],
            // ARP, a tag, two tags, a type for experiments.
            &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1],
            &[0x81, 0, 0, 5, 8, 0, 0x45, 0],
            &[0x88, 0xa8, 0, 5, 0x81, 0, 0, 6, 8, 6],
            &[0x88, 0xb5],
        ];
        for at in (0..DATA).step_by(STRIDE) {
            let to: [u8; 6] = match random.below(4) {
                0 => [0xff; 6],
                1 => [2, 0, 0, 0, 6, random.below(4) as u8],
                2 => [1, 0x80, 0xc2, 0, 0, random.below(32) as u8],
                _ => [2, random.next() as u8, 0, 0, 0, 1],
            };
            let from = [2, 0, 0, 0, 6, random.below(8) as u8];
            let kind = types[random.below(types.len() as u64) as usize];
            let mut bytes = [&to[..], &from, kind].concat();
            bytes.extend(random.bytes(80));
            self.data.write_bytes(at, &bytes);
            // The data offset of TCP behind a header of IPv4 and of IPv6.
            for offset in [46, 66] {
                self.data.write_bytes(at + offset, &[0x50]);
            }
        }
    }

    /// Writes the header of a frame to a slot, and its chain to `chain`. Returns the number of descriptors.
    #[inline]
    pub fn frame(&self, slot: u16, random: &mut Random, chain: &mut [Piece; 4]) -> usize {
        let dice = random.next();
        let at = usize::from(slot) * SLOT;
        let slot_at = self.slots_at.0 + at as u64;
        let mut header = Header::default();
        if dice & 3 == 0 {
            let any = random.next();
            header = Header {
                flags: if any & 3 == 0 { any as u8 >> 2 } else { HDR_F_NEEDS_CSUM },
                gso_type: GSO[(any >> 8 & 7) as usize],
                hdr_len: (any as u16 >> 5).into(),
                gso_size: match any >> 16 & 7 {
                    0 => (any >> 32) as u16,
                    1 => 1,
                    2 => 0,
                    _ => 1448,
                }
                .into(),
                csum_start: [34u16, 54, 14, (any >> 48) as u16][(any >> 20 & 3) as usize].into(),
                csum_offset: [16u16, 6, 2, (any >> 50) as u16][(any >> 22 & 3) as usize].into(),
                num_buffers: (any as u16).into(),
            };
        }
        self.slots.write(at, &header);
        let len = match dice >> 2 & 31 {
            0 => (dice >> 32) as u32 & 0x1_ffff,
            1 => (dice >> 32) as u32 & 0xf,
            2..6 => (dice >> 32) as u32 & 0x7fff,
            _ => 60 + (dice >> 32) as u32 % 1455,
        };
        let data_at = self.data_at.0 + (dice >> 8) % (DATA / STRIDE) as u64 * STRIDE as u64;
        let header_len = if dice >> 24 & 0xff == 0 { (dice >> 48) as u32 & 15 } else { 12 };
        chain[0] = Piece { addr: slot_at, len: header_len, flags: 0 };
        chain[1] = Piece { addr: data_at, len, flags: 0 };
        if dice >> 56 == 0 {
            let piece = random.below(2) as usize;
            match random.below(4) {
                0 => chain[piece].addr = NOWHERE[random.below(NOWHERE.len() as u64) as usize],
                1 => chain[piece].flags = DESC_F_WRITE,
                2 => chain[piece].len = random.next() as u32,
                _ => return 1,
            }
        }
        if dice >> 7 & 7 == 0 && len > 100 {
            chain[1].len = 100;
            chain[2] = Piece { addr: data_at + 100, len: len - 100, flags: 0 };
            return 3;
        }
        2
    }

    /// Writes the chain of a receive buffer. Returns the number of descriptors.
    pub fn buffer(&self, slot: u16, random: &mut Random, chain: &mut [Piece; 4]) -> usize {
        let dice = random.next();
        let addr = self.data_at.0 + u64::from(slot) % (DATA / STRIDE) as u64 * STRIDE as u64;
        let len = match dice & 15 {
            0 => (dice >> 32) as u32 & 0xffff,
            1 => (dice >> 32) as u32 & 15,
            _ => STRIDE as u32,
        };
        chain[0] = Piece { addr, len, flags: DESC_F_WRITE };
        if dice >> 54 == 0 {
            match random.below(3) {
                0 => chain[0].flags = 0,
                1 => chain[0].addr = self.areas[random.below(3) as usize].0,
                _ => chain[0].addr = NOWHERE[random.below(NOWHERE.len() as u64) as usize],
            }
        }
        1
    }

    /// Writes a command of the control queue. Returns the number of descriptors.
    pub fn command(&self, slot: u16, random: &mut Random, chain: &mut [Piece; 4]) -> usize {
        let at = usize::from(slot) * SLOT;
        let slot_at = self.slots_at.0 + at as u64;
        let class = if random.one_in(16) { random.next() as u8 } else { random.below(6) as u8 };
        let command = if random.one_in(16) { random.next() as u8 } else { random.below(6) as u8 };
        let mut bytes = vec![class, command];
        let len = match (class, command) {
            (net::CTRL_MQ, _) => {
                bytes.extend((random.below(5) as u16).to_le_bytes());
                2
            }
            (net::CTRL_MAC, net::CTRL_MAC_TABLE_SET) => {
                bytes.extend((random.below(12) as u32).to_le_bytes());
                4 + random.below(200)
            }
            _ => random.below(16),
        };
        bytes.extend(random.bytes(len));
        bytes.truncate(2 + len as usize);
        self.slots.write_bytes(at, &bytes);
        chain[0] = Piece { addr: slot_at, len: 2, flags: 0 };
        chain[1] = Piece { addr: slot_at + 2, len: len as u32, flags: 0 };
        chain[2] = Piece { addr: slot_at + SLOT as u64 - 1, len: 1, flags: DESC_F_WRITE };
        3
    }
}
