//! Cost of cproxy's socket programs: the runs of each program as the kernel times them, and whole system calls.
//!
//! Times differ between machines, and on a shared machine from minute to minute. So every time is compared with another
//! one of the same round: a program with an empty program on the same hook, a call with the same call without any
//! program. A round runs every case once, as a block of calls, in a new order each time. The result is the median of
//! the rounds' ratios.
//!
//! One process in one cgroup makes all the calls, and the programs attached to the cgroup change between the blocks.
//! Two cgroups, one of them without programs, would be simpler, but then nothing would be compared with a machine
//! without cproxy: once a program is attached anywhere, every socket's call takes the slow path past its hook and, for
//! UDP, takes the socket's lock for it (include/linux/bpf-cgroup.h, `BPF_CGROUP_RUN_SA_PROG_LOCK`).
//!
//! The kernel's statistics are on while programs are timed, and off for whole calls. They take time themselves, all of
//! which is part of the empty program's figure; differences do not include it.

mod cases;
mod place;

use std::{fs, path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser;
use cproxy_benches::{
    bpf::{Program, enable_statistics},
    paired::Estimate,
    report::{Report, Table, Target, Verdict, check_output},
};
use cproxy_tests::process::cproxy_binary;
use serde_json::{Value, json};

use crate::{
    cases::{CALLS, Case, Meter, SUITES, Subject, Suite},
    place::{Attached, HOOKS, Observation, Peers, Place, Programs},
};

/// Rounds of `--quick`.
const QUICK_ROUNDS: usize = 3;

/// Command line.
#[derive(Parser)]
#[command(name = "datapath", about = "What the socket programs cost, run by run and call by call")]
struct Arguments {
    /// How many rounds are measured
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Only a few rounds, which show that everything works; the figures mean little
    #[arg(long, conflicts_with = "rounds")]
    quick: bool,
    /// Number of other Services, with ten endpoints each
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(..=5_000))]
    services: u16,
    /// Measures the tracing set of the programs with counters by Service, as of `run --service-counters`
    #[arg(long)]
    service_counters: bool,
    /// Measures the tracing set while `cproxy trace` reads each call
    #[arg(long, conflicts_with = "service_counters")]
    trace: bool,
    /// Only this hook, such as connect4; may be repeated
    #[arg(long = "hook", value_name = "HOOK", value_parser = HOOKS.map(|hook| hook.name))]
    hooks: Vec<String>,
    /// Fails when a target is missed
    #[arg(long)]
    strict: bool,
    /// File for all samples; default: bench/datapath.json in cargo's output directory
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// A suite in one family, with its results.
struct Column<'p> {
    suite: &'static Suite,
    peers: &'p Peers,
    hook: String,
    rows: Vec<Row>,
}

/// A case with the time of each round.
struct Row {
    case: &'static Case,
    times_ns: Vec<f64>,
}

/// A case compared with the first of its suite.
struct Compared<'c> {
    row: &'c Row,
    difference: Estimate,
    ratio: Estimate,
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    check_output(arguments.output.as_deref())?;
    // Fields drop from right to left: nothing is attached any more when the sandbox goes.
    let Place { sandbox: _sandbox, peers, tracer: _tracer, mut programs } =
        Place::prepare(arguments.services, arguments.observation())?;
    let mut columns = columns(&arguments, &peers);
    require(&programs, &columns)?;
    let rounds = if arguments.quick { QUICK_ROUNDS } else { arguments.rounds as usize };
    let others = measure(&mut programs, &mut columns, rounds)?;
    programs.attach(Attached::Nothing)?;
    let verdicts = columns.iter().flat_map(Column::verdicts).collect::<Vec<_>>();
    let mut report = Report::new("datapath");
    report.add_version("cproxy", cproxy_binary(), &["version"]);
    report.tables = columns.iter().map(|column| column.table(&programs)).collect::<Result<_>>()?;
    report.tables.push(Verdict::table(&verdicts));
    report.notes = notes(&arguments, rounds, others);
    report.samples = json!({
        "unit": "ns", "rounds": rounds, "calls_per_round": CALLS, "services": arguments.services,
        "programs_of_others": others,
        "suites": columns.iter().map(|column| column.json(&programs)).collect::<Result<Vec<_>>>()?,
        "verdicts": verdicts.iter().map(Verdict::json).collect::<Vec<_>>(),
    });
    report.finish(arguments.quick, arguments.output.as_deref())?;
    let is_met = verdicts.iter().all(Verdict::is_met);
    Ok(if is_met || !arguments.strict { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Arguments {
    fn observation(&self) -> Observation {
        match self {
            Self { trace: true, .. } => Observation::Trace,
            Self { service_counters: true, .. } => Observation::Counters,
            _ => Observation::None,
        }
    }
}

/// Requested columns.
fn columns<'p>(arguments: &Arguments, peers: &'p [Peers; 2]) -> Vec<Column<'p>> {
    let column = |suite: &'static Suite, peers: &'p Peers| {
        let rows = suite.cases.iter().map(|case| Row { case, times_ns: Vec::new() }).collect();
        Column { suite, peers, hook: suite.hook_in(peers.family), rows }
    };
    let mut columns =
        SUITES.iter().flat_map(|suite| peers.iter().map(move |peers| column(suite, peers))).collect::<Vec<_>>();
    columns.retain(|column| arguments.hooks.is_empty() || arguments.hooks.contains(&column.hook));
    columns
}

