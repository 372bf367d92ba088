//! Measurement in rounds: each peer has one turn in every round, and its result is compared with that of the direct
//! connection in the same round.

use std::{fmt, net::SocketAddr};

use anyhow::Result;
use cproxy_benches::{
    arena::{Arena, Peer, Stand, Subject},
    paired::{Estimate, turns},
    report::{Report, Table, Target, Verdict},
};
use serde_json::{Map, Value, json};

/// Interquartile range of the direct connection's samples, relative to their median, above which the machine counts as
/// noisy.
const NOISY: f64 = 0.10;

/// One figure that is measured.
#[derive(Clone, Copy)]
pub(crate) struct Metric {
    /// Name in files.
    pub(crate) key: &'static str,
    /// Name in tables, with its unit.
    pub(crate) meaning: &'static str,
    pub(crate) digits: usize,
    /// Whether reports show its ratio to the direct connection's.
    pub(crate) is_compared: bool,
}

/// Participant of a contest: a peer's clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Participant {
    stand: usize,
    way: Way,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// The peer in normal use.
    Usual,
    /// The same once more, to show the effect of chance.
    Again,
    /// Connections directly to the pod while the peer's rules are in force.
    ToPod,
}

/// Numbers of rounds.
#[derive(Clone, Copy)]
pub(crate) struct Rounds {
    /// Rounds in which all participants have a turn.
    pub(crate) of_all: u32,
    /// Further rounds with only the direct connection, cproxy and iptables, which targets compare. Settling these small
    /// differences takes more rounds than estimating the other peers' cost.
    pub(crate) of_compared: u32,
}

/// Measurements with one number of Services.
pub(crate) struct Measured {
    metrics: &'static [Metric],
    participants: Vec<(String, Outcome)>,
}

/// The samples of each metric, round by round, or why there are none.
enum Outcome {
    Samples(Vec<Vec<f64>>),
    Failed(String),
}

/// Each peer by its ClusterIP.
pub(crate) fn participants(arena: &Arena<'_>) -> Vec<Participant> {
    (0..arena.stands.len()).map(|stand| Participant { stand, way: Way::Usual }).collect()
}

/// Each peer by its ClusterIP and, with its rules in place, by the pod's address, which is the cost for the rest of a
/// pod's traffic; and the direct connection again.
pub(crate) fn participants_and_bystanders(arena: &Arena<'_>) -> Vec<Participant> {
    let proxies = participants_of_proxies(arena);
    let others = participants(arena).into_iter().map(|participant| {
        let way = if proxies.contains(&participant) { Way::ToPod } else { Way::Again };
        Participant { way, ..participant }
    });
    participants(arena).into_iter().chain(others).collect()
}

/// Each peer that chooses a backend.
pub(crate) fn participants_of_proxies(arena: &Arena<'_>) -> Vec<Participant> {
    let chooses =
        |participant: &Participant| arena.stands.get(participant.stand).is_some_and(|stand| stand.peer != Peer::Direct);
    participants(arena).into_iter().filter(chooses).collect()
}

impl Rounds {
    pub(crate) const fn of_all(of_all: u32) -> Self {
        Self { of_all, of_compared: 0 }
    }
}

impl fmt::Display for Rounds {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} rounds", self.of_all)?;
        if self.of_compared > 0 {
            write!(out, ", then {} of only the direct connection, cproxy and iptables", self.of_compared)?;
        }
        Ok(())
    }
}

