package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/virtual-kubelet/virtual-kubelet/node"
	"github.com/virtual-kubelet/virtual-kubelet/node/api"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
)

const (
	kubeletPort = 10250
	// workers are many: a status must not wait for another pod's.
	workers = 10
	resync  = time.Minute
)

// follow runs virtual-kubelet: its controllers of the node's pods and of the Node.
func (p *provider) follow(ctx context.Context) error {
	ofNode := informers.WithTweakListOptions(func(options *metav1.ListOptions) {
		options.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", p.settings.nodeName).String()
	})
	pods := informers.NewSharedInformerFactoryWithOptions(p.client, resync, ofNode)
	others := informers.NewSharedInformerFactory(p.client, resync)
	podController, err := node.NewPodController(node.PodControllerConfig{
		PodClient: p.client.CoreV1(), EventRecorder: p.events, Provider: p,
		PodInformer: pods.Core().V1().Pods(), SecretInformer: secrets{p.client},
		ConfigMapInformer: configMaps{p.client}, ServiceInformer: others.Core().V1().Services(),
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
	// Variables of the environment may come from all Services.
	others.WaitForCacheSync(ctx.Done())
	ended := make(chan error, 2)
	go func() { ended <- podController.Run(ctx, workers) }()
	select {
	case <-podController.Ready():
	case err := <-ended:
		return err
	}
	go func() { ended <- nodeController.Run(ctx) }()
	log.Printf("following the pods of the node %s", p.settings.nodeName)
	return <-ended
}

// serve gives the API server the logs of containers.
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
	if !clients.AppendCertsFromPEM(authority) {
		return nil, fmt.Errorf("--client-ca-file: no certificate in %s", p.settings.clientCA)
	}
	listener, err := net.Listen("tcp", net.JoinHostPort(p.settings.nodeAddress, fmt.Sprint(kubeletPort)))
	if err != nil {
		return nil, err
	}
	server := &http.Server{
		Handler:           api.PodHandler(api.PodHandlerConfig{GetContainerLogs: p.GetContainerLogs, GetPods: p.GetPods}, false),
		ReadHeaderTimeout: 30 * time.Second,
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
		corev1.ResourceCPU:    *resource.NewQuantity(s.maxPods, resource.DecimalSI),
		corev1.ResourceMemory: *resource.NewQuantity(s.maxPods<<28, resource.BinarySI),
		corev1.ResourcePods:   *resource.NewQuantity(s.maxPods, resource.DecimalSI),
	}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name:   s.nodeName,
			Labels: map[string]string{"type": "virtual-kubelet", "kubernetes.io/hostname": s.nodeName},
		},
		Status: corev1.NodeStatus{
			Phase: corev1.NodeRunning, Capacity: capacity, Allocatable: capacity,
			Conditions: []corev1.NodeCondition{{
				Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "ProviderRuns",
				LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now(),
			}},
			Addresses:       []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: s.nodeAddress}},
			DaemonEndpoints: corev1.NodeDaemonEndpoints{KubeletEndpoint: corev1.DaemonEndpoint{Port: kubeletPort}},
			NodeInfo: corev1.NodeSystemInfo{
				KubeletVersion: "virtual-kubelet-1.12.0", Architecture: "amd64", OperatingSystem: "linux",
			},
		},
	}
}
