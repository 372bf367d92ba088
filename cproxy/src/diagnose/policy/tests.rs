//! Answers about a small cluster.

use std::fmt::Write as _;

use super::*;
use crate::manifests::{Contents, ParseOptions, parse};

/// Pods of three namespaces, of which `jobs` and `lone` have no object.
const CLUSTER: &str = "
{apiVersion: v1, kind: Namespace, metadata: {name: shop, labels: {team: a}}}
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, labels: {app: web}}
spec:
  nodeName: n1
  containers: [{ports: [{name: http, containerPort: 8080}, {name: dns, containerPort: 53, protocol: UDP}]}]
status: {podIPs: [{ip: 10.1.0.1}, {ip: 'fd00::1'}], hostIPs: [{ip: 192.168.0.1}]}
---
apiVersion: v1
kind: Pod
metadata: {name: db, namespace: jobs, labels: {app: db}}
spec: {containers: [{ports: [{name: pg, containerPort: 5432}]}]}
status: {podIPs: [{ip: 10.1.0.2}, {ip: 'fd00::2'}]}
---
{apiVersion: v1, kind: Pod, metadata: {name: v6, namespace: lone}, status: {podIP: 'fd00::3'}}
---
{apiVersion: v1, kind: Pod, metadata: {name: pending, namespace: lone}}
---
{apiVersion: v1, kind: Pod, metadata: {name: ended, namespace: lone}, status: {phase: Failed, podIP: 10.1.0.9}}
---
{apiVersion: v1, kind: Pod, metadata: {name: odd, namespace: lone}, status: 5}
---
{apiVersion: v1, kind: Pod, metadata: {name: agent, namespace: lone, labels: {app: web}}, spec: {hostNetwork: true},
 status: {podIP: 192.168.0.1, hostIPs: [{ip: 192.168.0.1}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: young, namespace: lone, creationTimestamp: '2026-01-02T00:00:00Z'},
 status: {podIP: 10.1.0.4}}
---
{apiVersion: v1, kind: Pod, metadata: {name: old, namespace: lone, creationTimestamp: '2026-01-01T00:00:00Z'},
 status: {podIP: 10.1.0.4}}
";

const DENY_ALL: &str =
    "{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: deny, namespace: jobs},
 spec: {podSelector: {}, policyTypes: [Ingress, Egress]}}";

/// A policy of the namespace `jobs` with these rules for ingress.
fn ingress(name: &str, rules: &str) -> String {
    format!(
        "{{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {{name: {name}, namespace: jobs}}, \
         spec: {{podSelector: {{}}, ingress: {rules}}}}}"
    )
}

/// A policy of the namespace `shop` with these rules for egress alone.
fn egress(name: &str, rules: &str) -> String {
    format!(
        "{{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {{name: {name}, namespace: shop}}, \
         spec: {{podSelector: {{}}, policyTypes: [Egress], egress: {rules}}}}}"
    )
}

fn contents(policies: &[String]) -> Contents {
    let text = [&[CLUSTER.to_owned()], policies].concat().join("\n---\n");
    parse("f", &text, &ParseOptions { has_policies: true, ..ParseOptions::default() }).unwrap()
}

fn judgement(policies: &[String], from: &str, to: &str) -> Result<Judgement, String> {
    judge(&contents(policies).policy_objects(), &from.parse().unwrap(), &to.parse().unwrap())
}

/// The verdict, and the causes of both sides for each pair of addresses.
fn summary(policies: &[String], from: &str, to: &str) -> String {
    let answer = match judgement(policies, from, to) {
        Ok(Judgement { answer, .. }) => answer,
        Err(error) => return error,
    };
    let mut text = answer.verdict.clone();
    for pair in &answer.pairs {
        let [egress, ingress] = [&pair.egress, &pair.ingress].map(|side| {
            side.as_ref().map_or("-".to_owned(), |side| {
                let rule = side.rule.map_or(String::new(), |rule| format!(" {rule}"));
                side.code.clone() + &side.policy.as_ref().map_or(String::new(), |policy| format!(" {policy}{rule}"))
            })
        });
        write!(text, "; {egress} > {ingress}").unwrap();
    }
    text
}

