//! Choice of a server: a pure state machine. It has the time from its inputs, and neither waits nor connects.
//!
//! A client has one connection. Servers are tried in the order of preference. One that fails is on hold for a minute,
//! and for twice as long each time it fails again soon, up to an hour: it is tried after all others then. A preferred
//! server is tried again once its hold has ended, when a request needs a connection anyway.

mod health;
#[cfg(test)]
mod tests;

use std::{
    mem,
    net::IpAddr,
    time::{Duration, Instant},
    vec,
};

use self::health::{FAILOVER_HOLD, Health, order};
use crate::transport::connector::ReachedAddress;

/// Event on which the choice depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Input {
    /// A new connection is wanted. Earlier failures do not count for it.
    Renew,
    /// An attempt to connect that may be under way has been given up.
    Interrupt,
    /// A request needs a connection to one of so many servers. The fingerprint is that of all that a connection is made
    /// of. `is_open`: requests can be sent on the present connection.
    Connect { server_count: usize, fingerprint: u64, is_open: bool },
    /// The server of [`Action::Dial`] was reached.
    Reached(ReachedAddress),
    /// The server of [`Action::Dial`] was not reached.
    NotReached,
    /// No server can be dialed with the configuration.
    CannotDial,
    /// No further request can be sent on the present connection. `has_failed`: the server is to blame.
    Retire { has_failed: bool },
    /// The present server cannot serve now.
    FailOver(Condition),
}

/// Condition under which a server that cannot serve is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Condition {
    /// Another server or address may serve, since it has not failed.
    HasAlternative,
    /// There is another server, even if that has failed, too.
    HasOther,
    Always,
}

/// Step that the session carries out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Nothing,
    /// Connect to the server with this index, and go on with [`Input::Reached`] or [`Input::NotReached`].
    Dial(usize),
    /// Use the new connection from now on.
    Replace(Change),
    /// Use the present connection. `is_unwanted`: it should have been replaced, and no server could be reached.
    Keep {
        is_unwanted: bool,
    },
    /// There is no connection, and no server can be reached.
    Fail,
    /// Send no further request on the present connection. `has_alternative`: another server or address may serve.
    Retire {
        has_alternative: bool,
    },
}

/// Difference of a new connection from the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// It was asked for.
    Renewed,
    /// It is to another server.
    Moved,
    /// It is to the same server, or the first one.
    Repeated,
}

/// Health of the servers, the connection in use, and the attempt to connect that is under way.
#[derive(Debug, Default)]
pub(super) struct ServerChoice {
    health: Vec<Health>,
    /// Addresses of names that could not serve, and when. The other addresses of the name are tried first.
    avoided: Vec<(IpAddr, Instant)>,
    /// A new connection is wanted, and none was made since.
    must_renew: bool,
    present: Option<Present>,
    attempt: Option<Attempt>,
    /// Index of the server of the last connection, present or not.
    last_index: Option<usize>,
}

/// Connection in use.
#[derive(Clone, Copy, Debug)]
struct Present {
    /// Index of its server.
    index: usize,
    fingerprint: u64,
    reached: ReachedAddress,
    since: Instant,
}

/// Attempt to connect.
#[derive(Debug)]
struct Attempt {
    /// Index of the server that is dialed now.
    dialed: Option<usize>,
    /// Servers to dial next.
    next: vec::IntoIter<usize>,
    fingerprint: u64,
    /// The present connection can be used if no server is reached.
    has_fallback: bool,
}

impl ServerChoice {
    /// Takes what has happened, and says what to do.
    pub(super) fn step(&mut self, input: Input, now: Instant) -> Action {
        match input {
            Input::Renew => self.renew(),
            Input::Interrupt => self.interrupt(now),
            Input::Connect { server_count, fingerprint, is_open } => {
                self.health.resize(server_count, Health::default());
                self.connect(fingerprint, is_open, now)
            }
            Input::Reached(address) => self.replace(address, now),
            Input::NotReached => {
                self.record_failure(self.dialed(), now);
                self.dial_next()
            }
            Input::CannotDial => self.end_attempt(),
            Input::Retire { has_failed } => self.retire(has_failed, now),
            Input::FailOver(condition) => self.fail_over(condition, now),
        }
    }

    /// Whether a new connection is wanted, and none was made since.
    pub(super) fn must_renew(&self) -> bool {
        self.must_renew
    }

    /// Addresses that are tried last.
    pub(super) fn avoided(&self) -> Vec<IpAddr> {
        self.avoided.iter().map(|(ip, _)| *ip).collect()
    }

    fn renew(&mut self) -> Action {
        (self.health, self.avoided, self.attempt) = (Vec::new(), Vec::new(), None);
        self.must_renew = true;
        Action::Nothing
    }

