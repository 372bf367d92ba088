//! Targets for the cost of each agent.

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

impl std::fmt::Display for Base {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Kind(kind) => write!(f, "{kind}"),
            Self::Value(value, unit) | Self::Former(value, unit) => write!(f, "{value:.1} {unit}"),
        }
    }
}
