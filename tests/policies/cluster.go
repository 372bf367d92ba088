package main

import (
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
)

// setDefaults sets what the API server sets, and the engines rely on.
func setDefaults(cluster *Cluster) {
	for _, pod := range cluster.Pods {
		for _, containers := range [][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
			for _, container := range containers {
				for index := range container.Ports {
					if container.Ports[index].Protocol == "" {
						container.Ports[index].Protocol = corev1.ProtocolTCP
					}
				}
			}
		}
	}
	for _, policy := range cluster.NetworkPolicies {
		spec := &policy.Spec
		for _, rule := range spec.Ingress {
			setPortDefaults(rule.Ports)
		}
		for _, rule := range spec.Egress {
			setPortDefaults(rule.Ports)
		}
		if len(spec.PolicyTypes) == 0 {
			spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
			if len(spec.Egress) != 0 {
				spec.PolicyTypes = append(spec.PolicyTypes, networkingv1.PolicyTypeEgress)
			}
		}
	}
}

func setPortDefaults(ports []networkingv1.NetworkPolicyPort) {
	tcp := corev1.ProtocolTCP
	for index := range ports {
		if ports[index].Protocol == nil {
			ports[index].Protocol = &tcp
		}
	}
}

// podsByAddress returns the pods whose packets have an address: those in the network of their node and those that have
// ended have none.
func podsByAddress(cluster *Cluster) map[string]*corev1.Pod {
	pods := map[string]*corev1.Pod{}
	for _, pod := range cluster.Pods {
		hasEnded := pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
		if pod.Spec.HostNetwork || hasEnded {
			continue
		}
		for _, address := range pod.Status.PodIPs {
			pods[address.IP] = pod
		}
	}
	return pods
}

// namespaceLabels returns the labels of each namespace.
func namespaceLabels(cluster *Cluster) map[string]map[string]string {
	labels := map[string]map[string]string{}
	for _, namespace := range cluster.Namespaces {
		labels[namespace.Name] = namespace.Labels
	}
	return labels
}
