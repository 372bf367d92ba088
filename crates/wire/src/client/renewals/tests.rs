//! Tests of renewals while a server is away, silent or another one.

use std::{fs, sync::Arc};

use cproxy_network::SocketSetup;
use http::Request;
use tokio::{net::UnixListener, sync::mpsc::unbounded_channel};

use super::*;
use crate::{
    client::test_server::{PATIENCE, Server, at, client_of, directory, serve},
    credentials::configuration::configure,
    transport::link::Transport,
};

#[tokio::test]
async fn other_servers_are_used_at_once_whatever_the_present_one_does() {
    let dir = directory("moved");
    for server in [Server::Silent, Server::Mute, Server::Serving] {
        let [first, second] = ["first", "second"].map(|name| dir.join(format!("{server:?}-{name}")));
        let (sender, mut requests) = unbounded_channel();
        drop(tokio::spawn(serve(UnixListener::bind(&first).unwrap(), server, sender.clone())));
        let options = at(&first);
        let configuration = configure(&options).await.unwrap();
        let client = Arc::new(ApiClient::new(options, configuration, SocketSetup::none()));
        let sending = client.clone();
        let sent = tokio::spawn(async move { sending.send(Request::new(())).await.map(|_| ()) });
        requests.recv().await.unwrap();
        drop(tokio::spawn(serve(UnixListener::bind(&second).unwrap(), Server::Serving, sender)));
        let options = at(&second);
        let configuration = configure(&options).await.unwrap();
        let moved = timeout(Duration::from_secs(5), client.reconfigure(options.clone(), configuration.clone()));
        assert!(moved.await.is_ok(), "{server:?}");
        assert!(matches!(timeout(Duration::from_secs(5), sent).await, Ok(Ok(Ok(())))), "{server:?}");
        assert_eq!(*client.server(), *format!("unix://{}", second.display()));
        // The same again is a new connection, to which watches move.
        let mut received = client.send(Request::new(())).await.unwrap();
        client.reconfigure(options, configuration).await;
        assert!(timeout(Duration::from_secs(5), received.link.superseded()).await.is_ok(), "{server:?}");
    }
    fs::remove_dir_all(&dir).unwrap();
}

#[tokio::test]
async fn a_renewal_tries_until_there_is_a_new_connection_and_the_old_one_serves_meanwhile() {
    let dir = directory("renewed");
    let (client, _, _requests) = client_of(&dir, &[Server::Serving]).await;
    assert!(client.is_alive().await, "there is nothing to ask");
    let mut received = client.send(Request::new(())).await.unwrap();
    assert!(client.is_alive().await);
    let [path, away] = ["0", "away"].map(|name| dir.join(name));
    fs::rename(&path, &away).unwrap();
    let renewing = client.clone();
    let mut renewing = tokio::spawn(async move { renewing.renew(Duration::ZERO).await });
    // A second one ends at once and leaves it to the first.
    let other = async {
        while client.renewal.begin().is_some() {
            tokio::task::yield_now().await;
        }
        client.renew(Duration::ZERO).await;
    };
    timeout(PATIENCE, other).await.unwrap();
    client.send(Request::new(())).await.unwrap();
    assert!(timeout(Duration::from_millis(300), received.link.superseded()).await.is_err());
    assert!(!renewing.is_finished());
    let replaced = client.status.renewed();
    fs::rename(&away, &path).unwrap();
    timeout(PATIENCE, received.link.superseded()).await.unwrap();
    timeout(PATIENCE, &mut renewing).await.unwrap().unwrap();
    assert!(timeout(Duration::ZERO, replaced).await.is_ok(), "pauses end");

    let mut received = client.send(Request::new(())).await.unwrap();
    timeout(PATIENCE, client.renew(Duration::ZERO)).await.unwrap();
    timeout(PATIENCE, received.link.superseded()).await.unwrap();
    fs::remove_dir_all(&dir).unwrap();
}

#[tokio::test]
async fn a_renewal_begins_anew_when_an_attempt_hangs() {
    let dir = directory("hanging");
    let (client, _, mut connections) = client_of(&dir, &[Server::Silent]).await;
    let sending = client.clone();
    let sent = tokio::spawn(async move { sending.send(Request::new(())).await.map(|_| ()) });
    connections.recv().await.unwrap();
    // The server is another one now.
    fs::remove_file(dir.join("0")).unwrap();
    let (sender, _requests) = unbounded_channel();
    drop(tokio::spawn(serve(UnixListener::bind(dir.join("0")).unwrap(), Server::Serving, sender)));
    assert!(timeout(Duration::from_secs(5), client.renew(Duration::ZERO)).await.is_ok(), "it waits for the old server");
    assert!(matches!(timeout(Duration::from_secs(5), sent).await, Ok(Ok(Ok(())))));
    fs::remove_dir_all(&dir).unwrap();
}

#[tokio::test(start_paused = true)]
async fn options_that_were_replaced_many_times_are_connected_with_once() {
    let dir = directory("replaced");
    let (client, options, mut requests) = client_of(&dir, &[Server::Silent, Server::Silent]).await;
    let configuration = configure(&options).await.unwrap();
    let replaced: Vec<_> = (0..20)
        .map(|_| {
            let (client, options, configuration) = (client.clone(), options.clone(), configuration.clone());
            tokio::spawn(async move { client.reconfigure(options, configuration).await })
        })
        .collect();
    for task in replaced {
        timeout(PATIENCE, task).await.unwrap().unwrap();
    }
    let connections = std::iter::from_fn(|| requests.try_recv().ok()).count();
    // The first one is given up for the last options, which fail with both servers.
    assert!(connections <= 3, "{connections} connections");
    fs::remove_dir_all(dir).unwrap();
}
