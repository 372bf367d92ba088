//! Mailbox of the one task that owns the table: queries, which change nothing, and commands.

use std::io;

use cproxy_core::{Address, TcpPlace};
use cproxy_datapath::bpf::{ServiceCounters, TcpPlacesUsage};
use tokio::sync::{mpsc, oneshot};

use crate::{
    config::LoopSettings,
    report::{AgentReport, HealthReport, PodPolicyReport, ProblemRow, ReceivedRow, SourceReport},
    state::{CanaryState, RestoreSign, ServiceCalls, Status},
    target::Target,
};

/// Messages that wait; a sender waits for room.
const CAPACITY: usize = 1;

/// Message to the task that owns the table.
#[derive(Debug)]
pub enum Message {
    /// A question.
    Query(Query),
    /// An order.
    Command(Command),
}

/// Question, with the channel for its response.
#[derive(Debug)]
pub enum Query {
    /// Frontends of the table as JSON text, of which there is one copy.
    Services(oneshot::Sender<Vec<u8>>),
    /// Gauges of the agent.
    Gauges(oneshot::Sender<Vec<(&'static str, u64)>>),
    /// State for `status_http`.
    Status(oneshot::Sender<Status>),
    /// Sums of these counters by Service.
    ServiceCalls(ServiceCounters, oneshot::Sender<Vec<ServiceCalls>>),
    /// Source that the agent follows.
    Source(oneshot::Sender<SourceReport>),
    /// View of a destination.
    Explain(Target, oneshot::Sender<AgentReport>),
    /// Present problems of objects and files.
    Problems(oneshot::Sender<Vec<ProblemRow>>),
    /// Policy of the pod; `None` if the agent enforces none.
    Policy(oneshot::Sender<Option<PodPolicyReport>>),
    /// Ports that the pod receives for load balancers; `None` if it is to receive none.
    Receive(oneshot::Sender<Option<Vec<ReceivedRow>>>),
    /// Health of the programs, after a look at them.
    Health(oneshot::Sender<HealthReport>),
    /// Health of the programs at the last look at them.
    LastHealth(oneshot::Sender<HealthReport>),
    /// State of the canary.
    Canary(oneshot::Sender<CanaryState>),
}

/// Demand for places of TCP sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpPlaceDemand {
    /// A socket has found no place, while so many had a place and were alive.
    More {
        /// Places whose owners live.
        living: u32,
    },
    /// No socket is known that has found no place.
    None,
}

/// Order, most with the channel for its outcome: the error's text if it cannot be carried out.
#[derive(Debug)]
pub enum Command {
    /// Go on as in a VM that was restored from a snapshot.
    Reseed {
        /// The pod stays closed by its policy until another order, or a sign.
        holds: bool,
        /// Channel for the outcome.
        sender: oneshot::Sender<Result<(), String>>,
    },
    /// The same, for a sign of that.
    Resume(RestoreSign),
    /// Other settings.
    Configure(LoopSettings, oneshot::Sender<Result<(), String>>),
    /// Addresses of the VM to which datagram sockets are connected that are to be refused.
    SetOwnAddresses(Vec<Address>),
    /// Places of TCP sockets that have gone.
    FreeTcpPlaces(Vec<TcpPlace>, oneshot::Sender<Result<(), String>>),
    /// A look at the places of TCP sockets: a search of them may be due.
    LookAtTcpPlaces,
    /// More or fewer places for TCP sockets, if that is due. The response has their use afterwards.
    ResizeTcpPlaces(TcpPlaceDemand, oneshot::Sender<Result<TcpPlacesUsage, String>>),
    /// Pins of maps that were removed, and `ready`. The response has the names of the maps that were pinned again.
    RestorePins(oneshot::Sender<Result<Vec<&'static str>, String>>),
    /// Other ports for the canary.
    MoveCanary,
    /// The whole table, read back and written anew.
    Rewrite(oneshot::Sender<()>),
}

/// Way to the task that owns the table. Clones lead to the same one.
#[derive(Clone, Debug)]
pub struct Mailbox(mpsc::Sender<Message>);

impl Mailbox {
    /// The mailbox, and the messages for its owner.
    #[must_use]
    pub fn new() -> (Self, mpsc::Receiver<Message>) {
        let (sender, messages) = mpsc::channel(CAPACITY);
        (Self(sender), messages)
    }

    /// Sends a query, and waits for its response.
    ///
    /// # Errors
    /// The task that owns the table has ended.
    pub async fn ask<T>(&self, query: impl FnOnce(oneshot::Sender<T>) -> Query) -> io::Result<T> {
        self.send(|sender| Message::Query(query(sender))).await
    }

    /// Sends a command, and waits for its outcome.
    ///
    /// # Errors
    /// The task that owns the table has ended.
    pub async fn order<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> io::Result<T> {
        self.send(|sender| Message::Command(command(sender))).await
    }

    /// Sends a command without an outcome.
    ///
    /// # Errors
    /// The task that owns the table has ended.
    pub async fn tell(&self, command: Command) -> io::Result<()> {
        self.0.send(Message::Command(command)).await.map_err(io::Error::other)
    }

    async fn send<T>(&self, message: impl FnOnce(oneshot::Sender<T>) -> Message) -> io::Result<T> {
        let (sender, receiver) = oneshot::channel();
        self.0.send(message(sender)).await.map_err(io::Error::other)?;
        receiver.await.map_err(io::Error::other)
    }
}
