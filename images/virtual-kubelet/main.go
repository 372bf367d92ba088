// An example of a virtual-kubelet provider whose pods get Services from cproxy: each pod of the node has a microVM of
// its own, in QEMU, with cproxy in it as README.md says.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/record"
)

type settings struct {
	nodeName, nodeAddress, kubeconfig string
	certificate, key, clientCA        string
	images, directory                 string
	bridge, podNetwork                string
	apiServer, policy                 string
	clusterDNS, clusterDomain         string
	maxPods                           int64
	hypervisor                        hypervisor
}

func main() {
	log.SetFlags(log.LstdFlags | log.Lmicroseconds)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, parse()); err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintf(os.Stderr, "virtual-kubelet: %v\n", err)
		os.Exit(1)
	}
}

func parse() *settings {
	s := &settings{}
	flag.StringVar(&s.nodeName, "node-name", "virtual-kubelet", "name of the Node")
	flag.StringVar(&s.nodeAddress, "node-address", "", "address of this machine, where the API server gets logs")
	flag.StringVar(&s.kubeconfig, "kubeconfig", "", "API server and identity of the provider (rbac.yaml)")
	flag.StringVar(&s.certificate, "tls-cert-file", "", "certificate of this machine")
	flag.StringVar(&s.key, "tls-private-key-file", "", "its key")
	flag.StringVar(&s.clientCA, "client-ca-file", "", "authority of the API server's client certificate")
	flag.StringVar(&s.images, "images", "", "OCI image layout with the pods' images")
	flag.StringVar(&s.directory, "directory", "", "directory for the VMs' files")
	flag.StringVar(&s.bridge, "bridge", "pods", "bridge to which VMs are attached")
	flag.StringVar(&s.podNetwork, "pod-network", "10.244.1.1/24", "the bridge's address, with the range of the pods")
	flag.StringVar(&s.apiServer, "apiserver", "", "address at which VMs reach the API server or a relay")
	flag.StringVar(&s.policy, "policy", "off", "off, audit or enforce: network policy in the VMs; -apiserver is then a relay")
	flag.StringVar(&s.clusterDNS, "cluster-dns", "10.96.0.10", "ClusterIP of the nameserver")
	flag.StringVar(&s.clusterDomain, "cluster-domain", "cluster.local", "domain of Services")
	flag.Int64Var(&s.maxPods, "max-pods", 20, "number of VMs that this machine can have")
	flag.StringVar(&s.hypervisor.machine, "machine", "microvm", "QEMU's machine: microvm or q35")
	flag.StringVar(&s.hypervisor.kernel, "kernel", "", "the VMs' kernel")
	flag.StringVar(&s.hypervisor.modules, "modules", "", "directory of modules that VMs load in the order of their names")
	flag.StringVar(&s.hypervisor.base, "initramfs", "", "what `cargo xtask image initramfs` makes")
	flag.Parse()
	return s
}

func run(ctx context.Context, s *settings) error {
	p, err := newProvider(s)
	if err != nil {
		return err
	}
	defer p.stop()
	server, err := p.serve()
	if err != nil {
		return err
	}
	defer server.Close()
	return p.follow(ctx)
}

// check names the first flag that cannot work, before there is a Node.
func (s *settings) check() (netip.Prefix, error) {
	prefix, err := netip.ParsePrefix(s.podNetwork)
	if flag.NArg() > 0 {
		return prefix, fmt.Errorf("%q is no flag", flag.Arg(0))
	}
	if _, known := machines[s.hypervisor.machine]; !known {
		return prefix, fmt.Errorf("--machine %q: neither microvm nor q35", s.hypervisor.machine)
	}
	if err != nil || !prefix.Addr().Is4() || prefix.Bits() > 30 {
		return prefix, fmt.Errorf("--pod-network %q: want an IPv4 address with a prefix of at most 30 bits", s.podNetwork)
	}
	if s.maxPods < 1 {
		return prefix, fmt.Errorf("--max-pods %d: a node has at least one", s.maxPods)
	}
	for _, address := range [][2]string{{"--node-address", s.nodeAddress}, {"--cluster-dns", s.clusterDNS}} {
		if _, err := netip.ParseAddr(address[1]); err != nil {
			return prefix, fmt.Errorf("%s %q: an IP address is wanted", address[0], address[1])
		}
	}
	for _, file := range [][2]string{
		{"--kubeconfig", s.kubeconfig}, {"--tls-cert-file", s.certificate}, {"--tls-private-key-file", s.key},
		{"--client-ca-file", s.clientCA}, {"--images", s.images},
		{"--kernel", s.hypervisor.kernel}, {"--initramfs", s.hypervisor.base},
	} {
		if file[1] == "" {
			return prefix, fmt.Errorf("%s is missing", file[0])
		}
		if _, err := os.Stat(file[1]); err != nil {
			return prefix, fmt.Errorf("%s: %w", file[0], err)
		}
	}
	if err := os.MkdirAll(s.directory, 0o700); err != nil {
		return prefix, fmt.Errorf("--directory %q: %w", s.directory, err)
	}
	if _, err := net.InterfaceByName(s.bridge); err != nil {
		return prefix, fmt.Errorf("--bridge %q: %w", s.bridge, err)
	}
	return prefix, nil
}

func newProvider(s *settings) (*provider, error) {
	prefix, err := s.check()
	if err != nil {
		return nil, err
	}
	config, err := clientcmd.BuildConfigFromFlags("", s.kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig: %w", err)
	}
	// The pods of a Deployment come at once; the default of 5 requests a second would make them wait.
	config.QPS, config.Burst = 100, 200
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	authority := config.CAData
	if authority == nil {
		if authority, err = os.ReadFile(config.CAFile); err != nil {
			return nil, fmt.Errorf("--kubeconfig %s: authority of the API server: %w", s.kubeconfig, err)
		}
	}
	registered, err := register(client, s)
	if err != nil {
		return nil, fmt.Errorf("node %s: %w", s.nodeName, err)
	}
	events := record.NewBroadcaster()
	events.StartRecordingToSink(&corev1client.EventSinkImpl{Interface: client.CoreV1().Events("")})
	return &provider{
		settings: s, client: client, images: imageStore{s.images}, hypervisor: &s.hypervisor, nodeUID: registered.UID,
		network:   &network{bridge: s.bridge, prefix: prefix, used: map[netip.Addr]bool{}},
		authority: string(authority), pods: map[string]*podVM{},
		events: events.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "virtual-kubelet", Host: s.nodeName}),
	}, nil
}

// register creates the Node, whose UID cproxy's tokens are bound to.
func register(client kubernetes.Interface, s *settings) (*corev1.Node, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	nodes := client.CoreV1().Nodes()
	if found, err := nodes.Get(ctx, s.nodeName, metav1.GetOptions{}); err == nil {
		return found, nil
	}
	wanted := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: s.nodeName}}
	return nodes.Create(ctx, wanted, metav1.CreateOptions{})
}
