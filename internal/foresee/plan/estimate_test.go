package plan

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/foresee/cost"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
)

// round returns a table of round numbers: 10 GFLOP/s, 1 GB/s of memory, 100 MB/s of links.
func round() *cost.Table {
	s := cost.Set{Ranks: 2}
	for _, n := range []int{16, 4096} {
		s.Attention = append(s.Attention, cost.Attention{
			Backend: "flash", DType: "fp32", Mask: cost.Full, Dim: 32, Heads: 4, KVHeads: 4, Queries: n, Keys: n,
			Seconds: 4 * float64(n*n) * 4 * 32 / 1e10,
		})
		s.Products = append(s.Products, cost.Product{Kind: "linear", DType: "fp32", Rows: n, In: n, Out: n,
			Seconds: 2 * math.Pow(float64(n), 3) / 1e10})
		s.Passes = append(s.Passes, cost.Pass{Op: "copy", DType: "fp32", Bytes: int64(n), Seconds: float64(n) / 1e9})
		s.Links = append(s.Links, cost.Link{Pair: cost.SameHost, Call: "exchange", Ranks: 2, Bytes: int64(n),
			Seconds: float64(n) / 1e8})
	}
	return &cost.Table{Version: cost.Version, Machine: cost.Machine{Device: "a machine of round numbers"},
		Date: "2026-11-23T00:00:00Z", Sets: []cost.Set{s}}
}

// on plans a llama of 3B parameters for GPUs that --assume describes.
func on(t *testing.T, assume string, ranks int, set ...string) (*Plan, *config.Config, Options) {
	t.Helper()
	return planFile(t, "llama-3.2-3b-128k.yaml", assume, ranks, set...)
}

// planFile plans a config of examples/bench, and returns it with the options.
func planFile(t *testing.T, file, assume string, ranks int, set ...string) (*Plan, *config.Config, Options) {
	t.Helper()
	m, err := machine.Assume([]string{assume})
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := config.Load("../../../examples/bench/"+file, config.Options{Ranks: ranks, Hosts: m.Hosts, Device: "cuda",
		Set: set, NoFiles: true})
	if err != nil {
		t.Fatal(err)
	}
	choice, err := backend.Choose(cfg, m, 0)
	if err != nil {
		t.Fatal(err)
	}
	table, exact, err := cost.Reference(cost.Machine{Device: m.Name, Arch: m.Arch})
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Machine: m, Choice: choice, Costs: Costs{Table: table, Exact: exact}}
	p, err := Make(cfg, ranks, o)
	if err != nil {
		t.Fatal(err)
	}
	return p, cfg, o
}

// Measured steps of a 3B llama: on H200, docs/benchmarks/202611_h200.md (flash),
// docs/benchmarks/predictions.md and docs/benchmarks/h200-scale, and on H100, docs/benchmarks/202611_h100.md. Each
// estimate is within a tenth.
func TestEstimatesOfMeasuredSteps(t *testing.T) {
	ulysses, gather := "parallel.algorithm=ulysses", "parallel.algorithm=allgather"
	full := "memory.recompute=full" // chosen before activations took less memory
	flash := "attention.backend=flash"
	type measured struct {
		ranks   int
		seq     string
		seconds float64
		set     string
	}
	check := func(card string, c measured) {
		set := []string{"data.seq_len=" + c.seq, "attention.backend=fused"}
		if c.set != "" {
			set = append(set, c.set)
		}
		p, _, _ := on(t, fmt.Sprintf("gpu=%s,cudnn=9.19.0,gpus=%d", card, c.ranks), c.ranks, set...)
		got := p.Estimate.SecondsPerStep
		t.Logf("%d %s, %s %s: %.3f s, measured %.3f, %+.1f %%", c.ranks, card, c.seq, c.set, got, c.seconds,
			100*(got/c.seconds-1))
		if math.Abs(got/c.seconds-1) > 0.1 {
			t.Errorf("%d %s, %s %s: %.3f s, measured %.3f: %+v", c.ranks, card, c.seq, c.set, got, c.seconds,
				*p.Estimate.Parts)
		}
	}
	for _, c := range []measured{{1, "32K", 2.461, flash}, {4, "32K", 0.639, flash}, {4, "128K", 6.140, flash},
		{4, "512K", 80.24, flash}} {
		check("h100", c)
	}
	for _, c := range []measured{
		{1, "16K", 0.849, flash}, {1, "32K", 2.237, flash}, {2, "32K", 1.182, flash}, {2, "64K", 3.515, flash},
		{2, "128K", 12.06, flash}, {4, "32K", 0.613, flash}, {4, "128K", 5.824, flash},
		{1, "16K", 0.851, ""}, {2, "32K", 1.194, ""}, {2, "64K", 3.538, ""}, {2, "32K", 1.195, gather},
		{2, "32K", 1.235, ulysses},
		{2, "64K", 1.428, "model.sliding_window=4096"}, {1, "8K", 0.370, ""},
		{2, "16K", 0.457, ""}, {2, "16K", 0.452, gather}, {2, "16K", 0.474, ulysses},
		{1, "32K", 2.239, ""}, {2, "32K", 1.197, gather}, {2, "32K", 1.240, ulysses},
		{1, "64K", 7.120, ""}, {2, "64K", 3.520, ""}, {2, "64K", 3.520, gather}, {2, "64K", 3.611, ulysses},
		{1, "128K", 29.37, full}, {2, "128K", 11.96, ""}, {2, "128K", 11.97, gather}, {2, "128K", 12.41, ulysses},
		{2, "256K", 42.58, ""},
	} {
		check("h200", c)
	}
}

