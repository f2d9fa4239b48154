//! Asks the kernel at the other end of a TAP for its address, which answers each request with one frame. So a
//! driver of a card on a TAP can count what comes back, without another process.

use kickless_testing::ip;

/// The shortest frame of Ethernet, without its checksum.
const FRAME_LEN: usize = 60;
const ETHERTYPE_ARP: [u8; 2] = [0x08, 0x06];
const REPLY: u8 = 2;
/// The hardware is Ethernet, the protocol IPv4. Their addresses have 6 and 4 bytes.
const ETHERNET_IPV4: [u8; 6] = [0, 1, 8, 0, 6, 4];
/// The beginning of the sender's Ethernet address. The number of the request is in the others.
const SENDER: [u8; 2] = [0x52, 0x54];

/// Gives a TAP of the network namespace its address, and sets it up. Each TAP has a `number` of its own.
pub fn join(tap: &str, number: u8) {
    ip(&format!("addr add 10.80.{number}.1/24 dev {tap}"));
    ip(&format!("link set {tap} up"));
}

/// Returns the request `id` for the address of the TAP with this number.
#[must_use]
pub fn request(number: u8, id: u32) -> [u8; FRAME_LEN] {
    let mut sender = [0; 6];
    sender[..2].copy_from_slice(&SENDER);
    sender[2..].copy_from_slice(&id.to_be_bytes());
    let mut frame = [0; FRAME_LEN];
    frame[..6].fill(0xff);
    frame[6..12].copy_from_slice(&sender);
    frame[12..14].copy_from_slice(&ETHERTYPE_ARP);
    frame[14..20].copy_from_slice(&ETHERNET_IPV4);
    frame[21] = 1;
    frame[22..28].copy_from_slice(&sender);
    frame[28..32].copy_from_slice(&[10, 80, number, 2]);
    frame[38..42].copy_from_slice(&[10, 80, number, 1]);
    frame
}

/// Returns the request that a frame answers, if it is a reply.
#[must_use]
pub fn answered(frame: &[u8]) -> Option<u32> {
    let is_reply = frame.len() >= 42 && frame[12..14] == ETHERTYPE_ARP && frame[20..22] == [0, REPLY];
    is_reply.then(|| u32::from_be_bytes([frame[34], frame[35], frame[36], frame[37]]))
}
