package hf

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/internal/base/terminal"
)

// These are the files of an adapter directory of PEFT.
const (
	adapterConfig = "adapter_config.json"
	adapterFile   = "adapter_model.safetensors"
)

// maxAdapterConfig and maxAdapterValues bound adapter_config.json. A list of target modules may name every matrix.
const (
	maxAdapterConfig = 4 << 20
	maxAdapterValues = 1 << 16
)

// adapterNotes are keys of adapter_config.json that change no result.
var adapterNotes = []string{"auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_config",
	"megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"}

// ReadAdapter reads adapter_config.json of a directory. It refuses by name every key with a value that cprun does not
// implement.
func ReadAdapter(path string) (*LoRA, error) {
	d, err := files.OpenRepo(path)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	raw, err := d.ReadJSON(adapterConfig, maxAdapterConfig, maxAdapterValues)
	if err != nil {
		return nil, err
	}
	var found faults
	o := object{faults: &found}
	if err := json.Unmarshal(raw, &o.keys); err != nil {
		return nil, fmt.Errorf("%s: %s", filepath.Join(d.Path, adapterConfig), terminal.Clip(err.Error(), 200))
	}
	l := &LoRA{From: path, R: o.integer("r", 0), RSLoRA: o.boolean("use_rslora", false)}
	o.get("lora_alpha", "a number", &l.Alpha)
	o.get("lora_dropout", "a number", &l.Dropout)
	o.targets(l)
	o.get("rank_pattern", "an object of integers", &l.RankPattern)
	o.get("alpha_pattern", "an object of numbers", &l.AlphaPattern)
	o.get("modules_to_save", "a list of names", &l.ModulesToSave)
	slices.Sort(l.ModulesToSave)
	l.ModulesToSave, l.Unties = slices.Compact(l.ModulesToSave), !o.boolean("ensure_weight_tying", false)
	o.refuseAdapter()
	if l.R < 1 || !(l.Alpha > 0) {
		found.add("r", "r %d and lora_alpha %g must be above 0", l.R, l.Alpha)
	}
	if !(l.Dropout >= 0 && l.Dropout < 1) {
		found.add("lora_dropout", "%g is not in [0, 1)", l.Dropout)
	}
	if len(found) > 0 {
		return nil, &ConfigError{filepath.Join(d.Path, adapterConfig), found}
	}
	return l, nil
}

// targets reads the keys that select the modules with adapters.
func (o object) targets(l *LoRA) {
	const modules = "a list of names, or a regular expression"
	o.get("exclude_modules", modules, &l.Exclude)
	o.get("layers_pattern", "a list of names", (*oneOrMore[string])(&l.LayersPattern))
	o.get("layers_to_transform", "a list of layers", (*oneOrMore[int])(&l.Layers))
	o.get("target_parameters", "a list of names", &l.TargetParameters)
	slices.Sort(l.TargetParameters)
	l.TargetParameters = slices.Compact(l.TargetParameters)
	o.get("target_modules", modules, &l.Targets)
	for _, m := range []*Modules{&l.Targets, &l.Exclude} { // of a larger model, only modules of its language model count
		for i, name := range m.Names {
			m.Names[i] = strings.Replace(name, nestedPrefix, basePrefix, 1)
		}
		m.Regexp = strings.Replace(m.Regexp, `language_model\.`, "", 1)
	}
	switch none := l.Targets.Regexp == "" && len(l.Targets.Names) == 0; {
	case none && len(l.TargetParameters) > 0:
		l.Targets.Names = []string{}
	case none:
		o.fault("target_modules", "it names no module")
	}
	if l.Targets.Regexp == "all-linear" {
		l.Targets = Modules{}
	}
}

// A oneOrMore is a list whose only element a file may have by itself.
type oneOrMore[T any] []T

// UnmarshalJSON implements json.Unmarshaler.
func (l *oneOrMore[T]) UnmarshalJSON(raw []byte) error {
	if len(raw) > 0 && raw[0] != '[' {
		raw = slices.Concat([]byte("["), raw, []byte("]"))
	}
	return json.Unmarshal(raw, (*[]T)(l))
}

// refuseAdapter adds a fault for each key with an unsupported value.
func (o object) refuseAdapter() {
	known := append([]string{"r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "exclude_modules",
		"target_parameters", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "modules_to_save",
		"ensure_weight_tying"}, adapterNotes...)
	plain := map[string][]string{"peft_type": {`"LORA"`}, "bias": {`"none"`},
		"init_lora_weights": {"true", `"gaussian"`}} // others change the base
	for _, key := range slices.Sorted(maps.Keys(o.keys)) {
		value := strings.Join(strings.Fields(string(o.keys[key])), "")
		empty := slices.Contains([]string{"null", "false", "{}", "[]", `""`, "0"}, value)
		if !empty && !slices.Contains(known, key) && !slices.Contains(plain[key], value) {
			o.fault(key, "%s is not supported; cprun trains plain LoRA without biases",
				terminal.Clip(value, 60))
		}
	}
	if string(o.keys["peft_type"]) == "" {
		o.fault("peft_type", "missing; want LORA")
	}
}

// OpenAdapter opens the weights of an adapter directory. The caller closes it.
func OpenAdapter(path string) (*Weights, error) {
	w, err := openWeights(path, adapterFile)
	if err != nil {
		return nil, err
	}
	// PEFT repeats modules to save under other names if the embedding was resized.
	w.names = slices.DeleteFunc(w.names, func(name string) bool {
		for _, again := range []string{".modules_to_save.weight", ".original_module.weight"} {
			if module, ok := strings.CutSuffix(name, again); ok && w.where[module+".weight"] != nil {
				return true
			}
		}
		return false
	})
	return w, nil
}

