package main

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"

	"github.com/virtual-kubelet/virtual-kubelet/errdefs"
	"github.com/virtual-kubelet/virtual-kubelet/node/api"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	utilexec "k8s.io/utils/exec"
)

// provider is what virtual-kubelet calls.
type provider struct {
	settings *settings
	client   kubernetes.Interface
	network  *network

	mu     sync.Mutex
	pods   map[string]*pod // by namespace and name
	report func(*corev1.Pod)
}

// CreatePod starts the pod and returns at once.
func (p *provider) CreatePod(_ context.Context, object *corev1.Pod) error {
	for _, container := range object.Spec.Containers {
		if !strings.Contains(container.Image, "/agnhost:") {
			return errdefs.InvalidInput("this provider runs agnhost alone, not " + container.Image)
		}
	}
	now := metav1.Now()
	object.Status.StartTime = &now
	ctx, cancel := context.WithCancel(context.Background())
	created := &pod{provider: p, object: object, cancel: cancel, done: make(chan struct{})}
	p.mu.Lock()
	p.pods[key(object.Namespace, object.Name)] = created
	p.mu.Unlock()
	go created.run(ctx)
	return nil
}

// UpdatePod takes new labels and annotations.
func (p *provider) UpdatePod(_ context.Context, object *corev1.Pod) error {
	found, err := p.find(object.Namespace, object.Name)
	if err != nil {
		return err
	}
	found.mu.Lock()
	defer found.mu.Unlock()
	object.Status = found.object.Status
	found.object = object
	return nil
}

// DeletePod ends the pod, which reports its end.
func (p *provider) DeletePod(_ context.Context, object *corev1.Pod) error {
	found, err := p.find(object.Namespace, object.Name)
	if err != nil {
		return err
	}
	found.cancel()
	go func() {
		<-found.done
		p.mu.Lock()
		defer p.mu.Unlock()
		if name := key(object.Namespace, object.Name); p.pods[name] == found {
			delete(p.pods, name)
		}
	}()
	return nil
}

// GetPod returns a pod with its latest status.
func (p *provider) GetPod(_ context.Context, namespace, name string) (*corev1.Pod, error) {
	found, err := p.find(namespace, name)
	if err != nil {
		return nil, err
	}
	return found.copy(), nil
}

// GetPodStatus returns a pod's latest status.
func (p *provider) GetPodStatus(ctx context.Context, namespace, name string) (*corev1.PodStatus, error) {
	object, err := p.GetPod(ctx, namespace, name)
	if err != nil {
		return nil, err
	}
	return &object.Status, nil
}

// GetPods returns all pods.
func (p *provider) GetPods(context.Context) ([]*corev1.Pod, error) {
	var objects []*corev1.Pod
	for _, pod := range p.all() {
		objects = append(objects, pod.copy())
	}
	return objects, nil
}

// NotifyPods tells where changes of a pod's status are to be reported.
func (p *provider) NotifyPods(_ context.Context, report func(*corev1.Pod)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.report = report
}

func (p *provider) notify(object *corev1.Pod) {
	p.mu.Lock()
	report := p.report
	p.mu.Unlock()
	if report != nil {
		report(object)
	}
}

// GetContainerLogs serves `kubectl logs`.
func (p *provider) GetContainerLogs(
	_ context.Context, namespace, name, container string, _ api.ContainerLogOpts,
) (io.ReadCloser, error) {
	found, err := p.find(namespace, name)
	if err != nil {
		return nil, err
	}
	return os.Open(found.file(container + ".log"))
}

// RunInContainer serves `kubectl exec`.
func (p *provider) RunInContainer(
	ctx context.Context, namespace, name, container string, words []string, streams api.AttachIO,
) error {
	found, err := p.find(namespace, name)
	if err != nil {
		return err
	}
	command, err := found.command(ctx, container, p.program(words))
	if err != nil {
		return err
	}
	// A nil stream must not become an interface that is not nil.
	if in := streams.Stdin(); in != nil {
		command.Stdin = in
	}
	if out := streams.Stdout(); out != nil {
		command.Stdout = out
	}
	if errs := streams.Stderr(); errs != nil {
		command.Stderr = errs
	}
	err = found.start(command, container)
	if err == nil {
		err = command.Wait()
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return utilexec.CodeExitError{Err: err, Code: exit.ExitCode()}
	}
	return err
}

// program is a command with agnhost's program in place of its path in an image.
func (p *provider) program(words []string) []string {
	if len(words) > 0 && words[0] == "/agnhost" {
		return append([]string{p.settings.agnhost}, words[1:]...)
	}
	return words
}

// stop ends all pods.
func (p *provider) stop() {
	for _, pod := range p.all() {
		pod.cancel()
		<-pod.done
	}
}

func (p *provider) all() []*pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	var pods []*pod
	for _, pod := range p.pods {
		pods = append(pods, pod)
	}
	return pods
}

func (p *provider) find(namespace, name string) (*pod, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if found := p.pods[key(namespace, name)]; found != nil {
		return found, nil
	}
	return nil, errdefs.NotFoundf("no pod %s", key(namespace, name))
}

func key(namespace, name string) string { return namespace + "/" + name }
