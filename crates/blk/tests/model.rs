//! Runs any sequence of requests, well-formed or not, with faults of every kind. Each head must come back
//! once, and the disk must match a model.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_disk::{Disk, DiskSpec};
use kickless_spec::blk::{self, BlkFeatures, S_IOERR, S_OK, S_UNSUPP, SEGMENT_UNMAP};
use proptest::prelude::*;
use rig::{Data, ENGINES, Rig, Status, TestRequest, UNANSWERED, blk as device};
use std::collections::HashMap;
use std::io::Write;
use std::ops::Range;
use std::path::Path;
use std::process::{Child, Command};
use std::thread;
use std::time::Duration;
use tempfile::{NamedTempFile, TempDir};

const SECTORS: u64 = 256;

/// The number of kinds of disks. Files are as likely as two other kinds.
const KINDS: u32 = if cfg!(feature = "rbd") { 7 } else { 5 };

/// The effect of a request on the disk.
#[derive(Clone, Debug)]
enum Effect {
    Nothing,
    Read(Range<u64>),
    /// All bytes of these sectors get this value.
    Fill(Vec<Range<u64>>, u8),
    /// The content of these sectors becomes unknown.
    Forget(Vec<Range<u64>>),
}

impl Effect {
    fn written(&self) -> &[Range<u64>] {
        match self {
            Self::Fill(ranges, _) | Self::Forget(ranges) => ranges,
            Self::Nothing | Self::Read(_) => &[],
        }
    }
}

/// A request, its effect, and its status. `None`: it succeeds, or fails by a fault.
type Case = (TestRequest, Effect, Option<u8>);

fn range() -> impl Strategy<Value = Range<u64>> {
    (0..SECTORS, 1u64..32).prop_map(|(start, len)| start..(start + len).min(SECTORS))
}

fn segments(ranges: &[Range<u64>], flags: u32) -> Vec<(u64, u32, u32)> {
    ranges.iter().map(|range| (range.start, (range.end - range.start) as u32, flags)).collect()
}

fn good() -> impl Strategy<Value = Case> {
    prop_oneof![
        4 => range().prop_map(|r| {
            (TestRequest::read(r.start, (r.end - r.start) as usize * 512), Effect::Read(r), None)
        }),
        4 => (range(), any::<u8>()).prop_map(|(r, byte)| {
            let bytes = vec![byte; (r.end - r.start) as usize * 512];
            (TestRequest::write(r.start, &bytes), Effect::Fill(vec![r], byte), None)
        }),
        1 => Just((TestRequest::flush(), Effect::Nothing, None)),
        1 => Just((TestRequest::new(blk::T_GET_ID, 0, &[], 20), Effect::Nothing, Some(S_OK))),
        2 => (prop::collection::vec(range(), 1..4), 0..=SEGMENT_UNMAP).prop_map(|(r, flags)| {
            (TestRequest::on_ranges(blk::T_WRITE_ZEROES, &segments(&r, flags)), Effect::Fill(r, 0), None)
        }),
        1 => prop::collection::vec(range(), 1..4).prop_map(|r| {
            (TestRequest::on_ranges(blk::T_DISCARD, &segments(&r, 0)), Effect::Forget(r), None)
        }),
    ]
}

