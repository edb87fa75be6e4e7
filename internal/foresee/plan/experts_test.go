package plan

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/hf"
)

// planOf plans a config of examples/bench.
func planOf(t *testing.T, file, assume string, ranks int, set ...string) *Plan {
	t.Helper()
	p, _, _ := planFile(t, file, assume, ranks, set...)
	return p
}

// Measured steps of docs/experts.md and docs/hybrids.md on one H200.
func TestEstimatesOfMeasuredExperts(t *testing.T) {
	const qwen = "qwen3-30b-a3b-64k.yaml"
	for _, c := range []struct {
		file, set string
		seconds   float64
	}{
		{qwen, "train.steps=9", 14.2},
		{qwen, "lora.targets=[q_proj, k_proj, v_proj, o_proj]", 13.3},
		{"gpt-oss-20b-128k.yaml", "train.steps=9", 19.0},
		{"qwen3.5-9b-128k.yaml", "train.steps=9", 20.1},
		{"qwen3.5-35b-a3b-64k.yaml", "train.steps=9", 5.82},
	} {
		p := planOf(t, c.file, "gpu=h200,cudnn=9.19.0,gpus=1", 1, c.set)
		got := p.Estimate.SecondsPerStep
		t.Logf("%s %s: %.2f s, measured %.1f: %+v", c.file, c.set, got, c.seconds, *p.Estimate.Parts)
		if math.Abs(got/c.seconds-1) > 0.06 {
			t.Errorf("%s %s: %.2f s, measured %.1f", c.file, c.set, got, c.seconds)
		}
	}
}

// Ranks whose segments other ones follow also compute their maps: as measured, 4.3 ms forward and 5.1 ms backward of
// 128K tokens in each of 24 layers. Ranks with whole sequences compute none.
func TestRanksComputeMaps(t *testing.T) {
	products := func(set ...string) float64 {
		set = append(set, "memory.recompute=selective", "memory.shard=none", "memory.offload=off")
		return planOf(t, "qwen3.5-9b-128k.yaml", "gpu=h200,cudnn=9.19.0,gpus=8", 8, set...).Estimate.Parts.Products
	}
	alone := products("parallel.context=1", "train.global_batch_size=8")
	for _, layout := range []string{"zigzag", "contiguous"} {
		more := products("data.seq_len=1M", "parallel.layout="+layout) - alone
		if want := 24 * 9.4e-3; math.Abs(more/want-1) > 0.02 {
			t.Errorf("%s: products take %.3f s more than of whole sequences, want %.3f", layout, more, want)
		}
	}
}

// Configs of mixtures, by the keys that differ from an example.
var (
	whole = []string{"lora=null"}
	air   = []string{"model.architecture=glm4_moe", "model.vocab_size=151552", "model.hidden_size=4096",
		"model.intermediate_size=10944", "model.moe_intermediate_size=1408", "model.num_hidden_layers=46",
		"model.num_attention_heads=96", "model.num_key_value_heads=8", "model.attention_bias=true",
		"model.n_shared_experts=1", "model.first_k_dense_replace=1", "model.max_position_embeddings=131072"}
	oss120 = []string{"model.num_experts=128", "model.num_hidden_layers=36",
		"model.layer_types=[" + strings.Repeat("sliding_attention, full_attention, ", 18) + "]"}
)

