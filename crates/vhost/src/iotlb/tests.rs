//! Translations without a session. There are no rings, and the test has the other end of the channel.

use super::*;
use crate::Server;
use kickless_device::{Executor, QueueTask, TaskHandle};
use kickless_memory::{Gpa, Slot, Tlb};
use kickless_testing::{Fake, FakeDevice, memfd};
use kickless_vhost_user::{FrontendReply, FrontendResponder, Header};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

/// A device and an executor without queues.
struct Nothing;

impl Fake for Nothing {}

impl Executor for Nothing {
    fn spawn(&self, _: Box<dyn QueueTask>) -> io::Result<Box<dyn TaskHandle>> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

fn rings() -> Rings {
    let server = Server::new(Arc::new(FakeDevice(Nothing)), Arc::new(Nothing));
    Rings::new(Arc::new(FakeDevice(Nothing)), Arc::new(Nothing), server.statistics().clone())
}

const LEN: u64 = 1 << 20;
const USER: u64 = 0x7e00_0000_0000;

fn map() -> Map {
    Map::new(vec![Slot::map(memfd(LEN), 0, Gpa(0), UserAddr(USER), LEN).unwrap()]).unwrap()
}

fn page(number: u64) -> Miss {
    Miss { page: Iova(number * PAGE), access: Access::READ }
}

/// Makes translations with a table of this many nodes.
fn translations(nodes: u32) -> Translations {
    Translations { iotlb: Iotlb::new(nodes), ..Translations::new().unwrap() }
}

/// Makes a channel, whose front-end is the test.
fn channel() -> (BackendRequester, FrontendResponder) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (BackendRequester::new(ours), FrontendResponder::new(theirs))
}

/// Reads the messages on a channel. Returns their pages, and the headers to reply to.
fn received(frontend: &mut FrontendResponder) -> Vec<(u64, Header)> {
    let mut all = Vec::new();
    loop {
        match frontend.recv(&Wait::never()) {
            Ok(Some(received)) => match received.message {
                BackendMessage::IotlbMsg(message) => all.push((message.iova / PAGE, received.header)),
                other => panic!("{other:?}"),
            },
            Err(Error::Interrupted) => return all,
            other => panic!("{other:?}"),
        }
    }
}

fn pages(received: &[(u64, Header)]) -> Vec<u64> {
    received.iter().map(|(page, _)| *page).collect()
}

fn reply(frontend: &mut FrontendResponder, to: &Header, done: bool) {
    frontend.reply(to, &FrontendReply::Ack(u64::from(!done)), &Wait::never()).unwrap();
}

/// Makes a connection without unread messages.
fn silence() -> (UnixStream, UnixStream) {
    UnixStream::pair().unwrap()
}

/// An update is refused, and does not loop for ever, if only its own nodes could make room for it.
#[test]
fn an_update_does_not_evict_itself() {
    let (done, is_done) = mpsc::channel();
    thread::spawn(move || {
        let (map, mut rings) = (map(), rings());
        let (stop, connection) = UnixStream::pair().unwrap();
        let cancellation = Cancellation { stop: stop.as_fd(), connection: connection.as_fd() };
        // One path from the root to a page takes 5 nodes, and another one that differs from half a terabyte
        // on takes 3 more.
        let mut translations = translations(7);
        let update = |iova| Message {
            kind: IotlbKind::Update,
            iova,
            size: PAGE,
            user_addr: USER,
            access: IotlbAccess::READ,
        };
        translations.message(&update(0), &map, &mut rings, cancellation).unwrap();
        translations.misses.ask(0, &[page(1)], &[IovaRange::new(Iova(0), 2 * PAGE)]);
        let refused = translations.message(&update(1 << 40), &map, &mut rings, cancellation);
        assert!(matches!(refused, Err(RequestError::Update(UpdateError::Full { .. }))), "{refused:?}");
        // A translation that a queue waits for is kept. When it waits no more, there is room.
        let mut tlb = Tlb::new(translations.iommu().table);
        assert!(tlb.user(Iova(0), 1, Access::READ).is_ok());
        translations.misses.forget(0);
        translations.message(&update(1 << 40), &map, &mut rings, cancellation).unwrap();
        done.send(()).unwrap();
    });
    is_done.recv_timeout(Duration::from_secs(30)).expect("it goes on for ever, or has failed");
}

#[test]
fn unsent_misses_go_to_the_next_channel() {
    let (mut translations, rings, (messages, _quiet)) = (translations(1), rings(), silence());
    translations.misses.ask(0, &[page(3), page(5), page(7)], &[]);
    translations.collect();
    // A channel that accepts nothing any more, and has not ended.
    let (ours, theirs) = UnixStream::pair().unwrap();
    theirs.shutdown(Shutdown::Read).unwrap();
    let failed = translations.exchange(&mut BackendRequester::new(ours), messages.as_fd(), &rings);
    assert!(failed.is_err());
    assert!(translations.has_unsent());
    let (mut channel, mut frontend) = channel();
    translations.resend_unanswered();
    translations.exchange(&mut channel, messages.as_fd(), &rings).unwrap();
    let first = received(&mut frontend);
    assert_eq!(pages(&first), [3, 5, 7]);
    // Unanswered misses are sent again, before new ones.
    reply(&mut frontend, &first[0].1, false);
    translations.exchange(&mut channel, messages.as_fd(), &rings).unwrap();
    translations.misses.ask(1, &[page(9)], &[]);
    translations.collect();
    let (mut channel, mut frontend) = self::channel();
    translations.resend_unanswered();
    translations.exchange(&mut channel, messages.as_fd(), &rings).unwrap();
    assert_eq!(pages(&received(&mut frontend)), [5, 7, 9]);
}

