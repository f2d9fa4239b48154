//! The names of disks in options and configuration files.
//!
//! A name is the path of a file, or begins with the word for another kind of disk and a colon. [`DiskSpec`]
//! parses and formats all of them. The command line, the configuration file and the log use it.

pub(crate) mod fault_rules;
pub(crate) mod foreign;
pub(crate) mod nbd_uri;
mod percent;
pub(crate) mod rbd_name;

use crate::{BadRbdName, BadRule, BadUri, FaultRules, NbdUri, RbdName, SECTOR};
use kickless_opener::{Target, descriptor_name};
use kickless_values::{format_size, parse_any_size};
use nbd_uri::Server;
use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The name and the kind of a disk.
///
/// Every build knows all kinds. A text with a kind that this build lacks is refused by the parser.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskSpec {
    /// A raw image or a block device, with its path. `fd:NAME` stands for a descriptor.
    File(PathBuf),
    /// This many bytes of nothing: requests are answered at once, for measuring the rings. `null:SIZE`.
    Null(u64),
    /// This many bytes of RAM, zero at first. `mem:SIZE`.
    Memory(u64),
    /// An image in QEMU's format: `qcow2:PATH`. The format is never guessed from the contents.
    Qcow2(PathBuf),
    /// An export of an NBD server: `nbd://HOST[:PORT]/EXPORT`, `nbd+unix:///EXPORT?socket=PATH`.
    Nbd(NbdUri),
    /// An image of a Ceph cluster: `rbd:POOL/IMAGE`.
    Rbd(Box<RbdName>),
    /// Another disk with faults, for tests. `fault:RULES:DISK`.
    Fault(FaultRules, Box<DiskSpec>),
}

