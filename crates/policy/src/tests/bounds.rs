//! Sizes of slices and sets, and the reach of single changes.

use std::{collections::BTreeSet, net::IpAddr};

use cproxy_core::{ObjectName, Problem};
use serde_json::{Value, json};

use super::world::{Gone, Object, World};
use crate::{
    AddressSlice, Changes, ContainerPort, Event, Labels, Node, POD_ADDRESSES_MAX, POD_PARTS_MAX, POD_SETS_MAX,
    PodPeers, PodPolicy, PortName, Protocol, Resolver, SLICE_ADDRESSES_MAX, SetReference,
};

fn pod(name: &str, labels: Value, addresses: std::ops::Range<u32>) -> Event {
    let object = json!({"metadata": {"namespace": "shop", "name": name, "labels": labels}});
    let (event, _) = Object::Pod(serde_json::from_value(object).unwrap()).event();
    let Event::Pod(mut pod) = event else { panic!("{event:?}") };
    let address = |number: u32| IpAddr::from((0x0a00_0000 + number).to_be_bytes()).into();
    pod.addresses = addresses.map(address).collect();
    Event::Pod(pod)
}

fn policy(name: &str, spec: Value) -> Event {
    let object = json!({"metadata": {"namespace": "shop", "name": name}, "spec": spec});
    Object::Policy(serde_json::from_value(object).unwrap()).event().0
}

/// Rule for ingress from pods of the namespace with this label.
fn from(label: &str) -> Value {
    json!({"from": [{"podSelector": {"matchLabels": {"app": label}}}]})
}

fn name(name: &str) -> ObjectName {
    ObjectName::new("shop", name)
}

fn pod_policy(resolver: &Resolver, pod: &str) -> PodPolicy {
    resolver.pod_policy(&name(pod)).unwrap()
}

fn only_set(resolver: &Resolver) -> SetReference {
    let sets = pod_policy(resolver, "web").sets;
    assert_eq!(sets.len(), 1, "{sets:?}");
    sets[0]
}

fn slices(resolver: &Resolver, set: SetReference) -> Vec<AddressSlice> {
    set.slice_names().map(|name| resolver.slice(name).unwrap()).collect()
}

#[test]
fn a_set_grows_and_shrinks_by_whole_generations() {
    let mut world = World::default();
    world.apply(pod("web", json!({"app": "web"}), 0..1));
    world.apply(policy("p", json!({"podSelector": {"matchLabels": {"app": "web"}}, "ingress": [from("api")]})));
    let mut numbers = Vec::new();
    let sizes = (0..=40).chain((0..40).rev()).map(|step| step * 50);
    for size in sizes {
        let before = only_set(&world.resolver);
        let Changes { pods, slices: changed } = world.apply(pod("api", json!({"app": "api"}), 1..1 + size));
        let set = only_set(&world.resolver);
        if set == before {
            assert!(!pods.contains(&name("web")), "{size}");
        } else {
            assert!(pods.contains(&name("web")) && before.slice_names().all(|slice| changed.contains(&slice)));
            assert!(before.slice_names().all(|slice| world.resolver.slice(slice).is_none()));
        }
        let slices = slices(&world.resolver, set);
        assert_eq!(slices.iter().map(|slice| slice.addresses.len()).sum::<usize>(), size as usize);
        assert!(slices.iter().all(|slice| slice.addresses.len() <= SLICE_ADDRESSES_MAX));
        numbers.push(set.slices);
    }
    world.check_client();
    numbers.dedup();
    assert_eq!(numbers, [1, 2, 4, 8, 16, 32, 16, 8, 4, 2, 1]);
}

#[test]
fn pods_with_labels_of_their_own_are_in_slices() {
    let mut world = World::default();
    world.apply(pod("web", json!({"app": "web"}), 0..1));
    world.apply(policy("p", json!({"podSelector": {"matchLabels": {"app": "web"}}, "ingress": [from("api")]})));
    for index in 0..400 {
        // Each has an address of its own, and one that the next has, too.
        world.apply(pod(
            &format!("api-{index}"),
            json!({"app": "api", "pod": index.to_string()}),
            index + 1..index + 3,
        ));
        world.apply(pod(&format!("other-{index}"), json!({"pod": index.to_string()}), 1000 + index..1001 + index));
    }
    let set = only_set(&world.resolver);
    let addresses: BTreeSet<_> =
        slices(&world.resolver, set).into_iter().flat_map(|slice| slice.addresses).map(IpAddr::from).collect();
    assert_eq!((addresses.len(), set.slices), (401, 8));
    assert_eq!(addresses, (1..402_u32).map(|number| IpAddr::from((0x0a00_0000 + number).to_be_bytes())).collect());
    world.apply(pod("api-7", json!({"app": "db"}), 8..10));
    let count = slices(&world.resolver, set).iter().map(|slice| slice.addresses.len()).sum::<usize>();
    assert!((399..=401).contains(&count), "{count}");
    world.check_client();
}