    /// Counts an attempt that was given up as a failure of the server that was dialed: it may be silent.
    fn interrupt(&mut self, now: Instant) -> Action {
        self.record_failure(self.dialed(), now);
        self.attempt = None;
        Action::Nothing
    }

    /// Begins an attempt. With a connection that is up to date, only better servers are tried.
    fn connect(&mut self, fingerprint: u64, is_open: bool, now: Instant) -> Action {
        let kept = self.present.filter(|present| is_open && !self.must_renew && present.fingerprint == fingerprint);
        let mut candidates = order(&self.health, now);
        if let Some(present) = kept {
            candidates.retain(|&index| index < present.index && self.is_good(index, now));
        }
        let next = candidates.into_iter();
        self.attempt = Some(Attempt { dialed: None, next, fingerprint, has_fallback: is_open });
        self.dial_next()
    }

    fn dial_next(&mut self) -> Action {
        let next = self.attempt.as_mut().and_then(|attempt| {
            attempt.dialed = attempt.next.next();
            attempt.dialed
        });
        next.map_or_else(|| self.end_attempt(), Action::Dial)
    }

    /// Ends an attempt without a new connection.
    fn end_attempt(&mut self) -> Action {
        match (self.attempt.take(), self.present) {
            (Some(Attempt { fingerprint, has_fallback: true, .. }), Some(present)) => {
                Action::Keep { is_unwanted: self.must_renew || present.fingerprint != fingerprint }
            }
            _ => Action::Fail,
        }
    }

    /// Makes the connection that was made the present one.
    fn replace(&mut self, reached: ReachedAddress, now: Instant) -> Action {
        let Some(Attempt { dialed: Some(index), fingerprint, .. }) = self.attempt.take() else {
            return Action::Nothing;
        };
        self.present = Some(Present { index, fingerprint, reached, since: now });
        let has_moved = self.last_index.replace(index).is_some_and(|last| last != index);
        Action::Replace(match mem::take(&mut self.must_renew) {
            true => Change::Renewed,
            false if has_moved => Change::Moved,
            false => Change::Repeated,
        })
    }

    /// Retires the present connection.
    fn retire(&mut self, has_failed: bool, now: Instant) -> Action {
        let Some(present) = self.present else { return Action::Nothing };
        let has_alternative = self.has_alternative(&present, now);
        if has_failed {
            self.record_failure(Some(present.index), now);
        }
        self.present = None;
        Action::Retire { has_alternative }
    }

    /// Retires the present connection if the condition holds. Its address is avoided, and its server counts as failed
    /// once the name has no other address to try.
    fn fail_over(&mut self, condition: Condition, now: Instant) -> Action {
        let Some(present) = self.present else { return Action::Nothing };
        let has_alternative = self.has_alternative(&present, now);
        let must_leave = match condition {
            Condition::HasAlternative => has_alternative,
            Condition::HasOther => has_alternative || self.health.len() > 1,
            Condition::Always => true,
        };
        if !must_leave {
            return Action::Nothing;
        }
        self.avoided.retain(|avoided| is_recent(avoided, now));
        let has_failed = !self.has_other_address(&present, now);
        self.avoided.extend(present.reached.ip.map(|ip| (ip, now)));
        self.retire(has_failed, now);
        Action::Retire { has_alternative }
    }

    /// Whether another server, or another address of the present one's name, may serve.
    fn has_alternative(&self, present: &Present, now: Instant) -> bool {
        (0..self.health.len()).any(|index| index != present.index && self.is_good(index, now))
            || self.has_other_address(present, now)
    }

    /// Whether the name of the present server has an address that may serve in place of the one that was reached.
    fn has_other_address(&self, present: &Present, now: Instant) -> bool {
        let ReachedAddress { ip, other_count } = present.reached;
        let is_other = |avoided: &&(IpAddr, Instant)| is_recent(avoided, now) && Some(avoided.0) != ip;
        other_count > self.avoided.iter().filter(is_other).count()
    }

    fn is_good(&self, index: usize, now: Instant) -> bool {
        self.health.get(index).is_some_and(|health| health.is_good(now))
    }

    /// Index of the server that is dialed now.
    fn dialed(&self) -> Option<usize> {
        self.attempt.as_ref()?.dialed
    }

    /// Records a failure of a server. The time for which it has served counts if it is the present one.
    fn record_failure(&mut self, server: Option<usize>, now: Instant) {
        let of_present = self.present.filter(|present| Some(present.index) == server);
        let served = of_present.map_or(Duration::ZERO, |present| now.saturating_duration_since(present.since));
        if let Some(health) = server.and_then(|index| self.health.get_mut(index)) {
            health.record_failure(now, served);
        }
    }
}

/// Whether an address that could not serve is still avoided.
fn is_recent((_, at): &(IpAddr, Instant), now: Instant) -> bool {
    now.saturating_duration_since(*at) < FAILOVER_HOLD
}
