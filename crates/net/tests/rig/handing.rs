//! Passes a card as one process does to the next one.

use super::SIZE_MAX;
use kickless_device::{CaptureTo, HandOver, Handed, Operate};
use kickless_handover::{Given, Giving, Part, Record, v1};
use kickless_net::{HandedCard, Net, Opening, Options, PortError, PortName};
use std::sync::Arc;

/// Returns the record of a card before the pause.
pub fn give(card: &Net) -> Record {
    let mut giving = Giving::default();
    let own = card.give(&mut giving).unwrap();
    giving.record(&v1::Device { own, ..v1::Device::default() }).unwrap()
}

/// Returns the record of a card in the pause.
pub fn give_final(card: &Net) -> Record {
    let mut giving = Giving::default();
    let own = card.give_final(&mut giving).unwrap();
    giving.record(&v1::Final { own, ..v1::Final::default() }).unwrap()
}

/// Makes a card of a record, without an address.
pub fn take(port: &str, pairs_max: u16, record: Record) -> Result<Arc<Net>, PortError> {
    take_captured(port, pairs_max, record, None)
}

pub fn take_captured(
    port: &str,
    pairs_max: u16,
    record: Record,
    capture: Option<&CaptureTo<'_>>,
) -> Result<Arc<Net>, PortError> {
    let (device, mut given): (v1::Device, Given) = record.read()?;
    let mut handed = HandedCard::read(Handed { state: device.own, given: &mut given }).map_err(|e| e.0)?;
    let descriptor = |_: &str| unreachable!("descriptors come with the record");
    let opening =
        Opening { pairs: pairs_max, mac: None, descriptor: &descriptor, handed: Some(handed.port()).into() };
    let port = port.parse::<PortName>()?.open(&opening)?;
    drop(opening);
    let options = Options {
        mac: None,
        mtu: None,
        pairs_max,
        queue_size_max: SIZE_MAX,
        offload: true,
        ring_reset: false,
        port,
    };
    let card = Net::new(options);
    card.take_over(handed, capture).map_err(|error| error.0)?;
    Ok(Arc::new(card))
}

/// Opens a card without an address.
pub fn open(port: &str, pairs_max: u16) -> Arc<Net> {
    super::card_with(None, pairs_max, port)
}

/// Tells a card what the other process has given at last.
pub fn receive_final(card: &Net, record: Record) {
    let (state, given): (v1::Final, Given) = record.read().unwrap();
    card.receive_final(state.own, &given).unwrap();
}

/// Returns the part of the port in the final record of a card.
pub fn final_port(record: Record) -> Part {
    let (state, _): (v1::Final, Given) = record.read().unwrap();
    state.own.read::<v1::CardFinal>().unwrap().port
}

/// Returns a record with this part of a port.
pub fn record_of_port(giving: Giving, port: Part) -> Record {
    let card = v1::Card { mtu: 1500, capture: None, port };
    giving.record(&v1::Device { own: Part::new(&card).unwrap(), ..v1::Device::default() }).unwrap()
}

/// Returns the names and values of all counters.
pub fn counters(card: &Net) -> Vec<(&'static str, u64)> {
    card.counters()
}
