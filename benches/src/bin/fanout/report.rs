//! Tables and every sample.

use std::time::Duration;

use cproxy_benches::{
    paired::Estimate,
    report::{Figure, Report, Table, Verdict},
    summary::Summary,
};
use cproxy_tests::population::Shape;
use serde_json::{Map, Value, json};

use crate::{
    burst::{self, Burst},
    measure::{Found, Group, Plan, Start},
    verdicts,
};

const KIB: f64 = 1_024.0;
const MIB: f64 = 1_048_576.0;

pub(crate) const FIGURES: [Figure<Found>; 23] = [
    Figure {
        name: "first_ready_s",
        meaning: "all started at once: first ready, s",
        of: |found| starts(found, |start| first(&start.ready)),
    },
    Figure {
        name: "half_ready_s",
        meaning: "  half of them, s",
        of: |found| starts(found, |start| half(&start.ready)),
    },
    Figure { name: "last_ready_s", meaning: "  all of them, s", of: |found| starts(found, |start| last(&start.ready)) },
    Figure {
        name: "start_server_cpu_ms",
        meaning: "  API server's CPU for each, ms",
        of: |found| each_start(found, |start| start.cost.server_cpu_s * 1e3),
    },
    Figure {
        name: "start_client_cpu_ms",
        meaning: "  CPU of each, ms",
        of: |found| each_start(found, |start| start.cost.clients_cpu.as_secs_f64() * 1e3),
    },
    Figure {
        name: "start_sent_kib",
        meaning: "  sent to each, KiB",
        of: |found| each_start(found, |start| start.cost.sent_bytes as f64 / KIB),
    },
    Figure {
        name: "start_connections",
        meaning: "  connections and TLS handshakes of each",
        of: |found| each_start(found, |start| start.cost.connections as f64),
    },
    Figure {
        name: "server_peak_mib",
        meaning: "  API server's memory grows meanwhile by, MiB",
        of: |found| starts(found, |start| vec![start.server_peak_bytes / MIB]),
    },
    Figure {
        name: "server_live_kib",
        meaning: "at rest: API server's live memory for each, KiB",
        of: |found| each(found, found.server_live_bytes / KIB),
    },
    Figure {
        name: "open_connections",
        meaning: "  open connections of each",
        of: |found| each(found, found.open_connections as f64),
    },
    Figure {
        name: "resident_mib",
        meaning: "  resident memory of each, MiB",
        of: |found| found.resident_bytes.iter().map(|&bytes| bytes as f64 / MIB).collect(),
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
            let per_change = each_change(found, found.changes.sent_bytes as f64 / KIB);
            per_change.into_iter().flat_map(|kib| each(found, kib)).collect()
        },
    },
    Figure {
        name: "server_delay_s",
        meaning: "crash: API server is ready later by, s",
        of: |found| vec![found.crash.delay_s],
    },
    Figure {
        name: "first_returns_s",
        meaning: "  from then, first follows, s",
        of: |found| first(&found.crash.returns),
    },
    Figure { name: "half_return_s", meaning: "  half of them, s", of: |found| half(&found.crash.returns) },
    Figure { name: "last_returns_s", meaning: "  all of them, s", of: |found| last(&found.crash.returns) },
    Figure {
        name: "return_sent_kib",
        meaning: "  sent to each since the crash, KiB",
        of: |found| each(found, found.crash.cost.sent_bytes as f64 / KIB),
    },
    Figure {
        name: "return_connections",
        meaning: "  connections and TLS handshakes of each",
        of: |found| each(found, found.crash.cost.connections as f64),
    },
    Figure {
        name: "return_server_cpu_s",
        meaning: "  API server's CPU for all of them, s",
        of: |found| vec![found.crash.cost.server_cpu_s],
    },
];

