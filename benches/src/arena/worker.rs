//! A client process in its peer's namespace and cgroup that connects on command.

use std::{
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    os::fd::OwnedFd,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail};
use cproxy_tests::own_files::own_files;
use rustix::{
    io::Errno,
    net::{
        AddressFamily, SocketFlags, SocketType,
        sockopt::{self, Timeout},
    },
};

/// Argument that makes a benchmark process a worker.
pub const ARGUMENT: &str = "worker";

/// Limit for a connection or an answer, which may pass hundreds of thousands of rules.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// A short request, and the start of its answer.
const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\r\n";
const ANSWER: &[u8] = b"HTTP/1.1 200 ";

/// A running worker. It ends when this value is dropped.
#[derive(Debug)]
pub struct Worker {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

/// Duration of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Took {
    /// connect(2) alone.
    pub connect_ns: u32,
    /// From before socket(2) until after close(2).
    pub whole_ns: u32,
}

/// Numbers of requests by what became of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests with a whole answer.
    pub answered: u32,
    /// Requests with a refused connection.
    pub refused: u32,
    /// Requests without a connection or an answer in time.
    pub late: u32,
    /// Requests that failed in another way, such as by a reset.
    pub broken: u32,
}

impl Worker {
    /// Starts a worker with `command`, which must run this program.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(mut command: Command) -> Result<Self> {
        command.arg(ARGUMENT).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("starting a worker")?;
        let (Some(orders), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("a worker has no pipes")
        };
        Ok(Self { child, orders, answers: BufReader::new(answers) })
    }

    /// Makes `times` connections one after the other and returns their durations.
    ///
    /// # Errors
    /// The first connection that failed.
    pub fn connect(&mut self, times: u32, address: SocketAddr) -> Result<Vec<Took>> {
        read_times(&self.ask(&format!("connect {times} {address}"))?)
    }

    /// Makes a connection to each of these addresses, one after the other, and returns their durations.
    ///
    /// # Errors
    /// The first connection that failed.
    pub fn connect_each(&mut self, addresses: &[SocketAddr]) -> Result<Vec<Took>> {
        let addresses = addresses.iter().map(ToString::to_string).collect::<Vec<_>>();
        read_times(&self.ask(&format!("connect-each {}", addresses.join(" ")))?)
    }

    /// Opens and keeps `count` connections to a server that need not greet.
    ///
    /// # Errors
    /// The first connection that failed.
    pub fn keep(&mut self, count: u32, address: SocketAddr) -> Result<()> {
        self.ask(&format!("keep {count} {address}")).map(drop)
    }

    /// Makes `times` HTTP requests one after the other, each on a connection of its own, and returns their durations
    /// in nanoseconds, from before socket(2) until the answer has ended.
    ///
    /// # Errors
    /// The first request that failed.
    pub fn request(&mut self, times: u32, address: SocketAddr) -> Result<Vec<u32>> {
        let answer = self.ask(&format!("request {times} {address}"))?;
        answer.split_whitespace().map(|word| word.parse().context("a worker's answer")).collect()
    }

    /// Makes `times` HTTP requests as [`Self::request`] does, with this pause between them, whatever becomes of each.
    ///
    /// # Errors
    /// The worker has ended.
    pub fn load(&mut self, times: u32, pause: Duration, address: SocketAddr) -> Result<Load> {
        let answer = self.ask(&format!("load {times} {} {address}", pause.as_micros()))?;
        let counts = answer.split_whitespace().map(str::parse).collect::<Result<Vec<_>, _>>();
        let [answered, refused, late, broken] = counts.context("a worker's answer")?[..] else {
            bail!("a worker's answer: {answer}")
        };
        Ok(Load { answered, refused, late, broken })
    }

    /// Opens and keeps `count` connections and returns the names from the servers' greetings.
    ///
    /// # Errors
    /// The first connection that failed.
    pub fn hold(&mut self, count: u32, address: SocketAddr) -> Result<Vec<String>> {
        Ok(self.ask(&format!("hold {count} {address}"))?.split_whitespace().map(str::to_owned).collect())
    }

    /// Returns the number of kept connections that still answer, and closes them all.
    ///
    /// # Errors
    /// The worker has ended.
    pub fn alive(&mut self) -> Result<u32> {
        self.ask("alive")?.trim().parse().context("a worker's answer")
    }

    fn ask(&mut self, order: &str) -> Result<String> {
        writeln!(self.orders, "{order}").context("a worker has ended")?;
        let mut answer = String::new();
        self.answers.read_line(&mut answer).context("a worker has ended")?;
        match answer.trim_end_matches('\n').split_once(' ') {
            Some(("ok", rest)) => Ok(rest.to_owned()),
            Some(("error", message)) => Err(anyhow!("{message}")),
            _ => bail!("a worker has ended"),
        }
    }
}