// An estimate must agree with itself, and change with the machine.
func TestEstimateHangsTogether(t *testing.T) {
	base, _, _ := on(t, "gpu=h200,cudnn=9.19.0,gpus=8", 8)
	e := base.Estimate
	if got := e.Parts.total(); got != e.SecondsPerStep || e.TokensPerSecond != float64(e.TokensPerStep)/got ||
		e.MFU <= 0 || e.MFU >= 1 || e.Scaled {
		t.Errorf("%+v of %+v", e, *e.Parts)
	}
	for what, c := range map[string]struct {
		assume string
		ranks  int
		slower bool
	}{
		"an A100":               {"gpu=a100,cudnn=9.19.0,gpus=8", 8, true},
		"a B200":                {"gpu=b200,cudnn=9.19.0,gpus=8", 8, false},
		"four hosts":            {"gpu=h200,cudnn=9.19.0,gpus=8,hosts=4,net=50G", 32, false},
		"a slow link":           {"gpu=h200,cudnn=9.19.0,gpus=8,link=1G", 8, true},
		"two hosts, a slow net": {"gpu=h200,cudnn=9.19.0,gpus=4,hosts=2,net=1G", 8, true},
	} {
		p, _, _ := on(t, c.assume, c.ranks)
		if slower := p.Estimate.SecondsPerStep > e.SecondsPerStep; slower != c.slower {
			t.Errorf("%s: %v s a step, 8 H200 %v", what, p.Estimate.SecondsPerStep, e.SecondsPerStep)
		}
	}
	if p, _, _ := on(t, "gpu=h200,gpus=2", 2, "parallel.layout=striped"); p.Estimate.SecondsPerStep <= 0 {
		t.Errorf("a striped layout, which has no segments: %+v", p.Estimate)
	}
}

// Counted samples that are not full make a step of the mean sample: products by its tokens, attention by its pairs.
func TestEstimateOfTheMeanSample(t *testing.T) {
	const n = 32 << 10
	full, cfg, o := on(t, "gpu=h200,gpus=2", 2, "data.seq_len=32K", "data.pack_documents=true")
	o.Data = &Data{Samples: 10, SampleTokens: 10 * n / 4, SamplePairs: float64(n) * (n + 1) / 2 / 16}
	mean, err := Make(cfg, 2, o)
	if err != nil {
		t.Fatal(err)
	}
	was, is := full.Estimate, mean.Estimate
	for _, c := range []struct {
		name      string
		got, want float64
	}{
		{"tokens", float64(is.TokensPerStep), n / 4},
		{"attention's FLOPs", is.AttentionShare * is.FLOPsPerStep, was.AttentionShare * was.FLOPsPerStep / 16},
		{"other FLOPs", (1 - is.AttentionShare) * is.FLOPsPerStep, (1 - was.AttentionShare) * was.FLOPsPerStep / 4},
		{"products", is.Parts.Products, was.Parts.Products / 4},
		{"passes", is.Parts.Passes, was.Parts.Passes / 4},
		{"attention", is.Parts.Attention, was.Parts.Attention / 16},
		{"transfers", is.Parts.Transfers, was.Parts.Transfers / 16},
		{"optimizer", is.Parts.Optimizer, was.Parts.Optimizer},
		{"tokens a second", is.TokensPerSecond, n / 4 / is.Parts.total()},
	} {
		if math.Abs(c.got-c.want) > 1e-9*c.want {
			t.Errorf("%s: %v, want %v", c.name, c.got, c.want)
		}
	}
}

