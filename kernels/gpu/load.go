//go:build cuda

package gpu

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/internal/base/cuda/blas"
	"github.com/cprun/cprun/internal/base/cuda/nvrtc"
	"github.com/cprun/cprun/kernels/gpu/internal/call"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/tensor"
)

// Loader compiles the programs of kernels/gpu/internal/source for a device, or finds them compiled on disk. It loads
// each program once and looks up each function once. All users of cprun's own kernels share it. Any goroutine may use
// it.
type Loader struct {
	dev       *cuda.Device
	cache     nvrtc.Cache
	functions *functionCache

	mu      sync.Mutex
	modules map[string]func() (*cuda.Module, error) // guarded by mu; each loads once
}

// NewLoader loads NVRTC, from dirs or the system's folders. The loader stores compiled programs in cacheDir.
func NewLoader(dev *cuda.Device, dirs ...string) (*Loader, error) {
	compiler, err := nvrtc.Open(dirs...)
	if err != nil {
		return nil, err
	}
	l := &Loader{
		dev:     dev,
		cache:   nvrtc.Cache{Compiler: compiler, Dir: cacheDir()},
		modules: map[string]func() (*cuda.Module, error){},
	}
	l.functions = newFunctionCache(l.find)
	return l, nil
}

// cacheDir returns the folder of compiled kernels: cprun/kernels in the user's cache, or else in the folder for
// temporary files.
func cacheDir() string {
	dir, err := os.UserCacheDir()
	if err != nil {
		dir = os.TempDir()
	}
	return filepath.Join(dir, "cprun", "kernels")
}

// Device returns the device that programs are loaded on.
func (l *Loader) Device() *cuda.Device { return l.dev }

// Fault returns the error of storing compiled programs on disk, if any. They work all the same.
func (l *Loader) Fault() error { return l.cache.Fault() }

// Load returns the program of that name in source.Programs.
func (l *Loader) Load(name string) (*cuda.Module, error) {
	l.mu.Lock()
	f := l.modules[name]
	if f == nil {
		f = sync.OnceValues(func() (*cuda.Module, error) { return l.load(name) })
		l.modules[name] = f
	}
	l.mu.Unlock()
	return f()
}

// Function returns a kernel of a program. The first call loads the program, and compiles it if it is not on disk.
// shared is the largest dynamic shared memory of its launches, in bytes.
func (l *Loader) Function(program, name string, shared int) (*cuda.Function, error) {
	return l.functions.get(functionKey{program, name, shared})
}

func (l *Loader) find(k functionKey) (*cuda.Function, error) {
	m, err := l.Load(k.program)
	if err != nil {
		return nil, err
	}
	return m.Function(k.name, k.shared)
}

// Preload loads programs, and compiles missing ones in parallel.
func (l *Loader) Preload(names ...string) error {
	errs := make([]error, len(names))
	var wg sync.WaitGroup
	for i, name := range names {
		wg.Go(func() { _, errs[i] = l.Load(name) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (l *Loader) load(name string) (*cuda.Module, error) {
	p, err := source.Find(name)
	if err != nil {
		return nil, err
	}
	code, headers, err := p.Source()
	if err != nil {
		return nil, err
	}
	cubin, err := l.cache.Compile(p.File, code, headers, p.Options(source.Arch(l.dev.Arch)))
	if err != nil {
		return nil, err
	}
	return l.dev.Load(cubin)
}

// A functionKey names a function and the largest dynamic shared memory of its launches, in bytes.
type functionKey struct {
	program, name string
	shared        int
}

// functionCache looks up each function of the driver once. Any goroutine may use it. Every launch calls get, which does
// not allocate for a known function.
type functionCache struct {
	find func(functionKey) (*cuda.Function, error) // looks up a function in the driver

	mu    sync.RWMutex
	known map[functionKey]*cuda.Function // guarded by mu
}

func newFunctionCache(find func(functionKey) (*cuda.Function, error)) *functionCache {
	return &functionCache{find: find, known: map[functionKey]*cuda.Function{}}
}

// get returns the function of k. It does not cache errors: the next call tries again.
func (c *functionCache) get(k functionKey) (*cuda.Function, error) {
	c.mu.RLock()
	f := c.known[k]
	c.mu.RUnlock()
	if f != nil {
		return f, nil
	}
	return c.add(k)
}

func (c *functionCache) add(k functionKey) (*cuda.Function, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f := c.known[k]; f != nil {
		return f, nil
	}
	// The driver has one limit of shared memory per function. It must not decrease, for holders of the function.
	most := k
	for other := range c.known {
		if other.program == k.program && other.name == k.name {
			most.shared = max(most.shared, other.shared)
		}
	}
	f, err := c.find(most)
	if err == nil {
		c.known[k] = f
	}
	return f, err
}

// View is a strided window onto memory; see package tensor.
type View = tensor.View

// Ops computes the operations of the model and the optimizer on a GPU. Its methods queue work on its stream and return
// at once. An error of the device poisons the stream; a wrong shape or type panics, as on the CPU. One goroutine may
// use it at a time.
type Ops struct {
	stream *cuda.Stream
	loader *Loader
	blocks map[blocksKey]int // resident on an SM
	memory *cuda.Memory      // the workspace
	taken  *cuda.Memory      // the counters of hopper_group.cu; nil before their first use
	blas   *blas.Handle
}

// NewOps returns operations that compute on stream. The caller closes stream. They allocate OpsWorkspace and
// LinearWorkspace bytes on the device.
func NewOps(stream *cuda.Stream, loader *Loader) (*Ops, error) {
	c := NewOptim(stream, loader)
	var err error
	if c.memory, err = loader.Device().Alloc(OpsWorkspace); err != nil {
		return nil, fmt.Errorf("workspace of the operations: %w", err)
	}
	if c.blas, err = openBlas(stream); err != nil {
		return nil, err
	}
	return c, nil
}

// NewOptim returns an Ops for AdamW only: it allocates no workspace.
func NewOptim(stream *cuda.Stream, loader *Loader) *Ops {
	return &Ops{stream: stream, loader: loader, blocks: map[blocksKey]int{}}
}

// Close releases cuBLASLt. The stream must be done.
func (c *Ops) Close() error { return c.blas.Close() }

// Stream returns the stream that the work is queued on.
func (c *Ops) Stream() *cuda.Stream { return c.stream }

func length(v View, axis tensor.Axis) int32 { return call.Length(v, axis) }

func ceilDiv(n, of int) int { return (n + of - 1) / of }

func cInt(b bool) int32 {
	if b {
		return 1
	}
	return 0
}
