//! Places of TCP sockets whose owners are closed. The sockets behind an MPTCP connection, and others that
//! the kernel opens for itself, end without the hook that frees a place (docs/decisions/020).
//!
//! A living socket is one that the kernel lists: only such a socket has a peer to show. Between its connect hook and
//! its place in the list there are microseconds, so an owner counts as gone only if two searches miss it. A search that
//! could not see everything finds nothing.

use std::{cell::RefCell, collections::HashSet, fs, io, time::Duration};

use cproxy_core::{Protocol, TcpPlace};

use super::{
    diag::{Diag, DumpedSocket},
    diag_message::{CONNECTED, DumpQuery, INET, INET6, SocketFamily},
    error::{OwnersError, SocketsError, no_proc},
    namespaces::Visitor,
    owners,
    thread::{cpu_time, on_own_thread},
};
use crate::bpf::{PinDir, SocketStates};

/// `TCP_SYN_RECV`, also of a connecting socket whose peer connects to it at the same time (include/net/tcp_states.h).
const SYN_RECV: u32 = 1 << 3;

/// `PROC_PID_INIT_INO` (include/linux/proc_ns.h).
const MACHINES_PID_NAMESPACE: &str = "pid:[4026531836]";

/// Places whose owners one search has missed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MissingOwners {
    places: Vec<TcpPlace>,
    /// Number of places whose owners live, or may live.
    kept: u32,
    unseen: u32,
    cpu: Duration,
}

/// Places whose owners have gone: two searches have missed them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GoneOwners {
    /// The places.
    pub places: Vec<TcpPlace>,
    /// Number of the other places that are taken.
    pub kept: u32,
    /// Network namespaces and processes that could not be searched; if there are any, no owner counts as gone.
    pub unseen: u32,
    /// CPU time of the searches.
    pub cpu: Duration,
}

/// Searches for the owners of the places of TCP sockets. Blocks for milliseconds.
///
/// # Errors
/// The owners, /proc or the list of sockets could not be read.
pub fn find_missing_owners(pins: &PinDir) -> Result<MissingOwners, SocketsError> {
    check_access().map_err(SocketsError::Owners)?;
    let owners = SocketStates::open(pins)?.tcp_owners().map_err(|error| SocketsError::Io("TCP_OWNERS", error))?;
    MissingOwners::of(owners).search_on_own_thread()
}

impl MissingOwners {
    /// Time between the two searches: a thread that is denied a CPU in the middle of connect() gets on within it.
    pub const PAUSE: Duration = Duration::from_secs(1);

    /// All owners, before the first search.
    fn of(places: Vec<TcpPlace>) -> Self {
        Self { places, ..Self::default() }
    }

    /// Number of places whose owners live, or may live.
    #[must_use]
    pub fn kept(&self) -> u32 {
        self.kept
    }

    /// True if the search has missed none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Searches for them once more, after [`Self::PAUSE`]; not at all if there are none. Blocks for milliseconds.
    ///
    /// # Errors
    /// As [`find_missing_owners`].
    pub fn search_again(self) -> Result<GoneOwners, SocketsError> {
        let searched = if self.is_empty() { self } else { self.search_on_own_thread()? };
        let Self { places, kept, unseen, cpu } = searched;
        Ok(GoneOwners { places, kept, unseen, cpu })
    }

    fn search_on_own_thread(self) -> Result<Self, SocketsError> {
        on_own_thread(|| {
            let searched = self.search(remove_living)?;
            Ok(Self { cpu: searched.cpu + cpu_time(), ..searched })
        })
    }

    /// Keeps the owners that a search misses. `remove_living` removes the cookies of living sockets, and returns the
    /// number of network namespaces and processes that it could not search.
    fn search(
        mut self,
        remove_living: impl FnOnce(&mut HashSet<u64>) -> Result<u32, SocketsError>,
    ) -> Result<Self, SocketsError> {
        let mut missing = self.places.iter().map(|place| place.owner).collect();
        self.unseen = remove_living(&mut missing)?;
        let before = self.places.len();
        self.places.retain(|place| self.unseen == 0 && missing.contains(&place.owner));
        self.kept += (before - self.places.len()) as u32;
        Ok(self)
    }
}

