package hf

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/safetensors"
)

// hybrid returns a small config of a family with linear layers, the last layer with attention.
func hybrid(t *testing.T, family string) *Config {
	t.Helper()
	c, err := ReadConfig("../testdata/families/" + family)
	if err != nil {
		t.Fatal(err)
	}
	c.LinearNumKeyHeads, c.LinearNumValueHeads, c.LinearKeyHeadDim, c.LinearValueHeadDim = 2, 6, 4, 5
	c.LayerTypes = []string{LinearAttention, FullAttention}
	return c
}

// ordinals fills dst with the places of a tensor's elements, which float32 holds exactly.
func ordinals(_ Tensor, off int64, dst []float32) error {
	for i := range dst {
		dst[i] = float32(off) + float32(i)
	}
	return nil
}

// Files of qwen3_next have the rows of each key head together: its q, k, and the v and z of its value heads, and b and a
// likewise. Those of qwen3_5 have a tensor for each.
func TestPlacesOfLinearLayers(t *testing.T) {
	shapes := map[string][]int{"conv1d.weight": {46, 1, 4}, "A_log": {6}, "dt_bias": {6}, "norm.weight": {5},
		"out_proj.weight": {32, 30}}
	for family, more := range map[string]map[string][]int{
		"qwen3_next": {"in_proj_qkvz.weight": {76, 32}, "in_proj_ba.weight": {12, 32}},
		"qwen3_5_text": {"in_proj_qkv.weight": {46, 32}, "in_proj_z.weight": {30, 32}, "in_proj_b.weight": {6, 32},
			"in_proj_a.weight": {6, 32}},
	} {
		c := hybrid(t, family)
		dir := t.TempDir()
		root, err := os.OpenRoot(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer root.Close()
		if err := (Model{Config: c, DType: "F32", Tensors: c.Tensors(), Read: ordinals}).write(root, ShardLimit); err != nil {
			t.Fatal(err)
		}
		f, err := safetensors.Open(filepath.Join(dir, singleFile))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		seen := 0
		for _, name := range f.Names() {
			name, of := strings.CutPrefix(name, "model.layers.0.linear_attn.")
			if !of {
				continue
			}
			seen++
			want := shapes[name]
			if want == nil {
				want = more[name]
			}
			if i, _ := f.Info("model.layers.0.linear_attn." + name); !slices.Equal(i.Shape, want) {
				t.Errorf("%s: %s is %v, want %v", family, name, i.Shape, want)
			}
		}
		if seen != len(shapes)+len(more) {
			t.Errorf("%s: %d tensors of the linear layer", family, seen)
		}
		w := weightsIn(t, dir)
		if err := w.Check(c.Tensors()); err != nil {
			t.Error(err)
		}
		for _, m := range c.Tensors() {
			for lo := 0; lo < m.Size(); lo += 77 {
				got, want := make([]float32, min(77, m.Size()-lo)), make([]float32, min(77, m.Size()-lo))
				_ = ordinals(m, int64(lo), want)
				if err := w.Read(m, got, int64(lo)); err != nil || !slices.Equal(got, want) {
					t.Fatalf("%s from %d: %v, want %v, %v", m.Name, lo, got, want, err)
				}
			}
		}
		if family == "qwen3_next" {
			checkKeyHeads(t, f)
		}
	}
}

// checkKeyHeads compares rows with those of the parts, by transformers' fix_query_key_value_ordering.
func checkKeyHeads(t *testing.T, f *safetensors.File) {
	rows := func(name string) (firsts []int) {
		i, _ := f.Info(name)
		all := make([]float32, i.Elements())
		if err := f.ReadFloat32(name, all, 0); err != nil {
			t.Fatal(err)
		}
		for r := range i.Shape[0] {
			firsts = append(firsts, int(all[r*i.Shape[1]])/i.Shape[1])
		}
		return firsts
	}
	var qkvz, ba []int
	span := func(list []int, from, n int) []int {
		for i := range n {
			list = append(list, from+i)
		}
		return list
	}
	for k := range 2 {
		qkvz = span(qkvz, 4*k, 4)        // q
		qkvz = span(qkvz, 8+4*k, 4)      // k
		qkvz = span(qkvz, 16+3*5*k, 3*5) // v
		qkvz = span(qkvz, 3*5*k, 3*5)    // z
		ba = span(span(ba, 3*k, 3), 3*k, 3)
	}
	for name, want := range map[string][]int{"in_proj_qkvz": qkvz, "in_proj_ba": ba} {
		if got := rows("model.layers.0.linear_attn." + name + ".weight"); !slices.Equal(got, want) {
			t.Errorf("%s has rows %v, want %v", name, got, want)
		}
	}
}

// B of an adapter has the rows of the files, in which key heads alternate.
func TestAdaptersOfLinearLayers(t *testing.T) {
	c := hybrid(t, "qwen3_next")
	c.Tuning.LoRA = &LoRA{R: 3, Alpha: 3, Targets: Modules{Names: []string{"in_proj_qkvz", "in_proj_ba"}}}
	m := Model{Config: c, DType: "F32", Tensors: c.Adapters(), Read: ordinals}
	dir := filepath.Join(t.TempDir(), "adapter")
	if err := ExportAdapter(dir, m); err != nil {
		t.Fatal(err)
	}
	readsBack(t, c, dir, m)
	f, err := safetensors.Open(filepath.Join(dir, adapterFile))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]float32, 12*3)
	if err := f.ReadFloat32(adapterPrefix+"model.layers.0.linear_attn.in_proj_ba"+suffixB, b, 0); err != nil {
		t.Fatal(err)
	}
	for i, row := range []int{0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11} { // b, a of a head; b before a in the model
		if b[3*i] != float32(3*row) {
			t.Errorf("row %d of B is row %v, want %d", i, b[3*i]/3, row)
		}
	}
}

