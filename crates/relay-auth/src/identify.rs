//! From a connection and a request to an identity.

use std::sync::Arc;

use crate::{Identity, Peer, PeerAddress, Reason, Refusal, ReviewTransport, TokenReviewer};

/// Identity of a request: that of the client certificate, of the bearer token, or of the address of a local peer, in
/// this order. `authorization` is the request's header.
///
/// # Errors
/// The client has no credentials where some are needed, or they are refused.
pub async fn identify<R: ReviewTransport>(
    peer: &Peer,
    authorization: Option<&[u8]>,
    reviewer: Option<&TokenReviewer<R>>,
) -> Result<Arc<Identity>, Refusal> {
    let certificate = peer.certificate();
    if let Some(Ok(identity)) = certificate {
        return Ok(identity);
    }
    if let (Some(authorization), Some(reviewer)) = (authorization, reviewer) {
        return reviewer.authenticate(bearer(authorization)?, peer.address()).await;
    }
    if let Some(identity) = Identity::of_local_peer(peer.address()) {
        return Ok(Arc::new(identity));
    }
    if let Some(Err(refusal)) = certificate {
        return Err(refusal);
    }
    Err(no_credentials(peer.address(), authorization.is_some(), reviewer.is_some()))
}

/// The token of a header `Authorization: Bearer TOKEN`.
pub(crate) fn bearer(authorization: &[u8]) -> Result<&str, Refusal> {
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

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, future::ready};

    use bytes::Bytes;

    use super::*;
    use crate::{ReviewSettings, Source, certificate};

    /// API server that knows one token.
    struct Server;

    impl ReviewTransport for Server {
        type Error = Infallible;

        fn review(&self, body: Bytes) -> impl Future<Output = Result<(u16, Bytes), Infallible>> + Send {
            let is_known = body.windows(8).any(|window| window == b"\"good-1\"");
            let answer = if is_known { r#"{"authenticated":true,"user":{"username":"alice"}}"# } else { "{}" };
            ready(Ok((201, format!(r#"{{"status":{answer}}}"#).into())))
        }
    }

    async fn source(peer: &Peer, authorization: Option<&str>, has_reviewer: bool) -> Result<Source, Reason> {
        let reviewer = TokenReviewer::new(Server, ReviewSettings::default());
        let authorization = authorization.map(str::as_bytes);
        let identity = identify(peer, authorization, has_reviewer.then_some(&reviewer)).await;
        identity.map(|identity| identity.source).map_err(|refusal| refusal.reason())
    }

    #[tokio::test(start_paused = true)]
    async fn the_best_credentials_count() {
        let tcp = PeerAddress::Tcp(([10, 0, 0, 1], 1).into());
        let [named, nameless] = [Some("a"), None].map(certificate::tests::of);
        let with_certificate = Peer::new(tcp.clone(), Some(&named));
        let without_name = Peer::new(tcp.clone(), Some(&nameless));
        let (tcp, local) = (Peer::new(tcp, None), Peer::new(PeerAddress::Vsock { cid: 3 }, None));
        let (good, bad) = (Some("Bearer good-1"), Some("Bearer wrong"));
        for (peer, authorization, has_reviewer, expected) in [
            (&with_certificate, None, true, Ok(Source::Certificate)),
            (&with_certificate, bad, true, Ok(Source::Certificate)),
            (&without_name, None, true, Err(Reason::Certificate)),
            (&without_name, good, true, Ok(Source::Token)),
            (&tcp, good, true, Ok(Source::Token)),
            (&tcp, Some("bearer  good-1 "), true, Ok(Source::Token)),
            (&tcp, bad, true, Err(Reason::TokenRefused)),
            (&tcp, Some("Basic good-1"), true, Err(Reason::MalformedToken)),
            (&tcp, Some("good-1"), true, Err(Reason::MalformedToken)),
            (&tcp, Some("Bearer "), true, Err(Reason::MalformedToken)),
            (&tcp, good, false, Err(Reason::NoCredentials)),
            (&tcp, None, true, Err(Reason::NoCredentials)),
            (&tcp, None, false, Err(Reason::NoCredentials)),
            (&local, None, true, Ok(Source::Local)),
            (&local, good, true, Ok(Source::Token)),
            (&local, bad, true, Err(Reason::TokenRefused)),
            // A relay without reviews takes any header of a guest for none.
            (&local, bad, false, Ok(Source::Local)),
        ] {
            let result = source(peer, authorization, has_reviewer).await;
            assert_eq!(result, expected, "{} {authorization:?} {has_reviewer}", peer.address());
        }
    }
}
