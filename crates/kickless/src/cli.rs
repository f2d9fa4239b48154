//! The command line: what can be said, and what it means.
//!
//! QEMU's conventions for vhost-user back-end programs hold (QEMU `docs/interop/vhost-user.rst`, "Backend program
//! conventions"), so that tools which follow them can start us.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand, ValueEnum};
use kickless_disk::Cache;
use kickless_io::{EngineKind, UnknownEngine};

use crate::bench::Bench;
use crate::cpus::parse_cpus;
use crate::size::parse_size;

/// The name under which the program is the block back-end without being told so.
const BLK_NAME: &str = "kickless-blk";
/// VIRTIO_BLK_T_GET_ID answers with this many bytes (virtio 1.3, section 5.2.6).
const SERIAL_BYTES_MAX: usize = 20;
/// A vhost-user kick names its queue in eight bits.
const NUM_QUEUES_MAX: i64 = 256;
/// The largest virtqueue there is (virtio 1.3, section 2.7).
const QUEUE_SIZE_MAX: u16 = 32768;
/// Block sizes, capacities and requests are counted in these.
const SECTOR_BYTES: u64 = 512;

/// Virtual machine disks over vhost-user.
#[derive(Debug, Parser)]
#[command(name = "kickless", version, max_term_width = 100)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Which log lines to print on standard error: error, warn, info, debug, trace or off; or, for single parts, a
    /// list such as info,kickless_vhost=debug
    #[arg(long, global = true, value_name = "FILTER", env = "KICKLESS_LOG", default_value = "info")]
    pub(crate) log_level: String,
}

/// The parts of the program.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve a disk to the virtual machines that connect, one after the other
    Blk(BlkOptions),
    /// Put load on back-ends and measure them
    #[command(subcommand)]
    Bench(Bench),
}

/// `kickless blk`.
#[derive(Debug, Args)]
pub(crate) struct BlkOptions {
    /// Listen on this unix socket
    #[arg(long, value_name = "PATH", conflicts_with = "fd", required_unless_present = "fd")]
    pub(crate) socket_path: Option<PathBuf>,
    /// Use this inherited socket, which listens or is connected; when a connected one is closed, the program ends
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(3..))]
    pub(crate) fd: Option<i32>,
    /// The disk: a file or block device; null:SIZE answers at once and stores nothing; mem:SIZE is a RAM disk
    #[arg(long, value_name = "PATH", value_parser = OsStringValueParser::new().try_map(parse_blk_file))]
    pub(crate) blk_file: BlkFile,
    /// Let guests read only
    #[arg(long)]
    pub(crate) read_only: bool,
    /// What the disk calls itself, 20 bytes at most [default: something that tells it from the others here]
    #[arg(long, value_name = "TEXT", value_parser = parse_serial)]
    pub(crate) serial: Option<String>,
    /// The most queues a virtual machine may use
    #[arg(long, value_name = "N", default_value = "64", value_parser = clap::value_parser!(u16).range(1..=NUM_QUEUES_MAX))]
    pub(crate) num_queues: u16,
    /// The most requests a queue may hold, a power of two
    #[arg(long, value_name = "N", default_value = "1024", value_parser = parse_queue_size)]
    pub(crate) queue_size: u16,
    /// How I/O is done: io_uring, threads, or auto, the best of them that works here
    #[arg(long, value_name = "ENGINE", default_value_t = EngineKind::Auto, value_parser = parse_engine)]
    pub(crate) engine: EngineKind,
    /// Whether the host's page cache is used: none or writeback
    #[arg(long, value_name = "MODE", default_value_t = Cache::None, value_parser = str::parse::<Cache>)]
    pub(crate) cache: Cache,
    /// Whether to lock the disk against other users, as QEMU does
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub(crate) lock: Switch,
    /// A virtual machine will be migrated in: another host may still be using the disk at start-up
    #[arg(long)]
    pub(crate) incoming: bool,
    /// How many threads do the work [default: one, or one for each CPU of --cpu]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) workers: Option<u16>,
    /// Run the workers on these CPUs, such as 0-3,8
    #[arg(long, value_name = "LIST", value_parser = parse_cpu_list)]
    pub(crate) cpu: Option<CpuList>,
    /// The permissions of the socket, such as 0660
    #[arg(long, value_name = "OCTAL", conflicts_with = "fd", value_parser = parse_mode)]
    pub(crate) socket_mode: Option<u32>,
    /// The group of the socket, by name or number
    #[arg(long, value_name = "GROUP", conflicts_with = "fd")]
    pub(crate) socket_group: Option<String>,
    /// Say in JSON what this back-end can do, and do nothing else
    #[arg(long)]
    print_capabilities: bool,
}

