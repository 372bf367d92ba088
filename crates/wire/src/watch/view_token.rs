//! Token of a view, the part of the objects that a relay shows to a client.

use std::{fmt, sync::Arc};

use cproxy_core::{printable, shortened};
use http::HeaderMap;

/// Header of a list or watch with the view that it shows.
const VIEW: &str = "cproxy-view";

/// Opaque token by which a server that does not show everything names the view of a list or watch; an API server never
/// does. A version of one view means nothing in another: an object may have appeared without a change.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ViewToken(Option<Arc<str>>);

impl ViewToken {
    /// The view that the headers name.
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        Self(headers.get(VIEW).map(|token| String::from_utf8_lossy(token.as_bytes()).into()))
    }

    /// The view with this token.
    #[cfg(test)]
    pub(crate) fn named(token: &str) -> Self {
        Self(Some(token.into()))
    }

    /// Its token; `None` if it shows everything.
    pub(crate) fn token(&self) -> Option<&str> {
        self.0.as_deref()
    }
}

impl fmt::Display for ViewToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&shortened(printable(self.token().unwrap_or("all"))))
    }
}
