//! A client that reads one Service again and again while others storm the relay.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use cproxy_benches::summary::Summary;
use cproxy_tests::sandbox::Sandbox;

/// Time from one request to the next. The relay allows a connection 20 a second.
const PERIOD: Duration = Duration::from_millis(60);

/// Limit on a response.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Running client.
pub(crate) struct Bystander {
    is_done: Arc<AtomicBool>,
    thread: JoinHandle<Result<Vec<Duration>>>,
}

impl Bystander {
    /// Connects to a relay and begins.
    pub(crate) fn start(sandbox: &Sandbox, address: &'static str) -> Self {
        let is_done = Arc::new(AtomicBool::new(false));
        let (flag, netns) = (is_done.clone(), sandbox.netns().clone());
        let thread = thread::spawn(move || {
            netns.enter().context("entering a network namespace")?;
            read_repeatedly(address, &flag)
        });
        Self { is_done, thread }
    }

    /// Ends. Returns the response times in milliseconds.
    pub(crate) fn end(self) -> Result<Summary> {
        self.is_done.store(true, Ordering::Relaxed);
        let times = self.thread.join().map_err(|_| anyhow!("the bystander has panicked"))??;
        Summary::of(times.iter().map(|time| time.as_secs_f64() * 1_000.0)).context("the bystander got no response")
    }
}

fn read_repeatedly(address: &str, is_done: &AtomicBool) -> Result<Vec<Duration>> {
    let mut stream = TcpStream::connect(address).context("the bystander connects")?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut times = Vec::new();
    while !is_done.load(Ordering::Relaxed) {
        let sent = Instant::now();
        let path = "/api/v1/namespaces/default/services/service-00000";
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n").context("the bystander's request")?;
        read_response(&mut reader).context("the bystander's response")?;
        let time = sent.elapsed();
        times.push(time);
        thread::sleep(PERIOD.saturating_sub(time));
    }
    Ok(times)
}

/// Reads a response that tells its length.
fn read_response(reader: &mut BufReader<TcpStream>) -> Result<()> {
    let (mut length, mut line) = (None, String::new());
    reader.read_line(&mut line)?;
    ensure!(line.starts_with("HTTP/1.1 200 "), "{line}");
    while line.trim_end() != "" {
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().ok();
        }
        line.clear();
        reader.read_line(&mut line)?;
    }
    let mut body = vec![0; length.context("no Content-Length")?];
    Ok(reader.read_exact(&mut body)?)
}