// Has reports whether the files have a tensor.
func (w *Weights) Has(t Tensor) bool {
	if t.Blocks != nil {
		t.Name = t.Blocks[0].Name
	}
	return w.where[t.Name] != nil
}

// CheckAdapter compares the weights of an adapter with a model, as Check does. A resized embedding may be absent.
func (w *Weights) CheckAdapter(c *Config) error {
	want := c.Adapters()
	for _, t := range c.Tensors() {
		in := InAdapter(t)
		if t.Layer < 0 && w.Has(in) { // PEFT saves a resized embedding in any case
			i, _ := w.where[in.Name].Info(in.Name)
			if len(i.Shape) == 2 && i.Shape[0] > t.Shape[0] {
				return fmt.Errorf("%s has %d rows in %q, and the model %d; set model.resize_embeddings: %d", w.path,
					i.Shape[0], in.Name, t.Shape[0], i.Shape[0])
			}
		}
		if c.saved(t) || t.FileRows > 0 && w.Has(in) {
			want = append(want, in)
			if c.TieWordEmbeddings && t.Role == Embedding { // its copy may be there as the head
				w.embedding, w.head = in.Name, adapterPrefix+llamaNames[Head]
			}
		}
	}
	w.unnest(want)
	return w.Check(want)
}

// unnest finds adapters of experts under each other's names: the shapes tell in which order PEFT has wrapped them.
func (w *Weights) unnest(adapters []Tensor) {
	shape := func(name string) (list []int) {
		if f := w.where[name]; f != nil {
			i, _ := f.Info(name)
			list = i.Shape
		}
		return list
	}
	for i := 3; i < len(adapters); i++ {
		if !nested(adapters[i-2], adapters[i]) || adapters[i].Experts == 0 { // the latter are B
			continue
		}
		in, down := adapters[i-2].Blocks[0], adapters[i].Blocks[0]
		if have := shape(in.Name); slices.Equal(have, in.Shape) || !slices.Equal(have, down.Shape) ||
			!slices.Equal(shape(down.Name), in.Shape) {
			continue
		}
		for k := i - 1; k <= i; k++ {
			a, b := adapters[k-2].Blocks[0].Name, adapters[k].Blocks[0].Name
			w.inner[a], w.inner[b] = b, a
		}
	}
}

// ExportAdapter writes an adapter directory that PEFT loads. The directory appears complete or not at all. It refuses a
// directory with files in it.
func ExportAdapter(path string, m Model) error {
	l, tied := m.Config.Tuning.LoRA, m.Config.savesTied()
	saved := l.ModulesToSave
	if tied { // the head for PEFT without ensure_weight_tying
		saved = append(slices.Clip(saved), moduleOf(m.Config.Tensors()[0]), m.Config.headModule())
		slices.Sort(saved)
		saved = slices.Compact(saved)
	}
	targets := l.Targets
	if targets.IsZero() {
		targets.Names = m.Config.modules()
	} else if targets.Regexp != "" && m.Config.renames() { // PEFT would take its last parts alone
		targets = Modules{Names: m.Config.adapted()}
	}
	nested := m.Config.Nested()
	if nested { // modules of images have the same last parts
		targets = Modules{Names: m.Config.adapted()}
		for i, name := range targets.Names {
			targets.Names[i] = strings.Replace(name, basePrefix, nestedPrefix, 1)
		}
	}
	config := map[string]any{
		"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": HubName(m.From), "inference_mode": true,
		"r": l.R, "lora_alpha": number(l.Alpha), "lora_dropout": number(l.Dropout), "target_modules": targets,
		"target_parameters": l.TargetParameters,
		"exclude_modules":   l.Exclude, "layers_to_transform": l.Layers, "layers_pattern": l.LayersPattern,
		"use_rslora": l.RSLoRA, "use_dora": false, "bias": "none", "fan_in_fan_out": false, "init_lora_weights": true,
		"modules_to_save": saved, "ensure_weight_tying": tied, "rank_pattern": l.RankPattern,
		"alpha_pattern": l.AlphaPattern,
	}
	return writeExport(path, func(dir *os.Root) error {
		var entries []safetensors.Entry
		for _, f := range m.inFiles() {
			own := f.Tensor
			if f.Tensor = InAdapter(own); own.Role == Embedding && m.Config.TieWordEmbeddings {
				head := f
				head.Name = adapterPrefix + m.Config.Family().Tensors[Head]
				entries = append(entries, m.entry(head))
			}
			if nested {
				f.Name = strings.Replace(f.Name, adapterPrefix+basePrefix, adapterPrefix+nestedPrefix, 1)
			}
			entries = append(entries, m.entry(f))
		}
		if err := safetensors.WriteIn(dir, adapterFile, map[string]string{"format": "pt"}, entries); err != nil {
			return err
		}
		return errors.Join(writeJSON(dir, adapterConfig, config), m.writeBeside(dir))
	})
}

// writeBeside writes the tokenizer beside an adapter, and config.json if the run changed the model's.
func (m Model) writeBeside(dir *os.Root) error {
	if m.Changed {
		if err := WriteConfig(dir, m.Config.unresized(), cmp.Or(ElementType(m.Config.DType), m.DType)); err != nil {
			return err
		}
	}
	return m.copyCompanions(dir)
}

// HubName returns the name on the hub of a model in the download cache of huggingface_hub, and other paths unchanged.
func HubName(path string) string {
	snapshots := filepath.Dir(path)
	name, ok := strings.CutPrefix(filepath.Base(filepath.Dir(snapshots)), "models--")
	if !ok || filepath.Base(snapshots) != "snapshots" {
		return path
	}
	return strings.ReplaceAll(name, "--", "/")
}
