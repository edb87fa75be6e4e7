package plan

import (
	"testing"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
)

// With less memory of the GPU, Fit recomputes more, and then makes chunks smaller. It keeps the config's own values.
func TestFitTakesWhatTheMemoryHasRoomFor(t *testing.T) {
	const shape = "../../../examples/bench/llama-3.2-3b-32k.yaml"
	fit := func(ranks int, memory int64, set ...string) (*config.Config, Memory) {
		t.Helper()
		cfg, err := config.Load(shape, config.Options{Ranks: ranks, Device: "cuda", Set: set, NoFiles: true})
		if err != nil {
			t.Fatal(err)
		}
		m := machine.Machine{Arch: 90, CUDNN: backends.V(9, 19, 0), Flash: machine.BuiltFlash, GPUs: ranks,
			Memory: memory}
		choice, err := backend.Choose(cfg, m, 0)
		if err != nil {
			t.Fatal(err)
		}
		cfg.Parallel.Backend = choice.Backend.String()
		undecided := *cfg
		p, err := Make(&undecided, ranks, Options{Machine: m, Choice: choice})
		if err != nil {
			t.Fatal(err)
		}
		mem, err := Fit(cfg, ranks, m, nil)
		if err != nil {
			t.Fatal(err)
		}
		again, err := MemoryOf(cfg, ranks, m)
		again.snapshot = mem.snapshot
		if err != nil {
			t.Fatal(err)
		}
		if len(cfg.Differences(&undecided)) > 0 || mem != p.Memory || mem != again {
			t.Errorf("Make decides %+v with %+v, Fit %+v with %+v, of which MemoryOf says %+v", undecided.Memory,
				p.Memory, cfg.Memory, mem, again)
		}
		if said := p.Config["memory"].(map[string]any)["recompute"]; said != cfg.Memory.Recompute {
			t.Errorf("the plan's config has recompute %v, Fit took %s", said, cfg.Memory.Recompute)
		}
		return cfg, mem
	}
	for _, c := range []struct {
		ranks     int
		gib       int64
		set       string
		recompute string
		chunk     int
		fits      bool
	}{
		{4, 140, "train.steps=9", "none", 8192, true},
		{4, 40, "train.steps=9", "selective", 8192, true},
		{4, 27, "train.steps=9", "selective", 4096, true},
		{4, 25, "train.steps=9", "selective", 8192, true}, // with sharded parameters
		{4, 21, "train.steps=9", "full", 4096, true},
		{4, 4, "train.steps=9", "full", 1024, false},
		{4, 0, "train.steps=9", "selective", 8192, true}, // not known
		{4, 40, "memory.recompute=full", "full", 8192, true},
		{4, 140, "memory.loss_chunk=100", "none", 100, true},
		{4, 140, "data.seq_len=1K", "none", 256, true}, // all tokens of a rank
	} {
		cfg, mem := fit(c.ranks, c.gib<<30, c.set)
		if cfg.Memory.Recompute != c.recompute || cfg.Memory.LossChunk != c.chunk || mem.Fits != c.fits {
			t.Errorf("%d ranks of %d GiB, %s: recompute %s, chunks of %d, fits %t (%s); want %s, %d, %t", c.ranks,
				c.gib, c.set,
				cfg.Memory.Recompute, cfg.Memory.LossChunk, mem.Fits, readable.Bytes(mem.Total), c.recompute, c.chunk,
				c.fits)
		}
	}
}
