package hf

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/safetensors"
)

const peftDir = "../testdata/lora"

// An adapter_config.json of PEFT gives its values.
func TestReadAdapter(t *testing.T) {
	l, err := ReadAdapter(filepath.Join(peftDir, "subset"))
	if err != nil {
		t.Fatal(err)
	}
	if l.R != 3 || l.Alpha != 5 || !l.RSLoRA || fmt.Sprint(l.Targets.Names) != "[layers.1.mlp.down_proj v_proj]" {
		t.Errorf("read %+v", l)
	}
	if s := l.Scale("a.weight"); s < 2.886 || s > 2.887 {
		t.Errorf("scale %v, want 5/sqrt(3)", s)
	}
}

// Every key with an effect that cprun lacks is refused by its name. Keys without an effect are not.
func TestAdaptersThatAreRefused(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(peftDir, "all", adapterConfig))
	if err != nil {
		t.Fatal(err)
	}
	read := func(key, value string) error {
		t.Helper()
		var keys map[string]json.RawMessage
		if err := json.Unmarshal(text, &keys); err != nil {
			t.Fatal(err)
		}
		more := maps.Clone(keys)
		if more[key] = json.RawMessage(value); value == "" {
			delete(more, key)
		}
		raw, err := json.Marshal(more)
		if err != nil {
			t.Fatal(err)
		}
		_, err = ReadAdapter(dirOf(t, map[string]string{adapterConfig: string(raw)}))
		return err
	}
	for _, c := range [][2]string{{"rank_pattern", `{"q_proj": "8"}`}, {"alpha_pattern", `[8]`}, {"use_dora", "true"},
		{"modules_to_save", `"lm_head"`}, {"bias", `"all"`}, {"fan_in_fan_out", "true"}, {"lora_bias", "true"},
		{"init_lora_weights", `"pissa"`}, {"layers_to_transform", "[1.5]"}, {"exclude_modules", `1`}, {"target_modules", "[]"}, {"peft_type", `"LOHA"`}, {"peft_type", ""}, {"r", "0"},
		{"r", ""}, {"lora_alpha", "-1"}, {"lora_dropout", "1"}, {"a_key_of_the_future", "1"}} {
		if err := read(c[0], c[1]); err == nil || !strings.Contains(err.Error(), c[0]) {
			t.Errorf("%s %s: %v", c[0], c[1], err)
		}
	}
	for _, c := range [][2]string{{"target_modules", `"all-linear"`}, {"revision", `"main"`}, {"use_dora", ""},
		{"rank_pattern", "{ }"}, {"init_lora_weights", `"gaussian"`}, {"a_key_of_the_future", "null"}} {
		if err := read(c[0], c[1]); err != nil {
			t.Errorf("%s %s: %v", c[0], c[1], err)
		}
	}
}

// Targets name modules by their last parts, as in PEFT.
func TestTargets(t *testing.T) {
	c := &Config{Architecture: Llama, VocabSize: 8, HiddenSize: 4, IntermediateSize: 6, NumHiddenLayers: 2,
		NumAttentionHeads: 2, NumKeyValueHeads: 1, HeadDim: 2}
	for _, row := range []struct {
		targets []string
		want    int // adapters
	}{{nil, 14}, {[]string{"q_proj"}, 2}, {[]string{"proj"}, 0}, {[]string{"self_attn.q_proj", "q_proj"}, 2},
		{[]string{"layers.1.mlp.up_proj", "v_proj"}, 3}, {[]string{"model.layers.0.mlp.gate_proj"}, 1}} {
		c.Tuning.LoRA = &LoRA{R: 2, Alpha: 4, Targets: Modules{Names: row.targets}}
		list := c.Adapters()
		if len(list) != 2*row.want {
			t.Errorf("%v: %d tensors, want %d pairs", row.targets, len(list), row.want)
		}
		for i := 0; i < len(list); i += 2 {
			a, b := list[i], list[i+1]
			matrix, isB, ok := Adapted(a.Name)
			other, isBToo, okToo := Adapted(b.Name)
			if !ok || !okToo || isB || !isBToo || matrix != other || a.Shape[0] != 2 || b.Shape[1] != 2 {
				t.Errorf("%v: A is %+v, B is %+v", row.targets, a, b)
			}
		}
	}
	c.Architecture, c.Tuning.LoRA = "phi3", &LoRA{R: 2, Alpha: 4}
	if list := c.Adapters(); len(list) != 2*2*4 { // one pair for the three matrices of qkv_proj
		t.Errorf("phi3: %d tensors", len(list))
	}
	if _, _, ok := Adapted("model.layers.0.self_attn.q_proj.weight"); ok {
		t.Error("a matrix is an adapter")
	}
}

