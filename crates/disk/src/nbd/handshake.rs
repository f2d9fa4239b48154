//! The handshake: from a connection to an export.

use super::block_sizes::BlockSizes;
use super::wire::*;
use std::io::{self, Read, Write};

/// The largest answer to an option in bytes. The name and the description of an export have up to 4096 bytes
/// each.
const ANSWER_BYTES_MAX: u32 = 16 << 10;

/// The largest number of answers to one option.
const ANSWERS_MAX: usize = 64;

/// The properties of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Export {
    /// The size in bytes.
    pub(super) size: u64,
    /// The capabilities: `FLAG_*`.
    pub(super) flags: u16,
    /// The sizes of requests.
    pub(super) sizes: BlockSizes,
    /// Replies come in chunks.
    pub(super) structured: bool,
}

impl Export {
    pub(super) fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Returns the bytes that requests can reach: whole blocks.
    pub(super) fn accessible_size(&self) -> u64 {
        self.size - self.size % self.sizes.of_ops().block()
    }
}

/// Selects an export of a server. After it, the connection carries requests and replies.
///
/// # Errors
/// The server has no usable export of this name. Then the connection cannot be used.
pub(super) fn negotiate(stream: &mut (impl Read + Write), export: &str) -> Result<Export, Problem> {
    if u64_of(stream)? != GREETING {
        return Err(Problem::NotNbd);
    }
    match u64_of(stream)? {
        OPTION_MAGIC => {}
        OLDSTYLE_MAGIC => return Err(Problem::Oldstyle),
        _ => return Err(Problem::NotNbd),
    }
    if u16_of(stream)? & FIXED_NEWSTYLE == 0 {
        return Err(Problem::Old);
    }
    stream.write_all(&u32::from(FIXED_NEWSTYLE).to_be_bytes())?;
    let structured = matches!(ask(stream, OPT_STRUCTURED_REPLY, &[])?.0, Answer::Ack);
    go(stream, export, structured)
}

/// Selects an export with `NBD_OPT_GO`, and obeys the block sizes that the server reports.
fn go(stream: &mut (impl Read + Write), export: &str, structured: bool) -> Result<Export, Problem> {
    let mut data = (export.len() as u32).to_be_bytes().to_vec();
    data.extend(export.bytes());
    data.extend([1, INFO_BLOCK_SIZE].iter().flat_map(|number| number.to_be_bytes()));
    let (answer, ExportInfo { export, sizes }) = ask(stream, OPT_GO, &data)?;
    match (answer, export) {
        (Answer::Ack, Some((size, flags))) => {
            Ok(Export { size, flags, sizes: sizes.unwrap_or_default(), structured })
        }
        (Answer::Ack, None) => Err(Problem::Protocol("an export without a size")),
        (Answer::Refused(REP_ERR_UNSUP, _), _) => refused(stream, Problem::Old),
        (Answer::Refused(REP_ERR_UNKNOWN, said), _) => refused(stream, Problem::NoExport(said)),
        (Answer::Refused(REP_ERR_TLS_REQD, _), _) => refused(stream, Problem::Tls),
        (Answer::Refused(code, said), _) => refused(stream, Problem::Refused(code & !REP_ERROR, said)),
    }
}

/// Tells the server that the client gives up.
fn refused<T>(stream: &mut impl Write, problem: Problem) -> Result<T, Problem> {
    // A failure does not matter.
    let _ = stream.write_all(&option(OPT_ABORT, &[]));
    Err(problem)
}

/// The final answer to an option.
enum Answer {
    Ack,
    Refused(u32, ServerText),
}

fn option(option: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// The information about an export that was among the answers to an option.
#[derive(Debug, Default)]
struct ExportInfo {
    /// The size and the flags.
    export: Option<(u64, u16)>,
    sizes: Option<BlockSizes>,
}

/// Sends an option and receives all answers. Returns the final one, and the information from the others.
fn ask(stream: &mut (impl Read + Write), asked: u32, data: &[u8]) -> Result<(Answer, ExportInfo), Problem> {
    stream.write_all(&option(asked, data))?;
    let mut info = ExportInfo::default();
    for _ in 0..ANSWERS_MAX {
        let header = bytes_of::<20>(stream)?;
        let (mut magic, mut of, mut kind, mut len) = ([0; 8], [0; 4], [0; 4], [0; 4]);
        magic.copy_from_slice(&header[..8]);
        of.copy_from_slice(&header[8..12]);
        kind.copy_from_slice(&header[12..16]);
        len.copy_from_slice(&header[16..]);
        let (kind, len) = (u32::from_be_bytes(kind), u32::from_be_bytes(len));
        if u64::from_be_bytes(magic) != OPTION_REPLY_MAGIC || u32::from_be_bytes(of) != asked {
            return Err(Problem::Protocol("an answer to another option"));
        }
        if len > ANSWER_BYTES_MAX {
            return Err(Problem::Protocol("an answer is too long"));
        }
        let mut body = vec![0; len as usize];
        fill(stream, &mut body)?;
        match kind {
            REP_ACK => return Ok((Answer::Ack, info)),
            REP_INFO => info.take(&body)?,
            _ if kind & REP_ERROR != 0 => return Ok((Answer::Refused(kind, ServerText::new(&body)), info)),
            _ => {}
        }
    }
    Err(Problem::Protocol("too many answers to an option"))
}

impl ExportInfo {
    /// Parses one piece of information. Later ones replace earlier ones.
    fn take(&mut self, body: &[u8]) -> Result<(), Problem> {
        let Some((kind, rest)) = body.split_first_chunk() else {
            return Err(Problem::Protocol("information without a type"));
        };
        match u16::from_be_bytes(*kind) {
            INFO_EXPORT => match (rest.first_chunk(), rest.last_chunk(), rest.len()) {
                (Some(size), Some(flags), 10) => {
                    self.export = Some((u64::from_be_bytes(*size), u16::from_be_bytes(*flags)));
                }
                _ => return Err(Problem::Protocol("the size of an export has a wrong length")),
            },
            INFO_BLOCK_SIZE => self.sizes = Some(BlockSizes::parse(rest)?),
            _ => {}
        }
        Ok(())
    }
}

fn fill(stream: &mut impl Read, bytes: &mut [u8]) -> Result<(), Problem> {
    stream.read_exact(bytes).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => Problem::Closed,
        io::ErrorKind::TimedOut => Problem::Slow,
        _ => Problem::Io(error),
    })
}

fn bytes_of<const N: usize>(stream: &mut impl Read) -> Result<[u8; N], Problem> {
    let mut bytes = [0; N];
    fill(stream, &mut bytes)?;
    Ok(bytes)
}

fn u64_of(stream: &mut impl Read) -> Result<u64, Problem> {
    bytes_of(stream).map(u64::from_be_bytes)
}

fn u16_of(stream: &mut impl Read) -> Result<u16, Problem> {
    bytes_of(stream).map(u16::from_be_bytes)
}
