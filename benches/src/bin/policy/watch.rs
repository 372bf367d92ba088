//! A watch of the relay's slices, for the time at which each event comes.

use std::{
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    path::Path,
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};

/// Path of the slices at the relay.
const SLICES: &str = "/apis/policy.cproxy.dev/v1alpha1/addressslices";

/// Opens a watch, which begins with all present slices.
pub(crate) fn open(socket: &Path) -> Result<UnixStream> {
    let mut stream = UnixStream::connect(socket).with_context(|| format!("connecting to {}", socket.display()))?;
    write!(stream, "GET {SLICES}?watch=true HTTP/1.1\r\nHost: relay\r\nAccept: application/json\r\n\r\n")
        .context("asking the relay")?;
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).context("reading the relay's answer")?;
        head.extend(byte);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    ensure!(head.starts_with("HTTP/1.1 200 "), "the relay does not serve a watch: {head}");
    Ok(stream)
}

/// Waits for the next part, and returns its time; `None` at the end.
pub(crate) fn next(stream: &mut UnixStream) -> Option<Instant> {
    let mut buffer = vec![0; 1 << 16];
    let length = stream.read(&mut buffer).ok()?;
    (length > 0).then(Instant::now)
}
