package hf

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/safetensors"
)

// mixed returns the config of a fixture with experts.
func mixed(t *testing.T, family string, l LoRA) *Config {
	t.Helper()
	c, err := ReadConfig("../testdata/families/" + family)
	if err != nil {
		t.Fatal(err)
	}
	c.Tuning.LoRA = &l
	return c
}

// Names of linear layers in transformers 4 become names of parameters. PEFT 0.21.2 gave the wanted ones
// with transformers 5.24.
func TestRenamedTargets(t *testing.T) {
	attention := "[k_proj o_proj q_proj v_proj]"
	for _, row := range []struct {
		family  string
		targets Modules
		modules string
		names   string
		doubled bool
		fault   string
	}{
		{"qwen3_moe", Modules{}, attention, "[down_proj gate.weight gate_up_proj]", true, ""},
		{"mixtral", Modules{}, attention, "[down_proj gate.weight gate_up_proj]", true, ""},
		{"glm4_moe", Modules{}, attention, "[down_proj gate.weight gate_up_proj]", true, ""},
		{"qwen3_next", Modules{}, "[k_proj o_proj q_proj shared_expert_gate v_proj]", "[down_proj gate.weight gate_up_proj]",
			true, ""},
		{"qwen3_moe", Modules{Names: []string{"q_proj"}}, "[q_proj]", "[]", false, ""},
		{"qwen3_moe", Modules{Names: []string{}}, "[]", "[]", false, ""},
		{"glm4_moe", Modules{Names: []string{"mlp.gate_proj", "up_proj"}}, "[]", "[gate_up_proj]", true, ""},
		{"mixtral", Modules{Names: []string{"q_proj", "w2"}}, "[q_proj]", "[down_proj]", false, ""},
		{"mixtral", Modules{Names: []string{"gate"}}, "[]", "[gate.weight]", false, ""},
		{"mixtral", Modules{Names: []string{"w1", "q_proj"}}, "", "", false, "w1 and w3 are one matrix"},
		{"glm4_moe", Modules{Regexp: `.*\.up_proj`}, "", "", false, "PEFT takes up_proj as experts"},
		{"glm4_moe", Modules{Regexp: `.*\.q_proj`}, "[]", "[]", false, ""},
	} {
		c := mixed(t, row.family, LoRA{R: 4, Alpha: 6, Targets: row.targets, RankPattern: Patterns{{"q_proj", 3}}})
		l, faults := c.Tuning.LoRA, c.RenameTargets()
		if row.fault != "" || len(faults) > 0 {
			if len(faults) != 1 || row.fault == "" || !strings.Contains(faults[0].Msg, row.fault) {
				t.Errorf("%+v: %v", row, faults)
			}
			continue
		}
		for range 2 { // the second time changes nothing
			slices.Sort(l.Targets.Names)
			experts := "model.layers.1.mlp.experts.gate_up_proj"
			double := l.Rank(experts) == 8 && l.AlphaPattern.of(experts, l.Alpha) == 12 && len(l.RankPattern) == 2
			if fmt.Sprint(l.Targets.Names) != row.modules || fmt.Sprint(l.TargetParameters) != row.names ||
				double != row.doubled || l.Scale(experts) != 1.5 {
				t.Errorf("%s %+v: %+v", row.family, row.targets, l)
			}
			faults := c.RenameTargets()
			if strings.Contains(row.modules, "q_proj") { // which the pattern names
				faults = append(faults, c.CheckTuning()...)
			}
			if len(faults) > 0 {
				t.Errorf("%s %+v: %v", row.family, row.targets, faults)
			}
		}
	}
}

