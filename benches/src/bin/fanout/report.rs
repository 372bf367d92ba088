//! Tables, charts and every sample.

use std::time::Duration;

use cproxy_benches::{
    paired::Estimate,
    plot::{Axis, Chart, Point, Series},
    report::{Figure, Report, Table},
};
use cproxy_tests::population::Shape;
use serde_json::{Value, json};

use crate::{
    fleet::Kind,
    measure::{Found, Plan},
};

const FIGURES: [Figure<Found>; 17] = [
    Figure { name: "first_ready_s", meaning: "all started at once: first ready, s", of: |found| first(&found.ready) },
    Figure { name: "half_ready_s", meaning: "  half of them, s", of: |found| half(&found.ready) },
    Figure { name: "last_ready_s", meaning: "  all of them, s", of: |found| last(&found.ready) },
    Figure {
        name: "start_server_cpu_ms",
        meaning: "  API server's CPU for each, ms",
        of: |found| each(found, found.start.server_cpu_s * 1e3),
    },
    Figure {
        name: "start_client_cpu_ms",
        meaning: "  CPU of each, ms",
        of: |found| each(found, found.start.clients_cpu.as_secs_f64() * 1e3),
    },
    Figure {
        name: "start_sent_kib",
        meaning: "  sent to each, KiB",
        of: |found| each(found, found.start.sent_bytes as f64 / 1024.0),
    },
    Figure {
        name: "server_growth_kib",
        meaning: "  API server's memory for each, KiB",
        of: |found| each(found, found.server_growth_bytes / 1024.0),
    },
    Figure {
        name: "resident_mib",
        meaning: "  resident memory of each, MiB",
        of: |found| found.resident_bytes.iter().map(|&bytes| bytes as f64 / f64::from(1 << 20)).collect(),
    },
    Figure {
        name: "first_follows_ms",
        meaning: "one change: first follows, ms",
        of: |found| all_ms(&found.first_follows),
    },
    Figure { name: "last_follows_ms", meaning: "  all follow, ms", of: |found| all_ms(&found.last_follows) },
    Figure {
        name: "change_server_cpu_ms",
        meaning: "  API server's CPU, ms",
        of: |found| each_change(found, found.changes.server_cpu_s * 1e3),
    },
    Figure {
        name: "change_clients_cpu_ms",
        meaning: "  CPU of all of them, ms",
        of: |found| each_change(found, found.changes.clients_cpu.as_secs_f64() * 1e3),
    },
    Figure {
        name: "change_sent_kib",
        meaning: "  sent to each, KiB",
        of: |found| {
            let per_change = each_change(found, found.changes.sent_bytes as f64 / 1024.0);
            per_change.into_iter().flat_map(|kib| each(found, kib)).collect()
        },
    },
    Figure {
        name: "first_returns_s",
        meaning: "API server is back: first follows, s",
        of: |found| first(&found.returns),
    },
    Figure { name: "half_return_s", meaning: "  half of them, s", of: |found| half(&found.returns) },
    Figure { name: "last_returns_s", meaning: "  all of them, s", of: |found| last(&found.returns) },
    Figure {
        name: "return_sent_kib",
        meaning: "  sent to each, KiB",
        of: |found| match found.returns.as_slice() {
            [] => Vec::new(),
            _ => each(found, found.return_bytes as f64 / 1024.0),
        },
    },
];

/// Figures with a chart over the number of clients: name of the figure and of the chart, title, unit.
const CHARTS: [(&str, &str, &str, &str); 3] = [
    ("change_server_cpu_ms", "change-cpu", "The API server's CPU time for one change", "ms"),
    ("last_follows_ms", "change-time", "From sending a change until all follow it", "ms"),
    ("start_server_cpu_ms", "start-cpu", "The API server's CPU time for each client's start", "ms"),
];

/// The report without versions.
pub(crate) fn of(shape: Shape, found: &[Found], plan: &Plan) -> Report {
    Report {
        tables: vec![table(shape, found)],
        charts: charts(found),
        notes: notes(plan),
        samples: samples(shape, found, plan),
        ..Report::new("fanout")
    }
}

