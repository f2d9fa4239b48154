//! Tests the parser with every layout of a request, and with every kind of malformed request.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

use kickless_blk::{Bounds, Kind, RangeOp, Reject, Request, extents, parse};
use kickless_disk::{Extent, RangeLimits};
use kickless_memory::{Gpa, UserAddr, View};
use kickless_spec::blk::{self, BlkFeatures, Header, Segment};
use kickless_spec::ring::{DESC_F_NEXT, DESC_F_WRITE, Desc};
use kickless_testing::guest_memory;
use kickless_virtqueue::Chain;
use kickless_virtqueue::device::{Addresses, Metadata, Options, Queue};
use proptest::prelude::*;
use std::sync::Arc;

const MEMORY: u64 = 1 << 20;
const USER: u64 = 0x7f00_0000_0000;
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x2000;
/// The first address of the buffers.
const BUFFERS: u64 = 0x4000;
const SIZE: u16 = 128;
const DISK: u64 = 1 << 16;

struct Guest {
    view: Arc<View>,
}

impl Guest {
    fn new() -> Self {
        Self { view: guest_memory(MEMORY, USER) }
    }

    /// Returns a chain of these buffers, popped from a real ring.
    fn chain(&self, readable: &[(u64, u32)], writable: &[(u64, u32)]) -> Chain {
        let all = readable.iter().map(|b| (b, 0)).chain(writable.iter().map(|b| (b, DESC_F_WRITE)));
        let count = readable.len() + writable.len();
        for (i, (&(addr, len), flags)) in all.enumerate() {
            let next = if i + 1 < count { DESC_F_NEXT } else { 0 };
            let desc = Desc {
                addr: addr.into(),
                len: len.into(),
                flags: (flags | next).into(),
                next: (i as u16 + 1).into(),
            };
            self.view.map().write_obj(Gpa(16 * i as u64), &desc).unwrap();
        }
        self.view.map().write_obj(Gpa(AVAIL + 2), &1u16.to_le_bytes()).unwrap();
        let options = Options::new(SIZE, false, false).unwrap();
        let addresses = Addresses {
            desc: UserAddr(USER),
            avail: UserAddr(USER + AVAIL),
            used: UserAddr(USER + USED),
            log: None,
        };
        let mut queue = Queue::new(options, Metadata::map(&self.view, &addresses, &options).unwrap(), 0);
        let mut chain = Chain::default();
        assert!(queue.pop(&self.view, &mut chain).unwrap());
        chain
    }

    fn header(&self, kind: u32, sector: u64) {
        let header = Header { kind: kind.into(), reserved: 0.into(), sector: sector.into() };
        self.view.map().write_obj(Gpa(BUFFERS), &header).unwrap();
    }

    fn parse(&self, readable: &[(u64, u32)], writable: &[(u64, u32)]) -> Result<Request, Reject> {
        let bounds = Bounds { size: DISK, read_only: false, features: BlkFeatures::empty() };
        parse(&self.chain(readable, writable), &self.view, bounds)
    }
}

const HEADER: (u64, u32) = (BUFFERS, 16);
const DATA: u64 = 0x8000;
const STATUS: (u64, u32) = (0x7000, 1);

fn code(result: Result<Request, Reject>) -> (Option<Gpa>, u8) {
    let reject = result.expect_err("a malformed request was accepted");
    (reject.status, reject.code)
}

const IOERR: (Option<Gpa>, u8) = (Some(Gpa(STATUS.0)), blk::S_IOERR);

#[test]
fn well_formed() {
    let guest = Guest::new();
    guest.header(blk::T_IN, 3);
    let read = guest.parse(&[HEADER], &[(DATA, 1024), STATUS]).unwrap();
    assert_eq!(read, Request { kind: Kind::Read { offset: 1536 }, status: Gpa(0x7000), data_len: 1024 });
    guest.header(blk::T_OUT, 0);
    let write = guest.parse(&[HEADER, (DATA, 512)], &[STATUS]).unwrap();
    assert_eq!(write, Request { kind: Kind::Write { offset: 0 }, status: Gpa(0x7000), data_len: 512 });
    guest.header(blk::T_FLUSH, 0);
    assert_eq!(guest.parse(&[HEADER], &[STATUS]).unwrap().kind, Kind::Flush);
    // A flush has no data; data buffers are ignored.
    let flush = guest.parse(&[HEADER, (DATA, 512)], &[(DATA, 512), STATUS]).unwrap();
    assert_eq!((flush.kind, flush.data_len), (Kind::Flush, 0));
    guest.header(blk::T_GET_ID, 0);
    let id = guest.parse(&[HEADER], &[(DATA, 20), STATUS]).unwrap();
    assert_eq!((id.kind, id.data_len), (Kind::GetId, 20));
}

