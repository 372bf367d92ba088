package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/netip"
	"strings"
	"syscall"
	"time"
)

const timeout = 10 * time.Second

// answer is what a server said, and whom the program believes to have talked to.
type answer struct{ text, peer string }

// client carries out arguments of the form OPERATION=TARGET, and prints a line for each: what was asked, the answer and
// the peer, with tabs between them. ClientPrograms in the tests says what each operation is.
func client(arguments []string) error {
	operations := map[string]func(string) (answer, error){
		"http":        httpGet,
		"tcp":         func(target string) (answer, error) { return greeting(&net.Dialer{}, target) },
		"mptcp":       multipath,
		"udp":         connectedUDP,
		"unconnected": unconnectedUDP,
		"resolve":     resolve,
	}
	for _, argument := range arguments {
		operation, target, _ := strings.Cut(argument, "=")
		answer, err := operations[operation](target)
		switch {
		case errors.Is(err, syscall.ECONNREFUSED):
			answer.text, answer.peer = "refused", "-"
		case err != nil:
			return fmt.Errorf("%s: %w", argument, err)
		}
		fmt.Printf("%s\t%s\t%s\n", argument, answer.text, answer.peer)
	}
	return nil
}

func httpGet(url string) (answer, error) {
	var peer string
	trace := &httptrace.ClientTrace{GotConn: func(got httptrace.GotConnInfo) { peer = got.Conn.RemoteAddr().String() }}
	request, err := http.NewRequestWithContext(httptrace.WithClientTrace(context.Background(), trace), "GET", url, nil)
	if err != nil {
		return answer{}, err
	}
	response, err := (&http.Client{Timeout: timeout}).Do(request)
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	return answer{strings.TrimSpace(string(body)), peer}, err
}

// greeting reads the first line that an echo server says. Only a failure makes it try the next address of a name: it
// would wait an hour for anything else.
func greeting(dialer *net.Dialer, target string) (answer, error) {
	dialer.Timeout, dialer.FallbackDelay = 2*time.Hour, time.Hour
	conn, err := dialer.Dial("tcp", target)
	if err != nil {
		return answer{}, err
	}
	defer conn.Close()
	line, err := bufio.NewReader(conn).ReadString('\n')
	return answer{strings.TrimSpace(line), conn.RemoteAddr().String()}, err
}

// multipath's connection is made by a socket of the kernel's own, behind the application's.
func multipath(target string) (answer, error) {
	dialer := &net.Dialer{}
	dialer.SetMultipathTCP(true)
	return greeting(dialer, target)
}

func connectedUDP(target string) (answer, error) {
	conn, err := net.Dial("udp", target)
	if err != nil {
		return answer{}, err
	}
	defer conn.Close()
	if _, err := conn.Write([]byte("connected")); err != nil {
		return answer{}, err
	}
	name, err := receive(conn.(*net.UDPConn), "connected")
	return answer{name.text, conn.RemoteAddr().String()}, err
}

// unconnectedUDP sends from a socket of either family, which for Go is one AF_INET6 socket with IPv4-mapped addresses.
func unconnectedUDP(target string) (answer, error) {
	conn, err := net.ListenPacket("udp", ":0")
	if err != nil {
		return answer{}, err
	}
	defer conn.Close()
	to, err := netip.ParseAddrPort(target)
	if err != nil {
		return answer{}, err
	}
	if _, err := conn.WriteTo([]byte("unconnected"), net.UDPAddrFromAddrPort(to)); err != nil {
		return answer{}, err
	}
	return receive(conn.(*net.UDPConn), "unconnected")
}

// receive takes the answer to question, which repeats it after the server's name.
func receive(conn *net.UDPConn, question string) (answer, error) {
	if err := conn.SetReadDeadline(time.Now().Add(timeout)); err != nil {
		return answer{}, err
	}
	buffer := make([]byte, 2048)
	length, from, err := conn.ReadFrom(buffer)
	if err != nil {
		return answer{}, err
	}
	name, ok := strings.CutSuffix(string(buffer[:length]), " "+question)
	if !ok {
		return answer{}, fmt.Errorf("%q is no answer to %q", buffer[:length], question)
	}
	return answer{name, from.String()}, nil
}

// resolve asks the nameservers in resolv.conf, without libc.
func resolve(name string) (answer, error) {
	addresses, err := (&net.Resolver{PreferGo: true}).LookupHost(context.Background(), name)
	return answer{strings.Join(addresses, " "), "-"}, err
}
