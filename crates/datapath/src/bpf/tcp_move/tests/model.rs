//! Model of the protocol. The programs of two sockets, and the agent, take one step at a time: a read or an exchange of
//! a word, or a write of half a peer. The agent may be killed after any of its steps; the next one resumes. The test
//! goes through all states that any order leads to.
//!
//! One socket has a place in the last level and is to be moved. The other one has none yet, and claims any place that
//! is free: one below, or that in the last level between a program that frees it and the agent that closes it. Both
//! connect, connect anew, ask for their peers and are closed at any time.

use std::collections::HashSet;

/// Places: one in the last level, which is to go, and one in each level below.
const LAST: usize = 2;
const BELOW: [usize; 2] = [0, 1];
/// The order in which programs look for a socket's place, and for one to claim.
const DOWN: [usize; 3] = [2, 1, 0];

/// Bounds of the model.
const CONNECTS_MAX: [u8; 2] = [2, 1];
const KILLS_MAX: u8 = 1;
const ATTEMPTS_MAX: u8 = 2;

/// Number of a socket.
type Socket = usize;
const FIRST: Socket = 0;

/// Owner of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Owner {
    None,
    Closed,
    Is(Socket),
    Moving(Socket),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Call {
    Connect,
    PeerName,
    Close,
}

/// The next step of a program. While it looks, it knows the last free place that it has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    Look(usize, Option<usize>),
    PutBack(usize, Option<usize>),
    Claim(usize),
    Use(usize, usize),
    Free(usize, usize),
}

/// The next step of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Agent {
    Close,
    Reserve(usize),
    Freeze(usize),
    Wait(usize, Wait),
    Waiting(usize, Wait, [bool; 2]),
    Copy(usize, usize),
    Commit(usize),
    Publish(usize),
    Undo(usize),
    Resume(usize),
    ResumeLook(usize),
    ResumeCancel(usize),
    ResumeFree(usize),
    ResumePublish(usize),
    ResumeLast,
    End,
}

/// Which of the two waits for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Wait {
    BeforeCopy,
    BeforeCommit,
}

/// A socket: the peer that it must show, and its program that runs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    owners: [Owner; 3],
    /// Two halves.
    peers: [[u8; 2]; 3],
    /// The peer that each socket must show; 0 if it has none.
    versions: [u8; 2],
    connects: [u8; 2],
    is_closed: [bool; 2],
    running: [Option<(Call, Step)>; 2],
    agent: Agent,
    /// The socket that the agent moves.
    moved: Socket,
    attempts: u8,
    kills: u8,
}

/// Parts of the protocol, so that a test can leave one out.
#[derive(Clone, Copy)]
struct Protocol {
    waits_before_copy: bool,
    goes_down_to_the_first: bool,
    puts_back: bool,
}

const PROTOCOL: Protocol = Protocol { waits_before_copy: true, goes_down_to_the_first: true, puts_back: true };

type Outcome<T> = Result<T, String>;

fn free_place(place: usize, owner: Owner) -> Option<usize> {
    (owner == Owner::None).then_some(place)
}

impl State {
    fn start() -> Self {
        Self {
            owners: [Owner::None, Owner::None, Owner::Is(FIRST)],
            peers: [[0; 2], [0; 2], [1; 2]],
            versions: [1, 0],
            connects: [0; 2],
            is_closed: [false; 2],
            running: [None; 2],
            agent: Agent::Close,
            moved: FIRST,
            attempts: 0,
            kills: 0,
        }
    }

    fn exchange(&mut self, place: usize, from: Owner, to: Owner) -> Owner {
        let found = self.owners[place];
        if found == from {
            self.owners[place] = to;
        }
        found
    }

    /// All states that one step of anyone leads to.
    fn successors(&self, protocol: Protocol) -> Outcome<Vec<Self>> {
        let mut next = Vec::new();
        for socket in 0..2 {
            match self.running[socket] {
                Some((call, step)) => next.push(self.program_step(protocol, socket, call, step)?),
                None => next.extend(self.calls(socket)),
            }
        }
        next.extend(self.agent_step(protocol));
        if self.kills < KILLS_MAX && self.agent != Agent::End {
            next.push(Self { agent: Agent::Resume(0), kills: self.kills + 1, ..self.clone() });
        }
        Ok(next)
    }

    /// The calls that a socket may make now.
    fn calls(&self, socket: Socket) -> impl Iterator<Item = Self> {
        let may = move |call| match call {
            _ if self.is_closed[socket] => false,
            Call::Connect => self.connects[socket] < CONNECTS_MAX[socket],
            Call::PeerName | Call::Close => true,
        };
        [Call::Connect, Call::PeerName, Call::Close].into_iter().filter(move |call| may(*call)).map(move |call| {
            let mut next = self.clone();
            next.running[socket] = Some((call, Step::Look(0, None)));
            next
        })
    }

