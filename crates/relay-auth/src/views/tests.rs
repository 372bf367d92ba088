//! Views of a file, beside a naive reading of it.

use std::{collections::BTreeSet, path::Path};

use cproxy_core::ResourceKind::{EndpointSlices, Nodes, Services};
use proptest::{prelude::*, sample::Index};
use serde_json::json;

use super::*;
use crate::Source;

fn user(username: &str, groups: &[&str]) -> Identity {
    let groups = groups.iter().map(|&group| group.to_owned()).collect();
    Identity::new(username.to_owned(), groups, Source::Token).unwrap()
}

fn tcp() -> PeerAddress {
    PeerAddress::Tcp(([10, 0, 0, 1], 1).into())
}

fn unix(path: &str) -> PeerAddress {
    PeerAddress::Unix(Path::new(path).into())
}

fn views(text: &str) -> Views {
    Views::parse("views.yaml", text).unwrap()
}

fn error(text: &str) -> String {
    Views::parse("views.yaml", text).unwrap_err().to_string()
}

/// The example of the documentation.
fn documented() -> Views {
    let text = include_str!("../../../../docs/relay-views.md");
    let (_, example) = text.split_once("```yaml\n").unwrap();
    views(example.split_once("```").unwrap().0)
}

#[test]
fn the_documented_example_shows_what_it_says() {
    let views = documented();
    let select = |peer: &PeerAddress, identity: &Identity| views.select(peer, identity);

    let node = select(&tcp(), &user("system:node:n1", &["system:nodes"])).unwrap();
    assert!(node.sees(Services, "any", "x", None) && node.sees(EndpointSlices, "any", "x", None));
    assert!(node.sees(Nodes, "", "n1", None) && !node.sees(Nodes, "", "n2", None));

    let tenant = select(&tcp(), &user("system:serviceaccount:tenant-a:web", &[])).unwrap();
    let peers = [PeerAddress::Vsock { cid: 3 }, PeerAddress::Vsock { cid: 20 }, unix("/run/vm/a-1/v.sock_6443")];
    for peer in peers {
        let local = select(&peer, &Identity::of_local_peer(&peer).unwrap()).unwrap();
        assert!(Arc::ptr_eq(&tenant, &local), "{peer}");
    }
    for (namespace, name, is_seen) in [
        ("tenant-a", "web", true),
        ("shared", "db", true),
        ("tenant-b", "web", false),
        ("default", "kubernetes", true),
        ("default", "other", false),
        ("kube-system", "kube-dns", true),
        ("kube-system", "other", false),
    ] {
        assert_eq!(tenant.sees(Services, namespace, name, None), is_seen, "{namespace}/{name}");
        assert_eq!(tenant.sees(EndpointSlices, namespace, "x", Some(name)), is_seen, "slice of {namespace}/{name}");
    }
    assert!(!tenant.sees(EndpointSlices, "default", "kubernetes", None));
    assert_eq!(tenant.node(), Some("node-1"));

    let own = select(&tcp(), &user("system:serviceaccount:b:web", &["system:serviceaccounts"])).unwrap();
    assert!(own.sees(Services, "b", "x", None) && !own.sees(Services, "tenant-a", "x", None));
    assert!(!own.sees(Nodes, "", "node-1", None));

    for (peer, identity) in [(tcp(), user("alice", &[])), (PeerAddress::Vsock { cid: 9 }, Identity::anonymous())] {
        let refusal = select(&peer, &identity).unwrap_err();
        assert_eq!((refusal.status(), refusal.reason()), (403, Reason::NoView));
    }
}

#[test]
fn a_refusal_names_the_client_and_the_remedy() {
    let message = |peer: &PeerAddress, identity| documented().select(peer, &identity).unwrap_err().to_string();
    assert_eq!(
        message(&tcp(), user("alice", &[])),
        "no view of the relay matches user \"alice\" at 10.0.0.1:1; add one that does to its file of views, or \
         `default: everything`"
    );
    let guest = PeerAddress::Vsock { cid: 9 };
    let identity = Identity::of_local_peer(&guest).unwrap();
    assert!(message(&guest, identity.clone()).starts_with("no view of the relay matches vsock 9; "));

    let own = views("views: [{name: own, match: {vsockCIDs: [9]}, namespaces: [own, a]}]");
    let refusal = own.select(&guest, &identity).unwrap_err();
    assert_eq!((refusal.status(), refusal.reason()), (403, Reason::NoNamespace));
    assert!(refusal.message().starts_with("view \"own\" shows a ServiceAccount's own namespace, but vsock 9 is none"));
}

