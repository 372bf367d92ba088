//! Load generator: a process of its own with thousands of clients on one thread, which obeys orders on its standard
//! input.

mod brief;
mod clients;
pub(crate) mod protocol;
mod readers;
pub(crate) mod receipts;
mod slow;

use std::{
    io::{BufRead as _, Write as _},
    sync::{Arc, atomic::Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use cproxy_wire::configure;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::mpsc;

use self::{
    clients::{Shared, options, wait_until},
    protocol::{Answer, Counts, Order},
    readers::Readers,
    slow::Slow,
};
use crate::clock::now_ns;

/// Obeys orders until there are no more.
pub(crate) fn run() -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
        .context("raising the limit of open files")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting tokio")?;
    let (sender, mut orders) = mpsc::unbounded_channel();
    thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    let result = runtime.block_on(async {
        let clients = Clients::default();
        while let Some(line) = orders.recv().await {
            let order = serde_json::from_str(&line).context("reading an order")?;
            let answer = obey(&clients, order).await?;
            let mut output = std::io::stdout().lock();
            writeln!(output, "{}", serde_json::to_string(&answer)?).and_then(|()| output.flush())?;
        }
        Ok(())
    });
    runtime.shutdown_background();
    result
}

/// All kinds of clients.
#[derive(Default)]
struct Clients {
    shared: Arc<Shared>,
    readers: Arc<Readers>,
    slow: Arc<Slow>,
}

async fn obey(Clients { shared, readers, slow }: &Clients, order: Order) -> Result<Answer> {
    Ok(match order {
        Order::Start(start) => {
            let configuration = configure(&options(&start)).await?;
            let first = shared.add(start.count);
            drop(tokio::spawn(clients::start(shared.clone(), first, start, configuration)));
            Answer::Done
        }
        Order::WaitForLists { time_max_s } => {
            let of = shared.clients();
            wait_until(Duration::from_secs(time_max_s), || shared.synced().0 >= shared.clients()).await;
            let (count, at_ns) = shared.synced();
            Answer::Reached { count, of: of.max(shared.clients()), at_ns }
        }
        Order::Record => {
            shared.receipts().begin(now_ns());
            Answer::Done
        }
        Order::Settle { versions, time_max_s } => {
            let of = shared.clients();
            wait_until(Duration::from_secs(time_max_s), || shared.settled(versions) >= of).await;
            Answer::Reached { count: shared.settled(versions), of, at_ns: now_ns() }
        }
        Order::Latencies(changes) => Answer::Histograms(shared.receipts().histograms(shared.clients(), changes)),
        Order::Check(expected) => {
            let (count, differences) = shared.differences(&expected);
            Answer::Differences(count, differences)
        }
        Order::StartReaders { count, server, versions, spread_ms } => {
            let (server, spread) = (server.parse().context("an address")?, Duration::from_millis(spread_ms));
            drop(tokio::spawn(readers::start(readers.clone(), count, server, versions, spread)));
            Answer::Done
        }
        Order::WaitForReaders { count, time_max_s } => {
            let watching = || readers.watching.load(Ordering::Relaxed) as usize;
            let failed = || readers.failed.load(Ordering::Relaxed) as usize;
            wait_until(Duration::from_secs(time_max_s), || watching() + failed() >= count).await;
            let at_ns = readers.last_ns.load(Ordering::Relaxed);
            Answer::Reached { count: watching().saturating_sub(failed()), of: count, at_ns }
        }
        Order::StartSlow { count, server, version } => {
            slow::start(slow, count, &server, version);
            Answer::Done
        }
        Order::Count => Answer::Counts(Counts {
            lists: shared.lists.load(Ordering::Relaxed),
            events: shared.events.load(Ordering::Relaxed),
            slow_bytes: slow.bytes.load(Ordering::Relaxed),
            slow_ended: slow.ended.load(Ordering::Relaxed),
        }),
    })
}
