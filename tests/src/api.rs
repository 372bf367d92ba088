//! An API server whose answers a test defines, and one that only refuses.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use cproxy_testing::responses::{list, status};
use rustls::{
    ServerConfig, ServerConnection,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use serde_json::{Value, json};

use crate::{
    echo, http, manifest,
    sandbox::Sandbox,
    server::{Server, Signals},
};

/// Version of a list of a healthy server.
pub const LIST_VERSION: &str = "7";

/// Message of each error.
const MESSAGE: &str = "so the test wants it";

/// Limit on the wait for a client.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(2);

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

    /// Answer of a server with these objects in JSON: those of the requested kind, or a watch without changes.
    pub fn well(target: &str, objects: &[Value]) -> Self {
        if is_watch(target) {
            return Self::chunks([]).open();
        }
        let items: Vec<_> = objects.iter().filter(|object| object["kind"] == kind(target)).cloned().collect();
        Self::text(list(LIST_VERSION, &items))
    }

    /// An error with this `Status`.
    pub fn status(code: u16, status: &Value) -> Self {
        Self { code, ..Self::text(status.to_string()) }
    }

    /// An error with a `Status` as the API server sends it.
    pub fn error(code: u16) -> Self {
        Self::status(code, &status(code, MESSAGE))
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

    /// Its address, as `--apiserver` takes it.
    pub fn url(&self) -> String {
        format!("http://{}", self.server.address())
    }

    /// A kubeconfig for this server.
    pub fn kubeconfig(&self, sandbox: &Sandbox) -> PathBuf {
        self.kubeconfig_of(sandbox, json!({}))
    }

    /// A kubeconfig for this server with these fields of the user.
    pub fn kubeconfig_of(&self, sandbox: &Sandbox, user: Value) -> PathBuf {
        let config = manifest::kubeconfig(json!({"server": self.url()}), user);
        manifest::write_text(sandbox.dir(), "api.kubeconfig", &config.to_string())
    }
}

/// Whether the request is for a watch.
pub fn is_watch(target: &str) -> bool {
    target.contains("watch=true")
}

/// Kind of the objects that the request is for.
pub fn kind(target: &str) -> &'static str {
    let is_for = |plural: &str| target.split(['/', '?']).any(|part| part == plural);
    match target {
        _ if is_for("services") => "Service",
        _ if is_for("endpointslices") => "EndpointSlice",
        _ => "Node",
    }
}

/// Objects as a server has them: with a version, which is older than [`LIST_VERSION`].
pub fn stored(mut objects: [Value; 2]) -> [Value; 2] {
    for object in &mut objects {
        if let Some(metadata) = object.pointer_mut("/metadata").and_then(Value::as_object_mut) {
            metadata.insert("resourceVersion".to_owned(), "5".into());
        }
    }
    objects
}

/// Answers every request over TLS with an error and this header, a whole line or nothing. The files of the certificate
/// and its key are read for each client.
///
/// # Panics
/// When it cannot listen.
pub fn refuse_over_tls(
    sandbox: &Sandbox,
    address: SocketAddr,
    (code, header): (u16, &str),
    files: [PathBuf; 2],
) -> Server {
    let body = status(code, MESSAGE).to_string();
    let response = format!(
        "HTTP/1.1 {code} as it likes\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
         Connection: close\r\n{header}\r\n{body}",
        body.len()
    );
    echo::listen(sandbox, address, move |mut stream, _, _| {
        stream.set_read_timeout(Some(CLIENT_TIMEOUT))?;
        let config = tls_config(&files).map_err(io::Error::other)?;
        let mut connection = ServerConnection::new(Arc::new(config)).map_err(io::Error::other)?;
        let mut tls = rustls::Stream::new(&mut connection, &mut stream);
        let (mut head, mut byte) = (Vec::new(), [0]);
        while !head.ends_with(b"\r\n\r\n") {
            tls.read_exact(&mut byte)?;
            head.extend(byte);
        }
        tls.write_all(response.as_bytes())?;
        tls.conn.send_close_notify();
        tls.flush()
    })
}

fn tls_config([certificate, key]: &[PathBuf; 2]) -> Result<ServerConfig, Box<dyn std::error::Error + Send + Sync>> {
    let chain = |path: &Path| CertificateDer::pem_file_iter(path)?.collect::<Result<Vec<_>, _>>();
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let config = config.with_safe_default_protocol_versions()?.with_no_client_auth();
    Ok(config.with_single_cert(chain(certificate)?, PrivateKeyDer::from_pem_file(key)?)?)
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
