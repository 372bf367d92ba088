package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"sync"
)

// network is a bridge with the pods' links on it. Its own addresses are the pods' gateways. A pod has a number, which
// is the last byte of its addresses.
type network struct {
	bridge   string
	prefixes []netip.Prefix // of each family, the main one first, with the bridge's address

	mu   sync.Mutex
	used map[byte]bool
	last byte // the latest one; a number is used again as late as possible
}

const (
	firstNumber = 2 // behind the bridge's
	lastNumber  = 254
)

// take takes the next free number after the latest one.
func (n *network) take() (byte, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for range lastNumber {
		if n.last++; n.last < firstNumber || n.last > lastNumber {
			n.last = firstNumber
		}
		if !n.used[n.last] {
			n.used[n.last] = true
			return n.last, nil
		}
	}
	return 0, errors.New("all addresses are in use")
}

func (n *network) give(number byte) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.used, number)
}

// addresses are those of a pod.
func (n *network) addresses(number byte) []netip.Addr {
	var addresses []netip.Addr
	for _, prefix := range n.prefixes {
		bytes := prefix.Addr().AsSlice()
		bytes[len(bytes)-1] = number
		address, _ := netip.AddrFromSlice(bytes)
		addresses = append(addresses, address)
	}
	return addresses
}

// connect gives the network namespace of a process a link to the bridge, with the addresses of a pod. The link ends
// with the namespace.
func (n *network) connect(process int, number byte) error {
	link := fmt.Sprintf("%s-%d", n.bridge, number)
	outside := []string{
		fmt.Sprintf("link add %s type veth peer name eth0 netns %d", link, process),
		fmt.Sprintf("link set %s up master %s", link, n.bridge),
	}
	inside := []string{"link set lo up", "link set eth0 up"}
	for i, address := range n.addresses(number) {
		gateway, nodad := n.prefixes[i].Addr(), ""
		if address.Is6() {
			nodad = "nodad"
		}
		all := netip.PrefixFrom(gateway, 0).Masked()
		inside = append(inside, fmt.Sprintf("address add %s/%d dev eth0 %s", address, n.prefixes[i].Bits(), nodad),
			fmt.Sprintf("route add %s via %s", all, gateway))
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
