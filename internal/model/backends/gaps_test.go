package backends

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// The reference lists gaps of the peer's selector in section 1.4. These tests show that ours has none of them.

func refused(t *testing.T, p Params) *NoBackendError {
	t.Helper()
	c, err := Select(p)
	var none *NoBackendError
	if !errors.As(err, &none) {
		t.Fatalf("Select(%+v) = %v, %v; want a *NoBackendError", p, c, err)
	}
	return none
}

func chosen(t *testing.T, p Params) *Choice {
	t.Helper()
	c, err := Select(p)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func find(t *testing.T, all []Rejection, rule string) Rejection {
	t.Helper()
	for _, r := range all {
		if r.Rule == rule {
			return r
		}
	}
	t.Fatalf("rule %s did not speak; these did: %v", rule, all)
	return Rejection{}
}

// Gap 1. The peer tests heads % 2 when it selects, and heads % cp in an assertion when it runs: it selects all-to-all
// over 8 ranks with 2 KV heads, and fails. Here KV heads are copied; if heads do not divide, ranks have different
// calls.
func TestGap1HeadsAreDividedByTheRealRanks(t *testing.T) {
	for params, want := range map[string][][2]int{ // heads and KV heads of the calls
		"cp=2 alg=ulysses h=16 g=2":  {{8, 1}},
		"cp=8 alg=ulysses h=16 g=2":  {{2, 1}},
		"cp=3 alg=ulysses h=16 g=16": {{5, 5}, {6, 6}},
		// In the second call, two heads read one KV head, and one head the other.
		"cp=3 alg=ulysses h=8 g=2":                {{2, 1}, {3, 3}, {3, 1}},
		"cp=8 alg=ulysses h=4 g=1":                {{1, 1}}, // four ranks have none
		"cp=8 inner=4 alg=hierarchical h=16 g=2":  {{4, 1}},
		"cp=6 inner=3 alg=hierarchical h=16 g=16": {{5, 5}, {6, 6}},
	} {
		var got [][2]int
		for _, h := range chosen(t, with(params)).Hops {
			if n := [2]int{h.Heads, h.KVHeads}; !slices.Contains(got, n) {
				got = append(got, n)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: heads and KV heads of the calls are %v, want %v", params, got, want)
		}
	}
}

// Gap 2. The peer selects flash for a sliding window in a ring, and fails an assertion when it runs. Our ring computes
// it: the window is a band of each hop, and the rules check that band.
func TestGap2WindowInARing(t *testing.T) {
	c := chosen(t, with("cp=4 window=512 want=flash"))
	if !slices.ContainsFunc(c.Hops, func(h Call) bool { return h.Hop == "off-diagonal band" && h.Windowed() }) {
		t.Errorf("no hop has a band off the diagonal: %v", hopNames(c.Hops))
	}
	none := refused(t, with("cp=4 window=512 want=fused cudnn=9.1.0"))
	if r := find(t, none.Rejected, "fused-window-9.2.0"); r.Hop == "" {
		t.Errorf("%v names no hop", r)
	}
}

// Gap 4. The peer probes once, with global lengths and the user's mask, and then calls cuDNN with halves, other masks
// and other lengths.
func TestGap4EveryHopIsProbed(t *testing.T) {
	if c := chosen(t, with("cudnn=9.2.0 want=fused window=100")); c.Backend != Fused {
		t.Fatalf("one rank: %s", c.Backend)
	}
	none := refused(t, with("cudnn=9.2.0 want=fused window=100 cp=2 layout=contiguous skv=4096"))
	if r := find(t, none.Rejected, "fused-window-band-9.6.0"); r.Hop != "off-diagonal band" {
		t.Errorf("rejected in hop %q", r.Hop)
	}
	// 8256 tokens are a multiple of 64, and a quarter of them, half a rank's shard, is not.
	c := chosen(t, with("cudnn=8.9.7 s=8256 cp=2"))
	if r := find(t, c.Rejected, "fused-seq-multiple-64"); !strings.Contains(r.Example, "4128") {
		t.Errorf("the example %q has no local length", r.Example)
	}
	// The peer's all-gather needs a bottom-right mask. Here it is a full and a causal tile.
	if c := chosen(t, with("cudnn=9.2.0 cp=2 alg=allgather want=fused")); c.Backend != Fused {
		t.Errorf("all-gather with cuDNN 9.2.0: %s", c.Backend)
	}
}

// Gap 5. The peer neither rejects nor supports FlashAttention-2 with packed documents under all-gather. Our kernels
// take a tile for each document, and the hops show it.
func TestGap5DocumentsUnderAllGather(t *testing.T) {
	c := chosen(t, with("cp=4 alg=allgather docs=1 want=flash"))
	if got := hopNames(c.Hops); !slices.Equal(got, []string{"documents", "documents off the diagonal"}) {
		t.Errorf("hops %q", got)
	}
}

// Gap 6. The peer's ring has no softmax type, and only a gate keeps it from computing the plain softmax for a sink.
// Ours adds the sink after the ring, for every backend. A backend with its own sinks is refused if it would count them
// in each call.
func TestGap6NoSilentPlainSoftmax(t *testing.T) {
	for _, alg := range []string{"ring", "allgather"} {
		c := chosen(t, with("cp=2 sink=1 alg="+alg))
		if c.Backend != Flash {
			t.Errorf("a sink, %s: %s", alg, c.Backend)
		}
		find(t, c.Rejected, "fused-not-built")
	}
}

// Gap 7. The peer selects again when it runs, with other arguments: the forward pass as not deterministic, the backward
// pass as training. Under our rules a backend that can train deterministically can also run each pass alone.
func TestGap7TrainingImpliesItsPasses(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 12))
	able := 0
	for range 6000 {
		p := randomParams(rng)
		p.Training = true
		for _, b := range []Backend{Flash, Fused} {
			p.Want = b
			if _, err := Select(p); err != nil {
				continue
			}
			able++
			q := p
			q.Deterministic = false
			if _, err := Select(q); err != nil {
				t.Errorf("%+v is possible deterministic only: %v", p, err)
			}
			q.Training = false
			if _, err := Select(q); err != nil {
				t.Errorf("%+v trains and has no forward pass: %v", p, err)
			}
		}
	}
	if able < 500 {
		t.Errorf("only %d parameters could be tried", able)
	}
}

