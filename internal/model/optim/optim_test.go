package optim_test

import (
	"context"
	"encoding/json"
	"math"
	"os"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/internal/model/opstest"
	"github.com/cprun/cprun/internal/model/optim"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var _ optim.Device = (*cpu.Kernels)(nil)

// A fixture is written by scripts/oracle/adamw.py.
type fixture struct {
	Beta1, Beta2, Eps float64
	WeightDecay       float64 `json:"weight_decay"`
	Decayed           int     // the first elements, which have weight decay
	Cases             []struct {
		DType   string
		MaxNorm float64 `json:"max_norm"`
		Start   []float64
		Steps   []struct {
			LR, Norm          float64
			Grad, Param, M, V []float64
		}
	}
}

// TestAdamWLikeTorch runs the steps of PyTorch's AdamW with clip_grad_norm_, and compares parameters and moments after
// each.
func TestAdamWLikeTorch(t *testing.T) {
	raw, err := os.ReadFile("testdata/adamw.json")
	if err != nil {
		t.Fatal(err)
	}
	var f fixture
	if err := json.Unmarshal(raw, &f); err != nil {
		t.Fatal(err)
	}
	for _, c := range f.Cases {
		dtype, tolerance := tensor.F64, 1e-14
		if c.DType == "float32" {
			dtype, tolerance = tensor.F32, 3e-7
		}
		stream := tensor.NewHostStream("optimizer")
		cpu, n := cpu.New(stream), len(c.Start)
		p, g, m, v := vector(dtype, c.Start), vector(dtype, make([]float64, n)), vector(dtype, make([]float64, n)),
			vector(dtype, make([]float64, n))
		sum := tensor.New(tensor.F64, 1)
		rule := optim.AdamW{Beta1: f.Beta1, Beta2: f.Beta2, Eps: f.Eps, WeightDecay: f.WeightDecay, MaxNorm: c.MaxNorm}
		for i, s := range c.Steps {
			cpu.Copy(g, vector(dtype, s.Grad))
			cpu.Zero(sum)
			cpu.SumSquares(sum, g)
			for _, part := range [][2]int{{0, 5}, {5, f.Decayed}, {f.Decayed, n}} { // the split must not matter
				of := func(v tensor.View) tensor.View { return v.Slice(tensor.Dim, part[0], part[1]) }
				rule.Step(cpu, of(p), tensor.View{}, of(g), of(m), of(v), sum, part[0] < f.Decayed,
					optim.Update{LR: s.LR, Step: i})
			}
			if err := stream.Sync(context.Background()); err != nil {
				t.Fatal(err)
			}
			check(t, i, "norm", []float64{math.Sqrt(values(sum)[0])}, []float64{s.Norm}, tolerance)
			check(t, i, "parameters", values(p), s.Param, tolerance)
			check(t, i, "first moments", values(m), s.M, tolerance)
			check(t, i, "second moments", values(v), s.V, tolerance)
		}
		if err := stream.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestCPU runs the common device tests on the CPU.
func TestCPU(t *testing.T) {
	opstest.TestOptim(t, func(t *testing.T) opstest.Device {
		stream := tensor.NewHostStream("optimizer")
		t.Cleanup(func() { stream.Close() })
		return opstest.Device{
			Optim:    cpu.New(stream),
			Upload:   func(host tensor.View) tensor.View { return host },
			Download: func(v tensor.View) (tensor.View, error) { return v, stream.Sync(context.Background()) },
		}
	})
}

func TestSchedule(t *testing.T) {
	tests := []struct {
		name          string
		lr, min       float64
		warmup, total int
		want          map[int]float64
	}{
		{"constant", 3e-4, 1e-5, 0, 4, map[int]float64{0: 3e-4, 1: 3e-4, 2: 3e-4, 3: 3e-4, 4: 3e-4, 99: 3e-4}},
		{"constant", 1, 0.5, 4, 10, map[int]float64{0: 0.25, 1: 0.5, 2: 0.75, 3: 1, 4: 1, 9: 1}},
		{"cosine", 1, 0, 0, 4, map[int]float64{0: 1, 1: (1 + math.Sqrt2/2) / 2, 2: 0.5, 3: (1 - math.Sqrt2/2) / 2, 4: 0,
			7: 0}},
		{"cosine", 1, 0.2, 2, 8, map[int]float64{0: 0.5, 1: 1, 2: 1, 4: 0.8, 5: 0.6, 6: 0.4, 8: 0.2}},
		{"linear", 1, 0.2, 2, 6, map[int]float64{0: 0.5, 1: 1, 2: 1, 3: 0.8, 4: 0.6, 5: 0.4, 6: 0.2, 60: 0.2}},
		{"wsd", 1, 0.1, 2, 20, map[int]float64{0: 0.5, 1: 1, 2: 1, 15: 1, 16: 1, 17: 0.55, 18: 1 - 0.9*math.Sqrt(0.5),
			20: 0.1}},
		{"wsd", 1, 0, 18, 20, map[int]float64{17: 1, 18: 1, 19: 1 - math.Sqrt(0.5), 20: 0}}, // warmup into decay
		{"linear", 1, 0.5, 8, 5, map[int]float64{0: 0.125, 4: 0.625, 7: 1, 8: 0.5}},         // warmup beyond the end
		{"cosine", 1, 0.5, 5, 5, map[int]float64{4: 1, 5: 0.5}},
	}
	for _, test := range tests {
		s, err := optim.NewSchedule(test.name, test.lr, test.min, test.warmup, test.total)
		if err != nil {
			t.Fatal(err)
		}
		for step, want := range test.want {
			got := s(step)
			if !(math.Abs(got-want) <= 1e-15) || test.name == "constant" && got != want {
				t.Errorf("%s lr %g min %g warmup %d total %d: step %d is %.17g, want %.17g", test.name, test.lr,
					test.min, test.warmup, test.total, step, got, want)
			}
		}
	}
	for _, name := range []string{"cosine", "linear", "wsd"} {
		s, err := optim.NewSchedule(name, 3e-4, 7e-5, 3, 97)
		if err != nil {
			t.Fatal(err)
		}
		if s(2) != 3e-4 || s(3) != 3e-4 || s(97) != 7e-5 || s(1000) != 7e-5 {
			t.Errorf("%s: %v and %v where decay begins, %v and %v where it ends", name, s(2), s(3), s(97), s(1000))
		}
		for step := 3; step < 100; step++ {
			if s(step+1) > s(step) {
				t.Errorf("%s rises from %v to %v after step %d", name, s(step), s(step+1), step)
			}
		}
	}
	if _, err := optim.NewSchedule("cosin", 1, 0, 0, 1); err == nil || !strings.Contains(err.Error(), `"cosin"`) {
		t.Errorf("unknown schedule: error %v", err)
	}
}

func vector(dtype tensor.DType, xs []float64) tensor.View {
	v := tensor.New(dtype, len(xs))
	for i, x := range xs {
		if dtype == tensor.F32 {
			tensor.Data[float32](v)[i] = float32(x)
		} else {
			tensor.Data[float64](v)[i] = x
		}
	}
	return v
}

func values(v tensor.View) []float64 {
	if v.DType() == tensor.F64 {
		return tensor.Data[float64](v)
	}
	var xs []float64
	for _, x := range tensor.Data[float32](v) {
		xs = append(xs, float64(x))
	}
	return xs
}

// check fails unless got equals want within the tolerance times the largest element: moments of both signs cancel.
func check(t *testing.T, step int, what string, got, want []float64, tolerance float64) {
	t.Helper()
	if err := near.Within(got, want, near.Finite, tolerance); err != nil {
		t.Errorf("step %d: %s: %v", step, what, err)
	}
}