/// Durations of connections in a worker's answer.
fn read_times(answer: &str) -> Result<Vec<Took>> {
    let took = |word: &str| {
        let (connect, whole) = word.split_once(':')?;
        Some(Took { connect_ns: connect.parse().ok()?, whole_ns: whole.parse().ok()? })
    };
    answer.split_whitespace().map(|word| took(word).context("a worker's answer")).collect()
}

impl Drop for Worker {
    fn drop(&mut self) {
        // This fails only if the worker has already ended.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Main loop of a worker: one line of answer for each line of input.
///
/// # Errors
/// The parent process has ended.
pub fn run() -> Result<()> {
    let (mut held, mut output) = (Vec::new(), io::stdout().lock());
    for order in io::stdin().lock().lines() {
        match carry_out(&order?, &mut held) {
            Ok(answer) => writeln!(output, "ok {answer}")?,
            Err(error) => writeln!(output, "error {}", format!("{error:#}").replace('\n', " "))?,
        }
        output.flush()?;
    }
    Ok(())
}

/// Connections of one thread, which has a table of descriptors of its own.
const KEPT_OF_THREAD: u32 = 10_000;

/// Carries out an order. `held` are connections to servers that have greeted.
fn carry_out(order: &str, held: &mut Vec<BufReader<TcpStream>>) -> Result<String> {
    let words: Vec<_> = order.split_whitespace().collect();
    match *words {
        ["connect", times, address] => {
            let (times, address) = (times.parse::<u32>()?, address.parse()?);
            Ok((0..times).map(|_| timed(address)).collect::<Result<Vec<_>>>()?.join(" "))
        }
        ["connect-each", ref addresses @ ..] => {
            let took = addresses.iter().map(|address| timed(address.parse()?));
            Ok(took.collect::<Result<Vec<_>>>()?.join(" "))
        }
        ["keep", count, address] => {
            let (count, address) = (count.parse::<u32>()?, address.parse()?);
            for first in (0..count).step_by(KEPT_OF_THREAD as usize) {
                keep(KEPT_OF_THREAD.min(count - first), address)?;
            }
            Ok(String::new())
        }
        ["request", times, address] => {
            let (times, address) = (times.parse::<u32>()?, address.parse()?);
            let took = (0..times).map(|_| Ok(timed_request(address)?.as_nanos().to_string()));
            Ok(took.collect::<Result<Vec<_>>>()?.join(" "))
        }
        ["load", times, pause_us, address] => {
            let (times, address) = (times.parse::<u32>()?, address.parse()?);
            let Load { answered, refused, late, broken } =
                load(times, Duration::from_micros(pause_us.parse()?), address);
            Ok(format!("{answered} {refused} {late} {broken}"))
        }
        ["hold", count, address] => {
            let (count, address) = (count.parse::<u32>()?, address.parse()?);
            let names = (0..count).map(|_| {
                let (name, stream) = greeted(address)?;
                held.push(stream);
                Ok(name)
            });
            Ok(names.collect::<Result<Vec<_>>>()?.join(" "))
        }
        ["alive"] => Ok(held.drain(..).filter_map(|stream| ping(stream).ok()).count().to_string()),
        _ => bail!("no such order: {order}"),
    }
}

/// Durations of a connection, as [`read_times`] reads them.
fn timed(address: SocketAddr) -> Result<String> {
    let start = Instant::now();
    let connect = timed_connect(address)?;
    Ok(format!("{}:{}", connect.as_nanos(), start.elapsed().as_nanos()))
}

/// Duration of connect(2) alone. The connection is closed with a reset, so that no state remains.
fn timed_connect(address: SocketAddr) -> Result<Duration> {
    let socket = socket(address)?;
    sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
    let start = Instant::now();
    let connected = rustix::net::connect(&socket, &address);
    let took = start.elapsed();
    match connected {
        Ok(()) => Ok(took),
        // The send timeout ends connect(2) with this error.
        Err(Errno::INPROGRESS) => bail!("{address} does not answer within {CALL_TIMEOUT:?}"),
        Err(error) => Err(error).with_context(|| format!("connecting to {address}")),
    }
}

/// Duration of a request on a connection of its own, from before socket(2) until the server has closed it.
fn timed_request(address: SocketAddr) -> Result<Duration> {
    let start = Instant::now();
    request(address).with_context(|| format!("requesting from {address}"))?;
    Ok(start.elapsed())
}

/// Counts the outcomes of requests.
fn load(times: u32, pause: Duration, address: SocketAddr) -> Load {
    let mut load = Load::default();
    for _ in 0..times {
        let error = request(address).err();
        let outcome = match error.as_ref().map(Errno::from_io_error) {
            None => &mut load.answered,
            Some(Some(Errno::CONNREFUSED)) => &mut load.refused,
            Some(Some(Errno::INPROGRESS | Errno::AGAIN | Errno::TIMEDOUT)) => &mut load.late,
            Some(_) => &mut load.broken,
        };
        *outcome += 1;
        thread::sleep(pause);
    }
    load
}

fn request(address: SocketAddr) -> io::Result<()> {
    let socket = socket(address)?;
    rustix::net::connect(&socket, &address)?;
    let mut stream = TcpStream::from(socket);
    stream.write_all(REQUEST)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    if answer.starts_with(ANSWER) { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Opens connections on a thread that keeps them until this process ends.
fn keep(count: u32, address: SocketAddr) -> Result<()> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let connections = open_with_own_files(count, address);
        sender.send(connections.as_ref().map(drop).map_err(|error| anyhow!("{error:#}"))).ok();
        loop {
            thread::park();
        }
    });
    receiver.recv().context("a thread has ended")?
}

fn open_with_own_files(count: u32, address: SocketAddr) -> Result<Vec<OwnedFd>> {
    // SAFETY: this thread has just begun, and uses descriptors alone that it opens from now on.
    unsafe { own_files() }.context("a table of descriptors for a thread")?;
    let connect = |_| {
        let socket = socket(address)?;
        rustix::net::connect(&socket, &address).with_context(|| format!("connecting to {address}"))?;
        Ok(socket)
    };
    (0..count).map(connect).collect()
}

/// A TCP socket whose calls end in time.
fn socket(address: SocketAddr) -> rustix::io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&socket, Timeout::Send, Some(CALL_TIMEOUT))?;
    sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(CALL_TIMEOUT))?;
    Ok(socket)
}

/// Connects to a server that greets with two lines, and returns its name.
fn greeted(address: SocketAddr) -> Result<(String, BufReader<TcpStream>)> {
    let stream = TcpStream::connect_timeout(&address, CALL_TIMEOUT)?;
    stream.set_read_timeout(Some(CALL_TIMEOUT))?;
    let mut stream = BufReader::new(stream);
    let (mut name, mut own) = (String::new(), String::new());
    stream.read_line(&mut name)?;
    stream.read_line(&mut own)?;
    Ok((name.trim().to_owned(), stream))
}

fn ping(mut stream: BufReader<TcpStream>) -> Result<()> {
    stream.get_mut().write_all(b"ping\n")?;
    let mut answer = String::new();
    stream.read_line(&mut answer)?;
    if answer == "ping\n" { Ok(()) } else { bail!("closed") }
}