func tuned(l LoRA, set func(*Config)) *Config {
	c := &Config{Architecture: Llama, VocabSize: 8, HiddenSize: 4, IntermediateSize: 6, NumHiddenLayers: 12,
		NumAttentionHeads: 2, NumKeyValueHeads: 1, HeadDim: 2, RMSNormEps: 1e-6, RopeTheta: 1e4}
	if l.R == 0 {
		l.R, l.Alpha = 2, 4
	}
	if c.Tuning.LoRA = &l; set != nil {
		set(c)
	}
	return c
}

// Modules get adapters, ranks and scales as in peft 0.21.
func TestPatterns(t *testing.T) {
	names := func(n ...string) Modules { return Modules{Names: n} }
	for what, row := range map[string]struct {
		lora LoRA
		want string // the modules with their ranks and scales
	}{
		"expression": {LoRA{Targets: Modules{Regexp: `model\.layers\.[1-3]\..*(q|v)_proj`},
			Exclude: Modules{Regexp: `.*\.[23]\..*`}}, "1.q_proj 2 2, 1.v_proj 2 2"},
		"names without others": {LoRA{Targets: names("q_proj", "v_proj"), Exclude: names("v_proj"), Layers: []int{1, 11}},
			"1.q_proj 2 2, 11.q_proj 2 2"},
		"layers do not restrict a whole name": {LoRA{Layers: []int{10}, LayersPattern: []string{"model.layers"},
			Targets: names("k_proj", "model.layers.1.mlp.up_proj")}, "1.up_proj 2 2, 10.k_proj 2 2"},
		"the first pattern applies": {LoRA{Targets: names("q_proj", "up_proj"), Layers: []int{1, 2},
			RankPattern:  Patterns{{"1.self_attn.q_proj", 8}, {"q_proj|k_proj", 4}},
			AlphaPattern: Patterns{{`^model\.layers\.2\..*`, 3}}},
			"1.q_proj 8 0.5, 1.up_proj 2 2, 2.q_proj 4 0.75, 2.up_proj 2 1.5"},
		"root of the pattern's rank": {LoRA{R: 2, Alpha: 6, RSLoRA: true, Targets: names("q_proj"), Layers: []int{0},
			RankPattern: Patterns{{"q_proj", 9}}}, "0.q_proj 9 2"},
		"saved modules get none": {LoRA{Targets: names("q_proj", "v_proj"), Layers: []int{0},
			ModulesToSave: []string{"v_proj"}}, "0.q_proj 2 2"},
	} {
		c := tuned(row.lora, nil)
		if faults := c.CheckTuning(); len(faults) > 0 {
			t.Errorf("%s: %v", what, faults)
		}
		var got []string
		for i, a := range c.Adapters() {
			if matrix, b, _ := Adapted(a.Name); !b {
				if r := c.Adapters()[i+1].Shape[1]; r != a.Shape[0] {
					t.Errorf("%s: A has rank %d, B %d", what, a.Shape[0], r)
				}
				module := strings.Split(strings.TrimSuffix(matrix, ".weight"), ".")
				got = append(got, fmt.Sprintf("%s.%s %d %g", module[2], module[4], a.Shape[0], c.Tuning.LoRA.Scale(matrix)))
			}
		}
		if all := strings.Join(got, ", "); all != row.want {
			t.Errorf("%s: adapters %s, want %s", what, all, row.want)
		}
	}
}

