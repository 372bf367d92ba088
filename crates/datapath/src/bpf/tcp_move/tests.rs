//! The moves in memory of a test, and a model of the protocol that goes through all orders of all steps.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
};

use super::*;

mod model;

/// Places in memory; a peer is a number.
#[derive(Default)]
struct InMemory {
    owners: RefCell<HashMap<u32, u64>>,
    peers: HashMap<u32, u32>,
    exchanges: Cell<usize>,
}

impl Places for InMemory {
    fn owner(&self, place: TcpPlaceId) -> u64 {
        self.owners.borrow().get(&place.0).copied().unwrap_or(TCP_PLACE_FREE)
    }

    fn exchange(&self, place: TcpPlaceId, from: u64, to: u64) -> bool {
        self.exchanges.set(self.exchanges.get() + 1);
        let is_it = self.owner(place) == from;
        if is_it {
            self.owners.borrow_mut().insert(place.0, to);
        }
        is_it
    }

    fn copy_peer(&mut self, from: TcpPlaceId, to: TcpPlaceId) -> Result<(), TableError> {
        let peer = self.peers.get(&from.0).copied().unwrap_or_default();
        self.peers.insert(to.0, peer);
        Ok(())
    }
}

/// A socket with a high and one with a low cookie: the kernel has both kinds.
const COOKIES: [u64; 2] = [0x0123_4567, u64::MAX - 7];
const LAST: u32 = 1;

/// Places with one socket in the last level.
fn with_one(cookie: u64) -> (InMemory, TcpPlaceId, [TcpPlaceId; 2]) {
    let [from, _] = tcp_places(cookie, LAST).map(|index| TcpPlaceId::new(LAST, index));
    let mut places = InMemory::default();
    places.owners.borrow_mut().insert(from.0, cookie);
    places.peers.insert(from.0, 7);
    (places, from, tcp_places(cookie, 0).map(|index| TcpPlaceId::new(0, index)))
}

#[test]
fn a_peer_moves_to_a_free_place_below() {
    for cookie in COOKIES {
        let (mut places, from, [first, second]) = with_one(cookie);
        places.owners.borrow_mut().insert(first.0, 99);
        let of = begin(&places, from).unwrap();
        assert_eq!(begin(&places, from), None, "it has begun");
        copy(&mut places, of).unwrap();
        commit(&places, of);
        assert_eq!([from, first, second].map(|place| places.owner(place)), [TCP_PLACE_CLOSED, 99, cookie]);
        assert_eq!(places.peers[&second.0], 7);
    }
}

#[test]
fn a_peer_stays_where_no_place_below_is_free() {
    let (places, from, below) = with_one(5);
    places.owners.borrow_mut().extend(below.map(|place| (place.0, 99)));
    assert_eq!(begin(&places, from), None);
    assert_eq!(places.owner(from), 5);
}

#[test]
fn a_move_is_undone_if_the_socket_was_used_or_closed() {
    for owner in [5, 99, TCP_PLACE_FREE] {
        let (mut places, from, [first, _]) = with_one(5);
        let of = begin(&places, from).unwrap();
        assert!(places.exchange(from, tcp_moving(5), owner));
        copy(&mut places, of).unwrap();
        commit(&places, of);
        assert_eq!([from, first].map(|place| places.owner(place)), [owner, TCP_PLACE_FREE]);
    }
}

/// The states that an agent leaves which is killed after each exchange.
#[test]
fn moves_of_a_killed_agent_are_undone_or_ended() {
    for cookie in COOKIES {
        let moving = tcp_moving(cookie);
        for (left, expected) in [
            ([cookie, moving], [cookie, TCP_PLACE_FREE]),
            ([moving, moving], [cookie, TCP_PLACE_FREE]),
            ([TCP_PLACE_CLOSED, moving], [TCP_PLACE_CLOSED, cookie]),
            ([TCP_PLACE_CLOSED, cookie], [TCP_PLACE_CLOSED, cookie]),
            ([moving, TCP_PLACE_FREE], [cookie, TCP_PLACE_FREE]),
        ] {
            let (places, from, [first, _]) = with_one(cookie);
            places.owners.borrow_mut().extend([(from.0, left[0]), (first.0, left[1])]);
            resume(&places, LAST);
            assert_eq!([from, first].map(|place| places.owner(place)), expected, "{left:x?}");
        }
    }
}
