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
	// Linears is fp8 if layers multiply matrices in E4M3, else bf16 or empty.
	Linears string
}

// FP8 reports whether layers multiply matrices in E4M3.
func (t *Tuning) FP8() bool { return t.Linears == "fp8" }

// InE4M3 reports whether layers multiply a matrix in E4M3. It then needs no other form.
func (c *Config) InE4M3(t Tensor) bool {
	_, _, adapter := Adapted(t.Name)
	l := c.Tuning.LoRA
	return c.Tuning.FP8() && t.Scaled() && !adapter && !(l != nil && l.Base == "bf16" && c.Frozen(t))
}

// LoRA (arXiv:2106.09685) adds Scale * B A x to the product W x of each targeted matrix, and freezes W. The names of A
// and B, and the meaning of the fields, are those of PEFT.
type LoRA struct {
	R       int
	Alpha   float64
	Dropout float64 // of x
	Targets Modules // zero: all linear layers of the blocks
	Exclude Modules // of Targets
	// TargetParameters name matrices of experts and routers by the last parts of their names in transformers 5, such as
	// mlp.experts.down_proj. Exclude and Layers do not select among them.
	TargetParameters []string
	RSLoRA           bool   // arXiv:2312.03732
	From             string // adapter directory with the first values; "" for new ones
	Base             string // fp8, bf16 or auto: the type of frozen matrices with Tuning.FP8; auto and "": fp8

	RankPattern, AlphaPattern Patterns // in place of R and Alpha

	Layers        []int    // of Targets.Names; none: all
	LayersPattern []string // expressions of the list of layers, such as layers; none: any

	// ModulesToSave end the names of modules that train whole, beside the adapters.
	ModulesToSave []string
	// Unties: the adapter of From has its own copies of the embedding and the head, also for a model that ties them.
	Unties bool
}

// Rank returns the rank of a module's adapter.
func (l *LoRA) Rank(module string) int { return int(l.RankPattern.of(inPEFT(module), float64(l.R))) }

// Scale returns the factor of B A of a matrix in files.
func (l *LoRA) Scale(matrix string) float64 {
	module := strings.TrimSuffix(matrix, ".weight")
	alpha, r := l.AlphaPattern.of(inPEFT(module), l.Alpha), float64(l.Rank(module))
	if l.RSLoRA {
		return alpha / math.Sqrt(r)
	}
	return alpha / r
}

// targets reports whether a module of a layer gets an adapter, unless it is saved.
func (l *LoRA) targets(module string, layer int) bool {
	if !l.Targets.IsZero() && !l.Targets.match(module) || l.Exclude.match(module) {
		return false
	}
	if len(l.Layers) == 0 || slices.Contains(l.Targets.Names, module) {
		return true
	}
	return slices.Contains(l.Layers, layer) && (len(l.LayersPattern) == 0 || slices.ContainsFunc(l.LayersPattern,
		func(p string) bool { return matches(layersOf(p), module) }))
}

// Matrix returns the matrix in files with the rows of t, First, and the rows of the matrix; of experts, a name for all
// of them, and the rows of each.
func (t Tensor) Matrix() (name string, row, rows int) {
	if t.Experts > 0 && t.Kind == Product {
		return t.Name + ".weight", 0, t.Shape[0] / t.Experts
	}
	if t.Experts == 0 && t.Blocks != nil {
		return t.Blocks[0].Name, t.First, t.Blocks[0].Shape[0]
	}
	return t.Name, 0, t.Shape[0]
}

