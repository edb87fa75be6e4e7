package blas

import (
	"testing"

	"github.com/cprun/cprun/tensor"
)

func TestAlignment(t *testing.T) {
	for addr, want := range map[uint64]uint8{1: 1, 2: 2, 6: 2, 16: 16, 48: 16, 128: 128, 1 << 40: 128, 0: 128} {
		if got := alignment(addr); got != want {
			t.Errorf("alignment(%d) = %d, want %d", addr, got, want)
		}
	}
}

// A choice applies to other addresses only if they have the same alignment.
func TestKey(t *testing.T) {
	base := Problem{
		M: 8, N: 16, K: 32, In: tensor.BF16, Out: tensor.F32,
		A: Matrix{Addr: 256, Stride: 32}, B: Matrix{Addr: 512, Stride: 16}, D: Matrix{Addr: 1024, Stride: 16},
	}
	same := base
	same.A.Addr, same.B.Addr, same.D.Addr, same.A.Factors = 4096, 8192, 1<<30, 1
	if same.key() != base.key() {
		t.Error("addresses matter beyond their alignment")
	}
	add := func(p *Problem) { p.C = Matrix{Addr: 2048, Stride: 16} }
	for name, change := range map[string]func(*Problem){
		"m": func(p *Problem) { p.M++ }, "n": func(p *Problem) { p.N++ }, "k": func(p *Problem) { p.K++ },
		"transposed A": func(p *Problem) { p.TransA = true }, "transposed B": func(p *Problem) { p.TransB = true },
		"type": func(p *Problem) { p.In = tensor.F16 }, "type of D": func(p *Problem) { p.Out = tensor.BF16 },
		"C": add, "stride": func(p *Problem) { p.A.Stride++ }, "alignment": func(p *Problem) { p.D.Addr += 16 },
	} {
		p := base
		if change(&p); p.key() == base.key() {
			t.Errorf("another %s has the same key", name)
		}
	}
	apart, inPlace := base, base
	add(&apart)
	if inPlace.C = inPlace.D; apart.key() == inPlace.key() {
		t.Error("in place or not has the same key")
	}
}
