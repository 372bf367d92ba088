// A virtual-kubelet provider for tests: a pod is a network namespace with processes of agnhost in it, and a cproxy of
// its own, as if it were a microVM. It runs the upstream tests of network policies without an image and without a
// container runtime.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/virtual-kubelet/virtual-kubelet/node"
	"github.com/virtual-kubelet/virtual-kubelet/node/api"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/record"
)

const (
	kubeletPort = 10250
	// workers are many: one pod must not wait for another.
	workers = 10
	maxPods = 100
	resync  = time.Minute
)

type settings struct {
	nodeName, nodeAddress, kubeconfig string
	certificate, key, clientCA        string
	directory, pins, cgroup           string
	bridge, podNetworks               string
	cproxy, relay, relayCA, agnhost   string
}

func main() {
	log.SetFlags(log.LstdFlags | log.Lmicroseconds)
	s := &settings{}
	flag.StringVar(&s.nodeName, "node-name", "", "name of the Node")
	flag.StringVar(&s.nodeAddress, "node-address", "", "its address, where the API server sends execs")
	flag.StringVar(&s.kubeconfig, "kubeconfig", "", "API server and identity of the provider")
	flag.StringVar(&s.certificate, "tls-cert-file", "", "certificate of the Node")
	flag.StringVar(&s.key, "tls-private-key-file", "", "its key")
	flag.StringVar(&s.clientCA, "client-ca-file", "", "authority of the API server's client certificate")
	flag.StringVar(&s.directory, "directory", "", "directory for files of the pods")
	flag.StringVar(&s.pins, "pin-dir", "", "directory of a BPF file system for pins of the pods")
	flag.StringVar(&s.cgroup, "cgroup", "", "cgroup2 directory for cgroups of the pods")
	flag.StringVar(&s.bridge, "bridge", "", "bridge to which pods are attached")
	flag.StringVar(&s.podNetworks, "pod-networks", "", "the bridge's addresses, with the ranges of the pods")
	flag.StringVar(&s.cproxy, "cproxy", "", "the agent's program")
	flag.StringVar(&s.relay, "relay", "", "URL of the relay")
	flag.StringVar(&s.relayCA, "relay-ca-file", "", "authority of the relay's certificate")
	flag.StringVar(&s.agnhost, "agnhost", "", "the program of every image")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, s); err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintf(os.Stderr, "netpol provider: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, s *settings) error {
	var prefixes []netip.Prefix
	for text := range strings.SplitSeq(s.podNetworks, ",") {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			return fmt.Errorf("--pod-networks: %w", err)
		}
		prefixes = append(prefixes, prefix)
	}
	config, err := clientcmd.BuildConfigFromFlags("", s.kubeconfig)
	if err != nil {
		return fmt.Errorf("--kubeconfig: %w", err)
	}
	// Pods of a test come at once; the default of 5 requests a second would make them wait.
	config.QPS, config.Burst = 100, 200
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	p := &provider{
		settings: s, client: client, pods: map[string]*pod{},
		network: &network{bridge: s.bridge, prefixes: prefixes, used: map[byte]bool{}},
	}
	defer p.stop()
	server, err := p.serve()
	if err != nil {
		return err
	}
	defer server.Close()
	return p.follow(ctx)
}

// follow runs virtual-kubelet: its controllers of the node's pods and of the Node.
func (p *provider) follow(ctx context.Context) error {
	ofNode := informers.WithTweakListOptions(func(options *metav1.ListOptions) {
		options.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", p.settings.nodeName).String()
	})
	pods := informers.NewSharedInformerFactoryWithOptions(p.client, resync, ofNode)
	others := informers.NewSharedInformerFactory(p.client, resync)
	podController, err := node.NewPodController(node.PodControllerConfig{
		PodClient: p.client.CoreV1(), Provider: p, EventRecorder: &record.FakeRecorder{},
		PodInformer: pods.Core().V1().Pods(), SecretInformer: others.Core().V1().Secrets(),
		ConfigMapInformer: others.Core().V1().ConfigMaps(), ServiceInformer: others.Core().V1().Services(),
	})
	if err != nil {
		return err
	}
	leases := p.client.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	nodeController, err := node.NewNodeController(node.NaiveNodeProvider{}, p.settings.node(), p.client.CoreV1().Nodes(),
		node.WithNodeEnableLeaseV1(leases, node.DefaultLeaseDuration))
	if err != nil {
		return err
	}
	pods.Start(ctx.Done())
	others.Start(ctx.Done())
	ended := make(chan error, 2)
	go func() { ended <- podController.Run(ctx, workers) }()
	select {
	case <-podController.Ready():
	case err := <-ended:
		return err
	}
	go func() { ended <- nodeController.Run(ctx) }()
	return <-ended
}

// serve lets the API server run commands in pods.
func (p *provider) serve() (*http.Server, error) {
	certificate, err := tls.LoadX509KeyPair(p.settings.certificate, p.settings.key)
	if err != nil {
		return nil, fmt.Errorf("--tls-cert-file: %w", err)
	}
	authority, err := os.ReadFile(p.settings.clientCA)
	if err != nil {
		return nil, fmt.Errorf("--client-ca-file: %w", err)
	}
	clients := x509.NewCertPool()
	clients.AppendCertsFromPEM(authority)
	listener, err := net.Listen("tcp", net.JoinHostPort(p.settings.nodeAddress, fmt.Sprint(kubeletPort)))
	if err != nil {
		return nil, err
	}
	handlers := api.PodHandlerConfig{
		RunInContainer: p.RunInContainer, GetContainerLogs: p.GetContainerLogs, GetPodsFromKubernetes: p.GetPods,
	}
	server := &http.Server{
		Handler: api.PodHandler(handlers, false), ReadHeaderTimeout: 30 * time.Second,
		TLSConfig: &tls.Config{
			MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{certificate},
			ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clients,
		},
	}
	go server.ServeTLS(listener, "", "")
	return server, nil
}

// node is the Node, with what the scheduler must know.
func (s *settings) node() *corev1.Node {
	capacity := corev1.ResourceList{
		corev1.ResourceCPU:    *resource.NewQuantity(maxPods, resource.DecimalSI),
		corev1.ResourceMemory: *resource.NewQuantity(maxPods<<30, resource.BinarySI),
		corev1.ResourcePods:   *resource.NewQuantity(maxPods, resource.DecimalSI),
	}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name:   s.nodeName,
			Labels: map[string]string{corev1.LabelHostname: s.nodeName, corev1.LabelOSStable: "linux"},
		},
		Status: corev1.NodeStatus{
			Phase: corev1.NodeRunning, Capacity: capacity, Allocatable: capacity,
			Conditions: []corev1.NodeCondition{{
				Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "ProviderRuns",
				LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now(),
			}},
			Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: s.nodeAddress}},
			DaemonEndpoints: corev1.NodeDaemonEndpoints{
				KubeletEndpoint: corev1.DaemonEndpoint{Port: kubeletPort},
			},
			NodeInfo: corev1.NodeSystemInfo{KubeletVersion: "virtual-kubelet-1.12.0", OperatingSystem: "linux"},
		},
	}
}
