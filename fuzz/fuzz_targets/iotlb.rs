//! Translates with a vIOMMU whose front-end sends any messages, in their form on the wire. Lookups go
//! through a queue's cache and must never return more than the valid translations.
#![no_main]

use kickless_memory::{
    Access, Gpa, Iotlb, Iova, IovaRange, Map, Slot, Tlb, Translated, UpdateError, UserAddr,
};
use kickless_spec::vhost_user::{FrontendRequest, IotlbAccess, IotlbKind};
use kickless_vhost_user::{FrontendMessage, RequestMessage};
use libfuzzer_sys::fuzz_target;
use std::collections::BTreeMap;
use std::sync::LazyLock;

const PAGE: u64 = 4096;
const LEN: u64 = 1 << 30;
const USER: u64 = 0x10_0000_0000;
const GPA: u64 = 0x8000_0000;
/// Few nodes, so that inputs use them all.
const NODES: u32 = 24;
/// The most pages of an update. The target ignores longer updates.
const PAGES_MAX: u64 = 2048;

static MAP: LazyLock<Map> = LazyLock::new(|| {
    let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&file, LEN).expect("room");
    Map::new(vec![Slot::map(&file, 0, Gpa(GPA), UserAddr(USER), LEN).expect("a mapping")]).expect("one slot")
});

/// The valid translation of each page and its access.
type Translations = BTreeMap<u64, (u64, Access)>;

fuzz_target!(|data: &[u8]| {
    let mut iotlb = Iotlb::new(NODES);
    let mut tlb = Tlb::new(iotlb.table().clone());
    let mut valid = Translations::new();
    let mut kept = None;
    for op in data.chunks_exact(32) {
        match op[31] % 4 {
            3 => look_up(&mut tlb, &valid, op, &mut kept),
            2 => {
                // Most addresses are in a small range, so that they overlap.
                let small = |at: usize| u64::from(u16::from_le_bytes([op[at], op[at + 1]]) % 1536) * PAGE;
                let access = IotlbAccess::from_bits_truncate(op[24]);
                let kind = if op[25] % 3 == 0 { IotlbKind::Invalidate } else { IotlbKind::Update };
                apply(&mut iotlb, &mut tlb, &mut valid, kind, [small(0), small(8), USER + small(16)], access);
            }
            _ => {
                let number = FrontendRequest::IotlbMsg.raw();
                let Ok(FrontendMessage::IotlbMsg(msg)) = FrontendMessage::decode(number, op, Vec::new())
                else {
                    continue;
                };
                let addresses = [msg.iova, msg.size, msg.user_addr];
                apply(&mut iotlb, &mut tlb, &mut valid, msg.kind, addresses, msg.access);
            }
        }
        // A translation that a queue keeps is valid until the epoch changes.
        if let Some((epoch, page, gpa)) = kept.filter(|(epoch, ..)| *epoch == tlb.epoch()) {
            let (user, _) = valid.get(&page).unwrap_or_else(|| panic!("page {page:#x} in epoch {epoch}"));
            assert_eq!(user - USER + GPA, gpa);
        }
    }
});

fn access_of(access: IotlbAccess) -> Access {
    match access.bits() {
        1 => Access::READ,
        2 => Access::WRITE,
        3 => Access::BOTH,
        _ => Access::NONE,
    }
}

/// Applies a message as a session does.
fn apply(
    iotlb: &mut Iotlb,
    tlb: &mut Tlb,
    valid: &mut Translations,
    kind: IotlbKind,
    [iova, size, user]: [u64; 3],
    access: IotlbAccess,
) {
    match kind {
        IotlbKind::Update if size / PAGE <= PAGES_MAX && MAP.gpa_of_range(UserAddr(user), size).is_some() => {
            let access = access_of(access);
            loop {
                match iotlb.update(Iova(iova), size, UserAddr(user), access) {
                    Ok(()) => break,
                    Err(UpdateError::Full { .. }) => {
                        assert!(
                            iotlb.has_nodes_in_limbo() || iotlb.evict(|_| false),
                            "nothing is pinned, but no node is free"
                        );
                        drop_stale(iotlb, tlb);
                    }
                    Err(_) => return,
                }
            }
            for page in 0..size / PAGE {
                valid.insert(iova / PAGE + page, (user + page * PAGE, access));
            }
        }
        IotlbKind::Invalidate => {
            let range = IovaRange::new(Iova(iova), size);
            iotlb.invalidate(range);
            valid.retain(|page, _| !range.overlaps(IovaRange::new(Iova(page * PAGE), PAGE)));
        }
        _ => {}
    }
    drop_stale(iotlb, tlb);
}

fn drop_stale(iotlb: &mut Iotlb, tlb: &mut Tlb) {
    if let Some(range) = iotlb.take_stale() {
        tlb.drop_range(range);
    }
    iotlb.quiesced();
    assert!(iotlb.bytes() <= (NODES as usize + 1) * (4096 + 64));
}

/// A translation that a queue keeps: an epoch, a page, and the address of the page in that epoch.
type Kept = Option<(u64, u64, u64)>;

/// Looks up a buffer of up to 64 KiB at any address.
fn look_up(tlb: &mut Tlb, valid: &Translations, op: &[u8], kept: &mut Kept) {
    let word = u64::from_le_bytes([op[0], op[1], op[2], op[3], op[4], op[5], op[6], op[7]]);
    let iova = if op[8] & 1 == 0 { word } else { word % (1600 * PAGE) };
    let len = u64::from(u16::from_le_bytes([op[9], op[10]])).max(1);
    let access = access_of(IotlbAccess::from_bits_truncate(op[11]));
    tlb.begin();
    let (mut at, mut done) = (iova, 0);
    tlb.translate(&MAP, Iova(iova), len, access, |to, piece| {
        if let Translated::To(gpa) = to {
            for offset in (0..piece).step_by(256).chain([piece - 1]) {
                let here = at + offset;
                let (user, allowed) =
                    valid.get(&(here / PAGE)).expect("a lookup found a page without a translation");
                assert!(allowed.allows(access));
                assert_eq!(gpa.0 + offset, user - USER + GPA + here % PAGE);
            }
        }
        at = at.wrapping_add(piece);
        done += piece;
    });
    assert_eq!(done, len);
    if op[12] & 1 == 0
        && let (Translated::To(gpa), bytes) = tlb.piece(&MAP, Iova(iova), access)
    {
        assert!(bytes > 0 && gpa.0 % PAGE == iova % PAGE);
        tlb.watch();
        *kept = Some((tlb.epoch(), iova / PAGE, gpa.0 - iova % PAGE));
    }
    assert_eq!(tlb.is_missing(), !tlb.missing().is_empty());
    let _ = tlb.user(Iova(iova), len as usize, access);
}
