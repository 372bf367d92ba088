package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// imageStore is an OCI image layout (opencontainers/image-spec) on this machine, in place of a registry. An image has
// its name in the annotation org.opencontainers.image.ref.name.
type imageStore struct{ directory string }

// image is what a container needs of its image.
type image struct {
	layers []descriptor
	config struct{ Entrypoint, Cmd, Env []string }
}

type descriptor struct {
	MediaType   string
	Digest      string
	Annotations map[string]string
}

const refName = "org.opencontainers.image.ref.name"

func (s imageStore) find(name string) (*image, error) {
	var index struct{ Manifests []descriptor }
	if err := s.read("index.json", &index); err != nil {
		return nil, err
	}
	for _, listed := range index.Manifests {
		if listed.Annotations[refName] == name {
			return s.load(listed)
		}
	}
	return nil, fmt.Errorf("image %q is not in the layout %s", name, s.directory)
}

func (s imageStore) load(entry descriptor) (*image, error) {
	var manifest struct {
		Config descriptor
		Layers []descriptor
	}
	if err := s.read(blob(entry), &manifest); err != nil {
		return nil, err
	}
	found := &image{layers: manifest.Layers}
	var config struct{ Config any }
	config.Config = &found.config
	return found, s.read(blob(manifest.Config), &config)
}

func (s imageStore) read(name string, into any) error {
	content, err := os.ReadFile(filepath.Join(s.directory, name))
	if err != nil {
		return err
	}
	if err := json.Unmarshal(content, into); err != nil {
		return fmt.Errorf("%s in %s: %w", name, s.directory, err)
	}
	return nil
}

func blob(d descriptor) string { return filepath.Join("blobs", strings.ReplaceAll(d.Digest, ":", "/")) }

// files are an image's files after all layers.
func (s imageStore) files(of *image) (tree, error) {
	files := tree{}
	for _, layer := range of.layers {
		if err := s.unpack(layer, files); err != nil {
			return nil, fmt.Errorf("layer %s: %w", layer.Digest, err)
		}
	}
	return files, nil
}

func (s imageStore) unpack(layer descriptor, files tree) error {
	file, err := os.Open(filepath.Join(s.directory, blob(layer)))
	if err != nil {
		return err
	}
	defer file.Close()
	var stream io.Reader = file
	if strings.HasSuffix(layer.MediaType, "+gzip") {
		if stream, err = gzip.NewReader(file); err != nil {
			return err
		}
	}
	for archive := tar.NewReader(stream); ; {
		header, err := archive.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if err := apply(header, archive, files); err != nil {
			return fmt.Errorf("%s: %w", header.Name, err)
		}
	}
}

// apply makes one entry of a layer. A name that begins with .wh. removes what an earlier layer has.
func apply(header *tar.Header, content io.Reader, files tree) error {
	name := inside(header.Name)
	directory, base := path.Split(name)
	if base == ".wh..wh..opq" {
		files.removeBelow(directory)
		return nil
	}
	if hidden, is := strings.CutPrefix(base, ".wh."); is {
		files.remove(directory + hidden)
		return nil
	}
	permissions := uint32(header.Mode & 0o7777)
	switch header.Typeflag {
	case tar.TypeDir:
		files[name] = entry{mode: modeDirectory | permissions}
	case tar.TypeSymlink:
		files[name] = entry{mode: modeLink | 0o777, content: []byte(header.Linkname)}
	case tar.TypeLink:
		files[name] = files[inside(header.Linkname)]
	case tar.TypeReg:
		var bytes bytes.Buffer
		if _, err := io.Copy(&bytes, content); err != nil {
			return err
		}
		files[name] = entry{mode: modeFile | permissions, content: bytes.Bytes()}
	}
	return nil
}

// inside is a path without a leading slash that leads nowhere above the root.
func inside(name string) string { return strings.TrimPrefix(path.Clean("/"+name), "/") }
