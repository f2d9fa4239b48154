//! The rules of a port for fuzz targets.

use super::rule::{HEAD_LEN, Refusal, Rule};
use kickless_spec::net::MAC_LEN;

/// The judgement about a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judged {
    /// It passes.
    Passes,
    /// It names an address that the card does not have.
    Spoofed,
    /// Its tag, or its destination, is not allowed.
    Refused,
}

/// Judges a frame of a card with this address, on an access port of a VLAN or on a trunk.
pub fn judge(address: [u8; MAC_LEN], vlan: Option<u16>, frame: &[u8]) -> Judged {
    let rule = Rule { vlan, address: Some(address) };
    let judged = rule.judge(frame);
    // A sender that has only the head of a frame asks about that.
    let head = &frame[..frame.len().min(HEAD_LEN)];
    assert_eq!(rule.reads_far(head), rule.reads_far(frame), "the head says whether it is enough");
    if !rule.reads_far(head) {
        assert_eq!(rule.judge(head), judged, "the head of a frame is judged as all of it");
    }
    match judged {
        Ok(_) => Judged::Passes,
        Err(Refusal::Spoofed) => Judged::Spoofed,
        Err(Refusal::Tagged | Refusal::LinkLocal) => Judged::Refused,
    }
}
