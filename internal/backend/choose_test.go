package backend

import (
	"errors"
	"strings"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/tensor"
)

func load(t *testing.T, name string, ranks int, m Machine, set ...string) *config.Config {
	t.Helper()
	cfg, err := config.Load("../../examples/"+name, config.Options{Ranks: ranks, Device: m.Device(), Set: set, NoFiles: true})
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

func gpu(arch int, cudnn attention.Version) Machine {
	return Machine{Arch: arch, CUDNN: cudnn, Flash: BuiltFlash, Assumed: true}
}

func TestParamsAreTheRuns(t *testing.T) {
	m := gpu(90, attention.V(9, 10, 2))
	cfg := load(t, "cases/windows.yaml", 8, m, "train.deterministic=true", "attention.backend=fused")
	got, err := Params(cfg, m, 4095, Disabled(true, false, true))
	want := attention.Params{
		Arch: 90, CUDNN: attention.V(9, 10, 2), Flash: BuiltFlash, Disabled: 1<<attention.Flash | 1<<attention.Unfused, Want: attention.Fused,
		DType: tensor.BF16, Format: attention.BSHD, Packing: attention.Separate, Contiguous: true,
		Batch: 1, SeqQ: 131072, SeqKV: 131072, Heads: 32, KVHeads: 8, HeadDim: 128, HeadDimV: 128,
		Causal: true, WindowLeft: 4095, Training: true, Deterministic: true, ContextSize: 8, Algorithm: "ring", Layout: "zigzag",
	}
	if err != nil || got != want {
		t.Errorf("%+v, %v\nwant %+v", got, err, want)
	}
	cfg = load(t, "opticks.yaml", 4, CPU(), "data.pack_documents=true", "parallel.layout=document")
	if got, err = Params(cfg, CPU(), -1, 0); err != nil || got.DType != tensor.F32 || !got.Documents || got.Arch != 0 || got.Want != attention.Auto {
		t.Errorf("on a CPU: %+v, %v", got, err)
	}
}

func TestWindowsOfLayers(t *testing.T) {
	m := gpu(90, attention.V(9, 10, 2))
	if got := windows(load(t, "cases/windows.yaml", 8, m)); len(got) != 2 || got[0] != -1 || got[1] != 4095 {
		t.Errorf("windows %v, want all and 4095", got)
	}
}

// One backend serves all layers: where cuDNN cannot run the windowed ones, neither do the
// others get it, and what spoke against it names the layers.
func TestLayersShareABackend(t *testing.T) {
	m := gpu(90, attention.V(9, 1, 0)) // no sliding window before 9.2.0
	cfg := load(t, "cases/windows.yaml", 8, m)
	c, err := Choose(cfg, m, 0)
	if err != nil {
		t.Fatal(err)
	}
	if c.Backend != attention.Flash || len(c.Layers) != 2 || c.Layers[0].Backend != attention.Flash || c.Layers[1].Backend != attention.Flash {
		t.Fatalf("chose %s: %+v", c.Backend, c.Layers)
	}
	found := false
	for _, r := range c.Rejected {
		found = found || r.Backend == attention.Fused && strings.Contains(r.Hop, "window of 4096 keys")
	}
	if !found {
		t.Errorf("nothing says that fused cannot run the windowed layers: %+v", c.Rejected)
	}
	full := load(t, "cases/windows.yaml", 8, m, "model.sliding_window=null", "model.layer_types=null")
	if c, err := Choose(full, m, 0); err != nil || c.Backend != attention.Fused {
		t.Errorf("without windows: %v, %v; want fused, first on sm90", c, err)
	}
	cfg.Attention.Backend = "fused"
	_, err = Choose(cfg, m, 0)
	var none *NoneError
	if !errors.As(err, &none) || !strings.Contains(err.Error(), "attention.backend: fused") || !strings.Contains(err.Error(), "window of 4096 keys") {
		t.Errorf("asked for fused: %v", err)
	}
}

func TestNothingIsLeft(t *testing.T) {
	_, err := Choose(load(t, "opticks.yaml", 2, CPU()), CPU(), Disabled(true, true, true))
	if err != nil { // the reference is left on a CPU
		t.Error(err)
	}
	cfg := load(t, "opticks.yaml", 2, CPU())
	cfg.Attention.Backend = "flash"
	_, err = Choose(cfg, CPU(), Disabled(true, false, false))
	var none *attention.NoBackendError
	if !errors.As(err, &none) || none.Want != attention.Flash || len(none.Rejected) == 0 {
		t.Errorf("flash, switched off: %v", err)
	}
}

func TestRoofline(t *testing.T) {
	if _, ok := RooflineOf(CPU(), tensor.F32); ok {
		t.Error("a CPU has a roofline")
	}
	r, ok := RooflineOf(Machine{Arch: 90}, tensor.BF16)
	if !ok || r.FLOPs != 989e12*Efficiency || r.Link != 450e9 {
		t.Errorf("%+v", r)
	}
	if r, _ = RooflineOf(Machine{Arch: 90, Link: 1 << 30}, tensor.F32); r.Link != 1<<30 || r.FLOPs != 67e12*Efficiency {
		t.Errorf("%+v", r)
	}
	if p, ok := PeakOf(87); !ok || p.Arch != 86 {
		t.Errorf("sm87 is taken as %+v", p)
	}
	if _, ok := PeakOf(70); ok {
		t.Error("sm70 has a peak")
	}
}

func TestFits(t *testing.T) {
	size := func(n int64) string { return "x" }
	if s, ok := (Machine{}).Fits(1, 4, size); s != "" || !ok {
		t.Errorf("not said: %q, %t", s, ok)
	}
	if s, ok := (Machine{Arch: 90, Memory: 10}).Fits(10, 4, size); !ok || !strings.HasPrefix(s, "fits") {
		t.Errorf("%q, %t", s, ok)
	}
	if s, ok := (Machine{Arch: 90, Memory: 10}).Fits(11, 4, size); ok || !strings.Contains(s, "NOT") {
		t.Errorf("%q, %t", s, ok)
	}
	// The ranks of a CPU share its memory.
	if s, ok := (Machine{Memory: 12}).Fits(3, 4, size); !ok || !strings.HasPrefix(s, "fits") {
		t.Errorf("%q, %t", s, ok)
	}
	for _, total := range []int64{4, 1 << 62} {
		if s, ok := (Machine{Memory: 12}).Fits(total, 4, size); ok || !strings.Contains(s, "with 4 in all") {
			t.Errorf("%q, %t", s, ok)
		}
	}
}
