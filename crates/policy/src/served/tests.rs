//! Served objects in both encodings, and fields that cannot be read.

use cproxy_core::AddressRange;
use prost::Message as _;

use super::*;

fn policy() -> Policy {
    let set = SetName::parse("d49ed4cf4ff31130fd8c1784052890aa").unwrap();
    let range = |text: &str| AddressRange::parse(text).unwrap();
    let accept = |direction, ports, peers| PodRule {
        direction,
        tier: Tier::NetworkPolicy,
        action: Action::Accept,
        source: "NetworkPolicy shop/web rule 0".into(),
        ports,
        peers,
    };
    let block = Block { cidr: range("10.0.0.0/8"), except: [range("10.1.0.0/16")].into() };
    let ports = [PortRange { protocol: Protocol::Udp, first: 53, last: 54 }];
    Policy {
        name: ObjectName::new("shop", "web-0"),
        uid: "8a1e2c3d-0000-4000-8000-0123456789ab".into(),
        node_name: "node-1".into(),
        isolated: Directions { ingress: true, egress: true },
        policies: vec![PodIsolation {
            policy: "NetworkPolicy shop/default-deny".into(),
            isolates: Directions { ingress: true, egress: true },
        }],
        node_addresses: [parse_address("192.0.2.1").unwrap()].into(),
        own_addresses: [parse_address("10.244.0.1").unwrap(), parse_address("fd00::1").unwrap()].into(),
        rules: vec![
            accept(
                Direction::Ingress,
                PodPorts::All,
                PodPeers::Some { sets: [set].into(), blocks: [block.clone()].into() },
            ),
            accept(Direction::Egress, PodPorts::All, PodPeers::InBlocks { sets: [set].into(), blocks: [block].into() }),
            accept(Direction::Egress, PodPorts::Some(ports.into()), PodPeers::All),
            PodRule {
                tier: Tier::Admin(7),
                action: Action::Deny,
                ..accept(Direction::Egress, PodPorts::All, PodPeers::All)
            },
        ],
        sets: vec![SetReference { name: set, slices: 4 }],
    }
}

#[test]
fn a_policy_is_the_same_after_both_encodings() {
    let served = PodPolicy::new(&policy());
    assert_eq!(PodPolicy::decode(&*served.encode_to_vec()).unwrap().read(), Ok(policy()));
    let json = serde_json::to_string(&served).unwrap();
    assert_eq!(serde_json::from_str::<PodPolicy>(&json).unwrap().read(), Ok(policy()));
    assert!(
        json.starts_with(r#"{"metadata":{"name":"web-0","namespace":"shop"},"spec":{"podUID":"8a1e2c3d-"#),
        "{json}"
    );
}

#[test]
fn a_slice_is_the_same_after_both_encodings() {
    let name = SliceName::parse("d49ed4cf4ff31130fd8c1784052890aa-4-3").unwrap();
    let addresses = ["10.244.0.1", "10.244.0.9", "fd00::1"].map(|text| parse_address(text).unwrap()).into();
    let slice = Slice { name, addresses };
    let served = AddressSlice::new(&slice);
    assert_eq!(AddressSlice::decode(&*served.encode_to_vec()).unwrap().read().unwrap().addresses.len(), 3);
    let mut sorted = slice.clone();
    sorted.addresses.sort_unstable();
    assert_eq!(AddressSlice::decode(&*served.encode_to_vec()).unwrap().read(), Ok(sorted.clone()));
    let json = serde_json::to_string(&served).unwrap();
    assert_eq!(serde_json::from_str::<AddressSlice>(&json).unwrap().read(), Ok(sorted));
    assert!(json.ends_with(r#""fd00::1"]}"#), "{json}");
}

#[test]
fn an_unknown_value_is_an_error_and_never_left_out() {
    type Change = fn(&mut PodPolicySpec);
    let cases: [(Change, &str); 11] = [
        (|spec| spec.isolated.push("Both".into()), "isolated \"Both\" is not known"),
        (|spec| spec.rules[0].action = "Log".into(), "action \"Log\" is not known"),
        (|spec| spec.rules[0].tier = String::new(), "tier \"\" is not known"),
        (|spec| spec.rules[3].priority = 70_000, "priority \"70000\" is not known"),
        (|spec| spec.rules[0].sets.push("x".into()), "sets \"x\" is not known"),
        (|spec| spec.rules[0].blocks[0].except.push("10.1".into()), "cidr \"10.1\" is not known"),
        (|spec| spec.rules[2].ports[0].last = 65_536, "port \"65536\" is not known"),
        (|spec| spec.rules[2].ports[0].protocol = "ICMP".into(), "protocol \"ICMP\" is not known"),
        (|spec| spec.sets[0].slices = 3, "slices \"3\" is not known"),
        (|spec| spec.sets[0].slices = 0, "slices \"0\" is not known"),
        (|spec| spec.node_addresses.push("node".into()), "nodeAddresses \"node\" is not known"),
    ];
    for (change, error) in cases {
        let mut served = PodPolicy::new(&policy());
        change(&mut served.spec);
        assert_eq!(served.read().unwrap_err().to_string(), error);
    }
    let set = "d49ed4cf4ff31130fd8c1784052890aa";
    for name in ["x".into(), format!("{set}-4-4"), format!("{set}-3-0"), format!("{set}-4-+1"), format!("{set}-4")] {
        assert_eq!(SliceName::parse(&name), None, "{name}");
    }
}