/// Fails if not all processes and their sockets can be seen.
pub(super) fn check_access() -> Result<(), OwnersError> {
    owners::check_access()?;
    match fs::read_link("/proc/self/ns/pid") {
        Ok(namespace) if namespace.as_os_str() != MACHINES_PID_NAMESPACE => Err(OwnersError::OtherPidNamespace),
        // A kernel without them (CONFIG_PID_NS) has one.
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(OwnersError::PidNamespace(error)),
        _ => Ok(()),
    }
}

/// Removes the cookies of all living TCP sockets of the machine. The calling thread ends in another network namespace.
fn remove_living(cookies: &mut HashSet<u64>) -> Result<u32, SocketsError> {
    let (cookies, failure) = (RefCell::new(cookies), RefCell::new(None));
    let mut visitor = Visitor::new(|_| {
        if let Err(error) = remove_listed(&mut cookies.borrow_mut()) {
            *failure.borrow_mut() = Some(error);
        }
    });
    visitor.visit_known().map_err(no_proc)?;
    // This takes longer, and is of use only for what is still missing.
    if !cookies.borrow().is_empty() {
        visitor.visit_hidden().map_err(no_proc)?;
    }
    let refused = visitor.refused();
    failure.into_inner().map_or(Ok(refused), Err)
}

/// Removes the cookies of the living TCP sockets of the calling thread's network namespace.
fn remove_listed(cookies: &mut HashSet<u64>) -> Result<(), SocketsError> {
    let mut diag = Diag::open().map_err(SocketsError::List)?;
    [INET, INET6].into_iter().try_for_each(|family| {
        let kind = SocketFamily { family, protocol: Protocol::Tcp };
        let query = DumpQuery { kind, states: CONNECTED | SYN_RECV, filter: None, storage: None };
        let mut remove = |socket: &DumpedSocket| {
            cookies.remove(&socket.id.cookie());
        };
        diag.dump(&query, &mut remove).map_err(SocketsError::List)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The search that sees some sockets, but not everything if `unseen` is not 0.
    fn search(missing: MissingOwners, seen: &[u64], unseen: u32) -> MissingOwners {
        let remove_living = |cookies: &mut HashSet<u64>| {
            cookies.retain(|cookie| !seen.contains(cookie));
            Ok(unseen)
        };
        missing.search(remove_living).unwrap()
    }

    /// Places with these owners; those of 0 are free.
    fn places(owners: &[u64]) -> Vec<TcpPlace> {
        let places = owners.iter().zip(0..).map(|(&owner, place)| TcpPlace { place, owner });
        places.filter(|place| place.owner != 0).collect()
    }

    fn owners(missing: &MissingOwners) -> Vec<(u32, u64)> {
        missing.places.iter().map(|place| (place.place, place.owner)).collect()
    }

    #[test]
    fn owners_have_gone_if_neither_search_has_seen_them() {
        let first = search(MissingOwners::of(places(&[0, 10, 20, 0, 30, 40])), &[10, 99], 0);
        assert_eq!((owners(&first), first.kept), (vec![(2, 20), (4, 30), (5, 40)], 1));
        let second = search(first, &[20, 10], 0);
        assert_eq!((owners(&second), second.kept), (vec![(4, 30), (5, 40)], 2));
    }

    #[test]
    fn there_is_no_second_search_for_owners_that_live() {
        let first = search(MissingOwners::of(places(&[10, 0, 20])), &[10, 20], 0);
        assert!(first.is_empty());
        assert_eq!(first.search_again().unwrap(), GoneOwners { kept: 2, ..GoneOwners::default() });
    }

    #[test]
    fn no_owner_has_gone_where_not_everything_was_seen() {
        let all = MissingOwners::of(places(&[10, 20]));
        let partial = search(all.clone(), &[10], 1);
        assert_eq!((partial.is_empty(), partial.kept, partial.unseen), (true, 2, 1));
        let partial = search(search(all, &[10], 0), &[], 3);
        assert_eq!((partial.is_empty(), partial.kept, partial.unseen), (true, 2, 3));
    }

    #[test]
    fn a_search_that_fails_finds_nothing() {
        let failed = MissingOwners::of(places(&[10])).search(|_| Err(SocketsError::List(rustix::io::Errno::NOENT)));
        assert!(matches!(failed, Err(SocketsError::List(_))), "{failed:?}");
    }
}
