package config

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/cprun/cprun/internal/model/hf"
)

// decodeLoRA sets the adapters of a given section.
func (l *loader) decodeLoRA() {
	given := l.where.given(loraSection)
	for path := range l.values {
		given = given || strings.HasPrefix(path, loraSection+".")
	}
	if l.values[loraSection] != nil || !given { // null, or nothing
		return
	}
	a := &hf.LoRA{}
	l.cfg.Model.Tuning.LoRA = a
	if n := l.values["lora.targets"]; n != nil && n.Value == "all-linear" {
		n.Value = "auto"
	} else if n != nil && n.Kind == yaml.SequenceNode && len(n.Content) == 0 {
		l.add("lora.targets", "the list is empty; name modules, or write auto")
	}
	for i := range keys {
		if section, _ := split(keys[i].path); section == loraSection {
			l.decodeKey(&keys[i])
		}
	}
	if a.From != "" && l.ok("lora.from") {
		l.decodeAdapter(a)
	}
	if a.Alpha == 0 {
		a.Alpha = 2 * float64(a.R)
	}
}

// decodeAdapter reads the adapters of a directory. Another value in the config is a fault.
func (l *loader) decodeAdapter(a *hf.LoRA) {
	dir, tried := l.find(a.From, l.where.of("lora.from").line == 0, l.disk.isDir)
	if a.From = dir; tried != "" {
		if !l.opts.NoFiles {
			l.add("lora.from", "no directory %s; name a directory with adapter_config.json and adapter_model.safetensors",
				tried)
		}
		return
	}
	if l.opts.NoFiles && l.values["lora.r"] != nil && l.values["lora.alpha"] != nil {
		return // the config of a run
	}
	have, err := l.disk.readAdapter(dir)
	if faulty := (*hf.ConfigError)(nil); errors.As(err, &faulty) {
		for _, fault := range faulty.Faults {
			l.add("lora.from", "%s: %s: %s", faulty.Path, fault.Key, fault.Msg)
		}
		return
	} else if err != nil {
		l.add("lora.from", "%v", err)
		return
	}
	slices.Sort(a.Targets)
	for _, c := range []struct {
		key       string
		set       bool
		own, have any
	}{
		{"lora.r", true, a.R, have.R}, {"lora.alpha", a.Alpha > 0, a.Alpha, have.Alpha},
		{"lora.rslora", true, a.RSLoRA, have.RSLoRA},
		{"lora.targets", len(a.Targets) > 0, fmt.Sprint(a.Targets), fmt.Sprint(have.Targets)},
	} {
		if c.set && l.values[c.key] != nil && c.own != c.have {
			l.add(c.key, "%v conflicts with %v of the adapter in lora.from; remove it", c.own, c.have)
		}
	}
	a.R, a.Alpha, a.RSLoRA, a.Targets = have.R, have.Alpha, have.RSLoRA, have.Targets
}