/// `--blk-file`: what lies behind the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BlkFile {
    /// A file or a block device.
    Path(PathBuf),
    /// Nothing: reads give zeroes, writes are forgotten. Bytes.
    Null(u64),
    /// Memory of this process. Bytes.
    Memory(u64),
}

/// `on` or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    /// `on`.
    On,
    /// `off`.
    Off,
}

/// `--cpu`, in the order given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CpuList(pub(crate) Vec<usize>);

/// What the command line amounts to.
#[derive(Debug)]
pub(crate) enum Request {
    /// Do something.
    Run(Box<Cli>),
    /// Print what the block back-end can do.
    PrintCapabilities,
    /// Print this text, which was asked for.
    Print(String),
}

/// Reads a command line, the program's own name first.
///
/// # Errors
/// What is wrong with it: one sentence.
pub(crate) fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Request, String> {
    let mut arguments: Vec<OsString> = arguments.into_iter().collect();
    let called = arguments.first().map(PathBuf::from);
    if called.as_deref().and_then(Path::file_name).is_some_and(|name| name == BLK_NAME) {
        arguments.insert(1, "blk".into());
    }
    // The convention: whatever else is said with this option is ignored.
    if arguments.get(1).is_some_and(|word| word == "blk")
        && arguments.iter().any(|word| word == "--print-capabilities")
    {
        return Ok(Request::PrintCapabilities);
    }
    let part = if arguments.get(1).is_some_and(|word| word == "bench") { "bench" } else { "blk" };
    match Cli::try_parse_from(arguments) {
        Ok(cli) => {
            match &cli.command {
                Command::Blk(options) => options.check()?,
                Command::Bench(bench) => bench.check()?,
            }
            Ok(Request::Run(Box::new(cli)))
        }
        Err(error) if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            Ok(Request::Print(error.render().to_string()))
        }
        Err(error) => Err(sentence(&error, part)),
    }
}

/// What `error` says, without the usage that follows it.
fn sentence(error: &clap::Error, part: &str) -> String {
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let example =
            if part == "blk" { "--socket-path=PATH --blk-file=PATH" } else { "blk --socket-path=PATH" };
        return format!("say what to do, for example: kickless {part} {example}");
    }
    let text = error.render().to_string();
    let lines = text.lines().take_while(|line| !line.trim().is_empty()).map(str::trim);
    let joined = lines.collect::<Vec<_>>().join(" ");
    let said = joined.strip_prefix("error: ").unwrap_or(&joined);
    format!("{said} (see kickless {part} --help)")
}

impl BlkOptions {
    /// What the options' types cannot say.
    fn check(&self) -> Result<(), String> {
        let workers = usize::from(self.workers());
        if let Some(CpuList(cpus)) = &self.cpu
            && workers < cpus.len()
        {
            return Err(format!(
                "--workers={workers} leaves some of the {} CPUs of --cpu idle: name fewer CPUs or ask for more workers",
                cpus.len()
            ));
        }
        if self.incoming && !matches!(self.blk_file, BlkFile::Path(_)) {
            return Err("--incoming needs a --blk-file that another host can use, not null: or mem:".into());
        }
        Ok(())
    }

    /// How many workers to start.
    pub(crate) fn workers(&self) -> u16 {
        let cpus = self.cpu.as_ref().map_or(1, |list| u16::try_from(list.0.len()).unwrap_or(u16::MAX));
        self.workers.unwrap_or(cpus)
    }
}

fn parse_blk_file(text: OsString) -> Result<BlkFile, String> {
    if text.is_empty() {
        return Err("give the path of a file or block device".into());
    }
    let size = |text: &str| match parse_size(text)? {
        0 => Err("a disk needs a size above 0".into()),
        bytes if bytes > i64::MAX as u64 => Err(format!("{text:?} is too large")),
        bytes if !bytes.is_multiple_of(SECTOR_BYTES) => {
            Err(format!("{text:?} is not a multiple of 512 bytes"))
        }
        bytes => Ok(bytes),
    };
    match text.to_str().and_then(|text| text.split_once(':')) {
        Some(("null", bytes)) => size(bytes).map(BlkFile::Null),
        Some(("mem", bytes)) => size(bytes).map(BlkFile::Memory),
        _ => Ok(BlkFile::Path(text.into())),
    }
}

