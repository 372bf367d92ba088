package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/mattfenwick/cyclonus/pkg/worker"
)

// patience is the limit on one call. What is denied fails at once, but for datagrams beyond the kernel's limit on ICMP
// messages, which are lost.
const patience = 500 * time.Millisecond

// makeCalls makes the calls of a batch, all at the same time, and writes their results.
func makeCalls(input io.Reader, output io.Writer) error {
	var batch worker.Batch
	if err := json.NewDecoder(input).Decode(&batch); err != nil {
		return err
	}
	results := make([]*worker.Result, len(batch.Requests))
	var calls sync.WaitGroup
	for i, request := range batch.Requests {
		calls.Go(func() {
			results[i] = &worker.Result{Request: request}
			if err := call(request); err != nil {
				results[i].Error = err.Error()
			}
		})
	}
	calls.Wait()
	return json.NewEncoder(output).Encode(results)
}

// call connects, or sends a datagram and waits for its reply, as `agnhost connect` does.
func call(request *worker.Request) error {
	connection, err := net.DialTimeout(strings.ToLower(string(request.Protocol)), request.Address(), patience)
	if err != nil {
		return err
	}
	defer connection.Close()
	if request.Protocol != "UDP" {
		return nil
	}
	if err := connection.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if _, err := fmt.Fprintln(connection, "hello"); err != nil {
		return err
	}
	_, err = connection.Read(make([]byte, 512))
	return err
}
