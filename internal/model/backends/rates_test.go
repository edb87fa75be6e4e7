package backends

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/tensor"
)

func ratesOf(t *testing.T, rows string) []rate {
	t.Helper()
	rates, err := readRates(rows)
	if err != nil {
		t.Fatal(err)
	}
	return rates
}

// runOf returns a run for a key, as scripts/gpu-rates measures it.
func runOf(k rateKey, training bool, seq int) Params {
	p := with(fmt.Sprintf("arch=%d s=%d h=32 g=8 d=%d", k.arch, seq, k.headDim))
	p.DType, p.Deterministic, p.Training = k.dtype, k.deterministic, training
	switch k.mask {
	case rateFull:
		p.Causal, p.WindowRight = false, -1
	case rateWindow:
		p.WindowLeft = 4095
	case rateWindowOverRanks:
		p.WindowLeft, p.ContextSize = 4095, 2
	}
	return p
}

func TestRates(t *testing.T) {
	rates := rateTable()
	if len(rates) == 0 {
		t.Fatal("no rates")
	}
	for _, r := range rates {
		if !slices.Contains(Backends, r.backend) {
			t.Errorf("%+v: a backend that is not there", r)
		}
		for _, training := range []bool{false, true} {
			if k, ok := keyOf(runOf(r.rateKey, training, 32768)); !ok || k != r.rateKey {
				t.Errorf("a run of %+v is looked up as %+v, %t", r.rateKey, k, ok)
			}
		}
	}
}

// TestAutoTakesTheFastest checks that auto takes the fastest measured backend that runs without a costly remedy, and
// otherwise follows the order.
func TestAutoTakesTheFastest(t *testing.T) {
	compared := 0
	for _, r := range rateTable() {
		for _, training := range []bool{false, true} {
			for _, seq := range []int{1024, 32768} { // with the short one no deterministic workspace is large
				p := runOf(r.rateKey, training, seq)
				got := chosen(t, p)
				best, able := fastest(r.rateKey, p)
				if len(able) < 2 {
					if c, err := choose(p, nil); err != nil || c.Backend != got.Backend {
						t.Errorf("%+v: auto takes %s, and without rates %v, %v", r.rateKey, got.Backend, c, err)
					}
					continue
				}
				compared++
				if got.Backend != best {
					t.Errorf("%+v, training %t, %d tokens: auto takes %s, the fastest is %s", r.rateKey, training, seq,
						got.Backend, best)
				}
				if !strings.Contains(got.Reason, "TFLOP/s") {
					t.Errorf("%+v: the reason is %q", r.rateKey, got.Reason)
				}
			}
		}
	}
	if compared == 0 {
		t.Error("nothing was compared")
	}
}

// fastest returns the fastest measured backend that runs p with cheap remedies. Among similar rates it returns the
// first by the order.
func fastest(k rateKey, p Params) (best Backend, able []Backend) {
	order, top := orderOf(p.Arch), 0.0
	rates := map[Backend]float64{}
	for _, r := range rateTable() {
		p.Want = r.backend
		c, err := Select(p)
		costly := func(a Applied) bool { return !slices.Contains(order.cheap, a.Rule) }
		if r.rateKey != k || err != nil || slices.ContainsFunc(c.Remedies, costly) {
			continue
		}
		able = append(able, r.backend)
		rate := r.forward
		if p.Training {
			rate = r.both
		}
		rates[r.backend], top = rate, max(top, rate)
	}
	for _, b := range slices.Backward(order.backends) {
		if rates[b]*(1+rateTolerance) >= top {
			best = b
		}
	}
	return best, able
}

// In this table flash and fused are the fastest in turn.
const turns = `
90 bf16 causal 64 no flash 500 100
90 bf16 causal 64 no fused 400 200
90 bf16 causal 128 no flash 400 300
90 bf16 causal 128 no fused 500 200
90 bf16 full 128 no flash 900 900
90 bf16 window 128 no flash 400 300
90 bf16 window 128 no fused 300 200
90 bf16 window_over_ranks 128 no flash 300 200
90 bf16 window_over_ranks 128 no fused 300 200
90 bf16 causal 128 yes flash 400 200
90 bf16 causal 128 yes fused 400 300
80 bf16 causal 128 no flash 100 100
80 bf16 causal 128 no fused 200 200
`

