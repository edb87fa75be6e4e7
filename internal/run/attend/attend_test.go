package attend

import (
	"context"
	"math"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// shapes maps the tensors of a case to their shapes.
type shapes map[string][]int

func (s shapes) with(name string, shape ...int) shapes {
	out := shapes{}
	for k, v := range s {
		out[k] = v
	}
	out[name] = shape
	if shape == nil {
		delete(out, name)
	}
	return out
}

func write(t *testing.T, s shapes, meta map[string]string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "case.safetensors")
	var entries []safetensors.Entry
	for name, shape := range s {
		n := 1
		for _, d := range shape {
			n *= d
		}
		data := make([]float32, n)
		for i := range data {
			data[i] = float32(math.Sin(float64(i*7 + len(name))))
		}
		entries = append(entries, safetensors.Floats(name, safetensors.F32, shape, data))
	}
	if err := safetensors.WriteFile(path, meta, entries); err != nil {
		t.Fatal(err)
	}
	return path
}

var good = shapes{"q": {2, 9, 4, 8}, "k": {2, 9, 2, 8}, "v": {2, 9, 2, 6}, "dout": {2, 9, 4, 6}}

func TestOpenNamesEveryFault(t *testing.T) {
	for _, c := range []struct {
		what   string
		shapes shapes
		meta   map[string]string
		want   []string
	}{
		{"no q", good.with("q"), nil, []string{`"q" is missing`}},
		{"three axes", good.with("k", 9, 2, 8), nil, []string{`"k"`, "[batch, seq, heads, head_dim]"}},
		{"empty axis", good.with("k", 2, 0, 2, 8), nil, []string{"empty"}},
		{"batch", good.with("k", 1, 9, 2, 8), nil, []string{"batch"}},
		{"head dim", good.with("k", 2, 9, 2, 4), nil, []string{"head_dim"}},
		{"v", good.with("v", 2, 8, 2, 6), nil, []string{"v [2 8 2 6]"}},
		{"heads", good.with("k", 2, 9, 3, 8).with("v", 2, 9, 3, 6), nil, []string{"multiple of 3 KV heads"}},
		{"dout", good.with("dout", 2, 9, 4, 8), nil, []string{"dout"}},
		{"metadata", good, map[string]string{"causal": "maybe", "window": "x", "softcap": "-1", "scale": "inf"},
			[]string{`"causal"`, `"window"`, `"softcap"`, `"scale"`}},
		{"metadata's names", good, map[string]string{"windw": "3", "Causal": "true", "softmax_scale": "1",
			"is_causal": "true", "window_size": "3"},
			[]string{`"windw"`, "mean window?", `"Causal"`, "mean causal?", `"softmax_scale"`, "mean scale?",
				`"is_causal"`, `"window_size"`}},
		{"docs", good, map[string]string{"docs": "[4, 4]"}, []string{`"docs"`, "8", "9"}},
		{"docs text", good, map[string]string{"docs": "four"}, []string{`"docs"`, "JSON"}},
	} {
		path := write(t, c.shapes, c.meta)
		_, err := Open(path)
		if err == nil {
			t.Errorf("%s: no error", c.what)
			continue
		}
		for _, w := range append(c.want, path) {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %v does not say %q", c.what, err, w)
			}
		}
	}
}