fn bad() -> impl Strategy<Value = Case> {
    let sector = SECTORS - 1..u64::MAX;
    let kinds = prop_oneof![Just(blk::T_DISCARD), Just(blk::T_WRITE_ZEROES)];
    prop_oneof![
        (0..SECTORS, 1usize..511).prop_map(|(s, len)| (TestRequest::read(s, len), S_IOERR)),
        (sector.clone(), any::<bool>()).prop_map(|(s, write)| {
            (if write { TestRequest::write(s, &[1; 1024]) } else { TestRequest::read(s, 1024) }, S_IOERR)
        }),
        (sector, kinds.clone())
            .prop_map(|(s, kind)| (TestRequest::on_ranges(kind, &[(0, 1, 0), (s, 2, 0)]), S_IOERR)),
        (2u32.., kinds).prop_map(|(flags, kind)| (TestRequest::on_ranges(kind, &[(0, 1, flags)]), S_UNSUPP)),
        (20u32..).prop_map(|kind| (TestRequest::new(kind, 0, &[], 512), S_UNSUPP)),
        (0usize..16)
            .prop_map(|len| (TestRequest { header: vec![0; len], ..TestRequest::read(0, 512) }, S_IOERR)),
        prop_oneof![Just(Status::Missing), Just(Status::Readable), Just(Status::Outside)]
            .prop_map(|status| (TestRequest { status, ..TestRequest::write(0, &[1; 512]) }, UNANSWERED)),
        prop_oneof![Just(Data::Outside), Just(Data::Straddles)]
            .prop_map(|data| (TestRequest { data, ..TestRequest::read(0, 1024) }, S_IOERR)),
    ]
    .prop_map(|(request, status)| (request, Effect::Nothing, Some(status)))
}

fn case() -> impl Strategy<Value = Case> {
    let cut = prop_oneof![3 => Just(usize::MAX), 1 => Just(777usize)];
    (prop_oneof![4 => good(), 1 => bad()], cut)
        .prop_map(|((request, effect, status), cut)| (TestRequest { cut, ..request }, effect, status))
}

fn fault() -> impl Strategy<Value = String> {
    let what =
        prop_oneof![Just("eio"), Just("enospc"), Just("eagain"), Just("short"), Just("delay=10us-2ms")];
    let of = prop_oneof![
        Just(""),
        Just("+read"),
        Just("+write"),
        Just("+flush"),
        Just("+discard"),
        Just("+zeroes"),
        Just("+20-60")
    ];
    (what, 1..40u32, of).prop_map(|(what, percent, of)| format!("{what}@{percent}%{of}"))
}

/// Makes an empty qcow2 image at `path`.
fn as_qcow2(path: &Path) -> DiskSpec {
    let mut made = Command::new("qemu-img");
    made.args(["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k"]).arg(path);
    assert!(made.arg((SECTORS * 512).to_string()).status().unwrap().success());
    DiskSpec::Qcow2(path.to_owned())
}

