//! The system calls that each process may make, and the reason for each.
//!
//! A row has calls, the condition under which they are allowed, and the reason. A profile is a list of tables
//! of rows. A call that is in two rows is allowed if the condition of one of them holds.
//!
//! The data path of kickless makes the calls of [`DATA_PATH`]. These have no conditions: the kernel answers
//! an unconditional call from a bitmap (Linux 5.11), without running the filter. Only messages to servers
//! and stream ports run it ([`MESSAGES`]).
//!
//! Conditions of numbers look at the lower half of an argument, as the kernel does.

use std::{fmt, iter};

use libc::{c_int, c_long};

use crate::calls::{Call, calls};

/// The system calls of a process.
#[derive(Debug)]
pub struct Profile {
    /// The answer to calls that no row allows.
    pub stray: Stray,
    /// The calls that end the process, whatever `tables` say.
    pub kill: &'static [Row],
    /// The calls that are allowed.
    pub tables: &'static [&'static [Row]],
}

/// The answer to a call that is in no row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stray {
    /// The call fails with EPERM, and is counted in [`Refusals`](crate::Refusals).
    Trap,
    /// The call fails with EPERM.
    Refuse,
    /// The process ends with SIGSYS.
    Kill,
}

/// Calls with the same condition and reason.
#[derive(Debug)]
pub struct Row {
    /// The calls.
    pub calls: &'static [Call],
    /// The conditions, which must all hold.
    pub when: &'static [Condition],
    /// The reason why a process makes these calls, or why they end it.
    pub reason: &'static str,
}

/// A condition of one argument.
#[derive(Clone, Copy, Debug)]
pub struct Condition {
    /// The argument, from 0 on.
    pub argument: u8,
    /// The condition.
    pub test: Test,
}

/// The values that an argument may have.
#[derive(Clone, Copy, Debug)]
pub enum Test {
    /// One of these numbers.
    OneOf(&'static [u32]),
    /// A number whose bits in `mask` are those of `value`.
    Bits {
        /// The bits that are compared.
        mask: u32,
        /// Their values.
        value: u32,
    },
    /// The id of the process that installs the filter.
    OwnProcess,
    /// The null pointer.
    Null,
}

impl Profile {
    /// Returns all rows of allowed calls.
    pub fn rows(&self) -> impl Iterator<Item = &'static Row> {
        self.tables.iter().flat_map(|table| table.iter())
    }
}

/// Writes the rows, one in each line.
impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.rows().try_for_each(|row| writeln!(f, "{row}"))?;
        let answer = match self.stray {
            Stray::Trap | Stray::Refuse => "EPERM",
            Stray::Kill => "the process ends",
        };
        writeln!(f, "all others: {answer}")?;
        self.kill.iter().try_for_each(|row| writeln!(f, "the process ends: {row}"))
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.calls.iter().map(|call| call.name).collect();
        f.write_str(&names.join(", "))?;
        for (before, condition) in iter::once("if").chain(iter::repeat("and")).zip(self.when) {
            write!(f, " {before} argument {} is {}", condition.argument + 1, condition.test)?;
        }
        write!(f, ": {}", self.reason)
    }
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OneOf(values) => {
                let values: Vec<_> = values.iter().map(|value| format!("{value:#x}")).collect();
                f.write_str(&values.join(" or "))
            }
            Self::Bits { mask, value } => write!(f, "{value:#x} within {mask:#x}"),
            Self::OwnProcess => f.write_str("the own process"),
            Self::Null => f.write_str("null"),
        }
    }
}

const fn row(calls: &'static [Call], reason: &'static str) -> Row {
    Row { calls, when: &[], reason }
}

const fn row_if(calls: &'static [Call], when: &'static [Condition], reason: &'static str) -> Row {
    Row { calls, when, reason }
}

const fn one_of(argument: u8, values: &'static [u32]) -> Condition {
    Condition { argument, test: Test::OneOf(values) }
}

/// The bits of `mask` are zero.
const fn without(argument: u8, mask: c_int) -> Condition {
    Condition { argument, test: Test::Bits { mask: mask as u32, value: 0 } }
}

const fn own_process(argument: u8) -> Condition {
    Condition { argument, test: Test::OwnProcess }
}

const fn null(argument: u8) -> Condition {
    Condition { argument, test: Test::Null }
}

