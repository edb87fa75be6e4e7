package config

import (
	"errors"
	"fmt"
	"reflect"
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
	} else if n != nil && n.Kind == yaml.SequenceNode && len(n.Content) == 0 && !l.where.given("lora.target_parameters") {
		l.add("lora.targets", "the list is empty; name modules, or write auto")
	}
	for _, path := range []string{"lora.layers_to_transform", "lora.layers_pattern"} { // PEFT takes one by itself
		if n := l.values[path]; n != nil && n.Kind == yaml.ScalarNode && !IsNull(n) {
			l.values[path] = &yaml.Node{Kind: yaml.SequenceNode, Content: []*yaml.Node{n}, Line: n.Line}
		}
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

// renameTargets changes the targets as PEFT does.
func (l *loader) renameTargets() {
	if l.within("model", loraSection) || len(l.cfg.Model.Check()) > 0 {
		return
	}
	for _, fault := range l.cfg.Model.RenameTargets() {
		l.add(fault.Key, "%s", fault.Msg)
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
	for _, names := range [][]string{a.Targets.Names, a.Exclude.Names, a.ModulesToSave, a.TargetParameters} {
		slices.Sort(names)
	}
	other := blankConfig()
	have.Dropout, have.From, have.Base = a.Dropout, a.From, a.Base
	other.Model.Tuning.LoRA = have
	for i := range keys {
		k := &keys[i]
		if section, _ := split(k.path); section != loraSection || l.values[k.path] == nil || k.isUnset(k.at(l.cfg)) {
			continue
		}
		if own, its := k.value(l.cfg), k.value(other); !reflect.DeepEqual(own, its) {
			if its == nil {
				its = "null"
			}
			l.add(k.path, "%v conflicts with %v of the adapter in lora.from; remove it", own, its)
		}
	}
	*a = *have
}

// resize applies model.resize_embeddings. FileVocab is the rows of model.from, if known.
func (l *loader) resize() {
	const key = "model.resize_embeddings"
	m := &l.cfg.Model
	n, old := m.ResizeEmbeddings, m.FileVocab
	m.FileVocab = 0
	switch {
	case n == 0 || !l.ok(key, "model.from", "model.vocab_size"):
	case m.From == "":
		l.add(key, "it is for the embedding of model.from; without it, write vocab_size")
	case n < old:
		l.add(key, "%d is below the %d rows of the model, and tokens would be lost; write at least %d", n, old, old)
	case m.VocabSize != old && m.VocabSize != n:
		l.add(key, "%d conflicts with vocab_size %d; remove vocab_size", n, m.VocabSize)
	case n > old && old > 0:
		m.FileVocab = old
		fallthrough
	default:
		m.VocabSize = n
	}
}

// modules reads names of modules, or a regular expression of them.
func (k *key) modules(n *yaml.Node) (m hf.Modules, err error) {
	if n.ShortTag() == "!!str" {
		if m.Regexp, err = k.text(n); m.Regexp == "" && err == nil {
			err = fmt.Errorf("it is empty; want %s", k.wanted())
		}
		return m, err
	}
	m.Names, err = listOf((*key).text)(k, n)
	if m.Names == nil && err == nil {
		m.Names = []string{}
	}
	return m, err
}

func modulesValue(m hf.Modules) any {
	if m.Regexp != "" {
		return m.Regexp
	}
	return listValue(identity[string])(m.Names)
}

// patterns reads a mapping from expressions of modules to numbers.
func (k *key) patterns(n *yaml.Node) (p hf.Patterns, err error) {
	if n.Kind != yaml.MappingNode {
		return nil, k.mistyped(n)
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		e := hf.Pattern{}
		if e.Key, err = k.text(n.Content[i]); err == nil {
			e.Value, err = k.number(n.Content[i+1])
		}
		if err != nil {
			return nil, fmt.Errorf("entry %d: %w", i/2+1, err)
		}
		if slices.ContainsFunc(p, func(o hf.Pattern) bool { return o.Key == e.Key }) {
			return nil, fmt.Errorf("%s is given twice; remove one", quoted(e.Key))
		}
		p = append(p, e)
	}
	return p, nil
}

func init() {
	addKind("text or a list of names", (*key).modules, nil, modulesValue)
	addKind("a mapping of names to numbers", (*key).patterns, nil, func(p hf.Patterns) any { return p })
}