/// Measures in rounds. A participant that fails once is left out from then on.
pub(crate) fn measure(
    arena: &mut Arena<'_>,
    participants: &[Participant],
    subject: &Subject,
    metrics: &'static [Metric],
    rounds: Rounds,
    mut once: impl FnMut(&mut Stand<'_>, SocketAddr) -> Result<Vec<f64>>,
) -> Measured {
    let names = participants.iter().map(|participant| participant.name(arena)).collect::<Vec<_>>();
    let mut outcomes: Vec<_> = names.iter().map(|_| Outcome::Samples(vec![Vec::new(); metrics.len()])).collect();
    let all = (0..participants.len()).collect::<Vec<_>>();
    let is_compared =
        |index: &usize| participants.get(*index).is_some_and(|participant| participant.is_compared(arena));
    let compared = all.iter().copied().filter(is_compared).collect::<Vec<_>>();
    let stages = [(all, rounds.of_all), (compared, rounds.of_compared)];
    let rounds = stages.iter().flat_map(|(who, rounds)| (0..*rounds as usize).map(move |round| (who, round)));
    for (who, round) in rounds {
        for index in turns(who.len(), round).filter_map(|place| who.get(place).copied()) {
            let (Some(participant), Some(outcome)) = (participants.get(index), outcomes.get_mut(index)) else {
                continue;
            };
            let (Some(stand), Outcome::Samples(samples)) = (arena.stands.get_mut(participant.stand), &mut *outcome)
            else {
                continue;
            };
            let pod = subject.backends.first().copied().filter(|_| participant.way == Way::ToPod);
            let address = pod.unwrap_or_else(|| stand.address(subject));
            match once(stand, address) {
                Ok(figures) => samples.iter_mut().zip(figures).for_each(|(samples, figure)| samples.push(figure)),
                Err(error) => {
                    eprintln!("{} failed: {error:#}", names.get(index).map_or("", String::as_str));
                    *outcome = Outcome::Failed(format!("{error:#}"));
                }
            }
        }
    }
    Measured { metrics, participants: names.into_iter().zip(outcomes).collect() }
}

impl Participant {
    /// Whether it has a turn in [`Rounds::of_compared`].
    fn is_compared(self, arena: &Arena<'_>) -> bool {
        let peer = arena.stands.get(self.stand).map(|stand| stand.peer);
        self.way == Way::Usual && matches!(peer, Some(Peer::Direct | Peer::Cproxy | Peer::Iptables))
    }

    fn name(self, arena: &Arena<'_>) -> String {
        let peer = arena.stands.get(self.stand).map_or(String::new(), |stand| stand.peer.to_string());
        match self.way {
            Way::Usual => peer,
            Way::Again => format!("{peer}, again"),
            Way::ToPod => format!("{peer}, to the pod"),
        }
    }
}

impl Measured {
    /// Merges with another measurement of the same metrics, made in other rounds.
    pub(crate) fn and(mut self, other: Self) -> Self {
        self.participants.extend(other.participants);
        self
    }

    fn samples(&self, name: &str, metric: usize) -> Option<&[f64]> {
        let (_, outcome) = self.participants.iter().find(|(other, _)| other == name)?;
        match outcome {
            Outcome::Samples(samples) => samples.get(metric).map(Vec::as_slice),
            Outcome::Failed(_) => None,
        }
    }

    fn direct(&self, metric: usize) -> Option<&[f64]> {
        self.samples(&Peer::Direct.to_string(), metric)
    }

    /// Ratio of a participant's figures to a peer's, round by round.
    fn ratio(&self, name: &str, to: Peer, metric: usize) -> Option<Estimate> {
        Estimate::of_ratios(self.samples(name, metric)?, self.samples(&to.to_string(), metric)?)
    }

    /// Ratio of cproxy's figures to a peer's.
    pub(crate) fn of_cproxy(&self, to: Peer, metric: usize) -> Option<Estimate> {
        self.ratio(&Peer::Cproxy.to_string(), to, metric)
    }

    /// Differences of cproxy's figures from a peer's, round by round.
    pub(crate) fn added_by_cproxy(&self, to: Peer, metric: usize) -> Option<Estimate> {
        Estimate::of_differences(
            self.samples(&Peer::Cproxy.to_string(), metric)?,
            self.samples(&to.to_string(), metric)?,
        )
    }

    /// A line for each metric and for its ratio to the direct connection's.
    pub(crate) fn table(&self, title: String) -> Table {
        let columns = self.participants.iter().map(|(name, _)| name.clone()).collect();
        let mut rows = Vec::new();
        for (index, metric) in self.metrics.iter().enumerate() {
            let cells = |of: &dyn Fn(&[f64]) -> Option<String>| -> Vec<String> {
                let cell = |(name, outcome): &(String, Outcome)| match outcome {
                    Outcome::Failed(_) => "failed".to_owned(),
                    Outcome::Samples(_) => self.samples(name, index).and_then(of).unwrap_or_else(|| "-".to_owned()),
                };
                self.participants.iter().map(cell).collect()
            };
            let digits = metric.digits;
            let absolute = |samples: &[f64]| Some(shown(Estimate::of(samples.iter().copied())?, samples.len(), digits));
            rows.push((metric.meaning.to_owned(), cells(&absolute)));
            if let Some(direct) = self.direct(index).filter(|_| metric.is_compared) {
                let ratio = |samples: &[f64]| Some(shown(Estimate::of_ratios(samples, direct)?, samples.len(), 3));
                rows.push(("  to direct".to_owned(), cells(&ratio)));
            }
        }
        Table { title, columns, rows }
    }

    /// The participants that have failed, and why.
    pub(crate) fn failures(&self, when: &str) -> impl Iterator<Item = String> {
        self.participants.iter().filter_map(move |(name, outcome)| match outcome {
            Outcome::Failed(message) => Some(format!("{when}: {name}: {message}")),
            Outcome::Samples(_) => None,
        })
    }

    /// Noise of the direct connection's rounds, if it is high: their interquartile range relative to their median.
    fn noise(&self) -> Option<f64> {
        self.direct(0).and_then(spread).filter(|spread| *spread > NOISY)
    }

    /// The samples, for a file of results.
    pub(crate) fn json(&self) -> Value {
        let of = |(name, outcome): &(String, Outcome)| {
            let value = match outcome {
                Outcome::Failed(message) => json!({"failed": message}),
                Outcome::Samples(samples) => {
                    let metrics = self.metrics.iter().zip(samples);
                    metrics
                        .map(|(metric, samples)| (metric.key.to_owned(), json!(samples)))
                        .collect::<Map<_, _>>()
                        .into()
                }
            };
            (name.clone(), value)
        };
        self.participants.iter().map(of).collect::<Map<_, _>>().into()
    }
}

/// Adds a table for each number of Services, the samples, and notes for the reader.
pub(crate) fn add(report: &mut Report, what: &str, key: &str, all: &[(u32, Measured)]) {
    for (services, measured) in all {
        let when = format!("{what}, {services} Services");
        report.tables.push(measured.table(when.clone()));
        report.failures.extend(measured.failures(&when));
    }
    let noise = all.iter().filter_map(|(services, measured)| {
        Some(format!("{:.0} % of its median with {services} Services", measured.noise()? * 100.0))
    });
    let noise = noise.collect::<Vec<_>>();
    if !noise.is_empty() {
        report.notes.push(format!(
            "{what}: a noisy run. The middle half of the direct connection's rounds spans {}. Noise that lasts for a \
             whole round does not change its ratios; noise in a part of a round widens their intervals.",
            noise.join(", ")
        ));
    }
    if all.iter().any(|(_, measured)| measured.direct(0).is_none() && measured.metrics.iter().any(|it| it.is_compared))
    {
        report.notes.push(format!("{what}: there are no ratios where the direct connection was not measured."));
    }
    let samples = all.iter().map(|(services, measured)| (services.to_string(), measured.json()));
    if let Value::Object(object) = &mut report.samples {
        object.insert(key.to_owned(), samples.collect::<Map<_, _>>().into());
    }
}

/// Sentences that compare each peer with the direct connection.
fn compared(all: &[(u32, Measured)]) -> Vec<String> {
    let names = all.first().map(|(_, measured)| measured.participants.iter().map(|(name, _)| name.clone()));
    names.into_iter().flatten().filter(|name| *name != Peer::Direct.to_string()).collect()
}

/// A metric's ratio to the direct connection's, a line for each number of Services.
pub(crate) fn summary(what: &str, metric: usize, all: &[(u32, Measured)]) -> Option<Table> {
    let (_, first) = all.first()?;
    let columns = compared(all);
    let row = |(services, measured): &(u32, Measured)| {
        let ratio = |name: &String| measured.ratio(name, Peer::Direct, metric);
        let cell = |name| ratio(name).map_or_else(|| "-".to_owned(), |ratio| format!("{:.2}", ratio.median));
        (format!("{services} Services"), columns.iter().map(cell).collect())
    };
    let title = format!("{what}, {}, ratio to the direct connection's", first.metrics.get(metric)?.meaning);
    Some(Table { title, rows: all.iter().map(row).collect(), columns })
}

/// Adds all results as [`add`] does, and a metric's overview, a short table.
pub(crate) fn add_with_overview(
    report: &mut Report,
    (what, key): (&str, &str),
    metric: usize,
    all: &[(u32, Measured)],
) {
    add(report, what, key, all);
    report.summary.extend(summary(what, metric, all));
}

/// Verdicts on cproxy's target for a metric beside another peer, for each of the given numbers of Services.
pub(crate) fn verdicts(
    all: &[(u32, Measured)],
    (metric, to): (usize, Peer),
    target: Target,
    is_meant: impl Fn(u32) -> bool,
) -> Vec<Verdict> {
    let verdict = |(services, measured): &(u32, Measured)| {
        let meaning = measured.metrics.get(metric)?.meaning;
        let what = format!("{meaning}, {services} Services: cproxy over {to}");
        Some(Verdict { what, found: measured.of_cproxy(to, metric)?, target })
    };
    all.iter().filter(|(services, _)| is_meant(*services)).filter_map(verdict).collect()
}

/// Verdict over all rounds with any number of Services, since the cost must not depend on that number.
pub(crate) fn verdict_of_all(all: &[(u32, Measured)], (metric, to): (usize, Peer), target: Target) -> Option<Verdict> {
    let meaning = all.first()?.1.metrics.get(metric)?.meaning;
    let samples = |peer: Peer| {
        all.iter().map(move |(_, measured)| measured.samples(&peer.to_string(), metric)).collect::<Option<Vec<_>>>()
    };
    let found = Estimate::of_ratios(&samples(Peer::Cproxy)?.concat(), &samples(to)?.concat())?;
    Some(Verdict { what: format!("{meaning}, all numbers of Services: cproxy over {to}"), found, target })
}

/// Verdict on whether cproxy's ratio to the direct connection stays the same from the fewest Services to the most.
pub(crate) fn flatness(all: &[(u32, Measured)], metric: usize, at_most: f64) -> Option<Verdict> {
    let [(few, first), .., (many, last)] = all else { return None };
    let ratio = |measured: &Measured| measured.of_cproxy(Peer::Direct, metric);
    let what = format!(
        "{}, cproxy over direct: {many} Services over {few}",
        first.metrics.get(metric).map_or("", |metric| metric.meaning)
    );
    Some(Verdict { what, found: ratio(last)?.over(ratio(first)?), target: Target::AtMost(at_most) })
}

/// Adds verdicts to the notes and to the samples.
pub(crate) fn add_verdicts(report: &mut Report, verdicts: &[Verdict]) {
    if verdicts.is_empty() {
        return;
    }
    report.tables.push(Verdict::table(verdicts));
    if let Value::Object(object) = &mut report.samples {
        object.insert("verdicts".to_owned(), verdicts.iter().map(Verdict::json).collect());
    }
}

fn shown(estimate: Estimate, samples: usize, digits: usize) -> String {
    if samples == 1 { format!("{:.digits$}", estimate.median) } else { format!("{estimate:.digits$}") }
}

/// Interquartile range relative to the median.
fn spread(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let at = |quarter: usize| sorted.get((sorted.len() * quarter / 4).min(sorted.len().checked_sub(1)?)).copied();
    Some((at(3)? - at(1)?) / at(2)?)
}
