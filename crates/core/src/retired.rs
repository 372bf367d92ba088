//! Retired backends, to which stale sockets may be connected.

use std::collections::BTreeSet;

use super::{Backend, Protocol};

/// Maximum number of backends of a protocol that are listed; more count as any.
const BACKENDS_MAX: usize = 256;

/// Backends that frontends have lost: they left a set, or the frontend was deleted or got another set.
/// [`Backend::NOBODY`] is one of them once a frontend that refused datagrams no longer does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Retired {
    tcp: RetiredBackends,
    udp: RetiredBackends,
}

/// Retired backends of one protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RetiredBackends {
    /// These backends, perhaps none.
    These(BTreeSet<Backend>),
    /// Possibly any backend.
    Any,
}

impl Default for RetiredBackends {
    fn default() -> Self {
        Self::These(BTreeSet::new())
    }
}

impl Retired {
    /// Any backend of any protocol, for a table whose earlier content is unknown.
    #[must_use]
    pub fn any() -> Self {
        Self { tcp: RetiredBackends::Any, udp: RetiredBackends::Any }
    }

    /// Retired backends of a protocol.
    #[must_use]
    pub fn of(&self, protocol: Protocol) -> &RetiredBackends {
        match protocol {
            Protocol::Tcp => &self.tcp,
            Protocol::Udp => &self.udp,
        }
    }

    /// Whether no backend has retired.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tcp.is_empty() && self.udp.is_empty()
    }

    /// Adds retired backends of a protocol.
    pub fn add(&mut self, protocol: Protocol, backends: impl IntoIterator<Item = Backend>) {
        self.of_mut(protocol).add(backends);
    }

    /// Adds other retired backends.
    pub fn add_all(&mut self, others: Self) {
        for (ours, theirs) in [(&mut self.tcp, others.tcp), (&mut self.udp, others.udp)] {
            match theirs {
                RetiredBackends::These(backends) => ours.add(backends),
                RetiredBackends::Any => *ours = RetiredBackends::Any,
            }
        }
    }

    /// Keeps only the protocols for which `is_kept` holds.
    pub fn retain(&mut self, is_kept: impl Fn(Protocol) -> bool) {
        for protocol in [Protocol::Tcp, Protocol::Udp].into_iter().filter(|protocol| !is_kept(*protocol)) {
            *self.of_mut(protocol) = RetiredBackends::default();
        }
    }

    fn of_mut(&mut self, protocol: Protocol) -> &mut RetiredBackends {
        match protocol {
            Protocol::Tcp => &mut self.tcp,
            Protocol::Udp => &mut self.udp,
        }
    }
}

impl RetiredBackends {
    /// Whether no backend has retired.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        matches!(self, Self::These(backends) if backends.is_empty())
    }

    /// Whether a backend has retired or may have.
    #[must_use]
    pub fn has(&self, backend: &Backend) -> bool {
        match self {
            Self::These(backends) => {
                backends.contains(backend) || backend.may_be_nobody() && backends.contains(&Backend::NOBODY)
            }
            Self::Any => true,
        }
    }

    fn add(&mut self, backends: impl IntoIterator<Item = Backend>) {
        for backend in backends {
            let Self::These(known) = self else { return };
            known.insert(backend);
            if known.len() > BACKENDS_MAX {
                *self = Self::Any;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Address;

    fn backends(count: u32) -> impl Iterator<Item = Backend> {
        (0..count).map(|number| Backend { address: Address::from_words([0, 0, 0, number]), port: 80 })
    }

    #[test]
    fn protocols_are_kept_apart() {
        let mut retired = Retired::default();
        assert!(retired.is_empty());
        retired.add(Protocol::Tcp, backends(2));
        assert_eq!(retired.of(Protocol::Tcp), &RetiredBackends::These(backends(2).collect()));
        assert!(retired.of(Protocol::Udp).is_empty() && !retired.is_empty());
        retired.retain(|protocol| protocol == Protocol::Udp);
        assert!(retired.is_empty());
    }

    #[test]
    fn more_backends_than_the_bound_count_as_any() {
        let most = BACKENDS_MAX as u32;
        let mut retired = Retired::default();
        for _ in 0..2 {
            retired.add(Protocol::Udp, backends(most));
        }
        assert_eq!(retired.of(Protocol::Udp), &RetiredBackends::These(backends(most).collect()));
        let mut more = retired.clone();
        more.add(Protocol::Udp, backends(most + 1));
        assert_eq!(more.of(Protocol::Udp), &RetiredBackends::Any);
        more.add_all(retired.clone());
        retired.add_all(more.clone());
        assert!([more, retired].iter().all(|both| both.of(Protocol::Udp) == &RetiredBackends::Any));
    }

    #[test]
    fn nobody_is_any_address_with_its_port() {
        let at = |port| Backend { address: Address::from_words([0, 0, 0, 1]), port };
        let mut retired = Retired::default();
        retired.add(Protocol::Udp, [at(80)]);
        assert_eq!([1, 80].map(|port| retired.of(Protocol::Udp).has(&at(port))), [false, true]);
        retired.add(Protocol::Udp, [Backend::NOBODY]);
        assert_eq!([1, 80, 81].map(|port| retired.of(Protocol::Udp).has(&at(port))), [true, true, false]);
    }

    #[test]
    fn any_backend_may_have_retired_where_none_is_listed() {
        let [first, second] = [0, 1].map(|number| backends(2).nth(number).unwrap());
        let mut retired = Retired::default();
        retired.add(Protocol::Tcp, [first]);
        let has = |retired: &Retired, protocol| [first, second].map(|backend| retired.of(protocol).has(&backend));
        assert_eq!(has(&retired, Protocol::Tcp), [true, false]);
        assert_eq!(has(&retired, Protocol::Udp), [false, false]);
        assert_eq!(has(&Retired::any(), Protocol::Udp), [true, true]);
    }
}
