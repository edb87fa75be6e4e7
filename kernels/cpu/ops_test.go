package cpu

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/half"
	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/tensor"
)

// internal/model/opstest and internal/model/optim test the results of the operations. These tests cover errors and
// properties of the CPU only.

func newTestCPU(t testing.TB) *Kernels {
	stream := tensor.NewHostStream("test")
	t.Cleanup(func() { stream.Close() })
	return New(stream)
}

// atLevels runs f with kernels of every level that this machine supports.
func atLevels(t *testing.T, f func(t *testing.T)) {
	defer Use("")
	for l := simd.Generic; l <= simd.Best(); l++ {
		t.Run(l.String(), func(t *testing.T) {
			if err := Use(l.String()); err != nil {
				t.Fatal(err)
			}
			f(t)
		})
	}
}

func settle(t testing.TB, c *Kernels) {
	t.Helper()
	if err := c.stream.Sync(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// refuses runs a call that must panic with a message that contains a part.
func refuses(t *testing.T, name, part string, call func()) {
	t.Run(name, func(t *testing.T) {
		defer func() {
			if message := fmt.Sprint(recover()); !strings.Contains(message, part) {
				t.Errorf("panic %q", message)
			}
		}()
		call()
	})
}

func normal(rng *rand.Rand, shape ...int) tensor.View {
	v := tensor.New(tensor.F32, shape...)
	for i := range tensor.Data[float32](v) {
		tensor.Data[float32](v)[i] = float32(rng.NormFloat64())
	}
	return v
}

// TestShapeFaults checks that mismatched views panic with their shapes, before any work is queued.
func TestShapeFaults(t *testing.T) {
	c := newTestCPU(t)
	f := func(shape ...int) tensor.View { return tensor.New(tensor.F32, shape...) }
	i32 := func(shape ...int) tensor.View { return tensor.New(tensor.I32, shape...) }
	loss := tensor.New(tensor.F64, 1)
	strided := f(2, 4, 1, 6).Slice(tensor.Dim, 0, 3)
	tests := map[string]struct {
		call func()
		want []string
	}{
		"inner": {
			func() { c.Linear(f(2, 5), f(2, 3), f(5, 4), tensor.View{}) },
			[]string{"linear", "[1 1 2 3]", "[1 1 5 4]"},
		},
		"rows": {
			func() { c.Linear(f(1, 2, 1, 5), f(1, 3, 1, 4), f(1, 5, 1, 4), tensor.View{}) },
			[]string{"[1 2 1 5]", "[1 3 1 4]"},
		},
		"linear dx": {
			func() { c.LinearDX(f(1, 2, 1, 5), f(1, 2, 1, 4), f(1, 5, 1, 4), false) },
			[]string{"linear dx", "[1 2 1 5]", "[1 2 1 4]"},
		},
		"linear dw": {
			func() { c.LinearDW(f(1, 5, 1, 4), f(1, 2, 1, 4), f(1, 2, 1, 5), true) },
			[]string{"linear dw", "[1 5 1 4]"},
		},
		"not dense": {
			func() { c.GLU(strided, f(2, 4, 1, 3), f(2, 4, 1, 3), kernels.SiLU) },
			[]string{"glu", "strides [24 6 6 1]"},
		},
		"type":        {func() { c.GLU(tensor.New(tensor.BF16, 3), f(3), f(3), kernels.SiLU) }, []string{"glu", "bfloat16"}},
		"mixed types": {func() { c.GLU(f(3), tensor.New(tensor.F64, 3), f(3), kernels.SiLU) }, []string{"float32", "float64"}},
		"norm weight": {
			func() { c.RMSNorm(f(2, 4), f(2, 1), f(2, 4), f(3), 1) },
			[]string{"rmsnorm", "[1 1 1 3]", "[1 1 2 4]"},
		},
		"norm inv": {func() { c.RMSNorm(f(2, 4), f(3, 1), f(2, 4), f(4), 1) }, []string{"[1 1 3 1]", "[1 1 2 4]"}},
		"norm sum": {
			func() { c.AddRMSNorm(f(2, 4), f(2, 1), f(2, 4), f(2, 4), f(3, 4), f(4), 1) },
			[]string{"[1 1 3 4]"},
		},
		"norm dw": {
			func() { c.RMSNormBackward(f(2, 4), f(5), f(2, 4), f(2, 4), f(2, 1), f(4), false) },
			[]string{"[1 1 1 5]", "[1 1 1 4]"},
		},
		"odd rope": {func() {
			c.NormRope(f(1, 2, 3, 5), tensor.View{}, f(1, 2, 3, 5), tensor.View{}, f(1, 2, 1, 2), f(1, 2, 1, 2), 0)
		}, []string{"rope", "[1 2 3 5]", "[1 2 1 2]"}},
		"wide rope": {func() {
			c.NormRope(f(1, 2, 3, 4), tensor.View{}, f(1, 2, 3, 4), tensor.View{}, f(1, 2, 1, 3), f(1, 2, 1, 3), 0)
		}, []string{"rope", "[1 2 3 4]", "[1 2 1 3]"}},
		"rows of a sum": {func() { c.SumRows(f(3), f(2, 4)) }, []string{"sum of rows", "[1 1 1 3]", "[1 1 2 4]"}},
		"embed ids": {
			func() { c.Embed(f(1, 2, 1, 4), f(1, 9, 1, 4), i32(1, 3, 1, 1)) },
			[]string{"embed", "[1 3 1 1]"},
		},
		"embed ids type": {
			func() { c.EmbedBackward(f(1, 9, 1, 4), f(1, 2, 1, 4), f(1, 2, 1, 1)) },
			[]string{"embed backward", "[1 2 1 1]"},
		},
		"loss type": {
			func() { c.CrossEntropy(f(1), f(1, 2, 1, 4), i32(1, 2, 1, 1), 1, 0, false) },
			[]string{"cross entropy", "float32[1 1 1 1]"},
		},
		"targets": {
			func() { c.CrossEntropy(loss, f(1, 2, 1, 4), i32(1, 3, 1, 1), 1, 0, false) },
			[]string{"[1 2 1 4]", "[1 3 1 1]"},
		},
		"copy shape": {func() { c.Copy(f(2, 3), f(3, 2)) }, []string{"copy", "[1 1 2 3]", "[1 1 3 2]"}},
		"copy type":  {func() { c.Copy(f(2), i32(2)) }, []string{"copy", "int32"}},
		"add shape":  {func() { c.Add(f(2, 3), f(3, 2)) }, []string{"add", "[1 1 2 3]", "[1 1 3 2]"}},
		"add types":  {func() { c.Add(f(2), tensor.New(tensor.F64, 2)) }, []string{"add", "float32", "float64"}},
		"add type":   {func() { c.Add(i32(2), i32(2)) }, []string{"add", "int32"}},
		"zero":       {func() { c.Zero(f(2), tensor.View{}) }, []string{"zero", "without memory"}},
		"adamw": {
			func() { c.AdamW(f(4), tensor.View{}, f(4), f(3), f(4), tensor.View{}, kernels.AdamStep{}) },
			[]string{"adamw", "[1 1 1 3]"},
		},
		"adamw gradient": {
			func() { c.AdamW(f(4), tensor.View{}, f(5), f(4), f(4), tensor.View{}, kernels.AdamStep{}) },
			[]string{"adamw", "[1 1 1 5]"},
		},
		"adamw second moment": {
			func() { c.AdamW(f(4), tensor.View{}, f(4), f(4), f(5), tensor.View{}, kernels.AdamStep{}) },
			[]string{"adamw", "[1 1 1 5]"},
		},
		"adamw copy": {
			func() { c.AdamW(f(4), f(5), f(4), f(4), f(4), tensor.View{}, kernels.AdamStep{}) },
			[]string{"[1 1 1 5]"},
		},
		"adamw no norm": {
			func() { c.AdamW(f(4), tensor.View{}, f(4), f(4), f(4), f(1), kernels.AdamStep{MaxNorm: 1}) },
			[]string{"adamw", "float32"},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			defer func() {
				message := fmt.Sprint(recover())
				for _, want := range test.want {
					if !strings.Contains(message, want) {
						t.Errorf("panic %q does not contain %q", message, want)
					}
				}
			}()
			test.call()
		})
	}
	settle(t, c)
}

// TestOutsideVocabulary checks that Sync returns an error for a token or target outside the vocabulary.
func TestOutsideVocabulary(t *testing.T) {
	table, x := tensor.New(tensor.F32, 1, 4, 1, 2), tensor.New(tensor.F32, 1, 3, 1, 2)
	high, low := tensor.FromSlice([]int32{0, 3, 4}, 1, 3, 1, 1), tensor.FromSlice([]int32{0, -1, 9}, 1, 3, 1, 1)
	tests := map[string]struct {
		call func(c *Kernels)
		want string
	}{
		"embed":          {func(c *Kernels) { c.Embed(x, table, high) }, "token id 4 at position 2"},
		"negative":       {func(c *Kernels) { c.Embed(x, table, low) }, "token id -1 at position 1"},
		"embed backward": {func(c *Kernels) { c.EmbedBackward(table, x, high) }, "token id 4 at position 2"},
		"target": {func(c *Kernels) { c.CrossEntropy(tensor.New(tensor.F64, 1), x, low, 1, 0, true) },
			"target 9 at position 2 of this rank is outside the vocabulary of 2"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			c := newTestCPU(t)
			test.call(c)
			if err := c.stream.Sync(context.Background()); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
		})
	}
}

