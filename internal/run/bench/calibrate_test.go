package bench

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/internal/foresee/cost"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

// A calibration measures every kind of work of a plan at the sizes of the spec, and makes a valid table.
func TestCalibrate(t *testing.T) {
	for _, n := range []int{1, 2} {
		spec := CalibrateSpec{
			Backend: "flash", DType: "fp32", Heads: 2, KVHeads: 1, Dims: []int{16, 24}, PairDims: 2 - n,
			Sizes: []int{8, 32}, Further: 8, Documents: []int{4}, DocumentTokens: 16,
			Operations: true, Rows: []int{4}, Sides: []int{16, 32}, Passes: []int{4}, Links: []int{64, 4096},
			Experts: Experts{Count: 4, Chosen: 2, Hidden: 16, Width: 32},
			Delta:   hf.Delta{KeyHeads: 1, Heads: 2, Dim: 8, DimV: 4}, DeltaRows: []int{4, 12},
			Budget: 1e-4, Tolerance: 0.5,
			Heat: 1e-3 * float64(n-1), // with Long 0, all calls are long
		}
		set := measure(t, n, Task{Calibrate: &spec}).Costs
		// Four pairs of sizes, two of them squares with two more masks, and documents, forward and backward, and the same
		// with another head dim, of which one rank measures squares; four products per shape, five of each of the two of
		// experts, and four calls of the rule.
		if got := []int{len(set.Attention), len(set.Products), len(set.Links)}; !slices.Equal(got,
			[]int{28 + 4*n, 34, 8 * (n - 1)}) {
			t.Errorf("%d ranks: %v calls of attention, products and transfers", n, got)
		}
		var kinds []string
		for _, p := range set.Products {
			kinds = append(kinds, fmt.Sprint(p.Kind, p.Rows, p.In, p.Out))
		}
		if want := "scaled linear4 16 32"; !slices.Contains(kinds, want) {
			t.Errorf("%d ranks: no product %s: %v", n, want, kinds)
		}
		for _, kind := range []string{"group linear", "group linear dx", "group linear dw"} {
			for _, want := range []string{kind + "8 16 64", kind + "8 32 16"} {
				if !slices.Contains(kinds, want) {
					t.Errorf("%d ranks: no product %s: %v", n, want, kinds)
				}
			}
		}
		for _, want := range []string{"8 16 64", "8 64 16", "8 32 16", "8 16 32"} {
			if want = "group scaled linear" + want; !slices.Contains(kinds, want) {
				t.Errorf("%d ranks: no product %s: %v", n, want, kinds)
			}
		}
		for kind, times := range map[string]int{"delta summarize": 1, "delta forward": 1, "delta summarize backward": 1,
			"delta backward": 3} {
			if want := fmt.Sprint(kind, 12, 8, times*2*(5*delta.Chunk+3*8)); !slices.Contains(kinds, want) {
				t.Errorf("%d ranks: no product %s: %v", n, want, kinds)
			}
		}
		for _, p := range set.Passes {
			kinds = append(kinds, p.Op)
		}
		for _, want := range []string{"copy", "rmsnorm", "swiglu backward", "cross entropy", "adamw", "zero", "upload",
			"download", "conv", "conv backward"} {
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

// Operations on a CPU rotate through disjoint operands, large ones as many as fit. Products keep their input.
func TestOperandsTakeTurns(t *testing.T) {
	s := &OpsSpec{DType: "fp32"}
	ranks(t, 1, func(r *Rank) error {
		for _, x := range []struct{ n, in, out, want int }{{4, 8, 16, mostTurns}, {512, 512, 512, 6}} {
			o := s.linear("linear", x.n, x.in, x.out)
			_, bytes := o.work()
			arena, err := r.Device.Arena("operands", bytes+cold)
			if err != nil {
				return err
			}
			_, list, err := r.turns(t.Context(), arena, &o, cold)
			if err != nil || len(list) != x.want {
				t.Fatalf("%v: %d sets of operands, %v; want %d", x, len(list), err, x.want)
			}
			if err := r.Device.Stream.Sync(t.Context()); err != nil { // before the test writes
				return err
			}
			fills := func(v View, want int) bool {
				return !slices.ContainsFunc(tensor.Data[float32](v), func(e float32) bool { return e != float32(want) })
			}
			for i, v := range list {
				for _, k := range []int{0, 2} {
					for j := range tensor.Data[float32](v[k]) {
						tensor.Data[float32](v[k])[j] = float32(i)
					}
				}
			}
			for i, v := range list {
				if !fills(v[0], i) || !fills(v[2], i) || tensor.Data[float32](v[1])[0] != tensor.Data[float32](list[0][1])[0] {
					t.Fatalf("%v: operands %d are others', too", x, i)
				}
			}
			if arena.Peak() > bytes+cold {
				t.Errorf("%v: %d bytes of operands, more than %d", x, arena.Peak(), bytes+cold)
			}
		}
		return nil
	})
}

// The rule gets keys of about length 1, decays below 1 and a beta within (0, 1), so that states stay finite. An error of
// a call ends the measurement.
func TestRuleOperands(t *testing.T) {
	s := &OpsSpec{DType: "fp32"}
	ranks(t, 1, func(r *Rank) error {
		o := s.rule(256, hf.Delta{KeyHeads: 1, Heads: 2, Dim: 64, DimV: 8})[0]
		_, bytes := o.work()
		arena, err := r.Device.Arena("operands", bytes)
		if err != nil {
			return err
		}
		_, list, err := r.turns(t.Context(), arena, &o, 0)
		if err != nil {
			return err
		}
		if err := r.Device.Stream.Sync(t.Context()); err != nil {
			return err
		}
		length := 0.0
		for _, x := range tensor.Data[float32](list[0][1]) {
			length += float64(x*x) / 256
		}
		decay, beta := tensor.Data[float32](list[0][3]), tensor.Data[float32](list[0][4])
		if math.Abs(length-1) > 0.1 || slices.Max(decay) > 0 || slices.Min(beta) <= 0 || slices.Max(beta) >= 1 {
			t.Errorf("keys have length %v, logarithms of decays are up to %v, beta is %v to %v", length, slices.Max(decay),
				slices.Min(beta), slices.Max(beta))
		}
		err = r.eachOperation(t.Context(), s.rule(4, hf.Delta{KeyHeads: 2, Heads: 3, Dim: 8, DimV: 8}), 0,
			func(_ *operation, _ cost.Work, run func() error) error { return run() })
		if err == nil || !strings.Contains(err.Error(), "3 value heads") {
			t.Errorf("3 heads over 2 of keys: %v", err)
		}
		return nil
	})
}

// Long work is measured until two iterations agree, short work as often as before, equally on all ranks.
func TestMeasurementsSettle(t *testing.T) {
	const long = 20 * time.Millisecond
	made := make([]int, 2)
	ranks(t, 2, func(r *Rank) error {
		seconds, n, err := r.measure(t.Context(), effort{budget: 1e-4, tolerance: 1e6}, func() error {
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
		work := 0
		_, n, err := r.measure(t.Context(), effort{budget: 1e-4, tolerance: 1e-12}, func() error {
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
		if got := spread(c.xs); got != c.want {
			t.Errorf("%v: %v, want %v", c.xs, got, c.want)
		}
	}
}

// The benchmark of operations and a plan count the same bytes of an operation.
func TestOperationsAreCountedAlike(t *testing.T) {
	s := OpsSpec{}
	s.Default("cpu")
	hidden, mlp := 4*s.Tokens*s.Hidden, 4*s.Tokens*s.Intermediate
	heads, angles := 4*s.Tokens*s.Heads*s.HeadDim, 4*s.Tokens*s.HeadDim
	qkv := 4 * s.Tokens * (s.Heads + 2*s.KVHeads) * s.HeadDim
	bytes := map[string]int{
		"copy": 8 * s.Params, "rmsnorm": 2 * hidden, "add rmsnorm": 4 * hidden, "rmsnorm backward": 3 * hidden,
		"rope": 2*heads + angles, "rope backward": 2*heads + angles, "norm rope": 2*heads + angles,
		"swiglu": 3 * mlp, "swiglu backward": 5 * mlp, "embed": 2 * hidden, "embed backward": 3 * hidden,
		"cross entropy": 8 * s.Chunk * s.Vocab, "zero": 4 * s.Params, "accumulate": 12 * s.Params,
		"gradient norm": 4 * s.Params, "adamw": 28 * s.Params, "conv": 2 * qkv, "conv backward": 3 * qkv,
	}
	flops := map[string]int{
		"matrix product": 2 * s.Ceiling * s.Ceiling * s.Ceiling,
		"linear qkv":     2 * s.Tokens * s.Hidden * (s.Heads + 2*s.KVHeads) * s.HeadDim,
		"linear out":     2 * s.Tokens * s.Heads * s.HeadDim * s.Hidden,
		"linear head":    2 * s.Chunk * s.Hidden * s.Vocab,
	}
	for _, o := range s.operations() {
		w, _ := o.work()
		want, product := flops[o.name]
		if strings.HasPrefix(o.name, "linear gate") || o.name == "linear down" {
			want, product = 2*s.Tokens*s.Hidden*s.Intermediate, true
		}
		if int(w.FLOPs()) != want || !product && int(w.Bytes) != bytes[o.name] {
			t.Errorf("%s: %+v; want %d FLOPs, %d bytes", o.name, w, want, bytes[o.name])
		}
	}
}
