package main

import (
	"github.com/mattfenwick/cyclonus/pkg/matcher"
	corev1 "k8s.io/api/core/v1"
)

// cyclonus is the matcher of github.com/mattfenwick/cyclonus.
type cyclonus struct {
	policy *matcher.Policy
	pods   map[string]*corev1.Pod
	labels map[string]map[string]string
}

func newCyclonus(cluster *Cluster, pods map[string]*corev1.Pod) *cyclonus {
	policy := matcher.BuildNetworkPolicies(false, cluster.NetworkPolicies)
	return &cyclonus{policy, pods, namespaceLabels(cluster)}
}

// sides asks for each name of the port, as the matcher takes one alone: rules only allow, so that it is enough if one
// name is allowed.
func (c *cyclonus) sides(traffic Traffic) Sides {
	var sides Sides
	for _, name := range portNames(c.pods[traffic.To], traffic) {
		result := c.policy.IsTrafficAllowed(&matcher.Traffic{
			Source: c.peer(traffic.From), Destination: c.peer(traffic.To),
			ResolvedPort: traffic.Port, ResolvedPortName: name, Protocol: traffic.Protocol,
		})
		sides.Egress = sides.Egress || result.Egress.IsAllowed()
		sides.Ingress = sides.Ingress || result.Ingress.IsAllowed()
	}
	return sides
}

func (c *cyclonus) peer(address string) *matcher.TrafficPeer {
	pod := c.pods[address]
	if pod == nil {
		return &matcher.TrafficPeer{IP: address}
	}
	internal := &matcher.InternalPeer{
		PodLabels: pod.Labels, Namespace: pod.Namespace, NamespaceLabels: c.labels[pod.Namespace],
	}
	return &matcher.TrafficPeer{IP: address, Internal: internal}
}

// portNames returns the names of a pod's port, and the empty one for a port without any. Of ports with the same name
// and protocol only the first counts, and init containers have ports if they run on, as in kubelet's FindPort.
func portNames(pod *corev1.Pod, traffic Traffic) []string {
	names := []string{""}
	if pod == nil {
		return names
	}
	containers := append([]corev1.Container{}, pod.Spec.Containers...)
	for _, container := range pod.Spec.InitContainers {
		if container.RestartPolicy != nil && *container.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			containers = append(containers, container)
		}
	}
	known := map[string]bool{}
	for _, container := range containers {
		for _, port := range container.Ports {
			if port.Name == "" || port.Protocol != traffic.Protocol || known[port.Name] {
				continue
			}
			known[port.Name] = true
			if int(port.ContainerPort) == traffic.Port {
				names = append(names, port.Name)
			}
		}
	}
	return names
}