#[test]
fn without_a_file_all_is_seen() {
    let (views, peer) = (Views::everything(), PeerAddress::Vsock { cid: 3 });
    let view = views.select(&peer, &Identity::anonymous()).unwrap();
    assert!(Arc::ptr_eq(&view, &ClientView::everything()));
    assert_eq!((view.token(), view.node()), (None, None));
    assert!(view.sees(Nodes, "", "n", None) && view.sees(Services, "a", "b", None));
}

/// A name of a local peer is no user, or a file would admit it by accident.
#[test]
fn patterns_of_users_do_not_match_local_peers() {
    let views = views(r#"views: [{name: a, match: {usernames: ["*"], groups: ["*"]}, namespaces: all}]"#);
    let peer = PeerAddress::Vsock { cid: 3 };
    assert!(views.select(&peer, &Identity::of_local_peer(&peer).unwrap()).is_err());
    assert!(views.select(&peer, &user("a", &[])).is_ok());
}

#[test]
fn tokens_are_of_the_content() {
    let view = |entry: &str, identity: &Identity| {
        let text = format!(r#"views: [{{name: x, match: {{usernames: ["*"]}}, {entry}}}]"#);
        views(&text).select(&tcp(), identity).unwrap()
    };
    let token = |entry: &str| view(entry, &user("system:serviceaccount:a:b", &[])).token().unwrap().to_owned();
    let same = token("namespaces: [a, b]");
    for entry in ["namespaces: [b, a, b]", "namespaces: [b, own]", "namespaces: [own, b, a]"] {
        assert_eq!(token(entry), same, "{entry}");
    }
    let others = [
        "namespaces: [a]",
        "namespaces: []",
        "namespaces: all",
        "namespaces: [ab]",
        "namespaces: [a, b], node: n",
        "namespaces: [a, b, kube-system]",
    ];
    let tokens: BTreeSet<_> = others.into_iter().map(token).chain([same.clone()]).collect();
    assert_eq!(tokens.len(), 7);
    // Other relays, and other versions, must compute the same.
    assert_eq!(same, "70535558a01174876fb6bf2a64c3cf76");
    assert!(tokens.iter().all(|token| token.len() == 32));
}

#[test]
fn a_new_file_keeps_the_views_that_are_the_same() {
    let text = |node| {
        format!(
            "views: [{{name: a, match: {{vsockCIDs: [3]}}, namespaces: [a]}}, {{name: b, match: {{groups: [x]}}, \
                 namespaces: all, node: {node}}}]"
        )
    };
    let (old, guest) = (views(&text("n1")), PeerAddress::Vsock { cid: 3 });
    let new = old.reparse("views.yaml", &text("n2")).unwrap();
    let [before, after] = [&old, &new].map(|views| views.select(&guest, &Identity::anonymous()).unwrap());
    assert!(Arc::ptr_eq(&before, &after));
    let [before, after] = [&old, &new].map(|views| views.select(&tcp(), &user("a", &["x"])).unwrap());
    assert_ne!(before.token(), after.token());
}

#[test]
fn json_is_read_too() {
    let text = r#"{"views": [{"name": "\ud83d\ude00", "match": {"unixPaths": ["\/run\/*"]}, "namespaces": ["a"]}]}"#;
    assert!(views(text).select(&unix("/run/a"), &Identity::anonymous()).is_ok());
    assert!(error(r#"{"views": [{"name": 5}"#).starts_with("views.yaml: "));
}

#[test]
fn an_error_names_file_place_and_remedy() {
    let unused = "it has no pattern, so no client would match; add one to `usernames`, `groups`, `vsockCIDs` or \
                  `unixPaths`";
    let none = "there is no view, so every client would be refused; add one to `views`, or write `default: everything`";
    let no_cid = r#"is neither a context id such as 3 nor a range such as "10-20""#;
    for (text, expected) in [
        ("", "NONE"),
        ("# nothing", "NONE"),
        ("default: refuse", "NONE"),
        ("views: [", "line 1, column 8: views: unclosed bracket '['"),
        ("5", "line 1, column 1: expected mapping start"),
        ("default: all", "line 1, column 10: default: unknown variant `all`, expected one of refuse, everything"),
        ("a: refuse", "line 1, column 1: a: unknown field `a`, expected one of default, dns, views"),
        ("default: everything\n---\na: b", "line 3, column 1: only single YAML document expected but multiple found"),
        (r#""a\nb": refuse"#, "line 1, column 1: a b: unknown field `a\\nb`, expected one of default, dns, views"),
        ("dns: []\ndns: []", "line 2, column 1: duplicate mapping key: dns not allowed here"),
        (
            "dns: [kube-dns]",
            "line 1, column 7: dns[0]: \"kube-dns\" is not the name of a Service; write NAMESPACE/NAME",
        ),
        ("views:\n- match: {groups: [x]}\n  namespaces: [a]", "line 3, column 3: views[0]: missing field `name`"),
        ("views:\n- name: a\n  namespaces: [a]", "line 3, column 3: views[0]: missing field `match`"),
        (
            "views:\n- name: ''\n  match: {groups: [x]}\n  namespaces: all",
            "line 2, column 3: views[0]: the view's name is empty; log messages need one",
        ),
        (
            "views:\n- &a {name: a, match: {groups: [x]}, namespaces: all}\n- *a",
            "views[0] and views[1] are both named \"a\"; rename one",
        ),
        (&in_match(""), "line 3, column 10: views[0].match: UNUSED"),
        (&in_match("groups: []"), "line 3, column 10: views[0].match: UNUSED"),
        (&in_match("groups:"), "line 3, column 10: views[0].match: UNUSED"),
        (&in_match("groups: x"), "line 3, column 19: views[0].match.groups: expected a list, such as [x]"),
        (
            &in_match("groups: ['']"),
            "line 3, column 20: views[0].match.groups[0]: a pattern is empty; `*` matches everything",
        ),
        (&in_match("vsockCIDs: [3, x]"), "line 3, column 26: views[0].match.vsockCIDs[1]: \"x\" NO_CID"),
        (&in_match("vsockCIDs: [-1]"), "line 3, column 23: views[0].match.vsockCIDs[0]: \"-1\" NO_CID"),
        (&in_match("vsockCIDs: [9-3]"), "line 3, column 23: views[0].match.vsockCIDs[0]: \"9-3\" NO_CID"),
        (
            &in_match("unixPaths: [run/a]"),
            "line 3, column 23: views[0].match.unixPaths[0]: \"run/a\" matches no path; begin with / or *",
        ),
        (
            &with("namespace: [a]"),
            "line 4, column 3: views[0].namespace: unknown field `namespace`, expected one of name, match, \
             namespaces, node, policy",
        ),
        (
            &with("namespaces: a"),
            "line 4, column 15: views[0].namespaces: \"a\" is neither `all` nor a list of namespaces; write [a] for \
             one",
        ),
        (
            &with("namespaces:"),
            "line 4, column 3: views[0].namespaces: invalid type: unit value, expected `all`, or a list of \
             namespaces such as [tenant-a, own]",
        ),
        (
            &with("namespaces: [all]"),
            "line 4, column 16: views[0].namespaces[0]: `all` is not for a list; write `namespaces: all`",
        ),
        (
            &with("namespaces: ['a-*']"),
            "line 4, column 16: views[0].namespaces[0]: \"a-*\" is not the name of a namespace, and patterns are \
             only for `match`",
        ),
        (&with("namespaces: all\n  node: A_B"), "line 5, column 9: views[0].node: \"A_B\" is not the name of a Node"),
    ] {
        let expected = expected.replace("NONE", none).replace("UNUSED", unused).replace("NO_CID", no_cid);
        assert_eq!(error(text), format!("views.yaml: {expected}"), "{text:?}");
    }
}

/// A view with these patterns.
fn in_match(patterns: &str) -> String {
    format!("views:\n- name: a\n  match: {{{patterns}}}\n  namespaces: [a]")
}

/// A view with these fields after its patterns.
fn with(fields: &str) -> String {
    format!("views:\n- name: a\n  match: {{groups: [x]}}\n  {fields}")
}

/// A few hundred bytes must not take seconds.
#[test]
fn repeated_aliases_are_bounded() {
    let list = |item: &str| [item; 9].join(",");
    let levels: Vec<_> = (b'b'..b'i')
        .map(|level| {
            let (name, before) = (char::from(level), char::from(level - 1));
            format!("{name}: &{name} [{}]\n", list(&format!("*{before}")))
        })
        .collect();
    assert!(Views::parse("f", &format!("a: &a [{}]\n{}", list("x"), levels.concat())).is_err());
    assert!(Views::parse("f", &" ".repeat(5 << 20)).unwrap_err().to_string().contains("bytes"));
}

/// A file, as data.
#[derive(Clone, Debug)]
struct AnyFile {
    shows_everything: bool,
    dns: Option<Vec<(String, String)>>,
    entries: Vec<AnyEntry>,
}

#[derive(Clone, Debug)]
struct AnyEntry {
    usernames: Vec<String>,
    groups: Vec<String>,
    cids: Vec<(u32, u32)>,
    paths: Vec<String>,
    /// `None`: all.
    namespaces: Option<Vec<String>>,
    node: Option<String>,
}

fn word() -> impl Strategy<Value = String> {
    "[ab]{1,2}"
}

fn words(pattern: &'static str) -> impl Strategy<Value = Vec<String>> {
    proptest::collection::vec(pattern, 0..3)
}

prop_compose! {
    fn any_entry()(
        usernames in words(r"[ab*]{1,3}|system:serviceaccount:[ab*]:\*"),
        groups in words("[ab*]{1,2}"),
        cids in proptest::collection::vec((0..6_u32, 0..6_u32), 0..2),
        paths in words(r"/[ab*]{1,2}"),
        namespaces in proptest::option::weighted(0.8, words("[ab]|own")),
        node in proptest::option::of(word()),
    ) -> AnyEntry {
        let cids: Vec<_> = cids.into_iter().map(|(a, b)| (a.min(b), a.max(b))).collect();
        let is_empty = usernames.is_empty() && groups.is_empty() && cids.is_empty() && paths.is_empty();
        let groups = if is_empty { vec!["a".to_owned()] } else { groups };
        AnyEntry { usernames, groups, cids, paths, namespaces, node }
    }
}

prop_compose! {
    fn any_file()(
        shows_everything: bool,
        dns in proptest::option::of(proptest::collection::vec((word(), word()), 0..3)),
        entries in proptest::collection::vec(any_entry(), 1..4),
    ) -> AnyFile {
        AnyFile { shows_everything, dns, entries }
    }
}

fn any_peer() -> impl Strategy<Value = PeerAddress> {
    prop_oneof![
        Just(tcp()),
        "/[ab]{1,2}".prop_map(|path| unix(&path)),
        (0..6_u32).prop_map(|cid| PeerAddress::Vsock { cid }),
    ]
}

prop_compose! {
    fn any_identity()(
        username in "[ab]{1,3}|system:serviceaccount:[ab]:[ab]|system:node:[ab]",
        groups in words("[ab]{1,2}|system:nodes"),
        node in proptest::option::of(word()),
    ) -> Identity {
        let mut identity = Identity::new(username, groups, Source::Token).unwrap();
        identity.node_name = node.or(identity.node_name);
        identity
    }
}

impl AnyFile {
    fn text(&self, is_json: bool) -> String {
        let entries = self.entries.iter().enumerate().map(|(index, entry)| {
            let cids = entry
                .cids
                .iter()
                .map(|(first, last)| if first == last { json!(first) } else { json!(format!("{first}-{last}")) });
            let mut object = json!({
                "name": format!("view-{index}"),
                "match": {
                    "usernames": entry.usernames,
                    "groups": entry.groups,
                    "vsockCIDs": cids.collect::<Vec<_>>(),
                    "unixPaths": entry.paths,
                },
                "namespaces": entry.namespaces.as_ref().map_or(json!("all"), |listed| json!(listed)),
            });
            if let Some(node) = &entry.node {
                object["node"] = json!(node);
            }
            object
        });
        let default = if self.shows_everything { "everything" } else { "refuse" };
        let mut file = json!({ "default": default, "views": entries.collect::<Vec<_>>() });
        if let Some(dns) = &self.dns {
            file["dns"] = dns.iter().map(|(namespace, name)| json!(format!("{namespace}/{name}"))).collect();
        }
        // A comment makes it YAML only.
        if is_json { file.to_string() } else { format!("# views\n{file}") }
    }

    fn entry(&self, peer: &PeerAddress, identity: &Identity) -> Option<&AnyEntry> {
        self.entries.iter().find(|entry| {
            let is_place = match peer {
                PeerAddress::Tcp(_) => false,
                PeerAddress::Unix(path) => entry.paths.iter().any(|glob| naive_glob(glob, path.to_str().unwrap())),
                PeerAddress::Vsock { cid } => entry.cids.iter().any(|(first, last)| first <= cid && cid <= last),
            };
            let is_user = entry.usernames.iter().any(|glob| naive_glob(glob, &identity.username));
            let is_in_group =
                entry.groups.iter().any(|glob| identity.groups.iter().any(|group| naive_glob(glob, group)));
            is_place || is_user || is_in_group
        })
    }
}

fn naive_glob(glob: &str, text: &str) -> bool {
    match glob.split_at_checked(1) {
        None => text.is_empty(),
        Some(("*", glob)) => (0..=text.len()).any(|length| naive_glob(glob, &text[length..])),
        Some((letter, glob)) => text.strip_prefix(letter).is_some_and(|text| naive_glob(glob, text)),
    }
}

/// Whether the first view that matches shows a Service or Node; a slice by its Service.
fn naive_sees(file: &AnyFile, entry: &AnyEntry, identity: &Identity, object: (bool, &str, &str)) -> bool {
    let (is_node, namespace, name) = object;
    if is_node {
        return entry.node.as_ref().or(identity.node_name.as_ref()).is_some_and(|node| node == name);
    }
    let is_listed = |listed: &String| match listed.as_str() {
        "own" => identity.namespace.as_deref() == Some(namespace),
        listed => listed == namespace,
    };
    let is_dns = match &file.dns {
        None => (namespace, name) == ("kube-system", "kube-dns"),
        Some(dns) => dns.iter().any(|service| service.0 == namespace && service.1 == name),
    };
    entry.namespaces.as_ref().is_none_or(|all| all.iter().any(is_listed))
        || is_dns
        || (namespace, name) == ("default", "kubernetes")
}

/// All objects that a property looks at: kind, namespace, name.
fn objects() -> Vec<(bool, &'static str, &'static str)> {
    let names = ["a", "b", "ab", "ba", "aa", "bb", "kubernetes", "kube-dns"];
    let namespaces = ["a", "b", "ab", "ba", "aa", "bb", "own", "default", "kube-system"];
    let namespaced = namespaces.iter().flat_map(|namespace| names.map(|name| (false, *namespace, name)));
    namespaced.chain(names.map(|name| (true, "", name))).collect()
}

proptest! {
    #[test]
    fn the_first_view_that_matches_counts(
        file in any_file(),
        clients in proptest::collection::vec((any_peer(), any_identity()), 1..8),
        is_json: bool,
        pair: (Index, Index),
    ) {
        let views = Views::parse("f", &file.text(is_json)).unwrap();
        let mut selected = Vec::new();
        for (peer, identity) in &clients {
            let Some(entry) = file.entry(peer, identity) else {
                let shows_everything = views.select(peer, identity).is_ok_and(|view| view.token().is_none());
                prop_assert_eq!(shows_everything, file.shows_everything);
                continue;
            };
            let shows_own = entry.namespaces.iter().flatten().any(|listed| listed == "own");
            if shows_own && identity.namespace.is_none() {
                prop_assert_eq!(views.select(peer, identity).unwrap_err().reason(), Reason::NoNamespace);
                continue;
            }
            let view = views.select(peer, identity).unwrap();
            let mut seen = Vec::new();
            for object in objects() {
                let expected = naive_sees(&file, entry, identity, object);
                let (is_node, namespace, name) = object;
                if is_node {
                    prop_assert_eq!(view.sees(Nodes, namespace, name, None), expected, "Node {}", name);
                } else {
                    prop_assert_eq!(view.sees(Services, namespace, name, None), expected, "{}/{}", namespace, name);
                    prop_assert_eq!(view.sees(EndpointSlices, namespace, "x", Some(name)), expected);
                    prop_assert!(expected || !view.sees(EndpointSlices, namespace, name, None));
                }
                seen.push(expected);
            }
            selected.push((view, seen));
        }
        if !selected.is_empty() {
            let ((a, seen_by_a), (b, seen_by_b)) = (pair.0.get(&selected), pair.1.get(&selected));
            prop_assert_eq!(Arc::ptr_eq(a, b), a.token() == b.token());
            prop_assert!(a.token() != b.token() || seen_by_a == seen_by_b);
            prop_assert_eq!(a.token() == b.token(), a.shown() == b.shown());
        }
    }
}