/// Figures of a burst.
const BURST: [Figure<Burst>; 13] = [
    Figure { name: "first_ready_s", meaning: "first ready, s", of: |burst| first(&burst.start.ready) },
    Figure { name: "half_ready_s", meaning: "half of them, s", of: |burst| half(&burst.start.ready) },
    Figure { name: "last_ready_s", meaning: "all of them, s", of: |burst| last(&burst.start.ready) },
    Figure {
        name: "server_cpu_s",
        meaning: "API server's CPU for all of them, s",
        of: |burst| vec![burst.start.cost.server_cpu_s],
    },
    Figure {
        name: "server_peak_mib",
        meaning: "API server's memory grows by, MiB",
        of: |burst| vec![burst.start.server_peak_bytes / MIB],
    },
    Figure {
        name: "sent_mib",
        meaning: "sent to all of them, MiB",
        of: |burst| vec![burst.start.cost.sent_bytes as f64 / MIB],
    },
    Figure {
        name: "connections",
        meaning: "connections and TLS handshakes of each",
        of: |burst| vec![burst.start.cost.connections as f64 / f64::from(burst.group.count)],
    },
    Figure {
        name: "response_before_p50_ms",
        meaning: "response to a bystander before: median, ms",
        of: |burst| response(&burst.responses_before, |summary| summary.p50),
    },
    Figure {
        name: "response_before_p99_ms",
        meaning: "  p99, ms",
        of: |burst| response(&burst.responses_before, |summary| summary.p99),
    },
    Figure {
        name: "response_before_max_ms",
        meaning: "  slowest, ms",
        of: |burst| response(&burst.responses_before, |summary| summary.max),
    },
    Figure {
        name: "response_p50_ms",
        meaning: "response until all are ready: median, ms",
        of: |burst| response(&burst.responses, |summary| summary.p50),
    },
    Figure {
        name: "response_p99_ms",
        meaning: "  p99, ms",
        of: |burst| response(&burst.responses, |summary| summary.p99),
    },
    Figure {
        name: "response_max_ms",
        meaning: "  slowest, ms",
        of: |burst| response(&burst.responses, |summary| summary.max),
    },
];

/// The report without versions.
pub(crate) fn of(found: &[Found], bursts: &[Burst], plan: &Plan) -> Report {
    let mut shapes = found.iter().map(|found| found.group.shape).collect::<Vec<_>>();
    shapes.dedup();
    let verdicts = verdicts::of(found);
    let mut tables = shapes.into_iter().map(|shape| table(shape, found)).collect::<Vec<_>>();
    tables.extend((!bursts.is_empty()).then(|| burst_table(bursts)));
    tables.extend((!verdicts.is_empty()).then(|| Verdict::table(&verdicts)));
    Report {
        tables,
        notes: notes(found, plan),
        samples: samples(found, bursts, &verdicts, plan),
        ..Report::new("fanout")
    }
}

fn table(shape: Shape, found: &[Found]) -> Table {
    let title =
        format!("Clients of one API server with {} Services of {} endpoints each", shape.services, shape.endpoints);
    let found = found.iter().filter(|found| found.group.shape == shape).collect::<Vec<_>>();
    Figure::table(&FIGURES, title, &found, |found| format!("{} {}", found.group.count, found.group.kind))
}

fn burst_table(bursts: &[Burst]) -> Table {
    Figure::table(&BURST, "Agents that all start within a second".to_owned(), bursts, |burst| {
        let Group { kind, shape, count, .. } = burst.group;
        format!("{count} {kind}, {} Services", shape.services)
    })
}

