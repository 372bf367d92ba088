//! Tables and files.

use std::time::Duration;

use cproxy_benches::machine::Machine;
use cproxy_benches::paired::Estimate;
use serde_json::{Map, Value, json};

use crate::Column;
use crate::measure::{Found, Plan};

/// A line of the table: of one or many samples.
struct Row {
    name: &'static str,
    meaning: &'static str,
    of: fn(&Found) -> Vec<f64>,
}

const ROWS: [Row; 15] = [
    Row { name: "disk_mib", meaning: "on disk, MiB", of: |found| vec![mib(found.bytes_on_disk)] },
    Row {
        name: "start_to_ready_s",
        meaning: "start to ready, s",
        of: |found| found.starts.iter().map(|start| start.to_ready.as_secs_f64()).collect(),
    },
    Row {
        name: "cpu_to_sync_s",
        meaning: "CPU until it is at rest, s",
        of: |found| found.starts.iter().map(|start| start.cpu.as_secs_f64()).collect(),
    },
    Row {
        name: "resident_mib",
        meaning: "then resident, MiB",
        of: |found| found.starts.iter().map(|start| mib(start.memory.resident)).collect(),
    },
    Row {
        name: "anonymous_mib",
        meaning: "  of it anonymous, MiB",
        of: |found| found.starts.iter().map(|start| mib(start.memory.anonymous)).collect(),
    },
    Row {
        name: "peak_resident_mib",
        meaning: "the most up to then, MiB",
        of: |found| found.starts.iter().map(|start| mib(start.memory.peak)).collect(),
    },
    Row {
        name: "maps_kib",
        meaning: "kernel memory of its maps, KiB",
        of: |found| match found.maps.iter().map(|map| map.bytes).sum() {
            0 => Vec::new(),
            bytes => vec![bytes as f64 / 1024.0],
        },
    },
    Row { name: "change_ms", meaning: "one change, until connections follow, ms", of: |found| all_ms(&found.changes) },
    Row { name: "cpu_per_change_ms", meaning: "  CPU, ms", of: |found| vec![ms(found.cpu_per_change)] },
    Row {
        name: "burst_sending_ms",
        meaning: "1,000 changes at once: sending, ms",
        of: |found| vec![ms(found.burst.sending)],
    },
    Row {
        name: "burst_lag_ms",
        meaning: "  all in force after the last answer, ms",
        of: |found| vec![ms(found.burst.lag)],
    },
    Row { name: "burst_cpu_ms", meaning: "  CPU, ms", of: |found| vec![ms(found.burst.cpu)] },
    Row { name: "burst_peak_mib", meaning: "  most resident, MiB", of: |found| vec![mib(found.burst.peak_bytes)] },
    Row { name: "sleeps_per_minute", meaning: "at rest: wake-ups a minute", of: |found| vec![found.quiet.sleeps] },
    Row { name: "quiet_cpu_ms", meaning: "  CPU a minute, ms", of: |found| vec![ms(found.quiet.cpu)] },
];

pub(crate) fn print(column: &Column) {
    let Column { shape, found, .. } = column;
    println!("\n{} Services with {} endpoints each, in {} slices", shape.services, shape.endpoints, shape.slices());
    print!("{:<42}", "");
    found.iter().for_each(|found| print!("{:>28}", found.peer));
    println!();
    for Row { meaning, of, .. } in &ROWS {
        print!("{meaning:<42}");
        found.iter().for_each(|found| print!("{:>28}", cell(of(found))));
        println!();
    }
    for found in found {
        let maps = found.maps.iter().map(|map| format!("{} {}", map.name, map.bytes.div_ceil(1024)));
        let maps = maps.collect::<Vec<_>>();
        if !maps.is_empty() {
            println!("maps of {}, KiB: {}", found.peer, maps.join(", "));
        }
    }
}

pub(crate) fn print_foot(versions: &str, plan: &Plan) {
    println!("\nmachine:  {}", Machine::this());
    println!("versions: {versions}");
    println!("Medians, and in brackets the interval of 95 % or, of few samples, the least and the most.");
    println!("Single changes: {}; at rest: {} s.", plan.changes, plan.quiet.as_secs());
    println!(
        "CPU is that of all threads and of children that have ended; memory is the process's own, without children."
    );
}

pub(crate) fn json(columns: &[Column], versions: &str, plan: &Plan) -> Value {
    let column = |column: &Column| {
        let found = column.found.iter().map(|found| (found.peer.to_string(), figures(found)));
        json!({
            "services": column.shape.services, "endpoints": column.shape.endpoints,
            "slices": column.shape.slices(), "peers": found.collect::<Map<_, _>>(),
        })
    };
    json!({
        "benchmark": "agent", "machine": Machine::this().json(), "versions": versions, "quiet_s": plan.quiet.as_secs(),
        "shapes": columns.iter().map(column).collect::<Vec<_>>(),
    })
}

fn figures(found: &Found) -> Value {
    let samples = ROWS.iter().map(|row| (row.name.to_owned(), json!((row.of)(found))));
    let maps = found.maps.iter().map(|map| (map.name.clone(), json!(map.bytes))).collect::<Map<_, _>>();
    samples.chain([("maps_bytes".to_owned(), Value::Object(maps))]).collect::<Map<_, _>>().into()
}

/// As many digits as say something.
fn cell(samples: Vec<f64>) -> String {
    let count = samples.len();
    match Estimate::of(samples) {
        None => "-".to_owned(),
        Some(estimate) => {
            let digits = match estimate.median {
                0.0..10.0 => 2,
                10.0..1_000.0 => 1,
                _ => 0,
            };
            if count == 1 { format!("{:.digits$}", estimate.median) } else { format!("{estimate:.digits$}") }
        }
    }
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