#[test]
fn each_side_says_what_decides() {
    let deny = DENY_ALL.to_owned();
    let all = ingress("all", "[{}]");
    let by_name = ingress("by-name", "[{from: [{ipBlock: {cidr: 9.0.0.0/8}}]}, {ports: [{port: pg}]}]");
    for (policies, from, to, expected) in [
        (vec![], "shop/web", "jobs/db:80", "allowed; not-isolated > not-isolated; not-isolated > not-isolated"),
        (vec![deny.clone()], "shop/web", "jobs/db:80", "denied; not-isolated > no-rule; not-isolated > no-rule"),
        (vec![deny.clone()], "jobs/db", "lone/v6:80", "denied; no-rule > not-isolated"),
        (vec![deny.clone(), all], "9.9.9.9", "jobs/db:80/sctp", "allowed; - > rule NetworkPolicy jobs/all 0"),
        (
            vec![deny.clone(), by_name.clone()],
            "lone/v6",
            "jobs/db:pg",
            "allowed; not-isolated > rule NetworkPolicy jobs/by-name 1",
        ),
        (vec![deny.clone(), by_name], "lone/v6", "jobs/db:5432/udp", "denied; not-isolated > no-rule"),
        (vec![deny.clone()], "jobs/db", "jobs/db:80", "allowed; itself > itself; itself > itself"),
        (vec![deny.clone()], "jobs/db", "8.8.8.8:53/udp", "denied; no-rule > -"),
        (vec![deny.clone()], "8.8.8.8", "jobs/db:53/udp", "denied; - > no-rule"),
        (vec![deny], "fd00::1", "[fd00::2]:53", "denied; not-isolated > no-rule"),
    ] {
        assert_eq!(summary(&policies, from, to), expected, "{from} {to} {policies:?}");
    }
}

#[test]
fn the_own_node_and_pods_in_it_are_told_apart() {
    let policies = [egress("none", "[]"), ingress("none", "[]")];
    let only_web = ingress("web", "[{from: [{podSelector: {matchLabels: {app: web}}, namespaceSelector: {}}]}]");
    for (policies, from, to, expected) in [
        (&policies[..], "192.168.0.1", "shop/web:80", "allowed; - > own-node"),
        (&policies, "shop/web", "192.168.0.1:80", "allowed; own-node > -"),
        (&policies, "shop/web", "lone/agent:80", "allowed; own-node > host-network"),
        (&policies, "lone/agent", "jobs/db:80", "denied; host-network > no-rule"),
        // Its labels do not count.
        (&[only_web], "lone/agent", "jobs/db:80", "denied; host-network > no-rule"),
    ] {
        assert_eq!(summary(policies, from, to), expected, "{from} {to}");
    }
}

#[test]
fn addresses_of_one_family_are_compared() {
    let v4 = [ingress("v4", "[{from: [{ipBlock: {cidr: 10.0.0.0/8}}]}]")];
    let answer = judgement(&v4, "shop/web", "jobs/db:80").unwrap().answer;
    assert_eq!(
        answer.text(),
        "mixed: shop/web to jobs/db:80/TCP\n\n\
         FROM       TO         SIDE      POD        VERDICT   WHY\n\
         10.1.0.1   10.1.0.2   egress    shop/web   allowed   no NetworkPolicy isolates the pod for egress\n\
         10.1.0.1   10.1.0.2   ingress   jobs/db    allowed   NetworkPolicy jobs/v4, ingress rule 0\n\
         fd00::1    fd00::2    egress    shop/web   allowed   no NetworkPolicy isolates the pod for egress\n\
         fd00::1    fd00::2    ingress   jobs/db    denied    no rule of NetworkPolicy jobs/v4 allows it\n"
    );
    assert!(!answer.is_allowed());
    assert_eq!(
        summary(&[], "lone/young", "lone/v6:80"),
        "--from lone/young --to lone/v6:80/TCP: they have no addresses of one family"
    );
    assert_eq!(
        summary(&[], "9.9.9.9", "lone/v6:80"),
        "--from 9.9.9.9 --to lone/v6:80/TCP: they have no addresses of one family"
    );
}

