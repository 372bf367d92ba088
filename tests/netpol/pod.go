package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	// pause and agent are cgroups of a pod beside those of its containers. No container has such a name.
	pause = "pause_"
	agent = "cproxy_"
	// removal is the longest time that killed processes take to leave their cgroup.
	removal = 30 * time.Second
)

// pod is a network namespace, a cgroup, an agent and processes of containers.
type pod struct {
	provider *provider
	cancel   context.CancelFunc
	done     chan struct{} // closed when nothing is left of the pod

	mu     sync.Mutex
	object *corev1.Pod // with the latest status
	holder int         // process that holds the network namespace
}

// run starts the pod, waits until it is deleted, and leaves nothing behind.
func (p *pod) run(ctx context.Context) {
	defer close(p.done)
	defer p.remove()
	p.setStatus(corev1.PodPending, nil, corev1.ContainerState{
		Waiting: &corev1.ContainerStateWaiting{Reason: "ContainerCreating"},
	})
	var addresses []netip.Addr
	number, err := p.provider.network.take()
	if err == nil {
		defer p.provider.network.give(number)
		addresses = p.provider.network.addresses(number)
		err = p.begin(ctx, number)
	}
	ended := corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 137, FinishedAt: metav1.Now()}}
	if err != nil {
		log.Printf("%s: %v", p.name(), err)
		ended.Terminated.Reason, ended.Terminated.Message = "NotStarted", err.Error()
	} else {
		p.setStatus(corev1.PodRunning, addresses, corev1.ContainerState{
			Running: &corev1.ContainerStateRunning{StartedAt: metav1.Now()},
		})
		<-ctx.Done()
	}
	p.kill()
	p.setStatus(corev1.PodFailed, addresses, ended)
}

// begin makes everything. Containers start when cproxy is ready, with Services and policy in force.
func (p *pod) begin(ctx context.Context, number byte) error {
	if err := errors.Join(os.MkdirAll(p.file("run"), 0o700), os.Mkdir(p.cgroup(), 0o755)); err != nil {
		return err
	}
	holder := exec.Command(p.provider.settings.agnhost, "pause")
	holder.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if err := p.spawn(holder, pause); err != nil {
		return fmt.Errorf("network namespace: %w", err)
	}
	p.mu.Lock()
	p.holder = holder.Process.Pid
	p.mu.Unlock()
	if err := p.provider.network.connect(holder.Process.Pid, number); err != nil {
		return err
	}
	if err := p.startAgent(ctx); err != nil {
		return err
	}
	for _, container := range p.copy().Spec.Containers {
		words := append(append([]string{}, container.Command...), container.Args...)
		if len(container.Command) == 0 {
			words = append([]string{"/agnhost"}, words...)
		}
		command, err := p.command(context.Background(), container.Name, p.provider.program(words))
		if err == nil {
			err = p.spawn(command, container.Name)
		}
		if err != nil {
			return fmt.Errorf("container %s: %w", container.Name, err)
		}
	}
	return nil
}

// startAgent starts cproxy as in the guest of a microVM, and waits until it is ready.
func (p *pod) startAgent(ctx context.Context) error {
	if err := p.writeKubeconfig(ctx); err != nil {
		return err
	}
	s := p.provider.settings
	words := []string{
		s.cproxy, "run", "--kubeconfig", p.file("kubeconfig"), "--policy", "enforce",
		"--cgroup", p.cgroup(), "--pin-dir", p.pins(), "--run-dir", p.file("run"),
	}
	command, err := p.command(context.Background(), "", words)
	if err == nil {
		err = p.spawn(command, agent)
	}
	if err != nil {
		return fmt.Errorf("cproxy: %w", err)
	}
	wait := exec.CommandContext(ctx, s.cproxy, "wait", "--run-dir", p.file("run"), "--timeout", "60s")
	if output, err := wait.CombinedOutput(); err != nil {
		return fmt.Errorf("cproxy wait: %w: %s", err, output)
	}
	return nil
}

// writeKubeconfig names the relay, with a token that is bound to the pod: the relay gives its policy to nobody else.
func (p *pod) writeKubeconfig(ctx context.Context) error {
	object, lifetime := p.copy(), int64(time.Hour/time.Second)
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		ExpirationSeconds: &lifetime,
		BoundObjectRef: &authenticationv1.BoundObjectReference{
			Kind: "Pod", APIVersion: "v1", Name: object.Name, UID: object.UID,
		},
	}}
	accounts := p.provider.client.CoreV1().ServiceAccounts(object.Namespace)
	answer, err := accounts.CreateToken(ctx, object.Spec.ServiceAccountName, request, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("token of the pod: %w", err)
	}
	s := p.provider.settings
	config := map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "relay",
		"clusters": []any{map[string]any{"name": "relay", "cluster": map[string]any{
			"server": s.relay, "certificate-authority": s.relayCA,
		}}},
		"users":    []any{map[string]any{"name": "pod", "user": map[string]any{"token": answer.Status.Token}}},
		"contexts": []any{map[string]any{"name": "relay", "context": map[string]any{"cluster": "relay", "user": "pod"}}},
	}
	text, err := json.Marshal(config)
	if err != nil {
		return err
	}
	return os.WriteFile(p.file("kubeconfig"), text, 0o600)
}

