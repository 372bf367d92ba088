//! Targets for the cost of each agent.

use std::fmt;

use cproxy_benches::{
    paired::Estimate,
    report::{Figure, Target, Verdict},
};
use cproxy_tests::population::Shape;

use crate::{fleet::Kind, measure::Found, report::FIGURES};

/// Shape with which the former cost was measured: that of the agents that listed as JSON over three connections.
const FORMER: Shape = Shape::new(1_000, 10);

/// Target for a figure of cproxy.
struct Aim {
    figure: &'static str,
    meaning: &'static str,
    base: Base,
    /// Limit of the ratio.
    at_most: f64,
}

/// Divisor of a ratio.
enum Base {
    /// The same figure of other clients.
    Kind(Kind),
    /// A number, with its unit.
    Value(f64, &'static str),
    /// The same for the shape [`FORMER`] alone.
    Former(f64, &'static str),
}

const AIMS: [Aim; 8] = [
    Aim {
        figure: "start_server_cpu_ms",
        meaning: "API server's CPU for each start",
        base: Base::Former(77.8, "ms"),
        at_most: 0.25,
    },
    Aim {
        figure: "start_server_cpu_ms",
        meaning: "API server's CPU for each start",
        base: Base::Kind(Kind::Before),
        at_most: 0.25,
    },
    Aim {
        figure: "start_server_cpu_ms",
        meaning: "API server's CPU for each start",
        base: Base::Kind(Kind::KubeProxy),
        at_most: 1.0,
    },
    Aim { figure: "start_sent_kib", meaning: "sent for each start", base: Base::Former(4_367.0, "KiB"), at_most: 0.5 },
    Aim { figure: "start_sent_kib", meaning: "sent for each start", base: Base::Kind(Kind::Before), at_most: 0.5 },
    Aim { figure: "start_sent_kib", meaning: "sent for each start", base: Base::Kind(Kind::KubeProxy), at_most: 1.0 },
    Aim {
        figure: "return_sent_kib",
        meaning: "sent to each after a crash",
        base: Base::Value(20_000.0 / 1_024.0, "KiB"),
        at_most: 1.0,
    },
    Aim {
        figure: "start_connections",
        meaning: "connections for each start",
        base: Base::Value(1.0, "connection"),
        at_most: 1.0,
    },
];

/// Verdicts for each shape. The number of agents with the largest ratio decides.
pub(crate) fn of(found: &[Found]) -> Vec<Verdict> {
    let mut shapes = found.iter().map(|found| found.group.shape).collect::<Vec<_>>();
    shapes.dedup();
    shapes.into_iter().flat_map(|shape| AIMS.iter().filter_map(move |aim| verdict(aim, shape, found))).collect()
}

fn verdict(aim: &Aim, shape: Shape, all: &[Found]) -> Option<Verdict> {
    let figure = Figure::named(&FIGURES, aim.figure)?;
    let of = |kind: Kind| all.iter().filter(move |found| found.group.shape == shape && found.group.kind == kind);
    let base = |agents: &Found| match aim.base {
        Base::Kind(kind) => figure.estimate(of(kind).find(|found| found.group.wanted == agents.group.wanted)?),
        Base::Former(..) if shape != FORMER => None,
        Base::Value(value, _) | Base::Former(value, _) => Some(Estimate { median: value, low: value, high: value }),
    };
    let ratios = of(Kind::Cproxy).filter_map(|agents| Some(figure.estimate(agents)?.over(base(agents)?)));
    let what = format!("{}, {} Services: cproxy over {}", aim.meaning, shape.services, aim.base);
    let found = ratios.max_by(|one, other| one.median.total_cmp(&other.median))?;
    Some(Verdict { what, found, target: Target::AtMost(aim.at_most) })
}

impl fmt::Display for Base {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kind(kind) => write!(f, "{kind}"),
            Self::Value(value, unit) | Self::Former(value, unit) => write!(f, "{value:.1} {unit}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        measure::{Crash, Group, Start},
        place::Cost,
    };

    /// A fleet each of whose clients costs that much.
    fn fleet(kind: Kind, shape: Shape, count: u32, server_cpu_ms: f64, sent_kib: u32) -> Found {
        let cost = |connections: u32| Cost {
            server_cpu_s: server_cpu_ms / 1e3 * f64::from(count),
            clients_cpu: Duration::ZERO,
            sent_bytes: u64::from(sent_kib * count) << 10,
            connections: u64::from(connections * count),
        };
        Found {
            group: Group { kind, shape, wanted: count, count },
            starts: vec![Start { ready: Vec::new(), cost: cost(1), server_peak_bytes: 0.0 }],
            server_live_bytes: 0.0,
            resident_bytes: Vec::new(),
            open_connections: 0,
            first_follows: Vec::new(),
            last_follows: Vec::new(),
            changes: cost(0),
            crash: Crash { delay_s: 0.0, returns: Vec::new(), cost: cost(2) },
        }
    }

    fn ratios(found: &[Found]) -> Vec<(String, String)> {
        of(found).into_iter().map(|verdict| (verdict.what, format!("{:.2}", verdict.found.median))).collect()
    }

    #[test]
    fn the_number_of_agents_with_the_largest_ratio_decides() {
        let found = [
            fleet(Kind::Cproxy, FORMER, 1, 7.78, 1_000),
            fleet(Kind::KubeProxy, FORMER, 1, 15.56, 2_000),
            fleet(Kind::Cproxy, FORMER, 10, 15.56, 1_000),
            fleet(Kind::KubeProxy, FORMER, 10, 15.56, 2_000),
        ];
        let wanted = [
            ("API server's CPU for each start, 1000 Services: cproxy over 77.8 ms", "0.20"),
            ("API server's CPU for each start, 1000 Services: cproxy over kube-proxy, nftables", "1.00"),
            ("sent for each start, 1000 Services: cproxy over 4367.0 KiB", "0.23"),
            ("sent for each start, 1000 Services: cproxy over kube-proxy, nftables", "0.50"),
            ("sent to each after a crash, 1000 Services: cproxy over 19.5 KiB", "51.20"),
            ("connections for each start, 1000 Services: cproxy over 1.0 connection", "1.00"),
        ];
        assert_eq!(ratios(&found), wanted.map(|(what, ratio)| (what.to_owned(), ratio.to_owned())));
    }

    #[test]
    fn the_former_cost_is_a_target_for_its_shape_alone() {
        let shape = Shape::new(5_000, 10);
        let found = [fleet(Kind::Cproxy, shape, 1, 10.0, 10), fleet(Kind::Before, shape, 1, 100.0, 100)];
        let ratios = ratios(&found);
        assert!(ratios.iter().all(|(what, _)| !what.contains("77.8")), "{ratios:?}");
        let before = ratios.iter().filter(|(what, _)| what.ends_with("cproxy before")).map(|(_, ratio)| ratio.as_str());
        assert_eq!(before.collect::<Vec<_>>(), ["0.10", "0.10"]);
    }
}