#[test]
fn the_younger_of_two_pods_has_their_address() {
    let policies = [ingress("young", "[{from: [{namespaceSelector: {}}]}]")];
    let note = "10.1.0.4 is an address of Pod lone/young, too, and rules take it for that pod's";
    let answer = |from: &str| judgement(&policies, from, "10.1.0.2:80").unwrap().answer;
    assert_eq!(answer("lone/old").notes, [note, "10.1.0.2 is the address of Pod jobs/db"]);
    assert_eq!(answer("lone/young").notes, ["10.1.0.2 is the address of Pod jobs/db"]);
    let by_address = answer("10.1.0.4");
    assert_eq!(by_address.from, "lone/young");
    assert_eq!(
        by_address.text(),
        "allowed: lone/young to jobs/db:80/TCP\n\n\
         SIDE      POD          VERDICT   WHY\n\
         egress    lone/young   allowed   no NetworkPolicy isolates the pod for egress\n\
         ingress   jobs/db      allowed   NetworkPolicy jobs/young, ingress rule 0\n\n\
         10.1.0.4 is the address of Pod lone/young\n10.1.0.2 is the address of Pod jobs/db\n"
    );
}

#[test]
fn a_namespace_without_an_object_has_the_label_of_its_name() {
    let from = |selector: &str| ingress("by-namespace", &format!("[{{from: [{{namespaceSelector: {selector}}}]}}]"));
    for (selector, is_shop, is_lone) in [
        ("{}", true, true),
        ("{matchLabels: {team: a}}", true, false),
        ("{matchLabels: {kubernetes.io/metadata.name: shop}}", true, false),
        ("{matchLabels: {kubernetes.io/metadata.name: lone}}", false, true),
        ("{matchExpressions: [{key: team, operator: DoesNotExist}]}", false, true),
    ] {
        let policies = [from(selector)];
        let is_allowed = |pod: &str| judgement(&policies, pod, "[fd00::2]:80").unwrap().answer.is_allowed();
        assert_eq!((is_allowed("shop/web"), is_allowed("lone/v6")), (is_shop, is_lone), "{selector}");
    }
    // Labels that cannot be read are not known.
    let unreadable = "{apiVersion: v1, kind: Namespace, metadata: {name: lone, labels: 5}}".to_owned();
    let answer = judgement(&[from("{}"), unreadable], "lone/v6", "jobs/db:80").unwrap().answer;
    assert!(!answer.is_allowed());
}

#[test]
fn a_mistake_closes_only_itself() {
    let odd = ingress(
        "odd",
        "[{from: [{ipBlock: {cidr: 10.1.0.77/24, except: [10.2.0.0/16]}}]}, {from: [{ipBlock: {cidr: 10.1.0.77/30}}], \
         ports: [{port: 70000}, {port: 80, protocol: ICMP}, {port: 81}]}, {from: [{podSelector: {matchExpressions: \
         [{key: app, operator: Near}]}}]}, {from: [{ipBlock: {cidr: 10.1.0.3/24}}], ports: [{port: 82}]}]",
    );
    let policies = [odd, ingress("typed", "5")];
    for (to, expected) in [
        ("10.1.0.2:80", "denied; not-isolated > no-rule"),
        ("10.1.0.2:81", "denied; not-isolated > no-rule"),
        ("10.1.0.2:82", "allowed; not-isolated > rule NetworkPolicy jobs/odd 3"),
    ] {
        assert_eq!(summary(&policies, "shop/web", to), expected);
    }
    let contents = contents(&policies);
    let problems: Vec<_> = contents.problems().filter(|problem| problem.object.starts_with("NetworkPolicy")).collect();
    let fields: Vec<_> = problems.iter().map(|problem| &*problem.field).collect();
    assert_eq!(
        fields,
        [
            "spec.ingress[0].from[0].ipBlock.cidr",
            "spec.ingress[0].from[0].ipBlock.except[0]",
            "spec.ingress[1].from[0].ipBlock.cidr",
            "spec.ingress[1].ports[0].port",
            "spec.ingress[1].ports[1].protocol",
            "spec.ingress[2].from[0].podSelector",
            "spec.ingress[3].from[0].ipBlock.cidr",
            "",
        ]
    );
    assert!(problems.iter().all(|problem| problem.message.contains("(f (document 1")), "{problems:?}");
}

