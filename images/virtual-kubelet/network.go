package main

import (
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"sync"
)

// network is a bridge with the VMs' tap devices on it. Its own address is the pods' gateway.
type network struct {
	bridge string
	prefix netip.Prefix // with the bridge's address

	mu   sync.Mutex
	used map[netip.Addr]bool
	last netip.Addr // the latest one; an address is used again as late as possible
}

// attach takes a free address and makes a tap device for it.
func (n *network) attach() (address netip.Addr, tap string, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if address, err = n.free(); err != nil {
		return address, "", err
	}
	bytes := address.As4()
	tap = fmt.Sprintf("vm%d-%d", bytes[2], bytes[3])
	if err := ip("tuntap", "add", "dev", tap, "mode", "tap"); err != nil {
		return address, "", err
	}
	if err := ip("link", "set", "dev", tap, "up", "master", n.bridge); err != nil {
		n.remove(tap)
		return address, "", err
	}
	n.used[address], n.last = true, address
	return address, tap, nil
}

// free is the next free address after the latest one.
func (n *network) free() (netip.Addr, error) {
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
			return address, nil
		}
		address = address.Next()
	}
	return address, fmt.Errorf("all addresses of %s are in use", n.prefix.Masked())
}

func (n *network) detach(address netip.Addr, tap string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.remove(tap)
	delete(n.used, address)
}

// remove fails only if the device is gone already.
func (n *network) remove(tap string) { _ = ip("link", "delete", "dev", tap) }

// mac is the hardware address that belongs to a pod's address.
func mac(address netip.Addr) string {
	bytes := address.As4()
	return fmt.Sprintf("52:54:%02x:%02x:%02x:%02x", bytes[0], bytes[1], bytes[2], bytes[3])
}

func ip(arguments ...string) error {
	output, err := exec.Command("ip", arguments...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip %s: %s", strings.Join(arguments, " "), strings.TrimSpace(string(output)))
	}
	return nil
}
