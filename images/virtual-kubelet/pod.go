package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	// tokenLifetime and tokenRenewal are those of images/kubernetes/README.md.
	tokenLifetime = 10 * time.Minute
	tokenRenewal  = 8 * time.Minute
	// Pauses between attempts to find an image or another thing that a VM needs.
	firstPause = 2 * time.Second
	lastPause  = time.Minute
	// exitKilled is the code of a container that a signal has ended.
	exitKilled = 137
	// defaultMemory is that of a VM whose pod has no limit, in MiB.
	defaultMemory = 128
)

// powerAnnotation on a pod saves its VM into a file, and its removal starts the VM from there.
const (
	powerAnnotation = "vm.cproxy.dev/power"
	powerSaved      = "saved"
)

// podVM is a pod and its VM.
type podVM struct {
	provider *provider
	logs     *logFile
	cancel   context.CancelFunc
	done     chan struct{} // closed when nothing is left of the VM

	mu        sync.Mutex
	pod       *corev1.Pod // with the latest status
	condition condition
	vm        *vm
	isSaved   bool
	complaint string // what cproxy has written last before the container's start
	code      int    // the container's, from the console
	ended     chan error
}

// run starts the VM, follows it to its end and leaves nothing behind.
func (m *podVM) run(ctx context.Context) {
	defer close(m.done)
	defer m.logs.end()
	m.change(func(c *condition) { c.waiting = waitingFor("ContainerCreating", "") })
	from, err := m.pull(ctx)
	if err != nil {
		m.finish("Deleted", "deleted before the VM was started", exitKilled)
		return
	}
	address, tap, err := m.provider.network.attach()
	if err != nil {
		m.event(corev1.EventTypeWarning, "FailedCreatePodSandBox", err.Error())
		m.finish("NetworkFailed", err.Error(), exitKilled)
		return
	}
	defer m.provider.network.detach(address, tap)
	defer os.RemoveAll(m.directory())
	if err := m.startVM(ctx, from, address, tap); err != nil {
		m.finish("Deleted", err.Error(), exitKilled)
		return
	}
	followers, stop := context.WithCancel(ctx)
	defer stop()
	go m.renewToken(followers)
	m.finishVM(m.follow(followers), ctx.Err() != nil)
}

// pull finds the image. Like a kubelet, it tries again until the pod is deleted.
func (m *podVM) pull(ctx context.Context) (found *image, err error) {
	name := m.container().Image
	err = m.retry(ctx, "ErrImagePull", "ImagePullBackOff", func() error {
		found, err = m.provider.images.find(name)
		return err
	})
	if err == nil {
		m.event(corev1.EventTypeNormal, "Pulled", fmt.Sprintf("Image %q is in the layout", name))
	}
	return found, err
}

func (m *podVM) startVM(ctx context.Context, from *image, address netip.Addr, tap string) error {
	return m.retry(ctx, "CreateContainerConfigError", "CreateContainerConfigError", func() error {
		files, err := m.provider.guestFiles(ctx, m.spec(), from, address)
		if err != nil {
			return err
		}
		parameters, err := m.provider.kernelParameters(m.spec())
		if err != nil {
			return err
		}
		machine := &vm{
			hypervisor: m.provider.hypervisor, directory: m.directory(), tap: tap, mac: mac(address),
			memory: memoryOf(m.container()), parameters: parameters, onLine: m.line, onEnd: func(err error) { m.ended <- err },
		}
		if err := os.MkdirAll(machine.directory, 0o700); err != nil {
			return err
		}
		if err := writeInitramfs(machine.file(initramfsFile), m.provider.hypervisor.base, files); err != nil {
			return err
		}
		if err := machine.start(false); err != nil {
			return err
		}
		m.mu.Lock()
		m.vm = machine
		m.mu.Unlock()
		m.change(func(c *condition) { c.address = address.String() })
		m.event(corev1.EventTypeNormal, "Created", fmt.Sprintf("VM with %d MiB switched on", machine.memory))
		return nil
	})
}

// retry tries until it succeeds, with the reason in the pod's status and an event.
func (m *podVM) retry(ctx context.Context, reason, later string, attempt func() error) error {
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		err := attempt()
		if err == nil {
			return nil
		}
		m.event(corev1.EventTypeWarning, "Failed", reason+": "+err.Error())
		m.change(func(c *condition) { c.waiting = waitingFor(reason, err.Error()) })
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(pause):
			reason = later
		}
	}
}

// line takes a line of the console (images/init and guest/container say what there is).
func (m *podVM) line(line string) {
	line = strings.TrimRight(line, "\r\n")
	if text, is := strings.CutPrefix(line, "log: "); is {
		m.logs.add(text)
		return
	}
	m.provider.console(m.spec(), line)
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case strings.HasPrefix(line, "init: running "):
		go m.started()
	case strings.HasPrefix(line, "init: ending with "):
		m.code, _ = strconv.Atoi(strings.TrimPrefix(line, "init: ending with "))
	case m.condition.waiting != nil && strings.Contains(line, "cproxy"):
		m.complaint = line
	}
}

// started: cproxy wait has returned, and so Services work.
func (m *podVM) started() {
	m.event(corev1.EventTypeNormal, "Started", "Services work in the VM, and the container has started")
	hasProbe := m.container().ReadinessProbe != nil
	m.change(func(c *condition) {
		c.waiting, c.started, c.ready = nil, metav1.Now(), !hasProbe
	})
}

