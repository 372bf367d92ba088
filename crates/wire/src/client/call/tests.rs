//! Tests of calls over both versions of HTTP.

use std::fs;

use cproxy_network::SocketSetup;
use http::StatusCode;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixListener,
};

use super::*;
use crate::{
    client::test_server::{at, directory},
    credentials::configuration::configure,
};

/// Response of a server of HTTP/2 that echoes the request's body this many times, with this status.
async fn echo(code: u16, times: usize) -> (Result<Response<Bytes>, BoxError>, Arc<ApiClient>) {
    let dir = directory(&format!("echo-{code}-{times}"));
    let path = dir.join("socket");
    let socket = UnixListener::bind(&path).unwrap();
    drop(tokio::spawn(async move {
        let mut connection = h2::server::handshake(socket.accept().await.unwrap().0).await.unwrap();
        while let Some(Ok((request, mut respond))) = connection.accept().await {
            assert!(request.method() == "POST" && request.headers()[CONTENT_LENGTH] == "4");
            let mut body = request.into_body();
            drop(tokio::spawn(async move {
                let content = body.data().await.unwrap().unwrap().repeat(times);
                let response = Response::builder().status(code).body(()).unwrap();
                respond.send_response(response, false).unwrap().send_data(content.into(), true).unwrap();
            }));
        }
    }));
    let options = at(&path);
    let configuration = configure(&options).await.unwrap();
    let client = Arc::new(ApiClient::new(options, configuration, SocketSetup::none()));
    let response = client.call(review()).await;
    fs::remove_dir_all(dir).unwrap();
    (response, client)
}

fn review() -> Request<Bytes> {
    Request::post("/review").body(Bytes::from_static(b"body")).unwrap()
}

#[tokio::test]
async fn a_call_has_a_body_and_a_response_of_bounded_length() {
    let response = echo(201, 1000).await.0.unwrap();
    assert_eq!((response.status().as_u16(), response.body().len()), (201, 4000));
    let error = echo(200, CALL_BYTES_MAX / 4 + 1).await.0.unwrap_err();
    assert!(error.to_string().contains("longer than"), "{error}");
    assert_eq!(echo(200, CALL_BYTES_MAX / 4).await.0.unwrap().body().len(), CALL_BYTES_MAX);
}

#[tokio::test]
async fn a_call_whose_credentials_are_not_accepted_retires_the_connection() {
    let (response, client) = echo(401, 1).await;
    assert_eq!(response.unwrap().status(), StatusCode::UNAUTHORIZED);
    assert!(client.session.lock().await.current().is_none());
    assert!(echo(403, 1).await.1.session.lock().await.current().is_some());
}

#[tokio::test]
async fn a_call_works_over_an_older_http_too() {
    let dir = directory("old");
    let path = dir.join("socket");
    let socket = UnixListener::bind(&path).unwrap();
    let served = tokio::spawn(async move {
        // The first connection asks for HTTP/2.
        drop(socket.accept().await.unwrap());
        let (mut stream, _) = socket.accept().await.unwrap();
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\nbody") {
            request.push(stream.read_u8().await.unwrap());
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
        String::from_utf8(request).unwrap()
    });
    let options = at(&path);
    let configuration = configure(&options).await.unwrap();
    let client = ApiClient::new(options, configuration, SocketSetup::none());
    assert_eq!(client.call(review()).await.unwrap().body(), "ok");
    let request = served.await.unwrap();
    assert!(request.starts_with("POST /review HTTP/1.1\r\n") && request.contains("content-length: 4"), "{request}");
    fs::remove_dir_all(dir).unwrap();
}