/// Makes an empty image in the Ceph cluster that `tools/ceph` sets up. It is removed with the cluster.
#[cfg(feature = "rbd")]
fn on_ceph() -> DiskSpec {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let dir = std::env::var("KICKLESS_TEST_CEPH").expect("there is no cluster: `make test-rbd` sets one up");
    let name = format!("rbd/blk-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let mut made = Command::new("rbd");
    made.env("CEPH_CONF", format!("{dir}/ceph.conf")).args(["create", "--object-size=8K", &name]);
    assert!(made.arg(format!("--size={}B", SECTORS * 512)).status().unwrap().success());
    DiskSpec::Rbd(Box::new(format!("rbd:{name}?conf={dir}/ceph.conf").parse().unwrap()))
}

/// An NBD server of an image. It is stopped when this is dropped.
struct NbdServer {
    child: Child,
    dir: TempDir,
}

impl NbdServer {
    fn start(image: &Path) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("setpriv");
        command.args([
            "--pdeathsig",
            "KILL",
            "--",
            "nbdkit",
            "--foreground",
            "--unix",
            "sock",
            "--pidfile",
            "there",
        ]);
        let child = command.current_dir(dir.path()).arg("file").arg(image).spawn().unwrap();
        let mut server = Self { child, dir };
        while !server.dir.path().join("there").exists() {
            assert!(server.child.try_wait().unwrap().is_none(), "there is no NBD server");
            thread::sleep(Duration::from_millis(2));
        }
        server
    }

    fn spec(&self) -> DiskSpec {
        let socket = self.dir.path().join("sock");
        DiskSpec::Nbd(format!("nbd+unix:///?socket={}", socket.display()).parse().unwrap())
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The known value of all bytes of each sector.
struct Model(Vec<Option<u8>>);

impl Model {
    fn expect(&self, sectors: &Range<u64>, skip: impl Fn(u64) -> bool, data: &[u8]) {
        for (sector, bytes) in sectors.clone().zip(data.chunks(512)) {
            if let Some(byte) = self.0[sector as usize].filter(|_| !skip(sector)) {
                assert!(
                    bytes.iter().all(|&b| b == byte),
                    "sector {sector} is not all {byte}: {:?}",
                    &bytes[..8]
                );
            }
        }
    }
}

fn run_batches(rig: &mut Rig, batches: Vec<Vec<Case>>) {
    let mut model = Model(vec![Some(0); SECTORS as usize]);
    for batch in batches {
        // The order of requests in flight at the same time is unknown.
        let mut writers: HashMap<u64, usize> = HashMap::new();
        for sector in batch.iter().flat_map(|(_, effect, _)| effect.written().iter().cloned().flatten()) {
            *writers.entry(sector).or_default() += 1;
        }
        let asked: Vec<_> =
            batch.into_iter().map(|(request, effect, status)| (rig.send(request), effect, status)).collect();
        let answers = rig.finish();
        assert_eq!(answers.len(), asked.len());
        for (id, effect, status) in &asked {
            let answer = &answers[id];
            match status {
                Some(status) => assert_eq!(answer.status, *status, "{effect:?}"),
                None => assert!([S_OK, S_IOERR].contains(&answer.status), "{effect:?}: {}", answer.status),
            }
            if let (Effect::Read(sectors), S_OK) = (effect, answer.status) {
                model.expect(sectors, |sector| writers.contains_key(&sector), &answer.data);
            }
        }
        for (id, effect, _) in asked {
            let done = answers[&id].status == S_OK;
            for sector in effect.written().iter().cloned().flatten() {
                model.0[sector as usize] = match effect {
                    Effect::Fill(_, byte) if done && writers[&sector] == 1 => Some(byte),
                    _ => None,
                };
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, max_shrink_iters: 40, ..Default::default() })]

    #[test]
    fn each_head_comes_back_once_and_data_match_the_model(
        engine in prop::sample::select(&ENGINES[..]),
        (depth, packed, writeback, seed) in (1u32..80, any::<bool>(), any::<bool>(), any::<u32>()),
        faults in prop::collection::vec(fault(), 0..4),
        kind in 0..KINDS,
        batches in prop::collection::vec(prop::collection::vec(case(), 1..40), 1..12),
    ) {
        let mut image = NamedTempFile::new().unwrap();
        image.write_all(&[0; SECTORS as usize * 512]).unwrap();
        let server;
        let under = match kind {
            0 => DiskSpec::Memory(SECTORS * 512),
            1 => as_qcow2(image.path()),
            2 => {
                server = NbdServer::start(image.path());
                server.spec()
            }
            #[cfg(feature = "rbd")]
            5.. => on_ceph(),
            _ => DiskSpec::File(image.path().into()),
        };
        // Only the transfers of files are done by the kernel, and so can be short.
        let rules: Vec<_> = faults.into_iter()
            .filter(|rule| [3, 4].contains(&kind) || !(rule.starts_with("short") || rule.starts_with("eagain")))
            .chain([format!("seed={seed}")])
            .collect();
        let spec = match rules.len() {
            1 => under,
            _ => DiskSpec::Fault(rules.join(",").parse().unwrap(), Box::new(under)),
        };
        let disk = Disk::open(&spec, &kickless_disk::Options::default()).unwrap();
        // A qcow2 image is open from here on.
        disk.reload(false).unwrap();
        let mut rig = Rig::start(&device(disk), engine, depth, packed, BlkFeatures::empty());
        rig.set_writeback(writeback);
        run_batches(&mut rig, batches);
    }
}
