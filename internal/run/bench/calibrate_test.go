package bench

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/foresee/cost"
	"github.com/cprun/cprun/tensor"
)

// A calibration measures every kind of work of a plan at the sizes of the spec, and makes a valid table.
func TestCalibrate(t *testing.T) {
	for _, n := range []int{1, 2} {
		spec := CalibrateSpec{
			Backend: "flash", DType: "fp32", Heads: 2, KVHeads: 1, Dims: []int{16}, Sizes: []int{8, 32}, Further: 8,
			Documents: []int{4}, DocumentTokens: 16,
			Operations: true, Rows: []int{4}, Sides: []int{8, 16}, Passes: []int{4}, Links: []int64{64, 4096},
			Budget: 1e-4, Tolerance: 0.5,
			Heat: 1e-3 * float64(n-1), // with Long 0, all calls are long
		}
		set := cost.Set{Ranks: n}
		ranks(t, n, func(r *Rank) error {
			return r.Calibrate(context.Background(), spec, func(s cost.Set) error {
				if r.World.Rank() > 0 {
					return nil
				}
				set.Attention, set.Products = append(set.Attention, s.Attention...), append(set.Products, s.Products...)
				set.Passes, set.Links = append(set.Passes, s.Passes...), append(set.Links, s.Links...)
				set.CallSeconds = max(set.CallSeconds, s.CallSeconds)
				return nil
			})
		})
		// Four pairs of sizes, two of them squares with two more masks, and documents, forward and backward; three
		// products per shape.
		if got := []int{len(set.Attention), len(set.Products), len(set.Links)}; !slices.Equal(got,
			[]int{18, 12, 8 * (n - 1)}) {
			t.Errorf("%d ranks: %v calls of attention, products and transfers", n, got)
		}
		var kinds []string
		for _, p := range set.Passes {
			kinds = append(kinds, p.Op)
		}
		for _, want := range []string{"copy", "rmsnorm", "swiglu backward", "cross entropy", "adamw", "zero", "upload",
			"download"} {
			if !slices.Contains(kinds, want) {
				t.Errorf("%d ranks: nothing says what %s takes: %v", n, want, kinds)
			}
		}
		table := &cost.Table{Version: cost.Version, Machine: cost.Machine{Device: "test"}, Sets: []cost.Set{set}}
		var text strings.Builder
		if err := table.Encode(&text); err != nil {
			t.Fatal(err)
		}
		if _, err := cost.Decode([]byte(text.String())); err != nil {
			t.Error(err)
		}
		shown := CostTables(table)
		if len(shown) != 1 || len(shown[0].Rows) < 10 {
			t.Errorf("%d ranks: %+v", n, shown)
		}
	}
}

// A rank with several goroutines gets that many key heads, as far as models have them.
func TestShare(t *testing.T) {
	for cores, want := range map[int]int{0: 1, 1: 1, 2: 2, 64: 4} {
		s := CalibrateSpec{}
		s.Default("cpu")
		heads, kv := s.Heads, s.KVHeads
		if s.Share(cores); s.KVHeads != want*kv || s.Heads != want*heads {
			t.Errorf("%d cores: %d heads of q and %d of keys", cores, s.Heads, s.KVHeads)
		}
	}
}

// Products on a CPU rotate through disjoint operands, for large products as many as fit.
func TestOperandsTakeTurns(t *testing.T) {
	ranks(t, 1, func(r *Rank) error {
		c := &calibration{Rank: r, dtype: tensor.F32}
		for _, x := range []struct{ n, in, out, want int }{{4, 8, 16, mostOperands}, {512, 512, 512, 4}} {
			arena, err := r.Device.Arena("operands", c.productBytes(x.n, x.in, x.out)+c.coldBytes())
			if err != nil {
				return err
			}
			list, err := c.operandsOf(context.Background(), arena, x.n, x.in, x.out)
			if err != nil || len(list) != x.want {
				t.Errorf("%v: %d sets of operands, %v; want %d", x, len(list), err, x.want)
			}
			for i, o := range list {
				for _, v := range []View{o.x, o.y, o.w, o.dw} {
					for j := range tensor.Data[float32](v) {
						tensor.Data[float32](v)[j] = float32(i)
					}
				}
			}
			for i, o := range list {
				for _, v := range []View{o.x, o.y, o.w, o.dw} {
					if slices.ContainsFunc(tensor.Data[float32](v), func(e float32) bool { return e != float32(i) }) {
						t.Fatalf("%v: operands %d are others', too", x, i)
					}
				}
			}
		}
		return nil
	})
}

