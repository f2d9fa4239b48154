//! Announces the address of a guest that has moved here, so that switches learn where it is (SEND_RARP).

use crate::card_port::{CardPort, TapPort};
use crate::loop_queue::{Batch, HEADER, PLAIN};
use crate::switch::{Forwarder, SwitchPort};
use kickless_net_port::{SendError, StreamPort};
use kickless_spec::net::{ETHERNET_HEADER_LEN, Header, MAC_LEN};
use tracing::{info, warn};

/// The length of the frame: the shortest of Ethernet, without its check sequence.
const LEN: usize = 60;
const ETHERTYPE_RARP: u16 = 0x8035;
const HARDWARE_ETHERNET: u16 = 1;
const PROTOCOL_IPV4: u16 = 0x0800;
const ADDRESS_LENGTHS: [u8; 2] = [MAC_LEN as u8, 4];
/// "Request reverse" (RFC 903).
const REQUEST: u16 = 3;
/// An IPv4 address that is not known.
const NO_ADDRESS: [u8; 4] = [0; 4];

/// Returns a frame that all switches see, with this address as its source.
pub(crate) fn frame(mac: [u8; MAC_LEN]) -> [u8; LEN] {
    let parts: [&[u8]; 11] = [
        &[0xff; MAC_LEN],
        &mac,
        &ETHERTYPE_RARP.to_be_bytes(),
        &HARDWARE_ETHERNET.to_be_bytes(),
        &PROTOCOL_IPV4.to_be_bytes(),
        &ADDRESS_LENGTHS,
        &REQUEST.to_be_bytes(),
        &mac,
        &NO_ADDRESS,
        &mac,
        &NO_ADDRESS,
    ];
    let mut frame = [0; LEN];
    let mut rest = &mut frame[..];
    for part in parts {
        let (here, more) = rest.split_at_mut(part.len());
        here.copy_from_slice(part);
        rest = more;
    }
    frame
}

/// Sends the announcement through the port of a card. The null port discards it, and the loop port has nobody
/// to tell.
pub(crate) fn send(port: &CardPort, mac: [u8; MAC_LEN]) {
    match port {
        CardPort::Tap(port) => send_to_tap(port, mac),
        CardPort::Stream(port) => send_to_stream(port, mac),
        CardPort::Switch(port) => send_to_switch(port, mac),
        CardPort::Xdp(port) => port.send_once(&frame(mac)),
        CardPort::Peer(port) => {
            // Without a connection, there is nobody to tell.
            port.queues.outbox.send(&mut batch(mac));
        }
        CardPort::Null(_) | CardPort::Loop(_) => {}
    }
}

fn send_to_switch(port: &SwitchPort, mac: [u8; MAC_LEN]) {
    // A switch without other ports has nobody to tell.
    port.forward(0, &mut batch(mac), &mut Forwarder::default(), u32::MAX);
}

fn batch(mac: [u8; MAC_LEN]) -> Batch {
    let mut frames = Batch::default();
    let space = frames.push(HEADER + LEN);
    space[..HEADER].copy_from_slice(&PLAIN);
    space[HEADER..].copy_from_slice(&frame(mac));
    frames
}

fn send_to_stream(port: &StreamPort, mac: [u8; MAC_LEN]) {
    match port.sender() {
        Ok(sender) => {
            let mut outgoing = sender.turn();
            if outgoing.has_room() {
                outgoing.push(&frame(mac));
                outgoing.flush();
            }
        }
        Err(error) => warn!(%error, "the guest's address cannot be announced"),
    }
}

fn send_to_tap(port: &TapPort, mac: [u8; MAC_LEN]) {
    let sent = match port.tap.queue(0) {
        Ok(mut queue) => queue.send_copy(&Header::default(), &frame(mac)),
        Err(error) => return warn!(%error, "the guest's address cannot be announced"),
    };
    match sent {
        Ok(()) => info!(tap = port.tap.name(), "the guest's address is announced by RARP"),
        Err(SendError::Gone) => port.report_gone(),
        Err(error) => warn!(tap = port.tap.name(), %error, "the guest's address cannot be announced"),
    }
}

const _: () = assert!(ETHERNET_HEADER_LEN + 28 <= LEN);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_frame_is_that_of_rfc_903() {
        let frame = frame([2, 3, 4, 5, 6, 7]);
        assert_eq!(frame[..14], [255, 255, 255, 255, 255, 255, 2, 3, 4, 5, 6, 7, 0x80, 0x35]);
        assert_eq!(frame[14..22], [0, 1, 8, 0, 6, 4, 0, 3]);
        assert_eq!((&frame[22..28], &frame[32..38]), (&frame[6..12], &frame[6..12]));
        assert_eq!((&frame[28..32], &frame[38..]), (&[0; 4][..], &[0; 22][..]));
    }
}
