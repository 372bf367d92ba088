//! Rounds in which each subject has a turn, and their comparison with a pod without a policy.

use anyhow::{Context as _, Result};
use cproxy_benches::{
    paired::{Estimate, turns},
    report::{Table, Target, Verdict},
};
use cproxy_tests::sandbox::Sandbox;
use serde_json::{Map, Value, json};

use crate::{
    calls::{self, METRICS},
    engine::Subject,
    place::{Servers, Stand},
};

/// A subject with the samples of each of [`METRICS`], one for each round.
pub(crate) struct Measured {
    pub(crate) subject: Subject,
    samples: Vec<Vec<f64>>,
}

/// All subjects, the first of which is the control.
pub(crate) struct Rounds(pub(crate) Vec<Measured>);

/// Runs the rounds after one that warms up.
pub(crate) fn measure(sandbox: &Sandbox, stands: &[Stand], outside: &Servers, rounds: usize) -> Result<Rounds> {
    let empty = |stand: &Stand| Measured { subject: stand.subject, samples: vec![Vec::new(); METRICS.len()] };
    let mut all: Vec<_> = stands.iter().map(empty).collect();
    for round in 0..=rounds {
        for index in turns(stands.len(), round) {
            let (stand, measured) = stands.get(index).zip(all.get_mut(index)).context("each has a turn")?;
            let figures = calls::all(sandbox, stand, outside).with_context(|| stand.subject.to_string())?;
            if round > 0 {
                measured.samples.iter_mut().zip(figures).for_each(|(samples, figure)| samples.push(figure));
            }
        }
    }
    Ok(Rounds(all))
}

impl Measured {
    fn samples(&self, metric: usize) -> &[f64] {
        self.samples.get(metric).map_or(&[], Vec::as_slice)
    }
}

impl Rounds {
    fn ratio(&self, of: &Measured, metric: usize) -> Option<Estimate> {
        Estimate::of_ratios(of.samples(metric), self.0.first()?.samples(metric))
    }

    /// A line for each subject, two columns for each of these metrics.
    pub(crate) fn table(&self, title: &str, metrics: &[usize]) -> Table {
        let metrics: Vec<_> = metrics.iter().filter_map(|&index| Some((index, METRICS.get(index)?))).collect();
        let columns = metrics.iter().flat_map(|(_, metric)| [metric.meaning.to_owned(), "ratio".to_owned()]);
        let row = |measured: &Measured| {
            let cells = metrics.iter().flat_map(|&(index, metric)| {
                let digits = metric.digits;
                let own = Estimate::of(measured.samples(index).iter().copied());
                let own = own.map_or_else(|| "-".to_owned(), |own| format!("{:.digits$}", own.median));
                let ratio = self.ratio(measured, index);
                [own, ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}"))]
            });
            (measured.subject.to_string(), cells.collect())
        };
        Table { title: title.to_owned(), columns: columns.collect(), rows: self.0.iter().map(row).collect() }
    }

    /// The ratios of the most important metrics, for an overview.
    pub(crate) fn summary(&self, metrics: &[(usize, &str)]) -> Table {
        let row = |measured: &Measured| {
            let cell = |&(metric, _): &(usize, &str)| {
                self.ratio(measured, metric).map_or_else(|| "-".to_owned(), |ratio| format!("{:.3}", ratio.median))
            };
            (measured.subject.to_string(), metrics.iter().map(cell).collect())
        };
        Table {
            title: "Network policy, time of calls, ratio to a pod without one".to_owned(),
            columns: metrics.iter().map(|(_, name)| (*name).to_owned()).collect(),
            rows: self.0.iter().skip(1).map(row).collect(),
        }
    }

    /// The aims for pods that cproxy isolates.
    pub(crate) fn verdicts(&self) -> Vec<Verdict> {
        let of_metric = METRICS.iter().enumerate().filter_map(|(index, metric)| Some((index, metric, metric.aim?)));
        let verdicts = of_metric.flat_map(|(index, metric, aim)| {
            let isolated = self.0.iter().filter(|measured| {
                let engine = measured.subject.engine;
                engine.is_of_cproxy() && engine.isolates()
            });
            isolated.filter_map(move |measured| {
                let what = format!("{}: {}", metric.meaning, measured.subject);
                Some(Verdict { what, found: self.ratio(measured, index)?, target: Target::AtMost(aim) })
            })
        });
        verdicts.collect()
    }

    /// The samples, for a file of results.
    pub(crate) fn json(&self) -> Value {
        let of = |measured: &Measured| {
            let metrics = METRICS.iter().enumerate().map(|(index, metric)| {
                let ratio = self.ratio(measured, index).map(|ratio| ratio.json());
                (metric.key.to_owned(), json!({"samples": measured.samples(index), "ratio": ratio}))
            });
            (measured.subject.to_string(), Value::from(metrics.collect::<Map<_, _>>()))
        };
        self.0.iter().map(of).collect::<Map<_, _>>().into()
    }
}