// Adapters of experts are in PEFT's order in files, under names that follow from its wrapping; a file may have wrapped
// them in the other order.
func TestAdaptersOfExperts(t *testing.T) {
	const scale = 3.0
	for _, name := range Families() {
		mixture := families[name].Experts
		if mixture == nil {
			continue
		}
		for _, only := range []string{"", "gate_up_proj", "down_proj"} {
			l := LoRA{R: 2, Alpha: 4, Unties: true, Targets: Modules{Names: []string{}},
				TargetParameters: []string{"experts.down_proj", "experts.gate_up_proj"},
				RankPattern:      Patterns{{"experts.down_proj", scale}}}
			if only != "" {
				l.TargetParameters = []string{only}
			}
			if only == "gate_up_proj" {
				l.RankPattern = nil
			}
			c := mixed(t, name, l)
			if faults := c.CheckTuning(); len(faults) > 0 {
				t.Fatal(faults)
			}
			// each element tells its place in the model
			m := Model{Config: c, DType: "F32", Tensors: c.Adapters(),
				Read: func(t Tensor, off int64, dst []float32) error {
					for i := range dst {
						dst[i] = float32(off) + float32(i)
					}
					return nil
				}}
			l.From = filepath.Join(t.TempDir(), "adapter")
			if err := ExportAdapter(l.From, m); err != nil {
				t.Fatal(err)
			}
			if got, err := ReadAdapter(l.From); err != nil || fmt.Sprintf("%+v", *got) != fmt.Sprintf("%+v", l) {
				t.Errorf("%s: read %+v, %v, want %+v", name, got, err, l)
			}
			entries := checkExpertFile(t, c, filepath.Join(l.From, adapterFile))
			readsBack(t, c, l.From, m)
			if only != "" || c.HiddenSize == 2*c.Layer(1).MLP.Experts.Width {
				continue
			}
			for i := range entries { // wrapped in the other order
				if e := &entries[i]; strings.Contains(e.Name, innerLayer) {
					e.Name = strings.Replace(e.Name, innerLayer, "", 1)
				} else {
					e.Name = strings.Replace(e.Name, ".lora_", innerLayer+".lora_", 1)
				}
			}
			dir := t.TempDir()
			if err := safetensors.WriteFile(filepath.Join(dir, adapterFile), nil, entries); err != nil {
				t.Fatal(err)
			}
			readsBack(t, c, dir, m)
		}
	}
}

// checkExpertFile compares the tensors of a file with the places of their elements by PEFT's formulas: A is [E, r, in],
// B [out, r, E]. It returns them.
func checkExpertFile(t *testing.T, c *Config, path string) (entries []safetensors.Entry) {
	f, err := safetensors.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	e := c.Layer(1).MLP.Experts
	for _, name := range f.Names() {
		i, _ := f.Info(name)
		got := make([]float32, i.Elements())
		if err := f.ReadFloat32(name, got, 0); err != nil {
			t.Fatal(err)
		}
		entries = append(entries, safetensors.Floats(name, "F32", i.Shape, got))
		if !strings.HasPrefix(name, "base_model.model.model.layers.") || !strings.Contains(name, ".experts.") {
			t.Errorf("%s has adapter %s", c.Architecture, name)
		}
		if strings.HasSuffix(name, suffixA) {
			for at, x := range got {
				if x != float32(at) {
					t.Fatalf("%s: element %d is %v", name, at, x)
				}
			}
			continue
		}
		out, r := i.Shape[0], i.Shape[1]/e.Count
		isIn := strings.Contains(name, innerLayer) || fmt.Sprint(c.Tuning.LoRA.TargetParameters) == "[gate_up_proj]"
		for o := range out {
			row := o // of the model
			if isIn && c.Family().Experts.InputFirst {
				row = o/2 + o%2*e.Width
			}
			for k := range r {
				for expert := range e.Count {
					if got, want := got[(o*r+k)*e.Count+expert], float32((expert*out+row)*r+k); got != want {
						t.Fatalf("%s %v: row %d, rank %d, expert %d is %v, want %v", name, i.Shape, o, k, expert, got, want)
					}
				}
			}
		}
	}
	return entries
}

