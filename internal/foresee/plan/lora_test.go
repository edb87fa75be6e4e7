package plan

import "testing"

// Adapters of an 8 B model train at 256K tokens on one H200: the base takes two bytes a parameter, and gradients,
// moments and masters are of the adapters alone. On eight, sharded parameters divide the base.
func TestAdaptersOfAnEightBillionModelFit(t *testing.T) {
	for _, c := range []struct {
		ranks      int
		set        []string
		frozen     [2]int64 // MiB, at least and at most
		assume     string
		parameters int64
	}{
		{1, []string{"data.seq_len=256K"}, [2]int64{15300, 15500}, "gpu=h200,gpus=1", 8_030_261_248},
		{8, []string{"data.seq_len=1M", "memory.shard=parameters"}, [2]int64{3500, 4000}, "gpu=h200,gpus=8", 8_030_261_248},
	} {
		on := gpus(t, c.assume)
		cfg, m := fitted(t, "llama-3.1-8b.yaml", c.ranks, on, append(c.set, "lora={r: 16}")...)
		if mib := m.Frozen >> 20; !m.Fits || mib < c.frozen[0] || mib > c.frozen[1] {
			t.Errorf("%d ranks: %d MiB of frozen weights; %s", c.ranks, mib, m.Verdict())
		}
		if most := int64(1 << 30); m.Weights+m.Compute+m.Gradients+m.Optimizer+m.HostOptimizer > most {
			t.Errorf("%d ranks: the adapters take %+v", c.ranks, m)
		}
		p, err := Make(cfg, c.ranks, Options{Machine: on})
		if err != nil {
			t.Fatal(err)
		}
		if e := p.Estimate; e.Trained != 41_943_040 || e.Parameters != c.parameters+e.Trained {
			t.Errorf("%d of %d parameters are trained", e.Trained, e.Parameters)
		}
	}
	full := plan8B(t)
	tuned := plan8B(t, "lora={r: 16}")
	if share := tuned.FLOPsPerStep / full.FLOPsPerStep; share < 0.66 || share > 1 {
		t.Errorf("adapters take %.2f of the FLOPs", share)
	}
}

func plan8B(t *testing.T, set ...string) Estimate {
	t.Helper()
	on := gpus(t, "gpu=h200,gpus=1")
	cfg, _ := fitted(t, "llama-3.1-8b.yaml", 1, on, append(set, "data.seq_len=8K")...)
	p, err := Make(cfg, 1, Options{Machine: on})
	if err != nil {
		t.Fatal(err)
	}
	return p.Estimate
}