/// The reason why a text does not name a disk. Each is the end of a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadDiskSpec {
    /// The text is empty.
    #[error("give the path of a file or block device")]
    Empty,
    /// `qcow2:` has no path.
    #[error("write qcow2:PATH")]
    NoPath,
    /// `null:` or `mem:` has no size above 0.
    #[error("a disk needs a size above 0")]
    NoSize,
    /// The size is too large for a disk.
    #[error("{0:?} is too large: a disk has less than 8E")]
    TooLarge(String),
    /// The size is not a multiple of 512.
    #[error("{0:?} is not a multiple of 512 bytes (write it like 1M)")]
    PartialSector(String),
    /// The size is invalid: see [`parse_any_size`].
    #[error("{0}")]
    Size(String),
    /// `fault:` has rules and no disk.
    #[error("write fault:RULES:DISK")]
    NoFaultyDisk,
    /// A disk with faults gets faults again.
    #[error("a disk can have one fault: only, with all rules in it")]
    FaultsTwice,
    /// The rules of faults are invalid.
    #[error(transparent)]
    Rule(#[from] BadRule),
    /// The address of an NBD server is invalid.
    #[error(transparent)]
    Nbd(#[from] BadUri),
    /// The name of a Ceph image is invalid.
    #[error(transparent)]
    Rbd(#[from] BadRbdName),
    /// This build lacks the kind of disk.
    #[error("this program was built without the feature {0}: cargo build --features {0} includes it")]
    NotBuilt(&'static str),
}

impl DiskSpec {
    /// Parses the name of a disk. Unlike [`FromStr`], accepts paths that are not UTF-8.
    ///
    /// # Errors
    /// The text does not name a disk, or names a kind that this build lacks.
    pub fn parse(text: &OsStr) -> Result<Self, BadDiskSpec> {
        if text.is_empty() {
            return Err(BadDiskSpec::Empty);
        }
        let spec = match text.as_bytes().strip_prefix(b"qcow2:") {
            Some([]) => return Err(BadDiskSpec::NoPath),
            Some(path) => Self::Qcow2(OsStr::from_bytes(path).into()),
            None => text.to_str().map_or_else(|| Ok(Self::File(text.into())), parse_utf8)?,
        };
        match spec.missing_feature() {
            Some(feature) => Err(BadDiskSpec::NotBuilt(feature)),
            None => Ok(spec),
        }
    }

    /// Returns the feature that this kind of disk needs and this build lacks.
    pub(crate) fn missing_feature(&self) -> Option<&'static str> {
        match self {
            Self::File(_) | Self::Null(_) | Self::Memory(_) | Self::Qcow2(_) | Self::Nbd(_) => None,
            Self::Rbd(_) => (!cfg!(feature = "rbd")).then_some("rbd"),
            Self::Fault(_, under) => under.missing_feature(),
        }
    }

    /// Returns the word for the kind of disk, for the log.
    pub fn format(&self) -> &'static str {
        match self {
            Self::File(_) => "raw",
            Self::Null(_) => "null",
            Self::Memory(_) => "mem",
            Self::Qcow2(_) => "qcow2",
            Self::Nbd(_) => "nbd",
            Self::Rbd(_) => "rbd",
            Self::Fault(_, under) => under.format(),
        }
    }

    /// Returns the path of the file or block device, if the disk is in one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::File(path) | Self::Qcow2(path) => Some(path),
            Self::Null(_) | Self::Memory(_) | Self::Nbd(_) | Self::Rbd(_) => None,
            Self::Fault(_, under) => under.path(),
        }
    }

    /// Returns the thing of the host that the disk uses by its name. It is also written if `writes`.
    pub fn target(&self, writes: bool) -> Option<Target> {
        Some(match self {
            Self::File(path) if descriptor_name(path).is_some() => return None,
            Self::Qcow2(path) if descriptor_name(path).is_some() => Target::Backing,
            Self::File(path) => Target::Image { path: path.clone(), writes, chain: false },
            Self::Qcow2(path) => Target::Image { path: path.clone(), writes, chain: true },
            Self::Null(_) | Self::Memory(_) => return None,
            Self::Nbd(NbdUri { server: Server::Tcp { host, port }, .. }) => {
                Target::Tcp { host: host.clone(), port: *port }
            }
            Self::Nbd(NbdUri { server: Server::Unix(path), .. }) => Target::Unix { path: path.clone() },
            Self::Rbd(name) => Target::Library { name: "rbd".into(), files: name.files() },
            Self::Fault(_, under) => return under.target(writes),
        })
    }

    /// Returns the name of the descriptor for which the path stands.
    pub fn descriptor(&self) -> Option<&str> {
        self.path().and_then(descriptor_name)
    }

    /// Returns whether the disk is an image in QEMU's format.
    pub fn is_qcow2(&self) -> bool {
        match self {
            Self::Qcow2(_) => true,
            Self::File(_) | Self::Null(_) | Self::Memory(_) | Self::Nbd(_) | Self::Rbd(_) => false,
            Self::Fault(_, under) => under.is_qcow2(),
        }
    }

    /// Returns whether the disk ends with the process, so that no other host can use it.
    pub fn is_of_process(&self) -> bool {
        match self {
            Self::Null(_) | Self::Memory(_) => true,
            Self::File(_) | Self::Qcow2(_) | Self::Nbd(_) | Self::Rbd(_) => false,
            Self::Fault(_, under) => under.is_of_process(),
        }
    }
}

/// Parses any name except `qcow2:PATH`, whose path need not be UTF-8.
fn parse_utf8(text: &str) -> Result<DiskSpec, BadDiskSpec> {
    Ok(match text.split_once(':') {
        Some((scheme, rest)) if scheme.starts_with("nbd") && rest.starts_with("//") => {
            DiskSpec::Nbd(text.parse()?)
        }
        Some(("rbd", _)) => DiskSpec::Rbd(Box::new(text.parse()?)),
        Some(("null", bytes)) => DiskSpec::Null(parse_disk_size(bytes)?),
        Some(("mem", bytes)) => DiskSpec::Memory(parse_disk_size(bytes)?),
        Some(("fault", rest)) => {
            let (rules, under) = rest.split_once(':').ok_or(BadDiskSpec::NoFaultyDisk)?;
            let rules = rules.parse()?;
            match under.parse()? {
                DiskSpec::Fault(..) => return Err(BadDiskSpec::FaultsTwice),
                under => DiskSpec::Fault(rules, Box::new(under)),
            }
        }
        _ => DiskSpec::File(text.into()),
    })
}

