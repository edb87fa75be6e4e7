package backend

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

func load(t *testing.T, name string, ranks int, m machine.Machine, set ...string) *config.Config {
	t.Helper()
	cfg, err := config.Load("../../../examples/"+name, config.Options{Ranks: ranks, Device: m.Device(), Set: set,
		NoFiles: true})
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

func gpu(arch int, cudnn backends.Version) machine.Machine {
	return machine.Machine{Arch: arch, CUDNN: cudnn, Flash: machine.BuiltFlash, Assumed: true}
}

func TestParamsAreTheRuns(t *testing.T) {
	m := gpu(90, backends.V(9, 10, 2))
	cfg := load(t, "cases/windows.yaml", 8, m, "train.deterministic=true", "attention.backend=fused")
	got, err := params(cfg, m, 4095, Disabled(true, false))
	want := backends.Params{
		Arch: 90, CUDNN: backends.V(9, 10, 2), Flash: machine.BuiltFlash, Disabled: 1 << backends.Flash,
		Want: backends.Fused, DType: tensor.BF16,
		Batch: 1, SeqQ: 131072, SeqKV: 131072, Heads: 32, KVHeads: 8, HeadDim: 128, HeadDimV: 128,
		Causal: true, WindowLeft: 4095, Training: true, Deterministic: true, ContextSize: 8, Algorithm: "ring",
		Gather: "auto", Layout: "zigzag",
	}
	if err != nil || got != want {
		t.Errorf("%+v, %v\nwant %+v", got, err, want)
	}
	cfg = load(t, "opticks.yaml", 4, machine.CPU(), "data.pack_documents=true", "parallel.layout=document")
	if got, err = params(cfg, machine.CPU(), -1, 0); err != nil || got.DType != tensor.F32 || !got.Documents ||
		got.Arch != 0 || got.Want != backends.Auto {
		t.Errorf("on a CPU: %+v, %v", got, err)
	}
}

// params returns the parameters of the layers with that window.
func params(cfg *config.Config, m machine.Machine, window int, disabled uint8) (backends.Params, error) {
	requests := Requests(cfg)
	i := slices.IndexFunc(requests, func(r Request) bool { return r.WindowLeft == window })
	return requests[i].params(m, disabled)
}

func TestWindowsOfLayers(t *testing.T) {
	m := gpu(90, backends.V(9, 10, 2))
	var got []int
	for _, r := range Requests(load(t, "cases/windows.yaml", 8, m)) {
		got = append(got, r.WindowLeft)
	}
	if !slices.Equal(got, []int{-1, 4095}) {
		t.Errorf("windows %v, want all and 4095", got)
	}
}

// A soft cap of scores leaves cuDNN out.
func TestSoftCapIsOfTheRun(t *testing.T) {
	m := gpu(90, backends.V(9, 10, 2))
	cfg := load(t, "cases/windows.yaml", 8, m, "model.architecture=gemma2", "model.attn_logit_softcapping=50",
		"attention.backend=fused")
	if _, err := Choose(cfg, m, 0); err == nil || !strings.Contains(err.Error(), "soft cap") {
		t.Errorf("fused with a soft cap: %v", err)
	}
	cfg.Parallel.Backend = "auto"
	if c, err := Choose(cfg, m, 0); err != nil || c.Backend != backends.Flash {
		t.Errorf("auto with a soft cap: %v, %v", c, err)
	}
}

// One backend serves all layers. If cuDNN cannot run the windowed layers, the others use another backend too, and the
// rejection names the layers.
func TestLayersShareABackend(t *testing.T) {
	m := gpu(90, backends.V(9, 1, 0)) // no sliding window before 9.2.0
	cfg := load(t, "cases/windows.yaml", 8, m)
	c, err := Choose(cfg, m, 0)
	if err != nil {
		t.Fatal(err)
	}
	if c.Backend != backends.Flash || len(c.Layers) != 2 || c.Layers[0].Backend != backends.Flash ||
		c.Layers[1].Backend != backends.Flash {
		t.Fatalf("chose %s: %+v", c.Backend, c.Layers)
	}
	found := false
	for _, r := range c.Rejected {
		found = found || r.Backend == backends.Fused && strings.Contains(r.Hop, "window of 4096 keys")
	}
	if !found {
		t.Errorf("nothing says that fused cannot run the windowed layers: %+v", c.Rejected)
	}
	full := load(t, "cases/windows.yaml", 8, m, "model.sliding_window=null", "model.layer_types=null")
	full.Parallel.Backend = "fused"
	if c, err := Choose(full, m, 0); err != nil || c.Backend != backends.Fused {
		t.Errorf("fused without windows: %v, %v", c, err)
	}
	cfg.Parallel.Backend = "fused"
	_, err = Choose(cfg, m, 0)
	var none *NoneError
	if !errors.As(err, &none) || !strings.Contains(err.Error(), "attention.backend: fused") ||
		!strings.Contains(err.Error(), "window of 4096 keys") {
		t.Errorf("asked for fused: %v", err)
	}
}

func TestNothingIsLeft(t *testing.T) {
	_, err := Choose(load(t, "opticks.yaml", 2, machine.CPU()), machine.CPU(), Disabled(true, true))
	if err != nil { // the reference is left on a CPU
		t.Error(err)
	}
	cfg := load(t, "opticks.yaml", 2, machine.CPU())
	cfg.Parallel.Backend = "flash"
	_, err = Choose(cfg, machine.CPU(), Disabled(true, false))
	var none *backends.NoBackendError
	if !errors.As(err, &none) || none.Want != backends.Flash || len(none.Rejected) == 0 {
		t.Errorf("flash, switched off: %v", err)
	}
}

// Float32 on a GPU runs on flash. What is said of it names every other backend and why it was not taken;
// where flash is off, the error does, also for machines that are assumed.
func TestFloat32OnAGPUNamesEveryBackend(t *testing.T) {
	for _, ranks := range []int{1, 4} {
		for _, assumed := range []bool{false, true} {
			m := gpu(90, backends.V(9, 19, 0))
			m.Assumed = assumed
			r := Request{
				Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ring", Gather: "auto", Backend: "auto"},
				Params: backends.Params{
					DType: tensor.F32, Batch: 1, SeqQ: 1024, SeqKV: 1024, Heads: 4, KVHeads: 4, HeadDim: 64,
					HeadDimV: 64, Causal: true, WindowLeft: -1, Training: true, ContextSize: ranks,
				},
			}
			c, err := Select(m, 0, r)
			if err != nil || c.Backend != backends.Flash || len(c.Remedies) != 0 {
				t.Fatalf("%d ranks, assumed %t: %+v, %v; want flash as it is", ranks, assumed, c, err)
			}
			var said strings.Builder
			c.Explain(&said, 2)
			for _, w := range []string{"attention: flash: first on sm90", "fused: fused-dtype",
				"reference: It can run this", "Fix: Set attention.backend to reference."} {
				if !strings.Contains(said.String(), w) {
					t.Errorf("%d ranks, assumed %t: %s; want %q", ranks, assumed, said.String(), w)
				}
			}
			_, err = Select(m, 1<<backends.Flash, r)
			for _, w := range []string{"flash-disabled", "fused-dtype", "reference: It can run this",
				"Fix: Set attention.backend to reference."} {
				if err == nil || !strings.Contains(err.Error(), w) {
					t.Errorf("%d ranks, assumed %t: %v; want %q", ranks, assumed, err, w)
				}
			}
			r.Strategy.Backend = "reference"
			if c, err := Select(m, 0, r); err != nil || c.Backend != backends.Reference {
				t.Errorf("%d ranks, assumed %t: reference: %+v, %v", ranks, assumed, c, err)
			}
		}
	}
}

// The attentions of one run get one backend, and remedies that any of them needs.
func TestOneBackendForAllRequests(t *testing.T) {
	m := gpu(100, backends.V(9, 19, 0))
	r := Request{
		Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ring", Gather: "auto"}, Of: "short",
		Params: backends.Params{
			DType: tensor.BF16, Batch: 1, SeqQ: 1024, SeqKV: 1024, Heads: 4, KVHeads: 4, HeadDim: 128, HeadDimV: 128,
			Causal: true, WindowLeft: -1, Training: true, ContextSize: 2,
		},
	}
	sunk := r
	sunk.Of, sunk.Sink = "with a sink", true // which cuDNN counts once a hop
	c, err := Select(m, 0, r, sunk)
	if err != nil || c.Backend != c.Layers[1].Backend || len(c.Layers) != 2 {
		t.Fatalf("%+v, %v", c, err)
	}
	alone, err := Select(m, 0, r)
	if err != nil || alone.Backend != backends.Fused || c.Backend != backends.Flash {
		t.Errorf("alone %+v, with a sink beside it %s; %v", alone, c.Backend, err)
	}
	m.Arch, m.CUDNN, m.Assumed = 90, backends.V(9, 17, 0), false
	r.Documents, r.Strategy.Backend = true, "fused"
	c, err = Select(m, 0, r)
	if err != nil || len(c.Remedies) != 1 || c.Remedies[0].Kind != backends.ZeroWorkspace {
		t.Errorf("documents: %+v, %v", c, err)
	}
}
