package hf

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/kernels"
)

// fileValues returns all tensors of a file.
func fileValues(t *testing.T, dir string) map[string][]float32 {
	t.Helper()
	f, err := safetensors.Open(filepath.Join(dir, singleFile))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	all := map[string][]float32{}
	for _, name := range f.Names() {
		info, _ := f.Info(name)
		all[name] = make([]float32, info.Elements())
		if err := f.ReadFloat32(name, all[name], 0); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

func wholeOf(t *testing.T, w *Weights, x Tensor) []float32 {
	t.Helper()
	all := make([]float32, x.Size())
	if err := w.Read(x, all, 0); err != nil {
		t.Fatal(err)
	}
	return all
}

// stacked returns the wanted elements of a tensor of experts: of each the rows of gate, then of up; or of down.
func stacked(family string, in map[string][]float32, x Tensor, e Experts, hidden int) (out []float32) {
	at := fmt.Sprintf("model.layers.%d.", x.Layer)
	ins := x.Role == ExpertIn || x.Role == ExpertIn.Bias()
	for i := range e.Count {
		switch {
		case family == "gpt_oss" && ins: // columns of gate and up alternate
			n := x.Size() / e.Count / (2 * e.Width)
			part := in[x.Name][i*n*2*e.Width:]
			for r := range 2 * e.Width {
				for c := range n {
					out = append(out, part[c*2*e.Width+2*(r%e.Width)+r/e.Width])
				}
			}
		case family == "gpt_oss" && x.Kind == Bias:
			out = append(out, in[x.Name][i*hidden:][:hidden]...)
		case family == "gpt_oss":
			for r := range hidden {
				for c := range e.Width {
					out = append(out, in[x.Name][(i*e.Width+c)*hidden+r])
				}
			}
		case family == "mixtral" && ins:
			at := fmt.Sprintf("%sblock_sparse_moe.experts.%d.", at, i)
			out = append(append(out, in[at+"w1.weight"]...), in[at+"w3.weight"]...)
		case family == "mixtral":
			out = append(out, in[fmt.Sprintf("%sblock_sparse_moe.experts.%d.w2.weight", at, i)]...)
		case ins:
			at := fmt.Sprintf("%smlp.experts.%d.", at, i)
			out = append(append(out, in[at+"gate_proj.weight"]...), in[at+"up_proj.weight"]...)
		default:
			out = append(out, in[fmt.Sprintf("%smlp.experts.%d.down_proj.weight", at, i)]...)
		}
	}
	return out
}

// Experts are stacked in memory for each form of files, and any part can be read.
func TestExpertsAreStacked(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, family := range []string{"qwen3_moe", "mixtral", "glm4_moe", "gpt_oss"} {
		dir := "../testdata/families/" + family
		c, err := ReadConfig(dir)
		if err != nil {
			t.Fatal(err)
		}
		in, w, found := fileValues(t, dir), weightsIn(t, dir), 0
		for _, x := range c.Tensors() {
			if x.Experts == 0 {
				continue
			}
			found++
			want := stacked(family, in, x, c.Layer(x.Layer).MLP.Experts, c.HiddenSize)
			if got := wholeOf(t, w, x); !slices.Equal(got, want) {
				t.Errorf("%s: %s is not stacked", family, x.Name)
			}
			for range 50 {
				lo := r.IntN(len(want))
				got := make([]float32, r.IntN(min(len(want)-lo+1, 300)))
				if err := w.Read(x, got, int64(lo)); err != nil || !slices.Equal(got, want[lo:][:len(got)]) {
					t.Fatalf("%s: %d elements of %s from %d: %v", family, len(got), x.Name, lo, err)
				}
			}
		}
		if want := map[string]int{"gpt_oss": 8, "mixtral": 4}[family]; found != max(want, 2) {
			t.Errorf("%s: %d tensors of experts", family, found)
		}
	}
}

// A directory with fused experts is read as such, and exported as such.
func TestFusedExpertsStayFused(t *testing.T) {
	dir := "../testdata/families/qwen3_moe"
	c, err := ReadConfig(dir)
	if err != nil || c.FusedExperts {
		t.Fatalf("fused: %t, %v", c.FusedExperts, err)
	}
	w, fused := weightsIn(t, dir), *c
	fused.FusedExperts = true
	export := func(w *Weights, from, to *Config) string {
		list, out := from.Tensors(), filepath.Join(t.TempDir(), "out")
		_, err := Export(out, Model{Config: to, DType: safetensors.BF16, Tensors: to.Tensors(),
			Read: func(x Tensor, off int64, dst []float32) error {
				i := slices.IndexFunc(list, func(t Tensor) bool { return t.Name == x.Name })
				return w.Read(list[i], dst, off)
			}}, ShardLimit)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	out := export(w, c, &fused)
	again, err := ReadConfig(out)
	if err != nil || !reflect.DeepEqual(again, &fused) {
		t.Fatalf("read again: %v\n%+v\nwant\n%+v", err, again, &fused)
	}
	f, err := safetensors.Open(filepath.Join(out, singleFile))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	in, _ := f.Info("model.layers.1.mlp.experts.gate_up_proj")
	down, _ := f.Info("model.layers.1.mlp.experts.down_proj")
	if !slices.Equal(in.Shape, []int{8, 48, 64}) || !slices.Equal(down.Shape, []int{8, 64, 24}) {
		t.Errorf("shapes %v and %v", in.Shape, down.Shape)
	}
	v := weightsIn(t, out)
	if err := v.Check(again.Tensors()); err != nil || v.Note() != "" {
		t.Errorf("%q, %v", v.Note(), err)
	}
	for i, x := range again.Tensors() {
		if !slices.Equal(wholeOf(t, v, x), wholeOf(t, w, c.Tensors()[i])) {
			t.Errorf("%s differs", x.Name)
		}
	}
	sameTensors(t, dir, export(v, again, c))
	if err := v.Check(c.Tensors()); err == nil || !strings.Contains(err.Error(), `experts.0.gate_proj.weight"`) {
		t.Errorf("the other form: %v", err)
	}
}

// The pieces of any range are that range, in order.
func TestPiecesAreARange(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	x := Tensor{Name: "x", Shape: []int{12, 5}, Experts: 3, Blocks: []Block{
		{Name: "g.%d", Shape: []int{3, 5}, Rows: 3}, {Name: "u", Shape: []int{3, 2, 5}, Rows: 1, Before: 5}}}
	for range 1000 {
		off := r.Int64N(60)
		n, next := r.Int64N(61-off), off
		for p := range x.pieces(off, n) {
			expert, in := p.at/20, p.at%20
			file, start := fmt.Sprintf("g.%d", expert), int64(0)
			if in >= 15 {
				file, start, in = "u", 10*expert+5, in-15
			}
			if p.at != next || p.n < 1 || p.in.Name != file || p.start != start || p.off != in {
				t.Fatalf("%d from %d: %+v", n, off, p)
			}
			next += p.n
		}
		if next != off+n {
			t.Fatalf("%d from %d end at %d", n, off, next)
		}
	}
	for p := range x.pieces(7, 0) {
		t.Errorf("nothing is in %+v", p)
	}
}

// MXFP4 is exact: two values of a byte, the lower bits first, times a power of two for each 32 (OCP Microscaling Formats
// 1.0).
func TestMXFP4(t *testing.T) {
	const experts, hidden, width, rows = 3, 96, 32, 2 * 32
	c := &Config{Architecture: "gpt_oss", HiddenSize: hidden, IntermediateSize: width, NumHiddenLayers: 1, NumExperts: experts,
		NumExpertsPerTok: 1, NumAttentionHeads: 1, NumKeyValueHeads: 1, HeadDim: 2, VocabSize: 2}
	var in, down Tensor
	for _, x := range c.Tensors() {
		switch x.Role {
		case ExpertIn:
			in = x
		case ExpertDown:
			down = x
		}
	}
	r := rand.New(rand.NewPCG(5, 6))
	random := func(n int, scale bool) []byte {
		b := make([]byte, n)
		for i := range b {
			if b[i] = byte(r.IntN(256)); scale {
				b[i] = byte(r.IntN(250))
			}
		}
		return b
	}
	inBlocks, inScales := random(experts*rows*hidden/2, false), random(experts*rows*hidden/32, true)
	downBlocks, downScales := random(experts*hidden*width/2, false), random(experts*hidden*width/32, true)
	inScales[0], inScales[1], downScales[0] = 0, 1, 249
	raw := func(name string, data []byte, shape ...int) safetensors.Entry {
		return safetensors.Entry{Name: name, DType: safetensors.U8, Shape: shape, Data: func(w io.Writer) error {
			_, err := w.Write(data)
			return err
		}}
	}
	good := []safetensors.Entry{
		raw(in.Name+"_blocks", inBlocks, experts, rows, hidden/32, 16), raw(in.Name+"_scales", inScales, experts, rows, hidden/32),
		raw(down.Name+"_blocks", downBlocks, experts, hidden, width/32, 16),
		raw(down.Name+"_scales", downScales, experts, hidden, width/32)}
	value := func(blocks, scales []byte, i int) float64 {
		bits := blocks[i/2]
		if i%2 == 1 {
			bits >>= 4
		}
		x := []float64{0, 1, 2, 3, 4, 6, 8, 12}[bits%8] / 2
		if bits%16 >= 8 {
			x = -x
		}
		return math.Ldexp(x, int(scales[i/32])-127)
	}
	w := weightsOf(t, good...)
	if err := w.Check([]Tensor{in, down}); err != nil || w.Note() != "" {
		t.Fatalf("%q, %v", w.Note(), err)
	}
	gotIn, gotDown := wholeOf(t, w, in), wholeOf(t, w, down)
	for e := range experts {
		for row := range rows {
			for col := range hidden {
				stored := 2*(row%width) + row/width
				want := value(inBlocks, inScales, (e*rows+stored)*hidden+col)
				if got := gotIn[(e*rows+row)*hidden+col]; float64(got) != want {
					t.Fatalf("expert %d, row %d, column %d: %v, want %v", e, row, col, got, want)
				}
			}
		}
	}
	for i, got := range gotDown {
		if want := value(downBlocks, downScales, i); float64(got) != want {
			t.Fatalf("element %d of down: %v, want %v", i, got, want)
		}
	}
	for range 100 {
		off := r.IntN(len(gotIn))
		part := make([]float32, r.IntN(min(500, len(gotIn)-off)))
		if err := w.Read(in, part, int64(off)); err != nil || !slices.Equal(part, gotIn[off:][:len(part)]) {
			t.Fatalf("%d elements from %d: %v", len(part), off, err)
		}
	}
	for what, change := range map[string]struct {
		at    int
		by    safetensors.Entry
		fault string
	}{
		"no scales":    {1, raw("other", nil, 0), "_scales\" is missing"},
		"other shape":  {0, raw(in.Name+"_blocks", inBlocks, experts, hidden, rows/32, 16), "but config.json needs U8"},
		"other type":   {1, safetensors.Floats(in.Name+"_scales", safetensors.F32, []int{1}, []float32{1}), "F32 [1]"},
		"NaN as scale": {3, raw(down.Name+"_scales", slices.Repeat([]byte{255}, len(downScales)), experts, hidden, width/32), "spoilt"},
		"infinite":     {3, raw(down.Name+"_scales", slices.Repeat([]byte{254}, len(downScales)), experts, hidden, width/32), "spoilt"},
	} {
		list := slices.Clone(good)
		list[change.at] = change.by
		w := weightsOf(t, list...)
		err := w.Check([]Tensor{in, down})
		for _, x := range []Tensor{in, down} {
			if err == nil {
				err = w.Read(x, make([]float32, x.Size()), 0)
			}
		}
		if err == nil || !strings.Contains(err.Error(), change.fault) {
			t.Errorf("%s: %v, want %q", what, err, change.fault)
		}
	}
}

// Layers with experts, routers and shared MLPs follow the keys of each family.
func TestConfigsOfExperts(t *testing.T) {
	const (
		shape  = `"vocab_size":64,"hidden_size":32,"intermediate_size":48,"num_hidden_layers":4,"num_attention_heads":8,`
		chosen = `"num_experts_per_tok":2,"moe_intermediate_size":16,`
	)
	layer := func(text string, i int) MLP {
		t.Helper()
		c, err := readText(t, `{`+shape+strings.TrimSuffix(text, ",")+`}`)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			return MLP{}
		}
		return c.Layer(i).MLP
	}
	qwen, glm := `"model_type":"qwen3_moe",`+chosen, `"model_type":"glm4_moe","n_routed_experts":8,`+chosen
	mixed, dense := MLP{Experts: Experts{Count: 8, Chosen: 2, Width: 16}}, MLP{Width: 48}
	normal := mixed
	normal.Experts.Router.Normalize = true
	for _, tc := range []struct {
		text  string
		layer int
		want  MLP
	}{
		{qwen + `"num_experts":8,`, 0, mixed},
		{qwen + `"num_local_experts":8,"norm_topk_prob":true,`, 0, normal},
		{qwen + `"n_routed_experts":8,"mlp_only_layers":[1,7],`, 1, dense},
		{qwen + `"num_experts":8,"decoder_sparse_step":2,`, 2, dense},
		{qwen + `"num_experts":8,"decoder_sparse_step":2,`, 3, mixed},
		{`"model_type":"mixtral","num_local_experts":8,"num_experts_per_tok":2,"router_jitter_noise":0.0,`, 0,
			MLP{Experts: Experts{Count: 8, Chosen: 2, Width: 48, Router: kernels.Router{Normalize: true}}}},
		{glm, 0, dense},
		{glm, 1, MLP{Width: 16, Experts: Experts{Count: 8, Chosen: 2, Width: 16, Router: kernels.Router{Sigmoid: true,
			Normalize: true}}}},
		{glm + `"first_k_dense_replace":0,"n_shared_experts":3,"norm_topk_prob":false,"n_group":4,"topk_group":2,` +
			`"routed_scaling_factor":2.5,`, 0, MLP{Width: 48, Experts: Experts{Count: 8, Chosen: 2, Width: 16,
			Router: kernels.Router{Sigmoid: true, Scale: 2.5, Groups: 4, Kept: 2}}}},
		{`"model_type":"gpt_oss","num_local_experts":8,"experts_per_token":2,"quantization_config":{"quant_method":"mxfp4"},`,
			0, MLP{Experts: Experts{Count: 8, Chosen: 2, Width: 48, Bias: true, Router: kernels.Router{Normalize: true}}}},
	} {
		if got := layer(tc.text, tc.layer); got != tc.want {
			t.Errorf("%s: layer %d is %+v, want %+v", tc.text, tc.layer, got, tc.want)
		}
	}
	for text, fault := range map[string]string{
		qwen:                         "num_experts: missing",
		qwen + `"num_experts":0,`:    "num_experts: 0 is too small",
		qwen + `"num_experts":1,`:    "num_experts_per_tok: 2 of 1 experts",
		qwen + `"num_experts":1025,`: "num_experts: 1025 is too large",
		qwen + `"num_experts":8,"decoder_sparse_step":0,`:                         "decoder_sparse_step: 0 is too small",
		qwen + `"num_experts":8,"n_group":2,`:                                     "n_group: 2 is not supported in qwen3_moe",
		qwen + `"num_experts":8,"quantization_config":{"quant_method":"mxfp4"},`:  "quantization_config: quantised",
		`"model_type":"qwen3_moe","num_experts":8,`:                               "moe_intermediate_size: missing",
		`"model_type":"mixtral","num_local_experts":8,`:                           "num_experts_per_tok: missing",
		`"model_type":"mixtral","num_local_experts":8,"router_jitter_noise":0.1,`: "router_jitter_noise: 0.1",
		glm + `"n_group":3,`:                                       "n_group: 3 groups of 8 experts",
		glm + `"n_group":8,`:                                       "n_group: 8 groups of 8 experts",
		glm + `"n_group":2,"topk_group":3,`:                        "topk_group: a token cannot choose 2 experts in 3 of 2 groups",
		`"model_type":"glm4_moe","n_routed_experts":"8",` + chosen: "n_routed_experts: ",
		`"model_type":"gpt_oss","num_local_experts":8,` + `"swiglu_limit":6,` + chosen:   "swiglu_limit: 6 is not supported",
		`"model_type":"gpt_oss","num_local_experts":8,` + `"swiglu_alpha":1.7,` + chosen: "swiglu_alpha: 1.7 is not supported",
		`"model_type":"llama","num_local_experts":8,`:                                    "num_local_experts: mixtures of experts",
		`"model_type":"llama","num_experts_per_tok":8,`:                                  "num_experts_per_tok: 8 is not supported",
	} {
		_, err := readText(t, `{`+shape+strings.TrimSuffix(text, ",")+`}`)
		if err == nil || !strings.Contains(err.Error(), fault) {
			t.Errorf("%s: %v, want %q", text, err, fault)
		}
	}
}

// gpt_oss has YaRN if its file says nothing of rotation, and windows in every other layer from the first.
func TestDefaultsOfGPTOSS(t *testing.T) {
	const text = `"model_type":"gpt_oss","vocab_size":64,"hidden_size":32,"intermediate_size":48,"num_hidden_layers":4,` +
		`"num_attention_heads":8,"num_local_experts":8,"num_experts_per_tok":2`
	c, err := readText(t, `{`+text+`}`)
	if err != nil {
		t.Fatal(err)
	}
	s := c.RopeScaling
	if s == nil || s.Factor != 32 || s.OriginalMax != 4096 || *s.Truncate || c.RopeTheta != 150000 ||
		c.Layer(0).Mixer.Window != 127 || c.Layer(1).Mixer.Window != -1 || !c.Layer(1).Mixer.Sinks || !c.AttentionBias {
		t.Errorf("%+v, %+v", c, s)
	}
	if s.Factor = 1; families["gpt_oss"].Defaults.RopeScaling.Factor != 32 {
		t.Error("configs share their rotation")
	}
	if c, err = readText(t, `{`+text+`,"rope_parameters":{"rope_type":"default","rope_theta":9}}`); err != nil ||
		c.RopeScaling != nil || c.RopeTheta != 9 {
		t.Errorf("%+v, %v", c, err)
	}
}

// Corrections of routers are read in any type, never train and stay float32. Adapters leave experts and routers alone.
func TestCorrectionsAreFixed(t *testing.T) {
	c, err := ReadConfig("../testdata/families/glm4_moe")
	if err != nil {
		t.Fatal(err)
	}
	fixed := 0
	for _, x := range c.Tensors() {
		if isFixed := x.Role == Correction; c.Frozen(x) != isFixed || (x.Kind == Fixed) != isFixed {
			t.Errorf("%s is frozen: %t", x.Name, c.Frozen(x))
		} else if isFixed {
			fixed++
			got := make([]float32, 8)
			w := weightsOf(t, safetensors.Floats(x.Name, safetensors.BF16, []int{8}, []float32{1, 2, 3, 4, 5, 6, 7, -.5}))
			if err := w.Read(x, got, 0); err != nil || got[7] != -.5 {
				t.Errorf("%v, %v", got, err)
			}
		}
	}
	c.Tuning.LoRA = &LoRA{R: 2, Alpha: 1}
	if faults := c.CheckTuning(); fixed != 1 || len(faults) > 0 {
		t.Errorf("%d corrections, %v", fixed, faults)
	}
	adapted := map[string]bool{}
	for _, a := range c.Adapters() {
		matrix, _, _ := Adapted(a.Name)
		adapted[strings.TrimPrefix(matrix, "model.layers.")] = true
	}
	for name, want := range map[string]bool{"1.mlp.shared_experts.up_proj.weight": true, "0.mlp.up_proj.weight": true,
		"1.self_attn.o_proj.weight": true, "1.mlp.gate.weight": false, "1.mlp.experts.gate_up_proj.weight": false} {
		if adapted[name] != want {
			t.Errorf("%s has an adapter: %t", name, !want)
		}
	}
	if c.UseQKNorm = false; slices.ContainsFunc(c.Tensors(), func(x Tensor) bool { return x.Role == QueryNorm }) {
		t.Error("without use_qk_norm there are norms")
	}
}

// The layer after the last predicts further tokens; cprun does not need it. Other tensors of a layer it must know.
func TestTensorsBesideExperts(t *testing.T) {
	dir := "../testdata/families/glm4_moe"
	c, err := ReadConfig(dir)
	if err != nil {
		t.Fatal(err)
	}
	for extra, fault := range map[string]string{
		"model.layers.2.mlp.experts.0.up_proj.weight": "", "model.layers.2.eh_proj.weight": "",
		"model.layers.1.mlp.experts.8.up_proj.weight": "not in the model",
		"model.layers.1.mlp.experts.gate_up_proj":     "not in the model",
	} {
		var entries []safetensors.Entry
		for name, values := range fileValues(t, dir) {
			w := weightsIn(t, dir)
			info, _ := w.where[name].Info(name)
			entries = append(entries, safetensors.Floats(name, safetensors.F32, info.Shape, values))
		}
		w := weightsOf(t, append(entries, safetensors.Floats(extra, safetensors.F32, []int{1}, []float32{1}))...)
		err := w.Check(c.Tensors())
		if fault == "" && (err != nil || !strings.Contains(w.Note(), extra)) ||
			fault != "" && (err == nil || !strings.Contains(err.Error(), fault)) {
			t.Errorf("%s: %q, %v", extra, w.Note(), err)
		}
	}
}

// An export repeats the keys that training ignores.
func TestUnusedKeysAreKept(t *testing.T) {
	c, err := readText(t, `{"model_type":"qwen3_moe","vocab_size":64,"hidden_size":32,"intermediate_size":48,`+
		`"num_hidden_layers":1,"num_attention_heads":4,"num_experts":4,"num_experts_per_tok":2,"moe_intermediate_size":16,`+
		`"router_aux_loss_coef":0.9,"output_router_logits":true}`)
	if err != nil {
		t.Fatal(err)
	}
	m, err := c.keys("", safetensors.F32)
	if err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]string{"router_aux_loss_coef": "0.9", "output_router_logits": "true",
		"num_local_experts": "4", "num_experts": "4", "decoder_sparse_step": "1", "mlp_only_layers": "[]"} {
		if got, _ := json.Marshal(m[key]); string(got) != want {
			t.Errorf("%s is %s, want %s", key, got, want)
		}
	}
}
