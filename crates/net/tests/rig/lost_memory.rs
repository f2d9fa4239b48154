//! A transmit ring whose guest cuts its memory short.

use super::{Guest, Kind, MEMORY, Rig, SIZE_MAX};
use kickless_device::Device;
use kickless_memory::{Gpa, Marks, fault};
use kickless_net::Net;
use kickless_virtqueue::driver::Buffer;
use std::fs::File;
use std::sync::Arc;

const PAGE: u64 = 4096;

pub struct LosingGuest {
    pub transmit: Rig,
    file: File,
}

impl LosingGuest {
    /// Starts the transmit ring of the first pair of a card.
    pub fn start(card: &Arc<Net>) -> Self {
        fault::guard().unwrap();
        let file = File::from(kickless_testing::memfd(MEMORY));
        let guest = Guest::in_file(Kind::default(), SIZE_MAX, file.try_clone().unwrap().into());
        let vring = guest.vring(1, guest.first_avail(), None);
        Self { transmit: Rig::start_on(card, guest, vring, card.features()), file }
    }

    /// Sends a frame, in buffers of these lengths. Only its first `kept` bytes are still in memory when the
    /// device is polled.
    pub fn send_and_lose(&mut self, frame: &[u8], kept: usize, lens: &[usize]) {
        let end = Guest::chain_at(0).0 + PAGE;
        let mut addr = end - kept as u64;
        self.transmit.view.write(Gpa(addr), frame, &mut Marks::off()).unwrap();
        let id = self.transmit.next_id().unwrap();
        let mut buffers = Vec::new();
        for &len in lens {
            buffers.push(Buffer { addr, len: len as u32, writable: false });
            addr += len as u64;
        }
        self.transmit.add(id, buffers).unwrap();
        self.file.set_len(end).unwrap();
        self.transmit.poll_once(1000);
    }

    /// Checks that the ring is broken, and that the driver does not get the chain back.
    pub fn check_broken(&mut self) {
        assert!(self.transmit.task.vring().is_broken());
        assert!(self.transmit.take().is_none());
    }
}
