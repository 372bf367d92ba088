package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// hypervisor is how VMs are started.
type hypervisor struct {
	machine string // microvm, or q35 for kernels with drivers for PCI alone
	kernel  string
	modules string
	base    string // cproxy's initramfs
}

// Machines by their names: options of QEMU, and the network card's device.
var machines = map[string]struct {
	options []string
	network string
}{
	"microvm": {[]string{"-M", "microvm,acpi=off,isa-serial=on,rtc=on"}, "virtio-net-device"},
	"q35":     {[]string{"-M", "q35"}, "virtio-net-pci,romfile="},
}

// vm is a QEMU process. It may be stopped, with its state in a file, and started from there.
type vm struct {
	hypervisor *hypervisor
	directory  string
	memory     int64 // MiB
	tap        string
	mac        string
	parameters []string     // of the kernel's command line
	onLine     func(string) // a line of the console
	onEnd      func(error)  // the process has ended, but not for save

	mu      sync.Mutex
	process *exec.Cmd
	console io.WriteCloser
	saving  bool
	ended   chan struct{}
}

const (
	initramfsFile = "initramfs"
	stateFile     = "state"
	monitorSocket = "monitor"
)

// start switches the VM on, or continues from its saved state.
func (v *vm) start(fromState bool) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	machine := machines[v.hypervisor.machine]
	arguments := append([]string{"-accel", "tcg", "-cpu", "qemu64,+rdrand", "-smp", "1"}, machine.options...)
	arguments = append(arguments, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-m", strconv.FormatInt(v.memory, 10), "-serial", "stdio",
		"-qmp", "unix:"+v.file(monitorSocket)+",server=on,wait=off",
		"-netdev", "tap,id=net,script=no,downscript=no,ifname="+v.tap,
		"-device", machine.network+",netdev=net,mac="+v.mac,
		"-kernel", v.hypervisor.kernel, "-initrd", v.file(initramfsFile), "-append", v.commandLine())
	if fromState {
		arguments = append(arguments, "-incoming", "exec:cat "+v.file(stateFile))
	}
	process := exec.Command("qemu-system-x86_64", arguments...)
	console, err := process.StdinPipe()
	if err != nil {
		return err
	}
	output, err := process.StdoutPipe()
	if err != nil {
		return err
	}
	errors, err := os.Create(v.file("qemu.log"))
	if err != nil {
		return err
	}
	defer errors.Close()
	process.Stderr = errors
	// The VM ends with the provider, whatever ends that.
	process.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := startOnLastingThread(process); err != nil {
		return err
	}
	v.process, v.console, v.saving, v.ended = process, console, false, make(chan struct{})
	go v.follow(output, process, v.ended)
	return nil
}

func (v *vm) commandLine() string {
	line := "console=ttyS0 panic=-1 reboot=t quiet no_timer_check rdinit=/pod/init"
	for _, parameter := range v.parameters {
		line += " " + parameter
	}
	return line
}

func (v *vm) file(name string) string { return filepath.Join(v.directory, name) }

// follow reads the console until the VM ends.
func (v *vm) follow(output io.Reader, process *exec.Cmd, ended chan struct{}) {
	lines := bufio.NewReader(output)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			v.onLine(line)
		}
		if err != nil {
			break
		}
	}
	err := process.Wait()
	v.mu.Lock()
	saved := v.saving
	v.mu.Unlock()
	close(ended)
	if !saved {
		v.onEnd(err)
	}
}

// tell sends a command to guest/container.
func (v *vm) tell(command string) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	_, err := io.WriteString(v.console, command+"\n")
	return err
}

// kill switches the VM off.
func (v *vm) kill() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.process != nil {
		v.process.Process.Kill()
	}
}

// save writes the VM's state into a file and ends its process.
func (v *vm) save() error {
	if _, err := v.ask("stop", nil); err != nil {
		return err
	}
	if _, err := v.ask("migrate", map[string]string{"uri": "exec:cat >" + v.file(stateFile)}); err != nil {
		return err
	}
	for {
		answer, err := v.ask("query-migrate", nil)
		if err != nil {
			return err
		}
		switch answer.Status {
		case "completed":
			v.mu.Lock()
			v.saving = true
			ended := v.ended
			v.mu.Unlock()
			v.kill()
			<-ended
			return nil
		case "failed", "cancelled":
			return fmt.Errorf("QEMU cannot save the VM's state: %s", answer.Status)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// resume makes a VM go on that was started from its saved state.
func (v *vm) resume() error {
	var err error
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		var answer qmpAnswer
		if answer, err = v.ask("query-status", nil); err != nil {
			continue // the monitor may not be there yet
		}
		switch answer.Status {
		case "running":
			return nil
		case "paused":
			_, err = v.ask("cont", nil)
		default: // it still reads the state
			err = fmt.Errorf("the VM is %s", answer.Status)
		}
	}
	return err
}

type qmpAnswer struct {
	Status string `json:"status"`
}

// ask sends a command to QEMU's monitor (QMP).
func (v *vm) ask(command string, arguments any) (answer qmpAnswer, err error) {
	connection, err := net.DialTimeout("unix", v.file(monitorSocket), 10*time.Second)
	if err != nil {
		return answer, err
	}
	defer connection.Close()
	connection.SetDeadline(time.Now().Add(time.Minute))
	in, out := json.NewDecoder(connection), json.NewEncoder(connection)
	for _, request := range []map[string]any{{"execute": "qmp_capabilities"}, {"execute": command}} {
		if request["execute"] == command && arguments != nil {
			request["arguments"] = arguments
		}
		if err := out.Encode(request); err != nil {
			return answer, err
		}
		if err := receive(in, &answer); err != nil {
			return answer, fmt.Errorf("QEMU refuses %s: %w", request["execute"], err)
		}
	}
	return answer, nil
}

// receive skips the greeting and events.
func receive(in *json.Decoder, answer *qmpAnswer) error {
	for {
		var message struct {
			Return *qmpAnswer
			Error  *struct{ Desc string }
		}
		if err := in.Decode(&message); err != nil {
			return err
		}
		if message.Error != nil {
			return fmt.Errorf("%s", message.Error.Desc)
		}
		if message.Return != nil {
			*answer = *message.Return
			return nil
		}
	}
}

var starts = make(chan func())

// startOnLastingThread starts a process on a thread that lives as long as the provider: the kernel takes the end of
// the thread for the death of the parent.
func startOnLastingThread(process *exec.Cmd) error {
	result := make(chan error)
	starts <- func() { result <- process.Start() }
	return <-result
}

func init() {
	go func() {
		runtime.LockOSThread()
		for start := range starts {
			start()
		}
	}()
}