// TestRowsAlone checks that the bits of a product's row do not depend on the other rows or on its address, so that
// a sequence split over ranks gets the same results.
func TestRowsAlone(t *testing.T) {
	c, rng := newTestCPU(t), rand.New(rand.NewPCG(1, 1))
	const rows, in, out = 131, 301, 195
	x, w := normal(rng, 1, rows, 1, in), normal(rng, 1, out, 1, in)
	whole, part := tensor.New(tensor.F32, 1, rows, 1, out), tensor.New(tensor.F32, 1, rows, 1, out)
	c.Linear(whole, x, w, tensor.View{})
	for lo := 0; lo < rows; lo += 7 {
		hi := min(rows, lo+7)
		c.Linear(part.Slice(tensor.Seq, lo, hi), x.Slice(tensor.Seq, lo, hi), w, tensor.View{})
	}
	settle(t, c)
	if !slices.Equal(tensor.Data[float32](whole), tensor.Data[float32](part)) {
		t.Error("rows computed by sevens are not the bits of all rows at once")
	}
}

// TestSumSquaresBits checks that the norm has the same bits on any number of goroutines.
func TestSumSquaresBits(t *testing.T) { atLevels(t, sumSquaresBits) }

func sumSquaresBits(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	rng := rand.New(rand.NewPCG(1, 1))
	g := normal(rng, 5*elementBlock+37)
	want := 0.0
	for _, x := range tensor.Data[float32](g) {
		want += float64(x) * float64(x)
	}
	var first float64
	for _, n := range []int{1, 2, 4} {
		runtime.GOMAXPROCS(n)
		c, sum := newTestCPU(t), tensor.FromSlice([]float64{1000}, 1)
		c.SumSquares(sum, g)
		settle(t, c)
		got := tensor.Data[float64](sum)[0]
		if first == 0 {
			first = got
		}
		if got != first || !(math.Abs(got-1000-want) <= 1e-12*want) {
			t.Errorf("GOMAXPROCS %d: sum %v, with 1 %v, want near %v", n, got, first, want+1000)
		}
	}
}

