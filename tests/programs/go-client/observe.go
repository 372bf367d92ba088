package main

import (
	"context"
	"maps"
	"net"
	"net/http"
	"strings"
	"sync"

	"k8s.io/client-go/tools/cache"
)

// counts are numbers by name.
type counts struct {
	mutex   sync.Mutex
	numbers map[string]int
}

func (c *counts) add(name string) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.numbers == nil {
		c.numbers = map[string]int{}
	}
	c.numbers[name]++
}

func (c *counts) all() map[string]int {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return maps.Clone(c.numbers)
}

// counter counts requests by their purpose.
type counter struct{ numbers counts }

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(request *http.Request) (*http.Response, error) { return f(request) }

func (c *counter) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(request *http.Request) (*http.Response, error) {
		response, err := next.RoundTrip(request)
		if err == nil && response.StatusCode == http.StatusOK {
			c.numbers.add(purpose(request))
		}
		return response, err
	})
}

func (c *counter) counts() map[string]int { return c.numbers.all() }

// purpose is "list", "watch-list" for a list that comes as events, or "watch".
func purpose(request *http.Request) string {
	query := request.URL.Query()
	switch {
	case strings.HasPrefix(request.URL.Path, "/version"):
		return "version"
	case query.Get("sendInitialEvents") == "true":
		return "watch-list"
	case query.Get("watch") == "true":
		return "watch"
	default:
		return "list"
	}
}

// eventCounter counts events by resource and kind.
type eventCounter struct{ numbers counts }

func (c *eventCounter) handler(resource string) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { c.numbers.add(resource + " added") },
		UpdateFunc: func(any, any) { c.numbers.add(resource + " changed") },
		DeleteFunc: func(any) { c.numbers.add(resource + " deleted") },
	}
}

func (c *eventCounter) counts() map[string]int { return c.numbers.all() }

// movable connects to the server of the configuration, or to the one that it was moved to.
type movable struct {
	mutex       sync.Mutex
	target      string
	connections []net.Conn
}

func (m *movable) dial(ctx context.Context, network, address string) (net.Conn, error) {
	m.mutex.Lock()
	if m.target != "" {
		address = m.target
	}
	m.mutex.Unlock()
	var dialer net.Dialer
	connection, err := dialer.DialContext(ctx, network, address)
	if err == nil {
		m.mutex.Lock()
		m.connections = append(m.connections, connection)
		m.mutex.Unlock()
	}
	return connection, err
}

// move closes all connections. Later ones go to the target.
func (m *movable) move(target string) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.target = target
	for _, connection := range m.connections {
		connection.Close()
	}
	m.connections = nil
}
