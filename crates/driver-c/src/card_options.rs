//! The options of a card, in C.
#![expect(unsafe_code, reason = "C's structure has a length of its own")]

use std::ffi::c_char;
use std::mem::offset_of;

use crate::error::Fault;
use crate::options::{
    choice, huge_pages, milliseconds, number, read_versioned, reconnect_limit, socket, waiting,
};

/// The sentence about a wrong size.
const WRONG_SIZE: &str = "options.size is not sizeof(kl_card_options)";

/// The options for the connection to a card and its use. A member that is 0 has its default, so fill it like
/// this:
///
///     kl_card_options options = {.size = sizeof options, .socket = path};
#[repr(C)]
pub struct CardOptions {
    /// `sizeof(kl_card_options)`. It tells the library which members the program knows, if their versions
    /// differ.
    pub size: usize,
    /// The unix socket of the back-end.
    pub socket: *const c_char,
    /// The milliseconds to try to reconnect after the back-end has closed the connection; -1 means not at
    /// all. Default: 30 s.
    pub reconnect_limit_ms: i64,
    /// The milliseconds to wait for a listener on the socket. Default: do not wait.
    pub connect_timeout_ms: i64,
    /// The milliseconds to wait for the reply to a message or a command. Default: 10 s.
    pub reply_timeout_ms: i64,
    /// The microseconds that kl_pair_wait() polls before it sleeps; -1 means never to sleep. Default: a few,
    /// unless the device is mostly slower than that.
    pub spin_us: i64,
    /// The number of queue pairs, at most as many as the back-end offers. Default: 1.
    pub pairs: u32,
    /// The number of descriptors in each queue, a power of two up to 32768. Default: 256.
    pub queue_size: u32,
    /// The bytes of each buffer. A frame takes one buffer or several. Default: 2048.
    pub buffer_len: u32,
    /// The MTU to tell the back-end. Default: that of the back-end.
    pub mtu: u32,
    /// KL_AUTO, KL_ON or KL_OFF: use the packed ring instead of the split one.
    pub packed: u32,
    /// KL_AUTO, KL_ON or KL_OFF: use event indices.
    pub event_idx: u32,
    /// KL_AUTO, KL_ON or KL_OFF: use indirect descriptors for frames of several buffers.
    pub indirect: u32,
    /// KL_AUTO (which is off), KL_ON or KL_OFF: use buffers in the order in which they were made available.
    pub in_order: u32,
    /// KL_AUTO, KL_ON or KL_OFF: receive frames in several buffers.
    pub mergeable: u32,
    /// KL_AUTO, KL_ON or KL_OFF: leave checksums and segmentation of sent frames to the card.
    pub transmit_offloads: u32,
    /// KL_AUTO (which is off), KL_ON or KL_OFF: receive frames with partial checksums, and large packets.
    pub receive_offloads: u32,
    /// KL_AUTO, KL_ON or KL_OFF: use the control queue.
    pub control: u32,
    /// 1: use huge pages of 2 MiB, which must be reserved on the host.
    pub huge_pages: u32,
    /// Must be 0.
    pub reserved: u32,
}

impl CardOptions {
    /// Copies the options from C.
    ///
    /// # Safety
    /// `options` is null, or points to a structure with as many bytes as its first member says. Its socket is
    /// null or a string.
    pub(crate) unsafe fn read(options: *const Self) -> Result<driver::CardOptions, Fault> {
        // SAFETY: the caller's promise. The members are numbers and a pointer, for which any bytes are valid.
        let copy = unsafe { read_versioned(options, offset_of!(Self, reconnect_limit_ms), WRONG_SIZE)? };
        // SAFETY: the caller's promise.
        unsafe { copy.convert() }
    }

    /// Converts the options to those of the driver.
    ///
    /// # Safety
    /// The socket is null or a string.
    unsafe fn convert(&self) -> Result<driver::CardOptions, Fault> {
        // SAFETY: the caller's promise. The path is copied before this function returns.
        let defaults = driver::CardOptions::new(unsafe { socket(self.socket)? });
        const TOO_LARGE: &str = "options.pairs, .queue_size or .mtu is too large";
        Ok(driver::CardOptions {
            pairs: number(self.pairs, defaults.pairs, TOO_LARGE)?,
            queue_size: number(self.queue_size, defaults.queue_size, TOO_LARGE)?,
            buffer_len: if self.buffer_len == 0 { defaults.buffer_len } else { self.buffer_len },
            mtu: if self.mtu == 0 { None } else { Some(number(self.mtu, 0, TOO_LARGE)?) },
            packed: choice(self.packed, defaults.packed)?,
            event_idx: choice(self.event_idx, defaults.event_idx)?,
            indirect: choice(self.indirect, defaults.indirect)?,
            in_order: choice(self.in_order, defaults.in_order)?,
            mergeable: choice(self.mergeable, defaults.mergeable)?,
            transmit_offloads: choice(self.transmit_offloads, defaults.transmit_offloads)?,
            receive_offloads: choice(self.receive_offloads, defaults.receive_offloads)?,
            control: choice(self.control, defaults.control)?,
            huge_pages: huge_pages(self.huge_pages, self.reserved)?,
            reconnect_limit: reconnect_limit(self.reconnect_limit_ms, defaults.reconnect_limit)?,
            connect_timeout: milliseconds(self.connect_timeout_ms, defaults.connect_timeout)?,
            reply_timeout: milliseconds(self.reply_timeout_ms, defaults.reply_timeout)?,
            waiting: waiting(self.spin_us, defaults.waiting)?,
            ..defaults
        })
    }
}
