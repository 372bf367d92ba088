//! Bound on the rate at which a client's bytes are read. Frames that are no requests (SETTINGS, PING, PRIORITY and so
//! on) cost CPU time, too, and HTTP libraries do not count them.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep_until},
};

/// Bytes that are read at once at most: the heads of a burst of requests.
const BURST_BYTES: u64 = 1 << 20;
/// Bytes that are read in a second after that: a hundred times what an agent sends.
const BYTES_PER_S: u64 = 64 << 10;

/// Stream whose reads wait while too much has been read.
pub(crate) struct Throttled<S> {
    stream: S,
    /// Time at which all bytes so far would have come at the permitted rate.
    due: Instant,
    /// Wait for the time at which reads go on; most clients never have one.
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<S> Throttled<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, due: Instant::now(), waiting: None }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Throttled<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(waiting) = &mut self.waiting {
            ready!(waiting.as_mut().poll(context));
            self.waiting = None;
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let bytes = (buffer.filled().len() - before) as u64;
        let now = Instant::now();
        self.due = self.due.max(now) + Duration::from_secs(bytes) / BYTES_PER_S as u32;
        let burst = Duration::from_secs(BURST_BYTES) / BYTES_PER_S as u32;
        if self.due > now + burst {
            self.waiting = Some(Box::pin(sleep_until(self.due - burst)));
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Throttled<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, repeat};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_burst_is_read_at_once_and_the_rest_at_a_rate() {
        let mut stream = Throttled::new(tokio::io::join(repeat(0), tokio::io::sink()));
        let start = Instant::now();
        stream.read_exact(&mut vec![0; BURST_BYTES as usize]).await.unwrap();
        assert_eq!(start.elapsed(), Duration::ZERO);
        let mut rest = vec![0; 10 * BYTES_PER_S as usize];
        for piece in rest.chunks_mut(1 << 10) {
            stream.read_exact(piece).await.unwrap();
        }
        let seconds = start.elapsed().as_secs_f64();
        assert!((9.9..10.1).contains(&seconds), "{seconds}");
        // A pause lets the next burst through.
        tokio::time::sleep(Duration::from_secs(60)).await;
        let start = Instant::now();
        stream.read_exact(&mut vec![0; BURST_BYTES as usize]).await.unwrap();
        assert_eq!(start.elapsed(), Duration::ZERO);
    }
}
