//! The commands.

use crate::unit::Blocks;

/// A valid command. Its blocks are within the disk, and its numbers within the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Answer GOOD.
    TestUnitReady,
    /// Return the sense of a pending unit attention, or [`Sense::NONE`](crate::Sense::NONE).
    RequestSense {
        /// In descriptor format, and otherwise in fixed format.
        descriptors: bool,
        /// The most bytes of the answer.
        allocation: u32,
    },
    /// Describe the logical unit.
    Inquiry(Inquiry),
    /// Return mode pages.
    ModeSense(ModeSense),
    /// Change mode pages by a parameter list.
    ModeSelect(ModeSelect),
    /// Return the capacity in the short form.
    ReadCapacity10,
    /// Return the capacity in the long form.
    ReadCapacity16 {
        /// The most bytes of the answer.
        allocation: u32,
    },
    /// Read blocks.
    Read(Transfer),
    /// Write blocks.
    Write(Transfer),
    /// Write blocks, make them durable, and compare them with the medium.
    WriteAndVerify {
        /// The blocks.
        blocks: Blocks,
        /// Compare the medium with the data of the driver. Otherwise the medium must only be readable.
        compare: bool,
    },
    /// Verify blocks of the medium.
    Verify {
        /// The blocks.
        blocks: Blocks,
        /// The data to compare with.
        check: ByteCheck,
    },
    /// Make completed writes to these blocks durable.
    SynchronizeCache {
        /// The blocks.
        blocks: Blocks,
        /// Answer before it is done.
        immediate: bool,
    },
    /// Free the blocks of a parameter list ([`unmap()`](crate::unmap())).
    Unmap {
        /// The length of the list in bytes.
        list_len: u16,
    },
    /// Write one block of data to each of these blocks.
    WriteSame {
        /// The blocks.
        blocks: Blocks,
        /// The blocks may be freed if they then read as the data.
        unmap: bool,
        /// The data are zeroes, and the driver sends none.
        no_data: bool,
    },
    /// Compare blocks with the first half of the data, and write the second half if they are equal. No other
    /// command comes in between.
    CompareAndWrite(Transfer),
    /// Say which blocks are allocated, beginning with this one.
    GetLbaStatus {
        /// The first block.
        first: u64,
        /// The most bytes of the answer.
        allocation: u32,
    },
    /// Return the list of logical units.
    ReportLuns {
        /// The kinds of logical units.
        select: LunSelect,
        /// The most bytes of the answer.
        allocation: u32,
    },
    /// Say which commands there are.
    ReportOpcodes(ReportOpcodes),
    /// Start or stop.
    StartStopUnit {
        /// Start, and otherwise stop.
        start: bool,
        /// Make completed writes durable before a stop.
        flush: bool,
        /// Answer before it is done.
        immediate: bool,
    },
    /// Forbid or permit that the medium is removed. It cannot be.
    PreventAllowMediumRemoval {
        /// Forbid it.
        prevent: bool,
    },
    /// Reserve the logical unit, as SPC-2 defines it.
    Reserve,
    /// End that reservation.
    Release,
    /// Read the registrations and the persistent reservation.
    PersistentReserveIn {
        /// The part to read.
        action: PersistentIn,
        /// The most bytes of the answer.
        allocation: u32,
    },
    /// Change them by a parameter list ([`PersistentOut`](crate::PersistentOut)).
    PersistentReserveOut(PersistentReserveOut),
}

/// INQUIRY.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inquiry {
    /// The page of vital product data, or `None` for standard data. There is such a page.
    pub page: Option<u8>,
    /// The most bytes of the answer.
    pub allocation: u32,
}

/// MODE SENSE(6) or (10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModeSense {
    /// The 10-byte command, whose answer has a longer header.
    pub is_long: bool,
    /// The block descriptor of the answer.
    pub descriptor: BlockDescriptor,
    /// The values to return.
    pub control: PageControl,
    /// The pages to return.
    pub pages: Pages,
    /// The most bytes of the answer.
    pub allocation: u32,
}

/// The block descriptor in the answer to MODE SENSE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockDescriptor {
    /// There is none (DBD).
    None,
    /// The one of 8 bytes.
    Short,
    /// The one of 16 bytes (LLBAA).
    Long,
}

/// The values of mode pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageControl {
    /// The present ones.
    Current,
    /// A mask of the bits that MODE SELECT changes.
    Changeable,
    /// The ones after a reset.
    Default,
}

