//go:build cuda

package cuda

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cprun/cprun/internal/base/cuda/nvrtc"
	"github.com/cprun/cprun/internal/base/must"
)

func device(t testing.TB) *Device {
	t.Helper()
	d := must.Have(Open(0))
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func stream(t testing.TB, d *Device, name string) *Stream {
	t.Helper()
	s := must.Have(d.NewStream(name, false))
	t.Cleanup(func() { s.Close() }) // a test that poisons the stream has seen its error
	return s
}

func pinned(t testing.TB, d *Device, bytes int64) *Pinned {
	t.Helper()
	p := must.Have(d.AllocHost(bytes))
	t.Cleanup(func() { p.Free() })
	return p
}

func wait(t testing.TB, s *Stream) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	must.Do(t, s.Sync(ctx))
}

func size[T any](n int) int64 {
	var x T
	return int64(n) * int64(unsafe.Sizeof(x))
}

// put copies xs to device memory.
func put[T any](t testing.TB, s *Stream, xs []T) *Memory {
	t.Helper()
	m, p := must.Have(s.dev.Alloc(size[T](len(xs)))), pinned(t, s.dev, size[T](len(xs)))
	copy(unsafe.Slice((*T)(p.ptr()), len(xs)), xs)
	s.Copy(m.addr, uint64(uintptr(p.ptr())), size[T](len(xs)))
	wait(t, s)
	return m
}

// get copies n elements from device memory.
func get[T any](t testing.TB, s *Stream, addr uint64, n int) []T {
	t.Helper()
	p := pinned(t, s.dev, size[T](n))
	s.Copy(uint64(uintptr(p.ptr())), addr, size[T](n))
	wait(t, s)
	return append([]T(nil), unsafe.Slice((*T)(p.ptr()), n)...)
}

// compile compiles source for the device.
func compile(t testing.TB, d *Device, src string) *Module {
	t.Helper()
	c := must.Have(nvrtc.Open("../../../.cuda/lib"))
	arch := fmt.Sprintf("sm_%d", d.Arch)
	if d.Arch >= 90 {
		arch += "a"
	}
	cubin, _, err := c.Compile("test.cu", []byte(src), nil, []string{"--gpu-architecture=" + arch, "--std=c++17"})
	if err != nil {
		t.Fatal(err)
	}
	return must.Have(d.Load(cubin))
}

// A gate blocks a stream until it is opened. Its kernel is loaded first, since loading a kernel may wait for the
// device.
type gate struct {
	f    *Function
	flag *Pinned
}

func newGate(t testing.TB, s *Stream) *gate {
	t.Helper()
	g := &gate{flag: pinned(t, s.dev, 8)}
	const spin = `extern "C" __global__ void gate(volatile int *flag) { while (!*flag) __nanosleep(1000); }`
	g.f = must.Have(compile(t, s.dev, spin).Function("gate", 0))
	g.open()
	g.hold(s)
	wait(t, s)
	atomic.StoreInt32((*int32)(g.flag.ptr()), 0)
	t.Cleanup(g.open) // so that the kernel does not spin for ever
	return g
}

func (g *gate) hold(s *Stream) {
	s.Launch(g.f, Launch{Grid: Dim{X: 1}, Block: Dim{X: 1}}, new(Args).Addr(uint64(uintptr(g.flag.ptr()))))
}

func (g *gate) open() { atomic.StoreInt32((*int32)(g.flag.ptr()), 1) }