// Files say which layers are linear, by a list or an interval. A gate of another form is refused.
func TestLinearLayersOfFiles(t *testing.T) {
	const full = `"full_attention","full_attention","full_attention"`
	for text, want := range map[string]string{
		`"layer_types":[` + full + `]`:                                                  "",
		`"full_attention_interval":1`:                                                   "",
		`"full_attention_interval":0`:                                                   "full_attention_interval: 0 is not positive",
		`"use_cache":true`:                                                              "layer_types: all layers are linear_attention",
		`"full_attention_interval":1,"attn_output_gate":false`:                          "attn_output_gate: false",
		`"full_attention_interval":1,"output_gate_type":"sigmoid"`:                      "output_gate_type:",
		`"full_attention_interval":1,"linear_num_key_heads":3`:                          "linear_num_key_heads: 3 does not divide",
		`"full_attention_interval":1,"use_sliding_window":true,"sliding_window":9`:      "sliding_window: 9 is not supported",
		`"layer_types":["full_attention","sliding_attention","full_attention"]`:         `entry 1 is "sliding_attention"`,
		`"full_attention_interval":1,"rope_parameters":{"mrope_section":[1,1,0]}`:       "",
		`"full_attention_interval":1,"rope_scaling":{"type":"mrope","mrope_section":1}`: "rope_scaling.type:",
	} {
		text = `{"model_type":"qwen3_5_text","num_key_value_heads":4,` + shape + `,` + text + `}`
		c, err := readText(t, text)
		if want == "" && (err != nil || c.PartialRotaryFactor != 0.25 || c.HeadDim != 256 ||
			c.Layer(2).Mixer != Mixer{Heads: 4, KVHeads: 4, Dim: 256, DimV: 256, Window: -1, Gated: true}) ||
			want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %+v, %v, want %q", text, c, err, want)
		}
	}
	if _, err := readText(t, `{"model_type":"qwen4_exp"}`); err == nil || !strings.Contains(err.Error(), "sparse indexers") {
		t.Errorf("qwen4_exp: %v", err)
	}
	if _, err := readText(t, `{"model_type":"llama",`+shape+`,"rope_parameters":{"mrope_section":[1,1,0]}}`); err == nil {
		t.Error("a llama has mrope_section")
	}
	c := hybrid(t, "qwen3_5_moe_text")
	if want := (Mixer{Window: -1, Delta: Delta{2, 6, 4, 5, 4}}); c.Layer(0).Mixer != want || c.Layer(0).Rope != (Rope{-1, -1}) {
		t.Errorf("layer 0 is %+v, want %+v", c.Layer(0), want)
	}
	c = &Config{Architecture: "qwen3_next", NumHiddenLayers: 5}
	c.Derive()
	want := fmt.Sprint([]string{LinearAttention, LinearAttention, LinearAttention, FullAttention, LinearAttention})
	if fmt.Sprint(c.LayerTypes) != want || !reflect.DeepEqual(c.delta(), Delta{16, 32, 128, 128, 4}) {
		t.Errorf("layers %v, %+v", c.LayerTypes, c.delta())
	}
}
