//go:build cuda

package call

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/kernels/gpu/internal/source"
)

// A compiler builds libraries of GPU kernels for this machine, each once.
type compiler struct {
	cxx, dir string
	mu       sync.Mutex
	files    map[string]func() (string, error)
}

// shared is the compiler of all tests. TestMain removes its directory.
var shared compiler

func TestMain(m *testing.M) {
	code := m.Run()
	if shared.dir != "" {
		os.RemoveAll(shared.dir)
	}
	os.Exit(code)
}

// needCompiler returns the C++ compiler, which builds with the tag cuda also need.
func needCompiler(t testing.TB) *compiler {
	t.Helper()
	cxx, err := exec.LookPath("g++")
	ok(t, err)
	if shared.dir == "" {
		shared = compiler{cxx: cxx, files: map[string]func() (string, error){}}
		shared.dir, err = os.MkdirTemp("", "kernels-")
		ok(t, err)
		ok(t, os.CopyFS(shared.dir, os.DirFS("testdata/host")))
		_, headers, err := source.Program{File: "hopper.cuh"}.Source()
		ok(t, err)
		ok(t, shared.add(headers))
	}
	return &shared
}

// A file is built by make at its first use.
func (c *compiler) file(name string, make func(to string) error) (string, error) {
	c.mu.Lock()
	f := c.files[name]
	if f == nil {
		to := filepath.Join(c.dir, name+".so")
		f = sync.OnceValues(func() (string, error) { return to, make(to) })
		c.files[name] = f
	}
	c.mu.Unlock()
	return f()
}

// compile compiles a file of the directory.
func (c *compiler) compile(to, file string, more ...string) error {
	options := "-std=c++17 -O2 -fno-strict-aliasing -U_FORTIFY_SOURCE -Wno-unknown-pragmas -Wno-psabi -x c++"
	run := exec.Command(c.cxx, slices.Concat(strings.Fields(options), []string{file, "-o", to}, more)...)
	run.Dir = c.dir
	if out, err := run.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", file, err, out)
	}
	return nil
}

// text compiles the text of a kernel. It may include the directory's headers.
func (c *compiler) text(name string, code []byte, defines ...string) (string, error) {
	return c.file(name, func(to string) error { return c.kernel(to, name, code, defines) })
}

func (c *compiler) kernel(to, name string, code []byte, defines []string) error {
	if err := os.WriteFile(filepath.Join(c.dir, name+".cu"), code, 0o600); err != nil {
		return err
	}
	options := []string{"-shared", "-fPIC"}
	for _, d := range defines {
		options = append(options, "-D"+d)
	}
	return c.compile(to, name+".cu", options...)
}

// program compiles a program as NVRTC does, but with the headers in testdata/host.
func (c *compiler) program(name string) (string, error) {
	return c.file(name, func(to string) error {
		p, err := source.Find(name)
		if err != nil {
			return err
		}
		code, headers, err := p.Source()
		if err == nil {
			err = c.add(headers)
		}
		if err != nil {
			return err
		}
		return c.kernel(to, name, code, p.Defines)
	})
}

// add adds missing headers to the directory.
func (c *compiler) add(headers map[string][]byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for file, text := range headers {
		if _, there := os.Lstat(filepath.Join(c.dir, file)); there == nil {
			continue
		}
		if err := os.WriteFile(filepath.Join(c.dir, file), text, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// prepare compiles programs in parallel.
func (c *compiler) prepare(t testing.TB, names ...string) {
	t.Helper()
	var g errgroup.Group
	g.SetLimit(runtime.NumCPU())
	for _, name := range names {
		g.Go(func() error {
			_, err := c.program(name)
			return err
		})
	}
	ok(t, g.Wait())
}