/// The data process: workers, sessions, and the control socket. None of its calls takes a path, an address, a
/// name, a program, or the id of another process.
pub static DATA: Profile =
    Profile { stray: Stray::Trap, kill: KILL, tables: &[DATA_PATH, MESSAGES, DATA_CONTROL, COMMON, TRAP] };

/// A data process with librbd, which makes its own connections to a Ceph cluster, and reads its own files.
/// Its threads block signals. A call that is trapped there ends the process, so calls are refused without a
/// note.
pub static DATA_WITH_RBD: Profile = Profile {
    stray: Stray::Refuse,
    kill: KILL,
    tables: &[DATA_PATH, MESSAGES, DATA_CONTROL, COMMON, TRAP, RBD],
};

/// The opener, which uses names for the data process.
pub static OPENER: Profile = Profile { stray: Stray::Kill, kill: &[], tables: &[OPENER_NAMES, COMMON] };

/// The exporter of metrics, which asks another process over a unix socket and answers over TCP.
pub static EXPORTER: Profile =
    Profile { stray: Stray::Trap, kill: KILL, tables: &[EXPORTER_SOCKETS, MESSAGES, COMMON, TRAP] };

/// The flags of `clone` with which libraries make threads: glibc's, and musl's, which has CLONE_DETACHED too.
const THREAD: &[u32] = &[THREAD_FLAGS as u32, THREAD_FLAGS as u32 | 0x40_0000];
const THREAD_FLAGS: c_int = libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_CLEARTID;

/// Threads, memory, signals and time, which each process needs.
const COMMON: &[Row] = &[
    row(calls![SYS_futex SYS_sched_yield], "locks, parked threads, spinning"),
    row_if(calls![SYS_clone], &[one_of(0, THREAD)], "threads, and no processes"),
    row(calls![SYS_set_robust_list SYS_rseq SYS_gettid SYS_getpid], "the start of a thread"),
    row(calls![SYS_sched_getaffinity], "the C library looks for the stack of a thread"),
    row_if(calls![SYS_prctl], &[one_of(0, &[libc::PR_SET_NAME as u32])], "names of threads"),
    row(calls![SYS_rt_sigaction SYS_rt_sigprocmask SYS_rt_sigreturn SYS_sigaltstack], "signal handlers"),
    row(calls![SYS_restart_syscall], "the kernel repeats a call after a signal"),
    row_if(calls![SYS_tgkill], &[own_process(0)], "abort and raise, in this process"),
    row_if(calls![SYS_mmap SYS_mprotect], &[without(2, libc::PROT_EXEC)], "memory that is not executable"),
    row(calls![SYS_munmap SYS_mremap SYS_madvise SYS_brk], "memory"),
    row(
        calls![SYS_clock_gettime SYS_gettimeofday SYS_getcpu],
        "time, also that of a thread, and the processor",
    ),
    row(calls![SYS_clock_nanosleep SYS_nanosleep], "sleep"),
    row(calls![SYS_getrandom], "keys of hash maps"),
    row(calls![SYS_ppoll], "waiting for descriptors"),
    #[cfg(target_arch = "x86_64")]
    row(calls![SYS_poll], "waiting for descriptors, by the standard library"),
    row(calls![SYS_read SYS_write SYS_close], "descriptors, the log"),
    row(calls![SYS_exit SYS_exit_group], "the end of threads and of the process"),
];

/// The handler of refused calls notes their paths.
const TRAP: &[Row] = &[row(calls![SYS_pread64 SYS_pwrite64], "notes of refused calls; transfers of threads")];

/// The calls of the data path, without conditions. [`COMMON`] has four more: `futex`, `read`, `write` and
/// `ppoll`.
const DATA_PATH: &[Row] = &[
    row(calls![SYS_io_uring_enter], "io_uring"),
    row(calls![SYS_io_submit SYS_io_getevents], "Linux AIO; calls to guests in batches"),
    row(calls![SYS_readv SYS_writev], "TAPs, the log"),
    row(calls![SYS_preadv2 SYS_pwritev2 SYS_preadv SYS_pwritev], "kicks, transfers of threads"),
    row(calls![SYS_epoll_pwait], "workers wait"),
    row(calls![SYS_recvmsg SYS_recvfrom], "NBD, stream ports, vhost-user, control"),
];