// TestCopyStrided copies between views with gaps, of the same type and of different types.
func TestCopyStrided(t *testing.T) { atLevels(t, copyStrided) }

func copyStrided(t *testing.T) {
	c, rng := newTestCPU(t), rand.New(rand.NewPCG(1, 1))
	for _, dtype := range []tensor.DType{tensor.F32, tensor.F64} {
		src := normal(rng, 2, 3, 4, 5).Slice(tensor.Heads, 1, 3).Slice(tensor.Seq, 1, 3)
		whole := tensor.New(dtype, 2, 2, 3, 6)
		dst := whole.Slice(tensor.Heads, 1, 3).Slice(tensor.Dim, 1, 6)
		back := tensor.New(tensor.F32, 2, 2, 2, 5)
		want := tensor.New(tensor.F32, 2, 2, 2, 5)
		c.Copy(dst, src)
		c.Copy(back, dst)
		settle(t, c)
		tensor.Copy(want, src)
		if !slices.Equal(tensor.Data[float32](back), tensor.Data[float32](want)) {
			t.Errorf("%v: copy there and back changed the values", dtype)
		}
	}
}

// TestHalfRoundTrip takes every 16-bit float to float64 and back.
func TestHalfRoundTrip(t *testing.T) { atLevels(t, halfRoundTrip) }

