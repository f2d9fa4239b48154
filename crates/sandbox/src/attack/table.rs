//! The calls that are tried.

use std::ffi::CStr;

use libc::*;

use self::Arg::{
    Bytes, Code, Memfd, Netlink, OwnGroup, OwnProcess, OwnThread, OwnUser, Parent, Text, Zeroes,
};

/// An argument of a call.
#[derive(Clone, Copy, Debug)]
pub(super) enum Arg {
    Number(i64),
    Text(&'static CStr),
    Bytes(&'static [u8]),
    /// The address of a page of zeroes, which the call may write to.
    Zeroes,
    /// The address of a page of this program's own code.
    Code,
    /// A new file in memory.
    Memfd,
    /// The socket of this process for events of the kernel.
    Netlink,
    /// The process that started this one.
    Parent,
    OwnProcess,
    OwnThread,
    OwnUser,
    OwnGroup,
}

/// A try: its name, and the number and the arguments of its call.
pub(super) type Try = (&'static str, c_long, &'static [Arg]);

/// A descriptor, an address or a process that is none.
const NONE: Arg = Arg::Number(-1);
const ZERO: Arg = Arg::Number(0);
const HERE: Arg = Arg::Number(AT_FDCWD as i64);
const FILE: Arg = Text(c"/dev/null");
const LINK: Arg = Text(c"/proc/self/exe");
const ROOT: Arg = Text(c"/");
const MISSING: Arg = Text(c"/none/none");
const BYTES: Arg = number(4096);

const fn number(number: i64) -> Arg {
    Arg::Number(number)
}

/// Returns all tries.
pub(super) fn calls() -> impl Iterator<Item = &'static Try> {
    [FILES, OLD, NEW, SOCKETS, PROCESSES, RIGHTS, MEMORY, DESCRIPTORS, FATAL].into_iter().flatten()
}

/// Returns whether a call returns in two processes.
pub(super) fn makes_a_process(number: c_long) -> bool {
    #[cfg(target_arch = "x86_64")]
    if number == SYS_fork {
        return true;
    }
    number == SYS_clone
}

/// Files by their names.
const FILES: &[Try] = &[
    ("openat", SYS_openat, &[HERE, FILE, ZERO]),
    ("openat:write", SYS_openat, &[HERE, FILE, number(O_RDWR as i64)]),
    ("statx", SYS_statx, &[HERE, FILE, ZERO, ZERO, Zeroes]),
    ("newfstatat", SYS_newfstatat, &[HERE, FILE, Zeroes, ZERO]),
    ("faccessat", SYS_faccessat, &[HERE, FILE, ZERO]),
    ("readlinkat", SYS_readlinkat, &[HERE, LINK, Zeroes, BYTES]),
    ("chdir", SYS_chdir, &[MISSING]),
    ("fchdir", SYS_fchdir, &[NONE]),
    ("chroot", SYS_chroot, &[MISSING]),
    ("getcwd", SYS_getcwd, &[Zeroes, BYTES]),
    ("getdents64", SYS_getdents64, &[NONE, Zeroes, BYTES]),
    ("truncate", SYS_truncate, &[MISSING, ZERO]),
    ("renameat2", SYS_renameat2, &[HERE, MISSING, HERE, MISSING, ZERO]),
    ("unlinkat", SYS_unlinkat, &[HERE, MISSING, ZERO]),
    ("mkdirat", SYS_mkdirat, &[HERE, ROOT, ZERO]),
    ("mknodat", SYS_mknodat, &[HERE, ROOT, number(S_IFREG as i64), ZERO]),
    ("linkat", SYS_linkat, &[HERE, MISSING, HERE, MISSING, ZERO]),
    ("symlinkat", SYS_symlinkat, &[FILE, HERE, ROOT]),
    ("fchmod", SYS_fchmod, &[Memfd, number(0o600)]),
    ("fchmodat", SYS_fchmodat, &[HERE, MISSING, ZERO]),
    ("fchown", SYS_fchown, &[Memfd, NONE, NONE]),
    ("fchownat", SYS_fchownat, &[HERE, MISSING, NONE, NONE, ZERO]),
    ("utimensat", SYS_utimensat, &[HERE, MISSING, ZERO, ZERO]),
    ("statfs", SYS_statfs, &[ROOT, Zeroes]),
    ("getxattr", SYS_getxattr, &[MISSING, Text(c"user.none"), Zeroes, BYTES]),
    ("setxattr", SYS_setxattr, &[MISSING, Text(c"user.none"), Zeroes, BYTES, ZERO]),
    ("fsetxattr", SYS_fsetxattr, &[NONE, Text(c"user.none"), Zeroes, BYTES, ZERO]),
    ("inotify_init1", SYS_inotify_init1, &[ZERO]),
    ("inotify_add_watch", SYS_inotify_add_watch, &[NONE, ROOT, number(1)]),
    ("fanotify_init", SYS_fanotify_init, &[NONE, ZERO]),
    ("fanotify_mark", SYS_fanotify_mark, &[NONE, ZERO, ZERO, NONE, ZERO]),
    ("name_to_handle_at", SYS_name_to_handle_at, &[HERE, FILE, Zeroes, Zeroes, ZERO]),
    ("mq_open", SYS_mq_open, &[Text(c"none"), ZERO, ZERO, ZERO]),
    ("acct", SYS_acct, &[MISSING]),
    ("quotactl", SYS_quotactl, &[NONE, MISSING, ZERO, ZERO]),
    ("sync", SYS_sync, &[]),
];

/// Calls that only the oldest architecture has.
#[cfg(target_arch = "x86_64")]
const OLD: &[Try] = &[
    ("open", SYS_open, &[FILE, ZERO]),
    ("creat", SYS_creat, &[MISSING, ZERO]),
    ("stat", SYS_stat, &[FILE, Zeroes]),
    ("lstat", SYS_lstat, &[FILE, Zeroes]),
    ("access", SYS_access, &[FILE, ZERO]),
    ("readlink", SYS_readlink, &[LINK, Zeroes, BYTES]),
    ("rename", SYS_rename, &[MISSING, MISSING]),
    ("unlink", SYS_unlink, &[MISSING]),
    ("rmdir", SYS_rmdir, &[MISSING]),
    ("mkdir", SYS_mkdir, &[ROOT, ZERO]),
    ("mknod", SYS_mknod, &[ROOT, number(S_IFREG as i64), ZERO]),
    ("link", SYS_link, &[MISSING, MISSING]),
    ("symlink", SYS_symlink, &[FILE, ROOT]),
    ("chmod", SYS_chmod, &[MISSING, ZERO]),
    ("chown", SYS_chown, &[MISSING, NONE, NONE]),
    ("fork", SYS_fork, &[]),
    ("alarm", SYS_alarm, &[ZERO]),
    ("arch_prctl", SYS_arch_prctl, &[number(0x1003), Zeroes]),
    ("modify_ldt", SYS_modify_ldt, &[ZERO, Zeroes, BYTES]),
    ("dup2", SYS_dup2, &[NONE, NONE]),
    // Its numbers have this bit.
    ("x32", 0x4000_0000 | SYS_read, &[NONE, Zeroes, ZERO]),
];
#[cfg(not(target_arch = "x86_64"))]
const OLD: &[Try] = &[];

/// Calls that are newer than the list of the filter.
const NEW: &[Try] = &[
    ("clone3", SYS_clone3, &[ZERO, ZERO]),
    ("openat2", SYS_openat2, &[HERE, FILE, Zeroes, number(24)]),
    ("faccessat2", SYS_faccessat2, &[HERE, FILE, ZERO, ZERO]),
    ("fchmodat2", 452, &[HERE, MISSING, ZERO, ZERO]),
    ("close_range", SYS_close_range, &[NONE, ZERO, ZERO]),
    ("pidfd_getfd", SYS_pidfd_getfd, &[NONE, ZERO, ZERO]),
    ("epoll_pwait2", SYS_epoll_pwait2, &[NONE, Zeroes, number(1), ZERO, ZERO, ZERO]),
    ("landlock_create_ruleset", SYS_landlock_create_ruleset, &[ZERO, ZERO, number(1)]),
    ("memfd_secret", SYS_memfd_secret, &[NONE]),
    ("number-599", 599, &[]),
];

const fn socket(family: c_int, kind: c_int) -> [Arg; 3] {
    [number(family as i64), number(kind as i64), ZERO]
}

/// Sockets.
const SOCKETS: &[Try] = &[
    ("socket:unix", SYS_socket, &socket(AF_UNIX, SOCK_STREAM)),
    ("socket:unix-datagram", SYS_socket, &socket(AF_UNIX, SOCK_DGRAM)),
    ("socket:inet", SYS_socket, &socket(AF_INET, SOCK_STREAM)),
    ("socket:inet6", SYS_socket, &socket(AF_INET6, SOCK_DGRAM)),
    ("socket:netlink", SYS_socket, &socket(AF_NETLINK, SOCK_RAW)),
    ("socket:packet", SYS_socket, &socket(AF_PACKET, SOCK_RAW)),
    ("socket:vsock", SYS_socket, &socket(AF_VSOCK, SOCK_STREAM)),
    ("socket:alg", SYS_socket, &socket(AF_ALG, SOCK_SEQPACKET)),
    ("socket:xdp", SYS_socket, &socket(AF_XDP, SOCK_RAW)),
    ("socketpair", SYS_socketpair, &[number(AF_UNIX as i64), number(SOCK_DGRAM as i64), ZERO, Zeroes]),
    ("bind", SYS_bind, &[NONE, Zeroes, number(16)]),
    ("connect", SYS_connect, &[NONE, Zeroes, number(16)]),
    ("listen", SYS_listen, &[NONE, number(1)]),
    // A message that connects its socket.
    ("sendto:connect", SYS_sendto, &[NONE, Bytes(b"x"), number(1), number(MSG_FASTOPEN as i64), ZERO, ZERO]),
    ("sendmsg:connect", SYS_sendmsg, &[NONE, Zeroes, number(MSG_FASTOPEN as i64)]),
    ("sendto:netlink", SYS_sendto, &[Netlink, Bytes(b"x"), number(1), ZERO, Bytes(&EVENTS), number(12)]),
    ("sendmmsg", SYS_sendmmsg, &[NONE, Zeroes, number(1), ZERO]),
    ("recvmmsg", SYS_recvmmsg, &[NONE, Zeroes, number(1), ZERO, ZERO]),
    ("setsockopt:filter", SYS_setsockopt, &option(SOL_SOCKET, SO_ATTACH_FILTER)),
    ("setsockopt:bpf", SYS_setsockopt, &option(SOL_SOCKET, SO_ATTACH_BPF)),
    ("setsockopt:device", SYS_setsockopt, &option(SOL_SOCKET, SO_BINDTODEVICE)),
    ("setsockopt:tcp", SYS_setsockopt, &option(IPPROTO_TCP, TCP_ULP)),
    ("getsockopt:netlink", SYS_getsockopt, &option(SOL_NETLINK, NETLINK_LIST_MEMBERSHIPS)),
];

/// The address of all listeners for events of the kernel: a family, and the first group.
const EVENTS: [u8; 12] = [AF_NETLINK as u8, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];

const fn option(level: c_int, name: c_int) -> [Arg; 5] {
    [NONE, number(level as i64), number(name as i64), Zeroes, number(16)]
}

/// A page that is private memory, and the permissions of executable memory.
const PRIVATE: Arg = number((MAP_PRIVATE | MAP_ANONYMOUS) as i64);
const CODE: Arg = number((PROT_READ | PROT_EXEC) as i64);
const ALL: Arg = number((PROT_READ | PROT_WRITE | PROT_EXEC) as i64);

/// Other processes.
const PROCESSES: &[Try] = &[
    ("clone:fork", SYS_clone, &[number(SIGCHLD as i64), ZERO, ZERO, ZERO, ZERO]),
    ("clone:files", SYS_clone, &[number((CLONE_FILES | SIGCHLD) as i64), ZERO, ZERO, ZERO, ZERO]),
    ("clone:user", SYS_clone, &[number((CLONE_NEWUSER | SIGCHLD) as i64), ZERO, ZERO, ZERO, ZERO]),
    // The kernel refuses a thread with memory of its own.
    ("clone:thread", SYS_clone, &[number(CLONE_THREAD as i64), ZERO, ZERO, ZERO, ZERO]),
    ("kill:parent", SYS_kill, &[Parent, ZERO]),
    ("kill:own", SYS_kill, &[OwnProcess, ZERO]),
    ("kill:group", SYS_kill, &[ZERO, ZERO]),
    ("tkill", SYS_tkill, &[OwnThread, ZERO]),
    ("tgkill:parent", SYS_tgkill, &[Parent, Parent, ZERO]),
    ("rt_tgsigqueueinfo", SYS_rt_tgsigqueueinfo, &[OwnProcess, OwnThread, NONE, Zeroes]),
    ("pidfd_open", SYS_pidfd_open, &[Parent, ZERO]),
    ("pidfd_send_signal", SYS_pidfd_send_signal, &[NONE, ZERO, ZERO, ZERO]),
    ("wait4", SYS_wait4, &[OwnProcess, ZERO, ZERO, ZERO]),
    ("kcmp:parent", SYS_kcmp, &[Parent, OwnProcess, ZERO, ZERO, ZERO]),
    ("kcmp:memory", SYS_kcmp, &[OwnProcess, OwnProcess, number(1), ZERO, ZERO]),
    ("prlimit64:parent", SYS_prlimit64, &[Parent, ZERO, ZERO, Zeroes]),
    ("sched_setaffinity", SYS_sched_setaffinity, &[Parent, ZERO, Zeroes]),
    ("sched_setscheduler", SYS_sched_setscheduler, &[Parent, NONE, Zeroes]),
    ("setpriority", SYS_setpriority, &[NONE, ZERO, ZERO]),
    ("ioprio_set", SYS_ioprio_set, &[NONE, ZERO, ZERO]),
    ("get_robust_list", SYS_get_robust_list, &[NONE, Zeroes, Zeroes]),
    ("move_pages", SYS_move_pages, &[Parent, ZERO, ZERO, ZERO, ZERO, ZERO]),
    ("setpgid", SYS_setpgid, &[NONE, ZERO]),
    ("shmget", SYS_shmget, &[number(1), ZERO, ZERO]),
    ("semget", SYS_semget, &[number(1), ZERO, ZERO]),
    ("msgget", SYS_msgget, &[number(1), ZERO]),
];

/// Rights and settings of this process and of the machine.
const RIGHTS: &[Try] = &[
    ("setuid", SYS_setuid, &[OwnUser]),
    ("setgid", SYS_setgid, &[OwnGroup]),
    ("setresuid", SYS_setresuid, &[NONE, NONE, NONE]),
    ("setfsuid", SYS_setfsuid, &[NONE]),
    ("setgroups", SYS_setgroups, &[number(1 << 20), ZERO]),
    ("capset", SYS_capset, &[ZERO, ZERO]),
    ("prctl:bounding-set", SYS_prctl, &[number(PR_CAPBSET_READ as i64), ZERO]),
    ("prctl:no-new-privileges", SYS_prctl, &[number(PR_SET_NO_NEW_PRIVS as i64), ZERO, ZERO, ZERO, ZERO]),
    ("prctl:capabilities", SYS_prctl, &[number(PR_GET_KEEPCAPS as i64)]),
    ("prctl:filter", SYS_prctl, &[number(PR_SET_SECCOMP as i64), NONE, ZERO]),
    ("prctl:tracer", SYS_prctl, &[number(PR_SET_PTRACER as i64), ZERO]),
    ("prctl:dumpable", SYS_prctl, &[number(PR_GET_DUMPABLE as i64)]),
    ("seccomp", SYS_seccomp, &[NONE, ZERO, ZERO]),
    ("personality", SYS_personality, &[number(0xffff_ffff)]),
    ("setrlimit", SYS_setrlimit, &[number(99), Zeroes]),
    ("prlimit64:set", SYS_prlimit64, &[ZERO, number(99), Zeroes, ZERO]),
    ("sethostname", SYS_sethostname, &[ZERO, NONE]),
    ("setdomainname", SYS_setdomainname, &[ZERO, NONE]),
    ("settimeofday", SYS_settimeofday, &[ZERO, ZERO]),
    ("clock_settime", SYS_clock_settime, &[number(99), Zeroes]),
    ("adjtimex", SYS_adjtimex, &[ZERO]),
    ("syslog", SYS_syslog, &[NONE, ZERO, ZERO]),
    ("setitimer", SYS_setitimer, &[NONE, ZERO, ZERO]),
    ("timer_create", SYS_timer_create, &[NONE, ZERO, ZERO]),
    ("timerfd_gettime", SYS_timerfd_gettime, &[NONE, Zeroes]),
    ("signalfd4", SYS_signalfd4, &[NONE, ZERO, ZERO, ZERO]),
    ("membarrier", SYS_membarrier, &[ZERO, ZERO, ZERO]),
];

/// Memory, above all executable memory.
const MEMORY: &[Try] = &[
    ("mmap:code", SYS_mmap, &[ZERO, BYTES, CODE, PRIVATE, NONE, ZERO]),
    ("mmap:code-of-memfd", SYS_mmap, &[ZERO, BYTES, CODE, number(MAP_PRIVATE as i64), Memfd, ZERO]),
    ("mmap:shared-code", SYS_mmap, &[ZERO, BYTES, ALL, number(MAP_SHARED as i64), Memfd, ZERO]),
    ("mprotect:code", SYS_mprotect, &[Zeroes, BYTES, CODE]),
    ("mprotect:own-code", SYS_mprotect, &[Code, BYTES, ALL]),
    ("pkey_mprotect", SYS_pkey_mprotect, &[Zeroes, BYTES, CODE, NONE]),
    ("remap_file_pages", SYS_remap_file_pages, &[Zeroes, BYTES, NONE, ZERO, ZERO]),
    ("shmat", SYS_shmat, &[NONE, ZERO, ZERO]),
    ("mlockall", SYS_mlockall, &[NONE]),
    ("mbind", SYS_mbind, &[Zeroes, BYTES, NONE, ZERO, ZERO, ZERO]),
    ("migrate_pages", SYS_migrate_pages, &[Parent, NONE, ZERO, ZERO]),
];

/// Operations on descriptors, and new ones.
const DESCRIPTORS: &[Try] = &[
    ("io_uring_setup", SYS_io_uring_setup, &[number(1), Zeroes]),
    ("io_uring_register:buffers", SYS_io_uring_register, &[NONE, ZERO, ZERO, ZERO]),
    ("io_uring_register:files", SYS_io_uring_register, &[NONE, number(2), ZERO, ZERO]),
    ("io_uring_register:eventfd", SYS_io_uring_register, &[NONE, number(4), ZERO, number(1)]),
    ("io_uring_register:personality", SYS_io_uring_register, &[NONE, number(9), ZERO, ZERO]),
    ("io_uring_register:restrictions", SYS_io_uring_register, &[NONE, number(11), ZERO, number(1)]),
    ("io_uring_register:rings", SYS_io_uring_register, &[NONE, number(20), ZERO, number(1)]),
    ("io_uring_register:buffer-ring", SYS_io_uring_register, &[NONE, number(22), ZERO, number(1)]),
    ("fcntl:owner", SYS_fcntl, &[Memfd, number(F_SETOWN as i64), Parent]),
    ("fcntl:owner-thread", SYS_fcntl, &[Memfd, number(15), Zeroes]),
    ("fcntl:signal", SYS_fcntl, &[Memfd, number(10), ZERO]),
    ("fcntl:lease", SYS_fcntl, &[Memfd, number(F_SETLEASE as i64), number(F_UNLCK as i64)]),
    ("fcntl:notify", SYS_fcntl, &[NONE, number(F_NOTIFY as i64), ZERO]),
    ("fcntl:lock", SYS_fcntl, &[NONE, number(F_SETLK as i64), Zeroes]),
    ("ioctl:tiocsti", SYS_ioctl, &[NONE, number(TIOCSTI as i64), Zeroes]),
    ("ioctl:tioclinux", SYS_ioctl, &[NONE, number(0x541c), Zeroes]),
    ("ioctl:tunsetiff", SYS_ioctl, &[NONE, number(TUNSETIFF as i64), Zeroes]),
    ("ioctl:siocgifconf", SYS_ioctl, &[NONE, number(0x8912), Zeroes]),
    ("ioctl:fs_ioc_setflags", SYS_ioctl, &[NONE, number(0x4008_6602), Zeroes]),
    ("ioctl:ficlone", SYS_ioctl, &[NONE, number(0x4004_9409), NONE]),
    ("dup3", SYS_dup3, &[NONE, ZERO, ZERO]),
    ("sendfile", SYS_sendfile, &[NONE, NONE, ZERO, ZERO]),
    ("copy_file_range", SYS_copy_file_range, &[NONE, ZERO, NONE, ZERO, number(1), ZERO]),
    ("vmsplice", SYS_vmsplice, &[NONE, ZERO, ZERO, ZERO]),
    ("tee", SYS_tee, &[NONE, NONE, number(1), ZERO]),
    ("syncfs", SYS_syncfs, &[NONE]),
];

/// Calls that end the process.
const FATAL: &[Try] = &[
    ("execve", SYS_execve, &[MISSING, ZERO, ZERO]),
    ("execveat", SYS_execveat, &[Memfd, Text(c""), ZERO, ZERO, number(AT_EMPTY_PATH as i64)]),
    ("ptrace", SYS_ptrace, &[number(PTRACE_ATTACH as i64), ZERO, ZERO, ZERO]),
    ("process_vm_readv", SYS_process_vm_readv, &[Parent, Zeroes, number(1), Zeroes, number(1), ZERO]),
    ("process_vm_writev", SYS_process_vm_writev, &[Parent, Zeroes, number(1), Zeroes, number(1), ZERO]),
    ("process_madvise", SYS_process_madvise, &[NONE, Zeroes, number(1), ZERO, ZERO]),
    ("bpf", SYS_bpf, &[NONE, Zeroes, BYTES]),
    ("perf_event_open", SYS_perf_event_open, &[ZERO, ZERO, NONE, NONE, ZERO]),
    ("userfaultfd", SYS_userfaultfd, &[number(O_CLOEXEC as i64)]),
    ("mount", SYS_mount, &[ZERO, ZERO, ZERO, ZERO, ZERO]),
    ("umount2", SYS_umount2, &[MISSING, ZERO]),
    ("pivot_root", SYS_pivot_root, &[MISSING, MISSING]),
    ("move_mount", SYS_move_mount, &[HERE, MISSING, HERE, MISSING, ZERO]),
    ("open_tree", SYS_open_tree, &[HERE, MISSING, ZERO]),
    ("fsopen", SYS_fsopen, &[Text(c"none"), ZERO]),
    ("fsconfig", SYS_fsconfig, &[NONE, ZERO, ZERO, ZERO, ZERO]),
    ("fsmount", SYS_fsmount, &[NONE, ZERO, ZERO]),
    ("fspick", SYS_fspick, &[HERE, MISSING, ZERO]),
    ("mount_setattr", SYS_mount_setattr, &[HERE, MISSING, ZERO, Zeroes, number(32)]),
    ("swapon", SYS_swapon, &[MISSING, ZERO]),
    ("swapoff", SYS_swapoff, &[MISSING]),
    ("setns", SYS_setns, &[NONE, ZERO]),
    ("unshare", SYS_unshare, &[ZERO]),
    ("open_by_handle_at", SYS_open_by_handle_at, &[NONE, Zeroes, ZERO]),
    ("init_module", SYS_init_module, &[ZERO, ZERO, ZERO]),
    ("finit_module", SYS_finit_module, &[NONE, ZERO, ZERO]),
    ("delete_module", SYS_delete_module, &[ZERO, ZERO]),
    ("kexec_load", SYS_kexec_load, &[ZERO, ZERO, ZERO, NONE]),
    ("kexec_file_load", SYS_kexec_file_load, &[NONE, NONE, ZERO, ZERO, NONE]),
    ("reboot", SYS_reboot, &[ZERO, ZERO, ZERO, ZERO]),
    ("keyctl", SYS_keyctl, &[ZERO, number(-4), ZERO]),
    ("add_key", SYS_add_key, &[ZERO, ZERO, ZERO, ZERO, ZERO]),
    ("request_key", SYS_request_key, &[ZERO, ZERO, ZERO, ZERO]),
    #[cfg(target_arch = "x86_64")]
    ("iopl", SYS_iopl, &[number(4)]),
    #[cfg(target_arch = "x86_64")]
    ("ioperm", SYS_ioperm, &[NONE, ZERO, ZERO]),
];
