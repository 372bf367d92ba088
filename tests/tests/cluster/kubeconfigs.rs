//! Kubeconfigs and certificates as clusters have them: what kubectl takes, the agent takes, or says why not.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use cproxy_tests::{
    control_plane::{ADDRESS, ControlPlane, SECOND_PORT},
    manifest::write_text,
    process::{Agent, RunningAgent, eventually},
    sandbox::Sandbox,
};

use crate::fixture::PATIENCE;

/// Names by which the API server has other certificates.
const P521: &str = "p521.test";
const SELF_SIGNED: &str = "self-signed.test";
const CA_AS_LEAF: &str = "ca-as-leaf.test";
const SIGNED_BY_LEAF: &str = "signed-by-leaf.test";

/// A directory of certificates that openssl has made, since no library of the tests makes such.
struct Certificates {
    directory: PathBuf,
}

impl Certificates {
    fn create(directory: PathBuf) -> Self {
        fs::create_dir(&directory).unwrap();
        let certificates = Self { directory };
        let is_ca = "basicConstraints=critical,CA:TRUE";
        certificates.authority("authority", "ec -pkeyopt ec_paramgen_curve:P-256", is_ca, "");
        certificates.authority("clients-v1", "ec -pkeyopt ec_paramgen_curve:P-256", is_ca, "");
        certificates.authority("self-signed", "rsa:2048", is_ca, SELF_SIGNED);
        certificates.signed("p521", "ec -pkeyopt ec_paramgen_curve:P-521", "authority", Some(("", P521)));
        certificates.signed("ca-as-leaf", "rsa:2048", "authority", Some((is_ca, CA_AS_LEAF)));
        let is_leaf = "basicConstraints=critical,CA:FALSE";
        certificates.signed("leaf", "rsa:2048", "authority", Some((is_leaf, "leaf.test")));
        certificates.signed("signed-by-leaf", "rsa:2048", "leaf", Some((is_leaf, SIGNED_BY_LEAF)));
        // MicroK8s 1.34 makes such. The name is that of the agent's user.
        certificates.signed("v1", "rsa:2048", "clients-v1", None);
        certificates
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn pair(&self, name: &str) -> [String; 2] {
        ["crt", "key"].map(|extension| self.file(&format!("{name}.{extension}")).display().to_string())
    }

    fn openssl(&self, arguments: &str) {
        let mut openssl = Command::new("openssl");
        openssl.args(arguments.split_whitespace()).current_dir(&self.directory);
        let output = openssl.output().expect("cannot run openssl: `cargo xtask setup` installs it");
        assert!(output.status.success(), "openssl {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// A certificate that signs itself.
    fn authority(&self, name: &str, key: &str, extension: &str, dns_name: &str) {
        let names = if dns_name.is_empty() { String::new() } else { format!("-addext subjectAltName=DNS:{dns_name}") };
        self.openssl(&format!(
            "req -x509 -newkey {key} -nodes -days 30 -subj /CN={name} -addext {extension} {names} \
             -keyout {name}.key -out {name}.crt"
        ));
    }

    /// A certificate of `authority`, of version 1 without extensions.
    fn signed(&self, name: &str, key: &str, authority: &str, extensions: Option<(&str, &str)>) {
        let subject = if extensions.is_some() { name } else { "cproxy" };
        self.openssl(&format!("req -new -newkey {key} -nodes -subj /CN={subject} -keyout {name}.key -out {name}.csr"));
        let extended = extensions.map(|(extension, dns_name)| {
            write_text(&self.directory, "extensions", &format!("subjectAltName=DNS:{dns_name}\n{extension}\n"));
            "-extfile extensions"
        });
        self.openssl(&format!(
            "x509 -req -in {name}.csr -CA {authority}.crt -CAkey {authority}.key -CAcreateserial -days 20 \
             -out {name}.crt {}",
            extended.unwrap_or_default()
        ));
    }
}

/// Base64 in lines, as `base64` writes it.
fn wrapped(path: &Path) -> String {
    let output = Command::new("base64").arg(path).output().unwrap();
    String::from_utf8(output.stdout).unwrap().lines().map(|line| format!("      {line}\n")).collect()
}

/// A kubeconfig with these fields of its cluster and its user.
fn kubeconfig(directory: &Path, cluster: &str, user: &str) -> PathBuf {
    let text = format!(
        "current-context: x\ncontexts: [{{name: x, context: {{cluster: c, user: u}}}}]\n\
         users:\n- name: u\n  user:\n{user}\n\
         clusters:\n- name: c\n  cluster:\n    server: https://{ADDRESS}:{SECOND_PORT}\n{cluster}\n",
        user = indented(user),
        cluster = indented(cluster)
    );
    write_text(directory, "kubeconfig", &text)
}

fn indented(fields: &str) -> String {
    fields.lines().map(|line| format!("    {line}\n")).collect()
}

#[test]
fn kubeconfigs_that_kubectl_takes_are_taken_or_refused_by_name() {
    let sandbox = Sandbox::for_test();
    let control_plane = ControlPlane::start(&sandbox);
    let certificates = Certificates::create(sandbox.dir().join("certificates"));
    let file = |name: &str| certificates.file(name).display().to_string();
    let clients = [fs::read_to_string(control_plane.client_ca_file()), fs::read_to_string(file("clients-v1.crt"))];
    let clients = write_text(&certificates.directory, "clients.crt", &clients.map(Result::unwrap).concat());
    let mut flags = vec![format!("--client-ca-file={}", clients.display())];
    for (name, host) in
        [("p521", P521), ("self-signed", SELF_SIGNED), ("ca-as-leaf", CA_AS_LEAF), ("signed-by-leaf", SIGNED_BY_LEAF)]
    {
        let [certificate, key] = certificates.pair(name);
        flags.push(format!("--tls-sni-cert-key={certificate},{key}:{host}"));
    }
    let _second = control_plane.start_second(&flags);

    let ca = control_plane.ca_file().display().to_string();
    let serving = control_plane.serving_files().map(|path| path.display().to_string());
    let token = format!("token: {}", control_plane.token("cproxy"));
    let [v1, v1_key] = certificates.pair("v1");
    let trusted = format!("certificate-authority: {ca}");
    let at =
        |host: &str, authority: &str| format!("tls-server-name: {host}\ncertificate-authority: {}", file(authority));
    let broken = write_text(
        &certificates.directory,
        "one-broken.crt",
        &format!("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n{}", fs::read_to_string(&ca).unwrap()),
    );
    let data = format!("certificate-authority-data: |\n{}", wrapped(ca.as_ref()));
    let taken = [
        ("control", trusted.clone(), token.clone()),
        ("base64 in lines", data.clone(), token.clone()),
        ("CA data empty", format!("{trusted}\ncertificate-authority-data: ''"), token.clone()),
        ("CA file empty", format!("certificate-authority: ''\n{data}"), token.clone()),
        ("server name empty", format!("{trusted}\ntls-server-name: ''\nproxy-url: ''"), token.clone()),
        ("token file empty", trusted.clone(), format!("{token}\ntokenFile: ''\nusername: ''\npassword: ''\nas: ''")),
        ("client certificate empty", trusted.clone(), format!("{token}\nclient-certificate: ''\nclient-key: ''")),
        ("client data empty", trusted.clone(), format!("{token}\nclient-certificate-data: ''\nclient-key-data: ''")),
        ("the server's own certificate", format!("certificate-authority: {}", serving[0]), token.clone()),
        ("a CA as the server's certificate", at(SELF_SIGNED, "self-signed.crt"), token.clone()),
        ("an authority that cannot be read", format!("certificate-authority: {}", broken.display()), token.clone()),
        ("client certificate of version 1", trusted.clone(), format!("client-certificate: {v1}\nclient-key: {v1_key}")),
    ];
    let (authority, leaf) = (file("authority.crt"), file("leaf.crt"));
    let refused = [
        ("P-521", at(P521, "authority.crt"), ["P-521", "P-256"].as_slice()),
        ("a CA of another as the server's", at(CA_AS_LEAF, "authority.crt"), &["CA:TRUE", authority.as_str()]),
        (SIGNED_BY_LEAF, at(SIGNED_BY_LEAF, "leaf.crt"), &[leaf.as_str()]),
    ];
    let kubectl = |path: &Path| {
        let path = path.display().to_string();
        control_plane.try_kubectl("cproxy", &["--kubeconfig", &path, "get", "services", "--all-namespaces"], "")
    };
    let mut failures = Vec::new();
    for (what, cluster, user) in taken {
        let path = kubeconfig(sandbox.dir(), &cluster, &user);
        let oracle = kubectl(&path);
        assert_eq!(oracle.code, 0, "{what}: kubectl does not take it: {oracle:?}");
        let mut agent = Agent::new(&sandbox).kubeconfig(&path).spawn();
        let has_decided = |agent: &mut RunningAgent| agent.is_ready() || agent.log().contains("; trying again");
        eventually(PATIENCE, "the agent takes it or not", || {
            if has_decided(&mut agent) || agent.exit_status().is_some() { Ok(()) } else { Err(agent.log()) }
        });
        if !agent.is_ready() {
            failures.push(format!("{what}: {}", agent.log().lines().last().unwrap_or_default()));
        }
        agent.stop();
    }
    for (what, cluster, words) in refused {
        let path = kubeconfig(sandbox.dir(), &cluster, &token);
        assert_eq!(kubectl(&path).code == 0, what != SIGNED_BY_LEAF, "{what}");
        let mut agent = Agent::new(&sandbox).kubeconfig(&path).spawn();
        agent.wait_log("TLS", PATIENCE);
        let log = agent.log();
        let line = log.lines().find(|line| line.contains("TLS")).unwrap_or_default();
        if !words.iter().all(|word| line.contains(word)) {
            failures.push(format!("{what}: {line}"));
        }
        agent.stop();
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn an_unknown_authority_is_refused_and_the_file_is_named() {
    let sandbox = Sandbox::for_test();
    let control_plane = ControlPlane::shared(&sandbox);
    let certificates = Certificates::create(sandbox.dir().join("certificates"));
    let authority = certificates.file("authority.crt").display().to_string();
    let text = fs::read_to_string(control_plane.admin_kubeconfig()).unwrap();
    let text = text.replace(&control_plane.ca_file().display().to_string(), &authority);
    let path = write_text(sandbox.dir(), "kubeconfig", &text);
    let mut agent = Agent::new(&sandbox).kubeconfig(&path).spawn();
    agent.wait_log(&format!("certificate-authority {authority}"), PATIENCE);
}
