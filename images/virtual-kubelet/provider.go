package main

import (
	"context"
	"io"
	"log"
	"sync"
	"time"

	"github.com/virtual-kubelet/virtual-kubelet/errdefs"
	"github.com/virtual-kubelet/virtual-kubelet/node/api"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"
)

// provider is what virtual-kubelet calls: one VM for each pod of the node.
type provider struct {
	settings   *settings
	client     kubernetes.Interface
	events     record.EventRecorder
	images     imageStore
	hypervisor *hypervisor
	network    *network
	authority  string // of the API server's certificate
	nodeUID    types.UID

	mu     sync.Mutex
	pods   map[string]*podVM // by namespace and name
	report func(*corev1.Pod) // to virtual-kubelet
}

// CreatePod starts the VM and returns at once.
func (p *provider) CreatePod(ctx context.Context, pod *corev1.Pod) error {
	if len(pod.Spec.Containers) != 1 || len(pod.Spec.InitContainers) != 0 {
		return errdefs.InvalidInput("this provider runs pods of exactly one container, without init containers")
	}
	now := metav1.Now()
	pod.Status.StartTime = &now
	running, cancel := context.WithCancel(context.WithoutCancel(ctx))
	machine := &podVM{
		provider: p, pod: pod, logs: newLogFile(), cancel: cancel,
		done: make(chan struct{}), ended: make(chan error, 1), code: -1,
	}
	p.mu.Lock()
	p.pods[key(pod.Namespace, pod.Name)] = machine
	p.mu.Unlock()
	go machine.run(running)
	return nil
}

// UpdatePod takes new labels and annotations.
func (p *provider) UpdatePod(ctx context.Context, pod *corev1.Pod) error {
	machine, err := p.find(pod.Namespace, pod.Name)
	if err != nil {
		return err
	}
	machine.mu.Lock()
	pod.Status = machine.pod.Status
	machine.pod = pod
	machine.mu.Unlock()
	go machine.setPower(context.WithoutCancel(ctx))
	return nil
}

// DeletePod ends the VM. Its end is reported when it has come.
func (p *provider) DeletePod(_ context.Context, pod *corev1.Pod) error {
	machine, err := p.find(pod.Namespace, pod.Name)
	if err != nil {
		return err
	}
	machine.mu.Lock()
	known := machine.pod.DeepCopy()
	known.DeletionGracePeriodSeconds = pod.DeletionGracePeriodSeconds
	machine.pod = known
	machine.mu.Unlock()
	machine.cancel()
	go func() {
		<-machine.done
		p.forget(machine)
	}()
	return nil
}

// forget removes a pod, unless another one has its name by now.
func (p *provider) forget(machine *podVM) {
	p.mu.Lock()
	defer p.mu.Unlock()
	name := key(machine.spec().Namespace, machine.spec().Name)
	if p.pods[name] == machine {
		delete(p.pods, name)
	}
}

// GetPod returns a pod with its latest status.
func (p *provider) GetPod(_ context.Context, namespace, name string) (*corev1.Pod, error) {
	machine, err := p.find(namespace, name)
	if err != nil {
		return nil, err
	}
	return machine.spec().DeepCopy(), nil
}

// GetPodStatus returns a pod's latest status.
func (p *provider) GetPodStatus(ctx context.Context, namespace, name string) (*corev1.PodStatus, error) {
	pod, err := p.GetPod(ctx, namespace, name)
	if err != nil {
		return nil, err
	}
	return &pod.Status, nil
}

// GetPods returns all pods.
func (p *provider) GetPods(context.Context) ([]*corev1.Pod, error) {
	var pods []*corev1.Pod
	for _, machine := range p.all() {
		pods = append(pods, machine.spec().DeepCopy())
	}
	return pods, nil
}

// NotifyPods tells where changes of a pod's status are to be reported.
func (p *provider) NotifyPods(_ context.Context, report func(*corev1.Pod)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.report = report
}

func (p *provider) notify(pod *corev1.Pod) {
	p.mu.Lock()
	report := p.report
	p.mu.Unlock()
	if report != nil {
		report(pod)
	}
}

// GetContainerLogs serves `kubectl logs`.
func (p *provider) GetContainerLogs(
	ctx context.Context, namespace, name, _ string, options api.ContainerLogOpts,
) (io.ReadCloser, error) {
	machine, err := p.find(namespace, name)
	if err != nil {
		return nil, err
	}
	return machine.logs.read(ctx, options), nil
}

// console writes what a VM says beside its container's output into the provider's log.
func (p *provider) console(pod *corev1.Pod, line string) {
	log.Printf("console of %s: %s", key(pod.Namespace, pod.Name), line)
}

func (p *provider) all() []*podVM {
	p.mu.Lock()
	defer p.mu.Unlock()
	machines := make([]*podVM, 0, len(p.pods))
	for _, machine := range p.pods {
		machines = append(machines, machine)
	}
	return machines
}

func (p *provider) find(namespace, name string) (*podVM, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if machine, is := p.pods[key(namespace, name)]; is {
		return machine, nil
	}
	return nil, errdefs.NotFoundf("no VM has the pod %s", key(namespace, name))
}

// stop ends all VMs with the provider.
func (p *provider) stop() {
	for _, machine := range p.all() {
		if vm := machine.machine(); vm != nil {
			vm.kill()
		}
		machine.cancel()
	}
	for _, machine := range p.all() {
		select {
		case <-machine.done:
		case <-time.After(5 * time.Second):
		}
	}
}

func key(namespace, name string) string { return namespace + "/" + name }
