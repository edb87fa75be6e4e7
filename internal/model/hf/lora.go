package hf

import (
	"math"
	"regexp"
	"slices"
	"strings"
)

// maxRank bounds the ranks of adapters.
const maxRank = 1 << 16

const parametersKey = "lora.target_parameters"

// A loraCheck finds names and expressions of LoRA that match nothing, or modules that get no adapter.
type loraCheck struct {
	c      *Config
	add    func(key, format string, args ...any)
	faulty bool

	all, linear, adapted []string // modules
	named                []string // matrices that target_parameters can name
	parameters           bool     // some of these have adapters
}

func (c *Config) checkLoRA(add func(key, format string, args ...any)) {
	l := c.Tuning.LoRA
	k := loraCheck{c: c, add: add}
	for _, t := range c.Tensors() {
		module := moduleOf(t)
		if c.adapts(t) {
			k.adapted = append(k.adapted, inPEFT(module))
			k.parameters = k.parameters || isParameter(t)
		}
		switch k.all = append(k.all, module); {
		case linears(t):
			k.linear = append(k.linear, module)
		case isParameter(t):
			k.named = append(k.named, inPEFT(module))
		}
	}
	for _, name := range l.TargetParameters {
		if len(k.named) == 0 {
			k.fault(parametersKey, "%.255q: %s has no experts, to which the key applies; remove it", name, c.Architecture)
			break
		}
		if !slices.ContainsFunc(k.named, func(of string) bool { return namesModule(name, of) }) {
			k.fault(parametersKey, "%.255q names no matrix of experts or router; %s has %s", name, c.Architecture,
				wordList(lastNames(k.named)...))
		}
	}
	if k.parameters && l.Dropout > 0 {
		k.fault("lora.dropout", "%v, and PEFT has no dropout of adapters in experts and routers, here %s; write 0, or leave "+
			"these out of targets and target_parameters", l.Dropout, wordList(l.TargetParameters...))
	}
	k.modules("lora.targets", l.Targets, k.linear, "linear layer of the blocks")
	k.modules("lora.exclude_modules", l.Exclude, k.all, "module")
	k.others()
	k.layers()
	k.saved()
	switch {
	case k.faulty:
	case len(k.adapted) == 0:
		k.add("lora.targets", "no module gets an adapter; name more, or fewer in exclude_modules, layers_to_transform and "+
			"modules_to_save")
	default:
		k.patterns("lora.rank_pattern", l.RankPattern, "an integer from 1 to 65536", func(v float64) bool {
			return v == math.Trunc(v) && v >= 1 && v <= maxRank
		})
		k.patterns("lora.alpha_pattern", l.AlphaPattern, "a number above 0", func(v float64) bool {
			return v > 0 && !math.IsInf(v, 0)
		})
	}
}

func (k *loraCheck) fault(key, format string, args ...any) {
	k.faulty = true
	k.add(key, format, args...)
}

// some demands that a pattern, for which the user wrote text, is of some of the modules.
func (k *loraCheck) some(key, text, pattern string, of []string, what string) {
	if _, err := expression(pattern); err != nil {
		k.fault(key, "%.255q: %v", text, err)
	} else if !slices.ContainsFunc(of, func(module string) bool { return matches(pattern, module) }) {
		k.fault(key, "%.255q names no %s; %s has %s", text, what, k.c.Architecture, wordList(lastNames(of)...))
	}
}

func (k *loraCheck) modules(key string, m Modules, of []string, what string) {
	for _, name := range m.Names {
		k.some(key, name, lastParts(regexp.QuoteMeta(name)), of, what)
	}
	if m.Regexp != "" {
		k.some(key, m.Regexp, m.Regexp, of, what+" (names stand in brackets, as in [q_proj])")
	}
}

// others refuses an expression of targets that matches other modules than linear layers of the blocks, as PEFT does.
func (k *loraCheck) others() {
	r := k.c.Tuning.LoRA.Targets.Regexp
	if r == "" {
		return
	}
	for _, module := range append(k.all, k.c.headModule()) {
		for i := range len(module) + 1 {
			part := module[:i]
			if (i == len(module) || module[i] == '.') && matches(r, part) && !slices.Contains(k.linear, part) {
				k.fault("lora.targets", "%.255q matches also %s, which is no linear layer of the blocks; narrow it", r, part)
				return
			}
		}
	}
}

func (k *loraCheck) layers() {
	const key = "lora.layers_to_transform"
	l, n := k.c.Tuning.LoRA, k.c.NumHiddenLayers
	for _, p := range l.LayersPattern {
		k.some("lora.layers_pattern", p, layersOf(p), k.linear, "list of layers")
	}
	if i := slices.IndexFunc(l.Layers, func(i int) bool { return i < 0 || i >= n }); i >= 0 {
		k.fault(key, "%d is no layer; the model has layers 0 to %d", l.Layers[i], n-1)
	}
	if len(l.Layers) > 0 && l.Targets.Regexp != "" {
		k.fault(key, "it needs a list of names in targets; select the layers in the regular expression")
	}
	if len(l.Layers) == 0 && len(l.LayersPattern) > 0 {
		k.fault("lora.layers_pattern", "it has no effect without layers_to_transform; remove it")
	}
}

func (k *loraCheck) saved() {
	const key = "lora.modules_to_save"
	c := k.c
	for _, name := range c.Tuning.LoRA.ModulesToSave {
		if name == "" || !slices.ContainsFunc(c.Tensors(), func(t Tensor) bool { return c.ofModule(name, t) }) {
			k.fault(key, "%.255q ends the name of no module with weights; %s has %s", name, c.Architecture,
				wordList(lastNames(append(k.all, c.headModule()))...))
		}
	}
	if c.Tuning.LoRA.Unties && c.savesTied() {
		k.fault(key, "the adapter has no ensure_weight_tying, so it replaces only one of the embedding and the head, or "+
			"each by its own, and the model ties them; train it with ensure_weight_tying=True, or merge it in peft")
	}
}

func (k *loraCheck) patterns(key string, list Patterns, want string, valid func(float64) bool) {
	for _, p := range list {
		if k.some(key, p.Key, lastParts(p.Key), k.adapted, "module with an adapter"); !valid(p.Value) {
			k.fault(key, "%g for %.255q; write %s", p.Value, p.Key, want)
		}
	}
}

// lastNames lists the last parts of names, each once; of a name of weights, the last two.
func lastNames(modules []string) (list []string) {
	for _, m := range modules {
		if name := m[strings.LastIndexByte(strings.TrimSuffix(m, ".weight"), '.')+1:]; !slices.Contains(list, name) {
			list = append(list, name)
		}
	}
	return list
}
