//! Tokens of clients that are connected. A request on a connection shows its token anew; a watch goes on for long, so
//! that its token is reviewed again now and then, and counts until it expires.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    time::Duration,
};

use tokio::{
    sync::{Notify, Semaphore},
    time::{Instant, sleep_until},
};

use crate::{
    Identity, PeerAddress, Reason, ReviewTransport, TokenReviewer,
    identify::bearer,
    token::{Token, TokenKey},
};

/// Shortest time between two reviews of one token.
const INTERVAL: Duration = Duration::from_secs(120);
/// Time between two reviews. With 10,000 tokens, each has its turn once in 17 minutes.
const PAUSE: Duration = Duration::from_millis(100);
/// Reviews at once: the API server may not answer, and new clients have reviews, too.
const REVIEWS_MAX: usize = 8;

/// Token of a client that is connected, as long as something holds it.
pub struct Lease {
    token: Box<str>,
    /// Identity that it had when the client was accepted.
    identity: Arc<Identity>,
    peer: PeerAddress,
    expires: Option<Instant>,
    /// Reason for which it ended in a review.
    ended: OnceLock<String>,
}

impl Lease {
    /// Reason for which the token no longer counts, if there is one.
    #[must_use]
    pub fn end(&self) -> Option<&str> {
        if let Some(reason) = self.ended.get() {
            return Some(reason);
        }
        let has_expired = self.expires.is_some_and(|expires| expires <= Instant::now());
        has_expired.then_some("its token has expired")
    }

    /// Whether it is the lease of the token in this header `Authorization`.
    #[must_use]
    pub fn is_of(&self, authorization: &[u8]) -> bool {
        bearer(authorization).is_ok_and(|token| *token == *self.token)
    }
}

/// All leases.
#[derive(Default)]
pub struct Leases {
    state: Mutex<State>,
    added: Notify,
}

#[derive(Default)]
struct State {
    /// A lease for each entry of the queue, if it is still held.
    by_key: HashMap<TokenKey, Weak<Lease>>,
    /// Tokens, and when each was reviewed, the one that was reviewed first to begin with.
    queue: VecDeque<(Instant, TokenKey)>,
}

impl Leases {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lease of a token that was just accepted; `None` for a header without a token.
    #[must_use]
    pub fn get(&self, authorization: &[u8], identity: &Arc<Identity>, peer: &PeerAddress) -> Option<Arc<Lease>> {
        let token = Token::new(bearer(authorization).ok()?).ok()?;
        let (key, mut state) = (token.key(), self.state());
        let known = state.by_key.get(&key);
        if let Some(lease) =
            known.and_then(Weak::upgrade).filter(|lease| lease.end().is_none() && lease.identity == *identity)
        {
            return Some(lease);
        }
        let lease = Arc::new(Lease {
            token: token.text().into(),
            identity: identity.clone(),
            peer: peer.clone(),
            expires: token.remaining().map(|time| Instant::now() + time),
            ended: OnceLock::new(),
        });
        if state.by_key.insert(key, Arc::downgrade(&lease)).is_none() {
            state.queue.push_back((Instant::now(), key));
            self.added.notify_one();
        }
        Some(lease)
    }

    /// Number of leases, of which some may have ended.
    #[must_use]
    pub fn count(&self) -> usize {
        self.state().queue.len()
    }

    /// Reviews tokens for ever, each at most once in two minutes, and ten a second of all.
    pub async fn review<R: ReviewTransport>(self: Arc<Self>, reviewer: Arc<TokenReviewer<R>>) {
        let permits = Arc::new(Semaphore::new(REVIEWS_MAX));
        loop {
            let (key, lease) = self.next().await;
            let Ok(permit) = permits.clone().acquire_owned().await else { return };
            let (leases, reviewer) = (self.clone(), reviewer.clone());
            let pause = Instant::now() + PAUSE;
            drop(tokio::spawn(async move {
                // An older answer counts while there is no new one.
                match reviewer.authenticate(&lease.token, &lease.peer).await {
                    Ok(identity) if identity == lease.identity => {}
                    Ok(_) => drop(lease.ended.set("its token is another identity's now".to_owned())),
                    Err(refusal) if refusal.reason() == Reason::TokenRefused => {
                        lease.ended.set(refusal.message().to_owned()).ok();
                    }
                    Err(_) => {}
                }
                leases.state().queue.push_back((Instant::now(), key));
                leases.added.notify_one();
                drop(permit);
            }));
            sleep_until(pause).await;
        }
    }