/// The mode pages of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// The caching page.
    Caching,
    /// The control page.
    Control,
    /// All.
    All,
}

/// MODE SELECT(6) or (10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModeSelect {
    /// The 10-byte command, whose list has a longer header.
    pub is_long: bool,
    /// The length of the list in bytes, at most [`ModeSelect::LIST_LEN_MAX`].
    pub list_len: u16,
}

impl ModeSelect {
    /// The longest list. A list with a long descriptor and both pages has 56 bytes.
    pub const LIST_LEN_MAX: u16 = 256;
}

/// The blocks of a read or a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The blocks.
    pub blocks: Blocks,
    /// Written data are durable before the answer, and read data come from the medium (FUA).
    pub force_unit_access: bool,
    /// The blocks are not needed again soon (DPO).
    pub disable_page_out: bool,
}

/// The data with which VERIFY compares the medium (BYTCHK).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByteCheck {
    /// None. The medium must only be readable.
    Medium,
    /// As many blocks as it verifies.
    Each,
    /// One block, with which it compares each one.
    Same,
}

/// The logical units of an answer to REPORT LUNS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LunSelect {
    /// All but the well-known ones.
    Ordinary,
    /// The well-known ones.
    WellKnown,
    /// All.
    All,
}

/// REPORT SUPPORTED OPERATION CODES.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReportOpcodes {
    /// The commands to report.
    pub select: OpcodeSelect,
    /// Add the descriptors of timeouts (RCTD).
    pub timeouts: bool,
    /// The most bytes of the answer.
    pub allocation: u32,
}

/// The commands of an answer to REPORT SUPPORTED OPERATION CODES.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpcodeSelect {
    /// All.
    All,
    /// This one.
    One {
        /// The operation code.
        opcode: u8,
        /// The service action; `None` if the operation code has none.
        service_action: Option<u16>,
    },
}

/// The service actions of PERSISTENT RESERVE IN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PersistentIn {
    /// READ KEYS.
    Keys,
    /// READ RESERVATION.
    Reservation,
    /// REPORT CAPABILITIES.
    Capabilities,
    /// READ FULL STATUS.
    FullStatus,
}

/// The command PERSISTENT RESERVE OUT, without its parameter list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PersistentReserveOut {
    /// The service action.
    pub action: PersistentAction,
    /// The type of the reservation; `None` if it is not one, or its scope is not the logical unit. RESERVE
    /// always has one.
    pub kind: Option<ReservationType>,
    /// The length of the list in bytes, at least [`PersistentReserveOut::LIST_LEN`].
    pub list_len: u32,
}

impl PersistentReserveOut {
    /// The length of a valid list. More bytes of it need not be read.
    pub const LIST_LEN: u32 = 24;
}

/// The service actions of PERSISTENT RESERVE OUT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PersistentAction {
    /// REGISTER.
    Register,
    /// REGISTER AND IGNORE EXISTING KEY.
    RegisterAndIgnore,
    /// RESERVE.
    Reserve,
    /// RELEASE.
    Release,
    /// CLEAR.
    Clear,
    /// PREEMPT.
    Preempt,
    /// PREEMPT AND ABORT.
    PreemptAndAbort,
}

/// The types of persistent reservations (SPC-4, section 6.15.3.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ReservationType {
    /// Only the holder writes.
    WriteExclusive = 1,
    /// Only the holder reads and writes.
    ExclusiveAccess = 3,
    /// Only registered nexuses write.
    WriteExclusiveRegistrantsOnly = 5,
    /// Only registered nexuses read and write.
    ExclusiveAccessRegistrantsOnly = 6,
    /// Only registered nexuses write, and all of them are holders.
    WriteExclusiveAllRegistrants = 7,
    /// Only registered nexuses read and write, and all of them are holders.
    ExclusiveAccessAllRegistrants = 8,
}

impl ReservationType {
    /// All types, in the order of the numbers.
    pub const ALL: [Self; 6] = [
        Self::WriteExclusive,
        Self::ExclusiveAccess,
        Self::WriteExclusiveRegistrantsOnly,
        Self::ExclusiveAccessRegistrantsOnly,
        Self::WriteExclusiveAllRegistrants,
        Self::ExclusiveAccessAllRegistrants,
    ];

