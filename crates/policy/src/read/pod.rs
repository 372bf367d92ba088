//! Pods.

use cproxy_core::{Address, ObjectName, sort_few};

use super::{Problems, addresses, port_number, protocol};
use crate::{
    api::{Container, Ip, Pod as PodObject, PodStatus},
    labels::Labels,
    model::{ContainerPort, Node, Pod, PortName},
};

/// `restartPolicy` of an init container that runs beside the others.
const ALWAYS: &str = "Always";

pub(super) fn read(name: ObjectName, object: &PodObject, problems: &mut Problems) -> Pod {
    let PodObject { metadata, spec, status } = object;
    let PodStatus { phase, host_ip, pod_ip, pod_ips, host_ips } = status;
    Pod {
        name,
        uid: (*metadata.uid).into(),
        labels: Labels::new(&metadata.labels),
        addresses: list(pod_ips, pod_ip, "status.podIPs", problems),
        node: Node { name: (*spec.node_name).into(), addresses: list(host_ips, host_ip, "status.hostIPs", problems) },
        ports: ports(object, problems),
        is_host_network: spec.host_network,
        has_ended: phase == "Succeeded" || phase == "Failed",
        is_terminating: metadata.deleted.is_some(),
        created_seconds: metadata.created.seconds.unwrap_or_default(),
    }
}

/// Addresses of a list, or the single one where there is no list.
fn list(ips: &[Ip], single: &str, field: &str, problems: &mut Problems) -> Box<[Address]> {
    let single = Some(single).filter(|single| ips.is_empty() && !single.is_empty());
    addresses(ips.iter().map(|ip| &*ip.ip).chain(single), field, problems)
}

/// Named ports. Of two with one name and protocol the first counts, and containers come before init containers, as in
/// pkg/api/v1/pod/util.go `FindPort`.
fn ports(object: &PodObject, problems: &mut Problems) -> Box<[ContainerPort]> {
    let stays = |container: &&Container| container.restart_policy.as_deref() == Some(ALWAYS);
    let containers = object.spec.containers.iter().map(|container| ("containers", container));
    let init = object.spec.init_containers.iter().filter(stays).map(|container| ("initContainers", container));
    let mut ports: Vec<ContainerPort> = Vec::new();
    for (field, container) in containers.chain(init) {
        for port in container.ports.iter().filter(|port| !port.name.is_empty()) {
            let (Some(protocol), Some(number)) = (protocol(&port.protocol), port_number(port.container_port)) else {
                let message = format!("port {:?} has no valid protocol and number; no rule has it", port.name);
                problems.add(format!("spec.{field}"), message);
                continue;
            };
            let name = PortName { name: (*port.name).into(), protocol };
            if !ports.iter().any(|other| other.name == name) {
                ports.push(ContainerPort { name, number });
            }
        }
    }
    sort_few(&mut ports);
    ports.into()
}
