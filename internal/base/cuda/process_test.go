//go:build cuda

package cuda

import (
	"context"
	"encoding/hex"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/base/must"
)

// child runs one test of this binary in a separate process.
func child(t *testing.T, test string, env ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+test+"$", "-test.v")
	cmd.Env = append(os.Environ(), append(env, "CPRUN_TEST_CHILD="+test)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%s: %v\n%s", test, err, out)
	}
}

// asChild skips a test unless child runs it.
func asChild(t *testing.T) {
	if os.Getenv("CPRUN_TEST_CHILD") != t.Name() {
		t.Skip("runs in a process of its own")
	}
}

func TestIPC(t *testing.T) {
	d := device(t)
	s := stream(t, d, "ipc")
	must.Have(d.Alloc(5000)) // the exported memory is not at the beginning of the allocation
	x := put(t, s, []int64{1, 2, 3, 4})
	base, _, ok := d.Allocation(x.addr)
	if !ok || base == x.addr {
		t.Fatalf("%#x in the allocation at %#x, %t", x.addr, base, ok)
	}
	h := must.Have(d.Export(base))
	child(t, "TestIPCChild", "CPRUN_TEST_HANDLE="+hex.EncodeToString(h[:]),
		"CPRUN_TEST_OFFSET="+strconv.FormatUint(x.addr-base, 10))
	for i, got := range get[int64](t, s, x.addr, 4) {
		if want := int64(10 * (i + 1)); got != want {
			t.Errorf("element %d is %d, want %d", i, got, want)
		}
	}
}

func TestIPCChild(t *testing.T) {
	asChild(t)
	d := device(t)
	s := stream(t, d, "ipc child")
	b := must.Have(hex.DecodeString(os.Getenv("CPRUN_TEST_HANDLE")))
	offset := must.Have(strconv.ParseUint(os.Getenv("CPRUN_TEST_OFFSET"), 10, 64))
	addr := must.Have(d.Import(IPCHandle(b)))
	// A driver may allocate more than requested.
	if base, bytes, err := d.Range(addr + offset); err != nil || base != addr || bytes < 1<<20 {
		t.Errorf("the imported allocation is %d bytes at %#x (%v), want %d at %#x", bytes, base, err, 1<<20, addr)
	}
	xs := get[int64](t, s, addr+offset, 4)
	for i := range xs {
		if xs[i] != int64(i+1) {
			t.Errorf("element %d is %d", i, xs[i])
		}
		xs[i] *= 10
	}
	s.Copy(addr+offset, put(t, s, xs).addr, 32)
	wait(t, s)
	must.Do(t, d.CloseImport(addr))
}

// A kernel that traps breaks the context permanently: its stream is poisoned, every later call returns an error, and
// nothing hangs.
func TestBrokenDevice(t *testing.T) { child(t, "TestBrokenDeviceChild") }

func TestBrokenDeviceChild(t *testing.T) {
	asChild(t)
	d := must.Have(Open(0))
	a := must.Have(d.NewStream("a", false))
	b := must.Have(d.NewStream("b", false))
	f := must.Have(compile(t, d, `extern "C" __global__ void trap(int x) { asm volatile("trap;"); }`).Function("trap", 0))
	a.Launch(f, Launch{Grid: Dim{X: 1}, Block: Dim{X: 1}}, new(Args).Int(1))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	first := a.Sync(ctx)
	var e *Error
	if !errors.As(first, &e) {
		t.Errorf("the stream of the trap: %v", first)
	}
	if again := a.Sync(ctx); !errors.Is(again, first) {
		t.Errorf("the stream said %v, and then %v", first, again)
	}
	b.Memset(0, 0, 0)
	if err := b.Sync(ctx); !errors.As(err, &e) {
		t.Errorf("another stream of the device: %v", err)
	}
	if _, err := d.Alloc(100); err == nil {
		t.Error("a broken device still allocates")
	}
}
