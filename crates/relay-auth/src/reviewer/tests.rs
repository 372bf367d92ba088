//! Reviews by a simulated API server, in simulated time.

use std::{
    collections::HashMap,
    net::{Ipv4Addr, SocketAddr},
    sync::atomic::{AtomicUsize, Ordering},
};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD, prelude::BASE64_STANDARD};
use tokio::{
    task::JoinSet,
    time::{advance, sleep},
};

use super::*;
use crate::Reason;

/// API server that knows some tokens.
#[derive(Default)]
struct Server {
    /// User of each token.
    users: Mutex<HashMap<String, String>>,
    /// Tokens that are answered differently from others.
    exceptions: Mutex<HashMap<String, Behaviour>>,
    behaviour: Mutex<Behaviour>,
    reviews: AtomicUsize,
    under_way: AtomicUsize,
    under_way_max: AtomicUsize,
}

#[derive(Clone, Copy, Default)]
enum Behaviour {
    #[default]
    Answers,
    /// Answers after a time.
    Slow(Duration),
    /// Answers with a status code.
    Status(u16),
    Unreachable,
    Silent,
}

impl ReviewTransport for Arc<Server> {
    type Error = &'static str;

    async fn review(&self, body: Bytes) -> Result<(u16, Bytes), &'static str> {
        self.reviews.fetch_add(1, Ordering::Relaxed);
        let under_way = self.under_way.fetch_add(1, Ordering::Relaxed) + 1;
        self.under_way_max.fetch_max(under_way, Ordering::Relaxed);
        let request: serde_json::Value = serde_json::from_slice(&body).unwrap();
        let exception = self.exceptions.lock().unwrap().get(request["spec"]["token"].as_str().unwrap()).copied();
        let behaviour = exception.unwrap_or(*self.behaviour.lock().unwrap());
        let answer = match behaviour {
            Behaviour::Answers => Ok((201, self.answer(&body))),
            Behaviour::Slow(time) => {
                sleep(time).await;
                Ok((201, self.answer(&body)))
            }
            Behaviour::Status(status) => Ok((status, Bytes::new())),
            Behaviour::Unreachable => Err("connection refused"),
            Behaviour::Silent => std::future::pending().await,
        };
        self.under_way.fetch_sub(1, Ordering::Relaxed);
        answer
    }
}

impl Server {
    fn answer(&self, body: &[u8]) -> Bytes {
        let request: serde_json::Value = serde_json::from_slice(body).unwrap();
        let token = request["spec"]["token"].as_str().unwrap();
        let status = match self.users.lock().unwrap().get(token) {
            Some(user) => serde_json::json!({"authenticated": true, "user": {"username": user}}),
            // A server may repeat what it was asked.
            None => serde_json::json!({"error": format!("unknown token {token}")}),
        };
        serde_json::json!({ "status": status }).to_string().into()
    }
}

/// Reviewer with its server.
struct Setup {
    server: Arc<Server>,
    reviewer: Arc<TokenReviewer<Arc<Server>>>,
}

impl Setup {
    fn new(settings: ReviewSettings) -> Self {
        let server = Arc::new(Server::default());
        Self { reviewer: Arc::new(TokenReviewer::new(server.clone(), settings)), server }
    }

    fn with_user(token: &str) -> Self {
        let setup = Self::new(ReviewSettings::default());
        setup.add_user(token);
        setup
    }

    fn add_user(&self, token: &str) {
        self.server.users.lock().unwrap().insert(token.to_owned(), format!("user of {token}"));
    }

    fn delete_user(&self, token: &str) {
        self.server.users.lock().unwrap().remove(token).unwrap();
    }

    fn behave(&self, behaviour: Behaviour) {
        *self.server.behaviour.lock().unwrap() = behaviour;
    }

    fn reviews(&self) -> usize {
        self.server.reviews.load(Ordering::Relaxed)
    }

    /// Whether the token is accepted, or the reason why not.
    async fn ask(&self, token: &str) -> Result<(), Reason> {
        self.ask_from(token, &peer(0)).await
    }

    async fn ask_from(&self, token: &str, peer: &PeerAddress) -> Result<(), Reason> {
        match self.reviewer.authenticate(token, peer).await {
            Ok(identity) => {
                assert_eq!(identity.username, format!("user of {token}"));
                Ok(())
            }
            Err(refusal) => {
                assert!(!refusal.message().contains(token), "{refusal}");
                Err(refusal.reason())
            }
        }
    }