    /// Next lease that is due.
    async fn next(&self) -> (TokenKey, Arc<Lease>) {
        loop {
            let first = self.state().queue.front().copied();
            match first {
                Some((at, _)) if at + INTERVAL > Instant::now() => sleep_until(at + INTERVAL).await,
                Some(_) => {
                    let mut state = self.state();
                    let Some((_, key)) = state.queue.pop_front() else { continue };
                    match state.by_key.get(&key).and_then(Weak::upgrade).filter(|lease| lease.end().is_none()) {
                        Some(lease) => return (key, lease),
                        None => drop(state.by_key.remove(&key)),
                    }
                }
                None => self.added.notified().await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use bytes::Bytes;

    use super::*;
    use crate::ReviewSettings;

    /// Answer of the API server to each review.
    #[derive(Clone, Copy, Default)]
    enum Answer {
        #[default]
        Good,
        Refused,
        Unreachable,
        /// Good, as another user.
        Other,
    }

    #[derive(Default)]
    struct Server {
        reviews: AtomicU32,
        answer: Mutex<Answer>,
    }

    impl Server {
        fn answers(&self, answer: Answer) {
            *self.answer.lock().unwrap() = answer;
        }
    }

    impl ReviewTransport for Arc<Server> {
        type Error = &'static str;

        async fn review(&self, _: Bytes) -> Result<(u16, Bytes), &'static str> {
            self.reviews.fetch_add(1, Ordering::Relaxed);
            match *self.answer.lock().unwrap() {
                Answer::Good => Ok((201, r#"{"status":{"authenticated":true,"user":{"username":"a"}}}"#.into())),
                Answer::Other => Ok((201, r#"{"status":{"authenticated":true,"user":{"username":"b"}}}"#.into())),
                Answer::Refused => Ok((201, r#"{"status":{}}"#.into())),
                Answer::Unreachable => Err("no route"),
            }
        }
    }

    struct World {
        server: Arc<Server>,
        reviewer: Arc<TokenReviewer<Arc<Server>>>,
        leases: Arc<Leases>,
    }

    impl World {
        fn new() -> Self {
            let server = Arc::<Server>::default();
            let reviewer = Arc::new(TokenReviewer::new(server.clone(), ReviewSettings::default()));
            let leases = Arc::<Leases>::default();
            drop(tokio::spawn(leases.clone().review(reviewer.clone())));
            Self { server, reviewer, leases }
        }

        /// Lease of a client that was accepted.
        async fn accept(&self, token: &str) -> Arc<Lease> {
            let peer = PeerAddress::Vsock { cid: 3 };
            let identity = self.reviewer.authenticate(token, &peer).await.unwrap();
            self.leases.get(format!("Bearer {token}").as_bytes(), &identity, &peer).unwrap()
        }
    }

    const MINUTE: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn a_token_that_is_refused_later_ends_and_one_that_cannot_be_reviewed_does_not() {
        let world = World::new();
        let lease = world.accept("a").await;
        assert!(lease.is_of(b"Bearer a") && !lease.is_of(b"Bearer b") && !lease.is_of(b"a"));
        world.server.answers(Answer::Unreachable);
        tokio::time::sleep(MINUTE * 30).await;
        assert_eq!(lease.end(), None);
        world.server.answers(Answer::Refused);
        tokio::time::sleep(MINUTE * 3).await;
        assert!(lease.end().unwrap().contains("refuses the token"), "{:?}", lease.end());
        // A client that is accepted again has another lease.
        world.server.answers(Answer::Good);
        tokio::time::sleep(MINUTE * 3).await;
        let lease = world.accept("a").await;
        assert_eq!(lease.end(), None);
        world.server.answers(Answer::Other);
        tokio::time::sleep(MINUTE * 5).await;
        assert_eq!(lease.end(), Some("its token is another identity's now"));
    }

    #[tokio::test(start_paused = true)]
    async fn ten_tokens_a_second_are_reviewed_and_each_once_in_two_minutes_at_most() {
        let world = World::new();
        let few = [world.accept("a").await, world.accept("a").await, world.accept("b").await];
        assert_eq!(world.leases.count(), 2);
        let reviews = || world.server.reviews.swap(0, Ordering::Relaxed);
        assert_eq!(reviews(), 2);
        tokio::time::sleep(MINUTE * 60).await;
        assert!((50..=60).contains(&reviews()));
        let mut many = Vec::new();
        for number in 0..3_000 {
            many.push(world.accept(&format!("token-{number}")).await);
        }
        reviews();
        tokio::time::sleep(MINUTE * 60).await;
        let asked = reviews();
        assert!((30_000..=36_000).contains(&asked), "{asked}");
        drop((few, many));
        tokio::time::sleep(MINUTE * 10).await;
        assert_eq!(world.leases.count(), 0);
        reviews();
        tokio::time::sleep(MINUTE * 60).await;
        assert_eq!(reviews(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_ends_when_it_says_so() {
        use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
        let world = World::new();
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        let payload = URL_SAFE_NO_PAD.encode(format!(r#"{{"exp":{}}}"#, now + 600));
        let lease = world.accept(&format!("e30.{payload}.c2ln")).await;
        tokio::time::sleep(MINUTE * 9).await;
        assert_eq!(lease.end(), None);
        tokio::time::sleep(MINUTE * 2).await;
        assert_eq!(lease.end(), Some("its token has expired"));
    }
}
