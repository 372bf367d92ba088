package main

import (
	"context"
	_ "embed"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// What a VM gets besides cproxy's initramfs: the container's root, its command, the pod's network and credentials.

var (
	//go:embed guest/init
	guestInit string
	//go:embed guest/container
	guestContainer string
)

const (
	// podRoot is the container's root in the guest.
	podRoot = "pod/root"
	// serviceAccountDirectory is where clients look for a token and the authority of the API server.
	serviceAccountDirectory = "var/run/secrets/kubernetes.io/serviceaccount"
	defaultPath             = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

// annotationPrefix begins the annotations that become settings of cproxy: cproxy.dev/enabled: "false" is
// cproxy.enabled=false on the kernel's command line.
const annotationPrefix = "cproxy.dev/"

// podSettings are settings that a pod may choose.
var podSettings = []string{"enabled", "apiserver", "for", "timeout", "on-timeout"}

var settingValue = regexp.MustCompile(`^[A-Za-z0-9.,:/\[\]_-]+$`)

// guestFiles are the pod's part of the initramfs.
func (p *provider) guestFiles(ctx context.Context, pod *corev1.Pod, from *image, address netip.Addr) (tree, error) {
	files := tree{}
	root, err := p.images.files(from)
	if err != nil {
		return nil, err
	}
	files.below(podRoot, root)
	container := &pod.Spec.Containers[0]
	mounted, err := p.volumeFiles(ctx, pod, container)
	if err != nil {
		return nil, err
	}
	files.below(podRoot, mounted)
	own, err := p.credentials(ctx, cproxyAccount(p.settings.nodeName, p.nodeUID))
	if err != nil {
		return nil, err
	}
	files.below(serviceAccountDirectory, own)
	files.program("pod/init", guestInit)
	files.program("etc/cproxy/workload", guestContainer)
	files.program("pod/command", command(container, from))
	files.add("pod/network", fmt.Sprintf("name=%s\naddress=%s/%d\ngateway=%s\n",
		pod.Name, address, p.network.prefix.Bits(), p.network.prefix.Addr()))
	files.add(podRoot+"/etc/resolv.conf", p.resolvConf(pod))
	files.add(podRoot+"/etc/hostname", pod.Name+"\n")
	files.add(podRoot+"/etc/hosts", fmt.Sprintf("127.0.0.1 localhost\n::1 localhost\n%s %s\n", address, pod.Name))
	for _, directory := range []string{"dev", "proc", "sys", "tmp"} {
		files.directory(podRoot + "/" + directory)
	}
	return files, addModules(files, p.hypervisor.modules)
}

func addModules(files tree, directory string) error {
	if directory == "" {
		return nil
	}
	entries, err := os.ReadDir(directory)
	for _, entry := range entries {
		content, err := os.ReadFile(filepath.Join(directory, entry.Name()))
		if err != nil {
			return err
		}
		files.add("pod/modules/"+entry.Name(), string(content))
	}
	return err
}

// command is a script that becomes the container's process.
func command(container *corev1.Container, from *image) string {
	// As Kubernetes defines it: a command of the pod replaces the image's entry point and its arguments.
	words := append(append([]string{}, container.Command...), container.Args...)
	switch {
	case len(container.Command) > 0:
	case len(container.Args) > 0:
		words = append(append([]string{}, from.config.Entrypoint...), container.Args...)
	default:
		words = append(append([]string{}, from.config.Entrypoint...), from.config.Cmd...)
	}
	environment := append([]string{defaultPath}, from.config.Env...)
	for _, variable := range container.Env {
		environment = append(environment, variable.Name+"="+variable.Value)
	}
	return "#!/bin/sh\nexec env -i " + quoted(environment) + " chroot /" + podRoot + " " + quoted(words) + "\n"
}

func quoted(words []string) string {
	quoted := make([]string, len(words))
	for i, word := range words {
		quoted[i] = "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
	}
	return strings.Join(quoted, " ")
}

// kernelParameters are the settings of cproxy in this pod's VM.
func (p *provider) kernelParameters(pod *corev1.Pod) ([]string, error) {
	settings := map[string]string{"apiserver": p.settings.apiServer, "node-name": p.settings.nodeName}
	if p.settings.policy != "off" {
		settings["policy"] = p.settings.policy
		// The token is the node's, whose pods are many, and probes come from the bridge.
		settings["policy-pod"] = pod.Namespace + "/" + pod.Name
		settings["policy-node-ip"] = p.network.prefix.Addr().String()
	}
	for _, name := range podSettings {
		value, is := pod.Annotations[annotationPrefix+name]
		if !is {
			continue
		}
		if !settingValue.MatchString(value) {
			return nil, fmt.Errorf("annotation %s%s: %q is no value of a kernel parameter", annotationPrefix, name, value)
		}
		settings[name] = value
	}
	var parameters []string
	for name, value := range settings {
		parameters = append(parameters, "cproxy."+name+"="+value)
	}
	return parameters, nil
}

// resolvConf follows the pod's DNS policy.
func (p *provider) resolvConf(pod *corev1.Pod) string {
	var servers, searches []string
	options := []string{}
	switch pod.Spec.DNSPolicy {
	case corev1.DNSNone:
	case corev1.DNSDefault:
		content, _ := os.ReadFile("/etc/resolv.conf")
		return string(content)
	default:
		servers = []string{p.settings.clusterDNS}
		domain := p.settings.clusterDomain
		searches = []string{pod.Namespace + ".svc." + domain, "svc." + domain, domain}
		options = []string{"ndots:5"}
	}
	if config := pod.Spec.DNSConfig; config != nil {
		servers = append(servers, config.Nameservers...)
		searches = append(searches, config.Searches...)
		for _, option := range config.Options {
			if option.Value != nil {
				option.Name += ":" + *option.Value
			}
			options = append(options, option.Name)
		}
	}
	lines := ""
	for _, server := range servers {
		lines += "nameserver " + server + "\n"
	}
	for name, words := range map[string][]string{"search": searches, "options": options} {
		if len(words) > 0 {
			lines += name + " " + strings.Join(words, " ") + "\n"
		}
	}
	return lines
}