// Gap 8. A rule of the peer about flash is only reached if another library is installed. Our rules are independent.
func TestGap8RulesOfABackendStandAlone(t *testing.T) {
	rng := rand.New(rand.NewPCG(13, 14))
	for range 2000 {
		p := randomParams(rng)
		q := p
		q.CUDNN, q.Disabled, q.Want = V(8, 9, 7), 1<<Fused, Flash
		flash := map[Backend]bool{Flash: true}
		p.Disabled, p.Want = 0, Auto
		if a, b := rejectingRules(t, p, flash), rejectingRules(t, q, flash); !slices.Equal(a, b) {
			t.Fatalf("%+v: flash %v, with another cuDNN %v", p, a, b)
		}
		q = p
		q.Flash, q.Disabled = 0, 1<<Flash
		fused := map[Backend]bool{Fused: true}
		if a, b := rejectingRules(t, p, fused), rejectingRules(t, q, fused); !slices.Equal(a, b) {
			t.Fatalf("%+v: fused %v, without flash %v", p, a, b)
		}
	}
	// The case: a window, aligned at the bottom right, over another number of keys.
	if h := hopsFor(with("window=100 sq=1024 skv=4096")); h[0].Mask != BottomRightMask || h[0].Left != 100 {
		t.Errorf("asked as %s", &h[0])
	}
}

// Gap 9. Without a group the peer runs as one rank, for any algorithm, and trains on the local slice alone. Here the
// ranks are a number, and a mismatch is an error.
func TestGap9NoSilentSingleRank(t *testing.T) {
	for _, bad := range []string{"cp=4 alg=hierarchical", "cp=-1", "cp=4 alg=hierarchical inner=3", "cp=4 alg=a2a",
		"cp=4 layout=none", "cp=4 inner=8"} {
		p := with(bad)
		var none *NoBackendError
		if c, err := Select(p); err == nil || errors.As(err, &none) {
			t.Errorf("Select(%s) = %v, %v; want a fault of the parameters", bad, c, err)
		}
	}
	if c := chosen(t, with("cp=0")); c.Params.ContextSize != 1 {
		t.Errorf("0 ranks are %d", c.Params.ContextSize)
	}
}

// randomParams returns parameters, many of them valid.
func randomParams(rng *rand.Rand) Params {
	p := defaults()
	one := func(n int) bool { return rng.IntN(n) == 0 }
	pick := func(xs ...int) int { return xs[rng.IntN(len(xs))] }
	p.Arch = pick(80, 86, 90, 90, 100, 103, 120)
	p.CUDNN = V(9, rng.IntN(28), rng.IntN(3))
	if one(3) {
		p.CUDNN = V(8, 9, rng.IntN(9))
	}
	p.DType = []tensor.DType{tensor.BF16, tensor.BF16, tensor.F16, tensor.F32}[rng.IntN(4)]
	p.Batch = pick(1, 1, 2)
	p.SeqQ = pick(64, 1000, 1024, 4096, 5000, 65536)
	p.SeqKV = p.SeqQ
	if p.Documents = one(4); !p.Documents && one(4) {
		p.SeqKV = pick(1, 64, 1000, 2048, 4100)
	}
	p.HeadDim = pick(64, 96, 100, 128, 192, 256, 320)
	p.HeadDimV = p.HeadDim
	if one(4) {
		p.HeadDimV = pick(64, 128, 200)
	}
	p.KVHeads = pick(16, 16, 4, 1)
	p.Causal = !one(3)
	if p.WindowRight = 0; !p.Causal {
		p.WindowRight = pick(-1, -1, 0, 100)
	}
	p.WindowLeft = pick(-1, -1, -1, 0, 100, 2000)
	p.Softcap, p.Sink, p.Bias = one(12), one(8), one(8)
	p.Training, p.Deterministic = !one(3), one(4)
	p.ContextSize = pick(1, 1, 2, 3, 4)
	p.Algorithm = []string{"ring", "ring", "allgather", "ulysses", "hierarchical"}[rng.IntN(5)]
	if p.Algorithm == "hierarchical" {
		p.InnerSize = p.ContextSize
	}
	p.Layout = []partition.LayoutName{"zigzag", "zigzag", "striped", "contiguous", "document"}[rng.IntN(5)]
	return p
}
