//! Moments at which clients have received versions, and the latencies of changes that follow from them.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

/// Receipts in one piece of memory. Growing in pieces copies nothing while changes arrive.
const PIECE: usize = 1 << 20;

/// A client has received a version of an object.
#[derive(Clone, Copy)]
struct Receipt {
    client: u32,
    /// Version, which is small in a new cluster.
    version: u32,
    /// Microseconds since the recording began.
    at_us: u32,
}

/// Receipts of all clients, in the order of time.
#[derive(Default)]
pub(crate) struct Receipts {
    /// Begin of the recording; `None`: nothing is recorded.
    begin_ns: Option<u64>,
    pieces: Vec<Vec<Receipt>>,
}

/// A change that was made.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Change {
    /// Name of the object.
    pub(crate) name: String,
    /// Version that the change has led to.
    pub(crate) version: u64,
    /// Moment at which the request was sent, on the clock that all processes share.
    pub(crate) sent_ns: u64,
    /// Moment at which the API server's answer had arrived.
    pub(crate) answered_ns: u64,
}

/// Latencies of all changes to all clients.
#[derive(Clone, Debug, Default)]
pub(crate) struct Latencies {
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
    pub(crate) max_ms: f64,
    /// From the request instead of the answer.
    pub(crate) p50_from_request_ms: f64,
    /// Number of events that clients got.
    pub(crate) receipts: u64,
    /// Number of pairs of a client and a change that it has.
    pub(crate) pairs: u64,
    /// Number of pairs that are missing.
    pub(crate) missing: u64,
}

/// The same, as one load generator has counted it.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Histograms {
    from_answer: Histogram,
    from_request: Histogram,
    receipts: u64,
    /// Number of pairs of a client and a change.
    expected: u64,
}

/// Number of samples by their microseconds, which have three digits.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
struct Histogram(BTreeMap<u32, u64>);

impl Histogram {
    fn add(&mut self, micros: u32) {
        let step = 10_u32.pow(micros.checked_ilog10().unwrap_or_default().saturating_sub(2));
        *self.0.entry(micros / step * step).or_default() += 1;
    }

    fn merge(&mut self, other: &Self) {
        for (micros, count) in &other.0 {
            *self.0.entry(*micros).or_default() += count;
        }
    }

    fn count(&self) -> u64 {
        self.0.values().sum()
    }

    /// Percentile in milliseconds, by nearest rank.
    fn percentile_ms(&self, permille: u64) -> f64 {
        let rank = (self.count() * permille).div_ceil(1_000).max(1);
        let mut seen = 0;
        let sample = self.0.iter().find(|(_, count)| {
            seen += **count;
            seen >= rank
        });
        sample.map_or(f64::NAN, |(micros, _)| f64::from(*micros) / 1_000.0)
    }
}

impl Histograms {
    /// Adds those of another load generator.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.from_answer.merge(&other.from_answer);
        self.from_request.merge(&other.from_request);
        self.receipts += other.receipts;
        self.expected += other.expected;
    }

    /// Percentiles and counts.
    pub(crate) fn latencies(&self) -> Latencies {
        let pairs = self.from_answer.count();
        Latencies {
            p50_ms: self.from_answer.percentile_ms(500),
            p99_ms: self.from_answer.percentile_ms(990),
            max_ms: self.from_answer.percentile_ms(1_000),
            p50_from_request_ms: self.from_request.percentile_ms(500),
            receipts: self.receipts,
            pairs,
            missing: self.expected.saturating_sub(pairs),
        }
    }
}

/// Place of a change: its object, and its number among the object's changes.
struct Place {
    object: usize,
    number: usize,
}

impl Receipts {
    /// Forgets everything and begins to record.
    pub(crate) fn begin(&mut self, now_ns: u64) {
        *self = Self { begin_ns: Some(now_ns), pieces: Vec::new() };
    }

