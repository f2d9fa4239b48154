//! Sends frames to a network card and prints those that come.
//!
//! ```text
//! kickless net --socket-path=/tmp/card.sock --port=null,rate=500
//! cargo run -p kickless-driver --example card -- /tmp/card.sock
//! ```

use std::time::Duration;

use kickless_driver::{Card, CardOptions, Interest, Outgoing};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let socket = std::env::args().nth(1).ok_or("usage: card SOCKET")?;
    let card = Card::connect(CardOptions::new(socket))?;
    println!("address {:x?}, MTU {}, {:?}", card.mac()?, card.mtu()?, card.net_features());
    let mut pair = card.pair(0).ok_or("the card has no queues")?;

    // Broadcast frames of an EtherType that no network stack answers.
    let mut frame = [0u8; 60];
    frame[..6].fill(0xff);
    frame[12..14].copy_from_slice(&0x88b5u16.to_be_bytes());
    let sent = pair.send(&[Outgoing::from(&frame[..]); 32])?;
    if !pair.flush(Some(Duration::from_secs(5)))? {
        return Err("the card does not take frames".into());
    }
    println!("{sent} frames sent");

    let mut left = 10usize;
    while left > 0 && pair.wait(Interest::Receive, Some(Duration::from_secs(2)))? {
        left -= pair.receive(left, |frame| println!("{} bytes, {:?}", frame.len(), frame.offload()))?;
    }
    println!("{:?}", pair.counters());
    Ok(())
}
