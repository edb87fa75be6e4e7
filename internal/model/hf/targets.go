package hf

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// renames reports whether PEFT takes names of linear layers in transformers 4 for experts and routers.
func (c *Config) renames() bool {
	f := families[c.Architecture]
	return f != nil && f.Experts != nil && f.Experts.Linear
}

// RenameTargets changes the targets of LoRA as PEFT 0.21 does where transformers 5 has parameters in place of linear
// layers: names such as gate_proj, up_proj and down_proj, and all linear layers, are those of experts. An MLP of the
// same name gets no adapter. Gate and up, now one matrix, have twice the rank. The faults are by keys of train.yaml.
func (c *Config) RenameTargets() []Fault {
	l := c.Tuning.LoRA
	if l == nil || !c.renames() {
		return nil
	}
	var old []string
	for _, name := range c.Family().Experts.Each { // gate, up and down
		parts := strings.Split(name, ".")
		old = append(old, parts[len(parts)-2])
	}
	isOld := func(name string) int {
		return slices.IndexFunc(append(old, "gate"), func(o string) bool { return namesModule(o, name) })
	}
	if l.Targets.Regexp != "" {
		for _, t := range c.Tensors() {
			if m := moduleOf(t); linears(t) && l.Targets.match(m) && isOld(m) >= 0 {
				return []Fault{{"lora.targets", fmt.Sprintf("%.255q matches %s, and PEFT takes %s as experts; write a list of "+
					"names, or narrow it", l.Targets.Regexp, m, old[isOld(m)])}}
			}
		}
		return nil
	}
	if l.Targets.IsZero() {
		l.Targets.Names = append(c.modules(), append(old, "gate")...)
	}
	names := []string{}
	var found [4]bool
	for _, name := range l.Targets.Names {
		if i := isOld(name); i >= 0 {
			found[i] = true
		} else {
			names = append(names, name)
		}
	}
	if found[0] != found[1] {
		return []Fault{{"lora.targets", fmt.Sprintf("%s and %s are one matrix of experts; name both", old[0], old[1])}}
	}
	l.Targets.Names = names
	for i, name := range []string{"gate_up_proj", "", "down_proj", "gate.weight"} {
		if found[i] && name != "" {
			l.TargetParameters = append(l.TargetParameters, name)
		}
	}
	slices.Sort(l.TargetParameters)
	l.TargetParameters = slices.Compact(l.TargetParameters)
	if found[0] {
		key := `.*\.` + regexp.QuoteMeta("gate_up_proj")
		l.RankPattern = l.RankPattern.with(key, float64(2*l.R))
		l.AlphaPattern = l.AlphaPattern.with(key, 2*l.Alpha)
	}
	return nil
}

// with returns the patterns with the value of a key changed, or added at the end.
func (p Patterns) with(key string, value float64) Patterns {
	p = slices.Clone(p)
	if i := slices.IndexFunc(p, func(e Pattern) bool { return e.Key == key }); i >= 0 {
		p[i].Value = value
		return p
	}
	return append(p, Pattern{key, value})
}

// adapted lists the modules with adapters.
func (c *Config) adapted() (list []string) {
	for _, t := range c.Tensors() {
		if linears(t) && c.adapts(t) {
			list = append(list, moduleOf(t))
		}
	}
	return list
}