#[test]
fn a_label_change_touches_the_sets_that_the_pod_enters_and_leaves() {
    let mut world = World::default();
    for index in 0..20 {
        world.apply(pod(&format!("web-{index}"), json!({"app": "web"}), index..index + 1));
        world.apply(pod(&format!("api-{index}"), json!({"app": "api"}), 100 + index..101 + index));
    }
    let rules = json!([from("web"), from("api"), from("db"), {"from": [{"podSelector": {}}]}]);
    world.apply(policy("p", json!({"podSelector": {"matchLabels": {"app": "web"}}, "ingress": rules})));
    let sets: BTreeSet<_> = pod_policy(&world.resolver, "web-0").sets.into_iter().collect();
    assert_eq!(sets.len(), 4);
    // From one set to another; not selected before or after.
    let Changes { pods, slices } = world.apply(pod("api-0", json!({"app": "db"}), 100..101));
    assert!(pods.is_empty(), "{pods:?}");
    assert_eq!(slices.len(), 2, "{slices:?}");
    // A label that no selector names.
    assert!(world.apply(pod("api-0", json!({"app": "db", "other": "x"}), 100..101)).is_empty());
    // Selected from now on.
    let Changes { pods, slices } = world.apply(pod("api-1", json!({"app": "web"}), 101..102));
    assert_eq!((pods, slices.len()), ([name("api-1")].into(), 2));
    // The same again, and a policy that is the same again.
    assert!(world.apply(pod("api-1", json!({"app": "web"}), 101..102)).is_empty());
    let spec = json!({"podSelector": {"matchLabels": {"app": "web"}}, "ingress": rules});
    assert!(world.apply(policy("p", spec)).is_empty());
    // A new address.
    let Changes { pods, slices } = world.apply(pod("web-1", json!({"app": "web"}), 50..51));
    assert_eq!((pods, slices.len()), ([name("web-1")].into(), 2));
    world.check_client();
}

#[test]
fn policies_with_one_selector_share_a_set_across_namespaces() {
    let mut world = World::default();
    let peers = json!([{"namespaceSelector": {"matchLabels": {"team": "a"}}, "podSelector": {}}]);
    for namespace in ["shop", "data"] {
        let metadata = json!({"namespace": namespace, "name": "p"});
        let object = json!({"metadata": metadata, "spec": {"podSelector": {}, "ingress": [{"from": peers}]}});
        world.put(&Object::Policy(serde_json::from_value(object).unwrap()));
    }
    assert_eq!(world.resolver.slices().count(), 1);
    world.remove(&Gone::Policy("shop".to_owned(), "p".to_owned()));
    assert_eq!(world.resolver.slices().count(), 1);
    let changes = world.remove(&Gone::Policy("data".to_owned(), "p".to_owned()));
    assert_eq!((world.resolver.slices().count(), changes.slices.len()), (0, 1));
}

#[test]
fn a_set_beyond_the_bound_has_no_effect_and_harms_no_other() {
    let mut world = World::default();
    let max = POD_ADDRESSES_MAX as u32;
    world.apply(pod("web", json!({"app": "web"}), 0..1));
    world.apply(pod("small", json!({"app": "small"}), 1..11));
    world.apply(pod("large", json!({"app": "large"}), 100..100 + max - 10));
    let spec = json!({"podSelector": {"matchLabels": {"app": "web"}}, "ingress": [from("large"), from("small")]});
    world.apply(policy("p", spec));
    assert_eq!(pod_policy(&world.resolver, "web").sets.len(), 2);
    assert_eq!(world.resolver.problems(), [].into());

    let changes = world.apply(pod("large", json!({"app": "large"}), 100..100 + max - 9));
    assert!(changes.pods.contains(&name("web")));
    let policy = pod_policy(&world.resolver, "web");
    assert_eq!((policy.rules.len(), policy.sets.len()), (1, 1));
    assert_eq!(slices(&world.resolver, policy.sets[0])[0].addresses.len(), 10);
    let texts: Vec<_> = world.resolver.problems().iter().map(Problem::to_string).collect();
    assert_eq!(
        texts,
        ["NetworkPolicy shop/p: spec.ingress[0].from: some of its peers have no effect: of the sets that one pod's \
             policies name, the smallest with 65536 addresses and 256 sets together are used"]
    );

    world.apply(pod("large", json!({"app": "large"}), 100..100 + max - 10));
    assert_eq!(pod_policy(&world.resolver, "web").sets.len(), 2);
    assert_eq!(world.resolver.problems(), [].into());
    world.check_client();
}

