//! Large pieces of responses that clients have not taken yet. All of them together have a bound, and those of an
//! identity. A client that has not taken a piece for long gives up its connection first, and then the one that holds
//! most.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use tokio::{task::AbortHandle, time::Instant};

/// Bytes of pieces that are not counted: each connection has some anyway.
const SMALL_BYTES: usize = 32 << 10;

/// Bytes of all that are counted.
const UNSENT_BYTES_MAX: usize = 64 << 20;

/// Share of them that a guest may hold, and how many times as much an identity of many guests may.
const GUEST_SHARE: usize = 4;
const GUESTS_MAX: usize = 2;

/// Time after which a piece that was not taken goes before those of others.
const STALE_AFTER: Duration = Duration::from_secs(2);

/// Client that has not taken a piece.
#[derive(Clone, Debug)]
pub(crate) struct Holder {
    /// Identity, by its hash.
    pub(crate) identity: u64,
    /// Guests that may share it.
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
    pieces: HashMap<Memory, BTreeMap<u64, (Instant, Holder)>>,
}

/// Address and length of a piece.
type Memory = (usize, usize);

/// Piece that a client has not taken, until nothing has its memory any more: HTTP/2 keeps parts of it.
struct Held<T> {
    piece: Bytes,
    unsent: Arc<Unsent>,
    id: u64,
    _companion: T,
}

impl<T> AsRef<[u8]> for Held<T> {
    fn as_ref(&self) -> &[u8] {
        &self.piece
    }
}

impl<T> Drop for Held<T> {
    fn drop(&mut self) {
        self.unsent.state().remove(memory(&self.piece), self.id);
    }
}

fn memory(piece: &Bytes) -> Memory {
    (piece.as_ptr().addr(), piece.len())
}

impl Holder {
    /// Times as much as a guest that it may hold.
    fn times(&self) -> usize {
        usize::try_from(self.guests).map_or(GUESTS_MAX, |guests| guests.clamp(1, GUESTS_MAX))
    }
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

    /// The piece, counted as long as its memory is used, with a companion that lives as long. Connections end if
    /// there is no room for it.
    pub(crate) fn hold<T: Send + 'static>(self: &Arc<Self>, piece: Bytes, holder: Holder, companion: T) -> Bytes {
        let (memory, now) = (memory(&piece), Instant::now());
        let (identity, bytes_max) = (holder.identity, self.bytes_max / GUEST_SHARE * holder.times());
        let mut state = self.state();
        state.next_id += 1;
        let id = state.next_id;
        let holders = state.pieces.entry(memory).or_default();
        let is_new = holders.is_empty();
        holders.insert(id, (now, holder));
        if is_new {
            state.bytes += piece.len();
        }
        let mut ended = Vec::new();
        while let Some((memory, id)) = state.beyond_share(identity, bytes_max) {
            ended.extend(state.remove(memory, id));
        }
        while state.bytes > self.bytes_max {
            let Some((memory, id)) = state.first_to_end(now) else { break };
            ended.extend(state.remove(memory, id));
        }
        state.ended += ended.len() as u64;
        drop(state);
        // Outside the lock: the task lets go of what it has.
        ended.iter().for_each(|holder| holder.task.abort());
        Bytes::from_owner(Held { piece, unsent: self.clone(), id, _companion: companion })
    }

    /// Whether a piece is counted.
    pub(crate) fn counts_piece(piece: &Bytes) -> bool {
        piece.len() > SMALL_BYTES
    }
}

impl State {
    /// Each piece with the first one that holds it, to whom it counts.
    fn firsts(&self) -> impl Iterator<Item = (Memory, u64, Instant, &Holder)> {
        self.pieces.iter().filter_map(|(memory, holders)| {
            let (id, (since, holder)) = holders.first_key_value()?;
            Some((*memory, *id, *since, holder))
        })
    }

    /// The oldest piece of an identity that holds more than it may.
    fn beyond_share(&self, identity: u64, bytes_max: usize) -> Option<(Memory, u64)> {
        let own = || self.firsts().filter(|(.., holder)| holder.identity == identity);
        let bytes: usize = own().map(|((_, length), ..)| length).sum();
        let oldest = own().min_by_key(|(_, id, ..)| *id).filter(|_| bytes > bytes_max);
        oldest.map(|(memory, id, ..)| (memory, id))
    }