// readsBack compares the tensors of a directory with a model, in pieces.
func readsBack(t *testing.T, c *Config, dir string, m Model) {
	t.Helper()
	w, err := OpenAdapter(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := w.CheckAdapter(c); err != nil {
		t.Fatal(err)
	}
	for _, a := range m.Tensors {
		for lo := 0; lo < a.Size(); lo += 77 {
			part := make([]float32, min(77, a.Size()-lo))
			if err := w.Read(a, part, int64(lo)); err != nil {
				t.Fatal(err)
			}
			for i, x := range part {
				if x != float32(lo+i) {
					t.Fatalf("%s: element %d is %v", a.Name, lo+i, x)
				}
			}
		}
	}
}

// Matrices of different layers are not nested.
func TestAdaptersOfLayersAreNotNested(t *testing.T) {
	c := mixed(t, "mixtral", LoRA{R: 2, Alpha: 4, Targets: Modules{Names: []string{}},
		TargetParameters: []string{"layers.0.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"}})
	var names []string
	for _, a := range c.Adapters() {
		names = append(names, strings.TrimPrefix(a.Blocks[0].Name, "base_model.model.model.layers."))
	}
	if want := []string{"0.mlp.experts.lora_A.weight", "0.mlp.experts.lora_B.weight", "1.mlp.experts.lora_A.weight",
		"1.mlp.experts.lora_B.weight"}; !slices.Equal(names, want) {
		t.Errorf("names %v, want %v", names, want)
	}
}

// Parameters that do not exist, dropout of experts, and experts as modules to save are refused.
func TestTargetsOfExpertsAreChecked(t *testing.T) {
	experts := []string{"experts.down_proj"}
	for _, row := range []struct {
		l         LoRA
		key, want string
	}{
		{LoRA{TargetParameters: []string{"gate_proj"}}, parametersKey, "qwen3_moe has gate.weight, gate_up_proj and down_proj"},
		{LoRA{TargetParameters: []string{"down_pro."}}, parametersKey, "names no matrix"},
		{LoRA{TargetParameters: experts, Dropout: 0.1}, "lora.dropout", "write 0"},
		{LoRA{Dropout: 0.1}, "", ""},
		{LoRA{TargetParameters: experts, ModulesToSave: []string{"experts"}}, "lora.modules_to_save", "no module"},
		{LoRA{TargetParameters: experts, ModulesToSave: []string{"gate_up_proj"}}, "lora.modules_to_save", "no module"},
		{LoRA{TargetParameters: experts, AlphaPattern: Patterns{{"gate", 2}}}, "lora.alpha_pattern", "no module"},
		{LoRA{TargetParameters: experts, Targets: Modules{Names: []string{}}}, "", ""},
		{LoRA{Targets: Modules{Names: []string{}}}, "lora.targets", "no module gets an adapter"},
	} {
		row.l.R, row.l.Alpha = 2, 4
		faults := mixed(t, "qwen3_moe", row.l).CheckTuning()
		if (row.key == "") != (len(faults) == 0) || row.key != "" && (faults[0].Key != row.key ||
			!strings.Contains(faults[0].Msg, row.want)) {
			t.Errorf("%+v: %v", row.l, faults)
		}
	}
	c := tuned(LoRA{TargetParameters: experts}, nil)
	if faults := c.CheckTuning(); len(faults) != 1 || !strings.Contains(faults[0].Msg, "llama has no experts") {
		t.Errorf("llama: %v", faults)
	}
}

// PEFT would take only the last parts of matched names, so an export names the modules.
func TestExportsNameMatchedModules(t *testing.T) {
	c := mixed(t, "qwen3_moe", LoRA{R: 2, Alpha: 4, Targets: Modules{Regexp: `model\.layers\.1\..*[qk]_proj`}})
	dir := filepath.Join(t.TempDir(), "adapter")
	err := ExportAdapter(dir, Model{Config: c, DType: "F32", Tensors: c.Adapters(), Read: fill})
	if err != nil {
		t.Fatal(err)
	}
	l, err := ReadAdapter(dir)
	if want := []string{"model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.q_proj"}; err != nil ||
		!slices.Equal(l.Targets.Names, want) {
		t.Errorf("targets %v, %v, want %v", l, err, want)
	}
}
