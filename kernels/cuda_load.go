//go:build cuda

package kernels

import (
	"errors"
	"os"
	"path/filepath"
	"sync"

	"github.com/cprun/cprun/internal/cuda"
	"github.com/cprun/cprun/internal/cuda/nvrtc"
	"github.com/cprun/cprun/kernels/source"
)

// Loader compiles the programs of kernels/source for a device, or finds them compiled on disk,
// and loads each once. Any goroutine may use it.
type Loader struct {
	dev   *cuda.Device
	cache nvrtc.Cache

	mu      sync.Mutex
	modules map[string]func() (*cuda.Module, error) // guarded by mu; each does its work once
}

// NewLoader loads NVRTC, from dirs or from where the system has it, and keeps what it compiles
// in CacheDir.
func NewLoader(dev *cuda.Device, dirs ...string) (*Loader, error) {
	compiler, err := nvrtc.Open(dirs...)
	if err != nil {
		return nil, err
	}
	return &Loader{
		dev:     dev,
		cache:   nvrtc.Cache{Compiler: compiler, Dir: CacheDir()},
		modules: map[string]func() (*cuda.Module, error){},
	}, nil
}

// CacheDir is the folder of compiled kernels: cprun/kernels in the user's cache, or where
// there is none, in the folder for temporary files.
func CacheDir() string {
	dir, err := os.UserCacheDir()
	if err != nil {
		dir = os.TempDir()
	}
	return filepath.Join(dir, "cprun", "kernels")
}

// Device is what programs are loaded on.
func (l *Loader) Device() *cuda.Device { return l.dev }

// Compiled is how many programs had to be compiled, 0 in a second start.
func (l *Loader) Compiled() int { return l.cache.Compiled() }

// Fault says why compiled programs cannot be kept on disk, if so; they work without.
func (l *Loader) Fault() error { return l.cache.Fault() }

// Load is the program of that name in source.Programs.
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
