//! The load generator's processes, as their parent sees them.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use cproxy_tests::{
    sandbox::{Placement, Sandbox},
    usage::cpu_time,
};

use rustix::process::{Pid, setpriority_process};

use crate::{
    LOAD,
    load::{
        protocol::{Answer, Counts, Expected, Order, Start},
        receipts::{Change, Histograms, Latencies},
    },
    pin,
};

/// Limit on the time until all clients have what they wait for.
const TIME_MAX_S: u64 = 600;

/// Time after which all clients have listed anew, and the interval of checks until then.
const LIST_TIME_MAX: Duration = Duration::from_secs(90);
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Number of processes. A client has one descriptor, and while it waits to connect again up to three.
const PROCESSES: u32 = 2;

/// Clients with a process of their own, which is never behind: they show the server's time alone.
const UNHURRIED: u32 = 20;
/// Niceness of that process.
const UNHURRIED_NICENESS: i32 = -10;

/// A running load generator. It ends when this value is dropped.
pub(crate) struct Generator {
    processes: Vec<Process>,
    unhurried: Process,
    pub(crate) clients: u32,
}

/// One of its processes.
struct Process {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Generator {
    /// Starts it on its own CPU.
    pub(crate) fn start(sandbox: &Sandbox) -> Result<Self> {
        let processes = (0..PROCESSES).map(|_| Process::start(sandbox)).collect::<Result<_>>()?;
        let unhurried = Process::start(sandbox)?;
        setpriority_process(Pid::from_raw(unhurried.child.id() as i32), UNHURRIED_NICENESS)
            .context("raising a priority")?;
        Ok(Self { processes, unhurried, clients: 0 })
    }

    /// CPU time of all processes.
    pub(crate) fn cpu_time(&self) -> Duration {
        self.processes.iter().map(|process| cpu_time(process.child.id())).sum()
    }

    /// Gives all processes the same order.
    fn order_all(&mut self, order: &Order) -> Result<Vec<Answer>> {
        self.processes.iter_mut().try_for_each(|process| process.send(order))?;
        self.processes.iter_mut().map(Process::answer).collect()
    }

    /// Starts further clients.
    pub(crate) fn start_clients(&mut self, start: &Start) -> Result<()> {
        if self.clients == 0 {
            self.unhurried.obey(&Order::Start(Start { count: UNHURRIED, checked: 0, nodes: 0, ..start.clone() }))?;
        }
        self.clients += start.count;
        for (number, process) in (0..).zip(&mut self.processes) {
            let part = |all: u32| all / PROCESSES + u32::from(number < all % PROCESSES);
            let (count, checked, nodes) = (part(start.count), part(start.checked), part(start.nodes));
            process.send(&Order::Start(Start { count, checked, nodes, ..start.clone() }))?;
        }
        self.processes.iter_mut().try_for_each(|process| process.answer().map(drop))
    }

    /// Waits until all clients have all lists. Returns the moment at which the last one had them.
    pub(crate) fn wait_for_lists(&mut self) -> Result<u64> {
        self.reach(&Order::WaitForLists { time_max_s: TIME_MAX_S }, "both lists")
    }

    /// Waits until all clients have all Services and slices up to these versions. Returns the moment.
    pub(crate) fn settle(&mut self, versions: [u64; 2]) -> Result<u64> {
        self.reach(&Order::Settle { versions, time_max_s: TIME_MAX_S }, "all changes")
    }

    fn reach(&mut self, order: &Order, what: &str) -> Result<u64> {
        let (mut have, mut all, mut last_ns) = (0, 0, 0);
        for answer in self.order_all(order)? {
            let Answer::Reached { count, of, at_ns } = answer else { bail!("unexpected answer: {answer:?}") };
            (have, all, last_ns) = (have + count, all + of, last_ns.max(at_ns));
        }
        ensure!(have == all, "only {have} of {all} clients have {what} after {TIME_MAX_S} s");
        Ok(last_ns)
    }

    /// Begins to record receipts.
    pub(crate) fn record(&mut self) -> Result<()> {
        self.unhurried.obey(&Order::Record)?;
        self.order_all(&Order::Record).map(drop)
    }

