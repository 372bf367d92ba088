package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
)

// The servers of one Service share it, so that a client hears at once from any of them that its connection is unknown.
var statelessResetKey = quic.StatelessResetKey{}

// http3Server listens at the first argument and answers each request with the second, its name, and with the client's
// address.
func http3Server(arguments []string) error {
	address, name := arguments[0], arguments[1]
	certificate, err := selfSigned()
	if err != nil {
		return err
	}
	conn, err := net.ListenPacket("udp", address)
	if err != nil {
		return err
	}
	transport := &quic.Transport{Conn: conn, StatelessResetKey: &statelessResetKey}
	config := http3.ConfigureTLSConfig(&tls.Config{Certificates: []tls.Certificate{certificate}})
	listener, err := transport.ListenEarly(config, nil)
	if err != nil {
		return err
	}
	fmt.Println("listening")
	server := &http3.Server{Handler: http.HandlerFunc(func(response http.ResponseWriter, request *http.Request) {
		fmt.Fprintln(response, name, request.RemoteAddr)
	})}
	return server.ServeListener(listener)
}

func selfSigned() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	certificate, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	return tls.Certificate{Certificate: [][]byte{certificate}, PrivateKey: key}, err
}

// http3Client makes as many requests to the first argument as the second says, over one connection, and prints "first"
// and the first answer, then "all" and how often each came. It goes on until the connection is lost, says so, opens
// another one and prints "again" and what it answers.
func http3Client(arguments []string) error {
	url := arguments[0]
	count, err := strconv.Atoi(arguments[1])
	if err != nil {
		return err
	}
	client := newHTTP3Client()
	first, err := get(client, url)
	if err != nil {
		return err
	}
	fmt.Println("first", first)
	answers := map[string]int{}
	for range count {
		answer, err := get(client, url)
		if err != nil {
			return err
		}
		answers[answer]++
		time.Sleep(time.Millisecond)
	}
	fmt.Println("all", answers)
	for err == nil {
		_, err = get(client, url)
		time.Sleep(time.Millisecond)
	}
	fmt.Println("lost", err)
	again, err := get(newHTTP3Client(), url)
	if err != nil {
		return err
	}
	fmt.Println("again", again)
	return nil
}

// newHTTP3Client makes a client that connects once: when the connection is lost, its requests fail.
func newHTTP3Client() *http.Client {
	var conn *quic.Conn
	return &http.Client{Timeout: timeout, Transport: &http3.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
		Dial: func(ctx context.Context, address string, tls *tls.Config, config *quic.Config) (*quic.Conn, error) {
			if conn != nil {
				return nil, context.Cause(conn.Context())
			}
			dialled, err := quic.DialAddrEarly(ctx, address, tls, config)
			conn = dialled
			return dialled, err
		},
	}}
}

func get(client *http.Client, url string) (string, error) {
	response, err := client.Get(url)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	return strings.TrimSpace(string(body)), err
}
