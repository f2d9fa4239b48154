//! Reads pcapng files of this machine's byte order, strictly: each byte has to belong to a block.

/// The contents of a capture file with one interface.
#[derive(Debug, Default)]
pub struct CaptureContents {
    /// The name of the interface.
    pub interface: String,
    /// The longest part of a frame that the file has.
    pub len_max: u32,
    /// The frames, in their order.
    pub frames: Vec<CapturedFrame>,
    /// The numbers of all frames and of the dropped ones, by the interface's last statistics.
    pub received: u64,
    /// Dropped frames.
    pub dropped: u64,
}

/// A frame of a capture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CapturedFrame {
    /// 1 for inbound, 2 for outbound.
    pub direction: u32,
    /// The number of the queue.
    pub queue: u32,
    /// The length of the whole frame.
    pub len: usize,
    /// The captured part.
    pub bytes: Vec<u8>,
    /// Nanoseconds since the epoch.
    pub time: u64,
}

/// Parses a capture file with one interface, whose packets have flags and a queue.
pub fn parse_pcapng(file: &[u8]) -> CaptureContents {
    let mut contents = CaptureContents::default();
    let (mut rest, mut number) = (file, 0);
    while !rest.is_empty() {
        let (kind, len) = (u32_at(rest, 0), u32_at(rest, 4) as usize);
        assert!(len.is_multiple_of(4) && len <= rest.len(), "block {number} has {len} bytes");
        assert_eq!(u32_at(rest, len - 4) as usize, len, "block {number}");
        let body = &rest[8..len - 4];
        match (number, kind) {
            (0, 0x0a0d_0d0a) => assert_eq!((u32_at(body, 0), u32_at(body, 4)), (0x1a2b_3c4d, 1)),
            (1, 1) => {
                assert_eq!(body[..2], 1u16.to_ne_bytes(), "Ethernet");
                contents.len_max = u32_at(body, 4);
                let options = options(&body[8..]);
                assert_eq!(option(&options, 9), Some(&[9][..]), "nanoseconds");
                contents.interface =
                    String::from_utf8(option(&options, 2).unwrap_or_default().into()).unwrap();
            }
            (2.., 5) => {
                let options = options(&body[12..]);
                let number = |code| u64::from_ne_bytes(option(&options, code).unwrap().try_into().unwrap());
                (contents.received, contents.dropped) = (number(4), number(5));
            }
            (2.., 6) => {
                let (captured, whole) = (u32_at(body, 12) as usize, u32_at(body, 16) as usize);
                let options = options(&body[20 + captured.next_multiple_of(4)..]);
                let number = |code| u32_at(option(&options, code).unwrap(), 0);
                contents.frames.push(CapturedFrame {
                    direction: number(2),
                    queue: number(6),
                    len: whole,
                    bytes: body[20..20 + captured].to_vec(),
                    time: (u64::from(u32_at(body, 4)) << 32) + u64::from(u32_at(body, 8)),
                });
            }
            _ => panic!("block {number} is of the type {kind:#x}"),
        }
        rest = &rest[len..];
        number += 1;
    }
    contents
}

fn options(mut bytes: &[u8]) -> Vec<(u16, &[u8])> {
    let mut options = Vec::new();
    loop {
        let [code, len] = [0, 2].map(|at| u16::from_ne_bytes([bytes[at], bytes[at + 1]]));
        let padded = usize::from(len).next_multiple_of(4);
        if code == 0 {
            assert_eq!((len, bytes.len()), (0, 4), "the end of the options");
            return options;
        }
        options.push((code, &bytes[4..4 + usize::from(len)]));
        bytes = &bytes[4 + padded..];
    }
}

fn option<'a>(options: &[(u16, &'a [u8])], code: u16) -> Option<&'a [u8]> {
    options.iter().find(|(known, _)| *known == code).map(|(_, value)| *value)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
}