    /// Ends the recording. Returns the latencies of all clients, and of those with a process of their own.
    pub(crate) fn latencies(&mut self, changes: &[Change]) -> Result<[Latencies; 2]> {
        let order = Order::Latencies(changes.to_vec());
        let all = merge(self.order_all(&order)?)?;
        Ok([all, merge(vec![self.unhurried.obey(&order)?])?])
    }

    /// Fails if a client that decodes everything has something else than expected, also after a while: some may list.
    /// Returns the number of these clients.
    pub(crate) fn check(&mut self, expected: &Expected) -> Result<usize> {
        let end = Instant::now() + LIST_TIME_MAX;
        loop {
            let (mut all, mut different) = (0, Vec::new());
            for answer in self.order_all(&Order::Check(expected.clone()))? {
                let Answer::Differences(count, differences) = answer else { bail!("unexpected answer: {answer:?}") };
                different.extend(differences);
                all += count;
            }
            if different.is_empty() {
                return Ok(all);
            }
            ensure!(Instant::now() < end, "clients have something else: {}", different.join("; "));
            thread::sleep(CHECK_INTERVAL);
        }
    }

    /// Starts clients that decode nothing, and waits until they have all lists. Returns the moment of the last.
    pub(crate) fn run_readers(
        &mut self,
        count: u32,
        server: &str,
        versions: [u64; 2],
        spread: Duration,
    ) -> Result<u64> {
        let (count, spread_ms) = (count / PROCESSES, spread.as_millis() as u64);
        self.order_all(&Order::StartReaders { count, server: server.to_owned(), versions, spread_ms })?;
        self.reach(&Order::WaitForReaders { count: count as usize, time_max_s: TIME_MAX_S }, "both lists")
    }

    /// Starts clients that read one byte a second.
    pub(crate) fn start_slow(&mut self, count: u32, server: &str, version: u64) -> Result<()> {
        let order = Order::StartSlow { count: count / PROCESSES, server: server.to_owned(), version };
        self.order_all(&order).map(drop)
    }

    /// Counters so far.
    pub(crate) fn counts(&mut self) -> Result<Counts> {
        let mut sum = Counts::default();
        for answer in self.order_all(&Order::Count)? {
            let Answer::Counts(Counts { lists, events, slow_bytes, slow_ended }) = answer else {
                bail!("unexpected answer: {answer:?}")
            };
            sum.lists += lists;
            sum.events += events;
            sum.slow_bytes += slow_bytes;
            sum.slow_ended += slow_ended;
        }
        Ok(sum)
    }
}

fn merge(answers: Vec<Answer>) -> Result<Latencies> {
    let mut histograms = Histograms::default();
    for answer in answers {
        let Answer::Histograms(of_one) = answer else { bail!("unexpected answer: {answer:?}") };
        histograms.merge(&of_one);
    }
    Ok(histograms.latencies())
}

impl Process {
    /// Sends an order and waits for the answer.
    fn obey(&mut self, order: &Order) -> Result<Answer> {
        self.send(order)?;
        self.answer()
    }

    fn start(sandbox: &Sandbox) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe().context("finding this program")?);
        command.arg(LOAD).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = sandbox.place(&mut command, Placement::Unhooked).spawn().context("starting the generator")?;
        let orders = child.stdin.take().context("no standard input")?;
        let answers = BufReader::new(child.stdout.take().context("no standard output")?);
        pin::to_cpu(child.id(), pin::GENERATOR_CPU)?;
        Ok(Self { child, orders, answers })
    }

    fn send(&mut self, order: &Order) -> Result<()> {
        writeln!(self.orders, "{}", serde_json::to_string(order)?).context("ordering the generator")?;
        self.orders.flush().context("ordering the generator")
    }

    fn answer(&mut self) -> Result<Answer> {
        let mut line = String::new();
        self.answers.read_line(&mut line).context("reading the generator's answer")?;
        ensure!(!line.is_empty(), "the load generator has ended");
        serde_json::from_str(&line).context("reading the generator's answer")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
