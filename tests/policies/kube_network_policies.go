package main

import (
	"context"
	"net"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/kube-network-policies/pkg/api"
	"sigs.k8s.io/kube-network-policies/pkg/network"
	"sigs.k8s.io/kube-network-policies/pkg/networkpolicy"
)

// kubeNetworkPolicies is the engine of sigs.k8s.io/kube-network-policies.
type kubeNetworkPolicies struct {
	engine *networkpolicy.PolicyEngine
}

// podInfos tells the engine which pod has an address.
type podInfos map[string]*api.PodInfo

func (infos podInfos) GetPodInfoByIP(address string) (*api.PodInfo, bool) {
	info, found := infos[address]
	return info, found
}

func newKubeNetworkPolicies(cluster *Cluster, pods map[string]*corev1.Pod) (*kubeNetworkPolicies, error) {
	// The informers are never started: they only have what is put into them here.
	factory := informers.NewSharedInformerFactory(&kubernetes.Clientset{}, 0)
	policies := factory.Networking().V1().NetworkPolicies()
	for _, policy := range cluster.NetworkPolicies {
		if err := policies.Informer().GetIndexer().Add(policy); err != nil {
			return nil, err
		}
	}
	evaluator := networkpolicy.NewStandardNetworkPolicy(
		"", factory.Core().V1().Namespaces(), factory.Core().V1().Pods(), policies)
	labels, infos := namespaceLabels(cluster), podInfos{}
	for address, pod := range pods {
		infos[address] = api.NewPodInfo(pod, labels[pod.Namespace], nil, "")
	}
	return &kubeNetworkPolicies{networkpolicy.NewPolicyEngine(infos, []api.PolicyEvaluator{evaluator})}, nil
}

func (k *kubeNetworkPolicies) allows(ctx context.Context, traffic Traffic) (bool, error) {
	packet := network.Packet{
		SrcIP: net.ParseIP(traffic.From), DstIP: net.ParseIP(traffic.To),
		Proto: traffic.Protocol, SrcPort: 40000, DstPort: traffic.Port,
	}
	return k.engine.EvaluatePacket(ctx, &packet)
}
