//! The cluster configuration in images/kubernetes: the API server accepts it, and it grants exactly the rights that the
//! agent needs.

use std::{fs, path::Path, process::Command};

use cproxy_tests::{
    control_plane::ControlPlane,
    manifest::{self, write_text},
    process::{Agent, eventually, run},
    sandbox::{Placement, Sandbox},
};
use serde_json::json;

use crate::fixture::PATIENCE;

const ACCOUNT: &str = "system:serviceaccount:kube-system:cproxy";

/// A file or directory of the cluster configuration.
fn path(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../images/kubernetes").join(name);
    path.into_os_string().into_string().unwrap()
}

fn rendered(control_plane: &ControlPlane<'_>, directory: &str) -> String {
    control_plane.kubectl(&["kustomize", &path(directory)], "")
}

/// Whether the API server would allow the account's request.
fn is_permitted(control_plane: &ControlPlane<'_>, request: &[&str]) -> bool {
    let arguments = [&["auth", "can-i", "--as", ACCOUNT], request].concat();
    let output = control_plane.try_kubectl("admin", &arguments, "");
    match output.stdout.trim() {
        "yes" => true,
        "no" => false,
        other => panic!("{request:?}: {other}{}", output.stderr),
    }
}

#[test]
fn the_api_server_accepts_the_overlays_and_they_grant_only_the_needed_rights() {
    let sandbox = Sandbox::for_test();
    let control_plane = ControlPlane::shared(&sandbox);
    // The harness has rights of the same name for its own user.
    control_plane.kubectl(&["delete", "clusterrole/cproxy", "clusterrolebinding/cproxy-cproxy"], "");
    assert!(!is_permitted(&control_plane, &["watch", "services", "--all-namespaces"]));
    control_plane.kubectl(&["apply", "-f", "-"], &rendered(&control_plane, "base"));
    for overlay in ["overlays/baked-in", "overlays/sidecar"] {
        let text = rendered(&control_plane, overlay);
        let answer = control_plane.kubectl(&["apply", "--dry-run=server", "-f", "-"], &text);
        assert_eq!(answer.matches("(server dry run)").count(), text.matches("\nkind: ").count(), "{overlay}: {answer}");
    }
    control_plane.kubectl(&["apply", "-f", "-"], &rendered(&control_plane, "overlays/baked-in"));
    control_plane.kubectl(&["apply", "-f", &path("static-token.yaml")], "");

    for verb in ["list", "watch"] {
        for kind in ["services", "endpointslices.discovery.k8s.io"] {
            assert!(is_permitted(&control_plane, &[verb, kind, "--all-namespaces"]), "{verb} {kind}");
        }
        assert!(is_permitted(&control_plane, &[verb, "nodes/virtual-kubelet"]), "{verb} this node");
        for kind in ["nodes", "nodes/other", "pods", "secrets", "configmaps", "endpoints"] {
            assert!(!is_permitted(&control_plane, &[verb, kind, "--all-namespaces"]), "{verb} {kind}");
        }
    }
    for verb in ["get", "create", "update", "patch", "delete"] {
        for kind in ["services", "endpointslices.discovery.k8s.io", "nodes", "secrets", "pods"] {
            assert!(!is_permitted(&control_plane, &[verb, kind, "--all-namespaces"]), "{verb} {kind}");
        }
    }
}

#[test]
fn the_relays_overlay_is_accepted_and_grants_only_what_the_relay_needs() {
    let sandbox = Sandbox::for_test();
    let control_plane = ControlPlane::shared(&sandbox);
    let text = rendered(&control_plane, "overlays/relay");
    let answer = control_plane.kubectl(&["apply", "--dry-run=server", "-f", "-"], &text);
    assert_eq!(answer.matches("(server dry run)").count(), text.matches("\nkind: ").count(), "{answer}");
    control_plane.kubectl(&["apply", "-f", "-"], &text);
    let autoscaler = path("overlays/relay/autoscaler.yaml");
    control_plane.kubectl(&["apply", "--dry-run=server", "-f", &autoscaler], "");
    let is_permitted = |request: &[&str]| {
        let account = ["auth", "can-i", "--as", "system:serviceaccount:kube-system:cproxy-relay"];
        control_plane.try_kubectl("admin", &[&account, request].concat(), "").stdout.trim() == "yes"
    };
    let kinds = ["services", "nodes", "endpointslices.discovery.k8s.io"];
    for verb in ["list", "watch"] {
        for kind in kinds {
            assert!(is_permitted(&[verb, kind, "--all-namespaces"]), "{verb} {kind}");
        }
    }
    assert!(is_permitted(&["create", "tokenreviews.authentication.k8s.io"]));
    for verb in ["create", "update", "patch", "delete"] {
        for kind in kinds.into_iter().chain(["secrets", "pods", "serviceaccounts/token"]) {
            assert!(!is_permitted(&[verb, kind, "--all-namespaces"]), "{verb} {kind}");
        }
    }
    // It reads what policies are resolved from only if it is to serve them.
    let permissions = |kind: &str| ["list", "watch", "get"].map(|verb| is_permitted(&[verb, kind, "--all-namespaces"]));
    let inputs = ["pods", "namespaces", "networkpolicies.networking.k8s.io"];
    for kind in inputs {
        assert_eq!(permissions(kind), [false; 3], "{kind}");
    }
    control_plane.kubectl(&["apply", "-f", "-"], &rendered(&control_plane, "overlays/relay-policies"));
    for kind in inputs {
        assert_eq!(permissions(kind), [true, true, false], "{kind}");
    }
}