    fn program_step(&self, protocol: Protocol, socket: Socket, call: Call, step: Step) -> Outcome<Self> {
        let mut next = self.clone();
        let (own, moving) = (Owner::Is(socket), Owner::Moving(socket));
        let after = match step {
            Step::Look(index, free) => match DOWN.get(index) {
                Some(0) if !protocol.goes_down_to_the_first => next.missed(socket, call, free)?,
                Some(&place) if self.owners[place] == own => next.found(socket, call, place),
                Some(&place) if self.owners[place] == moving && (call == Call::PeerName || !protocol.puts_back) => {
                    next.found(socket, call, place)
                }
                Some(&place) if self.owners[place] == moving => Some(Step::PutBack(index, free)),
                Some(&place) => Some(Step::Look(index + 1, free_place(place, self.owners[place]).or(free))),
                None => next.missed(socket, call, free)?,
            },
            Step::PutBack(index, free) => {
                let place = DOWN[index];
                let found = next.exchange(place, moving, own);
                if found == own || found == moving {
                    next.found(socket, call, place)
                } else {
                    Some(Step::Look(index + 1, free_place(place, found).or(free)))
                }
            }
            Step::Claim(place) if next.exchange(place, Owner::None, own) == Owner::None => {
                next.found(socket, call, place)
            }
            Step::Claim(_) => None,
            Step::Use(place, half) => {
                next.use_half(socket, call, place, half)?;
                (half == 0).then_some(Step::Use(place, 1))
            }
            Step::Free(place, 0) if place > 0 && next.exchange(place, own, Owner::None) != own => {
                Some(Step::Free(place, 1))
            }
            Step::Free(0, _) => {
                next.exchange(0, own, Owner::None);
                None
            }
            Step::Free(_, 0) => None,
            Step::Free(place, _) => {
                next.exchange(place, moving, Owner::None);
                None
            }
        };
        next.running[socket] = after.map(|step| (call, step));
        if after.is_none() {
            next.end_call(socket, call);
        }
        Ok(next)
    }

    /// The program has found, or claimed, the socket's place.
    fn found(&mut self, socket: Socket, call: Call, place: usize) -> Option<Step> {
        if call == Call::Connect {
            self.versions[socket] = 10 * (socket as u8 + 1) + self.connects[socket];
        }
        Some(if call == Call::Close { Step::Free(place, 0) } else { Step::Use(place, 0) })
    }

    /// The program has found no place of the socket.
    fn missed(&self, socket: Socket, call: Call, free: Option<usize>) -> Outcome<Option<Step>> {
        if self.versions[socket] != 0 {
            return Err(format!("{call:?} of socket {socket} does not find its place"));
        }
        Ok(free.filter(|_| call == Call::Connect).map(Step::Claim))
    }

    fn use_half(&mut self, socket: Socket, call: Call, place: usize, half: usize) -> Outcome<()> {
        let version = self.versions[socket];
        if call == Call::Connect {
            self.peers[place][half] = version;
        } else if self.peers[place][half] != version {
            return Err(format!("socket {socket} shows another peer: {self:?}"));
        }
        Ok(())
    }

    fn end_call(&mut self, socket: Socket, call: Call) {
        self.connects[socket] += u8::from(call == Call::Connect);
        if call == Call::Close {
            (self.is_closed[socket], self.versions[socket]) = (true, 0);
        }
        if let Agent::Waiting(_, _, for_programs) = &mut self.agent {
            for_programs[socket] = false;
        }
    }

    fn agent_step(&self, protocol: Protocol) -> Option<Self> {
        let mut next = self.clone();
        let (own, moving) = (Owner::Is(self.moved), Owner::Moving(self.moved));
        next.agent = match self.agent {
            Agent::Close => {
                next.exchange(LAST, Owner::None, Owner::Closed);
                next.start_move()
            }
            Agent::Reserve(to) if next.exchange(to, Owner::None, moving) == Owner::None => Agent::Freeze(to),
            Agent::Reserve(to) if to + 1 < LAST => Agent::Reserve(to + 1),
            Agent::Reserve(_) => Agent::Close,
            Agent::Freeze(to) if next.exchange(LAST, own, moving) == own => Agent::Wait(to, Wait::BeforeCopy),
            Agent::Freeze(to) => Agent::Undo(to),
            Agent::Wait(to, Wait::BeforeCopy) if !protocol.waits_before_copy => Agent::Copy(to, 0),
            Agent::Wait(to, wait) => Agent::Waiting(to, wait, self.running.map(|program| program.is_some())),
            Agent::Waiting(to, wait, [false, false]) => match wait {
                Wait::BeforeCopy => Agent::Copy(to, 0),
                Wait::BeforeCommit => Agent::Commit(to),
            },
            Agent::Waiting(..) | Agent::End => return None,
            Agent::Copy(to, half) => {
                next.peers[to][half] = self.peers[LAST][half];
                if half == 0 { Agent::Copy(to, 1) } else { Agent::Wait(to, Wait::BeforeCommit) }
            }
            Agent::Commit(to) if next.exchange(LAST, moving, Owner::Closed) == moving => Agent::Publish(to),
            Agent::Commit(to) => Agent::Undo(to),
            Agent::Publish(to) => next.after(Agent::Close, |next| next.exchange(to, moving, own)),
            Agent::Undo(to) => next.after(Agent::Close, |next| next.exchange(to, moving, Owner::None)),
            resuming => next.resume_step(resuming),
        };
        Some(next)
    }