/// Parses the size of a disk.
///
/// # Errors
/// A disk cannot have this size.
pub fn parse_disk_size(text: &str) -> Result<u64, BadDiskSpec> {
    match parse_any_size(text).map_err(BadDiskSpec::Size)? {
        Some(0) => Err(BadDiskSpec::NoSize),
        Some(bytes) if bytes > i64::MAX as u64 => Err(BadDiskSpec::TooLarge(text.to_owned())),
        Some(bytes) if !bytes.is_multiple_of(SECTOR) => Err(BadDiskSpec::PartialSector(text.to_owned())),
        Some(bytes) => Ok(bytes),
        None => Err(BadDiskSpec::TooLarge(text.to_owned())),
    }
}

impl FromStr for DiskSpec {
    type Err = BadDiskSpec;

    fn from_str(text: &str) -> Result<Self, BadDiskSpec> {
        Self::parse(text.as_ref())
    }
}

impl fmt::Display for DiskSpec {
    /// Formats the name so that [`DiskSpec::parse`] returns the same disk, if its path is UTF-8.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => {
                // A path may begin like another kind of disk.
                let reads_otherwise = !matches!(Self::parse(path.as_os_str()), Ok(Self::File(_)));
                write!(f, "{}{}", if reads_otherwise { "./" } else { "" }, path.display())
            }
            Self::Null(bytes) => write!(f, "null:{}", format_size(*bytes)),
            Self::Memory(bytes) => write!(f, "mem:{}", format_size(*bytes)),
            Self::Qcow2(path) => write!(f, "qcow2:{}", path.display()),
            Self::Nbd(uri) => uri.fmt(f),
            Self::Rbd(name) => name.fmt(f),
            Self::Fault(rules, under) => write!(f, "fault:{rules}:{under}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parsed(text: &str) -> DiskSpec {
        text.parse().unwrap()
    }

    #[test]
    fn kinds() {
        assert_eq!(parsed("null:1G"), DiskSpec::Null(1 << 30));
        assert_eq!(parsed("mem:1.5k"), DiskSpec::Memory(1536));
        assert_eq!(parsed("null:1G").to_string(), "null:1G");
        for text in ["/srv/a.img", "./null:1G", "nbd:host", "qcow2/a", "rbd/a", "file:a", "memory:1G"] {
            assert_eq!(parsed(text), DiskSpec::File(text.into()));
            assert_eq!(parsed(text).to_string(), text);
        }
        let faulty = parsed("fault:eio@1%+read,seed=7:null:1G");
        assert_eq!(
            faulty,
            DiskSpec::Fault("seed=7,eio@read+1%".parse().unwrap(), Box::new(DiskSpec::Null(1 << 30)))
        );
        assert_eq!(faulty.to_string(), "fault:eio@1%+read,seed=7:null:1G");
    }

    #[test]
    fn a_path_that_looks_like_another_kind() {
        for text in ["null:1G", "qcow2:a", "nbd://host", "rbd:a/b", "fault:eio:a", "mem:?"] {
            assert_eq!(DiskSpec::File(text.into()).to_string(), format!("./{text}"));
        }
        let name = OsStr::from_bytes(b"qcow2:\xff");
        let spec = DiskSpec::parse(OsStr::from_bytes(b"mem:\xff"));
        assert_eq!(spec, Ok(DiskSpec::File(OsStr::from_bytes(b"mem:\xff").into())));
        assert_eq!(DiskSpec::parse(name), Ok(DiskSpec::Qcow2(OsStr::from_bytes(b"\xff").into())));
    }

    #[test]
    fn refuses_other_names() {
        for (text, error) in [
            ("", BadDiskSpec::Empty),
            ("qcow2:", BadDiskSpec::NoPath),
            ("null:0", BadDiskSpec::NoSize),
            ("mem:8E", BadDiskSpec::TooLarge("8E".into())),
            ("null:64E", BadDiskSpec::TooLarge("64E".into())),
            ("mem:1000", BadDiskSpec::PartialSector("1000".into())),
            ("null:", BadDiskSpec::Size(parse_any_size("").unwrap_err())),
            ("fault:eio", BadDiskSpec::NoFaultyDisk),
            ("fault:fire:a", BadDiskSpec::Rule(BadRule::Fault("fire".into()))),
            ("fault:eio:", BadDiskSpec::Empty),
            ("fault:eio:fault:short:a", BadDiskSpec::FaultsTwice),
            ("nbds://host/", BadDiskSpec::Nbd(BadUri::Tls)),
            ("rbd:image", BadDiskSpec::Rbd(BadRbdName::Form)),
        ] {
            assert_eq!(text.parse::<DiskSpec>(), Err(error), "{text}");
        }
    }

    #[test]
    fn a_kind_that_is_not_built_is_named() {
        for (text, feature, is_built) in [
            ("qcow2:a", "qcow2", true),
            ("nbd://host", "nbd", true),
            ("rbd:a/b", "rbd", cfg!(feature = "rbd")),
        ] {
            for text in [text.to_owned(), format!("fault:eio:{text}")] {
                match text.parse::<DiskSpec>() {
                    Ok(spec) => assert!(is_built && spec.to_string() == text),
                    Err(error) => assert_eq!((error, is_built), (BadDiskSpec::NotBuilt(feature), false)),
                }
            }
        }
    }

    fn texts() -> impl Strategy<Value = String> {
        let kind = prop_oneof![
            "[./a-z][^\0]{0,20}",
            "(null|mem):[0-9]{1,6}(\\.5)?[KMGTP]",
            "qcow2:[^\0]{1,20}",
            "nbd://[a-z]{1,9}(:[1-9][0-9]{0,3})?(/[a-z%20]{0,9})?",
            "nbd\\+unix:///[a-z]{0,9}\\?socket=[/a-z]{1,9}(&reconnect-delay=[0-9]{1,4})?",
            "rbd:[a-z]{1,5}(/[a-z]{1,5}){1,2}(@[a-z]{1,5})?(\\?conf=[/a-z]{1,9})?",
        ];
        let rules = "(seed=[0-9]{1,5},)?(eio|short|delay=[1-9]ms)(@[1-9][0-9]?%\\+read)?";
        (proptest::option::of(rules), kind).prop_map(|(rules, disk)| match rules {
            Some(rules) => format!("fault:{rules}:{disk}"),
            None => disk,
        })
    }

    proptest! {
        /// Parsing the formatted name returns the same disk.
        #[test]
        fn formatted_names_can_be_parsed(text in texts(), any in "\\PC{0,30}") {
            for text in [text, any] {
                if let Ok(spec) = text.parse::<DiskSpec>() {
                    prop_assert_eq!(spec.to_string().parse(), Ok(spec));
                }
            }
        }

        #[test]
        fn sizes_and_paths(sectors in 1..(1u64 << 54), path in "[^\0]{1,30}") {
            for spec in [DiskSpec::Null(sectors * SECTOR), DiskSpec::Memory(sectors * SECTOR)] {
                prop_assert_eq!(spec.to_string().parse(), Ok(spec));
            }
            let again: DiskSpec = DiskSpec::File(path.clone().into()).to_string().parse().unwrap();
            let same = [path.clone().into(), Path::new(".").join(&path)];
            prop_assert!(same.contains(&again.path().unwrap().to_owned()), "{:?}", again);
        }
    }
}