// What a plan of a mixture decides, whether it fits, and the changes that it names.
func TestPlansOfExperts(t *testing.T) {
	const qwen, oss = "qwen3-30b-a3b-64k.yaml", "gpt-oss-20b-128k.yaml"
	for i, c := range []struct {
		file, seq, assume string
		ranks             int
		set               []string
		fits              bool
		want              string // recompute, shard, offload and slots of a run that fits; else the advice
		hide              string // gathers of weights; "": nothing is exposed
	}{
		{qwen, "32K", "gpu=h100,gpus=1", 1, nil, true, "selective none both 2", ""},
		{qwen, "128K", "gpu=h200,gpus=8", 8, nil, true, "none gradients off 2", ""},
		{qwen, "32K", "gpu=h200,gpus=1", 1, whole, false, "at least 2 ranks with memory.shard gradients, or lora.r 16", ""},
		{qwen, "32K", "gpu=h100,gpus=1", 1, whole, false, "at least 4 ranks with memory.shard parameters, or lora.r 16", ""},
		{qwen, "32K", "gpu=h100,gpus=4", 4, whole, true, "selective parameters optimizer 2", ""},
		{qwen, "32K", "gpu=h100,gpus=8", 8, whole, true, "selective parameters activations 2",
			"data.seq_len of at least 65536"},
		{qwen, "32K", "gpu=h200,gpus=8,hosts=2,net=50G", 16, whole, true, "none parameters off 2",
			"data.seq_len of at least 65536"},
		{oss, "32K", "gpu=h100,gpus=1", 1, whole, false, "at least 2 ranks with memory.shard parameters, or lora.r 16", ""},
		{oss, "32K", "gpu=h100,gpus=2", 2, whole, true, "selective parameters both 2", ""},
		{oss, "128K", "gpu=h200,gpus=1", 1, oss120, false, "at least 2 ranks with memory.shard parameters", ""},
		{oss, "128K", "gpu=h200,gpus=2", 2, oss120, true, "selective parameters activations 2", ""},
		{oss, "32K", "gpu=h200,gpus=8", 8, oss120, true, "none parameters off 3", "data.seq_len of at least 131072"},
		{oss, "128K", "gpu=h200,gpus=8", 8, oss120, true, "none parameters off 3", ""},
		{oss, "128K", "gpu=h200,gpus=8,hosts=2,net=50G", 16, oss120, true, "none parameters off 3", "at most 8 ranks"},
		{oss, "32K", "gpu=h200,gpus=8,hosts=2,net=50G", 16, append(oss120, "parallel.algorithm=hierarchical",
			"parallel.ulysses_degree=4"), true, "none parameters off 3", "nothing"}, // not 2 ranks
		{oss, "128K", "gpu=h200,gpus=1", 1, slices.Concat(oss120, whole), false,
			"at least 16 ranks with memory.shard parameters", ""}, // a host of 8 lacks memory
		{oss, "128K", "gpu=h200,gpus=8", 8, slices.Concat(oss120, whole), false, "at least 16 ranks, or lora.r 16", ""},
		{qwen, "128K", "gpu=h100,gpus=8", 8, air, true, "selective parameters off 2", ""},
		{qwen, "32K", "gpu=h100,gpus=8", 8, air, true, "none parameters off 2", "data.seq_len of at least 65536"},
		{qwen, "128K", "gpu=h100,gpus=8", 8, slices.Concat(air, whole), false, "at least 16 ranks, or lora.r 16", ""},
	} {
		if testing.Short() && i%3 > 0 {
			continue
		}
		set := append([]string{"data.seq_len=" + c.seq}, c.set...)
		p := planOf(t, c.file, c.assume+",cudnn=9.19.0", c.ranks, set...)
		k, m := p.Config["memory"].(map[string]any), &p.Memory
		got := fmt.Sprintf("%v %v %v %d", k["recompute"], k["shard"], k["offload"], m.Slots)
		if !m.Fits {
			_, got, _ = strings.Cut(m.Verdict(), "to fit, use ")
		}
		hide := ""
		if w := p.Estimate.Waits; w != nil {
			if hide = cmp.Or(w.Fix, "nothing"); w.Share != w.Seconds/p.Estimate.SecondsPerStep || w.Share <= 0.1 || w.Share >= 1 ||
				w.Seconds > p.Estimate.Parts.Gradients {
				t.Errorf("%s on %s: waits %+v of %+v", c.file, c.assume, w, p.Estimate)
			}
		}
		if m.Fits != c.fits || !strings.HasPrefix(got, c.want) || c.fits && got != c.want || hide != c.hide {
			t.Errorf("%s, %s on %s, %v: fits %t, %q, hide %q", c.file, c.seq, c.assume, c.set, m.Fits, got, hide)
		}
	}
}

