//! An API server whose answers a test defines.

use std::{
    io::{self, Write},
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use serde_json::json;

use crate::{
    echo, http, manifest,
    sandbox::Sandbox,
    server::{Server, Signals},
};

/// The answer to one request.
pub struct Reply {
    code: u16,
    content_type: &'static str,
    chunks: Box<dyn Iterator<Item = Vec<u8>> + Send>,
    end: End,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// The answer is complete.
    Whole,
    /// The connection is closed before the answer is complete.
    Cut,
    /// The answer stays open, as that of a watch without changes.
    Open,
}

impl Reply {
    /// 200 and these chunks; the answer is then complete.
    pub fn chunks(chunks: impl IntoIterator<Item = Vec<u8>, IntoIter: Send + 'static>) -> Self {
        Self { code: 200, content_type: "application/json", chunks: Box::new(chunks.into_iter()), end: End::Whole }
    }

    /// 200 and this text; the answer is then complete.
    pub fn text(text: impl Into<String>) -> Self {
        Self::chunks([text.into().into_bytes()])
    }

    /// An error with a `Status` as the API server sends it.
    pub fn error(code: u16) -> Self {
        let status = json!({"kind": "Status", "status": "Failure", "message": "so the test wants it", "code": code});
        Self { code, ..Self::text(status.to_string()) }
    }

    /// The same answer with another status code.
    pub fn code(self, code: u16) -> Self {
        Self { code, ..self }
    }

    /// The same answer in another encoding than JSON.
    pub fn content_type(self, content_type: &'static str) -> Self {
        Self { content_type, ..self }
    }

    /// The same answer, which stays open.
    pub fn open(self) -> Self {
        Self { end: End::Open, ..self }
    }

    /// The same answer, cut off in the middle.
    pub fn cut(self) -> Self {
        Self { end: End::Cut, ..self }
    }
}

/// A running server. It ends when this value is dropped; the agent should have ended before.
pub struct Api {
    server: Server,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Api {
    /// Starts a server in `sandbox` over plain HTTP. `answer` maps a request's path and query to its reply.
    ///
    /// # Panics
    /// When it cannot listen.
    pub fn serve(sandbox: &Sandbox, mut answer: impl FnMut(&str) -> Reply + Send + 'static) -> Self {
        let asked = Arc::<Mutex<Vec<String>>>::default();
        let ours = asked.clone();
        let answer = Mutex::new(move |target: &str| {
            ours.lock().unwrap_or_else(PoisonError::into_inner).push(target.to_owned());
            answer(target)
        });
        let server = echo::listen(sandbox, SocketAddr::from(([127, 0, 0, 1], 0)), move |stream, _, signals| {
            let Some(head) = http::read_head(stream, signals)? else { return Ok(()) };
            let head = String::from_utf8_lossy(&head);
            let target = head.split(' ').nth(1).unwrap_or_default();
            let reply = answer.lock().unwrap_or_else(PoisonError::into_inner)(target);
            reply_to(stream, reply, signals)
        });
        Self { server, asked }
    }

    /// The paths and queries of the requests so far, in order.
    pub fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A kubeconfig for this server.
    pub fn kubeconfig(&self, sandbox: &Sandbox) -> PathBuf {
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": format!("http://{}", self.server.address())}}],
            "users": [{"name": "test", "user": {}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        });
        manifest::write_text(sandbox.dir(), "api.kubeconfig", &config.to_string())
    }
}

fn reply_to(mut stream: &TcpStream, reply: Reply, signals: &Signals) -> io::Result<()> {
    let Reply { code, content_type, .. } = reply;
    write!(stream, "HTTP/1.1 {code} as it likes\r\nContent-Type: {content_type}\r\n")?;
    write!(stream, "Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n")?;
    // An empty chunk would mark the end.
    for chunk in reply.chunks.filter(|chunk| !chunk.is_empty()) {
        write!(stream, "{:x}\r\n", chunk.len())?;
        stream.write_all(&chunk)?;
        stream.write_all(b"\r\n")?;
    }
    match reply.end {
        End::Whole => stream.write_all(b"0\r\n\r\n")?,
        End::Cut => {}
        End::Open => drop(signals.wait_for(&stream)),
    }
    Ok(())
}