fn table(shape: Shape, found: &[Found]) -> Table {
    let title =
        format!("Clients of one API server with {} Services of {} endpoints each", shape.services, shape.endpoints);
    Figure::table(&FIGURES, title, found, |found| format!("{} {}", found.count, found.kind))
}

fn charts(found: &[Found]) -> Vec<Chart> {
    let charts = CHARTS.iter().filter_map(|&(figure, name, title, unit)| {
        let figure = Figure::named(&FIGURES, figure)?;
        let series = Kind::ALL.map(|kind| Series {
            name: kind.to_string(),
            points: found
                .iter()
                .filter(|found| found.kind == kind)
                .filter_map(|found| Some(Point { x: f64::from(found.count), y: figure.estimate(found)? }))
                .collect(),
        });
        Some(Chart {
            name: name.to_owned(),
            title: title.to_owned(),
            x: Axis::log("clients"),
            y: Axis::log(unit),
            series: series.into(),
        })
    });
    charts.collect()
}

fn notes(plan: &Plan) -> Vec<String> {
    vec![
        format!(
            "Each agent has a cgroup, pins and a run directory of its own, as if it were alone in a microVM. All are \
             outside the API server's network namespace; the bytes that it sends are counted on the links between, \
             headers included. Medians of {} changes of one EndpointSlice; brackets hold the 95 % interval or, with \
             few samples, the smallest and the largest value.",
            plan.changes
        ),
        format!(
            "The API server's idle CPU time, measured for {} s before, is subtracted from its CPU time, which can \
             therefore be below zero where there is little to measure. Its memory includes what its garbage collector \
             has not given back, so the growth for few clients says little.",
            plan.idle.as_secs_f64()
        ),
        "API server, etcd and all clients share the machine's CPUs. Many agents therefore start slowly mostly because \
         the machine loads so many sets of programs, which microVMs do on CPUs of their own, and not because of the \
         API server. Whether an agent follows a change is read from its maps; whether kube-proxy does, from TCP \
         connections in the network namespace that each kube-proxy has of its own. kube-proxy has its default \
         settings, with which it writes its rules at most once a second."
            .to_owned(),
        "\"API server is back\" means after a crash: times start when it serves again and show how far apart the \
         clients come back. The bytes sent then show whether clients resume their watches or list everything again."
            .to_owned(),
    ]
}

fn samples(shape: Shape, found: &[Found], plan: &Plan) -> Value {
    let fleet = |found: &Found| {
        let mut figures = Figure::samples(&FIGURES, found);
        figures.insert("client".to_owned(), json!(found.kind.to_string()));
        figures.insert("count".to_owned(), json!(found.count));
        figures.insert("ready_s".to_owned(), json!(all_s(&found.ready)));
        figures.insert("returns_s".to_owned(), json!(all_s(&found.returns)));
        Value::Object(figures)
    };
    json!({
        "services": shape.services, "endpoints": shape.endpoints, "changes": plan.changes,
        "fleets": found.iter().map(fleet).collect::<Vec<_>>(),
    })
}

/// Share of each client.
fn each(found: &Found, of_all: f64) -> Vec<f64> {
    vec![of_all / f64::from(found.count)]
}

/// Share of each change.
fn each_change(found: &Found, of_all: f64) -> Vec<f64> {
    vec![of_all / found.first_follows.len().max(1) as f64]
}

fn first(times: &[Duration]) -> Vec<f64> {
    all_s(times).into_iter().reduce(f64::min).into_iter().collect()
}

fn half(times: &[Duration]) -> Vec<f64> {
    Estimate::of(all_s(times)).map(|estimate| estimate.median).into_iter().collect()
}

fn last(times: &[Duration]) -> Vec<f64> {
    all_s(times).into_iter().reduce(f64::max).into_iter().collect()
}

fn all_s(times: &[Duration]) -> Vec<f64> {
    times.iter().map(Duration::as_secs_f64).collect()
}

fn all_ms(times: &[Duration]) -> Vec<f64> {
    times.iter().map(|time| time.as_secs_f64() * 1e3).collect()
}
