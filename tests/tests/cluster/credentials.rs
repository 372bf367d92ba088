//! Credentials that are renewed, expire or are revoked under a running agent.

use std::{fs, net::SocketAddr, os::unix::fs::PermissionsExt, path::PathBuf, thread, time::Duration};

use cproxy_tests::{
    audit::AuditLog,
    control_plane::{ADDRESS, ClientIdentity, PORT, Validity, role_binding},
    echo,
    manifest::{kubeconfig, write_text},
    process::{Agent, RunningAgent, eventually},
    relay::{Relay, RelayChange},
    sandbox::Sandbox,
};
use serde_json::{Value, json};

use crate::fixture::{Cluster, PATIENCE};

const VIP: &str = "10.96.0.10:80";
const POD: &str = "10.244.0.1:8080";
const WEB: &str = "TCP 10.96.0.10:80 10.244.0.1:8080";

/// Time before the expiry at which a program is asked again, as in the agent.
const EARLY: Duration = Duration::from_secs(60);

/// A node that the agent may not read, so that it repeats this request.
const FORBIDDEN_NODE: &str = "elsewhere";

/// Cluster behind a relay, and the directory of a VM's credentials.
struct Vm<'s> {
    cluster: Cluster<'s>,
    audit: AuditLog,
    relay: Relay,
    directory: PathBuf,
}

impl<'s> Vm<'s> {
    fn start(sandbox: &'s Sandbox) -> Self {
        let (cluster, audit) = Cluster::start_audited(sandbox);
        let relay = Relay::start(sandbox, SocketAddr::new(ADDRESS, PORT));
        let directory = sandbox.dir().join("vm");
        fs::create_dir(&directory).unwrap();
        let vm = Self { cluster, audit, relay, directory };
        vm.write("ca.crt", &vm.cluster.control_plane.ca_pem());
        vm.cluster.apply_service("web", "10.96.0.10", &["10.244.0.1"]);
        vm
    }

    /// Replaces a file.
    fn write(&self, name: &str, text: &str) -> PathBuf {
        write_text(&self.directory, name, text)
    }

    fn write_identity(&self, identity: &ClientIdentity) {
        self.write("client.crt", &identity.certificate);
        self.write("client.key", &identity.key);
    }

    /// Starts the agent as this user and waits until it is ready.
    fn start_agent(&self, user: Value) -> RunningAgent {
        let server = format!("https://{}", self.relay.address());
        let kubeconfig = kubeconfig(json!({"server": server, "certificate-authority": "ca.crt"}), user);
        let agent = Agent::new(self.cluster.sandbox).kubeconfig(self.write("kubeconfig", &kubeconfig.to_string()));
        let agent = agent.args(["--node-name", FORBIDDEN_NODE, "--log-level", "debug"]).start();
        self.cluster.expect(&[WEB]);
        agent
    }

    /// Adds or removes another Service, and waits until the agent has followed.
    fn expect_another(&self, is_there: bool) {
        if is_there {
            self.cluster.apply_service("new", "10.96.0.11", &["10.244.0.2"]);
            self.cluster.expect(&[WEB, "TCP 10.96.0.11:80 10.244.0.2:8080"]);
        } else {
            self.cluster.delete("Service", "new");
            self.cluster.expect(&[WEB]);
        }
    }

    /// Waits until the last request for each kind is by this user.
    fn expect_user(&self, user: &str) {
        for resource in ["services", "endpointslices"] {
            eventually(PATIENCE, format!("{user} watches {resource}"), || {
                let requests = self.audit.requests();
                let last = requests.iter().rfind(|request| request.uri.contains(&format!("/{resource}?")));
                if last.is_some_and(|last| last.user == user) { Ok(()) } else { Err(format!("{last:#?}")) }
            });
        }
    }

    fn create_accounts(&self, names: &[&str]) {
        for name in names {
            let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata":
                                 {"name": name, "namespace": "default"}});
            let binding = role_binding("cproxy", &format!("system:serviceaccount:default:{name}"));
            self.cluster.control_plane.apply([account, binding]);
        }
    }
}