func moduleOf(t Tensor) string {
	name, _, _ := t.Matrix()
	return name[:strings.LastIndexByte(name, '.')]
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

// InAdapter returns a tensor under its name in the file of an adapter.
func InAdapter(t Tensor) Tensor {
	if _, _, adapts := Adapted(t.Name); adapts {
		return t
	}
	t.Name, t.FileRows = adapterPrefix+ofModules.Replace(t.Name), 0
	t.Blocks = slices.Clone(t.Blocks)
	for i := range t.Blocks {
		t.Blocks[i].Name = adapterPrefix + t.Blocks[i].Name
	}
	return t
}

// ofModules replaces names in the files of mixtral by those of transformers 5's modules, which PEFT uses.
var ofModules = strings.NewReplacer(".block_sparse_moe.", ".mlp.")

// inPEFT returns the name that PEFT compares with patterns: of a module, or of a matrix of experts or a router.
func inPEFT(module string) string {
	module = ofModules.Replace(module)
	if strings.HasSuffix(module, ".mlp.gate") || strings.HasSuffix(module, ".mlp.router") {
		return module + ".weight"
	}
	return module
}

// linears reports whether a tensor is a matrix of a layer, to which LoRA applies: not to experts, and to a router only
// if transformers has a linear layer for it.
func linears(t Tensor) bool { return t.Layer >= 0 && t.Kind == Product && !isParameter(t) }

// isParameter reports whether a tensor is a matrix that LoRA.TargetParameters may name.
func isParameter(t Tensor) bool {
	return t.Kind == Product && (t.Experts > 0 || t.Role == Router && !strings.HasSuffix(t.Name, ".proj.weight"))
}

// adapts reports whether a tensor gets an adapter.
func (c *Config) adapts(t Tensor) bool {
	l, module := c.Tuning.LoRA, moduleOf(t)
	switch {
	case c.saved(t):
		return false
	case isParameter(t):
		return slices.ContainsFunc(l.TargetParameters, func(name string) bool { return namesModule(name, inPEFT(module)) })
	}
	return linears(t) && l.targets(module, t.Layer)
}

// Adapters lists the tensors of the adapters: A [r, in] and B [out, r] of each targeted matrix in files, or A [E*r, in]
// and B [E*out, r] of experts, with the role of its first rows and its layer.
func (c *Config) Adapters() (list []Tensor) {
	l := c.Tuning.LoRA
	if l == nil {
		return nil
	}
	var last *Tensor // B of the last matrix
	for _, t := range c.Tensors() {
		if !c.adapts(t) {
			continue
		}
		if t.First == 0 {
			list = append(list, c.adapter(t)...)
			last = &list[len(list)-1]
		}
		for _, at := range t.Blocks { // files may have the rows in another order
			if t.Experts == 0 {
				at.Name, at.Shape, at.Before = last.Name, last.Shape, at.Before/t.cols()*last.cols()
				last.Blocks = append(last.Blocks, at)
			}
		}
	}
	for i := 2; i < len(list); i++ {
		if in := list[i-2]; nested(in, list[i]) {
			for k := range in.Blocks {
				in.Blocks[k].Name = strings.Replace(in.Blocks[k].Name, ".lora_", innerLayer+".lora_", 1)
			}
		}
	}
	return list
}

// adapter returns A and B of a matrix.
func (c *Config) adapter(t Tensor) []Tensor {
	_, _, rows := t.Matrix()
	module, cols := moduleOf(t), t.Shape[1]
	r, experts := c.Tuning.LoRA.Rank(module), max(t.Experts, 1)
	a := Tensor{Name: adapterPrefix + module + suffixA, Shape: []int{experts * r, cols}, Role: t.Role, Layer: t.Layer}
	b := Tensor{Name: adapterPrefix + module + suffixB, Shape: []int{experts * rows, r}, Role: t.Role, Layer: t.Layer}
	if !isParameter(t) {
		return []Tensor{a, b}
	}
	in := adapterPrefix + ofModules.Replace(module)
	if t.Experts > 0 {
		in = in[:strings.LastIndexByte(in, '.')]
	}
	wide := experts * r
	a.Blocks = []Block{{Name: in + suffixA, Shape: a.Shape, Rows: wide}}
	place := Block{Name: in + suffixB, Shape: []int{rows, wide}, Rows: rows}
	if b.Experts = t.Experts; t.Experts > 0 { // the expert changes fastest
		place.Step, place.Across, place.Next = wide, experts, 1
	}
	b.Blocks = []Block{place}
	if t.Role == ExpertIn && c.Family().Experts.InputFirst { // the rows of gate and up alternate
		place.Rows, place.Step = rows/2, 2*wide
		b.Blocks = []Block{place, place}
		b.Blocks[1].Before = wide
	}
	return []Tensor{a, b}
}

// Nested reports whether PEFT's files have the names of the larger model around this one.
func (c *Config) Nested() bool { return c.Wrapper != "" && c.Family().Nested }

// innerLayer names the module inside of PEFT's for a second matrix.
const innerLayer = ".base_layer"

// nested reports whether PEFT wraps one adapter by the other: gate and up by the second matrix of the same experts.
func nested(in, by Tensor) bool {
	return in.Role == ExpertIn && by.Role == ExpertDown && in.Layer == by.Layer
}

// saved reports whether a tensor is of LoRA.ModulesToSave. A tied head is the embedding.
func (c *Config) saved(t Tensor) bool {
	l := c.Tuning.LoRA
	return l != nil && slices.ContainsFunc(l.ModulesToSave, func(name string) bool { return c.ofModule(name, t) })
}

// ofModule reports whether the name of a tensor's module ends in name, at any letter, as in PEFT.
func (c *Config) ofModule(name string, t Tensor) bool {
	head := t.Role == Embedding && c.TieWordEmbeddings && strings.HasSuffix(c.headModule(), name)
	return head || t.Experts == 0 && strings.HasSuffix(ofModules.Replace(moduleOf(t)), name)
}

// savesTied reports whether modules to save are a tied pair of embedding and head.
func (c *Config) savesTied() bool { return c.TieWordEmbeddings && c.saved(c.Tensors()[0]) }

func (c *Config) headModule() string { return strings.TrimSuffix(c.Family().Tensors[Head], ".weight") }

// Kept lists the tensors of the model in an adapter's file: those of modules to save, and a resized embedding and head.
func (c *Config) Kept() (list []Tensor) {
	for _, t := range c.Tensors() {
		if c.Tuning.LoRA != nil && (c.saved(t) || t.FileRows > 0) {
			list = append(list, t)
		}
	}
	return list
}

// Frozen reports whether training leaves a tensor as it is.
func (c *Config) Frozen(t Tensor) bool {
	if t.Kind == Fixed {
		return true
	}
	if _, _, adapter := Adapted(t.Name); c.Tuning.LoRA != nil && !adapter && !c.saved(t) {
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
	if c.Tuning.LoRA != nil {
		c.checkLoRA(add)
		trained = append(c.Adapters(), slices.DeleteFunc(base, func(t Tensor) bool { return !c.saved(t) })...)
	}
	for _, glob := range c.Tuning.Freeze {
		if _, err := path.Match(glob, ""); err != nil {
			add("train.freeze", "%.255q is not a glob: %v", glob, err)
		} else if !slices.ContainsFunc(trained, func(t Tensor) bool { ok, _ := path.Match(glob, t.Name); return ok }) {
			name := slices.Concat(trained, c.Tensors())[1].Name
			add("train.freeze", "%.255q matches no parameter that trains; names are such as %s", glob, name)
		}
	}
	if len(faults) == 0 && !slices.ContainsFunc(trained, func(t Tensor) bool { return !c.Frozen(t) }) {
		add("train.freeze", "it leaves no parameter to train; remove a glob")
	}
	return faults
}

// modules lists the last parts of the names of the linear layers.
func (c *Config) modules() []string {
	var list []string
	for _, t := range c.Tensors() {
		if linears(t) {
			list = append(list, moduleOf(t))
		}
	}
	return lastNames(list)
}
