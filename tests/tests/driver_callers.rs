//! Our driver and its callers: handlers that panic or wait, times without end, ranges that cannot be.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::time::Duration;

use kickless_driver::{Disk, Error, Options};
use kickless_spec::vhost_user::FrontendRequest as Code;
use kickless_tests::liar::{Liar, ends};
use kickless_tests::liar_lies::{AnswerLie, Rules};

fn options(liar: &Liar) -> Options {
    Options { queues: 1, queue_size: 8, buffer_memory: 2 << 20, ..Options::new(liar.socket()) }
}

#[test]
fn times_without_end() {
    ends(|| {
        let liar = Liar::start(Rules::default()).unwrap();
        let disk = Disk::connect(Options {
            reconnect_limit: Duration::MAX,
            connect_timeout: Duration::MAX,
            reply_timeout: Duration::MAX,
            ..options(&liar)
        })
        .unwrap();
        for _ in 0..3 {
            liar.drop_connection();
            disk.read_at(&mut [0; 512], 0).unwrap();
        }
        assert_eq!(liar.faults(), [""; 0]);
    });
}

#[test]
fn the_time_to_come_back_counts_for_a_back_end_that_is_silent() {
    ends(|| {
        let liar = Liar::start(Rules::default()).unwrap();
        let disk = Disk::connect(Options {
            reconnect_limit: Duration::from_millis(50),
            reply_timeout: Duration::MAX,
            ..options(&liar)
        })
        .unwrap();
        liar.rules().answers = vec![(Code::GetFeatures, AnswerLie::Silence)];
        liar.drop_connection();
        assert!(matches!(disk.read_at(&mut [0; 512], 0), Err(Error::Dead(_))));
        assert!(matches!(&*disk.failure().unwrap(), Error::Gone { .. }));
    });
}
