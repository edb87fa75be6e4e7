//go:build cuda

package nvrtc

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/cprun/cprun/internal/base/files"
)

// Cache compiles programs and stores cubins in a folder. The key is a hash of the source, the headers, the options and
// the version of NVRTC. Goroutines and processes may share a folder: one compiles and the others read its result. The
// cache compiles damaged entries, of a crash or a full disk, again. Entries are small and never deleted.
type Cache struct {
	Compiler *Compiler
	Dir      string // "": no storage

	compiled atomic.Int64
	mu       sync.Mutex
	fault    error // guarded by mu
}

// Compiled returns the number of programs that were not stored and had to be compiled.
func (c *Cache) Compiled() int { return int(c.compiled.Load()) }

// Fault returns the first error of the folder. Programs still compile, at every start.
func (c *Cache) Fault() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.fault
}

func (c *Cache) blame(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fault == nil && err != nil {
		c.fault = fmt.Errorf("compiled kernels cannot be kept in %s, so that every start compiles them: %w", c.Dir, err)
	}
}

// Compile returns the stored cubin, or compiles the program as Compiler.Compile does.
func (c *Cache) Compile(name string, src []byte, headers map[string][]byte, opts []string) ([]byte, error) {
	if c.Dir == "" {
		return c.compile(name, src, headers, opts)
	}
	path := filepath.Join(c.Dir, Key(c.Compiler.Version(), name, src, headers, opts)+".cubin")
	if cubin, ok := read(path); ok {
		return cubin, nil
	}
	dir, err := files.Make(c.Dir)
	if err != nil {
		c.blame(err)
		return c.compile(name, src, headers, opts)
	}
	defer dir.Close()
	// The lock only avoids duplicate work, so it may fail: some file systems have no locks.
	defer lock(path + ".lock")()
	if cubin, ok := read(path); ok {
		return cubin, nil
	}
	cubin, err := c.compile(name, src, headers, opts)
	if err == nil {
		c.blame(write(dir, filepath.Base(path), cubin))
	}
	return cubin, err
}

func (c *Cache) compile(name string, src []byte, headers map[string][]byte, opts []string) ([]byte, error) {
	c.compiled.Add(1)
	cubin, _, err := c.Compiler.Compile(name, src, headers, opts)
	return cubin, err
}

// Key returns the hash that names a stored cubin.
func Key(version, name string, src []byte, headers map[string][]byte, opts []string) string {
	h := sha256.New()
	add := func(b []byte) { // with its length, so that different lists of parts have different bytes
		fmt.Fprintf(h, "%d:", len(b))
		h.Write(b)
	}
	add([]byte(version))
	add([]byte(name))
	add(src)
	for _, n := range slices.Sorted(maps.Keys(headers)) {
		add([]byte(n))
		add(headers[n])
	}
	fmt.Fprintf(h, "options %d:", len(opts))
	for _, o := range opts {
		add([]byte(o))
	}
	return hex.EncodeToString(h.Sum(nil))
}

// An entry is this line, the SHA-256 of the cubin, and the cubin.
const magic = "cprun cubin 1\n"

// maxCubin bounds the size of an entry, in bytes.
const maxCubin = 256 << 20

func read(path string) ([]byte, bool) {
	data, err := files.Read(path, maxCubin)
	if err != nil || !bytes.HasPrefix(data, []byte(magic)) || len(data) < len(magic)+sha256.Size {
		return nil, false
	}
	sum, cubin := data[len(magic):len(magic)+sha256.Size], data[len(magic)+sha256.Size:]
	got := sha256.Sum256(cubin)
	return cubin, bytes.Equal(got[:], sum)
}

// write stores an entry atomically.
func write(dir *os.Root, name string, cubin []byte) error {
	sum := sha256.Sum256(cubin)
	return files.WriteData(dir, name, slices.Concat([]byte(magic), sum[:], cubin))
}

// lock acquires the lock and returns a function that releases it and deletes the file. The end of a process also
// releases it. A waiter on a deleted file gets its own lock and finds the entry.
func lock(path string) func() {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return func() {}
	}
	// If this fails, two processes may compile the same program.
	for syscall.Flock(int(f.Fd()), syscall.LOCK_EX) == syscall.EINTR {
	}
	return func() {
		os.Remove(path)
		f.Close()
	}
}