    /// Returns the type with this number.
    pub fn from_raw(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == number)
    }

    /// Returns whether nexuses that do not share it may read.
    pub fn permits_reads(self) -> bool {
        matches!(
            self,
            Self::WriteExclusive | Self::WriteExclusiveRegistrantsOnly | Self::WriteExclusiveAllRegistrants
        )
    }

    /// Returns whether all registered nexuses share it.
    pub fn is_shared(self) -> bool {
        !matches!(self, Self::WriteExclusive | Self::ExclusiveAccess)
    }

    /// Returns whether all registered nexuses are holders.
    pub fn is_of_all_registrants(self) -> bool {
        matches!(self, Self::WriteExclusiveAllRegistrants | Self::ExclusiveAccessAllRegistrants)
    }
}

/// The data of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// None.
    None,
    /// This many bytes of the driver.
    Out(u64),
    /// This many bytes for the driver.
    In(u64),
    /// An answer of at most this many bytes.
    Answer(u32),
}

/// The class of a command for reservations (SPC-4, section 5.13.1; SBC-3, section 4.17).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Permitted under each reservation.
    Exempt,
    /// Permitted under each persistent reservation: TEST UNIT READY.
    Status,
    /// Permitted for nexuses that may read.
    Read,
    /// Permitted for nexuses that may write.
    Write,
    /// Manages reservations, and has rules of its own.
    Reservation,
}

impl Command {
    /// Returns the data that the command transfers.
    pub fn data(&self, block_size: u32) -> Data {
        let one = u64::from(block_size);
        match *self {
            Self::TestUnitReady
            | Self::SynchronizeCache { .. }
            | Self::StartStopUnit { .. }
            | Self::PreventAllowMediumRemoval { .. }
            | Self::Reserve
            | Self::Release
            | Self::Verify { check: ByteCheck::Medium, .. }
            | Self::WriteSame { no_data: true, .. } => Data::None,
            Self::Read(transfer) => Data::In(transfer.blocks.len(block_size)),
            Self::Write(transfer) => Data::Out(transfer.blocks.len(block_size)),
            Self::WriteAndVerify { blocks, .. } | Self::Verify { blocks, check: ByteCheck::Each } => {
                Data::Out(blocks.len(block_size))
            }
            Self::Verify { blocks, check: ByteCheck::Same } if blocks.is_empty() => Data::None,
            Self::Verify { check: ByteCheck::Same, .. } | Self::WriteSame { .. } => Data::Out(one),
            Self::CompareAndWrite(transfer) => Data::Out(transfer.blocks.len(block_size).saturating_mul(2)),
            Self::Unmap { list_len } => Data::Out(list_len.into()),
            Self::ModeSelect(select) => Data::Out(select.list_len.into()),
            Self::PersistentReserveOut(out) => Data::Out(out.list_len.into()),
            Self::ReadCapacity10 => Data::Answer(8),
            Self::Inquiry(Inquiry { allocation, .. })
            | Self::ModeSense(ModeSense { allocation, .. })
            | Self::ReportOpcodes(ReportOpcodes { allocation, .. })
            | Self::RequestSense { allocation, .. }
            | Self::ReadCapacity16 { allocation }
            | Self::GetLbaStatus { allocation, .. }
            | Self::ReportLuns { allocation, .. }
            | Self::PersistentReserveIn { allocation, .. } => Data::Answer(allocation),
        }
    }

    /// Returns the class of the command for reservations.
    pub fn access(&self) -> Access {
        match self {
            Self::Inquiry(_)
            | Self::ReportLuns { .. }
            | Self::RequestSense { .. }
            | Self::ReadCapacity10
            | Self::ReadCapacity16 { .. }
            | Self::StartStopUnit { start: true, .. }
            | Self::PreventAllowMediumRemoval { prevent: false } => Access::Exempt,
            Self::TestUnitReady => Access::Status,
            Self::Read(_)
            | Self::Verify { .. }
            | Self::GetLbaStatus { .. }
            | Self::ModeSense(_)
            | Self::ReportOpcodes(_) => Access::Read,
            Self::Write(_)
            | Self::WriteAndVerify { .. }
            | Self::WriteSame { .. }
            | Self::CompareAndWrite(_)
            | Self::Unmap { .. }
            | Self::SynchronizeCache { .. }
            | Self::ModeSelect(_)
            | Self::StartStopUnit { start: false, .. }
            | Self::PreventAllowMediumRemoval { prevent: true } => Access::Write,
            Self::Reserve
            | Self::Release
            | Self::PersistentReserveIn { .. }
            | Self::PersistentReserveOut(_) => Access::Reservation,
        }
    }
}
