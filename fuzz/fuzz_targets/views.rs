//! The text of a file of views, YAML or JSON.

#![no_main]

use std::{path::Path, sync::Arc};

use cproxy_core::ResourceKind::{EndpointSlices, Nodes, Services};
use cproxy_relay_auth::{ClientView, Identity, PeerAddress, Reason, Source, Views};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let views = match Views::parse("file", text) {
        Ok(views) => views,
        Err(error) => {
            let error = error.to_string();
            assert!(error.len() > "file: ".len() && !error.contains('\n'), "{error:?} is not one line");
            return;
        }
    };
    let again = views.reparse("file", text).expect("the same text is read again");
    for (peer, identity) in clients() {
        match (views.select(&peer, &identity), again.select(&peer, &identity)) {
            (Ok(view), Ok(again)) => {
                assert!(Arc::ptr_eq(&view, &again), "{identity}: equal views are shared");
                check(&view, &identity);
            }
            (Err(refusal), Err(again)) => {
                assert_eq!(refusal, again);
                assert!(!refusal.message().contains('\n'), "{refusal:?} is not one line");
                assert!(refusal.reason() != Reason::NoNamespace || identity.namespace.is_none(), "{identity}");
            }
            (view, again) => panic!("{identity}: {view:?}, then {again:?}"),
        }
    }
});

/// Clients of each kind.
fn clients() -> Vec<(PeerAddress, Identity)> {
    let tcp = PeerAddress::Tcp(([10, 0, 0, 1], 1).into());
    let account = Identity {
        username: "system:serviceaccount:a:b".to_owned(),
        groups: vec!["system:serviceaccounts".to_owned()],
        namespace: Some("a".to_owned()),
        node_name: Some("n".to_owned()),
        source: Source::Token,
        ..Identity::anonymous()
    };
    let mut clients = vec![(tcp.clone(), account), (tcp, Identity::anonymous())];
    for peer in [PeerAddress::Vsock { cid: 3 }, PeerAddress::Unix(Path::new("/run/a").into())] {
        clients.extend(Identity::of_local_peer(&peer).map(|identity| (peer, identity)));
    }
    clients
}

/// Checks what each view shows.
fn check(view: &ClientView, identity: &Identity) {
    assert!(view.sees(Services, "default", "kubernetes", None), "{identity}: the API server");
    assert!(view.sees(EndpointSlices, "default", "x", Some("kubernetes")), "{identity}: its endpoints");
    if let Some(token) = view.token() {
        assert!(token.len() == 32 && token.bytes().all(|byte| byte.is_ascii_hexdigit()), "{token}");
        assert_eq!(view.sees(Nodes, "", "n", None), view.node() == Some("n"), "{identity}: its Node");
        // No name of a namespace is empty, so this shows all.
        assert!(!view.sees(Services, "", "x", None) || view.sees(Services, "any", "x", None), "{identity}");
    } else {
        assert!(view.sees(Services, "any", "x", None) && view.sees(Nodes, "", "x", None), "{identity}");
    }
}