#[test]
fn named_ports_without_selectors_are_within_the_bounds() {
    let mut world = World::default();
    let labels = Labels::default();
    world.apply(Event::Namespace(crate::Namespace { name: "shop".into(), labels }));
    world.apply(pod("web", json!({"app": "web"}), 0..1));
    let named = |name, addresses| {
        let Event::Pod(mut pod) = pod(name, json!({"app": name}), addresses) else { panic!() };
        let http = PortName { name: "http".into(), protocol: Protocol::Tcp };
        pod.ports = [ContainerPort { name: http, number: 80 }].into();
        Event::Pod(pod)
    };
    let to_range = json!({"ports": [{"port": "http"}], "to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]});
    let egress = json!([{"ports": [{"port": "http"}]}, to_range]);
    let spec = json!({"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Egress"], "egress": egress});
    world.apply(policy("p", spec));
    world.apply(named("api", 1..2));
    let PodPolicy { rules, sets, .. } = pod_policy(&world.resolver, "web");
    assert_eq!((rules.len(), sets.len()), (2, 1), "both rules have one set");
    world.apply(named("api", 1..POD_ADDRESSES_MAX as u32 + 2));
    let PodPolicy { rules, sets, .. } = pod_policy(&world.resolver, "web");
    assert_eq!((rules, sets), (vec![], vec![]));
    let fields: Vec<_> = world.resolver.problems().into_iter().map(|problem| problem.field).collect();
    assert_eq!(fields, ["spec.egress[0].to", "spec.egress[1].to"]);
    world.check_client();
}

#[test]
fn sets_beyond_their_number_have_no_effect() {
    let mut world = World::default();
    world.apply(pod("web", json!({"app": "web"}), 0..1));
    let rules: Vec<_> = (0..=POD_SETS_MAX).map(|index| from(&format!("x{index}"))).collect();
    world.apply(policy("p", json!({"podSelector": {}, "ingress": rules})));
    assert_eq!(pod_policy(&world.resolver, "web").sets.len(), POD_SETS_MAX);
    // A set without an address takes no other's place, and its own lack is none.
    let last = POD_SETS_MAX as u32;
    for number in [7, last] {
        world.apply(pod(&format!("one-{number}"), json!({"app": format!("x{number}")}), number + 1..number + 2));
        assert!(world.resolver.problems().is_empty(), "{number}");
        world.check_client();
    }
    let policy = pod_policy(&world.resolver, "web");
    let addresses = policy.sets.iter().flat_map(|&set| slices(&world.resolver, set)).flat_map(|slice| slice.addresses);
    assert_eq!(addresses.count(), 2);
    // The largest goes.
    for number in 0..=last {
        world.apply(pod(&format!("one-{number}"), json!({"app": format!("x{number}")}), number + 1..number + 2));
    }
    world.apply(pod("two", json!({"app": "x7"}), 1000..1001));
    assert_eq!(world.resolver.problems().len(), 1);
    assert!(world.resolver.problems().iter().all(|problem| problem.field == "spec.ingress[7].from"));
    world.check_client();
}

/// Each rule names a port that each of many pods has with another number: all combinations would be a million rules.
#[test]
fn parts_beyond_their_number_have_no_effect() {
    let mut world = World::default();
    world.apply(pod("web", json!({"app": "web"}), 0..1));
    for number in 1..=250_u16 {
        let Event::Pod(mut many) =
            pod(&format!("p{number}"), json!({"app": "many"}), number.into()..u32::from(number) + 1)
        else {
            panic!()
        };
        let name = PortName { name: "p".into(), protocol: Protocol::Tcp };
        many.ports = [ContainerPort { name, number: 1_000 + number }].into();
        world.apply(Event::Pod(many));
    }
    let rule = |n: u32| {
        let block = format!("10.{}.{}.0/24", n >> 8, n & 255);
        json!({"ports": [{"port": "p"}, {"port": n + 1}], "to": [{"podSelector": {}}, {"ipBlock": {"cidr": block}}]})
    };
    let rules: Vec<_> = (0..4_000).map(rule).collect();
    world.apply(policy("many", json!({"podSelector": {}, "egress": rules, "policyTypes": ["Egress"]})));
    let parts = |policy: &PodPolicy| -> usize {
        policy
            .rules
            .iter()
            .map(|rule| 1 + rule.ranges().len() + rule.peers.sets().len() + rule.peers.blocks().len())
            .sum()
    };
    let cut = pod_policy(&world.resolver, "web");
    assert!(parts(&cut) <= POD_PARTS_MAX && parts(&cut) > POD_PARTS_MAX / 2, "{}", parts(&cut));
    let problems = world.resolver.problems();
    assert!(problems.iter().any(|problem| problem.message.contains("named port")), "{problems:?}");
    world.apply(policy("many", json!({"podSelector": {}, "egress": [rule(0)], "policyTypes": ["Egress"]})));
    pod_policy(&world.resolver, "web");
    assert!(world.resolver.problems().is_empty(), "{:?}", world.resolver.problems());
}

#[test]
fn addresses_that_collide_do_not_multiply_slices() {
    // Addresses whose hashes share the leading 12 bits.
    let hash =
        |number: u32| crate::address_set::SliceHash::new(IpAddr::from((0x0a00_0000 + number).to_be_bytes()).into());
    let colliding: Vec<u32> = (0..4_000_000).filter(|&number| hash(number).index(4096) == 0).take(400).collect();
    assert_eq!(colliding.len(), 400);
    let mut world = World::default();
    world.apply(pod("web", json!({"app": "web"}), 0..1));
    world.apply(policy("p", json!({"podSelector": {"matchLabels": {"app": "web"}}, "ingress": [from("api")]})));
    let Event::Pod(mut api) = pod("api", json!({"app": "api"}), 0..0) else { panic!() };
    api.addresses = colliding.iter().map(|&number| IpAddr::from((0x0a00_0000 + number).to_be_bytes()).into()).collect();
    world.apply(Event::Pod(api));
    let set = only_set(&world.resolver);
    assert!(set.slices <= 64, "{set:?}");
    assert_eq!(slices(&world.resolver, set).iter().map(|slice| slice.addresses.len()).sum::<usize>(), 400);
}

#[test]
fn a_set_of_a_rule_that_denies_is_closed_beyond_the_bound() {
    use crate::{Action, Direction, Directions, LabelSelector, Peers, PodSelection, Policy, Ports, Rule, Scope, Tier};
    let everywhere = || Scope::Namespaces(LabelSelector::default());
    let peers = PodSelection { scope: everywhere(), pods: LabelSelector::parse("app=large").unwrap() };
    let mut resolver = Resolver::default();
    let labels = Labels::default();
    resolver.apply(Event::Namespace(crate::Namespace { name: "shop".into(), labels }));
    resolver.apply(pod("web", json!({}), 0..1));
    resolver.apply(pod("large", json!({"app": "large"}), 1..11));
    let rule = Rule {
        direction: Direction::Egress,
        index: 0,
        action: Action::Pass,
        ports: Ports::All,
        peers: Peers::Some { pods: [peers].into(), blocks: [].into() },
    };
    resolver.apply(Event::Policy(Box::new(Policy {
        name: ObjectName::new("", "admin"),
        uid: "".into(),
        tier: Tier::Admin(3),
        subject: Some(PodSelection { scope: everywhere(), pods: LabelSelector::default() }),
        isolates: Directions::default(),
        rules: [rule].into(),
    })));
    let policy = pod_policy(&resolver, "web");
    assert_eq!(
        (policy.isolated, policy.rules[0].action, policy.rules[0].tier),
        (Directions::default(), Action::Pass, Tier::Admin(3))
    );
    assert_eq!(&*policy.rules[0].source, "ClusterNetworkPolicy admin rule 0");
    resolver.apply(pod("large", json!({"app": "large"}), 1..POD_ADDRESSES_MAX as u32 + 2));
    let policy = pod_policy(&resolver, "web");
    assert_eq!((policy.rules[0].action, &policy.rules[0].peers), (Action::Deny, &PodPeers::All));
}

#[test]
fn pods_of_a_node_share_it() {
    let mut resolver = Resolver::default();
    let with_node = |event: Event, node: &str| {
        let Event::Pod(mut pod) = event else { panic!("{event:?}") };
        pod.node = Node { name: node.into(), addresses: [].into() };
        Event::Pod(pod)
    };
    for (index, node) in ["n1", "n1", "n2"].into_iter().enumerate() {
        resolver.apply(with_node(pod(&index.to_string(), json!({}), 0..0), node));
    }
    assert_eq!(resolver.node_count(), 2);
    resolver.apply(with_node(pod("2", json!({}), 0..0), "n1"));
    assert_eq!(resolver.node_count(), 1);
    (0..3).for_each(|index| drop(resolver.apply(Event::PodDeleted(name(&index.to_string())))));
    assert_eq!(resolver.node_count(), 0);
}
