package hf

import (
	"fmt"
	"math"
	"path"
	"slices"
	"strings"
)

// Tuning selects the parameters that a run trains: those that match no glob of Freeze, or with LoRA the adapters that
// match none.
type Tuning struct {
	Freeze []string // globs over names, such as "model.embed_tokens.*"
	LoRA   *LoRA    // nil: none
}

// LoRA (arXiv:2106.09685) adds Scale * B A x to the product W x of each targeted matrix, and freezes W. The names of A
// and B, and the meaning of the fields, are those of PEFT.
type LoRA struct {
	R       int
	Alpha   float64
	Dropout float64  // of x
	Targets []string // names of modules, or their last parts; empty: all linear layers of the blocks
	RSLoRA  bool     // arXiv:2312.03732
	From    string   // adapter directory with the first values; "" for new ones
}

// Scale returns the factor of B A.
func (l *LoRA) Scale() float64 {
	if l.RSLoRA {
		return l.Alpha / math.Sqrt(float64(l.R))
	}
	return l.Alpha / float64(l.R)
}

// targets reports whether a target names the module.
func (l *LoRA) targets(module string) bool {
	return len(l.Targets) == 0 || slices.ContainsFunc(l.Targets, func(t string) bool { return namesModule(t, module) })
}

// namesModule reports whether a target of PEFT names a module: by its full name, or by its last parts.
func namesModule(target, module string) bool {
	return target == module || strings.HasSuffix(module, "."+target)
}

// Matrix returns the matrix in files with the rows of t, its first row there, and the rows of the matrix.
func (t Tensor) Matrix() (name string, row, rows int) {
	if t.Whole != "" {
		return t.Whole, t.Row, t.Rows
	}
	return t.Name, 0, t.Shape[0]
}

func moduleOf(t Tensor) string {
	name, _, _ := t.Matrix()
	return strings.TrimSuffix(name, ".weight")
}

// These are the parts of an adapter's names, as in PEFT's files.
const (
	adapterPrefix = "base_model.model."
	suffixA       = ".lora_A.weight"
	suffixB       = ".lora_B.weight"
)

// Adapted returns the name of the matrix that an adapter's tensor belongs to; b reports that it is B, not A. Of another
// tensor, ok is false.
func Adapted(name string) (matrix string, b, ok bool) {
	rest, ok := strings.CutPrefix(name, adapterPrefix)
	if module, isA := strings.CutSuffix(rest, suffixA); ok && isA {
		return module + ".weight", false, true
	}
	module, isB := strings.CutSuffix(rest, suffixB)
	return module + ".weight", true, ok && isB
}

// linears reports whether a tensor is a matrix of a layer, to which LoRA applies.
func linears(t Tensor) bool { return t.Layer >= 0 && len(t.Shape) == 2 }

// Adapters lists the tensors of the adapters: A [r, in] and B [out, r] of each targeted matrix in files, with the role
// of its first rows and its layer.
func (c *Config) Adapters() (list []Tensor) {
	l := c.Tuning.LoRA
	if l == nil {
		return nil
	}
	for _, t := range c.Tensors() {
		_, row, rows := t.Matrix()
		if row > 0 || !linears(t) || !l.targets(moduleOf(t)) {
			continue
		}
		name := adapterPrefix + moduleOf(t)
		list = append(list, Tensor{Name: name + suffixA, Shape: []int{l.R, t.Shape[1]}, Role: t.Role, Layer: t.Layer},
			Tensor{Name: name + suffixB, Shape: []int{rows, l.R}, Role: t.Role, Layer: t.Layer})
	}
	return list
}

// Frozen reports whether training leaves a tensor as it is.
func (c *Config) Frozen(t Tensor) bool {
	if _, _, adapter := Adapted(t.Name); c.Tuning.LoRA != nil && !adapter {
		return true
	}
	return slices.ContainsFunc(c.Tuning.Freeze, func(glob string) bool {
		ok, _ := path.Match(glob, t.Name) // CheckTuning has checked the glob
		return ok
	})
}

// CheckTuning returns the faults of Tuning, with keys of train.yaml.
func (c *Config) CheckTuning() (faults []Fault) {
	add := func(key, format string, args ...any) {
		faults = append(faults, Fault{key, fmt.Sprintf(format, args...)})
	}
	base := c.Tensors()
	trained := base
	if l := c.Tuning.LoRA; l != nil {
		trained = c.Adapters()
		for _, target := range l.Targets {
			if !slices.ContainsFunc(base, func(t Tensor) bool { return linears(t) && namesModule(target, moduleOf(t)) }) {
				add("lora.targets", "%.255q names no linear layer of the blocks; %s has %s", target, c.Architecture,
					wordList(c.modules()...))
			}
		}
	}
	for _, glob := range c.Tuning.Freeze {
		if _, err := path.Match(glob, ""); err != nil {
			add("train.freeze", "%.255q is not a glob: %v", glob, err)
		} else if !slices.ContainsFunc(trained, func(t Tensor) bool { ok, _ := path.Match(glob, t.Name); return ok }) {
			name := slices.Concat(trained, base)[1].Name
			add("train.freeze", "%.255q matches no parameter that trains; names are such as %s", glob, name)
		}
	}
	if len(faults) == 0 && !slices.ContainsFunc(trained, func(t Tensor) bool { return !c.Frozen(t) }) {
		add("train.freeze", "it leaves no parameter to train; remove a glob")
	}
	return faults
}

// modules lists the last parts of the names of the linear layers.
func (c *Config) modules() (list []string) {
	for _, t := range c.Tensors() {
		module := moduleOf(t)
		if name := module[strings.LastIndexByte(module, '.')+1:]; linears(t) && !slices.Contains(list, name) {
			list = append(list, name)
		}
	}
	return list
}
