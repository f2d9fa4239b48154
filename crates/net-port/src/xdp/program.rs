//! The program that an interface runs for each frame, and the calls of bpf(2) that put it there.
#![expect(unsafe_code, reason = "island: bpf(2), which takes the addresses of its arguments")]

use rustix::io::Errno;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

const MAP_CREATE: libc::c_long = 0;
const MAP_UPDATE_ELEM: libc::c_long = 2;
const PROG_LOAD: libc::c_long = 5;
const LINK_CREATE: libc::c_long = 28;

const MAP_TYPE_XSKMAP: u32 = 17;
const PROG_TYPE_XDP: u32 = 6;
const ATTACH_TYPE_XDP: u32 = 37;
/// Runs the program in the network stack, for an interface whose driver cannot run it.
const FLAG_SKB_MODE: u32 = 1 << 1;
/// Runs the program in the driver, or not at all. Without a flag, the kernel would not say which it is.
const FLAG_DRV_MODE: u32 = 1 << 2;

const HELPER_REDIRECT_MAP: i32 = 51;
/// The offset of `rx_queue_index` in `struct xdp_md`.
const RX_QUEUE_INDEX: i16 = 16;
const XDP_PASS: i32 = 2;
/// The kernel asks for the licence of a program, because some helpers need the GPL. This one does not.
const LICENSE: &[u8] = b"Apache-2.0\0";

/// An instruction (`struct bpf_insn`). `registers` has the destination in its low half.
#[repr(C)]
struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    immediate: i32,
}

const fn instruction(code: u8, registers: u8, offset: i16, immediate: i32) -> Instruction {
    Instruction { code, registers, offset, immediate }
}

/// Returns the program that passes a frame to the socket of its queue, or to the network stack if the queue
/// has no socket: `return bpf_redirect_map(&sockets, frame->rx_queue_index, XDP_PASS)`.
fn program(sockets: BorrowedFd<'_>) -> [Instruction; 6] {
    [
        instruction(0x61, 0x12, RX_QUEUE_INDEX, 0), // r2 = *(u32 *)(r1 + RX_QUEUE_INDEX)
        instruction(0x18, 0x11, 0, sockets.as_raw_fd()), // r1 = the map, in two instructions
        instruction(0, 0, 0, 0),
        instruction(0xb7, 0x03, 0, XDP_PASS),         // r3 = XDP_PASS
        instruction(0x85, 0, 0, HELPER_REDIRECT_MAP), // r0 = bpf_redirect_map(r1, r2, r3)
        instruction(0x95, 0, 0, 0),                   // return r0
    ]
}

/// The map from queues to sockets. A socket leaves it when it is closed.
#[derive(Debug)]
pub(super) struct Sockets(OwnedFd);

/// A program at an interface. It leaves the interface when this is dropped.
#[derive(Debug)]
pub(super) struct Attached {
    /// The driver runs the program, and not the network stack.
    pub(super) is_native: bool,
    _link: OwnedFd,
}

impl Sockets {
    /// Makes a map for this number of queues.
    pub(super) fn new(queues: u32) -> io::Result<Self> {
        #[repr(C)]
        struct Attributes {
            map_type: u32,
            key_size: u32,
            value_size: u32,
            max_entries: u32,
            map_flags: u32,
        }
        let four = size_of::<u32>() as u32;
        let attributes = Attributes {
            map_type: MAP_TYPE_XSKMAP,
            key_size: four,
            value_size: four,
            max_entries: queues,
            map_flags: 0,
        };
        // SAFETY: MAP_CREATE has no addresses.
        unsafe { bpf_fd(MAP_CREATE, &attributes) }.map(Self)
    }

    /// Gives a queue its socket.
    pub(super) fn set(&self, queue: u32, socket: BorrowedFd<'_>) -> io::Result<()> {
        #[repr(C)]
        struct Attributes {
            map: i32,
            padding: u32,
            key: u64,
            value: u64,
            flags: u64,
        }
        let value = socket.as_raw_fd();
        let attributes = Attributes {
            map: self.0.as_raw_fd(),
            padding: 0,
            key: (&raw const queue).expose_provenance() as u64,
            value: (&raw const value).expose_provenance() as u64,
            flags: 0,
        };
        // SAFETY: the kernel reads the key and the value, which have the sizes that the map was made with.
        unsafe { bpf(MAP_UPDATE_ELEM, &attributes) }.map(|_| ())
    }

    /// Puts the program at an interface: in its driver, or in the network stack if the driver cannot run it.
    pub(super) fn attach(&self, interface: u32) -> io::Result<Attached> {
        let program = self.load()?;
        match link(&program, interface, FLAG_DRV_MODE) {
            Ok(link) => Ok(Attached { is_native: true, _link: link }),
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::BUSY | Errno::EXIST | Errno::PERM | Errno::NODEV) => Err(error),
                _ => Ok(Attached { is_native: false, _link: link(&program, interface, FLAG_SKB_MODE)? }),
            },
        }
    }

    fn load(&self) -> io::Result<OwnedFd> {
        use std::os::fd::AsFd;
        #[repr(C)]
        struct Attributes {
            prog_type: u32,
            instructions: u32,
            program: u64,
            license: u64,
        }
        let program = program(self.0.as_fd());
        let attributes = Attributes {
            prog_type: PROG_TYPE_XDP,
            instructions: program.len() as u32,
            program: program.as_ptr().expose_provenance() as u64,
            license: LICENSE.as_ptr().expose_provenance() as u64,
        };
        // SAFETY: the kernel reads the instructions, whose number is right, and the licence up to its zero.
        unsafe { bpf_fd(PROG_LOAD, &attributes) }
    }
}

fn link(program: &OwnedFd, interface: u32, flags: u32) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Attributes {
        program: i32,
        interface: u32,
        attach_type: u32,
        flags: u32,
    }
    let attributes =
        Attributes { program: program.as_raw_fd(), interface, attach_type: ATTACH_TYPE_XDP, flags };
    // SAFETY: LINK_CREATE has no addresses for a program of XDP.
    unsafe { bpf_fd(LINK_CREATE, &attributes) }
}

/// Makes a call that returns a descriptor.
///
/// # Safety
/// As [`bpf`], and the command returns a new descriptor.
unsafe fn bpf_fd<T>(command: libc::c_long, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: the caller promises it.
    let fd = unsafe { bpf(command, attributes) }?;
    // SAFETY: the kernel has made the descriptor for this call, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Calls bpf(2). The kernel takes attributes that end early for ones that end with zeroes.
///
/// # Safety
/// The attributes are those of the command, have no padding, and their addresses are valid.
unsafe fn bpf<T>(command: libc::c_long, attributes: &T) -> io::Result<i32> {
    // SAFETY: the kernel reads as many bytes as the attributes have. The caller promises the rest.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, &raw const *attributes, size_of::<T>()) };
    match result {
        // A descriptor or 0, which both fit.
        0.. => Ok(result as i32),
        _ => Err(io::Error::last_os_error()),
    }
}
