//! Resources that are watched.

use cproxy_core::api::Object;

/// Resource that is listed and watched.
pub trait WatchedResource: Object + Send + 'static {}

impl<K: Object + Send + 'static> WatchedResource for K {}
