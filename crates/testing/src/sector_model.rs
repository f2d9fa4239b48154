//! Knows the contents that each sector of a disk may have, now and after a cut.

/// The contents of a sector: 0 for zeroes, else a number that names the sector and the write.
pub type Stamp = u64;

/// A value that a sector may have.
#[derive(Clone, Copy, Debug)]
struct Value {
    stamp: Stamp,
    started: u64,
    ended: Option<u64>,
    /// The request has succeeded, so older values are gone.
    is_sure: bool,
}

/// The values that each sector of a disk may have.
#[derive(Clone, Debug)]
pub struct SectorModel {
    sectors: Vec<Vec<Value>>,
}

impl SectorModel {
    /// Makes a model of a disk with these contents on stable storage.
    pub fn new(stamps: impl Iterator<Item = Stamp>) -> Self {
        let first = |stamp| vec![Value { stamp, started: 0, ended: Some(0), is_sure: true }];
        Self { sectors: stamps.map(first).collect() }
    }

    /// Returns the number of sectors.
    pub fn sectors(&self) -> usize {
        self.sectors.len()
    }

    /// Changes the number of sectors. New ones have zeroes.
    pub fn resize(&mut self, sectors: usize) {
        let zeroes = vec![Value { stamp: 0, started: 0, ended: Some(0), is_sure: true }];
        self.sectors.resize(sectors, zeroes);
    }

    /// Returns the values of a sector for a report.
    pub fn values(&self, sector: usize) -> &impl std::fmt::Debug {
        &self.sectors[sector]
    }

    /// Notes that a request may change a sector from now on.
    pub fn start(&mut self, sector: usize, stamp: Stamp, now: u64) {
        self.sectors[sector].push(Value { stamp, started: now, ended: None, is_sure: false });
    }

    /// Notes the end of the request that started with this stamp and time. A failed one may still show later.
    pub fn end(&mut self, sector: usize, (stamp, started): (Stamp, u64), is_sure: bool, now: u64) {
        let same =
            |value: &&mut Value| value.stamp == stamp && value.started == started && value.ended.is_none();
        let value = self.sectors[sector].iter_mut().find(same).unwrap();
        (value.ended, value.is_sure) = (Some(now), is_sure);
    }

    /// Notes that the requests that had ended at `began` are on stable storage.
    pub fn flushed(&mut self, began: u64) {
        for values in &mut self.sectors {
            if values.len() > 1 {
                let known = values.clone();
                values.retain(|value| !is_replaced(value, &known, began));
            }
        }
    }

    /// Notes that the durable write with this number and time is on stable storage.
    pub fn written_through(&mut self, sector: usize, (stamp, started): (Stamp, u64)) {
        let values = &mut self.sectors[sector];
        let same = |value: &&Value| value.stamp == stamp && value.started == started;
        let write = *values.iter().find(same).unwrap();
        values.retain(|value| !is_replaced(value, &[write], u64::MAX));
    }

    /// Notes that all that is not on stable storage may be lost. Each sector then has any of its values.
    pub fn lost(&mut self) {
        for values in self.sectors.iter_mut().filter(|values| values.len() > 1) {
            values.iter_mut().for_each(|value| value.is_sure = false);
        }
    }

    /// Returns whether a request has succeeded that may not be on stable storage.
    pub fn has_unflushed(&self) -> bool {
        let replaces = |values: &Vec<Value>| values.iter().any(|value| is_replaced(value, values, u64::MAX));
        self.sectors.iter().any(replaces)
    }

    /// Returns the values that a read may see which begins now.
    pub fn readable(&self, sector: usize) -> Vec<Stamp> {
        let values = &self.sectors[sector];
        let known = values.iter().filter(|value| !is_replaced(value, values, u64::MAX));
        known.map(|value| value.stamp).collect()
    }

    /// Returns whether a sector may have this value after a kill.
    pub fn may_be_after_kill(&self, sector: usize, stamp: Stamp) -> bool {
        let values = &self.sectors[sector];
        values.iter().any(|value| value.stamp == stamp && !is_replaced(value, values, u64::MAX))
    }

    /// Returns whether a sector may have this value after a power cut.
    pub fn may_be_after_power_cut(&self, sector: usize, stamp: Stamp) -> bool {
        self.sectors[sector].iter().any(|value| value.stamp == stamp)
    }
}

/// Returns whether a request that succeeded before `until` began after the end of this one.
fn is_replaced(value: &Value, all: &[Value], until: u64) -> bool {
    let Some(ended) = value.ended else { return false };
    all.iter()
        .any(|newer| newer.is_sure && newer.ended.is_some_and(|end| end < until) && newer.started > ended)
}