/// Legacy drivers set a bit for barriers in any type, and have a second name for a flush.
#[test]
fn legacy_types_are_understood() {
    let guest = Guest::new();
    let kind = |kind: u32, readable: &[(u64, u32)], writable: &[(u64, u32)]| {
        guest.header(kind, 3);
        guest.parse(readable, writable).map(|request| (request.kind, request.data_len))
    };
    for flag in [0, blk::T_BARRIER] {
        let read = kind(blk::T_IN | flag, &[HEADER], &[(DATA, 512), STATUS]);
        assert_eq!(read, Ok((Kind::Read { offset: 1536 }, 512)));
        let write = kind(blk::T_OUT | flag, &[HEADER, (DATA, 1024)], &[STATUS]);
        assert_eq!(write, Ok((Kind::Write { offset: 1536 }, 1024)));
        for flush in [blk::T_FLUSH, blk::T_FLUSH_OUT] {
            assert_eq!(kind(flush | flag, &[HEADER], &[STATUS]), Ok((Kind::Flush, 0)));
        }
        assert_eq!(kind(blk::T_GET_ID | flag, &[HEADER], &[(DATA, 20), STATUS]), Ok((Kind::GetId, 20)));
        // The flag makes no other request valid.
        assert_eq!(kind(blk::T_IN | flag, &[HEADER], &[(DATA, 511), STATUS]).unwrap_err().code, blk::S_IOERR);
        assert_eq!(kind(blk::T_DISCARD | flag, &[HEADER], &[STATUS]).unwrap_err().code, blk::S_UNSUPP);
    }
}

#[test]
fn requests_stay_within_the_disk() {
    let guest = Guest::new();
    guest.header(blk::T_IN, 0);
    assert!(guest.parse(&[HEADER], &[(DATA, DISK as u32), STATUS]).is_ok());
    guest.header(blk::T_IN, 1);
    assert_eq!(code(guest.parse(&[HEADER], &[(DATA, DISK as u32), STATUS])), IOERR);
    guest.header(blk::T_IN, DISK / 512);
    assert_eq!(code(guest.parse(&[HEADER], &[(DATA, 512), STATUS])), IOERR);
    // The sector times 512, or that plus the length, overflows.
    for sector in [u64::MAX, u64::MAX / 512, 1 << 55, (1 << 55) - 1] {
        guest.header(blk::T_OUT, sector);
        assert_eq!(code(guest.parse(&[HEADER, (DATA, 512)], &[STATUS])), IOERR, "{sector:#x}");
    }
}

#[test]
fn malformed_requests_are_rejected() {
    let guest = Guest::new();
    guest.header(blk::T_IN, 0);
    // No status: nothing writable, or not in memory.
    assert_eq!(code(guest.parse(&[HEADER], &[])).0, None);
    assert_eq!(code(guest.parse(&[HEADER], &[(MEMORY, 1)])).0, None);
    assert_eq!(code(guest.parse(&[HEADER], &[(MEMORY - 1, 2)])).0, None);
    assert_eq!(code(guest.parse(&[HEADER], &[(u64::MAX, 2)])).0, None);
    // No header, a short header, or a header that leaves memory.
    assert_eq!(code(guest.parse(&[], &[(DATA, 512), STATUS])), IOERR);
    assert_eq!(code(guest.parse(&[(BUFFERS, 15)], &[(DATA, 512), STATUS])), IOERR);
    assert_eq!(code(guest.parse(&[(MEMORY - 8, 16)], &[STATUS])), IOERR);
    assert_eq!(code(guest.parse(&[(BUFFERS, 8), (MEMORY, 8)], &[STATUS])), IOERR);
    // Parts of sectors.
    assert_eq!(code(guest.parse(&[HEADER], &[(DATA, 511), STATUS])), IOERR);
    guest.header(blk::T_OUT, 0);
    assert_eq!(code(guest.parse(&[HEADER, (DATA, 513)], &[STATUS])), IOERR);
    // Unknown types, and types that were not offered.
    for kind in [
        2,
        3,
        6,
        7,
        9,
        blk::T_GET_LIFETIME,
        blk::T_SECURE_ERASE,
        blk::T_DISCARD,
        blk::T_WRITE_ZEROES,
        1 << 30,
    ] {
        guest.header(kind, 0);
        assert_eq!(code(guest.parse(&[HEADER], &[STATUS])), (Some(Gpa(0x7000)), blk::S_UNSUPP), "{kind}");
    }
}

