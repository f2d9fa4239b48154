//! What a back-end can say that is not so.

use kickless_spec::blk::{BlkFeatures, Config};
use kickless_spec::features::Features;
use kickless_spec::vhost_user::{FrontendRequest as Code, ProtocolFeatures};

/// Bytes of an honest back-end's disk.
pub const DISK_LEN: usize = 1 << 20;

/// What a back-end offers and how it behaves. As it is by default, everything is true.
#[derive(Clone, Debug)]
pub struct Rules {
    /// What GET_FEATURES answers.
    pub features: Features,
    /// What GET_PROTOCOL_FEATURES answers.
    pub protocol: ProtocolFeatures,
    /// What GET_QUEUE_NUM answers.
    pub queues: u64,
    /// What GET_MAX_MEM_SLOTS answers.
    pub slots: u64,
    /// The configuration space.
    pub config: Config,
    /// Lies in answers to messages, each time that such a message comes.
    pub answers: Vec<(Code, AnswerLie)>,
    /// A lie in a ring, told of the request with this number among all that ever came, from 0.
    pub ring: Option<(u64, RingLie)>,
    /// Everything is answered at random, from this seed on.
    pub chaos: Option<u64>,
}

impl Default for Rules {
    fn default() -> Rules {
        let blk = BlkFeatures::SIZE_MAX
            | BlkFeatures::SEG_MAX
            | BlkFeatures::BLK_SIZE
            | BlkFeatures::FLUSH
            | BlkFeatures::CONFIG_WCE
            | BlkFeatures::MQ;
        let config = Config {
            capacity: (DISK_LEN as u64 / 512).into(),
            size_max: (1 << 20).into(),
            seg_max: 30.into(),
            blk_size: 512.into(),
            writeback: 1,
            num_queues: 4.into(),
            ..Config::default()
        };
        Rules {
            features: Features::VERSION_1
                | Features::PROTOCOL_FEATURES
                | Features::INDIRECT_DESC
                | Features::EVENT_IDX
                | Features::RING_PACKED
                | Features::IN_ORDER
                | Features::from_bits_retain(blk.bits()),
            protocol: ProtocolFeatures::MQ
                | ProtocolFeatures::CONFIG
                | ProtocolFeatures::REPLY_ACK
                | ProtocolFeatures::BACKEND_REQ
                | ProtocolFeatures::CONFIGURE_MEM_SLOTS,
            queues: 4,
            slots: 32,
            config,
            answers: Vec::new(),
            ring: None,
            chaos: None,
        }
    }
}

/// What comes instead of the answer to a message, or with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerLie {
    /// No.
    Refused,
    /// The connection closes.
    Closed,
    /// The connection closes after half of the answer.
    Half,
    /// Nothing, ever.
    Silence,
    /// An answer to another request.
    OfAnother,
    /// The answer without its last byte.
    Short,
    /// The answer and nine bytes more.
    Long,
    /// Another protocol version.
    Version,
    /// More bytes announced than any message has.
    Huge,
    /// The answer, not marked as one.
    Request,
    /// The answer with a descriptor that it does not have.
    Fd,
    /// The answer with more descriptors than any message has.
    Fds,
    /// The configuration space from elsewhere on.
    Offset,
    /// Less of the configuration space than was asked for.
    Less,
    /// More of the configuration space than was asked for.
    More,
}

impl AnswerLie {
    /// Those that any answer can be replaced by, but for silence, which takes time.
    pub const ANY: [AnswerLie; 10] = [
        AnswerLie::Closed,
        AnswerLie::Half,
        AnswerLie::OfAnother,
        AnswerLie::Short,
        AnswerLie::Long,
        AnswerLie::Version,
        AnswerLie::Huge,
        AnswerLie::Request,
        AnswerLie::Fd,
        AnswerLie::Fds,
    ];
}

/// What is said of a request in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingLie {
    /// It has an id that no ring of this size has.
    IdOutOfRange,
    /// It has another id, which is not in flight.
    IdNotInFlight,
    /// It is done, and once more.
    Twice,
    /// More bytes were written than it has room for.
    TooLong,
    /// The used index goes on by more than the ring has entries.
    IndexJump,
    /// The used index goes back.
    IndexBack,
    /// A packed ring: it is done, with the flags of the other round. The truth follows with the next request.
    WrongWrap,
    /// It is done, without a status.
    NoStatus,
    /// It is done, with this status.
    Status(u8),
    /// The request after it is done, alone.
    OutOfOrder,
    /// The ring cannot be read.
    RingError,
    /// The connection closes instead.
    Closed,
    /// It is never done, nor any other.
    Silence,
}