/// Cuts the agent's connection until the log has the words in one line.
fn cut_until(vm: &Vm<'_>, agent: &mut RunningAgent, words: &[&str]) {
    agent.wait_until(PATIENCE, &format!("{words:?}"), |agent| {
        if agent.log().lines().any(|line| words.iter().all(|word| line.contains(word))) {
            return Ok(());
        }
        vm.relay.cut();
        thread::sleep(Duration::from_secs(1));
        Err("not yet")
    });
}

#[test]
fn renewed_certificates_and_authorities_are_used_without_a_gap_and_without_a_list() {
    let sandbox = Sandbox::for_test();
    let vm = Vm::start(&sandbox);
    let control_plane = &vm.cluster.control_plane;
    control_plane.apply([role_binding("cproxy", "second")]);
    vm.write_identity(&control_plane.client_identity("cproxy", None, Validity::Long));
    let mut agent = vm.start_agent(json!({"client-certificate": "client.crt", "client-key": "client.key"}));
    vm.expect_user("cproxy");
    echo::while_a_client_connects(VIP, POD, || {
        // The next request, here for the forbidden Node, makes a new connection. Watches move to it, then the old one
        // ends.
        let second = control_plane.client_identity("second", None, Validity::Long);
        vm.write_identity(&second);
        vm.expect_user("second");
        eventually(PATIENCE, "the old connection has ended", || {
            let history = vm.relay.history();
            let expected = [RelayChange::Opened(0), RelayChange::Opened(1), RelayChange::Closed(0)];
            if history == expected { Ok(()) } else { Err(format!("{history:?}")) }
        });
        vm.expect_another(true);

        // With a wrong authority there is no new connection, and the present one stays.
        let other = rcgen::generate_simple_self_signed(["elsewhere".to_owned()]).unwrap();
        vm.write("ca.crt", &other.cert.pem());
        let line = agent.wait_log("the present connection to the API server stays for now", PATIENCE);
        assert!(line.contains("WARN") && line.contains("is signed by no certificate of"), "{line}");
        // The relay closes the refused one a moment later.
        vm.relay.wait_for_connections(1, PATIENCE);
        vm.expect_another(false);
        vm.write("ca.crt", &control_plane.ca_pem());
        vm.expect_another(true);

        vm.write_identity(&control_plane.client_identity("second", None, Validity::Past));
        vm.relay.cut();
        agent.wait_log("does not accept the credentials (401); check the token or certificate", PATIENCE);
        vm.cluster.assert_table(&[WEB, "TCP 10.96.0.11:80 10.244.0.2:8080"]);
        vm.write_identity(&second);
        vm.expect_another(false);

        // The server is renewed first. A running watch goes on, and the next connection fails.
        control_plane.renew_authority();
        vm.cluster.apply_service("web", "10.96.0.10", &["10.244.0.1"]);
        vm.cluster.expect(&[WEB]);
        cut_until(&vm, &mut agent, &["WARN", "cannot watch services", "is signed by no certificate of"]);
        vm.cluster.assert_table(&[WEB]);
        vm.write("ca.crt", &control_plane.ca_pem());
        vm.expect_another(true);
    });
    vm.audit.assert_one_list_each();
    assert_eq!(agent.exit_status(), None, "it is still the same agent");
}

#[test]
fn a_renewed_token_file_is_used_by_the_next_request_on_the_same_connection() {
    let sandbox = Sandbox::for_test();
    let vm = Vm::start(&sandbox);
    vm.create_accounts(&["first", "second"]);
    let token = |account| vm.cluster.control_plane.request_token(account, Duration::from_secs(600));
    vm.write("token", &token("first"));
    let agent = vm.start_agent(json!({"tokenFile": "token"}));
    vm.expect_user("system:serviceaccount:default:first");
    vm.write("token", &format!("{}\n", token("second")));
    eventually(PATIENCE, "a request is by the second account", || {
        let requests = vm.audit.requests();
        let is_second = |user: &str| user == "system:serviceaccount:default:second";
        if requests.iter().any(|request| is_second(&request.user)) { Ok(()) } else { Err(format!("{requests:#?}")) }
    });
    assert_eq!(vm.relay.history(), [RelayChange::Opened(0)]);

    // The first token is of no use any more.
    vm.cluster.control_plane.kubectl(&["delete", "serviceaccount", "first"], "");
    vm.relay.cut();
    vm.expect_user("system:serviceaccount:default:second");
    vm.expect_another(true);
    vm.audit.assert_one_list_each();
    assert!(!agent.log().contains("(401)"), "{}", agent.log());
}

