//! Adds and removes the VLAN tag of a frame that is copied. Has no side effects beyond the copy.

use super::rule::{Head, Rule};
use crate::frame::protocols::ETHERTYPE_VLAN;
use kickless_spec::net::{HDR_F_NEEDS_CSUM, Header, MAC_LEN, VLAN_TAG_LEN};
use zerocopy::FromBytes;

const HEADER: usize = size_of::<Header>();
/// Offset of the tag in a frame behind its header.
const TAG_AT: usize = HEADER + 2 * MAC_LEN;

/// The change of a frame on its way to a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Nothing,
    /// Gets a tag of this VLAN.
    Add(u16),
    /// Loses its tag.
    Remove,
}

impl Change {
    /// Returns the change of a frame that leaves through a port with this rule.
    pub(super) fn between(head: &Head, to: &Rule) -> Self {
        match (head.is_tagged, to.vlan) {
            (true, Some(_)) => Self::Remove,
            (false, None) if head.vlan != 0 => Self::Add(head.vlan),
            _ => Self::Nothing,
        }
    }

    /// Returns the length of the changed frame.
    pub(super) fn len(self, frame: usize) -> usize {
        match self {
            Self::Nothing => frame,
            Self::Add(_) => frame + VLAN_TAG_LEN,
            Self::Remove => frame - VLAN_TAG_LEN,
        }
    }

    /// Copies a frame behind its header, and changes the copy. `to` has the length of the changed frame.
    pub(super) fn copy(self, from: &[u8], to: &mut [u8]) {
        match self {
            Self::Nothing => return to.copy_from_slice(from),
            Self::Add(vlan) => {
                to[..TAG_AT].copy_from_slice(&from[..TAG_AT]);
                to[TAG_AT..TAG_AT + 2].copy_from_slice(&ETHERTYPE_VLAN.to_be_bytes());
                to[TAG_AT + 2..TAG_AT + VLAN_TAG_LEN].copy_from_slice(&vlan.to_be_bytes());
                to[TAG_AT + VLAN_TAG_LEN..].copy_from_slice(&from[TAG_AT..]);
            }
            Self::Remove => {
                to[..TAG_AT].copy_from_slice(&from[..TAG_AT]);
                to[TAG_AT..].copy_from_slice(&from[TAG_AT + VLAN_TAG_LEN..]);
            }
        }
        self.move_offsets(&mut to[..HEADER]);
    }

    /// Moves the offsets in the header, which count from the beginning of the frame.
    fn move_offsets(self, header: &mut [u8]) {
        let Ok(header) = Header::mut_from_bytes(header) else { return };
        let moved = |offset: u16| match self {
            Self::Add(_) => offset.saturating_add(VLAN_TAG_LEN as u16),
            Self::Remove => offset.saturating_sub(VLAN_TAG_LEN as u16),
            Self::Nothing => offset,
        };
        if header.flags & HDR_F_NEEDS_CSUM != 0 {
            header.csum_start = moved(header.csum_start.get()).into();
        }
        // 0 stands for a length that is not known.
        if header.hdr_len.get() != 0 {
            header.hdr_len = moved(header.hdr_len.get()).into();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    fn frame(flags: u8) -> Vec<u8> {
        let header = Header { flags, csum_start: 34.into(), hdr_len: 54.into(), ..Header::default() };
        let frame: Vec<u8> = (0..70).collect();
        [header.as_bytes(), &frame].concat()
    }

    #[test]
    fn a_tag_is_added_and_removed() {
        let plain = frame(HDR_F_NEEDS_CSUM);
        let mut tagged = vec![0; Change::Add(7).len(plain.len())];
        Change::Add(7).copy(&plain, &mut tagged);
        assert_eq!(tagged[TAG_AT..TAG_AT + 4], [0x81, 0, 0, 7]);
        assert_eq!(tagged[TAG_AT + 4..], plain[TAG_AT..]);
        let (header, _) = Header::read_from_prefix(&tagged).unwrap();
        assert_eq!((header.csum_start.get(), header.hdr_len.get()), (38, 58));
        let mut back = vec![0; Change::Remove.len(tagged.len())];
        Change::Remove.copy(&tagged, &mut back);
        assert_eq!(back, plain);
        Change::Nothing.copy(&plain, &mut back);
        assert_eq!(back, plain);
    }

    #[test]
    fn offsets_that_mean_nothing_stay() {
        let plain = frame(0);
        let mut tagged = vec![0; plain.len() + 4];
        Change::Add(7).copy(&plain, &mut tagged);
        assert_eq!(Header::read_from_prefix(&tagged).unwrap().0.csum_start.get(), 34);
    }
}
