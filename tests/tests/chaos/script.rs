//! The script of an episode: every trouble and every action at least once, in random order.

use cproxy_tests::random::{self, Random};

use crate::objects::Change;

/// Trouble between the agent and the API server, with a begin and an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Trouble {
    /// Connections are refused.
    Refused,
    /// All that the agent sends is lost.
    LosesRequests,
    /// All that the server sends is lost.
    LosesResponses,
    /// The connection is forgotten on the way.
    Forgets,
    /// Connections end in the middle of responses.
    Breaks,
    /// The server sends garbage.
    Garbage,
    /// 401
    Unauthorized,
    /// 403
    Forbidden,
    /// 429
    TooManyRequests,
    /// 500
    InternalError,
    /// etcd stands still: nothing changes, and nothing new is confirmed.
    EtcdStandsStill,
    /// The server is killed and started again: afterwards, watches are too old.
    ServerKilled,
    /// The server has a certificate of another authority.
    AuthorityRenewed,
    /// The server's name has no address.
    NoName,
    /// The server's name has the address of somebody else.
    WrongAddress,
    /// etcd is restored to an older state. Only in long runs: an agent takes minutes to notice.
    EtcdRestored,
}

/// Event that is over when the next one begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Action {
    /// The objects change.
    Change(Change),
    /// The agent is killed, objects change, and another starts.
    Kill,
    /// The same in the middle of a change.
    KillBusy,
    /// The agent ends and is started.
    Restart,
    /// A system call of a starting agent fails, or the agent is killed before one.
    KernelFault,
    /// Older agents are started in between: one of an older layout refuses.
    Older,
    /// New seed, as after a restore.
    Reseed,
    /// Settings change while the agent runs.
    Hangup,
    /// Many MPTCP connects are refused: they take all places of TCP sockets.
    Mptcp,
    /// Cgroups are made, with clients in them, and removed.
    Cgroups,
    /// Addresses come and go.
    Network,
    /// Somebody detaches or replaces a program, which takes away connects until the agent has put it back.
    Detach,
}

const TROUBLES: [Trouble; 15] = [
    Trouble::Refused,
    Trouble::LosesRequests,
    Trouble::LosesResponses,
    Trouble::Forgets,
    Trouble::Breaks,
    Trouble::Garbage,
    Trouble::Unauthorized,
    Trouble::Forbidden,
    Trouble::TooManyRequests,
    Trouble::InternalError,
    Trouble::EtcdStandsStill,
    Trouble::ServerKilled,
    Trouble::AuthorityRenewed,
    Trouble::NoName,
    Trouble::WrongAddress,
];

/// Actions that also happen during troubles.
const OVERLAPPING: [Action; 13] = [
    Action::Change(Change::Replace),
    Action::Change(Change::Shift),
    Action::Change(Change::RecreateAtOnce),
    Action::Change(Change::Rename),
    Action::Change(Change::Grow),
    Action::Change(Change::Shrink),
    Action::Kill,
    Action::KillBusy,
    Action::Restart,
    Action::Reseed,
    Action::Hangup,
    Action::Mptcp,
    Action::Network,
];

/// Ends of an agent.
const ENDS: [Action; 3] = [Action::Kill, Action::KillBusy, Action::Restart];

/// Events that are neither a change nor an end.
const OTHERS: [Action; 8] = [
    Action::KernelFault,
    Action::Older,
    Action::Reseed,
    Action::Hangup,
    Action::Mptcp,
    Action::Cgroups,
    Action::Network,
    Action::Detach,
];

/// Largest number of actions of a step.
const ACTIONS_MAX: usize = 3;

/// Longest time of a trouble after its actions.
const TROUBLE_MS_MAX: usize = 2_000;

/// Actions during at most one trouble, after which everything is checked.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) trouble: Option<Trouble>,
    pub(crate) actions: Vec<Action>,
    pub(crate) trouble_ms: u64,
    /// The network changes at the end of the trouble, which ends the agent's pause.
    pub(crate) has_signal: bool,
}

impl Trouble {
    /// Whether objects can be changed meanwhile.
    pub(crate) fn leaves_server(self) -> bool {
        !matches!(self, Self::EtcdStandsStill | Self::ServerKilled | Self::EtcdRestored)
    }

    /// Whether the agent notices at once.
    pub(crate) fn is_noticed(self) -> bool {
        !matches!(
            self,
            Self::LosesRequests
                | Self::LosesResponses
                | Self::Forgets
                | Self::Breaks
                | Self::EtcdStandsStill
                | Self::EtcdRestored
        )
    }
}

impl Action {
    /// Whether it changes objects.
    pub(crate) fn needs_server(self) -> bool {
        matches!(self, Self::Change(_) | Self::KillBusy)
    }
}

/// All actions with a control plane.
fn actions() -> Vec<Action> {
    let changes = Change::ALL.into_iter().filter(|change| *change != Change::Inherit).map(Action::Change);
    changes.chain(ENDS).chain(OTHERS).collect()
}

/// Every change and every end of an agent once, in steps of their own.
pub(crate) fn changes(random: &mut Random) -> Vec<Step> {
    let all: Vec<_> = Change::ALL.map(Action::Change).into_iter().chain(ENDS).collect();
    let step = |action| Step { trouble: None, actions: vec![action], trouble_ms: 0, has_signal: false };
    random.shuffled(&all).into_iter().map(step).collect()
}

/// The steps of an episode.
pub(crate) fn steps(random: &mut Random) -> Vec<Step> {
    let mut troubles: Vec<_> = TROUBLES.into_iter().map(Some).collect();
    troubles.extend(random::is_soak().then_some(Some(Trouble::EtcdRestored)));
    // All actions once without a trouble.
    let mut alone = random.shuffled(&actions());
    while !alone.is_empty() {
        troubles.push(None);
        alone.truncate(alone.len().saturating_sub(ACTIONS_MAX));
    }
    let mut alone = random.shuffled(&actions());
    let steps = random.shuffled(&troubles).into_iter().map(|trouble| {
        let actions = match trouble {
            None => alone.split_off(alone.len().saturating_sub(ACTIONS_MAX)),
            Some(trouble) => {
                let possible =
                    OVERLAPPING.into_iter().filter(|action| trouble.leaves_server() || !action.needs_server());
                random.some(&possible.collect::<Vec<_>>(), ACTIONS_MAX)
            }
        };
        // In an ordinary run, nobody waits for the end of a pause.
        Step {
            trouble,
            actions,
            trouble_ms: random.below(TROUBLE_MS_MAX) as u64,
            has_signal: random.percent(50) || !random::is_soak(),
        }
    });
    steps.collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_script_has_everything_and_follows_from_its_seed() {
        let script = || steps(&mut Random::new(7));
        let (one, two) = (script(), script());
        assert_eq!(format!("{one:?}"), format!("{two:?}"));
        let troubles: BTreeSet<_> = one.iter().filter_map(|step| step.trouble).collect();
        let alone = one.iter().filter(|step| step.trouble.is_none());
        let actions: BTreeSet<_> = alone.flat_map(|step| step.actions.clone()).collect();
        assert!(TROUBLES.iter().all(|trouble| troubles.contains(trouble)));
        assert!(super::actions().iter().all(|action| actions.contains(action)));
    }
}