/// Program that returns credentials, and its runs.
struct Login<'v, 's>(&'v Vm<'s>);

impl Login<'_, '_> {
    /// Replaces what the program does after it has recorded its run.
    fn write(&self, script: &str) {
        let runs = self.0.directory.join("runs");
        let path = self.0.directory.join("login.new");
        fs::write(&path, format!("#!/bin/sh\necho run >>{}\n{script}\n", runs.display())).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(path, self.0.directory.join("login")).unwrap();
    }

    /// Makes the program return a token of this account, perhaps with an expiry.
    fn write_token(&self, account: &str, expires: Option<jiff::Timestamp>) {
        let token = self.0.cluster.control_plane.request_token(account, Duration::from_secs(600));
        // Programs often print a line feed after a token.
        let mut status = json!({"token": format!("{token}\n")});
        if let Some(expires) = expires {
            status["expirationTimestamp"] = json!(expires.to_string());
        }
        let (version, kind) = ("client.authentication.k8s.io/v1", "ExecCredential");
        let credential = json!({"apiVersion": version, "kind": kind, "status": status});
        self.write(&format!("cat <<'END'\n{credential}\nEND"));
    }

    fn run_count(&self) -> usize {
        fs::read_to_string(self.0.directory.join("runs")).unwrap_or_default().lines().count()
    }
}

#[test]
fn a_program_is_asked_before_its_token_expires_and_after_a_refusal_and_may_fail_or_hang() {
    let sandbox = Sandbox::for_test();
    let vm = Vm::start(&sandbox);
    vm.create_accounts(&["first", "second"]);
    let login = Login(&vm);
    let renewal = jiff::Timestamp::now() + Duration::from_secs(15);
    login.write_token("first", Some(renewal + EARLY));
    let exec =
        json!({"apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never", "command": "./login"});
    let mut agent = vm.start_agent(json!({"exec": exec}));
    vm.expect_user("system:serviceaccount:default:first");
    assert_eq!(login.run_count(), 1);
    echo::while_a_client_connects(VIP, POD, || {
        // A failure shortly before the expiry does no harm.
        login.write("echo no login >&2; exit 3");
        let left = renewal.duration_since(jiff::Timestamp::now()) + jiff::SignedDuration::from_secs(1);
        thread::sleep(left.try_into().unwrap_or_default());
        vm.relay.cut();
        let line = agent.wait_log("exit status: 3: no login", PATIENCE);
        assert!(line.contains("WARN") && line.contains("login: "), "{line}");
        vm.expect_another(true);

        // Then it succeeds. Without an expiry it does not run again, whatever happens to connections.
        login.write_token("first", None);
        let runs = login.run_count();
        vm.relay.cut();
        vm.expect_another(false);
        vm.relay.cut();
        vm.expect_another(true);
        assert!((runs..=runs + 1).contains(&login.run_count()));

        // It runs again after a refusal, and may fail then, too.
        login.write("echo no login >&2; exit 4");
        vm.cluster.control_plane.kubectl(&["delete", "serviceaccount", "first"], "");
        cut_until(&vm, &mut agent, &["WARN", "cannot watch services", "exit status: 4: no login"]);
        login.write("exec sleep 1000");
        agent.wait_log("login: no answer within", PATIENCE);
        vm.cluster.assert_table(&[WEB, "TCP 10.96.0.11:80 10.244.0.2:8080"]);
        login.write_token("second", None);
        vm.expect_another(false);
        vm.expect_user("system:serviceaccount:default:second");
    });
    vm.audit.assert_one_list_each();
    assert_eq!(agent.exit_status(), None, "it is still the same agent");
}
