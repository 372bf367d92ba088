//! TCP connections that live until their backends go, and show the ClusterIP all that time.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use cproxy_tests::{
    random::Random,
    sandbox::Sandbox,
    storm::{
        Storm,
        addresses::{Backend, SERVICES, TCP_PORTS, cluster_ip},
        client::{check_answer, has_no_service, socket, timed},
        history::{History, Outcome, Period},
        servers::{ANSWER_BYTES, STAYS},
    },
    world::{Form, PORT},
};
use rustix::net::{SocketType, connect, sockopt};

use crate::tally::Counts;

/// Connections of a thread.
const CONNECTIONS: usize = 24;

/// Pause between two questions on a connection.
const PAUSE: Duration = Duration::from_millis(20);

/// Probability in percent, for each question, that the client itself closes, also when the backend has left.
const END: usize = 1;
const END_AFTER_BACKEND: usize = 10;

/// Connects and asks until it is over.
pub(crate) fn run(storm: &Storm, sandbox: &Sandbox, mut random: Random, is_over: &AtomicBool, counts: &Counts) {
    sandbox.enter();
    let mut connections: Vec<Option<Long>> = (0..CONNECTIONS).map(|_| None).collect();
    while !is_over.load(Ordering::Relaxed) && !storm.has_failed() {
        for slot in &mut connections {
            let result = match slot.take() {
                None => Long::open(&storm.history, &mut random).inspect(|long| {
                    counts.long.fetch_add(u64::from(long.is_some()), Ordering::Relaxed);
                }),
                Some(long) => long.proceed(&storm.history, &mut random, counts),
            };
            match result {
                Ok(long) => *slot = long.filter(|_| !random.percent(END)),
                Err(reason) => return storm.fail(reason),
            }
        }
        thread::sleep(PAUSE);
    }
}

/// A connection.
struct Long {
    form: Form,
    service: usize,
    stream: TcpStream,
    backend: Backend,
    since: Instant,
    question: u64,
}

impl Long {
    /// A new connection; `None`: there is no Service, or the backend has left meanwhile.
    fn open(history: &History, random: &mut Random) -> Result<Option<Self>, String> {
        let (form, service) = (random.pick(&Form::ALL), random.below(SERVICES));
        let failed =
            |error: &dyn std::fmt::Display| format!("long connection to Service {service} as {form:?}: {error}");
        let stream = socket(form, SocketType::STREAM).map_err(|error| failed(&error))?;
        sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).map_err(|error| failed(&error))?;
        let (called, period) = timed(|| connect(&stream, &form.address(cluster_ip(service), PORT)));
        match called {
            Ok(()) => {}
            Err(error) if has_no_service(error) => {
                return history.check_new(service, period, Outcome::NoService).map(|()| None).map_err(|e| failed(&e));
            }
            Err(error) => return Err(failed(&error)),
        }
        let (mut stream, question) = (TcpStream::from(stream), random.below(usize::MAX >> 1) as u64 | STAYS);
        match ask(&mut stream, form, service, question) {
            Ok(backend) => {
                history.check_new(service, period, Outcome::Reached(backend)).map_err(|error| failed(&error))?;
                Ok(Some(Self { form, service, stream, backend, since: period.from, question }))
            }
            Err(error) => {
                let period = Period { to: Instant::now(), ..period };
                let is_explained = history.check_new(service, period, Outcome::Closed);
                is_explained.map(|()| None).map_err(|reason| failed(&format!("{error}: {reason}")))
            }
        }
    }

    /// Asks once more; `None`: the backend has left. The agent may close the connection then.
    fn proceed(mut self, history: &History, random: &mut Random, counts: &Counts) -> Result<Option<Self>, String> {
        self.question += 1;
        let answer = ask(&mut self.stream, self.form, self.service, self.question);
        let period = Period { from: self.since, to: Instant::now() };
        let has_served = history.has_served(self.service, self.backend, period);
        match answer {
            Ok(backend) if backend == self.backend => {
                counts.long_answers.fetch_add(1, Ordering::Relaxed);
                Ok((has_served || !random.percent(END_AFTER_BACKEND)).then_some(self))
            }
            Err(_) if !has_served => {
                counts.long_closed.fetch_add(1, Ordering::Relaxed);
                Ok(None)
            }
            other => {
                let Self { form, service, backend, since, .. } = self;
                let age = since.elapsed();
                Err(format!("connection to Service {service} as {form:?}, {age:.1?} old, to {backend:?}: {other:?}"))
            }
        }
    }
}

/// Asks the backend on a connection, whose peer must be the ClusterIP.
fn ask(stream: &mut TcpStream, form: Form, service: usize, question: u64) -> std::io::Result<Backend> {
    let (vip, peer): (SocketAddr, _) = (form.address(cluster_ip(service), PORT), stream.peer_addr()?);
    if peer != vip {
        return Err(std::io::Error::other(format!("getpeername shows {peer} instead of {vip}")));
    }
    stream.write_all(&question.to_be_bytes())?;
    let mut answer = [0; ANSWER_BYTES];
    stream.read_exact(&mut answer)?;
    check_answer(form, answer, question, TCP_PORTS)
}