// Long work is measured until two iterations agree, short work as often as before, equally on all ranks.
func TestMeasurementsSettle(t *testing.T) {
	const long = 20 * time.Millisecond
	made := make([]int, 2)
	ranks(t, 2, func(r *Rank) error {
		r.Budget, r.Tolerance = 1e-4, 1e6
		seconds, n, err := r.measure(context.Background(), 1, 0, func() error {
			made[r.World.Rank()]++
			time.Sleep(long)
			return nil
		})
		if n != 1 || seconds < long.Seconds() {
			t.Errorf("%d iterations of %v s", n, seconds)
		}
		return err
	})
	if !slices.Equal(made, []int{2, 2}) {
		t.Errorf("the ranks worked %v times", made)
	}
	ranks(t, 1, func(r *Rank) error {
		r.Budget, r.Tolerance = 1e-4, 1e-12
		work, n := 0, 0
		_, n, err := r.measure(context.Background(), 1, 0, func() error {
			work++
			time.Sleep(time.Duration(work) * time.Millisecond) // no two iterations agree
			return nil
		})
		if n != minIters {
			t.Errorf("%d iterations that do not agree", n)
		}
		return err
	})
}

func TestSpread(t *testing.T) {
	for _, c := range []struct {
		xs   []float64
		want float64
	}{{nil, 0}, {[]float64{3}, 0}, {[]float64{2, 3, 2}, 0.5}, {[]float64{1, 4, 4, 5, 4, 100, 4, 6}, 0.25}} {
		if got := Spread(c.xs); got != c.want {
			t.Errorf("%v: %v, want %v", c.xs, got, c.want)
		}
	}
}

// The benchmark of operations and a plan count the same bytes of an operation.
func TestOperationsAreCountedAlike(t *testing.T) {
	ranks(t, 1, func(r *Rank) error {
		s := OpsSpec{}
		s.Default("cpu")
		arena, err := r.Device.Arena("tensors", s.bytes())
		if err != nil {
			return err
		}
		b := &opsRun{Rank: r, ctx: context.Background(), s: s, t: tensor.F32, ops: r.Device.Ops, arena: arena}
		hidden, mlp := 4*s.Tokens*s.Hidden, 4*s.Tokens*s.Intermediate
		heads, angles := 4*s.Tokens*s.Heads*s.HeadDim, 4*s.Tokens*s.HeadDim
		bytes := map[string]int{
			"copy": 8 * s.Params, "rmsnorm": 2 * hidden, "add rmsnorm": 4 * hidden, "rmsnorm backward": 3 * hidden,
			"rope": 2*heads + angles, "rope backward": 2*heads + angles, "norm rope": 2*heads + angles,
			"swiglu": 3 * mlp, "swiglu backward": 5 * mlp, "embed": 2 * hidden, "embed backward": 3 * hidden,
			"cross entropy": 8 * s.Chunk * s.Vocab, "zero": 4 * s.Params, "accumulate": 12 * s.Params,
			"gradient norm": 4 * s.Params, "adamw": 28 * s.Params,
		}
		flops := map[string]int{
			"matrix product": 2 * s.Ceiling * s.Ceiling * s.Ceiling,
			"linear qkv":     2 * s.Tokens * s.Hidden * (s.Heads + 2*s.KVHeads) * s.HeadDim,
			"linear out":     2 * s.Tokens * s.Heads * s.HeadDim * s.Hidden,
			"linear head":    2 * s.Chunk * s.Hidden * s.Vocab,
		}
		for _, make := range b.all() {
			mark := arena.Mark()
			o := make()
			w := b.work(o)
			want, product := flops[o.name]
			if strings.HasPrefix(o.name, "linear gate") || o.name == "linear down" {
				want, product = 2*s.Tokens*s.Hidden*s.Intermediate, true
			}
			if int(w.FLOPs()) != want || !product && int(w.Bytes) != bytes[o.name] {
				t.Errorf("%s: %+v; want %d FLOPs, %d bytes", o.name, w, want, bytes[o.name])
			}
			arena.Release(mark)
		}
		return b.err
	})
}
