//! The text of one manifest file: YAML with any number of documents or JSON, objects or Lists of them.

use serde::de::{DeserializeSeed, Deserializer};

use super::{
    contents::{Contents, ParseOptions},
    document::DocumentReader,
};

/// Reads a file's text, document by document and item by item. `file` only names it in problems.
///
/// JSON is YAML too, but its own reader is ten times as fast.
///
/// # Errors
/// The text is neither YAML nor JSON: the first line of the parser's message.
pub fn parse(file: &str, text: &str, options: &ParseOptions) -> Result<Contents, String> {
    let json = text.trim_start().starts_with('{').then(|| Attempt::new(file, options).json(text));
    let mut contents = match json {
        Some(Ok(contents)) => contents,
        None | Some(Err(_)) => Attempt::new(file, options).yaml(text)?,
    };
    contents.shrink_to_fit();
    Ok(contents)
}

/// Contents that have been read so far. They do not count if the text is broken further on.
struct Attempt<'a> {
    file: &'a str,
    options: &'a ParseOptions,
    /// Number of documents.
    documents: usize,
    contents: Contents,
}

impl<'a> Attempt<'a> {
    fn new(file: &'a str, options: &'a ParseOptions) -> Self {
        Self { file, options, documents: 0, contents: Contents::default() }
    }

    fn json(mut self, text: &str) -> Result<Contents, serde_json::Error> {
        let mut documents = serde_json::Deserializer::from_str(text);
        while documents.end().is_err() {
            self.read_document(&mut documents)?;
        }
        Ok(self.contents)
    }

    fn yaml(mut self, text: &str) -> Result<Contents, String> {
        cproxy_yaml::each_document(text, |document| self.read_document(document))?;
        Ok(self.contents)
    }

    fn read_document<'de, D: Deserializer<'de>>(&mut self, deserializer: D) -> Result<(), D::Error> {
        let reader = DocumentReader::new(self.file, self.documents + 1, self.options);
        let document = reader.deserialize(deserializer)?;
        // Empty documents only separate others and do not count.
        self.documents += usize::from(!document.is_null());
        reader.collect(document, &mut self.contents);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use cproxy_core::{Event, ObjectName, Problem, ResourceKind};

    use super::*;
    use crate::manifests::WholeObject;

    const SERVICE: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {clusterIP: 10.0.0.1}\n";
    const SLICE: &str = "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}\nports: [{port: 80}]\n";

    /// Objects of network policies, some with mistakes.
    const POLICY_OBJECTS: &str = r#"
apiVersion: v1
kind: NamespaceList
items: [{metadata: {name: shop, labels: {team: a}}}, {metadata: {name: a.b}}]
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop}
status: {podIPs: [{ip: 10.1.0.5}]}
---
apiVersion: v1
kind: List
items:
- {apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: deny}, spec: {podSelector: {}}}
- apiVersion: networking.k8s.io/v1
  kind: NetworkPolicy
  metadata: {name: odd}
  spec: {podSelector: {}, ingress: [{ports: [{port: 70000}]}]}
