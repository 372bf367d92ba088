//! A client that connects without end, to meet every gap.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use cproxy_tests::{Done, echo};

/// Pause between the connections of a client: a thousand a second are enough to meet any gap.
const PAUSE: Duration = Duration::from_millis(1);

/// Does `work` while a client connects to `vip` again and again, and keeps one connection all the time. No connection
/// may fail, and only `pod` may answer.
pub(crate) fn while_a_client_connects<R>(vip: &str, pod: &str, work: impl FnOnce() -> R) -> R {
    let vip: SocketAddr = vip.parse().unwrap();
    let (greeting, kept) = echo::connect_tcp(vip).unwrap();
    assert_eq!(greeting.name, pod);
    let (is_over, connected) = (AtomicBool::new(false), AtomicBool::new(false));
    let client = || {
        while !is_over.load(Ordering::Relaxed) || !connected.load(Ordering::Relaxed) {
            assert_eq!(echo::ask_tcp(vip).unwrap().name, pod);
            connected.store(true, Ordering::Relaxed);
            thread::sleep(PAUSE);
        }
    };
    let result = thread::scope(|scope| {
        let client = scope.spawn(client);
        // The client ends with the work, even if that panics.
        let done = Done(&is_over);
        let result = work();
        drop(done);
        client.join().expect("every connection reaches the pod");
        result
    });
    echo::ping_tcp(&kept, "still there?").unwrap();
    result
}
