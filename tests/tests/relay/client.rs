//! An HTTP client, which is curl, so that server and client share no code.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use cproxy_tests::{
    process::{Daemon, run},
    sandbox::{Placement, Sandbox},
};
use serde_json::Value;

/// Limit on a request, longer than any watch of these tests.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Number of responses so far, for unique file names.
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// Version of HTTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    Http1,
    Http2,
}

/// Client of one server.
#[derive(Clone, Debug)]
pub(crate) struct Client<'s> {
    sandbox: &'s Sandbox,
    url: String,
    args: Vec<String>,
    version: Version,
}

/// Response whose body is complete.
#[derive(Clone, Debug)]
pub(crate) struct Response {
    pub(crate) code: u16,
    /// Names in lower case.
    headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl<'s> Client<'s> {
    /// A client of the server at a URL without a path.
    pub(crate) fn new(sandbox: &'s Sandbox, url: impl Into<String>) -> Self {
        Self { sandbox, url: url.into(), args: Vec::new(), version: Version::Http1 }
    }

    /// Adds arguments of curl.
    pub(crate) fn args<S: Into<String>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    pub(crate) fn ca_file(self, path: &Path) -> Self {
        self.args(["--cacert".to_owned(), path.display().to_string()])
    }

    pub(crate) fn token(self, token: &str) -> Self {
        self.header(&format!("Authorization: Bearer {token}"))
    }

    pub(crate) fn header(self, line: &str) -> Self {
        self.args(["--header", line])
    }

    pub(crate) fn accept(self, media_types: &str) -> Self {
        self.header(&format!("Accept: {media_types}"))
    }

    pub(crate) fn version(self, version: Version) -> Self {
        Self { version, ..self }
    }

    /// Gets a path and query.
    pub(crate) fn get(&self, target: &str) -> Response {
        self.send(&[], target)
    }

    /// Gets a document in JSON.
    ///
    /// # Panics
    /// When the status code is not 200.
    pub(crate) fn json(&self, target: &str) -> Value {
        let response = self.get(target);
        assert_eq!(response.code, 200, "{target}: {}", response.text());
        response.json()
    }

    /// Sends an object by a method. The answer must be a success.
    pub(crate) fn write(&self, method: &str, path: &str, object: &Value) -> Value {
        let content_type = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
        let header = format!("Content-Type: {content_type}");
        let body = object.to_string();
        let response = self.exchange(&["--request", method, "--header", &header, "--data-binary", "@-"], path, &body);
        assert!((200..300).contains(&response.code), "{method} {path}: {}", response.text());
        response.json()
    }

    /// Sends a request with further arguments of curl.
    pub(crate) fn send(&self, args: &[&str], target: &str) -> Response {
        self.exchange(args, target, "")
    }

    fn exchange(&self, args: &[&str], target: &str, stdin: &str) -> Response {
        let (head, body) = self.files();
        let mut command = self.command(&head, &body, target);
        command.args(args);
        let output = run(self.sandbox, Placement::Unhooked, command, stdin, TIMEOUT);
        assert_eq!(output.code, 0, "{target}: {}", output.stderr);
        let response = Response::read(&head, &body);
        drop((fs::remove_file(head), fs::remove_file(body)));
        response
    }

    /// Gets a path and query; `None` without a complete response.
    pub(crate) fn try_get(&self, target: &str) -> Option<Response> {
        let (head, body) = self.files();
        let command = self.command(&head, &body, target);
        let output = run(self.sandbox, Placement::Unhooked, command, "", TIMEOUT);
        let response = (output.code == 0).then(|| Response::read(&head, &body));
        drop((fs::remove_file(head), fs::remove_file(body)));
        response
    }

    /// Whether a request gets no response at all.
    pub(crate) fn is_refused(&self, target: &str) -> bool {
        self.try_get(target).is_none()
    }

    /// Starts a watch, which ends when it is dropped or the server ends it.
    pub(crate) fn watch(&self, target: &str) -> Watching {
        let (head, body) = self.files();
        let command = self.command(&head, &body, target);
        let daemon = Daemon::spawn(self.sandbox, "curl", Placement::Unhooked, command);
        Watching { daemon, head, body }
    }

    fn files(&self) -> (PathBuf, PathBuf) {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let file = |what: &str| self.sandbox.dir().join(format!("response-{number}.{what}"));
        (file("head"), file("body"))
    }

    fn command(&self, head: &Path, body: &Path, target: &str) -> Command {
        let mut command = Command::new("curl");
        command.args(["--silent", "--show-error", "--no-buffer", "--path-as-is", "--globoff", "--noproxy", "*"]);
        command.arg("--dump-header").arg(head).arg("--output").arg(body);
        command.arg(match self.version {
            Version::Http1 => "--http1.1",
            Version::Http2 if self.url.starts_with("https:") => "--http2",
            Version::Http2 => "--http2-prior-knowledge",
        });
        command.args(&self.args).arg(format!("{}{target}", self.url));
        command
    }
}

/// A watch under way.
#[derive(Debug)]
pub(crate) struct Watching {
    daemon: Daemon,
    head: PathBuf,
    body: PathBuf,
}

impl Watching {
    /// Waits until curl has ended.
    pub(crate) fn wait(&mut self, timeout: Duration) -> ExitStatus {
        self.daemon.wait(timeout).expect("the watch ends")
    }

    /// Whether curl has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.daemon.exit_status().is_some()
    }

    /// The response so far.
    pub(crate) fn response(&self) -> Option<Response> {
        self.head.exists().then(|| Response::read(&self.head, &self.body)).filter(|response| response.code > 0)
    }

    /// Types and names of the objects of the events so far, without bookmarks.
    pub(crate) fn changes(&self) -> Vec<String> {
        let events = self.events();
        let events = events.iter().filter(|event| event["type"] != "BOOKMARK");
        let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
        events.map(|event| format!("{} {}", text(&event["type"]), text(&event["object"]["metadata"]["name"]))).collect()
    }

    /// The events so far.
    pub(crate) fn events(&self) -> Vec<Value> {
        self.events_after(0).0
    }

    /// The events after the first bytes, and the number of bytes at their end: the last line may be incomplete.
    pub(crate) fn events_after(&self, start: usize) -> (Vec<Value>, usize) {
        let body = fs::read(&self.body).unwrap_or_default();
        let end = body.iter().rposition(|byte| *byte == b'\n').map_or(start, |index| index + 1);
        let text = String::from_utf8_lossy(&body[start..end]);
        (text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect(), end)
    }
}

impl Response {
    fn read(head: &Path, body: &Path) -> Self {
        let head = fs::read(head).unwrap_or_default();
        let head = String::from_utf8_lossy(&head).replace('\r', "");
        // With a proxy, or after 100, there are several heads.
        let last = head.trim_end().rsplit("\n\n").next().unwrap_or_default();
        let code = last.split(' ').nth(1).and_then(|code| code.trim().parse().ok()).unwrap_or_default();
        let pair =
            |line: &str| line.split_once(':').map(|(name, value)| (name.to_lowercase(), value.trim().to_owned()));
        let headers = last.lines().skip(1).filter_map(pair).collect();
        Self { code, headers, body: fs::read(body).unwrap_or_default() }
    }

    /// Value of a header; empty without it.
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.iter().find(|(other, _)| other == name).map_or("", |(_, value)| value)
    }

    pub(crate) fn text(&self) -> String {
        format!("{} {}", self.code, String::from_utf8_lossy(&self.body))
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }
}