/// Fails if the agent has not attached a program that is to be measured.
fn require(programs: &Programs, columns: &[Column<'_>]) -> Result<()> {
    let is_missing = |hook: &&str| {
        columns.iter().any(|column| column.hook == *hook) && programs.get(hook, Attached::Cproxy).is_none()
    };
    let missing = HOOKS.map(|hook| hook.name).into_iter().filter(is_missing).collect::<Vec<_>>();
    ensure!(
        missing.is_empty(),
        "the agent has attached nothing to {}: mend the build, or name the other hooks with --hook",
        missing.join(", ")
    );
    Ok(())
}

/// Runs all rounds. Returns the number of other users' programs on these hooks, at the start or at the end.
fn measure(programs: &mut Programs, columns: &mut [Column<'_>], rounds: usize) -> Result<usize> {
    let enabled = fs::read_to_string("/proc/sys/kernel/bpf_stats_enabled").unwrap_or_default();
    if enabled.trim() == "1" {
        bail!("kernel.bpf_stats_enabled is 1, which would slow whole calls down: set it to 0 with sysctl");
    }
    let others = programs.of_others()?;
    let statistics = enable_statistics().context("switching BPF statistics on")?;
    measure_subject(programs, columns, Subject::Program, rounds)?;
    drop(statistics);
    measure_subject(programs, columns, Subject::Call, rounds)?;
    Ok(others.max(programs.of_others()?))
}

/// Runs the rounds after a warm-up round.
fn measure_subject(programs: &mut Programs, columns: &mut [Column<'_>], subject: Subject, rounds: usize) -> Result<()> {
    for round in 0..=rounds {
        for Column { suite, peers, hook, rows } in columns.iter_mut().filter(|column| column.suite.subject == subject) {
            let (later, sooner) = rows.split_at_mut(round % suite.cases.len());
            for Row { case, times_ns } in sooner.iter_mut().chain(later) {
                programs.attach(case.attached)?;
                let meter = match subject {
                    Subject::Call => Meter::Clock,
                    Subject::Program => Meter::Program(programs.get(hook, case.attached).context("it is attached")?),
                };
                let time_ns =
                    (case.run)(peers, &meter).with_context(|| format!("{hook}: {}, {}", suite.name, case.name))?;
                if round > 0 {
                    times_ns.push(time_ns);
                }
            }
        }
    }
    Ok(())
}

impl Column<'_> {
    fn title(&self) -> String {
        match self.suite.subject {
            Subject::Program if self.hook == self.suite.hook => {
                format!("{}, {}, IPv{}", self.hook, self.suite.name, self.peers.family.digit())
            }
            Subject::Program => format!("{}, {}", self.hook, self.suite.name),
            Subject::Call => format!("{}, IPv{}", self.suite.name, self.peers.family.digit()),
        }
    }

    /// The first case.
    fn baseline(&self) -> Option<&Row> {
        self.rows.first()
    }

    /// The other cases, compared with the first.
    fn compared(&self) -> impl Iterator<Item = Compared<'_>> {
        let rows = self.rows.iter().skip(1);
        rows.filter_map(|row| Some(Compared { row, difference: self.difference(row)?, ratio: self.ratio(row)? }))
    }

    fn difference(&self, row: &Row) -> Option<Estimate> {
        Estimate::of_differences(&row.times_ns, &self.baseline()?.times_ns)
    }

    fn ratio(&self, row: &Row) -> Option<Estimate> {
        Estimate::of_ratios(&row.times_ns, &self.baseline()?.times_ns)
    }

    /// Cost of creating a socket's state, and the two cases that show it.
    fn new_state(&self) -> Option<(Estimate, &Row, &Row)> {
        let (made, found) = self.suite.new_state?;
        let (made, found) = (self.rows.get(made)?, self.rows.get(found)?);
        Some((Estimate::of_differences(&made.times_ns, &found.times_ns)?, made, found))
    }

    /// Number of instructions that the verifier processed; `None` for whole calls.
    fn verified_instructions(&self, programs: &Programs) -> Result<Option<u64>> {
        let program = programs.get(&self.hook, Attached::Cproxy).filter(|_| self.suite.subject == Subject::Program);
        let info = program.map(Program::info).transpose().context("asking for a program's size")?;
        Ok(info.map(|info| info.verified_instructions))
    }

    fn verdicts(&self) -> impl Iterator<Item = Verdict> {
        self.compared().filter_map(|Compared { row, ratio, .. }| {
            let of = self.baseline()?.case.name;
            let what = format!("{}: `{}` over `{of}`", self.title(), row.case.name);
            Some(Verdict { what, found: ratio, target: Target::AtMost(row.case.target?) })
        })
    }

    fn table(&self, programs: &Programs) -> Result<Table> {
        let instructions = self.verified_instructions(programs)?;
        let instructions = instructions.map_or_else(String::new, |count| format!(", {count} instructions verified"));
        let row = |row: &Row, difference: String, ratio: String| {
            (row.case.name.to_owned(), vec![format!("{:.1}", row.median_ns()), difference, ratio])
        };
        let baseline = self.baseline().map(|baseline| row(baseline, String::new(), String::new()));
        let compared = self.compared().map(|compared| {
            let Compared { difference, ratio, .. } = compared;
            row(compared.row, format!("{difference:.1}"), format!("{ratio:.3}"))
        });
        let new_state = self.new_state().map(|(cost, made, found)| {
            let what = format!("the socket's state: `{}` less `{}`", made.case.name, found.case.name);
            (what, vec![String::new(), format!("{cost:.1}"), String::new()])
        });
        Ok(Table {
            title: format!("{}{instructions}", self.title()),
            columns: ["ns", "difference, ns", "ratio"].map(str::to_owned).into(),
            rows: baseline.into_iter().chain(compared).chain(new_state).collect(),
        })
    }

    fn json(&self, programs: &Programs) -> Result<Value> {
        let of_row = |row: &Row| {
            let compared = (self.difference(row), self.ratio(row));
            json!({
                "case": row.case.name, "median": row.median_ns(), "samples": row.times_ns, "target": row.case.target,
                "difference": compared.0.map(|estimate| estimate.json()),
                "ratio": compared.1.map(|estimate| estimate.json()),
            })
        };
        Ok(json!({
            "name": self.title(), "verified_instructions": self.verified_instructions(programs)?,
            "new_state": self.new_state().map(|(cost, ..)| cost.json()),
            "cases": self.rows.iter().map(of_row).collect::<Vec<_>>(),
        }))
    }
}

impl Row {
    fn median_ns(&self) -> f64 {
        Estimate::of(self.times_ns.iter().copied()).map_or(f64::NAN, |estimate| estimate.median)
    }
}

fn notes(arguments: &Arguments, rounds: usize, others: usize) -> Vec<String> {
    let services = arguments.services;
    let mut notes = vec![
        format!(
            "Times are medians of {rounds} rounds with {CALLS} calls of each kind; brackets hold the 95 % interval. \
             Differences and ratios are to the table's first row, round by round: unlike times, they are comparable \
             between machines and runs. {services} Services with ten endpoints each were present in both families."
        ),
        "Whole calls are compared with calls while nothing is attached; runs of a program are compared with those of \
         an empty program on the same hook, both as timed by the kernel's BPF statistics."
            .to_owned(),
    ];
    notes.extend(arguments.observation().note().map(str::to_owned));
    if others > 0 {
        notes.push(format!(
            "{others} foreign programs were attached to these hooks: `nothing attached` is not quite true, and the \
             ratios of whole calls are a little too good."
        ));
    }
    notes
}
