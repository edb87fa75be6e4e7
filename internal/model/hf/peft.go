package hf

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

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
	d, err := openDir(path)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	raw, err := d.readJSON(adapterConfig, maxAdapterConfig, maxAdapterValues)
	if err != nil {
		return nil, err
	}
	var found faults
	o := object{faults: &found}
	if err := json.Unmarshal(raw, &o.keys); err != nil {
		return nil, fmt.Errorf("%s: %s", filepath.Join(d.path, adapterConfig), terminal.Clip(err.Error(), 200))
	}
	l := &LoRA{From: path, R: o.integer("r", 0), RSLoRA: o.boolean("use_rslora", false)}
	o.get("lora_alpha", "a number", &l.Alpha)
	o.get("lora_dropout", "a number", &l.Dropout)
	l.Targets = o.targets()
	o.refuseAdapter()
	if l.R < 1 || !(l.Alpha > 0) {
		found.add("r", "r %d and lora_alpha %g must be above 0", l.R, l.Alpha)
	}
	if !(l.Dropout >= 0 && l.Dropout < 1) {
		found.add("lora_dropout", "%g is not in [0, 1)", l.Dropout)
	}
	if len(found) > 0 {
		return nil, &ConfigError{filepath.Join(d.path, adapterConfig), found}
	}
	return l, nil
}

// targets returns target_modules; nil for all linear layers.
func (o object) targets() (list []string) {
	if raw := o.keys["target_modules"]; len(raw) > 0 && raw[0] == '"' {
		text := ""
		if o.get("target_modules", "a list", &text); text != "all-linear" {
			o.fault("target_modules", "the regular expression %.255q is not supported; write a list of names", text)
		}
		return nil
	}
	o.get("target_modules", "a list of names", &list)
	if len(list) == 0 {
		o.fault("target_modules", "it names no module")
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// refuseAdapter adds a fault for each key with an unsupported value.
func (o object) refuseAdapter() {
	known := append([]string{"r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules"}, adapterNotes...)
	plain := map[string][]string{"peft_type": {`"LORA"`}, "bias": {`"none"`},
		"init_lora_weights": {"true", `"gaussian"`}} // others change the base
	for _, key := range slices.Sorted(maps.Keys(o.keys)) {
		value := strings.Join(strings.Fields(string(o.keys[key])), "")
		empty := slices.Contains([]string{"null", "false", "{}", "[]", `""`, "0"}, value)
		if !empty && !slices.Contains(known, key) && !slices.Contains(plain[key], value) {
			o.fault(key, "%s is not supported; cprun trains plain LoRA with one rank and without biases",
				terminal.Clip(value, 60))
		}
	}
	if string(o.keys["peft_type"]) == "" {
		o.fault("peft_type", "missing; want LORA")
	}
}

// OpenAdapter opens the weights of an adapter directory. The caller closes it.
func OpenAdapter(path string) (*Weights, error) { return openWeights(path, adapterFile) }

// ExportAdapter writes an adapter directory that PEFT loads. The directory appears complete or not at all. It refuses a
// directory with files in it.
func ExportAdapter(path string, m Model) error {
	l := m.Config.Tuning.LoRA
	targets := l.Targets
	if len(targets) == 0 {
		targets = m.Config.modules()
	}
	config := map[string]any{
		"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": m.From, "inference_mode": true,
		"r": l.R, "lora_alpha": number(l.Alpha), "lora_dropout": number(l.Dropout), "target_modules": targets,
		"use_rslora": l.RSLoRA, "use_dora": false, "bias": "none", "fan_in_fan_out": false, "init_lora_weights": true,
		"modules_to_save": nil, "rank_pattern": map[string]any{}, "alpha_pattern": map[string]any{},
	}
	return writeExport(path, func(dir *os.Root) error {
		var entries []safetensors.Entry
		for _, t := range m.Tensors {
			entries = append(entries, m.entry(filed{t, []Tensor{t}}))
		}
		if err := safetensors.WriteIn(dir, adapterFile, map[string]string{"format": "pt"}, entries); err != nil {
			return err
		}
		return writeJSON(dir, adapterConfig, config)
	})
}