/// Messages on sockets that are connected. With this flag, a message would connect a TCP socket that is not,
/// and with an address, one of datagrams would go anywhere.
const MESSAGES: &[Row] = &[
    row_if(
        calls![SYS_sendto],
        &[without(3, libc::MSG_FASTOPEN), null(4)],
        "NBD, stream ports, vhost-user, control, questions and answers",
    ),
    row_if(
        calls![SYS_sendmsg],
        &[without(2, libc::MSG_FASTOPEN)],
        "NBD, stream ports, vhost-user, control, questions and answers",
    ),
];

/// The calls of the data process that no request makes.
const DATA_CONTROL: &[Row] = &[
    row_if(
        calls![SYS_io_uring_register],
        &[one_of(1, &[URING_UNREGISTER_FILES, URING_UPDATE_FILES, URING_ENABLE])],
        "files of a ring, and its first submission",
    ),
    row(
        calls![SYS_io_setup SYS_io_destroy],
        "AIO contexts of devices that are added, and of threads that call",
    ),
    row(calls![SYS_epoll_create1 SYS_epoll_ctl], "the descriptors that a thread waits for"),
    row(calls![SYS_eventfd2 SYS_memfd_create SYS_pipe2], "wakers, in-flight buffers, state of devices"),
    row(calls![SYS_timerfd_create SYS_timerfd_settime], "the pace of frames of a `null` port"),
    row(calls![SYS_splice], "state of devices"),
    row(calls![SYS_dup SYS_lseek SYS_fstat SYS_fstatfs SYS_flock], "files by their descriptors"),
    row(calls![SYS_ftruncate SYS_fallocate], "growing images, and discarded ranges"),
    row(calls![SYS_fsync SYS_fdatasync SYS_sync_file_range SYS_fadvise64], "flushes and the page cache"),
    row_if(
        calls![SYS_fcntl],
        &[one_of(
            1,
            &[
                libc::F_GETFD as u32,
                libc::F_SETFD as u32,
                libc::F_GETFL as u32,
                libc::F_SETFL as u32,
                libc::F_OFD_GETLK as u32,
                libc::F_OFD_SETLK as u32,
                libc::F_DUPFD_CLOEXEC as u32,
                libc::F_ADD_SEALS as u32,
                libc::F_GET_SEALS as u32,
            ],
        )],
        "flags, locks and seals, and no signals (F_SETOWN, F_SETSIG)",
    ),
    row_if(
        calls![SYS_ioctl],
        &[one_of(
            1,
            &[
                libc::FIONBIO as u32,
                libc::BLKSSZGET as u32,
                BLKDISCARD,
                BLKZEROOUT,
                libc::TUNGETIFF as u32,
                libc::TUNSETQUEUE as u32,
                libc::TUNSETOFFLOAD as u32,
                libc::TUNSETSNDBUF as u32,
                libc::TUNSETVNETHDRSZ as u32,
                libc::TUNSETVNETLE as u32,
            ],
        )],
        "sockets, ranges of block devices, queues of TAPs",
    ),
    row(calls![SYS_accept4 SYS_shutdown SYS_getpeername SYS_getsockname], "sessions, and clients of control"),
    row_if(calls![SYS_getsockopt], &[one_of(1, &[SOCKET])], "the kind and the peer of a socket"),
    row_if(
        calls![SYS_setsockopt],
        &[one_of(1, &[SOCKET]), one_of(2, &[SO_PASSRIGHTS, libc::SO_LINGER as u32])],
        "control without descriptors, and the end of an NBD connection",
    ),
    row_if(calls![SYS_prlimit64], &[one_of(0, &[0]), null(2)], "reading the limit of descriptors"),
    row_if(
        calls![SYS_kcmp],
        &[own_process(0), own_process(1), one_of(2, &[KCMP_FILE])],
        "comparing descriptors that a client sent",
    ),
    row(calls![SYS_waitid], "the reason why a helper ended"),
];

