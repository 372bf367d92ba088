package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
)

// Types of files, as stat(2) has them.
const (
	modeDirectory = 0o040000
	modeFile      = 0o100000
	modeLink      = 0o120000
)

// entry is a file, a directory or a symbolic link with its target as the content.
type entry struct {
	mode    uint32
	content []byte
}

// tree is a set of files by their paths, without leading slashes.
type tree map[string]entry

func (t tree) add(name, content string) { t[inside(name)] = entry{modeFile | 0o644, []byte(content)} }
func (t tree) program(name, content string) {
	t[inside(name)] = entry{modeFile | 0o755, []byte(content)}
}
func (t tree) directory(name string) { t[inside(name)] = entry{mode: modeDirectory | 0o755} }

// below adds all of another tree below a directory.
func (t tree) below(directory string, other tree) {
	for name, entry := range other {
		t[inside(directory+"/"+name)] = entry
	}
}

func (t tree) remove(name string) {
	delete(t, name)
	t.removeBelow(name + "/")
}

func (t tree) removeBelow(directory string) {
	for name := range t {
		if strings.HasPrefix(name, directory) {
			delete(t, name)
		}
	}
}

// writeInitramfs writes cproxy's initramfs followed by the pod's files, which the kernel unpacks one after the other.
func writeInitramfs(file, base string, pod tree) error {
	first, err := os.ReadFile(base)
	if err != nil {
		return err
	}
	// It has credentials in it.
	out, err := os.OpenFile(file, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	writer := bufio.NewWriter(out)
	writer.Write(first)
	pad(writer, len(first))
	pod.writeTo(writer)
	if err := writer.Flush(); err != nil {
		return err
	}
	return out.Close()
}

// writeTo writes the archive that Linux unpacks as its first root ("newc", in the kernel's
// Documentation/driver-api/early-userspace/buffer-format.rst), with the directories on the way to each file.
func (t tree) writeTo(writer *bufio.Writer) {
	for name := range t {
		for parent := path.Dir(name); parent != "."; parent = path.Dir(parent) {
			if _, known := t[parent]; !known {
				t.directory(parent)
			}
		}
	}
	names := make([]string, 0, len(t))
	for name := range t {
		names = append(names, name)
	}
	// A directory comes before what is in it.
	slices.Sort(names)
	for number, name := range names {
		if name != "" {
			writeEntry(writer, number+1, name, t[name])
		}
	}
	writeEntry(writer, 0, "TRAILER!!!", entry{})
}

func writeEntry(writer *bufio.Writer, number int, name string, of entry) {
	header := fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		number, of.mode, 0, 0, 1, 0, len(of.content), 0, 0, 0, 0, len(name)+1, 0)
	io.WriteString(writer, header+name+"\x00")
	pad(writer, len(header)+len(name)+1)
	writer.Write(of.content)
	pad(writer, len(of.content))
}

// pad writes zeros up to a multiple of four. Errors stay in the writer until it is flushed.
func pad(writer *bufio.Writer, written int) {
	writer.Write(make([]byte, (4-written%4)%4))
}
