//! Time limit for one step of connecting.

use std::{io, time::Duration};

use tokio::time::timeout;

/// Limits the time of a step. Its error is better than that of an elapsed time, which names nothing.
pub(crate) async fn within<T>(limit: Duration, step: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let elapsed = |_| Err(io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {limit:?}")));
    timeout(limit, step).await.unwrap_or_else(elapsed)
}