// Names and expressions that no module has, or that Python reads in another way, are refused at their key.
func TestPatternsThatAreRefused(t *testing.T) {
	q := Modules{Names: []string{"q_proj"}}
	tied := func(c *Config) { c.TieWordEmbeddings = true }
	for _, row := range []struct {
		key  string
		lora LoRA
		set  func(*Config)
	}{
		{"targets", LoRA{Targets: Modules{Regexp: "q_proj"}}, nil},
		{"targets", LoRA{Targets: Modules{Regexp: "(?!a).*q_proj"}}, nil},
		{"targets", LoRA{Targets: Modules{Regexp: `model.layers\.1{,1}\..*q_proj|.*q_proj`}}, nil},
		{"targets", LoRA{Targets: Modules{Regexp: `.*head|.*q_proj`}}, nil},
		{"targets", LoRA{Targets: Modules{Regexp: `.*head|.*q_proj`}}, tied},
		{"targets", LoRA{Targets: Modules{Regexp: `model\.layers\.1(\..*q_proj)?`}}, nil},
		{"targets", LoRA{Targets: q, Exclude: q}, nil},
		{"targets", LoRA{Targets: q, ModulesToSave: []string{"q_proj"}}, nil},
		{"exclude_modules", LoRA{Exclude: Modules{Names: []string{"w1"}}}, nil},
		{"exclude_modules", LoRA{Exclude: Modules{Regexp: "("}}, nil},
		{"layers_to_transform", LoRA{Targets: q, Layers: []int{12}}, nil},
		{"layers_to_transform", LoRA{Targets: q, Layers: []int{-1, 1}}, nil},
		{"layers_to_transform", LoRA{Targets: Modules{Regexp: ".*q_proj"}, Layers: []int{1}}, nil},
		{"layers_pattern", LoRA{Targets: q, Layers: []int{1}, LayersPattern: []string{"h"}}, nil},
		{"layers_pattern", LoRA{Targets: q, LayersPattern: []string{"layers"}}, nil},
		{"rank_pattern", LoRA{Targets: q, RankPattern: Patterns{{"v_proj", 2}}}, nil},
		{"rank_pattern", LoRA{Targets: q, RankPattern: Patterns{{"q_proj", 1.5}}}, nil},
		{"rank_pattern", LoRA{Targets: q, RankPattern: Patterns{{"q_proj", 0}}}, nil},
		{"rank_pattern", LoRA{Targets: q, RankPattern: Patterns{{"q_proj", 1 << 17}}}, nil},
		{"alpha_pattern", LoRA{Targets: q, AlphaPattern: Patterns{{"q_proj", 0}}}, nil},
		{"alpha_pattern", LoRA{Targets: q, AlphaPattern: Patterns{{"(?=q)q_proj", 1}}}, nil},
		{"modules_to_save", LoRA{Targets: q, ModulesToSave: []string{"mlp"}}, nil},
		{"modules_to_save", LoRA{Targets: q, ModulesToSave: []string{""}}, nil},
		{"modules_to_save", LoRA{Targets: q, ModulesToSave: []string{"lm_head"}, Unties: true}, tied},
	} {
		faults := tuned(row.lora, row.set).CheckTuning()
		if len(faults) != 1 || faults[0].Key != "lora."+row.key {
			t.Errorf("%+v: %v, want a fault of %s", row.lora, faults, row.key)
		}
	}
}

// The order of names does not matter, and names may be repeated.
func TestNamesOfModules(t *testing.T) {
	var m Modules
	if err := json.Unmarshal([]byte(`["b", "a", "b"]`), &m); err != nil || fmt.Sprint(m.Names) != "[a b]" {
		t.Errorf("read %+v, %v", m, err)
	}
}

// Modules to save end at any letter, as in PEFT. A tied head is the embedding.
func TestModulesToSave(t *testing.T) {
	for _, row := range []struct {
		names []string
		tied  bool
		want  int // tensors that train beside the adapters
	}{{[]string{"norm"}, false, 25}, {[]string{"embed_tokens", "lm_head"}, false, 2}, {[]string{"lm_head"}, true, 1},
		{[]string{"embed_tokens", "head"}, true, 1}, {[]string{"layers.1.self_attn.o_proj"}, false, 1}} {
		c := tuned(LoRA{ModulesToSave: row.names}, func(c *Config) { c.TieWordEmbeddings = row.tied })
		trains := 0
		for _, t := range c.Tensors() {
			if !c.Frozen(t) {
				trains++
			}
		}
		if faults := c.CheckTuning(); len(faults) > 0 || trains != row.want || len(c.Kept()) != row.want {
			t.Errorf("%v: %d tensors train, %d are kept, want %d; %v", row.names, trains, len(c.Kept()), row.want, faults)
		}
	}
}