// A rank's time is proportional to its share: twice the batch takes twice the passes, and a table of twice the speed
// half the time.
func TestEstimateScales(t *testing.T) {
	seconds := func(c Costs, set ...string) *Parts {
		cfg := load(t, 2, set...)
		o := onCPU(t, cfg)
		o.Costs = c
		p, err := Make(cfg, 2, o)
		if err != nil {
			t.Fatal(err)
		}
		return p.Estimate.Parts
	}
	one := seconds(Costs{Table: round(), Cores: 2})
	two := seconds(Costs{Table: round(), Cores: 2}, "train.global_batch_size=2")
	fast := seconds(Costs{Table: round(), Cores: 2, Rate: 2})
	if math.Abs(two.Products/one.Products-2) > 1e-9 || math.Abs(two.Attention/one.Attention-2) > 1e-9 ||
		two.Optimizer != one.Optimizer {
		t.Errorf("a batch of two: %+v, of one %+v", two, one)
	}
	// A pass of staged gradients zeroes those that no product sets: here nine norms and a gap.
	staged := func(samples int) float64 {
		return seconds(Costs{Table: round(), Cores: 2}, "memory.shard=gradients",
			fmt.Sprintf("train={global_batch_size: %d, micro_batch_size: 1}", samples)).Optimizer
	}
	if got, want := (staged(5)-staged(1))/4, 4*(9*192+64)/1e9; math.Abs(got/want-1) > 1e-9 {
		t.Errorf("a pass zeroes gradients in %v s, want %v", got, want)
	}
	// A pass of 2^30 samples is not recorded one operation at a time.
	const many = 1 << 30
	single, all := alone(t, 1), alone(t, many)
	if math.Abs(all.Products/single.Products/many-1) > 1e-3 {
		t.Errorf("a pass of %d samples: %+v, of one %+v", many, all, single)
	}
	if math.Abs(one.Products/fast.Products-2) > 1e-9 || math.Abs(one.Attention/fast.Attention-2) > 1e-9 {
		t.Errorf("a machine twice as fast: %+v, %+v", fast, one)
	}
	// 6 FLOPs for each weight and token are all the products there are, at 10 GFLOP/s.
	cfg := load(t, 2)
	m := &cfg.Model.Config
	layer := m.HiddenSize*m.HeadDim*(2*m.NumAttentionHeads+2*m.NumKeyValueHeads) + 3*m.HiddenSize*m.IntermediateSize
	want := 6 * float64(layer*m.NumHiddenLayers+m.VocabSize*m.HiddenSize) * float64(cfg.Data.SeqLen) / 2 / 1e10
	if math.Abs(one.Products/want-1) > 1e-9 {
		t.Errorf("products take %v s, want %v", one.Products, want)
	}
}

// alone returns the times of a step of one rank with a number of samples.
func alone(t *testing.T, samples int) *Parts {
	t.Helper()
	cfg := load(t, 1, fmt.Sprintf("train={global_batch_size: %d, micro_batch_size: %d}", samples, samples))
	o := onCPU(t, cfg)
	o.Costs = Costs{Table: round(), Cores: 2}
	p, err := Make(cfg, 1, o)
	if err != nil {
		t.Fatal(err)
	}
	return p.Estimate.Parts
}

// A plan of a thousand ranks is made while somebody waits.
func TestPlansOfThousands(t *testing.T) {
	start, hosts := time.Now(), 128
	if testing.Short() {
		hosts = 32
	}
	p, _, _ := on(t, fmt.Sprintf("gpu=h200,cudnn=9.19.0,gpus=8,hosts=%d,net=50G", hosts), 8*hosts, "data.seq_len=16M")
	if e := p.Estimate; e.SecondsPerStep <= 0 || e.Parts.total() != e.SecondsPerStep {
		t.Errorf("%+v", e)
	}
	t.Logf("%d ranks in %v", 8*hosts, time.Since(start))
}

// Equal layers get equal times. The embedding and its gradients, the head and the loss are outside of them.
func TestRehearsalDividesAPass(t *testing.T) {
	cfg := load(t, 1)
	d, err := demandOf(cfg, machine.CPU(), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	mixing := layerTimes{passTime{compute: 100, calls: 1}, passTime{compute: 250, exposed: 5, calls: 2}}
	r := &rehearsal{batch: 1, tokens: 1, share: 2, attention: slices.Repeat([]layerTimes{mixing},
		cfg.Model.NumHiddenLayers), seconds: func(cost.Work) float64 { return 1 }}
	if err := r.run(cfg, &Memory{}, d); err != nil {
		t.Fatal(err)
	}
	for i, l := range r.layers {
		if l != r.layers[0] || l.forward <= 100 || l.backward <= 250+2*(l.forward-100)/2 || l.kept == 0 || l.trained == 0 {
			t.Errorf("layer %d: %+v", i, l)
		}
	}
	n := float64(len(r.layers))
	if want := (passTime{100*n + 250*n, 5 * n, int(3 * n)}); r.mixing != want || r.begin != 2 || r.end <= 2*r.begin {
		t.Errorf("%+v before the layers, %+v after, attention %+v", r.begin, r.end, r.mixing)
	}
}
