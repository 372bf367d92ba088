//! Large pieces of responses that clients have not taken yet. All of them together have a bound: whoever holds most
//! gives up a connection.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    sync::{Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use tokio::task::AbortHandle;

/// Bytes of pieces that are not counted: each connection has some anyway.
const SMALL_BYTES: usize = 32 << 10;

/// Bytes of all that are counted.
const UNSENT_BYTES_MAX: usize = 64 << 20;

/// Client that has not taken a piece.
#[derive(Clone, Debug)]
pub(crate) struct Holder {
    /// Identity, by its hash.
    pub(crate) identity: u64,
    /// Guests that may share it. It may hold as many times as much.
    pub(crate) guests: u32,
    /// Task of the connection.
    pub(crate) task: AbortHandle,
}

/// Pieces that clients have not taken, each counted once however many clients share it.
#[derive(Debug)]
pub(crate) struct Unsent {
    bytes_max: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    bytes: usize,
    /// Connections that have ended for others' pieces.
    ended: u64,
    next_id: u64,
    pieces: HashMap<Memory, BTreeMap<u64, Holder>>,
}

/// Address and length of a piece.
type Memory = (usize, usize);

/// Piece that a client has not taken.
#[derive(Debug)]
pub(crate) struct Held {
    memory: Memory,
    id: u64,
}

impl Default for Unsent {
    fn default() -> Self {
        Self { bytes_max: UNSENT_BYTES_MAX, state: Mutex::default() }
    }
}

impl Unsent {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that are counted now, and connections that have ended so far.
    pub(crate) fn counts(&self) -> (usize, u64) {
        let state = self.state();
        (state.bytes, state.ended)
    }

    /// Counts a piece until it is released, unless it is a small one. Connections end if there is no room for it.
    pub(crate) fn hold(&self, piece: &Bytes, holder: impl FnOnce() -> Option<Holder>) -> Option<Held> {
        if piece.len() <= SMALL_BYTES {
            return None;
        }
        let holder = holder()?;
        let memory = (piece.as_ptr().addr(), piece.len());
        let mut state = self.state();
        state.next_id += 1;
        let id = state.next_id;
        let holders = state.pieces.entry(memory).or_default();
        let is_new = holders.is_empty();
        holders.insert(id, holder);
        if is_new {
            state.bytes += piece.len();
        }
        let mut ended = Vec::new();
        while state.bytes > self.bytes_max {
            let Some((memory, id)) = state.first_to_end() else { break };
            ended.extend(state.remove(memory, id));
        }
        state.ended += ended.len() as u64;
        drop(state);
        // Outside the lock: the task releases what it has.
        ended.iter().for_each(|holder| holder.task.abort());
        Some(Held { memory, id })
    }

    /// The client has taken a piece, or is gone.
    pub(crate) fn release(&self, Held { memory, id }: Held) {
        self.state().remove(memory, id);
    }
}

impl State {
    /// The oldest piece of the identity with most, for the guests that it may be. A piece that several share is the
    /// first one's.
    fn first_to_end(&self) -> Option<(Memory, u64)> {
        let firsts = || self.pieces.iter().filter_map(|(memory, holders)| Some((*memory, holders.first_key_value()?)));
        let mut identities: HashMap<u64, (usize, u32)> = HashMap::new();
        for ((_, length), (_, holder)) in firsts() {
            identities.entry(holder.identity).or_insert((0, holder.guests)).0 += length;
        }
        let share = |identity: &u64| identities.get(identity).map_or(0, |(bytes, guests)| bytes / *guests as usize);
        let most = firsts().max_by_key(|(_, (id, holder))| (share(&holder.identity), Reverse(**id)));
        most.map(|(memory, (id, _))| (memory, *id))
    }

