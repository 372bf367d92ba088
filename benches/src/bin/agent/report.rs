//! Tables and every sample.

use std::time::Duration;

use cproxy_benches::report::{Figure, Report, Table};
use serde_json::{Map, Value, json};

use crate::{
    Column,
    measure::{Burst, Found, Plan},
};

const FIGURES: [Figure<Found>; 17] = [
    Figure { name: "disk_mib", meaning: "on disk, MiB", of: |found| vec![mib(found.bytes_on_disk)] },
    Figure {
        name: "start_to_ready_s",
        meaning: "start to ready, s",
        of: |found| found.starts.iter().map(|start| start.to_ready.as_secs_f64()).collect(),
    },
    Figure {
        name: "cpu_to_sync_s",
        meaning: "CPU time until it is at rest, s",
        of: |found| found.starts.iter().map(|start| start.cpu.as_secs_f64()).collect(),
    },
    Figure {
        name: "resident_mib",
        meaning: "resident memory at rest, MiB",
        of: |found| found.starts.iter().map(|start| mib(start.memory.resident)).collect(),
    },
    Figure {
        name: "anonymous_mib",
        meaning: "  of which anonymous, MiB",
        of: |found| found.starts.iter().map(|start| mib(start.memory.anonymous)).collect(),
    },
    Figure {
        name: "peak_resident_mib",
        meaning: "peak resident memory until then, MiB",
        of: |found| found.starts.iter().map(|start| mib(start.memory.peak)).collect(),
    },
    Figure {
        name: "maps_kib",
        meaning: "kernel memory of its maps, KiB",
        of: |found| match found.maps.iter().map(|map| map.bytes).sum() {
            0 => Vec::new(),
            bytes => vec![bytes as f64 / 1024.0],
        },
    },
    Figure {
        name: "change_ms",
        meaning: "one change, until connections follow, ms",
        of: |found| all_ms(&found.changes),
    },
    Figure { name: "cpu_per_change_ms", meaning: "  CPU, ms", of: |found| vec![ms(found.cpu_per_change)] },
    Figure {
        name: "burst_sending_ms",
        meaning: "many changes at once: sending, ms",
        of: |found| of_bursts(found, |burst| ms(burst.sending)),
    },
    Figure {
        name: "burst_lag_ms",
        meaning: "  all in force after the last answer, ms",
        of: |found| of_bursts(found, |burst| ms(burst.lag)),
    },
    Figure { name: "burst_cpu_ms", meaning: "  CPU, ms", of: |found| of_bursts(found, |burst| ms(burst.cpu)) },
    Figure {
        name: "burst_peak_mib",
        meaning: "  peak resident memory, MiB",
        of: |found| of_bursts(found, |burst| mib(burst.peak_bytes)),
    },
    Figure {
        name: "resident_after_first_burst_mib",
        meaning: "  resident after the first time, MiB",
        of: |found| resident_after(found.bursts.first()),
    },
    Figure {
        name: "resident_after_last_burst_mib",
        meaning: "  resident after the last time, MiB",
        of: |found| resident_after(found.bursts.last()),
    },
    Figure { name: "sleeps_per_minute", meaning: "at rest: wake-ups a minute", of: |found| vec![found.quiet.sleeps] },
    Figure { name: "quiet_cpu_ms", meaning: "  CPU a minute, ms", of: |found| vec![ms(found.quiet.cpu)] },
];

/// The report without versions.
pub(crate) fn of(columns: &[Column], plan: &Plan) -> Report {
    Report {
        tables: columns.iter().map(table).collect(),
        notes: notes(columns, plan),
        failures: columns.iter().flat_map(|column| column.failures.clone()).collect(),
        samples: samples(columns, plan),
        ..Report::new("agent")
    }
}

fn table(Column { shape, found, .. }: &Column) -> Table {
    let title =
        format!("{} Services with {} endpoints each, in {} slices", shape.services, shape.endpoints, shape.slices());
    Figure::table(&FIGURES, title, found, |found| found.peer.to_string())
}

fn notes(columns: &[Column], plan: &Plan) -> Vec<String> {
    let mut notes = vec![
        format!(
            "Medians; brackets hold the 95 % interval or, with few samples, the smallest and the largest value. Single \
             changes: {}; many changes at once: {}, {} times; at rest: {} s. CPU time includes all threads and ended \
             child processes; memory is that of the process alone.",
            plan.changes,
            plan.burst,
            plan.bursts,
            plan.quiet.as_secs_f64()
        ),
        "All proxies follow the same objects of one API server, one after the other. kube-proxy has its default \
         settings, with which it writes its rules at most once a second. kube-proxy is ready at the first connection \
         that succeeds, because it writes all rules in one transaction; cproxy when its file `ready` exists, which is \
         when everything is written. kube-proxy serves a whole node and also translates forwarded packets; cproxy \
         serves the processes below one cgroup."
            .to_owned(),
    ];
    for Column { shape, found, .. } in columns {
        for found in found.iter().filter(|found| !found.maps.is_empty()) {
            let maps = found.maps.iter().map(|map| format!("{} {}", map.name, map.bytes.div_ceil(1024)));
            let maps = maps.collect::<Vec<_>>().join(", ");
            notes.push(format!("Maps of {} at {shape}, KiB: {maps}.", found.peer));
        }
    }
    notes
}

fn samples(columns: &[Column], plan: &Plan) -> Value {
    let column = |column: &Column| {
        let found = column.found.iter().map(|found| (found.peer.to_string(), figures(found)));
        json!({
            "services": column.shape.services, "endpoints": column.shape.endpoints,
            "slices": column.shape.slices(), "peers": found.collect::<Map<_, _>>(),
        })
    };
    let shapes = columns.iter().map(column).collect::<Vec<_>>();
    json!({"quiet_s": plan.quiet.as_secs_f64(), "burst": plan.burst, "shapes": shapes})
}

fn figures(found: &Found) -> Value {
    let maps = found.maps.iter().map(|map| (map.name.clone(), json!(map.bytes))).collect::<Map<_, _>>();
    let mut figures = Figure::samples(&FIGURES, found);
    figures.insert("maps_bytes".to_owned(), maps.into());
    figures.into()
}

fn of_bursts(found: &Found, of: impl Fn(&Burst) -> f64) -> Vec<f64> {
    found.bursts.iter().map(of).collect()
}

fn resident_after(burst: Option<&Burst>) -> Vec<f64> {
    burst.map(|burst| mib(burst.resident_bytes)).into_iter().collect()
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn all_ms(times: &[Duration]) -> Vec<f64> {
    times.iter().copied().map(ms).collect()
}
