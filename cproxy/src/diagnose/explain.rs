//! Answer of `cproxy explain`: facts about a destination in, verdicts on calls to it out. Only [`gather`] does I/O.

mod facts;
mod findings;
mod gather;
mod ingress;
mod output;
mod probe;
mod receive;
mod verdict;

pub use facts::{AgentFacts, DirectFact, Facts, KernelFacts, ProcessFacts, ProgramFacts, SocketFacts};
pub use findings::{Finding, State, findings};
pub use gather::gather;
pub use ingress::ingress;
#[cfg(feature = "schema")]
pub(crate) use output::Answer;
pub use output::{json, text};
pub use probe::{Probe, ProbeOutcome};
pub use receive::{ReceiveAnswer, receive};
pub use verdict::{Outcome, Verdict, verdicts};
