package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/virtual-kubelet/virtual-kubelet/node/api"
)

// logFile is a container's output, each line with its time. The oldest lines go when it is too long.
type logFile struct {
	mu      sync.Mutex
	lines   []logLine
	dropped int
	more    chan struct{} // closed with the next line
	isWhole bool
}

type logLine struct {
	at   time.Time
	text string
}

const maxLogLines = 20_000

func newLogFile() *logFile { return &logFile{more: make(chan struct{})} }

func (l *logFile) add(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.lines) == maxLogLines {
		l.lines = append([]logLine{}, l.lines[maxLogLines/2:]...)
		l.dropped += maxLogLines / 2
	}
	l.lines = append(l.lines, logLine{time.Now(), text})
	close(l.more)
	l.more = make(chan struct{})
}

// end says that no line comes any more.
func (l *logFile) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.isWhole = true
	close(l.more)
	l.more = make(chan struct{})
}

// since returns the lines from a position on, and the next position.
func (l *logFile) since(position int) (lines []logLine, next int, more chan struct{}, isWhole bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	position = max(position, l.dropped)
	return l.lines[position-l.dropped:], l.dropped + len(l.lines), l.more, l.isWhole
}

// read serves `kubectl logs`.
func (l *logFile) read(ctx context.Context, options api.ContainerLogOpts) io.ReadCloser {
	lines, position, _, _ := l.since(0)
	if options.Tail > 0 && len(lines) > options.Tail {
		lines = lines[len(lines)-options.Tail:]
	}
	text := format(lines, options)
	if !options.Follow {
		return io.NopCloser(strings.NewReader(text))
	}
	reader, writer := io.Pipe()
	go func() {
		defer writer.Close()
		for isWhole := false; ; {
			if _, err := io.WriteString(writer, text); err != nil || isWhole {
				return
			}
			var more chan struct{}
			lines, position, more, isWhole = l.since(position)
			if text = format(lines, options); text != "" || isWhole {
				continue
			}
			select {
			case <-ctx.Done():
				return
			case <-more:
			}
		}
	}()
	return reader
}

func format(lines []logLine, options api.ContainerLogOpts) string {
	since := options.SinceTime
	if options.SinceSeconds > 0 {
		since = time.Now().Add(-time.Duration(options.SinceSeconds) * time.Second)
	}
	var text bytes.Buffer
	for _, line := range lines {
		if line.at.Before(since) {
			continue
		}
		if options.Timestamps {
			fmt.Fprint(&text, line.at.UTC().Format(time.RFC3339Nano), " ")
		}
		fmt.Fprintln(&text, line.text)
	}
	return text.String()
}