    fn remove(&mut self, memory: Memory, id: u64) -> Option<Holder> {
        let holders = self.pieces.get_mut(&memory)?;
        let holder = holders.remove(&id);
        if holders.is_empty() {
            self.pieces.remove(&memory);
            self.bytes = self.bytes.saturating_sub(memory.1);
        }
        holder
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE_BYTES: usize = 100 << 10;

    fn piece() -> Bytes {
        vec![0; PIECE_BYTES].into()
    }

    /// Room for some pieces, and what is in it.
    struct Room {
        unsent: Unsent,
        runtime: tokio::runtime::Runtime,
        /// Pieces, so that each has memory of its own, with those who hold them.
        held: Vec<(Bytes, Option<Held>)>,
        tasks: Vec<tokio::task::JoinHandle<()>>,
    }

    impl Room {
        fn for_pieces(number: usize) -> Self {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let unsent = Unsent { bytes_max: number * PIECE_BYTES, state: Mutex::default() };
            Self { unsent, runtime, held: Vec::new(), tasks: Vec::new() }
        }

        fn hold(&mut self, piece: Bytes, identity: u64, guests: u32) {
            let task = self.runtime.spawn(std::future::pending());
            let holder = Holder { identity, guests, task: task.abort_handle() };
            let held = self.unsent.hold(&piece, || Some(holder));
            self.held.push((piece, held));
            self.tasks.push(task);
        }

        fn release(&mut self, index: usize) {
            let held = self.held[index].1.take();
            self.unsent.release(held.unwrap());
        }

        /// Connections that have ended, by their order.
        fn ended(&self) -> Vec<usize> {
            self.runtime.block_on(tokio::task::yield_now());
            (0..self.tasks.len()).filter(|index| self.tasks[*index].is_finished()).collect()
        }
    }

    #[test]
    fn whoever_holds_most_gives_up_its_oldest() {
        let mut room = Room::for_pieces(10);
        for _ in 0..2 {
            room.hold(piece(), 1, 1);
        }
        for _ in 0..8 {
            room.hold(piece(), 2, 1);
        }
        assert!(room.ended().is_empty());
        for _ in 0..3 {
            room.hold(piece(), 2, 1);
        }
        assert_eq!(room.ended(), [2, 3, 4]);
        room.hold(piece(), 3, 1);
        assert_eq!(room.ended(), [2, 3, 4, 5]);
        assert_eq!(room.unsent.counts(), (10 * PIECE_BYTES, 4));
    }

    #[test]
    fn an_identity_of_many_guests_may_hold_more() {
        let mut room = Room::for_pieces(10);
        for _ in 0..8 {
            room.hold(piece(), 1, 100);
        }
        for _ in 0..3 {
            room.hold(piece(), 2, 1);
        }
        assert_eq!(room.ended(), [8]);
    }

    #[test]
    fn a_piece_counts_once_and_until_all_have_taken_it() {
        let mut room = Room::for_pieces(1);
        let shared = piece();
        for identity in 0..100 {
            room.hold(shared.clone(), identity, 1);
        }
        assert_eq!(room.unsent.counts(), (PIECE_BYTES, 0));
        (0..99).for_each(|index| room.release(index));
        assert_eq!(room.unsent.counts(), (PIECE_BYTES, 0));
        room.release(99);
        assert_eq!(room.unsent.counts(), (0, 0));
        assert!(room.unsent.state().pieces.is_empty());
    }

    #[test]
    fn pieces_of_ended_connections_are_released_once() {
        let mut room = Room::for_pieces(1);
        room.hold(piece(), 1, 1);
        room.hold(piece(), 1, 1);
        assert_eq!(room.ended(), [0]);
        room.release(0);
        assert_eq!(room.unsent.counts(), (PIECE_BYTES, 1));
        room.release(1);
        assert_eq!(room.unsent.counts(), (0, 1));
    }

    #[test]
    fn small_pieces_are_not_counted() {
        let mut room = Room::for_pieces(1);
        room.hold(Bytes::from(vec![0; SMALL_BYTES]), 1, 1);
        assert_eq!(room.unsent.counts(), (0, 0));
    }
}