    /// Starts a request.
    fn start(&self, tasks: &mut JoinSet<Outcome>, token: &str, peer: &PeerAddress) {
        let (reviewer, token, peer) = (self.reviewer.clone(), token.to_owned(), peer.clone());
        tasks.spawn(async move { reviewer.authenticate(&token, &peer).await });
    }
}

fn peer(number: u32) -> PeerAddress {
    PeerAddress::Tcp(SocketAddr::from((Ipv4Addr::from_bits(number), 1)))
}

const MINUTE: Duration = Duration::from_mins(1);
const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn a_good_token_is_reviewed_again_after_two_minutes() {
    let setup = Setup::with_user("token-a");
    for (time, reviews) in [(0, 1), (0, 1), (119, 1), (1, 2), (119, 2), (2, 3)] {
        advance(SECOND * time).await;
        assert_eq!(setup.ask("token-a").await, Ok(()));
        assert_eq!(setup.reviews(), reviews);
    }
    let counts = setup.reviewer.counts();
    assert_eq!((counts.reviews, counts.known, counts.accepted_entries, counts.under_way), (3, 3, 1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_bad_token_is_reviewed_again_after_ten_seconds() {
    let setup = Setup::with_user("token-a");
    for (time, reviews) in [(0, 1), (9, 1), (1, 2)] {
        advance(SECOND * time).await;
        assert_eq!(setup.ask("token-b").await, Err(Reason::TokenRefused));
        assert_eq!(setup.reviews(), reviews);
    }
    // An account that has just been made is known soon.
    setup.add_user("token-b");
    assert_eq!(setup.ask("token-b").await, Err(Reason::TokenRefused));
    advance(SECOND * 10).await;
    assert_eq!(setup.ask("token-b").await, Ok(()));
    assert_eq!(setup.reviewer.counts().known_refused, 2);
}

#[tokio::test(start_paused = true)]
async fn a_text_that_cannot_be_a_token_is_not_reviewed() {
    let setup = Setup::new(ReviewSettings::default());
    for token in ["a\nb", "a b", &"a".repeat(20_000)] {
        assert_eq!(setup.ask(token).await, Err(Reason::MalformedToken));
    }
    assert_eq!(setup.reviews(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_deleted_account_is_refused_after_two_minutes() {
    let setup = Setup::with_user("token-a");
    assert_eq!(setup.ask("token-a").await, Ok(()));
    setup.delete_user("token-a");
    assert_eq!(setup.ask("token-a").await, Ok(()));
    advance(MINUTE * 2).await;
    assert_eq!(setup.ask("token-a").await, Err(Reason::TokenRefused));
    // Nor is the old answer used in an outage.
    setup.behave(Behaviour::Unreachable);
    advance(SECOND * 10).await;
    assert_eq!(setup.ask("token-a").await, Err(Reason::ReviewsUnavailable));
    assert_eq!(setup.reviewer.counts().accepted_entries, 0);
}

#[tokio::test(start_paused = true)]
async fn all_who_send_a_token_wait_for_one_review() {
    let setup = Setup::with_user("token-a");
    setup.behave(Behaviour::Slow(SECOND));
    let mut tasks = JoinSet::new();
    for number in 0..1000 {
        setup.start(&mut tasks, "token-a", &peer(number));
        setup.start(&mut tasks, "token-b", &peer(number));
    }
    let accepted = tasks.join_all().await.into_iter().filter(Result::is_ok).count();
    assert_eq!((accepted, setup.reviews()), (1000, 2));
}

#[tokio::test(start_paused = true)]
async fn a_review_goes_on_when_its_client_leaves() {
    let setup = Setup::with_user("token-a");
    setup.behave(Behaviour::Slow(SECOND));
    let mut tasks = JoinSet::new();
    setup.start(&mut tasks, "token-a", &peer(0));
    setup.start(&mut tasks, "token-b", &peer(0));
    sleep(SECOND / 2).await;
    tasks.shutdown().await;
    sleep(SECOND).await;
    assert_eq!((setup.ask("token-a").await, setup.reviews()), (Ok(()), 2));
    assert_eq!(setup.reviewer.counts().under_way, 0);
}

#[tokio::test(start_paused = true)]
async fn the_expiry_of_a_token_shortens_its_use() {
    let expires = std::time::SystemTime::now() + SECOND * 30;
    let expires_seconds = expires.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let token = |exp| format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(format!(r#"{{"exp":{exp}}}"#)));
    let (expiring, expired) = (token(expires_seconds), token(1));
    let setup = Setup::with_user(&expiring);
    setup.add_user(&expired);
    assert_eq!(setup.ask(&expiring).await, Ok(()));
    advance(SECOND * 20).await;
    assert_eq!((setup.ask(&expiring).await, setup.reviews()), (Ok(()), 1));
    advance(SECOND * 11).await;
    setup.behave(Behaviour::Unreachable);
    assert_eq!(setup.ask(&expiring).await, Err(Reason::ReviewsUnavailable));
    // The API server's clock decides; the answer is only not kept.
    setup.behave(Behaviour::Answers);
    advance(SECOND * 10).await;
    for reviews in [3, 4] {
        assert_eq!((setup.ask(&expired).await, setup.reviews()), (Ok(()), reviews));
    }
}

/// Behaviours of an API server in an outage.
const OUTAGES: [Behaviour; 5] =
    [Behaviour::Unreachable, Behaviour::Silent, Behaviour::Status(500), Behaviour::Status(429), Behaviour::Status(403)];

#[tokio::test(start_paused = true)]
async fn known_tokens_outlive_an_outage_of_an_hour() {
    for outage in OUTAGES {
        let setup = Setup::with_user("token-a");
        assert_eq!(setup.ask("token-a").await, Ok(()));
        setup.behave(outage);
        let start = Instant::now();
        while start.elapsed() < MINUTE * 60 {
            advance(MINUTE).await;
            let asked = Instant::now();
            assert_eq!(setup.ask("token-a").await, Ok(()));
            assert!(asked.elapsed() <= SECOND * 3, "a client waits {:?}", asked.elapsed());
            assert_eq!(setup.ask("token-b").await, Err(Reason::ReviewsUnavailable));
        }
        assert!(setup.reviewer.counts().stale >= 45 && setup.reviewer.counts().errors >= 45);
        advance(MINUTE * 10).await;
        assert_eq!(setup.ask("token-a").await, Err(Reason::ReviewsUnavailable));
        setup.behave(Behaviour::Answers);
        sleep(SECOND * 20).await;
        assert_eq!(setup.ask("token-a").await, Ok(()));
    }
}

#[tokio::test(start_paused = true)]
async fn tokens_whose_reviews_fail_or_hang_cost_clients_elsewhere_nothing() {
    for behaviour in [Behaviour::Status(500), Behaviour::Status(429), Behaviour::Silent] {
        let setup = Setup::new(ReviewSettings::default());
        let mut tasks = JoinSet::new();
        for number in 0..300 {
            let token = format!("bad-{number}");
            setup.server.exceptions.lock().unwrap().insert(token.clone(), behaviour);
            setup.start(&mut tasks, &token, &peer(1));
        }
        let start = Instant::now();
        for round in 0..30 {
            sleep(SECOND / 10).await;
            setup.add_user(&format!("token-{round}"));
            assert_eq!(setup.ask_from(&format!("token-{round}"), &peer(2)).await, Ok(()));
        }
        assert!(start.elapsed() < SECOND * 4, "{:?}", start.elapsed());
        // They have a bound of their own.
        let reviews = setup.reviews();
        for number in 0..1_000 {
            let token = format!("worse-{number}");
            setup.server.exceptions.lock().unwrap().insert(token.clone(), behaviour);
            setup.start(&mut tasks, &token, &peer(1));
            setup.ask_from("token-1", &peer(2)).await.unwrap();
        }
        assert!(setup.reviews() < reviews + 100, "{}", setup.reviews() - reviews);
    }
}

#[tokio::test(start_paused = true)]
async fn an_account_deleted_in_an_outage_is_refused_when_it_ends() {
    let setup = Setup::with_user("token-a");
    assert_eq!(setup.ask("token-a").await, Ok(()));
    setup.behave(Behaviour::Unreachable);
    setup.delete_user("token-a");
    advance(MINUTE * 10).await;
    assert_eq!(setup.ask("token-a").await, Ok(()));
    setup.behave(Behaviour::Answers);
    advance(SECOND * 10).await;
    assert_eq!(setup.ask("token-a").await, Err(Reason::TokenRefused));
}

#[tokio::test(start_paused = true)]
async fn a_slow_answer_replaces_the_older_one_that_was_used() {
    let setup = Setup::with_user("token-a");
    assert_eq!(setup.ask("token-a").await, Ok(()));
    advance(MINUTE * 2).await;
    setup.delete_user("token-a");
    setup.behave(Behaviour::Slow(SECOND * 5));
    assert_eq!(setup.ask("token-a").await, Ok(()));
    sleep(SECOND * 4).await;
    assert_eq!((setup.ask("token-a").await, setup.reviews()), (Err(Reason::TokenRefused), 2));
}

/// In an outage, clients with known tokens cost few attempts, and clients without one are refused at once.
#[tokio::test(start_paused = true)]
async fn an_outage_is_not_a_flood() {
    let setup = Setup::new(ReviewSettings::default());
    let tokens: Vec<_> = (0..2000).map(|number| format!("token-{number}")).collect();
    tokens.iter().for_each(|token| setup.add_user(token));
    for token in &tokens {
        assert_eq!(setup.ask(token).await, Ok(()));
    }
    advance(MINUTE * 3).await;
    setup.behave(Behaviour::Unreachable);
    let (reviews, start) = (setup.reviews(), Instant::now());
    for token in tokens.iter().cycle().take(20_000) {
        assert_eq!(setup.ask(token).await, Ok(()));
        assert_eq!(setup.ask("token-x").await, Err(Reason::ReviewsUnavailable));
    }
    let attempts = setup.reviews() - reviews;
    assert!(attempts <= 4 && start.elapsed() < SECOND, "{attempts} attempts in {:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn reviews_are_few_at_once_and_in_a_second() {
    let setup = Setup::new(ReviewSettings::default());
    setup.behave(Behaviour::Slow(SECOND / 100));
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for number in 0..10_000 {
        setup.add_user(&format!("token-{number}"));
        setup.start(&mut tasks, &format!("token-{number}"), &peer(number));
    }
    // All agents return at once after a restart of the relay: each is served within the longest wait.
    assert!(tasks.join_all().await.iter().all(Result::is_ok));
    assert_eq!(setup.reviews(), 10_000);
    assert!(setup.server.under_way_max.load(Ordering::Relaxed) <= 64);
    assert!(start.elapsed() > SECOND * 9, "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn tokens_beyond_the_bounds_are_told_to_come_later() {
    let setup = Setup::new(ReviewSettings { tokens_max: 100, ..ReviewSettings::default() });
    setup.behave(Behaviour::Slow(SECOND));
    let mut tasks = JoinSet::new();
    for number in 0..300 {
        setup.start(&mut tasks, &format!("token-{number}"), &peer(number));
    }
    let refusals: Vec<_> = tasks.join_all().await.into_iter().filter_map(Result::err).collect();
    let late: Vec<_> = refusals.iter().filter(|refusal| refusal.reason() == Reason::TooManyReviews).collect();
    assert_eq!((refusals.len(), late.len()), (300, 200));
    assert!(late.iter().all(|refusal| refusal.status() == 429 && refusal.retry_after_seconds() == Some(5)));

    let setup = Setup::new(ReviewSettings { tokens_bytes_max: 20, ..ReviewSettings::default() });
    setup.behave(Behaviour::Slow(SECOND));
    let mut tasks = JoinSet::new();
    setup.start(&mut tasks, "token-of-17-bytes", &peer(0));
    tokio::task::yield_now().await;
    assert_eq!(setup.ask("token-x").await, Err(Reason::TooManyReviews));
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_does_not_come_is_too_late() {
    let setup = Setup::new(ReviewSettings { reviews_max: 1, ..ReviewSettings::default() });
    setup.behave(Behaviour::Slow(SECOND * 9));
    let mut tasks = JoinSet::new();
    for number in 0..3 {
        setup.start(&mut tasks, &format!("token-{number}"), &peer(number));
    }
    let reasons: Vec<_> = tasks.join_all().await.into_iter().map(|outcome| outcome.unwrap_err().reason()).collect();
    let late = reasons.iter().filter(|reason| **reason == Reason::TooManyReviews).count();
    assert_eq!((late, setup.reviews()), (1, 2));
}

/// One client's million wrong tokens neither reach the API server nor anybody else.
#[test]
fn a_million_wrong_tokens_of_a_client_cost_nothing() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let setup = Setup::with_user("token-a");
    let used = allocation_counter::measure(|| {
        runtime.block_on(async {
            for number in 0..1_000_000_u32 {
                let expected = if number < 64 { Reason::TokenRefused } else { Reason::TooManyTokens };
                assert_eq!(setup.ask_from(&format!("wrong-{number}"), &peer(1)).await, Err(expected));
            }
            assert_eq!(setup.ask_from("token-a", &peer(2)).await, Ok(()));
        });
    });
    assert_eq!(setup.reviews(), 65);
    assert!(used.bytes_max < 256 << 10, "{} bytes", used.bytes_max);
}

/// Wrong tokens from everywhere displace only each other.
#[test]
fn wrong_tokens_of_many_clients_are_bounded() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    // All at once, or no more than ten seconds' reviews would be there at a time.
    let settings = ReviewSettings {
        refused_for: Duration::from_hours(2),
        reviews_per_second: u32::MAX,
        accepted_for: Duration::from_hours(2),
        ..ReviewSettings::default()
    };
    let refused_max = settings.refused_max;
    let setup = Setup::new(settings);
    setup.add_user("token-a");
    let used = allocation_counter::measure(|| {
        runtime.block_on(async {
            assert_eq!(setup.ask("token-a").await, Ok(()));
            for number in 0..50_000_u32 {
                let peer = peer(1 + number / 50);
                assert_eq!(setup.ask_from(&format!("wrong-{number}"), &peer).await, Err(Reason::TokenRefused));
            }
            assert_eq!(setup.ask("token-a").await, Ok(()));
        });
    });
    let counts = setup.reviewer.counts();
    assert_eq!((counts.reviews, counts.refused_entries, counts.accepted_entries), (50_001, refused_max, 1));
    assert!(used.bytes_max < 16 << 20, "{} bytes", used.bytes_max);
}

#[tokio::test(start_paused = true)]
async fn good_answers_are_bounded() {
    let settings = ReviewSettings { accepted_max: 100, accepted_bytes_max: 30_000, ..ReviewSettings::default() };
    let setup = Setup::new(settings);
    let tokens: Vec<_> = (0..200).map(|number| format!("token-{number}")).collect();
    for token in &tokens {
        setup.add_user(token);
        assert_eq!(setup.ask(token).await, Ok(()));
    }
    let entries = setup.reviewer.counts().accepted_entries;
    assert!((50..=100).contains(&entries), "{entries} entries");
    assert_eq!((setup.ask(&tokens[199]).await, setup.reviews()), (Ok(()), 200));
    assert_eq!((setup.ask(&tokens[0]).await, setup.reviews()), (Ok(()), 201));
}

#[test]
fn a_token_is_not_shown_in_parts_or_encodings_either() {
    let signed = format!("header89.payload9.{}", "aB3-_xYz".repeat(6));
    let opaque = "opaque/t0ken\"with\\all+kinds=of%signs".to_owned();
    for token in [signed, opaque] {
        let hex: String = token.bytes().map(|byte| format!("{byte:02x}")).collect();
        let escaped = serde_json::to_string(&token).unwrap();
        let percent = [("%", "%25"), ("/", "%2F"), ("\"", "%22"), ("\\", "%5C"), ("+", "%2B"), ("=", "%3D")];
        let percent = percent.iter().fold(token.clone(), |text, (sign, code)| text.replace(sign, code));
        let header = format!("Bearer {token}");
        let secret = SecretText(token.clone().into());
        for (text, what) in [
            (token.clone(), "as it is"),
            (token[9..25].to_owned(), "a piece"),
            (token[token.len() - 13..].to_owned(), "the end"),
            (BASE64_STANDARD.encode(&token), "base64"),
            (URL_SAFE_NO_PAD.encode(&header), "base64 of the header"),
            (BASE64_STANDARD.encode(format!("  {header}")), "base64 of more"),
            (escaped, "JSON"),
            (percent, "percent"),
            (hex, "hexadecimal"),
        ] {
            let clean = secret.hidden_from(&format!("refused: {text}: why"));
            assert!(clean.starts_with("refused: ") && clean.ends_with(": why"), "{what}: {clean}");
            let has_piece = |piece: &[u8]| clean.as_bytes().windows(piece.len()).any(|other| other == piece);
            assert!(!text.as_bytes().windows(16).any(has_piece), "{what}: {clean}");
        }
        assert_eq!(secret.hidden_from("expired"), "expired");
    }
    let secret = SecretText("header89.payload9.signature".into());
    for part in ["header89.payload9.signature", "payload9", "signature", "cGF5bG9hZDk="] {
        let clean = secret.hidden_from(&format!("bad {part}, why"));
        assert!(clean.starts_with("bad ") && clean.ends_with(", why") && !clean.contains(part), "{clean}");
    }
    // Too short to be cut out of ordinary words.
    assert_eq!(SecretText("abc".into()).hidden_from("wrong: abc"), "");
}