// follow probes the container until the VM ends, or until its grace period after the pod's deletion has ended.
func (m *podVM) follow(ctx context.Context) error {
	probe := m.container().ReadinessProbe
	period := time.Second
	if probe != nil && probe.PeriodSeconds > 0 {
		period = time.Duration(probe.PeriodSeconds) * time.Second
	}
	ticks := time.NewTicker(period)
	defer ticks.Stop()
	for {
		select {
		case err := <-m.ended:
			return err
		case <-ctx.Done():
			return m.stop()
		case <-ticks.C:
			m.probe(probe)
		}
	}
}

// stop ends the container with SIGTERM, and the VM after the grace period.
func (m *podVM) stop() error {
	grace := 30 * time.Second
	if seconds := m.spec().DeletionGracePeriodSeconds; seconds != nil {
		grace = time.Duration(*seconds) * time.Second
	}
	if hook := m.container().Lifecycle; hook != nil && hook.PreStop != nil && hook.PreStop.Sleep != nil {
		time.Sleep(min(grace, time.Duration(hook.PreStop.Sleep.Seconds)*time.Second))
	}
	m.mu.Lock()
	machine, isRunning := m.vm, m.condition.waiting == nil && !m.isSaved
	m.mu.Unlock()
	if isRunning && machine.tell("stop") == nil {
		select {
		case err := <-m.ended:
			return err
		case <-time.After(grace):
		}
	}
	m.mu.Lock()
	isSaved := m.isSaved
	m.mu.Unlock()
	if isSaved {
		return errors.New("deleted while its state was in a file")
	}
	machine.kill()
	return <-m.ended
}

// probe asks whether the container is ready.
func (m *podVM) probe(probe *corev1.Probe) {
	m.mu.Lock()
	skip := probe == nil || m.condition.waiting != nil || m.isSaved
	address := m.condition.address
	m.mu.Unlock()
	if skip {
		return
	}
	isReady := answers(probe, address)
	m.change(func(c *condition) { c.ready = isReady })
}

func answers(probe *corev1.Probe, address string) bool {
	timeout := time.Duration(max(1, probe.TimeoutSeconds)) * time.Second
	switch {
	case probe.HTTPGet != nil:
		client := http.Client{Timeout: timeout}
		answer, err := client.Get("http://" + net.JoinHostPort(address, probe.HTTPGet.Port.String()) + probe.HTTPGet.Path)
		if err != nil {
			return false
		}
		answer.Body.Close()
		return answer.StatusCode < http.StatusBadRequest
	case probe.TCPSocket != nil:
		connection, err := net.DialTimeout("tcp", net.JoinHostPort(address, probe.TCPSocket.Port.String()), timeout)
		if err != nil {
			return false
		}
		connection.Close()
	}
	return true
}

// renewToken replaces cproxy's token in the guest before it expires.
func (m *podVM) renewToken(ctx context.Context) {
	for ticks := time.NewTicker(tokenRenewal); ; {
		select {
		case <-ctx.Done():
			ticks.Stop()
			return
		case <-ticks.C:
			m.sendToken(ctx)
		}
	}
}

// finishVM reports the end of the VM.
func (m *podVM) finishVM(err error, isDeleted bool) {
	m.mu.Lock()
	code, complaint, neverStarted := m.code, m.complaint, m.condition.waiting != nil
	m.mu.Unlock()
	switch {
	case neverStarted && complaint != "":
		m.event(corev1.EventTypeWarning, "Failed", complaint)
		m.finish("CproxyNotReady", complaint, max(1, code))
	case isDeleted && code < 0:
		m.finish("Deleted", "the VM was switched off with the pod", exitKilled)
	case err != nil || code < 0:
		m.event(corev1.EventTypeWarning, "VMDied", "the VM ended without its container: "+fmt.Sprint(err))
		m.finish("VMDied", "the VM ended without its container", exitKilled)
	case code == 0:
		m.finish("Completed", "", code)
	default:
		m.finish("Error", fmt.Sprintf("the container has ended with %d", code), code)
	}
}

func (m *podVM) finish(reason, message string, code int) {
	m.change(func(c *condition) {
		c.ready, c.waiting = false, nil
		c.ended = &corev1.ContainerStateTerminated{
			ExitCode: int32(code), Reason: reason, Message: message, StartedAt: c.started, FinishedAt: metav1.Now(),
		}
	})
}

// change changes the condition and reports it.
func (m *podVM) change(change func(*condition)) {
	m.mu.Lock()
	change(&m.condition)
	pod := m.pod.DeepCopy()
	pod.Status = m.condition.status(m.pod)
	m.pod = pod
	m.mu.Unlock()
	// virtual-kubelet sends the whole pod, of which the API server takes the status. The variables that it has added,
	// seven for each Service, would cost the API server half a second of CPU time with 1,000 Services.
	reported := pod.DeepCopy()
	for i := range reported.Spec.Containers {
		reported.Spec.Containers[i].Env = nil
	}
	m.provider.notify(reported)
}

func (m *podVM) spec() *corev1.Pod {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.pod
}

func (m *podVM) machine() *vm {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.vm
}

func (m *podVM) container() *corev1.Container { return &m.spec().Spec.Containers[0] }

func (m *podVM) event(kind, reason, message string) {
	m.provider.events.Event(m.spec(), kind, reason, message)
}

func (m *podVM) directory() string {
	return filepath.Join(m.provider.settings.directory, string(m.spec().UID))
}

func waitingFor(reason, message string) *corev1.ContainerStateWaiting {
	return &corev1.ContainerStateWaiting{Reason: reason, Message: message}
}

// memoryOf is the container's limit in MiB.
func memoryOf(container *corev1.Container) int64 {
	if limit := container.Resources.Limits.Memory(); !limit.IsZero() {
		return max(limit.Value()>>20, 64)
	}
	return defaultMemory
}