/// The calls of librbd, librados and what these use. Landlock says which files they read.
const RBD: &[Row] = &[
    row(
        calls![SYS_openat SYS_newfstatat SYS_statx SYS_readlinkat SYS_faccessat SYS_getdents64],
        "the configuration of the client, its keys, and that of OpenSSL",
    ),
    #[cfg(target_arch = "x86_64")]
    row(calls![SYS_readlink SYS_access], "files, by the C library"),
    row_if(
        calls![SYS_socket],
        &[one_of(0, &[libc::AF_INET as u32, libc::AF_INET6 as u32])],
        "connections to monitors and OSDs, and to name servers",
    ),
    row(calls![SYS_connect], "connections to monitors and OSDs, and to name servers"),
    row_if(
        calls![SYS_setsockopt],
        &[one_of(1, &[libc::IPPROTO_TCP as u32, libc::IPPROTO_IP as u32, libc::IPPROTO_IPV6 as u32])],
        "connections without delay",
    ),
    row_if(
        calls![SYS_setsockopt],
        &[
            one_of(1, &[SOCKET]),
            one_of(2, &[libc::SO_PRIORITY as u32, libc::SO_RCVBUF as u32, libc::SO_KEEPALIVE as u32]),
        ],
        "connections to monitors and OSDs",
    ),
    row(calls![SYS_uname SYS_sysinfo SYS_getrusage SYS_times], "what the client tells the cluster"),
    #[cfg(target_arch = "x86_64")]
    row(calls![SYS_epoll_create SYS_epoll_wait], "its threads wait"),
];

/// The calls of the opener that use names, and those on the descriptors that result.
const OPENER_NAMES: &[Row] = &[
    row(calls![SYS_openat SYS_statx SYS_newfstatat SYS_readlinkat SYS_getcwd], "files, and their real paths"),
    row(calls![SYS_faccessat], "real paths with `..`, by the C library"),
    #[cfg(target_arch = "x86_64")]
    row(calls![SYS_open SYS_stat SYS_lstat SYS_readlink SYS_access], "the same, by the C library"),
    row(calls![SYS_fstat SYS_lseek SYS_flock SYS_fchmod], "what was opened"),
    row(calls![SYS_fchmodat SYS_fchownat SYS_unlinkat], "names of sockets in their directory"),
    row_if(
        calls![SYS_fcntl],
        &[one_of(
            1,
            &[
                libc::F_GETFD as u32,
                libc::F_SETFD as u32,
                libc::F_GETFL as u32,
                libc::F_SETFL as u32,
                libc::F_DUPFD_CLOEXEC as u32,
                libc::F_ADD_SEALS as u32,
            ],
        )],
        "flags, and seals of the configuration's text",
    ),
    row_if(
        calls![SYS_socket],
        &[one_of(0, &[libc::AF_UNIX as u32, libc::AF_INET as u32, libc::AF_INET6 as u32]), STREAM],
        "sockets of devices and of control, and connections to servers",
    ),
    row(
        calls![SYS_bind SYS_listen SYS_connect],
        "sockets of devices and of control, connections to servers, and to systemd",
    ),
    row_if(calls![SYS_getsockopt], &[one_of(1, &[SOCKET])], "the result of a connection"),
    row_if(
        calls![SYS_setsockopt],
        &[one_of(1, &[SOCKET]), one_of(2, &[libc::SO_KEEPALIVE as u32, libc::SO_LINGER as u32])],
        "TCP connections to NBD servers",
    ),
    row_if(
        calls![SYS_setsockopt],
        &[
            one_of(1, &[libc::IPPROTO_TCP as u32]),
            one_of(
                2,
                &[
                    libc::TCP_NODELAY as u32,
                    libc::TCP_KEEPIDLE as u32,
                    libc::TCP_KEEPINTVL as u32,
                    libc::TCP_KEEPCNT as u32,
                ],
            ),
        ],
        "TCP connections to NBD servers",
    ),
    row_if(calls![SYS_ioctl], &[one_of(1, &[libc::TUNSETIFF as u32])], "queues of TAPs"),
    row(calls![SYS_recvmsg SYS_sendmsg SYS_memfd_create SYS_ftruncate], "requests and replies"),
    row(calls![SYS_shutdown], "its own sockets, at its end"),
];

/// The calls of the exporter on its sockets.
const EXPORTER_SOCKETS: &[Row] = &[
    row(calls![SYS_accept4 SYS_shutdown SYS_getsockopt], "clients"),
    row_if(calls![SYS_socket], &[one_of(0, &[libc::AF_UNIX as u32]), STREAM], "the control socket"),
    row(calls![SYS_connect], "the control socket, for each answer, because its process can be restarted"),
    row(calls![SYS_recvfrom SYS_recvmsg], "questions and answers"),
    row_if(
        calls![SYS_setsockopt],
        &[one_of(1, &[SOCKET]), one_of(2, &[libc::SO_RCVTIMEO as u32, libc::SO_SNDTIMEO as u32])],
        "times after which a peer is given up",
    ),
    row_if(calls![SYS_ioctl], &[one_of(1, &[libc::FIONBIO as u32])], "waiting, or not"),
    row_if(calls![SYS_fcntl], &[one_of(1, &[libc::F_GETFD as u32])], "a build for tests, before each close"),
];

