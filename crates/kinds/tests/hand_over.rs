//! A device that another process gives is made with the options that it has there.
#![allow(clippy::unwrap_used, reason = "a test may")]

use kickless_blk::{Blk, Options};
use kickless_daemon::{Kind, MakeError, Making, Values, read};
use kickless_device::{Device, HandOver, Handed, Operate};
use kickless_disk::{Disk, DiskSpec};
use kickless_handover::{Giving, v1};
use kickless_kinds::{BlkConfig, BlkKind};
use kickless_opener::Descriptors;
use serde_json::{Value, json};
use std::sync::Arc;
use tempfile::NamedTempFile;

const QUEUE_SIZE: u16 = 256;

fn config(json: &Value) -> BlkConfig {
    let values: Values =
        json.as_object().unwrap().iter().map(|(key, value)| (key.clone(), value.into())).collect();
    read(&values).unwrap()
}

/// Makes the device that the other process has, with a guest, as the options say.
fn old(config: &BlkConfig) -> Blk {
    let disk = Disk::open(&config.blk_file, &kickless_disk::Options::default()).unwrap();
    let options = Options {
        serial: "old".into(),
        queues_max: config.num_queues,
        queue_size_max: QUEUE_SIZE,
        lock: true,
    };
    let device = Blk::new(disk, options).with_block_size(config.logical_block_size);
    device.set_discard(false);
    device.open().unwrap();
    device
}

/// Makes the device as the kind does it, of what the old one gives.
fn made(old: Option<&Blk>, config: &BlkConfig) -> Result<Arc<dyn Operate>, MakeError> {
    let mut passed = old.map(|old| {
        let mut giving = Giving::default();
        let own = old.give(&mut giving).unwrap();
        let record = giving.record(&v1::Device { own, ..v1::Device::default() }).unwrap();
        record.read::<v1::Device>().unwrap()
    });
    let none = Descriptors::default();
    let handed = passed.as_mut().map(|(device, given)| Handed { state: device.own.clone(), given });
    let making = Making {
        name: Some("disk"),
        queue_size_max: QUEUE_SIZE,
        given: &none,
        inherited: &none,
        handed: handed.into(),
    };
    BlkKind::default().make(config, &making)
}

#[test]
fn a_disk_is_made_of_what_another_process_gives() {
    let image = NamedTempFile::new().unwrap();
    image.as_file().set_len(1 << 20).unwrap();
    let json = |bytes: u32, discard: &str| {
        let path = image.path().to_str().unwrap();
        json!({ "blk-file": path, "logical-block-size": bytes, "discard": discard, "num-queues": 4 })
    };
    let config_with = |bytes, discard| config(&json(bytes, discard));
    let options = config_with(4096, "off");
    let old = old(&options);
    // The other process has the lock, and keeps it.
    let new = made(Some(&old), &options).unwrap();
    let [mut seen, mut before] = [[0; 64]; 2];
    new.read_config(0, &mut seen);
    old.read_config(0, &mut before);
    assert_eq!(seen, before);
    for other in [config_with(512, "off"), config_with(4096, "on")] {
        let refused = made(Some(&old), &other).err().unwrap();
        assert!(refused.option == "blk-file" && refused.to_string().contains("than its guest knows"));
    }
    let other = BlkConfig { blk_file: DiskSpec::Null(1 << 20), ..options };
    assert!(made(Some(&old), &other).is_err());
    made(None, &other).unwrap();
}
