//! Tests of failover and of waits for a server.

use std::fs;

use http::Response;
use tokio::{
    net::{TcpListener, UnixListener},
    sync::mpsc::unbounded_channel,
};

use super::*;
use crate::{
    client::test_server::{Server, at, client_of, directory, serve},
    credentials::configuration::configure,
};

#[tokio::test]
async fn a_server_that_accepts_and_is_silent_is_passed_over() {
    let dir = directory("silent");
    let (client, _, _requests) = client_of(&dir, &[Server::Silent, Server::Silent, Server::Serving]).await;
    let sent = timeout(Duration::from_secs(20), client.send(Request::new(()))).await;
    assert!(matches!(sent, Ok(Ok(_))), "it stays with a silent server");
    fs::remove_dir_all(dir).unwrap();
}

/// Status of the response to a request, and whether its pause does not count.
async fn outcome(client: &ApiClient) -> (u16, bool) {
    let response = client.send(Request::new(())).await.unwrap().response;
    (response.status().as_u16(), response.extensions().get::<HasAlternative>().is_some())
}

#[tokio::test]
async fn a_server_that_is_busy_or_broken_is_left_for_the_next_one() {
    for code in [429, 503] {
        let dir = directory(&format!("busy-{code}"));
        let (client, _, _requests) = client_of(&dir, &[Server::Refusing(code), Server::Serving]).await;
        assert_eq!(outcome(&client).await, (code, true));
        assert_eq!(outcome(&client).await, (200, false));
        assert_eq!(*client.server(), *format!("unix://{}", dir.join("1").display()));
        assert_eq!(outcome(&client).await, (200, false), "the first one is on hold");
        fs::remove_dir_all(dir).unwrap();
    }
}

#[tokio::test]
async fn servers_that_are_all_busy_are_waited_for() {
    let dir = directory("all-busy");
    let (client, _, _requests) = client_of(&dir, &[Server::Refusing(429), Server::Refusing(429)]).await;
    let outcomes = [outcome(&client).await, outcome(&client).await, outcome(&client).await];
    assert_eq!(outcomes, [(429, true), (429, false), (429, false)]);
    assert_eq!(*client.server(), *format!("unix://{}", dir.join("1").display()), "it stays with the last one");
    fs::remove_dir_all(&dir).unwrap();
    let dir = directory("one-busy");
    let (client, _, _requests) = client_of(&dir, &[Server::Refusing(429)]).await;
    assert_eq!([outcome(&client).await, outcome(&client).await], [(429, false); 2]);
    assert!(client.session.lock().await.current().is_some(), "over the same connection");
    fs::remove_dir_all(dir).unwrap();
}

#[tokio::test]
async fn the_other_address_of_a_name_is_tried_before_another_server() {
    let first = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = first.local_addr().unwrap().port();
    let second = TcpListener::bind(("::1", port)).await.unwrap();
    for (listener, code) in [(first, 503), (second, 429)] {
        drop(tokio::spawn(async move {
            loop {
                let mut connection = h2::server::handshake(listener.accept().await.unwrap().0).await.unwrap();
                drop(tokio::spawn(async move {
                    while let Some(Ok((_, mut respond))) = connection.accept().await {
                        respond.send_response(Response::builder().status(code).body(()).unwrap(), true).unwrap();
                    }
                }));
            }
        }));
    }
    let dir = directory("addresses");
    let (_, mut options, _requests) = client_of(&dir, &[Server::Serving]).await;
    options.addresses.insert(0, format!("http://localhost:{port}").parse().unwrap());
    let configuration = configuration_of(&options).await;
    let client = ApiClient::new(options, configuration, SocketSetup::none());
    let outcomes = [outcome(&client).await, outcome(&client).await, outcome(&client).await];
    assert_eq!(outcomes, [(503, true), (429, true), (200, false)]);
    fs::remove_dir_all(dir).unwrap();
}

/// Configuration without credentials.
async fn configuration_of(options: &ApiServer) -> Configuration {
    let local = ApiServer { addresses: options.addresses.iter().skip(1).cloned().collect(), ..ApiServer::default() };
    Configuration { servers: options.addresses.clone(), ..configure(&local).await.unwrap() }
}

#[tokio::test]
async fn one_request_that_is_served_ends_the_waits_of_others_if_its_connection_lasts() {
    let dir = directory("served");
    for (server, lasts) in [(Server::Serving, true), (Server::Leaving, false)] {
        let path = dir.join(format!("{server:?}"));
        let (sender, _requests) = unbounded_channel();
        drop(tokio::spawn(serve(UnixListener::bind(&path).unwrap(), server, sender)));
        let options = at(&path);
        let configuration = configure(&options).await.unwrap();
        let client = ApiClient::new(options, configuration, SocketSetup::none());
        let mut served = std::pin::pin!(client.lasting_service());
        assert!(timeout(Duration::ZERO, served.as_mut()).await.is_err());
        client.send(Request::new(())).await.unwrap();
        assert_eq!(timeout(SERVED_TIME * 3, served.as_mut()).await.is_ok(), lasts, "{server:?}");
    }
    fs::remove_dir_all(&dir).unwrap();
}