func halfRoundTrip(t *testing.T) {
	c := newTestCPU(t)
	for _, dtype := range []tensor.DType{tensor.F16, tensor.BF16} {
		short, wide, back := tensor.New(dtype, 1<<16), tensor.New(tensor.F64, 1<<16), tensor.New(dtype, 1<<16)
		for i := range 1 << 16 {
			tensor.Data[uint16](short)[i] = uint16(i)
		}
		c.Copy(wide, short)
		c.Copy(back, wide)
		settle(t, c)
		for i, got := range tensor.Data[uint16](back) {
			x := tensor.Data[float64](wide)[i]
			if !math.IsNaN(x) && int(got) != i {
				t.Fatalf("%v %#04x is %g, which came back as %#04x", dtype, i, x, got)
			}
			if math.IsNaN(x) && !math.IsNaN(map[tensor.DType]float64{tensor.F16: float64(half.FromF16(got)),
				tensor.BF16: float64(half.FromBF16(got))}[dtype]) {
				t.Fatalf("%v %#04x is NaN, which came back as %#04x", dtype, i, got)
			}
		}
	}
}

// TestCopyHalves copies between float32 and 16 bits: dense views, gaps between heads, and gaps between elements.
func TestCopyHalves(t *testing.T) { atLevels(t, copyHalves) }

func copyHalves(t *testing.T) {
	c, rng := newTestCPU(t), rand.New(rand.NewPCG(1, 1))
	cut := func(v tensor.View) []tensor.View {
		return []tensor.View{
			v,
			v.Slice(tensor.Seq, 1, 3),
			v.Slice(tensor.Heads, 1, 2),
			v.Slice(tensor.Dim, 3, 36),
			v.Slice(tensor.Dim, 5, 6),
		}
	}
	for _, dtype := range []tensor.DType{tensor.F16, tensor.BF16} {
		src, half, back := normal(rng, 2, 4, 3, 37), tensor.New(dtype, 2, 4, 3, 37), tensor.New(tensor.F32, 2, 4, 3, 37)
		for i, from := range cut(src) {
			wide := tensor.New(tensor.F64, 2, 4, 3, 37)
			c.Zero(half, back)
			c.Copy(cut(half)[i], from)
			c.Copy(cut(back)[i], cut(half)[i])
			c.Copy(wide, half) // one element at a time
			settle(t, c)
			for j, got := range tensor.Data[float32](back) {
				if want := tensor.Data[float64](wide)[j]; float64(got) != want {
					t.Fatalf("%v, view %d: element %d is %g, want %g", dtype, i, j, got, want)
				}
			}
			was, got := tensor.Data[float32](from), tensor.Data[float32](cut(back)[i])
			if err := near.Each(got, was, near.Finite, func(j int) float64 {
				if got[j] == 0 {
					return math.Inf(1)
				}
				return math.Abs(float64(was[j])) / 256
			}); err != nil {
				t.Errorf("%v, view %d: not near what it was: %v", dtype, i, err)
			}
		}
	}
}

// TestLossPieces compares the loss and gradient of rows of many pieces, some with only -Inf, with float64.
func TestLossPieces(t *testing.T) { atLevels(t, lossPieces) }

func lossPieces(t *testing.T) {
	c, rng := newTestCPU(t), rand.New(rand.NewPCG(1, 1))
	for _, n := range []int{1, 4096, 4097, 20000, 300000} {
		x, wide := normal(rng, 1, 1, 1, n), tensor.New(tensor.F64, 1, 1, 1, n)
		logits := tensor.Data[float32](x)
		for i := range logits {
			logits[i] = 10*logits[i] - 300
			if n > 20000 && i >= 5000 && i < 17000 {
				logits[i] = float32(math.Inf(-1))
			}
		}
		c.Copy(wide, x)
		losses, targets := [2]tensor.View{}, tensor.FromSlice([]int32{int32(n - 1)}, 1, 1, 1, 1)
		for i, v := range []tensor.View{x, wide} {
			losses[i] = tensor.New(tensor.F64, 1)
			c.CrossEntropy(losses[i], v, targets, 1, 0, false)
			c.CrossEntropy(losses[i], v, targets, 1, 0, true)
		}
		settle(t, c)
		got, want := tensor.Data[float64](losses[0])[0], tensor.Data[float64](losses[1])[0]
		if !(math.Abs(got-want) <= 1e-6*want) {
			t.Errorf("%d logits: loss %v, want %v", n, got, want)
		}
		grads := tensor.Data[float64](wide)
		if err := near.Each(logits, grads, near.Finite,
			func(i int) float64 { return 4e-7*math.Abs(grads[i]) + 1e-38 }); err != nil {
			t.Fatalf("%d logits: gradients: %v", n, err)
		}
	}
}
