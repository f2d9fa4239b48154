//! Serves the chains of a card in the hostile back-end.

use anyhow::Result;
use kickless_memory::View;
use kickless_net_port::TestFrame;
use kickless_spec::net::{HDR_F_NEEDS_CSUM, Header, OK};
use kickless_virtqueue::Chain;
use zerocopy::IntoBytes;

use crate::hostile_backend::faults::RingFault;

/// Length of the frames that the back-end delivers.
pub const FRAME_LEN: usize = 60;

/// Performs the work of a chain. Returns the number of written bytes, and the status if the chain has room
/// for one.
pub(crate) fn carry_out(view: &View, chain: &Chain, fault: Option<RingFault>) -> Result<(u32, Option<u8>)> {
    let Some(first) = chain.writable().first() else { return Ok((0, None)) };
    if !chain.readable().is_empty() {
        // A command, with a byte for its answer.
        return Ok((1, Some(OK)));
    }
    let mut header = Header { num_buffers: 1.into(), ..Header::default() };
    match fault {
        Some(RingFault::Buffers(count)) => header.num_buffers = count.into(),
        Some(RingFault::Header) => (header.flags, header.csum_start) = (HDR_F_NEEDS_CSUM, u16::MAX.into()),
        _ => {}
    }
    let mut frame = [0; FRAME_LEN];
    TestFrame { pair: 0, number: 0 }.write(None, &mut frame);
    let bytes = [header.as_bytes(), &frame].concat();
    view.map().write(first.addr, &bytes)?;
    Ok((u32::try_from(bytes.len())?, None))
}
