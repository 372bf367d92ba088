package main

import (
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"sync"
)

// network is a bridge with the pods' links on it. Its own address is the pods' gateway.
type network struct {
	bridge string
	prefix netip.Prefix // with the bridge's address

	mu   sync.Mutex
	used map[netip.Addr]bool
	last netip.Addr // the latest one; an address is used again as late as possible
}

// take takes the next free address after the latest one.
func (n *network) take() (netip.Addr, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	first := n.prefix.Addr().Next()
	address := first
	if n.last.IsValid() {
		address = n.last.Next()
	}
	for range 1 << (32 - n.prefix.Bits()) {
		if !n.prefix.Contains(address.Next()) { // the last one is for broadcasts
			address = first
		}
		if !n.used[address] {
			n.used[address], n.last = true, address
			return address, nil
		}
		address = address.Next()
	}
	return address, fmt.Errorf("all addresses of %s are in use", n.prefix.Masked())
}

func (n *network) give(address netip.Addr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.used, address)
}

// connect gives the network namespace of a process a link to the bridge, with this address. The link ends with the
// namespace.
func (n *network) connect(process int, address netip.Addr) error {
	bytes := address.As4()
	link := fmt.Sprintf("%s-%d", n.bridge, bytes[3])
	outside := []string{
		fmt.Sprintf("link add %s type veth peer name eth0 netns %d", link, process),
		fmt.Sprintf("link set %s up master %s", link, n.bridge),
	}
	inside := []string{
		"link set lo up",
		fmt.Sprintf("address add %s/%d dev eth0", address, n.prefix.Bits()),
		"link set eth0 up",
		fmt.Sprintf("route add default via %s", n.prefix.Addr()),
	}
	// The end of a former namespace takes its link along, but not at once.
	_ = ip(exec.Command("ip", "link", "delete", "dev", link), nil)
	if err := ip(exec.Command("ip", "-batch", "-"), outside); err != nil {
		return err
	}
	return ip(exec.Command("nsenter", fmt.Sprintf("--net=/proc/%d/ns/net", process), "ip", "-batch", "-"), inside)
}

func ip(command *exec.Cmd, lines []string) error {
	command.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
	if output, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("ip: %w: %s", err, strings.TrimSpace(string(output)))
	}
	return nil
}