    fn resume_step(&mut self, step: Agent) -> Agent {
        let (own, moving) = (Owner::Is(self.moved), Owner::Moving(self.moved));
        match step {
            Agent::Resume(to) => match self.owners[to] {
                Owner::Moving(socket) if to == LAST => self.after(Agent::ResumeLast, |next| next.moved = socket),
                Owner::Moving(socket) => self.after(Agent::ResumeLook(to), |next| next.moved = socket),
                _ if to == LAST => Agent::Close,
                _ => Agent::Resume(to + 1),
            },
            Agent::ResumeLook(to) if [own, moving].contains(&self.owners[LAST]) => Agent::ResumeCancel(to),
            Agent::ResumeLook(to) => Agent::ResumePublish(to),
            Agent::ResumeCancel(to) => self.after(Agent::ResumeFree(to), |next| next.exchange(LAST, moving, own)),
            Agent::ResumeFree(to) => self.after(Agent::Resume(to + 1), |next| next.exchange(to, moving, Owner::None)),
            Agent::ResumePublish(to) => self.after(Agent::Resume(to + 1), |next| next.exchange(to, moving, own)),
            _ => self.after(Agent::Close, |next| next.exchange(LAST, moving, own)),
        }
    }

    fn after<T>(&mut self, agent: Agent, step: impl FnOnce(&mut Self) -> T) -> Agent {
        step(self);
        agent
    }

    /// Begins a move, if there is something to move, and it has not tried that often.
    fn start_move(&mut self) -> Agent {
        match self.owners[LAST] {
            Owner::Is(socket) if self.attempts < ATTEMPTS_MAX => {
                (self.moved, self.attempts) = (socket, self.attempts + 1);
                Agent::Reserve(0)
            }
            _ => Agent::End,
        }
    }

    /// Fails in a state that must not be.
    fn check(&self) -> Outcome<()> {
        for socket in 0..2 {
            let owned = self.owners.iter().filter(|owner| **owner == Owner::Is(socket)).count();
            if owned > 1 {
                return Err(format!("two places of socket {socket}: {self:?}"));
            }
        }
        let is_at_rest = self.agent == Agent::End && self.running == [None, None];
        let is_moving = self.owners.iter().any(|owner| matches!(owner, Owner::Moving(_)));
        if is_at_rest && is_moving {
            return Err(format!("a place keeps its mark: {self:?}"));
        }
        for socket in (0..2).filter(|socket| is_at_rest && self.is_closed[*socket]) {
            // The search for owners that have gone frees what an agent that was killed has left.
            if self.kills == 0 && self.owners.contains(&Owner::Is(socket)) {
                return Err(format!("a place of a closed socket stays taken: {self:?}"));
            }
        }
        Ok(())
    }
}

/// Goes through all states. Returns their number.
fn explore(protocol: Protocol) -> Outcome<usize> {
    let start = State::start();
    let (mut seen, mut open) = (HashSet::from([start.clone()]), vec![start]);
    while let Some(state) = open.pop() {
        state.check()?;
        open.extend(state.successors(protocol)?.into_iter().filter(|next| seen.insert(next.clone())));
    }
    Ok(seen.len())
}

#[test]
fn a_socket_keeps_its_peer_in_every_order_of_the_steps() {
    assert!(BELOW.iter().all(|place| *place < LAST));
    let states = explore(PROTOCOL).unwrap();
    println!("{states} states");
    assert!(states > 100_000, "{states}");
}

/// The model is worth something: it fails where a part of the protocol is missing.
#[test]
fn each_part_of_the_protocol_is_necessary() {
    for (part, protocol) in [
        ("the wait before the copy", Protocol { waits_before_copy: false, ..PROTOCOL }),
        ("the second look at the first level", Protocol { goes_down_to_the_first: false, ..PROTOCOL }),
        ("putting the cookie back", Protocol { puts_back: false, ..PROTOCOL }),
    ] {
        assert!(explore(protocol).is_err(), "{part} could be left out");
    }
}