func run(t *testing.T, path string, ranks int, s Spec) (map[string][]float32, *Report) {
	t.Helper()
	s.Device = "cpu"
	s.In, s.Out = path, filepath.Join(t.TempDir(), "out.safetensors")
	var g errgroup.Group
	var report *Report
	streams, compute := make([]*tensor.HostStream, ranks), make([]tensor.Stream, ranks)
	for r := range ranks {
		streams[r] = tensor.NewHostStream("compute")
		compute[r] = streams[r]
	}
	world := comm.NewLocal(ranks, compute, comm.Options{})
	for r := range ranks {
		g.Go(func() error {
			defer streams[r].Close()
			defer world[r].Close()
			c, err := Open(path)
			if err != nil {
				return err
			}
			defer c.Close()
			s := s
			if s.Algorithm == "hierarchical" && s.Inner == 0 {
				s.Inner = partition.Inner(ranks, ranks, c.Heads, c.KVHeads)
			}
			dev := device.CPU(streams[r], s.Backend, tensor.F32)
			defer dev.Close()
			rep, err := c.Run(context.Background(), s, world[r], &dev)
			if r == 0 {
				report = rep
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	return results(t, s.Out), report
}

// results reads the tensors of a file.
func results(t *testing.T, path string) map[string][]float32 {
	t.Helper()
	f, err := safetensors.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	out := map[string][]float32{}
	for _, name := range f.Names() {
		info, _ := f.Info(name)
		n := 1
		for _, d := range info.Shape {
			n *= d
		}
		out[name] = make([]float32, n)
		if err := f.ReadFloat32(name, out[name], 0); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// All numbers of ranks, layouts and algorithms give the result of the float64 reference on one rank.
func TestSpecsAgree(t *testing.T) {
	for _, meta := range []map[string]string{
		{"causal": "true"}, {"causal": "true", "window": "3", "softcap": "2"}, {"docs": "[2,3,4]", "causal": "true"},
		{"format": "pt", "layout": "bshd", "lse": "natural log", "source": "a model"},
	} {
		path := write(t, good, meta)
		want, _ := run(t, path, 1, Spec{Strategy: ring.Strategy{Layout: "contiguous", Algorithm: "ring",
			Backend: "reference"}, DType: "fp64"})
		if len(want) != 5 {
			t.Fatalf("results %v, want out, lse, dq, dk, dv", want)
		}
		for _, s := range []Spec{
			{Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ring", Backend: "flash"}, DType: "fp32"},
			{Strategy: ring.Strategy{Layout: "striped", Algorithm: "allgather", Backend: "flash"}, DType: "fp64"},
			{Strategy: ring.Strategy{Layout: "contiguous", Algorithm: "ring", Backend: "reference"}, DType: "fp32"},
			{Strategy: ring.Strategy{Layout: "document", Algorithm: "ring", Backend: "flash"}, DType: "fp32"},
			{Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ring", Backend: "flash"}, DType: "bf16"},
			{Strategy: ring.Strategy{Layout: "striped", Algorithm: "allgather", Backend: "flash"}, DType: "bf16"},
			{Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ring", Backend: "reference"}, DType: "bf16"},
			{Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ring", Backend: "flash"}, DType: "fp16"},
		} {
			got, report := run(t, path, 3, s)
			if report.Ranks != 3 || report.Layout != string(s.Layout) {
				t.Errorf("report %+v", report)
			}
			bound, half := map[string]float64{"bf16": 2e-2, "fp16": 3e-3}[s.DType]
			if !half {
				bound = 2e-5
			}
			for name, w := range want {
				if err := near.Each(got[name], w, near.Finite, func(i int) float64 {
					return bound * math.Max(1,
						math.Abs(float64(w[i])))
				}); err != nil {
					t.Fatalf("%v, %+v: %s: %v", meta, s, name, err)
				}
			}
		}
	}
}

func TestWithoutDoutThereIsNoBackward(t *testing.T) {
	got, _ := run(t, write(t, good.with("dout"), nil), 2, Spec{Strategy: ring.Strategy{Layout: "zigzag",
		Algorithm: "ring", Backend: "flash"}, DType: "fp32"})
	if len(got) != 2 || got["out"] == nil || got["lse"] == nil {
		t.Errorf("results %v, want out and lse alone", got)
	}
}

// A flag for another algorithm is refused, not ignored.
func TestFlagsOfOtherAlgorithms(t *testing.T) {
	path := write(t, good, map[string]string{"causal": "true"})
	windowed := write(t, good, map[string]string{"causal": "true", "window": "2"})
	for _, c := range []struct {
		path, refused string
		spec          Spec
	}{
		{path, "--ulysses-degree", Spec{Strategy: ring.Strategy{Algorithm: "ring", Inner: 2}}},
		{path, "--ulysses-degree", Spec{Strategy: ring.Strategy{Algorithm: "ulysses", Inner: 2}}},
		{path, "", Spec{Strategy: ring.Strategy{Algorithm: "hierarchical", Inner: 2}}},
		{path, "--gather-heads", Spec{Strategy: ring.Strategy{Algorithm: "ring", GatherHeads: 1}}},
		{path, "", Spec{Strategy: ring.Strategy{Algorithm: "allgather", GatherHeads: 1}}},
		{path, "--gather ", Spec{Strategy: ring.Strategy{Algorithm: "ring", Gather: "before"}}},
		{windowed, "--gather ", Spec{Strategy: ring.Strategy{Algorithm: "ulysses", Gather: "beside"}}},
		{windowed, "", Spec{Strategy: ring.Strategy{Algorithm: "ring", Gather: "before"}}},
		{path, "", Spec{Strategy: ring.Strategy{Algorithm: "allgather", Gather: "before"}}},
		{path, "", Spec{Strategy: ring.Strategy{Algorithm: "ring", Gather: "auto"}}},
	} {
		in, err := Open(c.path)
		if err != nil {
			t.Fatal(err)
		}
		s := c.spec
		s.Layout, s.Backend, s.DType, s.Device = "zigzag", "flash", "fp32", "cpu"
		switch err := s.Check(in, 2); {
		case c.refused == "" && err != nil:
			t.Errorf("%+v: %v", c.spec, err)
		case c.refused != "" && (err == nil || !strings.Contains(err.Error(), c.refused)):
			t.Errorf("%+v: %v, want an error of %s", c.spec, err, c.refused)
		}
		in.Close()
	}
}
