//! The rules of a hostile back-end: what it offers, and the faults that it makes.

use kickless_spec::blk::{BlkFeatures, Config};
use kickless_spec::features::Features;
use kickless_spec::vhost_user::{FrontendRequest as Code, ProtocolFeatures};

/// Bytes of an honest back-end's disk.
pub const DISK_LEN: usize = 1 << 20;

/// The features and the behaviour of the back-end. The default is an honest one.
#[derive(Clone, Debug)]
pub struct Rules {
    /// The answer to GET_FEATURES.
    pub features: Features,
    /// The answer to GET_PROTOCOL_FEATURES.
    pub protocol: ProtocolFeatures,
    /// The answer to GET_QUEUE_NUM.
    pub queues: u64,
    /// The answer to GET_MAX_MEM_SLOTS.
    pub slots: u64,
    /// The configuration space.
    pub config: Config,
    /// Faults in the answers to these messages, each time that the message comes.
    pub answers: Vec<(Code, AnswerFault)>,
    /// A fault in the completion of the request with this number. The numbers count all requests, from 0.
    pub ring: Option<(u64, RingFault)>,
    /// A seed. With it, the back-end answers at random.
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

/// A fault that replaces or extends the answer to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerFault {
    /// A refusal.
    Refused,
    /// The end of the connection.
    Closed,
    /// Half of the answer and the end of the connection.
    Half,
    /// No answer.
    Silence,
    /// The answer to another request.
    OfAnother,
    /// The answer without its last byte.
    Short,
    /// The answer and nine bytes more.
    Long,
    /// Another protocol version.
    Version,
    /// A header with a larger size than any message may have.
    Huge,
    /// The answer without the flag that marks an answer.
    Request,
    /// The answer with a descriptor, which it must not have.
    Fd,
    /// The answer with more descriptors than any message has.
    Fds,
    /// The configuration space at another offset.
    Offset,
    /// Fewer bytes of the configuration space than the driver asked for.
    Less,
    /// More bytes of the configuration space than the driver asked for.
    More,
}

impl AnswerFault {
    /// The faults that fit every answer. `Silence` is not among them, because it takes time.
    pub const ANY: [AnswerFault; 10] = [
        AnswerFault::Closed,
        AnswerFault::Half,
        AnswerFault::OfAnother,
        AnswerFault::Short,
        AnswerFault::Long,
        AnswerFault::Version,
        AnswerFault::Huge,
        AnswerFault::Request,
        AnswerFault::Fd,
        AnswerFault::Fds,
    ];
}

/// A fault in the completion of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingFault {
    /// An id that is out of range for the ring.
    IdOutOfRange,
    /// The id of a request that is not in flight.
    IdNotInFlight,
    /// Completes the request twice.
    Twice,
    /// Reports more written bytes than the request has room for.
    TooLong,
    /// Moves the used index forward by more than the ring's size.
    IndexJump,
    /// Moves the used index back.
    IndexBack,
    /// Completes the request in a packed ring with the wrong wrap flag. Completes it correctly with the
    /// next request.
    WrongWrap,
    /// Completes the request without a status.
    NoStatus,
    /// Completes the request with this status.
    Status(u8),
    /// Completes only the request after it.
    OutOfOrder,
    /// Signals an error of the ring.
    RingError,
    /// Closes the connection.
    Closed,
    /// Completes neither this request nor any later one.
    Silence,
}