    /// The oldest piece that was not taken for long; else the oldest one of the identity with most, for its guests.
    fn first_to_end(&self, now: Instant) -> Option<(Memory, u64)> {
        let oldest = self.firsts().min_by_key(|(_, id, ..)| *id)?;
        if now.saturating_duration_since(oldest.2) > STALE_AFTER {
            return Some((oldest.0, oldest.1));
        }
        let mut identities: HashMap<u64, (usize, usize)> = HashMap::new();
        for ((_, length), _, _, holder) in self.firsts() {
            identities.entry(holder.identity).or_insert((0, holder.times())).0 += length;
        }
        let share = |identity: &u64| identities.get(identity).map_or(0, |(bytes, times)| bytes / times);
        let most = self.firsts().max_by_key(|(_, id, _, holder)| (share(&holder.identity), Reverse(*id)));
        most.map(|(memory, id, ..)| (memory, id))
    }

    fn remove(&mut self, memory: Memory, id: u64) -> Option<Holder> {
        let holders = self.pieces.get_mut(&memory)?;
        let holder = holders.remove(&id).map(|(_, holder)| holder);
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

    /// Room for some pieces, and those that are in it.
    struct Room {
        unsent: Arc<Unsent>,
        runtime: tokio::runtime::Runtime,
        held: Vec<Option<Bytes>>,
        tasks: Vec<tokio::task::JoinHandle<()>>,
    }

    impl Room {
        fn for_pieces(number: usize) -> Self {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
            let unsent = Arc::new(Unsent { bytes_max: number * PIECE_BYTES, state: Mutex::default() });
            Self { unsent, runtime, held: Vec::new(), tasks: Vec::new() }
        }

        fn hold(&mut self, piece: &Bytes, identity: u64, guests: u32) {
            let task = self.runtime.spawn(std::future::pending());
            let holder = Holder { identity, guests, task: task.abort_handle() };
            let held = self.runtime.block_on(async { self.unsent.hold(piece.clone(), holder, ()) });
            self.held.push(Some(held));
            self.tasks.push(task);
        }

        fn release(&mut self, index: usize) {
            self.held[index] = None;
        }

        fn wait(&self, time: Duration) {
            self.runtime.block_on(tokio::time::advance(time));
        }

        /// Connections that have ended, by their order.
        fn ended(&self) -> Vec<usize> {
            self.runtime.block_on(tokio::task::yield_now());
            (0..self.tasks.len()).filter(|index| self.tasks[*index].is_finished()).collect()
        }
    }

    #[test]
    fn whoever_holds_most_gives_up_its_oldest() {
        let mut room = Room::for_pieces(12);
        for identity in [1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 5] {
            room.hold(&piece(), identity, 1);
        }
        assert!(room.ended().is_empty());
        room.hold(&piece(), 6, 1);
        assert_eq!(room.ended(), [2]);
        assert_eq!(room.unsent.counts(), (12 * PIECE_BYTES, 1));
    }

    #[test]
    fn an_identity_has_a_share_and_one_of_many_guests_twice_as_much() {
        let mut room = Room::for_pieces(16);
        for _ in 0..5 {
            room.hold(&piece(), 1, 1);
        }
        assert_eq!(room.ended(), [0]);
        for _ in 0..9 {
            room.hold(&piece(), 2, 100);
        }
        assert_eq!(room.ended(), [0, 5]);
    }

    #[test]
    fn pieces_that_were_not_taken_for_long_go_before_larger_ones() {
        let mut room = Room::for_pieces(8);
        for identity in 0..7 {
            room.hold(&piece(), identity, 1);
        }
        room.wait(STALE_AFTER + Duration::from_millis(1));
        for _ in 0..2 {
            room.hold(&piece(), 9, 1);
        }
        assert_eq!(room.ended(), [0]);
    }

    #[test]
    fn a_part_counts_as_the_whole_as_long_as_anybody_has_it() {
        let mut room = Room::for_pieces(4);
        room.hold(&piece(), 1, 1);
        let part = room.held[0].as_ref().map(|held| held.slice(PIECE_BYTES - 1..));
        room.release(0);
        assert_eq!(room.unsent.counts(), (PIECE_BYTES, 0));
        drop(part);
        assert_eq!(room.unsent.counts(), (0, 0));
    }

    #[test]
    fn a_piece_counts_once_and_until_all_have_taken_it() {
        let mut room = Room::for_pieces(4);
        let shared = piece();
        for identity in 0..100 {
            room.hold(&shared, identity, 1);
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
        let mut room = Room::for_pieces(4);
        room.hold(&piece(), 1, 1);
        room.hold(&piece(), 1, 1);
        assert_eq!(room.ended(), [0]);
        room.release(0);
        assert_eq!(room.unsent.counts(), (PIECE_BYTES, 1));
        room.release(1);
        assert_eq!(room.unsent.counts(), (0, 1));
    }
}