- {apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: typed}, spec: {podSelector: 5}}
- {apiVersion: networking.k8s.io/v1, kind: NetworkPolicy}
- {apiVersion: v1, kind: Pod, metadata: {name: web.0}, status: {podIP: nowhere}}
"#;

    fn contents(text: &str) -> Contents {
        parse("f", text, &ParseOptions::default()).unwrap()
    }

    /// Numbers of Services, slices and problems.
    fn counts(text: &str) -> (usize, usize, usize) {
        let contents = contents(text);
        let count =
            |kind| contents.events().filter(|event| matches!(event, Event::Row(row) if row.kind() == kind)).count();
        let unreadable = contents.events().filter(|event| matches!(event, Event::Unreadable { .. })).count();
        (count(ResourceKind::Services), count(ResourceKind::EndpointSlices), unreadable + contents.problems().count())
    }

    #[test]
    fn documents_and_lists_are_read_in_every_form() {
        for (text, expected) in [
            (SERVICE.to_owned(), (1, 0, 0)),
            (format!("---\n{SERVICE}---\n{SLICE}"), (1, 1, 0)),
            (format!("# only a comment\n---\n{SERVICE}---\n"), (1, 0, 0)),
            (r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"a"}}"#.to_owned(), (1, 0, 0)),
            (
                r#"{"apiVersion":"v1","kind":"List","items":[
                    {"apiVersion":"v1","kind":"Service","metadata":{"name":"a"}},
                    {"apiVersion":"v1","kind":"Secret"},{"apiVersion":"v1","kind":"Service"}]}"#
                    .to_owned(),
                (1, 0, 2),
            ),
            (r#"{"apiVersion":"v1","kind":"ServiceList","items":[{"metadata":{"name":"a"}}]}"#.to_owned(), (1, 0, 0)),
            ("kind: Service\napiVersion: v1\nmetadata: {name: a}\nspec: {ports: [{port: high}]}".to_owned(), (0, 0, 1)),
            ("apiVersion: v1\nkind: Node\nmetadata: {name: n}".to_owned(), (0, 0, 0)),
            (POLICY_OBJECTS.to_owned(), (0, 0, 0)),
            ("just: words".to_owned(), (0, 0, 1)),
            ("a plain sentence".to_owned(), (0, 0, 1)),
            (String::new(), (0, 0, 0)),
        ] {
            assert_eq!(counts(&text), expected, "{text}");
        }
    }

    #[test]
    fn names_are_those_that_the_api_server_takes() {
        let (label, subdomain) = ("a".repeat(63), "a.".repeat(126) + "a");
        let service = |namespace: &str, name: &str| {
            format!("apiVersion: v1\nkind: Service\nmetadata: {{name: \"{name}\", namespace: \"{namespace}\"}}\n")
        };
        let slice = |name: &str| SLICE.replace("web-1", name);
        for text in [service("ns-1", "7-web"), service(&label, &label), slice("web.1"), slice(&subdomain)] {
            let (services, slices, problems) = counts(&text);
            assert_eq!((services + slices, problems), (1, 0), "{text}");
        }
        for text in [
            service("~cproxy", "canary"),
            service("a.b", "web"),
            service("Default", "web"),
            service(&(label.clone() + "a"), "web"),
            service("default", &(label.clone() + "a")),
            service("default", "web.a"),
            service("default", "-web"),
            service("default", "a/b"),
            slice("web_1"),
            slice(&(subdomain + "aa")),
        ] {
            assert_eq!(counts(&text), (0, 0, 1), "{text}");
        }
    }

    #[test]
    fn invalid_text_is_an_error_of_one_line() {
        for text in ["{", "a: [", "\t: :\n- x: {", "kind: \"Service"] {
            let error = parse("f", text, &ParseOptions::default()).unwrap_err();
            assert!(!error.is_empty() && !error.contains('\n'), "{text:?}: {error:?}");
        }
    }

    /// Summary of a list's items in the order of the file.
    fn summaries(fields: [&str; 3]) -> Vec<String> {
        let contents = contents(&format!("{{{}}}", fields.join(", ")));
        let events = contents.events().filter_map(|event| match event {
            Event::Row(row) => Some(format!("{row:?}")),
            Event::Unreadable { name, message, .. } => Some(format!("{}: {message}", name?)),
            _ => None,
        });
        events.chain(contents.problems().map(Problem::to_string)).collect()
    }

    #[test]
    fn the_fields_of_a_list_have_no_order() {
        let items = r#""items": [{"metadata": {"name": "a"}},
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "b"}, "spec": 5}, 5,
            {"items": [{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "c"}}], "kind": "List"},
            {"metadata": {"name": "d"}}, {"apiVersion": "v1", "kind": "Job"}, {"apiVersion": "v1", "kind": "Job"}]"#;
        let jobs = "kind Job (v1): not used: cproxy reads only Services, EndpointSlices and Nodes";
        let no_type =
            |index| format!("f (document 1), items[{index}]: apiVersion and kind are missing: this object is not used");
        let wrong =
            "default/b: spec: invalid type: integer `5`, expected struct ServiceSpec (f (document 1), items[1])";
        for (kind, expected) in [
            (
                r#""kind": "ServiceList""#,
                ["Service default/a", wrong, "Service default/c", "Service default/d", &no_type(2), jobs].as_slice(),
            ),
            (r#""kind": "List""#, &[wrong, "Service default/c", &no_type(0), &no_type(2), &no_type(4), jobs]),
            (
                r#""kind": "ConfigMap""#,
                &["kind ConfigMap (v1): not used: cproxy reads only Services, EndpointSlices and Nodes"],
            ),
        ] {
            let version = r#""apiVersion": "v1""#;
            for fields in [[version, kind, items], [version, items, kind], [items, kind, version]] {
                assert_eq!(summaries(fields), expected, "{fields:?}");
            }
        }
    }

    #[test]
    fn a_kind_of_another_version_is_named_with_its_location() {
        let text = "{kind: EndpointSlice, apiVersion: v1}\n---\n{kind: Service, apiVersion: v2}\n";
        let problems: Vec<_> = contents(text).problems().map(Problem::to_string).collect();
        assert_eq!(
            problems,
            [
                "f (document 1): EndpointSlice of v1 where discovery.k8s.io/v1 is used: this object is not used",
                "f (document 2): Service of v2 where v1 is used: this object is not used"
            ]
        );
    }

    #[test]
    fn objects_of_network_policies_are_kept_on_request() {
        let passed_over = contents(POLICY_OBJECTS);
        assert_eq!((passed_over.policy_objects().events().count(), passed_over.problems().count()), (0, 0));
        let options = ParseOptions { has_policies: true, ..ParseOptions::default() };
        let contents = parse("f", POLICY_OBJECTS, &options).unwrap();
        let events: Vec<_> = contents
            .policy_objects()
            .events()
            .map(|event| match event {
                cproxy_policy::Event::Namespace(namespace) => format!("{} {:?}", namespace.name, namespace.labels),
                cproxy_policy::Event::Policy(policy) => format!("policy {} {:?}", policy.name, policy.isolates),
                cproxy_policy::Event::Pod(pod) => format!("pod {} {:?}", pod.name, pod.addresses),
                other => format!("{other:?}"),
            })
            .collect();
        let isolates = "Directions { ingress: true, egress: false }";
        assert_eq!(
            events,
            [
                // No object has it, but a pod.
                r#"default {"kubernetes.io/metadata.name": "default"}"#,
                r#"shop {"kubernetes.io/metadata.name": "shop", "team": "a"}"#,
                &format!("policy default/deny {isolates}"),
                &format!("policy default/odd {isolates}"),
                "pod default/web.0 []",
                "pod shop/web [10.1.0.5]",
            ]
        );
        let problems: Vec<_> = contents.problems().map(Problem::to_string).collect();
        assert_eq!(
            problems,
            [
                "Namespace a.b: metadata.name is not of at most 63 lower-case letters, digits and inner dashes: its \
                 labels are not known, and no selector of namespaces matches it (f (document 1), items[1])",
                "NetworkPolicy default/odd: spec.ingress[0].ports[0].port: 70000 is not in 1 to 65535; it matches no \
                 port (f (document 3), items[1])",
                "NetworkPolicy default/typed: spec.podSelector: expected an object: this object is not \
                 used (f (document 3), items[2])",
                "Pod default/web.0: status.podIPs[0].ip: \"nowhere\" is no address of a host; ignored (f (document 3), \
                 items[4])",
                "f (document 3), items[3]: NetworkPolicy without metadata.name: this object is not used",
            ]
        );
    }

    #[test]
    fn only_where_policies_count_is_another_version_of_one_named() {
        let text = "{kind: NetworkPolicy, apiVersion: projectcalico.org/v3}\n---\n{kind: Secret, apiVersion: v1}\n";
        let problems = |has_policies| -> Vec<_> {
            let options = ParseOptions { has_policies, ..ParseOptions::default() };
            parse("f", text, &options).unwrap().problems().map(Problem::to_string).collect()
        };
        assert_eq!(
            problems(false),
            [
                "kind NetworkPolicy (projectcalico.org/v3): not used: cproxy reads only Services, EndpointSlices and \
                 Nodes",
                "kind Secret (v1): not used: cproxy reads only Services, EndpointSlices and Nodes",
            ]
        );
        assert_eq!(
            problems(true),
            [
                "f (document 1): NetworkPolicy of projectcalico.org/v3 where networking.k8s.io/v1 is used: this \
                 object is not used",
                "kind Secret (v1): not used: cproxy reads only Services, EndpointSlices, Nodes, NetworkPolicies, Pods \
                 and Namespaces",
            ]
        );
    }

    #[test]
    fn a_list_with_items_twice_is_refused() {
        for text in [r#"{"kind": "List", "items": [], "items": []}"#, "kind: List\nitems: []\nitems: []\n"] {
            assert!(parse("f", text, &ParseOptions::default()).is_err(), "{text}");
        }
    }

    #[test]
    fn nothing_of_a_file_counts_that_is_broken_further_on() {
        let service = r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"a"}}"#;
        for text in [format!(r#"{{"kind":"List","items":[{service},"#), format!("{service}\n{{")] {
            assert!(parse("f", &text, &ParseOptions::default()).is_err(), "{text}");
        }
        // The text is valid YAML.
        let twice = format!("{{kind: List, items: [{service}]}}");
        assert_eq!(counts(&format!("{service}\n---\n{twice}")), (2, 0, 0));
    }

    /// A few hundred bytes must not take seconds and most of a microVM's memory.
    #[test]
    fn repeated_aliases_are_bounded() {
        let bomb = |levels: u8| {
            let name = |level: u8| char::from(b'a' + level);
            let list = |item: &str| [item; 9].join(",");
            let level = |n: u8| format!("{}: &{} [{}]\n", name(n), name(n), list(&format!("*{}", name(n - 1))));
            format!("a: &a [{}]\n{}", list("x"), (1..levels).map(level).collect::<String>())
        };
        assert!(parse("f", &bomb(3), &ParseOptions::default()).is_ok());
        let error = parse("f", &bomb(6), &ParseOptions::default()).unwrap_err();
        assert!(error.contains("budget") && !error.contains('\n'), "{error}");
    }

    #[test]
    fn a_port_without_a_name_is_the_unnamed_port() {
        let options =
            ParseOptions { whole_service: Some(ObjectName::new("default", "web")), ..ParseOptions::default() };
        let contents = parse("f", SLICE, &options).unwrap();
        let whole: Vec<_> = contents.whole_objects().into_values().collect();
        let [WholeObject::Slice(slice)] = whole[..] else { panic!("{whole:?}") };
        assert_eq!(slice.ports[0].name.as_deref(), Some(""));
    }

    #[test]
    fn nested_lists_are_bounded() {
        let mut text = "{}".to_owned();
        for _ in 0..40 {
            text = format!(r#"{{"kind":"List","items":[{text}]}}"#);
        }
        assert_eq!(counts(&text), (0, 0, 1));
    }
}
