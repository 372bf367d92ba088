//! A minimal HTTP/1.1 server that returns its name.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream, ToSocketAddrs},
    time::Duration,
};

use crate::{
    echo,
    sandbox::Sandbox,
    server::{Server, Signals},
};

/// Limit on the length of a request.
const LONGEST_HEAD: usize = 16 * 1024;

/// Answers every GET to `address` with `name` and a line feed, one request per connection.
///
/// # Panics
/// When `address` cannot be listened on; add it to the sandbox first.
pub fn serve(sandbox: &Sandbox, address: impl ToSocketAddrs, name: &str) -> Server {
    let name = name.to_owned();
    echo::listen(sandbox, address, move |stream, _, signals| respond(stream, &name, signals))
}

/// Gets `path` from the server at `address`, from the calling thread's namespace; returns the body.
pub fn get(address: impl ToSocketAddrs, path: &str) -> io::Result<String> {
    let address = echo::one_address(address)?;
    ask(TcpStream::connect(address)?, address, path)
}

/// Like [`get`], with a limit on the connection and on each part of the answer.
pub fn get_within(address: SocketAddr, path: &str, timeout: Duration) -> io::Result<String> {
    let stream = TcpStream::connect_timeout(&address, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    ask(stream, address, path)
}

fn ask(mut stream: TcpStream, address: SocketAddr, path: &str) -> io::Result<String> {
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or(io::ErrorKind::UnexpectedEof)?;
    if head.starts_with("HTTP/1.1 200 ") { Ok(body.to_owned()) } else { Err(io::Error::other(head.to_owned())) }
}

fn respond(mut stream: &TcpStream, name: &str, signals: &Signals) -> io::Result<()> {
    let Some(head) = read_head(stream, signals)? else { return Ok(()) };
    let (status, body) = if head.starts_with(b"GET ") {
        ("200 OK", format!("{name}\n"))
    } else {
        ("405 Method Not Allowed", String::new())
    };
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\n");
    stream.write_all(format!("{head}Connection: close\r\n\r\n{body}").as_bytes())
}

/// Reads up to the empty line. None if the client closes, sends too much, or the server is to end.
pub(crate) fn read_head(mut stream: &TcpStream, signals: &Signals) -> io::Result<Option<Vec<u8>>> {
    let mut head = Vec::new();
    let mut buffer = [0; 4096];
    while head.len() < LONGEST_HEAD && signals.wait_for(&stream) {
        let length = stream.read(&mut buffer)?;
        if length == 0 {
            break;
        }
        head.extend_from_slice(buffer.get(..length).unwrap_or_default());
        if head.windows(4).any(|bytes| bytes == b"\r\n\r\n") {
            return Ok(Some(head));
        }
    }
    Ok(None)
}
