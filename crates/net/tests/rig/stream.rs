//! Frames at the peer of a stream port.

use kickless_spec::net::Header;
use std::io::Read;
use std::os::unix::net::UnixStream;
use zerocopy::IntoBytes;

/// Returns a frame of this length, which differs from those with other numbers.
pub fn frame(len: usize, number: u8) -> Vec<u8> {
    (0..len).map(|n| (n as u8).wrapping_mul(3).wrapping_add(number)).collect()
}

/// Returns a frame behind a header without offloads, as a driver has it.
pub fn plain(frame: &[u8]) -> Vec<u8> {
    [Header::default().as_bytes(), frame].concat()
}

/// Returns a frame behind its length, as the stream has it.
pub fn framed(frame: &[u8]) -> Vec<u8> {
    [&(frame.len() as u32).to_be_bytes(), frame].concat()
}

/// Reads the next frame at the peer.
pub fn read_frame(mut peer: &UnixStream) -> Vec<u8> {
    let mut len = [0; 4];
    peer.read_exact(&mut len).unwrap();
    let mut frame = vec![0; u32::from_be_bytes(len) as usize];
    peer.read_exact(&mut frame).unwrap();
    frame
}