/// Parses a request with one range, on a disk of [`DISK`] bytes.
fn extent(op: RangeOp, (sector, sectors, flags): (u64, u32, u32)) -> Result<Extent, u8> {
    let guest = Guest::new();
    let kind = match op {
        RangeOp::Discard => blk::T_DISCARD,
        RangeOp::WriteZeroes => blk::T_WRITE_ZEROES,
    };
    guest.header(kind, 0);
    let segment = Segment { sector: sector.into(), num_sectors: sectors.into(), flags: flags.into() };
    guest.view.map().write_obj(Gpa(DATA), &segment).unwrap();
    let bounds = Bounds { size: DISK, read_only: false, features: BlkFeatures::all() };
    let chain = guest.chain(&[HEADER, (DATA, 16)], &[STATUS]);
    let request = parse(&chain, &guest.view, bounds).unwrap();
    assert_eq!(request.kind, Kind::Extents(op));
    let limits = RangeLimits { sectors_max: 64, ranges_max: 1, alignment: 8 };
    let mut found = Vec::new();
    extents(&chain, &guest.view, &request, op, (DISK, &limits), &mut found).map_err(|reject| reject.code)?;
    assert_eq!(found.len(), 1);
    Ok(found[0])
}

#[test]
fn ranges_are_within_the_disk() {
    let end = DISK / 512;
    for op in [RangeOp::Discard, RangeOp::WriteZeroes] {
        let whole = Extent { offset: (end - 64) * 512, len: 64 * 512, unmap: false };
        assert_eq!(extent(op, (end - 64, 64, 0)), Ok(whole));
        for outside in [(end - 56, 64, 0), (end, 8, 0), (1 << 55, 8, 0), ((1 << 55) - 8, 8, 0)] {
            assert_eq!(extent(op, outside), Err(blk::S_IOERR), "{outside:?}");
        }
        // The alignment is a hint.
        for odd in [(4, 8, 0), (8, 4, 0)] {
            assert!(extent(op, odd).is_ok(), "{odd:?}");
        }
    }
}

#[test]
fn read_only_disks_are_read_only() {
    let guest = Guest::new();
    let bounds = Bounds { size: DISK, read_only: true, features: BlkFeatures::all() };
    guest.header(blk::T_OUT, 0);
    let chain = guest.chain(&[HEADER, (DATA, 512)], &[STATUS]);
    assert_eq!(code(parse(&chain, &guest.view, bounds)), IOERR);
    guest.header(blk::T_IN, 0);
    let chain = guest.chain(&[HEADER], &[(DATA, 512), STATUS]);
    assert!(parse(&chain, &guest.view, bounds).is_ok());
}

/// Splits `len` bytes at `addr` at these positions.
fn cut(addr: u64, len: u32, at: &[u32]) -> Vec<(u64, u32)> {
    let mut at: Vec<u32> = at.iter().map(|a| a % (len + 1)).chain([0, len]).collect();
    at.sort_unstable();
    at.windows(2).map(|w| (addr + u64::from(w[0]), w[1] - w[0])).collect()
}

proptest! {
    #[test]
    fn every_layout_gives_the_same_request(
        write: bool,
        sectors in 1u32..32,
        sector in 0u64..96,
        cuts in prop::collection::vec(any::<u32>(), 0..8),
        more_cuts in prop::collection::vec(any::<u32>(), 0..8),
    ) {
        let guest = Guest::new();
        guest.header(if write { blk::T_OUT } else { blk::T_IN }, sector);
        let len = sectors * 512;
        // The header and a write's data are adjacent, as are a read's data and the status. They are split
        // anywhere.
        let readable = cut(BUFFERS, if write { 16 + len } else { 16 }, &cuts);
        let writable = cut(0x2_0000, if write { 1 } else { len + 1 }, &more_cuts);
        let request = guest.parse(&readable, &writable).unwrap();
        let offset = sector * 512;
        let kind = if write { Kind::Write { offset } } else { Kind::Read { offset } };
        let status = Gpa(0x2_0000 + if write { 0 } else { u64::from(len) });
        prop_assert_eq!(request, Request { kind, status, data_len: len.into() });
    }

    #[test]
    fn every_chain_has_a_result(
        header: [u8; 16],
        readable in prop::collection::vec((any::<u64>(), any::<u32>()), 0..6),
        writable in prop::collection::vec((any::<u64>(), any::<u32>()), 0..6),
        near: bool,
    ) {
        prop_assume!(readable.len() + writable.len() > 0);
        let guest = Guest::new();
        guest.view.map().write(Gpa(BUFFERS), &header).unwrap();
        let fit = |list: Vec<(u64, u32)>| -> Vec<(u64, u32)> {
            list.into_iter()
                .map(|(addr, len)| (if near { BUFFERS + addr % 64 } else { addr }, len % 4096))
                .collect()
        };
        let (readable, writable) = (fit(readable), fit(writable));
        match guest.parse(&readable, &writable) {
            Ok(request) => {
                prop_assert!(guest.view.contains(request.status, 1));
                if let Kind::Read { offset } | Kind::Write { offset } = request.kind {
                    prop_assert!(offset + request.data_len <= DISK);
                    prop_assert_eq!((offset % 512, request.data_len % 512), (0, 0));
                }
            }
            Err(reject) => prop_assert!(reject.code == blk::S_IOERR || reject.code == blk::S_UNSUPP),
        }
    }
}
