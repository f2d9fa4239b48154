//! virtio-scsi (virtio 1.3, section 5.6) on the disks of `kickless-disk`.
//!
//! This is the part that takes bytes and returns values: it parses requests, commands and parameter lists,
//! makes answers and sense data, and holds the state of reservations. It has no rings, no threads and no I/O.
//!
//! All bytes may come from a hostile guest. Nothing here panics, and no guest makes it allocate or loop
//! without bound.
//!
//! The path of a request:
//!
//! 1. [`Buffers::check_direction`] refuses data in both directions.
//! 2. [`Address::parse`] finds the logical unit, which is a [`Unit`].
//! 3. A pending unit attention ([`Attentions`]) ends a command that does not [pass it](passes_attention).
//! 4. [`parse()`] makes a [`Command`], or a [`Sense`] for CHECK CONDITION.
//! 5. [`Permits`] of the [`Reservations`] say whether the class of the command ([`Command::access`]) is
//!    permitted.
//! 6. [`Buffers::check`] compares the [`Data`] of the command with the buffers of the driver.
//! 7. The command is executed: by the disk, by the reservations, or by one of the functions for answers.
//!
//! ```
//! use kickless_scsi::{Blocks, Command, Properties, Sense, Unit, parse};
//!
//! let disk = Properties { blocks: 2048, ..Properties::plain(512) };
//! // READ(10) of 8 blocks from block 16 on.
//! let command = parse(&[0x28, 0, 0, 0, 0, 16, 0, 0, 8, 0], Unit::Disk(&disk))?;
//! let Command::Read(transfer) = command else { panic!("it is a read") };
//! assert_eq!(transfer.blocks, Blocks { first: 16, count: 8 });
//! // RDPROTECT is refused: the sense data point to bit 7 of byte 1.
//! let sense = parse(&[0x28, 0x20, 0, 0, 0, 16, 0, 0, 8, 0], Unit::Disk(&disk)).unwrap_err();
//! assert_eq!(sense, Sense::invalid_field(1, 7));
//! assert_eq!(sense.data(false).bytes()[15..], [0xcf, 0, 1]);
//! # Ok::<(), Sense>(())
//! ```
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods))]
#![forbid(unsafe_code)]

mod address;
mod answer;
mod attention;
mod command;
mod cut;
mod lengths;
mod mode;
mod number;
mod parse;
mod reservation;
mod sense;
mod table;
mod task;
mod unit;
mod unmap;
mod vpd;

pub use address::{Address, InvalidAddress, entry};
pub use answer::{
    LbaExtent, inquiry, lba_status, read_capacity_10, read_capacity_16, report_luns, report_opcodes,
};
pub use attention::{Attention, Attentions, passes_attention};
pub use command::{
    Access, BlockDescriptor, ByteCheck, Command, Data, Inquiry, LunSelect, ModeSelect, ModeSense,
    OpcodeSelect, PageControl, Pages, PersistentAction, PersistentIn, PersistentReserveOut, ReportOpcodes,
    ReservationType, Transfer,
};
pub use lengths::{Buffers, LengthError};
pub use mode::Mode;
pub use parse::parse;
pub use reservation::{
    Effects, InvalidTransportId, Permits, PersistentOut, REGISTRATIONS_MAX, Refused, Reservations,
    SAVED_LEN_MAX, SavedError, TRANSPORT_ID_LEN_MAX, TransportId,
};
pub use sense::{FieldPointer, SENSE_LEN_MAX, Sense, SenseData};
pub use task::{ControlError, ControlRequest, TaskFunction};
pub use unit::{Blocks, Identity, IdentityError, Properties, SERIAL_LEN_MAX, Unit, UnmapLimits};
pub use unmap::{unmap, unmap_len_max};
