//go:build cuda

package gpu

import (
	"errors"
	"os"
	"path/filepath"
	"sync"

	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/internal/base/cuda/nvrtc"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
)

// Loader compiles the programs of kernels/gpu/internal/source for a device, or finds them compiled on disk,
// loads each once, and finds each of their functions once. All who launch kernels of ours share it.
// Any goroutine may use it.
type Loader struct {
	dev       *cuda.Device
	cache     nvrtc.Cache
	functions *functionCache

	mu      sync.Mutex
	modules map[string]func() (*cuda.Module, error) // guarded by mu; each does its work once
}

// NewLoader loads NVRTC, from dirs or from where the system has it, and keeps what it compiles
// in the folder of compiled kernels.
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

// cacheDir returns the folder of compiled kernels: cprun/kernels in the user's cache, or where
// there is none, in the folder for temporary files.
func cacheDir() string {
	dir, err := os.UserCacheDir()
	if err != nil {
		dir = os.TempDir()
	}
	return filepath.Join(dir, "cprun", "kernels")
}

// Device returns the device that programs are loaded on.
func (l *Loader) Device() *cuda.Device { return l.dev }

// Compiled returns how many programs had to be compiled, 0 in a second start.
func (l *Loader) Compiled() int { return l.cache.Compiled() }

// Fault says why compiled programs cannot be kept on disk, if so; they work without.
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

// Function returns a kernel of a program, which is loaded, and where it is not on disk compiled, the
// first time. shared is the most dynamic shared memory that it is launched with, in bytes.
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

// Preload loads programs, which are compiled beside each other where they have to be.
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
