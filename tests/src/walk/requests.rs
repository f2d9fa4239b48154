//! Requests that lie: of every type and length, in any memory.

use kickless_memory::{Area, Gpa};
use kickless_spec::blk::{self, Header, Segment};
use kickless_spec::ring::{DESC_F_INDIRECT, DESC_F_WRITE, Desc};
use kickless_testing::Random;

use crate::walk::ring::Piece;

/// Bytes of a slot: the header, the status, and an indirect table.
pub const SLOT: usize = 256;
/// Bytes of the data that all slots share.
pub const DATA: usize = 64 << 10;
const STATUS: u64 = 64;
const TABLE: usize = 128;
/// Types of requests, those of a device without the feature included.
const KINDS: [u32; 16] = [
    blk::T_IN,
    blk::T_IN,
    blk::T_IN,
    blk::T_IN,
    blk::T_IN,
    blk::T_OUT,
    blk::T_OUT,
    blk::T_OUT,
    blk::T_FLUSH,
    blk::T_GET_ID,
    blk::T_GET_LIFETIME,
    blk::T_DISCARD,
    blk::T_WRITE_ZEROES,
    blk::T_SECURE_ERASE,
    blk::T_FLUSH_OUT,
    99,
];
/// Addresses that are not memory, or only in part.
pub const NOWHERE: [u64; 6] = [0, 0x100, 0x3fff_fff0, u64::MAX, u64::MAX - 511, 1 << 47];

/// The memory of the requests of a ring.
pub struct Place {
    /// The slots.
    pub slots: Area,
    /// Their address.
    pub slots_at: Gpa,
    /// The address of the data.
    pub data_at: Gpa,
    /// The data.
    pub data: Area,
    /// The addresses of the areas of the ring.
    pub areas: [Gpa; 3],
}

impl Place {
    /// Writes a request to a slot, and its chain to `chain`. Returns the number of descriptors.
    #[inline]
    pub fn request(
        &self,
        slot: u16,
        random: &mut Random,
        has_indirect: bool,
        chain: &mut [Piece; 4],
    ) -> usize {
        let at = usize::from(slot) * SLOT;
        let slot_at = self.slots_at.0 + at as u64;
        let dice = random.next();
        let kind = KINDS[(dice & 15) as usize];
        let sector = match dice >> 4 & 63 {
            0 => random.next(),
            1 => 131_072 - (dice >> 10 & 7),
            _ => dice >> 10 & 0x3fff,
        };
        self.slots.write(at, &Header { kind: kind.into(), reserved: 0.into(), sector: sector.into() });
        let len = match dice >> 24 & 31 {
            0 => (dice >> 32 & 0xffff) as u32,
            1 => (random.next() as u32) & 0xff_ffff,
            _ => 512 << (dice >> 29 & 3),
        };
        let data_at = self.data_at.0 + (dice >> 40 & 0x7f) * 64;
        let is_range = matches!(kind, blk::T_DISCARD | blk::T_WRITE_ZEROES | blk::T_SECURE_ERASE);
        let mut pieces = [
            Piece { addr: slot_at, len: size_of::<Header>() as u32, flags: 0 },
            Piece { addr: data_at, len, flags: if kind & 1 == 0 { DESC_F_WRITE } else { 0 } },
            Piece { addr: slot_at + STATUS, len: 1, flags: DESC_F_WRITE },
        ];
        if is_range {
            pieces[1] = self.ranges(slot, dice, random);
        } else if kind == blk::T_GET_ID {
            pieces[1].len = 20;
        }
        let mut count = 3;
        if dice >> 56 == 0 {
            count = self.spoil(&mut pieces, random);
        }
        if has_indirect && dice >> 50 & 7 == 0 {
            self.table(at, &pieces[..count], random);
            let len = (count * size_of::<Desc>()) as u32;
            chain[0] = Piece { addr: slot_at + TABLE as u64, len, flags: DESC_F_INDIRECT };
            return 1;
        }
        chain[..3].copy_from_slice(&pieces);
        count
    }

    fn ranges(&self, slot: u16, dice: u64, random: &mut Random) -> Piece {
        let at = usize::from(slot) % (DATA / SLOT) * SLOT;
        let count = 1 + (dice >> 48 & 3) as usize;
        for number in 0..count {
            let any = random.next();
            let (sector, sectors) = match any & 31 {
                0 => (any, (any >> 32) as u32),
                _ => (any >> 8 & 0x3fff, (any >> 32 & 0x1f) as u32),
            };
            let flags = if any >> 5 & 31 == 0 { any as u32 } else { (any >> 6 & 1) as u32 };
            let segment = Segment { sector: sector.into(), num_sectors: sectors.into(), flags: flags.into() };
            self.data.write(at + number * size_of::<Segment>(), &segment);
        }
        let len = (count * size_of::<Segment>()) as u32;
        Piece { addr: self.data_at.0 + at as u64, len, flags: 0 }
    }

    /// Makes a request wrong. Returns the number of descriptors.
    fn spoil(&self, pieces: &mut [Piece; 3], random: &mut Random) -> usize {
        let piece = random.below(3) as usize;
        match random.below(9) {
            0 => pieces[piece].flags ^= DESC_F_WRITE,
            1 => pieces[piece].addr = NOWHERE[random.below(NOWHERE.len() as u64) as usize],
            2 => pieces[piece].len = 0,
            3 => pieces[piece].len = random.next() as u32,
            4 => pieces[piece].len = pieces[piece].len.wrapping_sub(1),
            5 => return 1,
            6 => return 2,
            7 => pieces.swap(1, 2),
            // The device writes to the ring itself, or sends it.
            _ => {
                let area = self.areas[random.below(3) as usize];
                pieces[1] = Piece { addr: area.0, len: 512, flags: pieces[1].flags };
            }
        }
        3
    }

    /// Writes an indirect table, which may name another one.
    fn table(&self, at: usize, pieces: &[Piece], random: &mut Random) {
        for (number, piece) in pieces.iter().enumerate() {
            let link = if number + 1 < pieces.len() { kickless_spec::ring::DESC_F_NEXT } else { 0 };
            let nested = if random.one_in(4096) { DESC_F_INDIRECT } else { 0 };
            let next = if random.one_in(4096) { random.next() as u16 } else { number as u16 + 1 };
            let desc = Desc {
                addr: piece.addr.into(),
                len: piece.len.into(),
                flags: (piece.flags | link | nested).into(),
                next: next.into(),
            };
            self.slots.write(at + TABLE + number * size_of::<Desc>(), &desc);
        }
    }
}
