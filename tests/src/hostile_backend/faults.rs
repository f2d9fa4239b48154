//! The rules of a hostile back-end: what it offers, and the faults that it makes.

use kickless_spec::blk::{BlkFeatures, Config};
use kickless_spec::features::Features;
use kickless_spec::net::{self, NetFeatures, S_LINK_UP};
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
    /// The configuration space of a card. With it, the back-end is a card: it fills each receive buffer
    /// with a frame at once, discards what is sent, and carries out each command.
    pub card: Option<net::Config>,
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
            card: None,
            answers: Vec::new(),
            ring: None,
            chaos: None,
        }
    }
}

impl Rules {
    /// Returns the rules of an honest card with this number of queue pairs.
    pub fn card(pairs: u16) -> Rules {
        let net = NetFeatures::MRG_RXBUF
            | NetFeatures::CSUM
            | NetFeatures::GUEST_CSUM
            | NetFeatures::HOST_TSO4
            | NetFeatures::GUEST_TSO4
            | NetFeatures::MAC
            | NetFeatures::MTU
            | NetFeatures::STATUS
            | NetFeatures::CTRL_VQ
            | NetFeatures::CTRL_RX
            | NetFeatures::CTRL_VLAN
            | NetFeatures::CTRL_MAC_ADDR
            | NetFeatures::CTRL_GUEST_OFFLOADS
            | NetFeatures::MQ;
        let config = net::Config {
            mac: [2, 0, 0, 0, 0, 7],
            status: S_LINK_UP.into(),
            max_virtqueue_pairs: pairs.into(),
            mtu: 1500.into(),
            ..net::Config::default()
        };
        let blk = Rules::default();
        // The features of a disk have other meanings for a card.
        let transport = Features::VERSION_1
            | Features::PROTOCOL_FEATURES
            | Features::INDIRECT_DESC
            | Features::EVENT_IDX
            | Features::RING_PACKED
            | Features::IN_ORDER;
        Rules {
            features: transport | Features::from_bits_retain(net.bits()),
            protocol: blk.protocol | ProtocolFeatures::MTU,
            queues: 2 * u64::from(pairs) + 1,
            card: Some(config),
            ..blk
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
    /// Fills a receive buffer with a header that names this many buffers.
    Buffers(u16),
    /// Uses a receive buffer for fewer bytes than a header has.
    NoHeader,
    /// Fills a receive buffer with a header that makes no sense.
    Header,
    /// Completes only the request after it.
    OutOfOrder,
    /// Signals an error of the ring.
    RingError,
    /// Closes the connection.
    Closed,
    /// Completes neither this request nor any later one.
    Silence,
}
