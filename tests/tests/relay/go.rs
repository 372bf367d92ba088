//! A program on client-go, which shows its cache over HTTP.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    sync::LazyLock,
};

use cproxy_tests::{
    build, http,
    process::{Daemon, eventually},
    sandbox::{Placement, Sandbox},
};
use serde_json::Value;

use crate::{fixture::PATIENCE, wire::trim};

/// The program. Go caches its builds, so that only the first one takes long. Build it before the sandbox is made, which
/// has no route to the module proxy.
pub(crate) fn program() -> &'static Path {
    static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| {
        let mut build = Command::new("go");
        build.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/go-client")).env("CGO_ENABLED", "0");
        build.args(["build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w"]);
        build::program(env!("CARGO_TARGET_TMPDIR"), "go-client", build)
    });
    &PROGRAM
}

/// Informers of Services, EndpointSlices and Nodes.
pub(crate) struct GoClient {
    pub(crate) name: String,
    _daemon: Daemon,
    address: SocketAddr,
}

/// Ways in which client-go gets its objects.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Way {
    pub(crate) content_type: &'static str,
    /// Lists come as the first events of a watch.
    pub(crate) has_watch_lists: bool,
}

impl Way {
    pub(crate) const ALL: [Self; 4] = [
        Self { content_type: "application/json", has_watch_lists: false },
        Self { content_type: "application/json", has_watch_lists: true },
        Self { content_type: "application/vnd.kubernetes.protobuf", has_watch_lists: false },
        Self { content_type: "application/vnd.kubernetes.protobuf", has_watch_lists: true },
    ];
}

impl GoClient {
    /// Starts it at a kubeconfig's server and waits until it has listed everything.
    pub(crate) fn start(sandbox: &Sandbox, number: u16, kubeconfig: &Path, way: Way) -> Self {
        let address = SocketAddr::from(([127, 0, 0, 1], 7500 + number));
        let mut command = Command::new(program());
        command.env("KUBE_FEATURE_WatchListClient", way.has_watch_lists.to_string());
        command.arg("-kubeconfig").arg(kubeconfig).args(["-content-type", way.content_type]);
        command.args(["-listen", &address.to_string()]);
        let mut daemon = Daemon::spawn(sandbox, &format!("go-client-{number}"), Placement::Unhooked, command);
        daemon.wait_until(PATIENCE, "client-go has listed everything", |_| match http::get(address, "/synced") {
            Ok(text) if text.trim() == "true" => Ok(()),
            other => Err(format!("{other:?}")),
        });
        Self { name: format!("{way:?}"), _daemon: daemon, address }
    }

    fn get(&self, path: &str) -> Value {
        let text = http::get(self.address, path).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    /// All objects by resource and name, without what the relay leaves out.
    pub(crate) fn cache(&self) -> Value {
        let mut cache = self.get("/cache");
        let objects =
            cache.as_object_mut().unwrap().values_mut().flat_map(|of| of.as_object_mut().unwrap().values_mut());
        objects.for_each(trim);
        cache
    }

    /// Number of successful requests of a kind: `list`, `watch-list` or `watch`.
    pub(crate) fn requests(&self, kind: &str) -> u64 {
        self.get("/requests")[kind].as_u64().unwrap_or_default()
    }

    /// Lists in either form.
    pub(crate) fn lists(&self) -> u64 {
        self.requests("list") + self.requests("watch-list")
    }

    /// Number of events by resource and kind.
    pub(crate) fn events(&self) -> Value {
        self.get("/events")
    }

    /// Closes its connections and connects to another server from now on.
    pub(crate) fn move_to(&self, server: SocketAddr) {
        self.get(&format!("/move?to={server}"));
    }
}

/// Waits until all caches are equal to that of the first client.
pub(crate) fn expect_equal(clients: &[GoClient]) {
    let (reference, others) = clients.split_first().unwrap();
    for client in others {
        eventually(PATIENCE, format!("{} has what the API server has", client.name), || {
            let (expected, found) = (reference.cache(), client.cache());
            if expected == found { Ok(()) } else { Err(first_difference(&expected, &found)) }
        });
    }
}

fn first_difference(expected: &Value, found: &Value) -> String {
    for (resource, objects) in expected.as_object().unwrap() {
        let other = &found[resource];
        let names = objects.as_object().unwrap().keys().chain(other.as_object().unwrap().keys());
        if let Some(name) = names.into_iter().find(|name| objects.get(*name) != other.get(*name)) {
            return format!("{resource} {name}: {:?} / {:?}", objects.get(name), other.get(name));
        }
    }
    "equal now".to_owned()
}