fn notes(found: &[Found], plan: &Plan) -> Vec<String> {
    let mut notes = vec![
        format!(
            "Each agent has a cgroup, pins and a run directory of its own, as if it were alone in a microVM. All are \
             outside the API server's network namespace; the bytes that it sends are counted on the links between, \
             headers included, and so are the connections that it accepts, with one TLS handshake each. Medians of {} \
             starts of a single client and of at most {} changes of one EndpointSlice; brackets hold the 95 % interval \
             or, with few samples, the smallest and the largest value.",
            plan.starts_of_one, plan.changes
        ),
        format!(
            "Before each fleet the API server is killed and started again, so that each fleet meets one that has \
             served no other. Its idle CPU time, measured for {} s before, is subtracted from its CPU time, which can \
             therefore be below zero where there is little to measure. Its memory grows to a peak while clients start, \
             garbage included; live memory is that of the heap's objects and of the stacks after a garbage collection.",
            plan.idle.as_secs_f64()
        ),
        "API server, etcd and all clients share the machine's CPUs, the clients with a lower priority. Many agents \
         therefore start slowly mostly because the machine loads so many sets of programs, which microVMs do on CPUs \
         of their own, and not because of the API server. Whether an agent follows a change is read from its maps; \
         whether kube-proxy does, from TCP connections in the network namespace that each kube-proxy has of its own. \
         kube-proxy has its default settings, with which it writes its rules at most once a second."
            .to_owned(),
        format!(
            "\"Crash\" means that the API server was killed and started again under its clients. Its delay and its CPU \
             time are those beyond the same restart without clients, which takes some seconds and varies: they say \
             little for few clients. The other times start when it is ready again and show how far apart the clients \
             come back. Bytes and connections count from the crash until nothing has been sent for {} s.",
            plan.rest_after_crash.as_secs_f64()
        ),
        format!(
            "Before and during the start of many agents, a bystander reads one Service every {} ms, and again as soon \
             as a response took longer, on a connection of its own and as another user without special rights.",
            burst::PERIOD.as_millis()
        ),
    ];
    notes.extend(found.iter().map(|found| found.group).filter(|group| group.count < group.wanted).map(|group| {
        let Group { kind, shape, wanted, count } = group;
        format!("The machine has memory for {count} of {kind} with {} Services, not for {wanted}.", shape.services)
    }));
    notes
}

fn samples(found: &[Found], bursts: &[Burst], verdicts: &[Verdict], plan: &Plan) -> Value {
    let group = |figures: &mut Map<String, Value>, group: Group| {
        figures.insert("client".to_owned(), json!(group.kind.to_string()));
        figures.insert("count".to_owned(), json!(group.count));
        figures.insert("services".to_owned(), json!(group.shape.services));
        figures.insert("endpoints".to_owned(), json!(group.shape.endpoints));
    };
    let fleet = |found: &Found| {
        let mut figures = Figure::samples(&FIGURES, found);
        group(&mut figures, found.group);
        figures.insert("ready_s".to_owned(), found.starts.iter().map(|start| all_s(&start.ready)).collect());
        figures.insert("returns_s".to_owned(), json!(all_s(&found.crash.returns)));
        Value::Object(figures)
    };
    let burst = |burst: &Burst| {
        let mut figures = Figure::samples(&BURST, burst);
        group(&mut figures, burst.group);
        figures.insert("ready_s".to_owned(), json!(all_s(&burst.start.ready)));
        figures.insert("responses_ms".to_owned(), json!(all_ms(&burst.responses)));
        Value::Object(figures)
    };
    json!({
        "changes": plan.changes, "fleets": found.iter().map(fleet).collect::<Vec<_>>(),
        "bursts": bursts.iter().map(burst).collect::<Vec<_>>(),
        "verdicts": verdicts.iter().map(Verdict::json).collect::<Vec<_>>(),
    })
}

/// Samples of each start.
fn starts(found: &Found, samples: impl Fn(&Start) -> Vec<f64>) -> Vec<f64> {
    found.starts.iter().flat_map(samples).collect()
}

/// Share of each client in each start.
fn each_start(found: &Found, of_all: impl Fn(&Start) -> f64) -> Vec<f64> {
    starts(found, |start| each(found, of_all(start)))
}

/// Share of each client.
fn each(found: &Found, of_all: f64) -> Vec<f64> {
    vec![of_all / f64::from(found.group.count)]
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

fn response(times: &[Duration], of: impl Fn(Summary) -> f64) -> Vec<f64> {
    Summary::of(all_ms(times)).map(of).into_iter().collect()
}

fn all_s(times: &[Duration]) -> Vec<f64> {
    times.iter().map(Duration::as_secs_f64).collect()
}

fn all_ms(times: &[Duration]) -> Vec<f64> {
    times.iter().map(|time| time.as_secs_f64() * 1e3).collect()
}