fn parse_engine(text: &str) -> Result<EngineKind, String> {
    match text {
        "aio" => Err("it is not there yet; use io_uring, threads or auto".into()),
        _ => text.parse().map_err(|error: UnknownEngine| error.to_string()),
    }
}

fn parse_serial(text: &str) -> Result<String, String> {
    if text.len() > SERIAL_BYTES_MAX {
        return Err(format!("it has {} bytes, and {SERIAL_BYTES_MAX} are the most", text.len()));
    }
    if !text.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()) {
        return Err("only printable ASCII characters can be sent to a guest".into());
    }
    Ok(text.into())
}

pub(crate) fn parse_queue_size(text: &str) -> Result<u16, String> {
    match text.parse::<u16>() {
        Ok(size) if size.is_power_of_two() && size <= QUEUE_SIZE_MAX => Ok(size),
        _ => Err(format!("it must be a power of two from 1 to {QUEUE_SIZE_MAX}")),
    }
}

fn parse_cpu_list(text: &str) -> Result<CpuList, String> {
    parse_cpus(text).map(CpuList)
}

fn parse_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 && !text.starts_with('+') => Ok(mode),
        _ => Err("it must be an octal number from 0 to 0777".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Request, String> {
        parse(line.split_whitespace().map(OsString::from))
    }

    fn options(line: &str) -> BlkOptions {
        match parsed(line) {
            Ok(Request::Run(cli)) => {
                let Command::Blk(options) = cli.command else { panic!("{line}") };
                options
            }
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn defaults() {
        let options = options("kickless blk --socket-path=/run/a.sock --blk-file=/a.img");
        assert_eq!(options.socket_path.as_deref(), Some(Path::new("/run/a.sock")));
        assert_eq!(options.blk_file, BlkFile::Path("/a.img".into()));
        assert_eq!((options.num_queues, options.queue_size, options.workers()), (64, 1024, 1));
        assert_eq!(
            (options.engine, options.cache, options.lock),
            (EngineKind::Auto, Cache::None, Switch::On)
        );
        assert!(!options.read_only && !options.incoming && options.serial.is_none());
    }

    #[test]
    fn everything_said() {
        let options = options(
            "/usr/bin/kickless-blk --fd 3 --blk-file mem:1.5G --read-only --serial=disk-1 --num-queues=4 --queue-size=256 \
             --engine=io_uring --cache=writeback --lock=off --workers=4 --cpu=8,0-1",
        );
        assert_eq!(options.fd, Some(3));
        assert_eq!(options.blk_file, BlkFile::Memory(3 << 29));
        assert_eq!((options.num_queues, options.queue_size, options.workers()), (4, 256, 4));
        assert_eq!(
            (options.engine, options.cache, options.lock),
            (EngineKind::Uring, Cache::Writeback, Switch::Off)
        );
        assert_eq!(options.cpu, Some(CpuList(vec![8, 0, 1])));
        assert_eq!(options.serial.as_deref(), Some("disk-1"));
        assert!(options.read_only);
    }

    #[test]
    fn one_worker_for_each_cpu() {
        assert_eq!(options("kickless blk --fd=3 --blk-file=a --cpu=0-2").workers(), 3);
        assert_eq!(options("kickless blk --fd=3 --blk-file=a --cpu=0-2 --workers=6").workers(), 6);
    }

    #[test]
    fn a_path_that_only_looks_like_a_keyword() {
        let options = options("kickless blk --fd=3 --blk-file=./null:1G");
        assert_eq!(options.blk_file, BlkFile::Path("./null:1G".into()));
    }

    #[test]
    fn capabilities_whatever_else_is_said() {
        for line in [
            "kickless blk --print-capabilities",
            "kickless-blk --print-capabilities",
            "/opt/kickless-blk --no-such-option --fd=x --print-capabilities --fd=4",
        ] {
            assert!(matches!(parsed(line), Ok(Request::PrintCapabilities)), "{line}");
        }
        assert!(parsed("kickless --print-capabilities").is_err());
    }

    #[test]
    fn help_and_version_are_no_mistakes() {
        for line in ["kickless --help", "kickless --version", "kickless blk --help", "kickless-blk -h"] {
            assert!(matches!(parsed(line), Ok(Request::Print(_))), "{line}");
        }
    }

    #[test]
    fn each_mistake_gets_one_sentence_that_names_the_option() {
        for (line, named) in [
            ("kickless", "kickless blk"),
            ("kickless blk", "--blk-file"),
            ("kickless blk --blk-file=a", "--socket-path"),
            ("kickless blk --socket-path=s", "--blk-file"),
            ("kickless blk --socket-path= --blk-file=a", "--socket-path"),
            ("kickless blk --socket-path=s --fd=3 --blk-file=a", "--fd"),
            ("kickless blk --fd=0 --blk-file=a", "--fd"),
            ("kickless blk --fd=-1 --blk-file=a", "--fd"),
            ("kickless blk --fd=3 --socket-mode=0600 --blk-file=a", "--socket-mode"),
            ("kickless blk --fd=3 --socket-group=kvm --blk-file=a", "--socket-group"),
            ("kickless blk --fd=3 --blk-file=", "--blk-file"),
            ("kickless blk --fd=3 --blk-file=null:", "--blk-file"),
            ("kickless blk --fd=3 --blk-file=null:0", "--blk-file"),
            ("kickless blk --fd=3 --blk-file=null:1000", "512"),
            ("kickless blk --fd=3 --blk-file=mem:9E", "too large"),
            ("kickless blk --fd=3 --blk-file=a --blk-file=b", "--blk-file"),
            ("kickless blk --fd=3 --blk-file=a --num-queues=0", "--num-queues"),
            ("kickless blk --fd=3 --blk-file=a --num-queues=257", "--num-queues"),
            ("kickless blk --fd=3 --blk-file=a --queue-size=0", "--queue-size"),
            ("kickless blk --fd=3 --blk-file=a --queue-size=300", "power of two"),
            ("kickless blk --fd=3 --blk-file=a --queue-size=65536", "--queue-size"),
            ("kickless blk --fd=3 --blk-file=a --engine=aio", "not there yet"),
            ("kickless blk --fd=3 --blk-file=a --engine=spdk", "--engine"),
            ("kickless blk --fd=3 --blk-file=a --cache=unsafe", "--cache"),
            ("kickless blk --fd=3 --blk-file=a --lock=maybe", "--lock"),
            ("kickless blk --fd=3 --blk-file=a --serial=123456789012345678901", "--serial"),
            ("kickless blk --fd=3 --blk-file=a --serial=disk\u{e9}", "--serial"),
            ("kickless blk --fd=3 --blk-file=a --workers=0", "--workers"),
            ("kickless blk --fd=3 --blk-file=a --workers=1 --cpu=0-3", "--workers"),
            ("kickless blk --fd=3 --blk-file=a --cpu=3-1", "--cpu"),
            ("kickless blk --fd=3 --blk-file=null:1G --incoming", "--incoming"),
            ("kickless blk --socket-path=s --blk-file=a --socket-mode=0999", "--socket-mode"),
            ("kickless blk --socket-path=s --blk-file=a --socket-mode=1777", "--socket-mode"),
            ("kickless blk --fd=3 --blk-file=a --poll=always", "--poll"),
            ("kickless blk --fd=3 --blk-file=a stray", "stray"),
            ("kickless net", "net"),
            ("kickless bench", "kickless bench blk"),
            ("kickless bench blk", "--socket-path"),
            ("kickless bench blk --socket-path=s --depth=0", "--depth"),
            ("kickless bench blk --socket-path=s --block-size=4000", "--block-size"),
            ("kickless bench blk --socket-path=s --read=101", "--read"),
            ("kickless bench blk --socket-path=s --time=1ms", "--time"),
            ("kickless bench blk --socket-path=s --verify", "--verify"),
            ("kickless bench compare a", "TARGET"),
            ("kickless bench compare a b --packed=maybe", "kickless bench --help"),
        ] {
            let sentence = match parsed(line) {
                Err(sentence) => sentence,
                Ok(request) => panic!("{line}: {request:?}"),
            };
            assert!(sentence.contains(named), "{line}: {sentence}");
            assert!(!sentence.contains('\n'), "{line}: {sentence}");
        }
    }
}
