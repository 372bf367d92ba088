//! `cproxy check` against a real API server: rights, credentials and their expiry, the clock.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use cproxy_tests::{
    api::refuse_over_tls,
    control_plane::{ClientIdentity, NODE, Validity, role_binding},
    manifest::{self, kubeconfig, write_text},
    process::{Output, cproxy},
    sandbox::Sandbox,
};
use serde_json::{Value, json};

use crate::fixture::Cluster;

/// Lines of a check with these flags: state and detail by name.
struct Checked {
    output: Output,
    lines: BTreeMap<String, (String, String)>,
}

impl Checked {
    fn run(sandbox: &Sandbox, flags: &[&str]) -> Self {
        let output = cproxy(sandbox, &[&["check", "-o", "json"], flags].concat());
        let rows: Vec<Value> =
            serde_json::from_str(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
        let text = |row: &Value, field: &str| row[field].as_str().unwrap().to_owned();
        let lines = rows.iter().map(|row| (text(row, "name"), (text(row, "state"), text(row, "detail"))));
        Self { lines: lines.collect(), output }
    }

    fn with(sandbox: &Sandbox, kubeconfig: &Path) -> Self {
        Self::run(sandbox, &["--kubeconfig", kubeconfig.to_str().unwrap()])
    }

    #[track_caller]
    fn expect(&self, name: &str, state: &str, words: &str) {
        let Some((found, detail)) = self.lines.get(name) else { panic!("no line {name}: {:#?}", self.lines) };
        assert!(found == state && detail.contains(words), "{name}: {found}: {detail}, not {state}: {words}");
    }

    #[track_caller]
    fn expect_failure(&self, names: &str) {
        let message = format!("cproxy: cannot follow the API server: missing {names}\n");
        assert_eq!((self.output.code, &*self.output.stderr), (1, &*message), "{:#?}", self.lines);
    }
}

const ROWS: [&str; 4] = ["list_services", "watch_services", "list_endpointslices", "watch_endpointslices"];

#[test]
fn each_missing_right_is_named_with_the_verb_to_grant() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let kubeconfig = cluster.control_plane.agent_kubeconfig();
    let good = Checked::run(&sandbox, &["--kubeconfig", kubeconfig.to_str().unwrap(), "--node-name", NODE]);
    assert_eq!(good.output.code, 0, "{:?}", good.output);
    let url = cluster.control_plane.server_url();
    for (name, words) in [
        ("api_server", format!("{url}/ answered after ")),
        ("server_certificate", "it expires in ".to_owned()),
        ("token", "its expiry cannot be read".to_owned()),
        ("clock", "as that of the API server".to_owned()),
        ("credentials", "accepted as those of cproxy".to_owned()),
        ("watch_nodes", "permitted".to_owned()),
    ] {
        good.expect(name, "ok", &words);
    }
    ROWS.iter().for_each(|name| good.expect(name, "ok", "permitted"));

    let nobody = cluster.control_plane.kubeconfig_for("nobody");
    let none = Checked::run(&sandbox, &["--kubeconfig", nobody.to_str().unwrap(), "--node-name", NODE]);
    none.expect_failure(&ROWS.join(", "));
    none.expect("credentials", "ok", "accepted as those of nobody");
    none.expect(
        "list_endpointslices",
        "missing",
        r#"the verb list on resource "endpointslices" of apiGroup "discovery"#,
    );
    none.expect("list_nodes", "degraded", "zone hints have no effect");
    assert!(!Checked::with(&sandbox, &nobody).lines.contains_key("list_nodes"), "without a name, no Node is read");
    cluster.control_plane.apply([role_binding("cproxy", "nobody")]);
    assert_eq!(Checked::with(&sandbox, &nobody).output.code, 0);
}

/// A kubeconfig for this user at the API server.
fn kubeconfig_of(cluster: &Cluster<'_>, name: &str, user: &Value) -> PathBuf {
    cluster.control_plane.agent_kubeconfig_with(name, |config| config["users"][0]["user"] = user.clone())
}

#[test]
fn credentials_that_do_not_count_are_named_and_never_shown() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let secret = "nobody-has-this";
    let wrong = Checked::with(&sandbox, &kubeconfig_of(&cluster, "wrong", &json!({"token": secret})));
    wrong.expect_failure("credentials");
    wrong.expect("credentials", "missing", "does not accept them (401)");
    assert!(!wrong.lines.contains_key("list_services"), "what follows is left out");
    assert!(!wrong.output.stdout.contains(secret));

    let ClientIdentity { certificate, key } = cluster.control_plane.client_identity("cproxy", None, Validity::Past);
    let file = write_text(sandbox.dir(), "expired.pem", &(certificate + &key));
    let user = json!({"client-certificate": file, "client-key": file});
    let expired = Checked::with(&sandbox, &kubeconfig_of(&cluster, "expired", &user));
    expired.expect("client_certificate", "missing", "it has expired on 2001-01-01T00:00:00Z");
    assert_eq!(expired.output.code, 1);

    // A token of that time, with {"exp":1000000000} in its middle.
    let token = json!({"token": "e30.eyJleHAiOjEwMDAwMDAwMDB9.c2ln"});
    let expired = Checked::with(&sandbox, &kubeconfig_of(&cluster, "old", &token));
    expired.expect("token", "missing", "it has expired on 2001-09-09T01:46:40Z");
    expired.expect_failure("token, credentials");

    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata":
                         {"name": "vm", "namespace": "default"}});
    let name = "system:serviceaccount:default:vm";
    cluster.control_plane.apply([account, role_binding("cproxy", name)]);
    let token = cluster.control_plane.request_token("vm", Duration::from_secs(600));
    let inline = Checked::with(&sandbox, &kubeconfig_of(&cluster, "inline", &json!({"token": token})));
    inline.expect("token", "degraded", "it expires in ");
    inline.expect("credentials", "ok", name);
    assert_eq!(inline.output.code, 0, "{:?}", inline.output);
    write_text(sandbox.dir(), "vm.token", &token);
    let of_file = Checked::with(&sandbox, &kubeconfig_of(&cluster, "file", &json!({"tokenFile": "vm.token"})));
    of_file.expect("token", "ok", "it expires in ");
    assert!(!format!("{:?}{:?}", inline.output, of_file.output).contains(&token));
}

