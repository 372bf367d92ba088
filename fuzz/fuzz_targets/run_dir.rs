//! The agent's socket, both ways. The first byte of an input selects the direction: a client that sends the rest to the
//! agent, in pieces of a size that the byte gives, or an agent that answers a command with it.

#![no_main]

use std::{io::Write, net::Shutdown, os::unix::net::UnixStream, time::Duration};

use cproxy::{
    config::SettingRow,
    controls::Controls,
    mailbox::{Command, Mailbox, Message, Query},
    report::{
        AgentReport, CanaryReport, FrontendRow, HealthReport, Layout, Names, SourceReport, counters_text, read_answer,
        table_text,
    },
    run_dir::{exchange, respond},
    target::Target,
};
use cproxy_core::{KernelSet, printable};
use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value, from_slice};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    runtime::{Builder, Runtime},
    sync::mpsc,
};

/// Response of the simulated owner of the table.
const FRONTENDS: &[u8] = b"[]";

thread_local! {
    static RUNTIME: Runtime = Builder::new_current_thread().enable_all().build().unwrap();
}

fuzz_target!(|input: &[u8]| {
    let Some((&first, rest)) = input.split_first() else { return };
    match first {
        b'?' => check_answer(rest),
        size => RUNTIME.with(|runtime| runtime.block_on(check_request(rest, usize::from(size).max(1)))),
    }
});

/// Whatever a client sends, it gets the response to a request that it made, or an error that names the requests.
async fn check_request(bytes: &[u8], piece: usize) {
    let (client, server) = tokio::net::UnixStream::pair().unwrap();
    let (mailbox, owner) = Mailbox::new();
    let controls = Controls::of_nothing();
    let answered = respond(server, mailbox, &controls);
    let (_, (), response) = tokio::join!(answered, own_table(owner), ask(client, bytes, piece));
    // A request ends with its line. Of a longer line, the agent reads as much as no request has.
    let line = bytes.split_inclusive(|&byte| byte == b'\n').next().unwrap_or_default();
    match line {
        b"services\n" => assert_eq!(response, FRONTENDS),
        b"gauges\n" => assert_eq!(from_slice::<Map<String, Value>>(&response).unwrap()["frontends"], 7),
        b"source\n" => assert_eq!(read_answer(&response, SourceReport::read).unwrap(), source()),
        b"health\n" => assert_eq!(read_answer(&response, HealthReport::read).unwrap(), health()),
        b"problems\n" => assert_eq!(response, b"[]"),
        b"reseed\n" => assert_eq!(response, b"ok\n"),
        b"config\n" => assert_eq!(response, b"[]"),
        b"log\n" => assert_eq!(response, b""),
        line if line.starts_with(b"log-level ") => {
            assert!(response == b"ok\n" || response.starts_with(b"error: the levels are ") || response.is_empty());
        }
        line if line.starts_with(b"explain ") => match std::str::from_utf8(&line[b"explain ".len()..]) {
            Ok(target) if target.parse::<Target>().is_ok() => {
                assert_eq!(read_answer(&response, AgentReport::read).unwrap(), report());
            }
            _ => assert!(response.is_empty() || response.starts_with(b"error: "), "{response:?}"),
        },
        _ => assert!(response.is_empty() || response.starts_with(b"error: the requests are: "), "{response:?}"),
    }
}

async fn ask(mut client: tokio::net::UnixStream, bytes: &[u8], piece: usize) -> Vec<u8> {
    for piece in bytes.chunks(piece) {
        // The agent does not wait for the end of a request that is too long.
        if client.write_all(piece).await.is_err() {
            break;
        }
        tokio::task::yield_now().await;
    }
    client.shutdown().await.ok();
    let mut response = Vec::new();
    client.read_to_end(&mut response).await.ok();
    response
}

async fn own_table(mut messages: mpsc::Receiver<Message>) {
    while let Some(message) = messages.recv().await {
        match message {
            Message::Query(Query::Services(sender)) => drop(sender.send(FRONTENDS.to_vec())),
            Message::Query(Query::Gauges(sender)) => drop(sender.send(vec![("frontends", 7)])),
            Message::Query(Query::Source(sender)) => drop(sender.send(source())),
            Message::Query(Query::Health(sender)) => drop(sender.send(health())),
            Message::Query(Query::Problems(sender)) => drop(sender.send(Vec::new())),
            Message::Query(Query::Explain(_, sender)) => drop(sender.send(report())),
            Message::Command(Command::Reseed { sender, .. }) => drop(sender.send(Ok(()))),
            other => panic!("a client has sent {other:?}"),
        }
    }
}

fn source() -> SourceReport {
    SourceReport::Manifests(vec!["/etc/cproxy".to_owned()])
}

fn health() -> HealthReport {
    HealthReport { differences: Vec::new(), canary: CanaryReport::Reached, repairs: 1, ended_tasks: Vec::new() }
}

fn report() -> AgentReport {
    let (services, unserved, node_name, synced_seconds) = Default::default();
    AgentReport { services, unserved, source: source(), unread: Vec::new(), node_name, has_node: false, synced_seconds }
}

/// Whatever an agent answers, commands print lines of text that steer no terminal.
fn check_answer(bytes: &[u8]) {
    fn list<T>(rows: &Value, read: impl Fn(&Value) -> Option<T>) -> Option<Vec<T>> {
        rows.as_array()?.iter().map(read).collect()
    }
    let (mut agent, command) = UnixStream::pair().unwrap();
    agent.write_all(bytes).unwrap();
    agent.shutdown(Shutdown::Write).unwrap();
    let response = exchange(command, "services\n", Duration::from_secs(1)).unwrap();
    assert_eq!(response, bytes);
    if let Ok(rows) = read_answer(&response, |rows| list(rows, FrontendRow::read)) {
        let frontends: Vec<_> = rows.iter().filter_map(FrontendRow::frontend).collect();
        let names: Names = rows.into_iter().collect();
        let named = |&frontend| FrontendRow::named(frontend, &KernelSet::default(), &names);
        let rows: Vec<_> = frontends.iter().map(named).collect();
        check_lines(&table_text(&rows, Layout::Plain), frontends.len() + 1);
    }
    if let Ok(gauges) = from_slice::<std::collections::BTreeMap<String, u64>>(&response) {
        check_lines(&counters_text(&gauges.clone().into_iter().collect::<Vec<_>>(), None), gauges.len() + 1);
    }
    if let Ok(rows) = read_answer(&response, |rows| list(rows, SettingRow::read)) {
        check_lines(&table_text(&rows, Layout::Wide), rows.len() + 1);
    }
    if let Ok(source) = read_answer(&response, SourceReport::read) {
        check_lines(&format!("{source}\n"), 1);
    }
}

fn check_lines(text: &str, count: usize) {
    assert_eq!(text.matches('\n').count(), count, "{text:?}");
    assert!(text.lines().all(|line| line == printable(line)), "{text:?}");
}
