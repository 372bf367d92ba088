//! Moves the peer of a TCP socket from the last level of places to one below it, while the programs use both.
//!
//! Let `c` be the cookie of the socket, and `P` its place in the last level; that level is to go. `Q` is a place of the
//! socket in a level below, which was free. `M` is [`tcp_moving`] of the
//! cookie, which no socket has. Places of that level are not free but closed ([`TCP_PLACE_CLOSED`]), so that sockets
//! claim none. A place that a program frees there may be claimed until the agent closes it.
//!
//! | step | `P` | `Q` |
//! |---|---|---|
//! | [`begin`]: reserve | `c` | free -> `M` |
//! | [`begin`]: freeze | `c` -> `M` | `M` |
//! | wait for the programs that run | | |
//! | [`copy`] the peer | `M` | `M` |
//! | wait for the programs that run | | |
//! | [`commit`] | `M` -> closed | `M` |
//! | [`commit`]: publish | closed | `M` -> `c` |
//!
//! Each step is one exchange of a word. Programs of one socket run one after the other, since the kernel holds the
//! socket's lock. A program looks for `c` or `M` from the last level down to the first one. `getpeername()` reads the
//! peer that it finds. At `M`, `connect()` and the release put `c` back:
//!
//! - At `P` that cancels the move: the commit finds `c`, and `Q` is freed. So a program writes a peer at `P` only while
//!   no commit can follow the copy. A program that has found `c` at `P` before the freeze has ended before the copy.
//! - At `Q` that publishes.
//!
//! A program gets to `Q` only when `P` is not the socket's any more, thus after the commit. It has begun after the
//! copy, so it sees the whole of that, whatever the order in which its CPU reads.
//!
//! The commit is the moment of the move: before it the socket is found at `P`, after it at `Q`, since each look goes
//! down. The model in the tests goes through all orders of all steps, with an agent that is killed after any of them.

use std::ops::Range;

use cproxy_ebpf::{TCP_PLACE_CLOSED, TCP_PLACE_FREE, TcpPlaceId, is_tcp_moving, tcp_moving, tcp_places};

use super::error::TableError;

/// The places, in memory that the programs share.
pub(super) trait Places {
    /// Owner of a place.
    fn owner(&self, place: TcpPlaceId) -> u64;

    /// Replaces an owner if it is `from`. Returns whether it was.
    fn exchange(&self, place: TcpPlaceId, from: u64, to: u64) -> bool;

    /// Copies the peer at a place to another one.
    fn copy_peer(&mut self, from: TcpPlaceId, to: TcpPlaceId) -> Result<(), TableError>;
}

/// A move that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Move {
    cookie: u64,
    from: TcpPlaceId,
    to: TcpPlaceId,
}

/// Begins to move the peer at a place of the last level. `None` if the place has no owner or is being moved, if no
/// place below is free, or if the socket has left its place meanwhile.
pub(super) fn begin(places: &impl Places, from: TcpPlaceId) -> Option<Move> {
    let cookie = places.owner(from);
    if cookie == TCP_PLACE_FREE || is_tcp_moving(cookie) {
        return None;
    }
    let moving = tcp_moving(cookie);
    let to = candidates(cookie, 0..from.level()).find(|to| places.exchange(*to, TCP_PLACE_FREE, moving))?;
    if places.exchange(from, cookie, moving) {
        return Some(Move { cookie, from, to });
    }
    places.exchange(to, moving, TCP_PLACE_FREE);
    None
}

/// Copies the peer, after all programs have ended that ran when the move began.
pub(super) fn copy(places: &mut impl Places, Move { from, to, .. }: Move) -> Result<(), TableError> {
    places.copy_peer(from, to)
}

/// Ends a move, after all programs have ended that ran during the copy. It is undone if the socket was used since it
/// began.
pub(super) fn commit(places: &impl Places, Move { cookie, from, to }: Move) {
    let moving = tcp_moving(cookie);
    if places.exchange(from, moving, TCP_PLACE_CLOSED) {
        // A program may have done it.
        places.exchange(to, moving, cookie);
    } else {
        places.exchange(to, moving, TCP_PLACE_FREE);
    }
}

/// Undoes a move that has begun.
pub(super) fn cancel(places: &impl Places, Move { cookie, from, to }: Move) {
    let moving = tcp_moving(cookie);
    places.exchange(from, moving, cookie);
    places.exchange(to, moving, TCP_PLACE_FREE);
}

/// Ends the moves of an agent that was killed, out of this level: those without a commit are undone.
pub(super) fn resume(places: &impl Places, last: u32) {
    for (to, moving) in marked(places, 0..last) {
        let cookie = tcp_moving(moving);
        let is_source = |from: &TcpPlaceId| [cookie, moving].contains(&places.owner(*from));
        match candidates(cookie, last..last + 1).find(is_source) {
            Some(from) => cancel(places, Move { cookie, from, to }),
            None => drop(places.exchange(to, moving, cookie)),
        }
    }
    for (from, moving) in marked(places, last..last + 1) {
        places.exchange(from, moving, tcp_moving(moving));
    }
}

/// The places in these levels that a socket can have, those of the first level first.
fn candidates(cookie: u64, levels: Range<u32>) -> impl Iterator<Item = TcpPlaceId> {
    levels.flat_map(move |level| tcp_places(cookie, level).map(|index| TcpPlaceId::new(level, index)))
}

/// The places in these levels whose peers were being moved.
fn marked(places: &impl Places, levels: Range<u32>) -> impl Iterator<Item = (TcpPlaceId, u64)> {
    let all = levels.flat_map(all_places);
    let owned = all.map(|place| (place, places.owner(place)));
    owned.filter(|(_, owner)| is_tcp_moving(*owner) && *owner != TCP_PLACE_CLOSED)
}

/// All places of a level.
pub(super) fn all_places(level: u32) -> impl Iterator<Item = TcpPlaceId> {
    (0..cproxy_ebpf::tcp_level_places(level)).map(move |index| TcpPlaceId::new(level, index))
}

#[cfg(test)]
mod tests;
