//! Flows of one unconnected socket to many Services, with a pod in no Service among them.

use std::{
    collections::BTreeMap,
    io,
    net::{SocketAddr, UdpSocket},
    time::Instant,
};

use rustix::net::SocketType;

use super::{
    addresses::{Backend, LONER, SERVICES, UDP_PORTS, backend, cluster_ip},
    client::{check_answer, has_no_service, receive, send_to, socket, timed},
    history::{History, Outcome, Period},
    servers::decode,
};
use crate::{
    random::Random,
    world::{Form, PORT},
};

/// Outcome of one question in a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Step {
    /// The first answer, or the first one after there was no Service.
    Began,
    /// An answer of the same backend as before.
    Kept,
    /// An answer of another backend, as the one before has left.
    Moved,
    NoService,
}

impl Step {
    pub(crate) const ANSWERED: [Self; 3] = [Self::Began, Self::Kept, Self::Moved];
}

/// Answers to the questions of one round.
#[derive(Debug)]
pub(crate) enum Answers {
    All,
    /// All but the answer from this address.
    OneMissing(SocketAddr, io::Error),
}

/// A socket and its flows.
pub(crate) struct Flows {
    socket: UdpSocket,
    flows: Vec<Flow>,
    loner: SocketAddr,
    questions: u64,
}

/// A flow to one Service in one form.
struct Flow {
    form: Form,
    service: usize,
    /// The last backend, and the time before the question to it.
    last: Option<(Backend, Instant)>,
    /// The last backend before there was no Service. The socket remembers it, and goes on with it if it still serves,
    /// also if no other flow may begin there.
    remembered: Option<Backend>,
}

impl Flows {
    /// A socket without any flow yet, to random Services in some of these forms. There may be more of them than fit
    /// into a socket's own storage.
    pub(crate) fn open(forms: &[Form], random: &mut Random) -> io::Result<Self> {
        let socket = socket(forms[0], SocketType::DGRAM)?.into();
        let all: Vec<_> = forms.iter().flat_map(|form| (0..SERVICES).map(|service| (*form, service))).collect();
        let mut flows = random.shuffled(&all);
        flows.truncate(1 + random.below(all.len()));
        let flows =
            flows.into_iter().map(|(form, service)| Flow { form, service, last: None, remembered: None }).collect();
        Ok(Self { socket, flows, loner: forms[0].address(backend(LONER), UDP_PORTS[0]), questions: 0 })
    }

    /// Asks all Services and the pod in none, and then receives the answers in any order.
    pub(crate) fn ask_all(&mut self, history: &History, record: impl Fn(Step, Form)) -> Result<Answers, String> {
        let mut pending = BTreeMap::new();
        for (index, flow) in self.flows.iter_mut().enumerate() {
            self.questions += 1;
            match timed(|| send_to(&self.socket, self.questions, flow.vip())) {
                (Ok(()), period) => drop(pending.insert(self.questions, Some((index, period)))),
                (Err(error), period) if has_no_service(error) => {
                    let step = flow.proceed(history, Outcome::NoService, period);
                    record(step.map_err(|reason| format!("{error}: {reason}"))?, flow.form);
                }
                (Err(error), _) => return Err(format!("{flow}: {error}")),
            }
        }
        self.questions += 1;
        send_to(&self.socket, self.questions, self.loner).map_err(|error| format!("{}: {error}", self.loner))?;
        pending.insert(self.questions, None);
        while !pending.is_empty() {
            let (answer, from) = match receive(&self.socket) {
                Ok(received) => received,
                Err(error) => {
                    let asked: Vec<_> = pending
                        .values()
                        .map(|asked| asked.map_or(self.loner, |(index, _)| self.flows[index].vip()))
                        .collect();
                    return match asked[..] {
                        [vip] => Ok(Answers::OneMissing(vip, error)),
                        _ => Err(format!("no answers of {asked:?}: {error}")),
                    };
                }
            };
            let (question, server) = decode(answer);
            let asked = pending.remove(&question).ok_or_else(|| format!("{server} answers a question of another"))?;
            let Some((index, period)) = asked else {
                if (from, server.port()) != (self.loner, self.loner.port()) || server.ip() != from.ip().to_canonical() {
                    return Err(format!("{server} answers for {} and shows {from}", self.loner));
                }
                continue;
            };
            let flow = &mut self.flows[index];
            if from != flow.vip() {
                return Err(format!("{flow}: the answer of {server} shows {from}"));
            }
            let backend = check_answer(flow.form, answer, question, UDP_PORTS);
            let backend = backend.map_err(|error| format!("{flow}: {error}"))?;
            record(flow.proceed(history, Outcome::Reached(backend), period)?, flow.form);
        }
        Ok(Answers::All)
    }
}

impl Flow {
    fn vip(&self) -> SocketAddr {
        self.form.address(cluster_ip(self.service), PORT)
    }

    /// Checks an outcome beside the last one, and replaces that.
    fn proceed(&mut self, history: &History, outcome: Outcome, period: Period) -> Result<Step, String> {
        let reached = match outcome {
            Outcome::Reached(backend) => Some((backend, period.from)),
            _ => None,
        };
        let before = std::mem::replace(&mut self.last, reached);
        if let Some((backend, _)) = before {
            self.remembered = Some(backend);
        }
        let is_remembered = self.remembered.is_some_and(|backend| outcome == Outcome::Reached(backend));
        let step = match before {
            None if is_remembered && history.may_stay(self.service, period, outcome) => Ok(Step::Began),
            None => history.check_new(self.service, period, outcome).map(|()| Step::Began),
            Some(last) => history
                .check_flow(self.service, last, period, outcome)
                .map(|is_kept| if is_kept { Step::Kept } else { Step::Moved }),
        };
        let step = step.map_err(|reason| format!("{self}: {reason}"))?;
        Ok(if reached.is_some() { step } else { Step::NoService })
    }
}

impl std::fmt::Display for Flow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "flow to Service {} as {:?}", self.service, self.form)
    }
}