    /// Records the receipt of a version.
    pub(crate) fn push(&mut self, client: u32, version: u64, now_ns: u64) {
        let Some(begin_ns) = self.begin_ns else { return };
        let at_us = u32::try_from(now_ns.saturating_sub(begin_ns) / 1_000).unwrap_or(u32::MAX);
        let receipt = Receipt { client, version: u32::try_from(version).unwrap_or(u32::MAX), at_us };
        match self.pieces.last_mut().filter(|piece| piece.len() < PIECE) {
            Some(piece) => piece.push(receipt),
            None => {
                let mut piece = Vec::with_capacity(PIECE);
                piece.push(receipt);
                self.pieces.push(piece);
            }
        }
    }

    /// Ends the recording. A later version of an object counts as a receipt of all earlier ones that the client does
    /// not have.
    pub(crate) fn histograms(&mut self, clients: usize, mut changes: Vec<Change>) -> Histograms {
        let begin_ns = self.begin_ns.take().unwrap_or_default();
        changes.sort_by_key(|change| change.version);
        let (places, objects) = places(&changes);
        // For each client and object, the number of changes that the client has.
        let mut known = vec![0_u16; clients * objects.len()];
        let mut histograms = Histograms { expected: (clients * changes.len()) as u64, ..Histograms::default() };
        for receipt in self.pieces.iter().flatten() {
            let Some(place) = places.get(&u64::from(receipt.version)) else { continue };
            histograms.receipts += 1;
            let index = receipt.client as usize * objects.len() + place.object;
            let (Some(known), Some(of_object)) = (known.get_mut(index), objects.get(place.object)) else { continue };
            let new = of_object.iter().take(place.number + 1).skip((*known).into());
            for change in new.filter_map(|index| changes.get(*index)) {
                let at_ns = begin_ns + u64::from(receipt.at_us) * 1_000;
                histograms.from_answer.add(micros(at_ns, change.answered_ns));
                histograms.from_request.add(micros(at_ns, change.sent_ns));
            }
            *known = (*known).max(u16::try_from(place.number + 1).unwrap_or(u16::MAX));
        }
        self.pieces = Vec::new();
        histograms
    }
}

/// The place of each version, and the changes of each object in their order.
fn places(changes: &[Change]) -> (HashMap<u64, Place>, Vec<Vec<usize>>) {
    let (mut numbers, mut objects) = (HashMap::new(), Vec::<Vec<usize>>::new());
    let mut places = HashMap::new();
    for (index, change) in changes.iter().enumerate() {
        let object = *numbers.entry(&change.name).or_insert(objects.len());
        if object == objects.len() {
            objects.push(Vec::new());
        }
        let Some(of_object) = objects.get_mut(object) else { continue };
        places.insert(change.version, Place { object, number: of_object.len() });
        of_object.push(index);
    }
    (places, objects)
}

/// Microseconds between two moments; 0 if the receipt came before the answer.
fn micros(at_ns: u64, since_ns: u64) -> u32 {
    u32::try_from(at_ns.saturating_sub(since_ns) / 1_000).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(name: &str, version: u64, answered_ms: u64) -> Change {
        let answered_ns = answered_ms * 1_000_000;
        Change { name: name.to_owned(), version, sent_ns: answered_ns, answered_ns }
    }

    #[test]
    fn a_later_version_stands_for_earlier_ones() {
        let mut receipts = Receipts::default();
        receipts.push(0, 5, 0);
        receipts.begin(0);
        receipts.push(0, 12, 30_000_000);
        receipts.push(1, 10, 11_000_000);
        receipts.push(1, 11, 20_000_000);
        receipts.push(1, 99, 20_000_000);
        let changes = vec![change("a", 10, 10), change("b", 11, 21), change("a", 12, 20)];
        let mut histograms = receipts.histograms(2, changes);
        let latencies = histograms.latencies();
        // Client 0 has both versions of `a` at 30, client 1 the first one at 11, and `b` before its answer.
        assert_eq!((latencies.pairs, latencies.missing, latencies.receipts), (4, 2, 3));
        assert_eq!((latencies.p50_ms, latencies.max_ms), (1.0, 20.0));
        histograms.merge(&histograms.clone());
        assert_eq!((histograms.latencies().pairs, histograms.latencies().missing), (8, 4));
    }
}
