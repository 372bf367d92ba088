//! From a connection and a request to an identity.

use std::sync::Arc;

use crate::{Identity, Peer, PeerAddress, Reason, Refusal, ReviewTransport, TokenReviewer};

/// Identity of a request: that of the client certificate, of the bearer token, or of the place of a local peer, in this
/// order. `authorization` is the request's header.
///
/// # Errors
/// The client has no credentials where some are needed, or they are refused.
pub async fn identify<R: ReviewTransport>(
    peer: &Peer,
    authorization: Option<&[u8]>,
    reviewer: Option<&TokenReviewer<R>>,
) -> Result<Arc<Identity>, Refusal> {
    if let Some(Ok(identity)) = peer.certificate() {
        return Ok(identity.clone());
    }
    if let (Some(authorization), Some(reviewer)) = (authorization, reviewer) {
        return reviewer.authenticate(bearer(authorization)?, peer.address()).await;
    }
    if let Some(identity) = Identity::of_local_peer(peer.address()) {
        return Ok(Arc::new(identity));
    }
    if let Some(Err(refusal)) = peer.certificate() {
        return Err(refusal.clone());
    }
    Err(no_credentials(peer.address(), authorization.is_some(), reviewer.is_some()))
}

/// The token of a header `Authorization: Bearer TOKEN`.
fn bearer(authorization: &[u8]) -> Result<&str, Refusal> {
    let token = std::str::from_utf8(authorization).ok().and_then(|text| {
        let (scheme, token) = text.trim_matches(' ').split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| token.trim_start_matches(' '))
    });
    token.ok_or_else(|| {
        Refusal::new(Reason::MalformedToken, "the header Authorization has no bearer token; send `Bearer TOKEN`")
    })
}

fn no_credentials(peer: &PeerAddress, has_token: bool, reviews_tokens: bool) -> Refusal {
    let message = match (has_token, reviews_tokens) {
        (true, _) => format!("the relay takes no tokens; {peer} needs a client certificate"),
        (false, true) => format!("{peer} shows no credentials; send a ServiceAccount's token or a client certificate"),
        (false, false) => format!("{peer} shows no credentials; it needs a client certificate"),
    };
    Refusal::new(Reason::NoCredentials, message)
}
