// Verdicts of two independent engines of NetworkPolicy about the traffic of clusters. Each value of the standard input
// is a cluster with its traffic, and becomes one line with the verdicts. With -queue the first cluster's verdicts are
// about the packets of that queue of the kernel.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"runtime/debug"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
)

// Cluster is what the verdicts depend on, and what they are about.
type Cluster struct {
	Namespaces      []*corev1.Namespace           `json:"namespaces"`
	Pods            []*corev1.Pod                 `json:"pods"`
	NetworkPolicies []*networkingv1.NetworkPolicy `json:"networkPolicies"`
	Traffic         []Traffic                     `json:"traffic"`
}

// Traffic is a call or datagram from an address to an address and port.
type Traffic struct {
	From     string          `json:"from"`
	To       string          `json:"to"`
	Protocol corev1.Protocol `json:"protocol"`
	Port     int             `json:"port"`
}

// Verdicts has those of each engine, in the order of the traffic.
type Verdicts struct {
	// Of both sides together.
	KubeNetworkPolicies []bool `json:"kubeNetworkPolicies"`
	// Of each side.
	Cyclonus []Sides `json:"cyclonus"`
}

// Sides says whether the policies of the source and of the destination allow traffic.
type Sides struct {
	Egress  bool `json:"egress"`
	Ingress bool `json:"ingress"`
}

func main() {
	queue := flag.Uint("queue", 0, "number of a queue of the kernel")
	isVersion := flag.Bool("version", false, "print the version of kube-network-policies")
	flag.Parse()
	if *isVersion {
		fmt.Println(version())
		return
	}
	output := bufio.NewWriter(os.Stdout)
	input, encoder := json.NewDecoder(bufio.NewReader(os.Stdin)), json.NewEncoder(output)
	for {
		var cluster Cluster
		if err := input.Decode(&cluster); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			log.Fatal(err)
		}
		if *queue != 0 {
			log.Fatal(judgeQueue(context.Background(), &cluster, uint16(*queue)))
		}
		verdicts, err := evaluate(context.Background(), &cluster)
		if err != nil {
			log.Fatal(err)
		}
		if err := errors.Join(encoder.Encode(verdicts), output.Flush()); err != nil {
			log.Fatal(err)
		}
	}
}

// version returns that of the module that this program was built with.
func version() string {
	info, _ := debug.ReadBuildInfo()
	for _, module := range info.Deps {
		if module.Path == "sigs.k8s.io/kube-network-policies" {
			return module.Version
		}
	}
	return "unknown"
}

func evaluate(ctx context.Context, cluster *Cluster) (*Verdicts, error) {
	setDefaults(cluster)
	pods := podsByAddress(cluster)
	first, err := newKubeNetworkPolicies(cluster, pods)
	if err != nil {
		return nil, err
	}
	second := newCyclonus(cluster, pods)
	var verdicts Verdicts
	for _, traffic := range cluster.Traffic {
		allowed, err := first.allows(ctx, traffic)
		if err != nil {
			return nil, err
		}
		verdicts.KubeNetworkPolicies = append(verdicts.KubeNetworkPolicies, allowed)
		verdicts.Cyclonus = append(verdicts.Cyclonus, second.sides(traffic))
	}
	return &verdicts, nil
}