// command is a command in the pod's network namespace, with the container's environment.
func (p *pod) command(ctx context.Context, container string, words []string) (*exec.Cmd, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.holder == 0 || len(words) == 0 {
		return nil, fmt.Errorf("no command, or the pod has no network namespace")
	}
	arguments := append([]string{fmt.Sprintf("--net=/proc/%d/ns/net", p.holder)}, words...)
	command := exec.CommandContext(ctx, "nsenter", arguments...)
	command.Env = []string{"PATH=" + os.Getenv("PATH")}
	for _, of := range p.object.Spec.Containers {
		if of.Name == container {
			for _, variable := range of.Env {
				command.Env = append(command.Env, variable.Name+"="+variable.Value)
			}
		}
	}
	return command, nil
}

// spawn starts a command that runs until the pod ends, with its output in a file.
func (p *pod) spawn(command *exec.Cmd, name string) error {
	output, err := os.Create(p.file(name + ".log"))
	if err != nil {
		return err
	}
	defer output.Close()
	command.Stdout, command.Stderr = output, output
	if err := p.start(command, name); err != nil {
		return err
	}
	go func() {
		if err := command.Wait(); p.isRunning() {
			log.Printf("%s: %s has ended: %v", p.name(), name, err)
		}
	}()
	return nil
}

// start starts a command in the cgroup of a container.
func (p *pod) start(command *exec.Cmd, container string) error {
	directory := filepath.Join(p.cgroup(), container)
	if err := os.Mkdir(directory, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	cgroup, err := os.Open(directory)
	if err != nil {
		return err
	}
	defer cgroup.Close()
	if command.SysProcAttr == nil {
		command.SysProcAttr = &syscall.SysProcAttr{}
	}
	command.SysProcAttr.UseCgroupFD, command.SysProcAttr.CgroupFD = true, int(cgroup.Fd())
	return command.Start()
}

// kill ends all processes. The network namespace and its link go with them.
func (p *pod) kill() {
	p.mu.Lock()
	p.holder = 0
	p.mu.Unlock()
	if err := os.WriteFile(filepath.Join(p.cgroup(), "cgroup.kill"), []byte("1"), 0); err != nil {
		log.Printf("%s: %v", p.name(), err)
	}
}

// remove removes cgroups, pins and files.
func (p *pod) remove() {
	children, _ := filepath.Glob(filepath.Join(p.cgroup(), "*/"))
	for deadline := time.Now().Add(removal); ; time.Sleep(5 * time.Millisecond) {
		for _, child := range children {
			_ = syscall.Rmdir(child)
		}
		err := syscall.Rmdir(p.cgroup())
		if err == nil || err == syscall.ENOENT {
			break
		}
		if time.Now().After(deadline) {
			log.Printf("%s: the cgroup stays: %v", p.name(), err)
			break
		}
	}
	if err := errors.Join(os.RemoveAll(p.pins()), os.RemoveAll(p.file(""))); err != nil {
		log.Printf("%s: %v", p.name(), err)
	}
}

// setStatus reports a state of all containers, as a kubelet does. A pod that runs is ready.
func (p *pod) setStatus(phase corev1.PodPhase, addresses []netip.Addr, state corev1.ContainerState) {
	isReady := phase == corev1.PodRunning
	p.mu.Lock()
	node := p.provider.settings.nodeAddress
	status := corev1.PodStatus{
		Phase: phase, StartTime: p.object.Status.StartTime, QOSClass: p.object.Status.QOSClass,
		HostIP: node, HostIPs: []corev1.HostIP{{IP: node}},
	}
	for _, address := range addresses {
		status.PodIPs = append(status.PodIPs, corev1.PodIP{IP: address.String()})
		status.PodIP = status.PodIPs[0].IP
	}
	for _, container := range p.object.Spec.Containers {
		status.ContainerStatuses = append(status.ContainerStatuses, corev1.ContainerStatus{
			Name: container.Name, Image: container.Image, State: state, Ready: isReady, Started: &isReady,
		})
	}
	truth := corev1.ConditionFalse
	if isReady {
		truth = corev1.ConditionTrue
	}
	for _, kind := range []corev1.PodConditionType{corev1.ContainersReady, corev1.PodReady} {
		status.Conditions = append(status.Conditions, corev1.PodCondition{
			Type: kind, Status: truth, LastTransitionTime: metav1.Now(),
		})
	}
	for _, kind := range []corev1.PodConditionType{corev1.PodScheduled, corev1.PodInitialized} {
		status.Conditions = append(status.Conditions, corev1.PodCondition{Type: kind, Status: corev1.ConditionTrue})
	}
	changed := p.object.DeepCopy()
	changed.Status = status
	p.object = changed
	p.mu.Unlock()
	p.provider.notify(changed.DeepCopy())
}

func (p *pod) copy() *corev1.Pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.object.DeepCopy()
}

func (p *pod) isRunning() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.holder != 0
}

func (p *pod) name() string {
	object := p.copy()
	return key(object.Namespace, object.Name)
}

func (p *pod) uid() string { return string(p.copy().UID) }

func (p *pod) cgroup() string { return filepath.Join(p.provider.settings.cgroup, p.uid()) }

// pins is the agent's own directory. A BPF file system takes no names with dots.
func (p *pod) pins() string {
	return filepath.Join(p.provider.settings.pins, strings.ReplaceAll(p.uid(), ".", "-"))
}

func (p *pod) file(name string) string {
	return filepath.Join(p.provider.settings.directory, p.uid(), name)
}