/// The code block of the README that has these words.
fn block(words: &str) -> String {
    let readme = fs::read_to_string(path("README.md")).unwrap();
    let code = readme.split("\n```").skip(1).step_by(2).find(|block| block.contains(words));
    code.and_then(|block| block.split_once('\n')).unwrap_or_else(|| panic!("no block with {words:?}")).1.to_owned()
}

#[test]
fn the_provider_gives_each_vm_a_short_lived_token_by_the_commands_of_the_readme() {
    let sandbox = Sandbox::for_test();
    let control_plane = ControlPlane::shared(&sandbox);
    control_plane.kubectl(&["apply", "-f", "-"], &rendered(&control_plane, "overlays/baked-in"));
    control_plane.apply([manifest::node("virtual-kubelet", "a")]);
    control_plane.kubectl(&["-n", "kube-system", "create", "serviceaccount", "virtual-kubelet"], "");
    let provider = ["-n", "kube-system", "create", "token", "virtual-kubelet"];
    let token = control_plane.kubectl(&provider, "").trim().to_owned();
    let text = fs::read_to_string(control_plane.agent_kubeconfig()).unwrap();
    let mut kubeconfig = serde_json::from_str::<serde_json::Value>(&text).unwrap();
    kubeconfig["users"][0]["user"] = json!({"token": token});
    let kubeconfig = write_text(sandbox.dir(), "provider", &kubeconfig.to_string());
    let vm = sandbox.dir().join("vm");
    fs::create_dir(&vm).unwrap();
    let binaries = control_plane.binary("kubectl").parent().unwrap().to_str().unwrap().to_owned();
    let shell = |script: &str| {
        let mut command = Command::new("sh");
        command.args(["-euc", script]).current_dir(&vm).env("HOME", sandbox.dir()).env("KUBECONFIG", &kubeconfig);
        command.env("PATH", format!("{binaries}:{}", std::env::var("PATH").unwrap_or_default()));
        run(&sandbox, Placement::Unhooked, command, "", PATIENCE)
    };
    shell(&block("certificate-authority-data")).success();
    shell(&block("create token")).success();
    assert_ne!(shell("kubectl -n kube-system create token virtual-kubelet").code, 0, "another account");
    assert_ne!(shell("kubectl -n kube-system get secrets").code, 0);

    let text = block("tokenFile").replace("/etc/cproxy/", &format!("{}/", vm.display()));
    let text = text.replace("https://10.0.0.1:6443", &control_plane.server_url());
    let agent = Agent::new(&sandbox).kubeconfig(write_text(&vm, "kubeconfig", &text));
    let agent = agent.args(["--node-name", "virtual-kubelet"]).start();
    assert!(!agent.log().contains("WARN"), "{}", agent.log());

    // The token ends with the Node.
    let get = "kubectl --server=$server --certificate-authority=ca.crt --token=$(cat token) get services -A";
    let get = get.replace("$server", &control_plane.server_url());
    shell(&format!("unset KUBECONFIG; {get}")).success();
    control_plane.kubectl(&["delete", "node", "virtual-kubelet"], "");
    eventually(PATIENCE, "the token is refused", || {
        let output = shell(&format!("unset KUBECONFIG; {get}"));
        if output.stderr.contains("Unauthorized") { Ok(()) } else { Err(format!("{output:?}")) }
    });
}