#[test]
fn objects_that_cannot_be_used_and_might_change_the_verdict_are_named() {
    let policy = |version: &str, metadata: &str| {
        let spec = "{podSelector: {}}";
        format!("{{apiVersion: {version}, kind: NetworkPolicy, metadata: {metadata}, spec: {spec}}}")
    };
    let v1 = |metadata: &str| policy("networking.k8s.io/v1", metadata);
    let nested = |depth: usize| {
        let item = v1("{name: deep, namespace: jobs}");
        (0..depth).fold(item, |item, _| format!("{{apiVersion: v1, kind: List, items: [{item}]}}"))
    };
    for (object, expected) in [
        (v1("{name: good, namespace: jobs}"), None),
        (nested(4), None),
        (v1("{name: number, namespace: jobs, labels: {a: 1}}"), Some("NetworkPolicy jobs/number")),
        (v1("{name: elsewhere, namespace: other, labels: {a: 1}}"), None),
        (v1("{name: default, labels: {a: 1}}"), None),
        (v1("{name: unknown, namespace: 5}"), Some("NetworkPolicy unknown")),
        (v1("{namespace: jobs}"), Some("a NetworkPolicy")),
        (v1("{name: 5, namespace: shop}"), Some("a NetworkPolicy")),
        (v1("{namespace: other}"), None),
        (policy("extensions/v1beta1", "{name: old, namespace: jobs}"), Some("a NetworkPolicy")),
        (policy("projectcalico.org/v3", "{name: another, namespace: jobs}"), None),
        (policy("''", "{name: none, namespace: jobs}"), Some("a NetworkPolicy")),
        (nested(5), Some("a NetworkPolicy")),
        ("{apiVersion: v1, kind: Namespace, metadata: {name: jobs, labels: {a: 1}}}".into(), Some("Namespace jobs")),
        ("{apiVersion: v1, kind: Namespace, metadata: {name: other, labels: {a: 1}}}".into(), None),
        ("{apiVersion: v1, kind: Pod, metadata: {name: p, namespace: jobs, labels: {a: 1}}}".into(), None),
    ] {
        let unread = judgement(std::slice::from_ref(&object), "shop/web", "jobs/db:80").unwrap().unread;
        assert_eq!(unread.iter().map(String::as_str).collect::<Vec<_>>(), Vec::from_iter(expected), "{object}");
    }
}

#[test]
fn a_question_without_an_answer_says_why() {
    for (from, to, expected) in [
        ("shop/no", "jobs/db:80", "--from shop/no: the manifests have no such Pod"),
        ("lone/odd", "jobs/db:80", "--from lone/odd: the Pod cannot be read"),
        (
            "shop/web",
            "lone/pending:80",
            "--to lone/pending:80/TCP: the Pod has no address (status.podIPs), so no traffic of it can be judged",
        ),
        (
            "lone/ended",
            "jobs/db:80",
            "--from lone/ended: the Pod has ended (Succeeded or Failed), and its addresses may be another's by now",
        ),
        ("shop/web", "jobs/db:http", "--to jobs/db:http/TCP: the Pod has no port http/TCP: it has pg/TCP"),
        (
            "jobs/db",
            "shop/web:http/udp",
            "--to shop/web:http/UDP: the Pod has no port http/UDP: it has dns/UDP, http/TCP",
        ),
        ("shop/web", "lone/v6:http", "--to lone/v6:http/TCP: the Pod has no port http/TCP: it has no named ports"),
        (
            "shop/web",
            "9.9.9.9:http",
            "--to 9.9.9.9:http/TCP: no pod of the manifests has this address: give the number of the port",
        ),
        ("9.9.9.9", "8.8.8.8:80", "--from 9.9.9.9 --to 8.8.8.8:80/TCP: neither is a pod of the manifests"),
    ] {
        assert_eq!(summary(&[], from, to), expected);
    }
}

/// Many policies of one pod: the reason names some of them.
#[test]
fn many_policies_are_counted() {
    let policies: Vec<_> = (0..8).map(|index| ingress(&format!("p{index}"), "[]")).collect();
    let answer = judgement(&policies, "9.9.9.9", "jobs/db:80").unwrap().answer;
    let verdict = answer.pairs[0].ingress.as_ref().unwrap();
    assert_eq!(verdict.isolated_by.len(), 8);
    assert_eq!(
        verdict.reason,
        "no rule of NetworkPolicy jobs/p0, jobs/p1, jobs/p2, jobs/p3, jobs/p4 and 3 more allows it"
    );
}
