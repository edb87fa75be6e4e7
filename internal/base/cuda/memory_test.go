//go:build cuda

package cuda

import (
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/tensor"
)

func TestSmallPiecesShareAllocations(t *testing.T) {
	d := device(t)
	a, b := must.Have(d.Alloc(1000)), must.Have(d.Alloc(1))
	if a.addr%poolAlign != 0 || b.addr != a.addr+1024 {
		t.Errorf("1000 bytes at %#x, then 1 byte at %#x", a.addr, b.addr)
	}
	for _, m := range []*Memory{a, b} {
		if base, bytes, ok := d.Allocation(m.addr); !ok || base != a.addr || bytes != poolBytes {
			t.Errorf("the allocation of %#x is %d bytes at %#x, %t", m.addr, bytes, base, ok)
		}
	}
	large := must.Have(d.Alloc(piece + 1))
	if base, bytes, ok := d.Allocation(large.addr); !ok || base != large.addr || bytes != piece+poolAlign {
		t.Errorf("the allocation of a large piece at %#x is %d bytes at %#x, %t", large.addr, bytes, base, ok)
	}
	must.Do(t, large.Free())
	if _, _, ok := d.Allocation(large.addr); ok {
		t.Error("a free large piece is still an allocation")
	}
	must.Do(t, b.Free())
	if _, _, ok := d.Allocation(a.addr); !ok {
		t.Error("a small piece took others with it")
	}
	for range poolBytes / piece {
		must.Have(d.Alloc(piece))
	}
	c := must.Have(d.Alloc(1))
	if base, _, ok := d.Allocation(c.addr); !ok || base == a.addr || c.addr >= base+poolBytes {
		t.Errorf("a piece beyond the first allocation at %#x lies at %#x, in %#x, %t", a.addr, c.addr, base, ok)
	}
	if _, _, ok := d.Allocation(1); ok {
		t.Error("address 1 is in an allocation")
	}
	if _, err := d.Alloc(1 << 50); err == nil || !strings.Contains(err.Error(), "free") {
		t.Errorf("allocating a PiB: %v", err)
	}
}

func TestCopies(t *testing.T) {
	d := device(t)
	s := stream(t, d, "copies")
	want := make([]int32, 1000)
	for i := range want {
		want[i] = int32(i * i)
	}
	a := put(t, s, want)
	b := must.Have(d.Alloc(a.bytes))
	s.Memset(b.addr, 0xff, b.bytes)
	s.Copy(b.addr+40, a.addr, 400)
	s.Copy(b.addr, a.addr, 0) // a copy of 0 bytes
	got := get[int32](t, s, b.addr, 1000)
	if !slices.Equal(got[10:110], want[:100]) || got[9] != -1 || got[110] != -1 {
		t.Errorf("copied %v", got[:120])
	}
	v := tensor.Dense(a, tensor.I32, 7, [4]int{1, 1, 1, 3})
	if v.Addr() != a.addr+28 || (tensor.View{}).Addr() != 0 {
		t.Errorf("address %#x of element 7 at %#x", v.Addr(), a.addr)
	}
}

func TestPinnedIsHostMemory(t *testing.T) {
	d := device(t)
	s := stream(t, d, "pinned")
	p := pinned(t, d, 20)
	v := tensor.Dense(p.Host(), tensor.I32, 0, [4]int{1, 1, 1, 5})
	copy(tensor.Data[int32](v), []int32{1, 2, 3, 4, 5})
	m := must.Have(d.Alloc(20))
	s.Copy(m.addr, v.Addr(), 20)
	if got := get[int32](t, s, m.addr, 5); !slices.Equal(got, []int32{1, 2, 3, 4, 5}) {
		t.Errorf("the device read %v", got)
	}
}
