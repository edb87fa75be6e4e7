//go:build cuda

package device

import (
	"errors"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/tensor"
)

// TestKeepNear checks that the process of a GPU runs on cores next to it, as the kernel lists them under the GPU's name
// on the bus, and on all its cores if they are too few.
func TestKeepNear(t *testing.T) {
	var before, after unix.CPUSet
	var notes []string
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		t.Fatal(err)
	}
	var closers []func() error
	s, err := openGPU(CUDAOptions{Note: func(text string) { notes = append(notes, text) }}, &closers)
	defer closeAll(closers)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.SchedGetaffinity(0, &after); err != nil {
		t.Fatal(err)
	}
	list, err := os.ReadFile("/sys/bus/pci/devices/" + s.dev.Bus() + "/local_cpulist")
	t.Logf("%s: cores %s of %d; notes %q; %v", s.dev.Bus(), strings.TrimSpace(string(list)), before.Count(), notes, err)
	if bound := len(notes) == 1; bound != (after.Count() < before.Count()) || len(notes) > 1 {
		t.Errorf("%d cores before, %d after, notes %q", before.Count(), after.Count(), notes)
	}
}

// gpuRig returns the rig of the first GPU.
func gpuRig(t *testing.T) (rig, *cudaStore) {
	var closers []func() error
	s, err := openGPU(CUDAOptions{}, &closers)
	t.Cleanup(func() {
		if err := closeAll(closers); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	flag, err := s.AllocHost(8)
	if err != nil {
		t.Fatal(err)
	}
	word, held := (*uint64)(flag.Ptr()), uint64(0)
	return rig{
		store: s, compute: s.stream,
		set: func(v View, x byte) { s.stream.Memset(v.Addr(), x, int64(v.Size())) },
		hold: func() func() {
			held++
			s.stream.WaitValue(uint64(uintptr(unsafe.Pointer(word))), held)
			return func() { atomic.StoreUint64(word, held) }
		},
	}, s
}

func TestRunBeyondFreeMemory(t *testing.T) {
	var closers []func() error
	_, err := openGPU(CUDAOptions{Planned: 1 << 50}, &closers)
	var lack *MemoryError
	if !errors.As(err, &lack) || lack.Need != 1<<50 || lack.Free <= 0 || lack.Total < lack.Free {
		t.Errorf("a run of a PiB: %v", err)
	}
	if err := closeAll(closers); err != nil {
		t.Error(err)
	}
}

func TestGPUCopiesAreInOrder(t *testing.T) {
	r, _ := gpuRig(t)
	copiesAreInOrder(t, r)
}

func TestGPUPrefetchRunsBeside(t *testing.T) {
	r, s := gpuRig(t)
	prefetchRunsBeside(t, r, s.copies.up)
}

// Freed pinned memory is reused, zeroed, and small pieces share a block.
func TestPinnedMemoryIsUsedAgain(t *testing.T) {
	_, s := gpuRig(t)
	a, err := s.AllocHost(100)
	if err != nil {
		t.Fatal(err)
	}
	tensor.Data[uint8](tensor.Dense(a, tensor.U8, 0, [4]int{1, 1, 1, 100}))[3] = 1
	s.FreeHost(a)
	b, err := s.AllocHost(90)
	if err != nil {
		t.Fatal(err)
	}
	if a.Ptr() != b.Ptr() || len(s.pinned) != 1 {
		t.Errorf("%p, then %p, of %d blocks", a.Ptr(), b.Ptr(), len(s.pinned))
	}
	if x := tensor.Data[uint8](tensor.Dense(b, tensor.U8, 0, [4]int{1, 1, 1, 90}))[3]; x != 0 {
		t.Errorf("it is not zeroed: %d", x)
	}
}