func TestChoiceByRates(t *testing.T) {
	table := ratesOf(t, turns)
	for _, c := range []struct {
		params string
		want   Backend
		reason string
	}{
		{"", Flash, "fastest on sm90: measured 300 TFLOP/s at head dim 128, causal; fused 200"},
		{"train=0", Fused, "fastest on sm90: measured 500 TFLOP/s at head dim 128, causal, forward; flash 400"},
		{"d=64", Fused, "fastest on sm90: measured 200 TFLOP/s at head dim 64, causal; flash 100"},
		{"d=64 train=0", Flash, "fastest on sm90: measured 500 TFLOP/s at head dim 64, causal, forward; fused 400"},
		{"d=56", Fused, "fastest on sm90: measured 200 TFLOP/s at head dim 64, causal; flash 100"},
		{"d=72", Flash, "fastest on sm90: measured 300 TFLOP/s at head dim 128, causal; fused 200"},
		{"d=256", Flash, "fastest on sm90: measured 300 TFLOP/s at head dim 128, causal; fused 200"},
		{"dtype=fp16", Flash, "fastest on sm90: measured 300 TFLOP/s at head dim 128, causal; fused 200"},
		{"dtype=fp32", Flash, "first on sm90"},
		{"cp=8 s=65536", Flash, "fastest on sm90: measured 300 TFLOP/s at head dim 128, causal; fused 200"},
		{"mask=full", Flash, "first on sm90"}, // only one is measured
		{"window=4095", Flash, "fastest on sm90: measured 300 TFLOP/s at head dim 128, window; fused 200"},
		{"window=4095 cp=2 alg=ulysses", Flash,
			"fastest on sm90: measured 300 TFLOP/s at head dim 128, window; fused 200"},
		{"window=100 mask=full", Flash, "first on sm90"}, // no right bound
		// Equal rates leave the order.
		{"window=4095 cp=2 s=65536", Flash, "fastest on sm90: measured 200 TFLOP/s at head dim 128, window over " +
			"ranks; fused 200"},
		{"arch=80", Fused, "fastest on sm80: measured 200 TFLOP/s at head dim 128, causal; flash 100"},
		{"arch=100", Fused, "first on sm100"},
		{"arch=86", Flash, "first on sm86"},
		// A kind without rates follows the order.
		{"docs=1", Flash, "first on sm90"},
		{"d=128 dv=64", Fused, "next on sm90: flash cannot run this (flash-head-dims-differ)"},
		{"sq=1024 skv=4096", Flash, "first on sm90"},
		// Rates ignore the memory of a remedy: with little of it auto takes the fastest, with more the next.
		{"det=1 s=1024", Fused, "fastest on sm90: measured 300 TFLOP/s at head dim 128, causal, deterministic; flash " +
			"200"},
		{"det=1 s=16384", Flash, "next on sm90: fused needs grant-workspace; measured 200 TFLOP/s at head dim 128, " +
			"causal, deterministic; fused 300"},
		{"off=flash", Fused, "next on sm90: flash cannot run this (flash-disabled); measured 200 TFLOP/s at head dim " +
			"128, causal; flash 300"},
		{"want=fused", Fused, "asked for"},
	} {
		got, err := choose(with(""+c.params), table)
		if err != nil || got.Backend != c.want || got.Reason != c.reason {
			t.Errorf("%q: %+v, %v\nwant %s: %s", c.params, got, err, c.want, c.reason)
		}
	}
}

// TestRatesReorderOnlyTheMeasured checks that backends without a rate keep their place, and that all stay able.
func TestRatesReorderOnlyTheMeasured(t *testing.T) {
	table := ratesOf(t, "90 bf16 causal 128 no reference 9 9\n90 bf16 causal 128 no fused 5 5\n")
	m := measuredFor(with(""), table)
	if got := m.sort([]Backend{Fused, Flash, Reference}); !slices.Equal(got, []Backend{Reference, Flash, Fused}) {
		t.Errorf("the order is %v", got)
	}
	for _, r := range rateTable() {
		p := runOf(r.rateKey, true, 1024)
		a, b := chosen(t, p).Able, []Backend(nil)
		if c, err := choose(p, nil); err == nil {
			b = slices.Clone(c.Able)
		}
		a = slices.Clone(a)
		slices.Sort(a)
		slices.Sort(b)
		if !slices.Equal(a, b) {
			t.Errorf("%+v: able %v, without rates %v", r.rateKey, a, b)
		}
	}
}

func TestReadRates(t *testing.T) {
	rates := ratesOf(t, "\n# a remark\n90 bf16 window_over_ranks 64 yes fused 250.5 158\n100 fp32 full 8 no flash 1 2")
	want := []rate{
		{rateKey{90, tensor.BF16, rateWindowOverRanks, 64, true}, Fused, 250.5, 158},
		{rateKey{100, tensor.F32, rateFull, 8, false}, Flash, 1, 2},
	}
	if !slices.Equal(rates, want) {
		t.Errorf("%+v", rates)
	}
	const row = "90 bf16 causal 64 no flash 1 2\n"
	for _, c := range []struct{ text, want string }{
		{row + row, "line 2: measured"},
		{"90 bf16 causal 64 no flash 1", "line 1: "},
		{row + "\nx bf16 causal 64 no flash 1 2", "line 3: "},
		{"0 bf16 causal 64 no flash 1 2", "line 1: "},
		{"90 fp16 causal 64 no flash 1 2", "line 1: "},
		{"90 bf16 band 64 no flash 1 2", "line 1: "},
		{"90 bf16 causal -64 no flash 1 2", "line 1: "},
		{"90 bf16 causal 64 maybe flash 1 2", "line 1: "},
		{"90 bf16 causal 64 no turbo 1 2", "line 1: "},
		{"90 bf16 causal 64 no auto 1 2", "line 1: "},
		{"90 bf16 causal 64 no flash 0 2", "line 1: "},
		{"90 bf16 causal 64 no flash 1 NaN", "line 1: "},
		{"90 bf16 causal 64 no flash 1 inf", "line 1: "},
	} {
		if rates, err := readRates(c.text); err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%q: %v, %v; want %s", c.text, rates, err, c.want)
		}
	}
}