// Three slots of gpt-oss-120b: frozen weights are an eighth of 116.8 B parameters, three layers of 3.213 B, a table, and
// biases in float32.
func TestSlotsTakeMemory(t *testing.T) {
	p := planOf(t, "gpt-oss-20b-128k.yaml", "gpu=h200,gpus=8,cudnn=9.19.0", 8, oss120...)
	want := 2*(116.8e9/8+3*3.213e9+201088*2880) + 4*36*128*3*2880
	if got := float64(p.Memory.Frozen); p.Memory.Slots != 3 || math.Abs(got/want-1) > 0.001 {
		t.Errorf("%d slots take %g bytes, want %g", p.Memory.Slots, got, want)
	}
	if got := p.Memory.Room().Slots; got != 3 {
		t.Errorf("a run has %d slots", got)
	}
	// With less memory than the third slot takes, there are two, also if activations could leave to make room. A CPU hides
	// no gathers.
	least := (p.Memory.Total + p.Memory.Reserve) >> 20
	for _, c := range []struct {
		mib     int64
		offload string
		slots   int
	}{{least + 100, "off", 3}, {least - 2000, "off", 2}, {least - 2000, "activations", 2}} {
		set := append([]string{"memory.recompute=" + p.Config["memory"].(map[string]any)["recompute"].(string),
			"memory.shard=parameters", "memory.offload=" + c.offload,
			"memory.reserve=" + fmt.Sprint(p.Memory.Reserve)}, oss120...)
		on := fmt.Sprintf("gpu=h200,gpus=8,cudnn=9.19.0,memory=%dM", c.mib)
		m := planOf(t, "gpt-oss-20b-128k.yaml", on, 8, set...).Memory
		if m.Slots != c.slots || !m.Fits {
			t.Errorf("%+v: %d slots; %s", c, m.Slots, m.Verdict())
		}
	}
	if m := planned(t, "cpu", 2, 1<<20, "memory.shard=parameters", "data.seq_len=128"); m.Slots != 2 {
		t.Errorf("a CPU has %d slots", m.Slots)
	}
}

// Gathers of layers alternate between a wait and none, with two slots. With three slots they all hide, except before the
// first layers.
func TestWaitsForWeights(t *testing.T) {
	flat := model.NewLayout(&hf.Config{Architecture: hf.Llama, VocabSize: 64, HiddenSize: 64, IntermediateSize: 64,
		NumHiddenLayers: 8, NumAttentionHeads: 1, NumKeyValueHeads: 1, HeadDim: 64}, 1)
	r := &rehearsal{flat: flat, uses: []use{{bucket: flat.Embedding()}}}
	layer := func(i int) {
		seconds := 1.0
		if i%2 == 1 {
			seconds = 9
		}
		r.uses = append(r.uses, use{bucket: flat.Layer(i), seconds: seconds})
	}
	for i := range 8 {
		layer(i)
	}
	r.uses = append(r.uses, use{bucket: flat.Head(), seconds: 5})
	for i := range 8 {
		layer(7 - i)
		r.uses[len(r.uses)-1].done = []int{flat.Layer(7 - i)}
	}
	four := func(b int) float64 {
		if flat.Buckets[b].Layer < 0 {
			return 0
		}
		return 4
	}
	none := func(int) float64 { return 0 }
	// Two slots, forward: 4 s for layer 0, and 3 s for each long layer, since a short one computes during its gather.
	// Backward, 3 s for layers 5, 3 and 1. Later passes begin with layers 0 and 1 in memory. Three slots: layer 1 alone
	// waits after layer 0. Reductions go on for 7 s after the last layer; longer ones from 54 s, after the top layer.
	for _, c := range []struct {
		micro, slots   int
		gather, reduce func(int) float64
		want           float64
	}{
		{1, 2, four, none, 16 + 9},
		{1, 3, four, none, 4 + 3},
		{3, 2, four, none, 25 + 2*18},
		{3, 3, four, none, 4 + 3},
		{1, 2, none, four, 7},
		{4, 2, none, func(b int) float64 { return 3 * four(b) }, 54 + 4*96 - 4*85},
	} {
		if got := r.waits(c.micro, c.slots, c.gather, c.reduce); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("%d passes, %d slots: %v s, want %v", c.micro, c.slots, got, c.want)
		}
	}
}
