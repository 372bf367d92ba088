// Programs written in Go, as one static binary: the Go runtime makes its system calls itself, resolves names itself and
// has its own ideas about dual-stack sockets. Called without libc on its way, it is what most of a cluster is made of.
package main

import (
	"fmt"
	"os"
)

func main() {
	commands := map[string]func([]string) error{
		"client":       client,
		"http3-server": http3Server,
		"http3-client": http3Client,
	}
	if len(os.Args) < 2 || commands[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: programs client|http3-server|http3-client ARGUMENT...")
		os.Exit(2)
	}
	if err := commands[os.Args[1]](os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