/// A front-end that reads all misses and replies to none loses its channel.
#[test]
fn replies_that_never_come_are_bounded() {
    let (mut translations, rings, (messages, _quiet)) = (translations(1), rings(), silence());
    let (mut channel, mut frontend) = channel();
    let mut read = 0;
    for batch in 0..2 * (MISSES_MAX as u64 / 4096) {
        let misses: Vec<Miss> = (0..4096).map(|number| page(batch * 4096 + number)).collect();
        translations.misses.ask(0, &misses, &[]);
        translations.collect();
        while translations.has_unsent() {
            if let Err(error) = translations.exchange(&mut channel, messages.as_fd(), &rings) {
                assert!(matches!(error, Error::Closed), "{error}");
                assert_eq!(translations.awaiting.len(), MISSES_MAX + 1);
                return;
            }
            read += received(&mut frontend).len();
        }
        assert!(translations.awaiting.len() <= MISSES_MAX, "{read} misses without a reply");
    }
    panic!("{read} misses without a reply");
}

/// A reply without a question closes the channel.
#[test]
fn replies_to_nothing_end_the_channel() {
    let (mut translations, rings, (messages, _quiet)) = (translations(1), rings(), silence());
    let (mut channel, mut frontend) = channel();
    translations.misses.ask(0, &[page(1)], &[]);
    translations.collect();
    translations.exchange(&mut channel, messages.as_fd(), &rings).unwrap();
    let asked = received(&mut frontend);
    for _ in 0..2 {
        reply(&mut frontend, &asked[0].1, true);
    }
    assert!(matches!(translations.exchange(&mut channel, messages.as_fd(), &rings), Err(Error::Closed)));
}

/// Without a channel, queues that start and stop leave nothing behind.
#[test]
fn misses_without_a_waiting_queue_are_dropped() {
    let mut translations = translations(1);
    translations.misses.ask(1, &[page(1)], &[]);
    for round in 1..=2 * (MISSES_MAX as u64 / 1000) {
        let misses: Vec<Miss> = (0..1000).map(|number| page(round * 1000 + number)).collect();
        translations.misses.ask(0, &misses, &[]);
        translations.collect();
        translations.misses.forget(0);
        assert!(translations.unsent.len() <= MISSES_MAX, "round {round}: {}", translations.unsent.len());
    }
    assert_eq!(translations.unsent.front().map(|(_, miss)| *miss), Some(page(1)), "this one is waited for");
}

/// An answer comes as a message, and the reply to the miss after it on another socket. If both are there, the
/// message goes first. Otherwise its miss would be refused.
#[test]
fn a_reply_does_not_overtake_the_answer() {
    let (map, mut rings, mut translations) = (map(), rings(), translations(5));
    let (mut channel, mut frontend) = channel();
    let (mut messages, mut theirs) = silence();
    let (stop, connection) = UnixStream::pair().unwrap();
    let cancellation = Cancellation { stop: stop.as_fd(), connection: connection.as_fd() };
    translations.misses.ask(0, &[page(1), page(2)], &[]);
    translations.collect();
    translations.exchange(&mut channel, messages.as_fd(), &rings).unwrap();
    let asked = received(&mut frontend);
    let awaited: Vec<(u64, Miss)> = translations.awaiting.iter().copied().collect();
    theirs.write_all(&[1]).unwrap();
    asked.iter().for_each(|(_, header)| reply(&mut frontend, header, true));
    translations.exchange(&mut channel, messages.as_fd(), &rings).unwrap();
    for (number, miss) in &awaited {
        assert!(translations.misses.is_pending(*number, miss), "refused, with the answer on its way");
    }
    // The session reads the message, which answers the first miss.
    messages.read_exact(&mut [0]).unwrap();
    let answer = Message {
        kind: IotlbKind::Update,
        iova: PAGE,
        size: PAGE,
        user_addr: USER,
        access: IotlbAccess::READ,
    };
    translations.message(&answer, &map, &mut rings, cancellation).unwrap();
    assert!(!translations.misses.is_pending(awaited[0].0, &awaited[0].1));
    assert_eq!(translations.counts.refusals, 0);
    translations.exchange(&mut channel, messages.as_fd(), &rings).unwrap();
    assert!(!translations.misses.is_pending(awaited[1].0, &awaited[1].1));
    assert_eq!(translations.counts.refusals, 1, "nothing has come for the second");
}
