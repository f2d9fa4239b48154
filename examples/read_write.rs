//! Writes to a disk and reads it back.
//!
//! It writes over bytes 8192 to 12287 of the disk, so serve one that holds nothing else:
//!
//! ```text
//! kickless blk --socket-path=/tmp/scratch.sock --blk-file=mem:64M
//! cargo run -p kickless-driver --example read_write -- /tmp/scratch.sock
//! ```

use kickless_driver::{Disk, Options, Request};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let socket = std::env::args()
        .nth(1)
        .ok_or("usage: read_write SOCKET (writes over bytes 8192 to 12287 of the disk)")?;
    let disk = Disk::connect(Options::new(socket))?;
    println!("{}: {} bytes in {} queues", disk.get_id()?, disk.size()?, disk.queues());
    disk.write_at(&[7; 4096], 8192)?;
    disk.flush()?;

    // Reads the same bytes without a copy by the kernel or the driver.
    let read = disk.run(Request::read(8192, disk.buffer(4096)?))?;
    if read.into_buffer().is_none_or(|buffer| buffer.to_vec() != [7; 4096]) {
        return Err("the disk has other bytes".into());
    }
    println!("written and read back");
    Ok(())
}