#[test]
fn a_server_that_cannot_be_reached_or_trusted_is_named_with_the_step_that_failed() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let kubeconfig = cluster.control_plane.agent_kubeconfig();
    let kubeconfig = kubeconfig.to_str().unwrap();
    let url = cluster.control_plane.server_url();
    let at = |flags: &[&str]| Checked::run(&sandbox, &[&["--kubeconfig", kubeconfig], flags].concat());
    for (flags, words) in [
        (["--apiserver", "https://127.0.0.1:1"], "127.0.0.1:1: Connection refused"),
        (["--apiserver", "https://nowhere.test:6443"], "cannot resolve nowhere.test"),
        (["--tls-server-name", "elsewhere"], "TLS as \"elsewhere\": invalid peer certificate"),
    ] {
        let failed = at(&flags);
        failed.expect_failure("api_server");
        failed.expect("api_server", "missing", words);
    }
    let second = at(&["--apiserver", "https://127.0.0.1:1", &url]);
    second.expect("api_server", "degraded", "Connection refused");
    second.expect("credentials", "ok", "cproxy");
    assert_eq!(second.output.code, 0);
}

/// A server whose certificate counts in these years, and whose clock shows this date; and a kubeconfig for it.
fn server_of_another_time(sandbox: &Sandbox, port: u16, years: [i32; 2], date: &str) -> (impl Sized, PathBuf) {
    let make = || {
        let mut params = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()])?;
        let [first, last] = years.map(|year| rcgen::date_time_ymd(year, 1, 1));
        (params.not_before, params.not_after) = (first, last);
        let key = rcgen::KeyPair::generate()?;
        Ok::<_, rcgen::Error>((params.self_signed(&key)?.pem(), key.serialize_pem()))
    };
    let (certificate, key) = make().unwrap();
    let files = [("crt", certificate), ("key", key)]
        .map(|(kind, text)| write_text(sandbox.dir(), &format!("{port}.{kind}"), &text));
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let server = refuse_over_tls(sandbox, address, (404, &format!("Date: {date}\r\n")), files.clone());
    let [authority, _] = files;
    let cluster = json!({"server": format!("https://{address}"), "certificate-authority": authority});
    let config = kubeconfig(cluster, json!({"token": "secret"}));
    (server, write_text(sandbox.dir(), &format!("{port}.kubeconfig"), &config.to_string()))
}

#[test]
fn a_wrong_clock_is_told_from_an_expired_certificate() {
    let sandbox = Sandbox::for_test();
    let now = jiff::Timestamp::now();
    let date = |days: i64| {
        let then = now + jiff::SignedDuration::from_hours(24 * days);
        then.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string()
    };
    let check = |port, years, days| {
        let date = date(days);
        let (_server, kubeconfig) = server_of_another_time(&sandbox, port, years, &date);
        Checked::with(&sandbox, &kubeconfig)
    };
    let expired = check(7001, [2000, 2001], 0);
    expired.expect_failure("api_server, server_certificate");
    expired.expect("server_certificate", "missing", "it has expired on 2001-01-01T00:00:00Z");
    expired.expect("clock", "ok", "as that of the API server");
    let behind = check(7002, [2090, 2099], 365 * 66);
    behind.expect("server_certificate", "missing", "it counts from 2090-01-01T00:00:00Z on");
    behind.expect("clock", "missing", "days behind that of the API server");
    // A certificate that counts, and a server that has no reviews.
    let ahead = check(7003, [2000, 2099], -2);
    ahead.expect("clock", "degraded", "ahead of that of the API server");
    ahead.expect("rights", "ok", "the server does not say (404");
    assert_eq!(ahead.output.code, 0, "{:?}", ahead.output);
}

#[test]
fn manifests_in_place_of_an_api_server_need_none() {
    let sandbox = Sandbox::for_test();
    manifest::write(&sandbox.manifest_dir(), "none.json", []);
    let checked = Checked::run(&sandbox, &["--manifests", sandbox.manifest_dir().to_str().unwrap()]);
    assert_eq!(checked.output.code, 0, "{:?}", checked.output);
    assert!(!checked.lines.contains_key("api_server"), "{:?}", checked.lines);
}
