//go:build cuda

package call

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"unsafe"

	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/tensor"
)

// A host runs GPU kernels on this machine: their source, compiled as C++ with the instructions of testdata/host, in
// another process with shared memory. It shows results and detects wrong addresses, alignments and barriers. It does
// not show the rounding of a GPU's instructions, races other than those in its two orders of threads, errors of the
// kernels' compiler or of a GPU, or speed.
type host struct {
	t        testing.TB
	compiler *compiler
	in       io.WriteCloser
	out      io.Reader
	faults   *bytes.Buffer
	cmd      *exec.Cmd
	memory   []byte // shared with the process
	used     int
	base     uint64 // address in the process
	started  int    // number of launches
	ran      map[string]bool
	during   func(over <-chan struct{}) // runs during a kernel, if not nil
}

// hostMemory bounds the memory of a case's tensors.
const hostMemory = 64 << 20

func newHost(t testing.TB) *host { return newHostOf(t, hostMemory) }

// newHostOf returns a host with that many bytes of memory. Pages without a write take none.
func newHostOf(t testing.TB, memory int) *host {
	t.Helper()
	h := &host{t: t, compiler: needCompiler(t), faults: &bytes.Buffer{}, ran: map[string]bool{}}
	runner, err := h.compiler.file("run", func(to string) error {
		return h.compiler.compile(to, "run.cpp", "memory.cpp", "engine.cpp", "products.cpp", "-rdynamic")
	})
	ok(t, err)
	f, err := os.Create(filepath.Join(t.TempDir(), "memory"))
	ok(t, err)
	defer f.Close()
	ok(t, f.Truncate(int64(memory)))
	h.memory, err = syscall.Mmap(int(f.Fd()), 0, memory, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	ok(t, err)
	t.Cleanup(func() { syscall.Munmap(h.memory) })

	h.cmd = exec.Command(runner, f.Name(), fmt.Sprint(memory))
	h.cmd.Stderr = h.faults
	h.in, err = h.cmd.StdinPipe()
	ok(t, err)
	h.out, err = h.cmd.StdoutPipe()
	ok(t, err)
	ok(t, h.cmd.Start())
	t.Cleanup(func() { h.in.Close(); h.cmd.Wait() }) // the process ends when its input is closed
	ok(t, binary.Read(h.out, binary.NativeEndian, &h.base))
	return h
}

// alloc returns memory that kernels can access.
func (h *host) alloc(bytes int64) (*tensor.Host, error) {
	const align = 256
	at := (h.used + align - 1) / align * align
	if at+int(bytes) > len(h.memory) {
		return nil, fmt.Errorf("%d bytes more than the %d of the host", bytes, len(h.memory))
	}
	h.used = at + int(bytes)
	return tensor.HostAt(unsafe.Pointer(&h.memory[at]), bytes), nil
}

// launch runs a flash kernel.
func (h *host) launch(l Launch) error {
	err := h.complete(&l.Params, HopperLists{Tiles: l.Tiles}, nil, nil, nil)
	if err != nil {
		return err
	}
	return h.start(l.Program, l.Kernel, l.Grid, [2]int{l.Threads, 1}, l.Shared, arguments{FlashParams: l.Params})
}

// arguments holds the largest struct argument of a kernel. A function finds a smaller struct, passed by value, at its
// beginning.
type arguments struct {
	source.FlashParams
	More [4096 - unsafe.Sizeof(source.FlashParams{})]byte
}

// argumentsOf converts a struct without gaps to arguments.
func argumentsOf[T any](x *T) (a arguments) {
	*(*T)(unsafe.Pointer(&a)) = *x
	return a
}

// start runs a kernel of a program. Its arguments have addresses of the other process.
func (h *host) start(program, kernel string, grid [3]int, block [2]int, shared int, a arguments) error {
	library, err := h.compiler.program(program)
	if err != nil {
		return err
	}
	message := struct {
		Library [256]byte
		Kernel  [64]byte
		Grid    [3]int32
		Threads, Columns, Shared,
		Descending, Unused int32
		Params arguments
	}{Threads: int32(block[0] * block[1]), Columns: int32(block[0]), Shared: int32(shared),
		Descending: int32(h.started % 2), Params: a}
	h.started++
	h.ran[program] = true
	copy(message.Library[:255], library)
	copy(message.Kernel[:63], kernel)
	for i, n := range grid {
		message.Grid[i] = int32(n)
	}
	err = binary.Write(h.in, binary.NativeEndian, &message)
	if err == nil {
		over, done := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(done)
			if h.during != nil {
				h.during(over)
			}
		}()
		_, err = io.ReadFull(h.out, make([]byte, 1))
		close(over)
		<-done
	}
	if err != nil {
		h.cmd.Wait()
		return fmt.Errorf("%s: %w: %s", program, err, h.faults)
	}
	return nil
}

// move converts addresses of this process to addresses of the other.
func (h *host) move(addresses ...*uint64) {
	here := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(h.memory))))
	for _, at := range addresses {
		if *at != 0 {
			*at += h.base - here
		}
	}
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
