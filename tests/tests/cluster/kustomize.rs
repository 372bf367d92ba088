//! The cluster configuration in images/kubernetes: the API server accepts it, and it grants exactly the rights that the
//! agent needs.

use std::path::Path;

use cproxy_tests::{control_plane::ControlPlane, sandbox::Sandbox};

const ACCOUNT: &str = "system:serviceaccount:kube-system:cproxy";

fn rendered(control_plane: &ControlPlane<'_>, directory: &str) -> String {
    let images = Path::new(env!("CARGO_MANIFEST_DIR")).join("../images/kubernetes").join(directory);
    control_plane.kubectl(&["kustomize", images.to_str().unwrap()], "")
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
    let control_plane = ControlPlane::start(&sandbox);
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