/// Calls that nothing here makes, and that an attacker wants most. A refusal could be tried around, so they
/// end the process.
const KILL: &[Row] = &[
    row(calls![SYS_execve SYS_execveat], "other programs"),
    row(
        calls![SYS_ptrace SYS_process_vm_readv SYS_process_vm_writev SYS_process_madvise],
        "memory of other processes",
    ),
    row(calls![SYS_bpf SYS_perf_event_open SYS_userfaultfd], "programs and events in the kernel"),
    row(
        calls![
            SYS_mount SYS_umount2 SYS_pivot_root SYS_move_mount SYS_open_tree SYS_fsopen SYS_fsconfig SYS_fsmount
            SYS_fspick SYS_mount_setattr SYS_swapon SYS_swapoff
        ],
        "file systems",
    ),
    row(calls![SYS_setns SYS_unshare SYS_open_by_handle_at], "ways out of namespaces"),
    row(
        calls![
            SYS_init_module SYS_finit_module SYS_delete_module SYS_kexec_load SYS_kexec_file_load SYS_reboot
        ],
        "the kernel",
    ),
    row(calls![SYS_keyctl SYS_add_key SYS_request_key], "keys"),
    #[cfg(target_arch = "x86_64")]
    row(calls![SYS_iopl SYS_ioperm], "ports of devices"),
];

/// A stream socket, with any flags.
const STREAM: Condition = Condition {
    argument: 1,
    test: Test::Bits {
        mask: !(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) as u32,
        value: libc::SOCK_STREAM as u32,
    },
};
const SOCKET: u32 = libc::SOL_SOCKET as u32;
/// Takes or refuses descriptors, since Linux 6.16 (asm-generic/socket.h).
const SO_PASSRIGHTS: u32 = 83;
/// Compares open file descriptions (linux/kcmp.h).
const KCMP_FILE: u32 = 0;
/// Ranges of block devices (linux/fs.h).
const BLKDISCARD: u32 = 0x1277;
const BLKZEROOUT: u32 = 0x127f;
/// Operations of `io_uring_register` (linux/io_uring.h).
const URING_UNREGISTER_FILES: u32 = 3;
const URING_UPDATE_FILES: u32 = 6;
const URING_ENABLE: u32 = 12;

const _: () = assert!(size_of::<c_long>() == 8, "conditions and registers are those of 64-bit processors");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_has_its_reason_and_no_condition_is_undone() {
        for profile in [&DATA, &DATA_WITH_RBD, &OPENER, &EXPORTER] {
            let rows: Vec<_> = profile.rows().collect();
            for (at, row) in rows.iter().enumerate() {
                assert!(!row.calls.is_empty() && !row.reason.is_empty());
                for call in row.calls {
                    let others = rows.iter().skip(at + 1).filter(|other| other.calls.contains(call));
                    // A second row without a condition would allow all that the first one refuses.
                    for other in others {
                        assert!(!row.when.is_empty() && !other.when.is_empty(), "{}", call.name);
                    }
                    assert!(!profile.kill.iter().any(|kill| kill.calls.contains(call)), "{}", call.name);
                }
            }
        }
    }

    #[test]
    fn the_data_path_has_no_conditions() {
        assert!(DATA_PATH.iter().all(|row| row.when.is_empty()));
    }

    #[test]
    fn a_thread_of_glibc_and_of_musl() {
        assert_eq!(THREAD, [0x3d_0f00, 0x7d_0f00]);
    }

    #[test]
    fn a_profile_is_a_list_for_readers() {
        let text = DATA.to_string();
        assert!(
            text.contains("\ntgkill if argument 1 is the own process: abort and raise, in this process\n")
        );
        assert!(text.contains("\nall others: EPERM\nthe process ends: execve, execveat: other programs\n"));
        assert!(OPENER.to_string().contains(
            "socket if argument 1 is 0x1 or 0x2 or 0xa and argument 2 is 0x1 within 0xfff7f7ff: sockets"
        ));
    }
}