// What ExportAdapter writes, ReadAdapter and CheckAdapter read, patterns in their order.
func TestAdapterRoundTrip(t *testing.T) {
	for what, c := range map[string]*Config{
		"names": tuned(LoRA{R: 3, Alpha: 5.5, Targets: Modules{Names: []string{"k_proj", "q_proj"}}, Layers: []int{0, 2},
			LayersPattern: []string{"layers"}, ModulesToSave: []string{"embed_tokens", "norm"}, Unties: true,
			RankPattern: Patterns{{"q_proj", 2}, {"k_proj", 1}}, AlphaPattern: Patterns{{`\w<_proj|k_proj`, 0.5}}}, nil),
		"expressions": tuned(LoRA{R: 1, Alpha: 2, RSLoRA: true, Targets: Modules{Regexp: `.*q_proj`},
			Exclude: Modules{Regexp: `.*\.1\..*`}, Unties: true}, nil),
		"tied and resized": tuned(LoRA{R: 1, Alpha: 2, Targets: Modules{Names: []string{"q_proj"}},
			ModulesToSave: []string{"lm_head", "model.embed_tokens"}}, func(c *Config) {
			c.TieWordEmbeddings, c.FileVocab = true, 6
		}),
		"resized": tuned(LoRA{R: 1, Alpha: 2, Targets: Modules{Names: []string{"q_proj"}}, Unties: true},
			func(c *Config) { c.FileVocab = 6 }),
	} {
		want := c.Tuning.LoRA
		want.From = filepath.Join(t.TempDir(), "adapter")
		m := Model{Config: c, DType: "F32", Tensors: append(c.Adapters(), c.Kept()...),
			Read: func(t Tensor, off int64, dst []float32) error {
				for i := range dst {
					dst[i] = float32(len(t.Name)) + float32(off) + float32(i)
				}
				return nil
			}}
		if err := ExportAdapter(want.From, m); err != nil {
			t.Fatal(err)
		}
		got, err := ReadAdapter(want.From)
		if err != nil || fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", want) {
			t.Errorf("%s: read %+v, %v, want %+v", what, got, err, want)
		}
		w, err := OpenAdapter(want.From)
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		if err := w.CheckAdapter(c); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		for _, n := range m.Tensors {
			a, b := make([]float32, n.Size()), make([]float32, n.Size())
			if err := w.Read(InAdapter(n), a, 0); err != nil || m.Read(n, 0, b) != nil || fmt.Sprint(a) != fmt.Sprint(b) {
				t.Errorf("%s: %s is %v, %v", what, n.Name, a, err)
			}
		}
		if head := (Tensor{Name: adapterPrefix + "lm_head.weight"}); c.TieWordEmbeddings && !w.Has(head) {
			t.Errorf("%s: no copy of the tied embedding as the head", what) // for which PEFT looks
		}
		if c.FileVocab > 0 {
			c.VocabSize, c.FileVocab = 6, 0
			if err := w.CheckAdapter(c); err == nil || !strings.Contains(err.Error(), "resize_embeddings: 8") {
				t.Errorf("%s: a smaller model: %v", what, err)
			}
		}
	}
}

// An adapter's file needs its modules to save, and may repeat them as PEFT does; other tensors of the model, and a tied
// head that differs, are refused.
func TestTensorsOfAdapters(t *testing.T) {
	const embed, head = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
	for _, row := range []struct {
		saved, more []string
		tied, fits  bool
	}{
		{[]string{"lm_head"}, []string{head + ".weight"}, false, true},
		{[]string{"lm_head"}, nil, false, false},
		{[]string{"lm_head"}, []string{head + ".weight", head + ".modules_to_save.weight", head + ".original_module.weight"},
			false, true},
		{nil, []string{head + ".original_module.weight"}, false, false},
		{nil, []string{head + ".weight"}, false, false},
		{nil, []string{head + ".weight"}, true, false},
		{[]string{"embed_tokens"}, []string{embed + ".weight"}, true, true},
		{[]string{"embed_tokens"}, []string{embed + ".weight", head + ".weight"}, true, true},
		{[]string{"embed_tokens"}, []string{embed + ".weight", "+" + head + ".weight"}, true, false},
	} {
		c := tuned(LoRA{ModulesToSave: row.saved, Targets: Modules{Names: []string{"model.layers.0.self_attn.q_proj"}}},
			func(c *Config) { c.TieWordEmbeddings = row.tied })
		var entries []safetensors.Entry
		for _, a := range c.Adapters() {
			entries = append(entries, safetensors.Floats(a.Name, "F32", a.Shape, make([]float32, a.Size())))
		}
		for _, name := range row.more {
			values := make([]float32, 32)
			if name[0] == '+' {
				name, values[31] = name[1:], 1
			}
			entries = append(entries, safetensors.Floats(name, "F32", []int{8, 4}, values))
		}
		dir := t.TempDir()
		if err := safetensors.WriteFile(filepath.Join(dir, adapterFile), nil, entries); err != nil {
			t.Fatal(err)
		}
		w, err := OpenAdapter(dir)
		if err != nil {
			t.Fatal(err)
		}
		if err := w.CheckAdapter(c); (err == nil) != row.fits {
			t.Errorf("%+v: %v", row, err)
		}
		w.Close()
	}
}
