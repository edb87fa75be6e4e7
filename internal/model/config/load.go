package config

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/text/data"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// Options are the additions of a command line to the file.
type Options struct {
	Set    []string // key.path=value; a later one replaces earlier ones and the file
	Ranks  int      // number of ranks, for Resolve; 0: unknown, and autos stay
	Hosts  int      // hosts with equal numbers of ranks; 0: one
	Device string   // "cpu" or "cuda"; "" is cpu if Ranks is given, else unknown

	// Decide may replace autos by costs before the rules do, if the config has no fault and Ranks is given. nil: rules
	// only.
	Decide func(c *Config, ranks, hosts int) error

	// NoFiles allows missing data and tokenizers. It also allows a missing model.from if all model keys are given, as in
	// the config.yaml of a run. It is for plans and exports on another machine.
	NoFiles bool

	// Known forbids to encode data for the token cache; Note is called when that begins, unless nil.
	Known bool
	Note  func(text string)

	// kept: cprun has written the config, so it may have keys without effect.
	kept bool
}

// Load reads a train.yaml, applies flags, fills defaults and checks every rule. With Options.Ranks it also resolves the
// config. The error is Errors: every fault, sorted by line.
//
// Relative paths in the file are relative to its directory if they exist there, else to the working directory; for
// flags in the other order. In the result they are absolute. The path "" is a file without keys.
func Load(path string, opts Options) (*Config, error) {
	if path == "" {
		return load("defaults", []byte("{}"), opts, osDisk)
	}
	text, err := files.Read(path, MaxFile)
	if errors.Is(err, files.ErrTooLong) {
		err = fmt.Errorf("it is longer than %d bytes, the limit for a config", MaxFile)
	}
	if err != nil {
		return nil, Errors{{File: path, Msg: fmt.Sprintf("the config cannot be read: %v", err)}}
	}
	return load(path, text, opts, osDisk)
}

// Parse loads a text instead of a file, such as the resolved config of another process. Errors have the name; relative
// paths start at its directory.
func Parse(name string, text []byte, opts Options) (*Config, error) {
	opts.kept = true
	return load(name, text, opts, osDisk)
}

type loader struct {
	*source
	paths
	cfg  *Config
	opts Options

	fromRead bool // config.json of model.from has set the model keys
}

func load(name string, text []byte, opts Options, disk disk) (*Config, error) {
	f := newFaults(&positions{file: name, keys: map[string]position{}})
	src := newSource(f)
	src.readFile(name, text)
	if len(f.list) > 0 && len(f.where.keys) == 0 {
		return nil, f.err() // nothing could be read; faults about missing keys would not help
	}
	base := src.values["model.from"]
	for _, arg := range opts.Set {
		src.readFlag(arg)
	}
	src.skipMeant()
	src.chooseOne("train.steps", "train.epochs")
	src.chooseOne("train.samples", "train.epochs")
	src.choose("train.steps", "train.samples", true)
	src.chooseOne("lr_schedule.warmup_steps", "lr_schedule.warmup_ratio")
	l := &loader{source: src, paths: newPaths(name, disk), cfg: &Config{where: f.where}, opts: opts}
	l.cfg.Data.known, l.cfg.Data.note = opts.Known, opts.Note
	if base != nil && !IsNull(base) {
		l.was = filepath.Clean(base.Value)
	}
	l.decodeFrom()
	l.decodeRope()
	for i := range keys {
		if section, _ := split(keys[i].path); !isOptional(section) && keys[i].path != "model.from" {
			l.decodeKey(&keys[i])
		}
	}
	l.decodeLoRA()
	l.derive()
	l.renameTargets()
	l.resolvePaths()
	l.findKinds()
	l.resolveTokenizer()
	l.resolveTemplate()
	l.modelEOS()
	rules(l.cfg, f)
	open := l.cfg.Parallel.Algorithm == "auto"
	if !open && !opts.kept && f.ok("parallel.algorithm") {
		l.cfg.reportUnused(l.cfg.Parallel, f, f)
	}
	l.checkData()
	idle := newFaults(f.where)
	if opts.Ranks > 0 {
		given := l.cfg.Parallel
		if opts.Decide != nil && f.err() == nil {
			if err := opts.Decide(l.cfg, opts.Ranks, opts.Hosts); err != nil {
				return nil, err
			}
		}
		l.cfg.idle(opts.Ranks, opts.Device, idle)
		l.cfg.resolve(opts.Ranks, opts.Hosts, opts.Device, f)
		if open {
			l.cfg.reportUnused(given, f, idle)
		}
	} else if opts.Device == "cpu" {
		cpuRules(l.cfg, f)
	}
	if err := f.err(); err != nil {
		return nil, err
	}
	l.cfg.Warnings = slices.Concat(warnings(l.cfg), idle.list, l.deprecations.list)
	return l.cfg, nil
}

// decodeKey decodes a key's value, or its default, into the config.
func (l *loader) decodeKey(k *key) {
	n := l.values[k.path]
	if n == nil {
		isModel := strings.HasPrefix(k.path, "model.")
		switch {
		case isModel && (l.fromRead || !l.ok("model.from")):
			return // set by config.json
		case !l.ok(k.path):
			return // given under another name
		case k.def == "" && isModel && !k.json.Needed(l.cfg.Model.Architecture):
			return // Derive sets it
		case k.def == "" && isModel:
			l.add(k.path, "missing; write it, or set model.from")
			return
		case k.def == "":
			if !l.opts.NoFiles {
				l.add(k.path, "missing; %s", dataWanted)
			}
			return
		}
	}
	l.decodeValue(k, n)
}

// decodeValue decodes a value into the config; nil is the key's default.
func (l *loader) decodeValue(k *key, n *yaml.Node) {
	var err error
	if n == nil {
		if n, err = parseValue(k.def); err != nil {
			panic("config: default of " + k.path + ": " + err.Error())
		}
	}
	if !l.ok(k.path) {
		return
	}
	if err := k.decode(n, l.cfg); err != nil {
		l.add(k.path, "%v", err)
	}
}

// decodeFrom fills the model from a Hugging Face directory. Later keys override it.
func (l *loader) decodeFrom() {
	k := keyAt["model.from"]
	if l.decodeKey(k); l.cfg.Model.From == "" || !l.ok(k.path) {
		return
	}
	given := l.cfg.Model.From
	dir, tried, missing := l.findModel(given, l.where.of(k.path).line == 0, l.disk.isDir)
	l.cfg.Model.From, l.now = dir, dir
	if tried != "" && l.opts.NoFiles && l.modelGiven() {
		return
	}
	if missing != nil {
		l.add(k.path, "%s: %v", clipped(given), missing)
		return
	}
	if tried != "" {
		l.add(k.path, "no directory %s; name a Hugging Face directory, or the Hub id of a model in the local cache, or "+
			"remove the key for random weights", tried)
		return
	}
	shape, err := l.disk.readConfig(dir)
	if faulty := (*hf.ConfigError)(nil); errors.As(err, &faulty) {
		for _, fault := range faulty.Faults {
			l.add(k.path, "%s: %s", faulty.Path, strings.TrimPrefix(fault.Key+": "+fault.Msg, ": "))
		}
		return
	} else if err != nil {
		l.add(k.path, "%v", err)
		return
	}
	l.fromRead, l.cfg.Model.Config = true, *shape
	l.cfg.Model.FileVocab = shape.VocabSize
	if len(shape.LayerTypes) == 0 {
		l.cfg.Model.LayerTypes = nil
	}
	if r := shape.RopeScaling; r != nil {
		own := *r
		l.cfg.Model.RopeScaling = &own
	}
}

// modelGiven reports whether the file has every key that a model without model.from needs.
func (l *loader) modelGiven() bool {
	return !slices.ContainsFunc(keys, func(k key) bool {
		section, _ := split(k.path)
		return section == "model" && k.def == "" && l.values[k.path] == nil
	})
}

// decodeRope replaces rope_scaling if its type was given, which selects the allowed keys. Without a type, keys change
// those of model.from.
func (l *loader) decodeRope() {
	if l.values[ropeSection] != nil { // null
		l.cfg.Model.RopeScaling = nil
		return
	}
	inside := func(path string) bool { return strings.HasPrefix(path, ropeSection+".") }
	if !slices.ContainsFunc(slices.Collect(maps.Keys(l.values)), inside) {
		if l.where.given(ropeSection) && l.ok(ropeSection) && !l.where.given("model.rope_theta") {
			l.add(ropeSection, "it is empty; want rope_type and its keys, or null")
		}
		return
	}
	typeKey := keyAt[ropeSection+".rope_type"]
	typed := l.values[typeKey.path] != nil
	if !typed && !l.ok("model.from") {
		return // the type is that of a missing model
	}
	whole := typed || l.cfg.Model.RopeScaling == nil
	if whole {
		l.cfg.Model.RopeScaling = &hf.RopeScaling{}
	}
	r := l.cfg.Model.RopeScaling
	if typed {
		l.decodeKey(typeKey)
	} else if whole {
		l.add(typeKey.path, "missing; write one of %s", strings.Join(typeKey.allowed(), ", "))
	}
	typeKnown := l.ok(typeKey.path)
	for i := range keys {
		k := &keys[i]
		_, name := split(k.path)
		switch n := l.values[k.path]; {
		case k == typeKey || !inside(k.path) || n == nil && !whole:
		case n != nil && typeKnown && !k.json.OfRope(r.Type):
			l.add(k.path, "rope_type %s has no %s; remove it", r.Type, name)
		case n == nil && k.json.NeededBy(r.Type):
			l.add(k.path, "missing; rope_type %s needs it", r.Type)
		case n != nil || k.def != "" && k.json.OfRope(r.Type):
			l.decodeValue(k, n)
		}
	}
	if r.Type == "default" {
		l.cfg.Model.RopeScaling = nil
	}
}

// derive fills absent keys that follow from others.
func (l *loader) derive() {
	l.resize()
	l.cfg.Model.Derive()
	if s := &l.cfg.LRSchedule; s.MinLR < 0 && l.ok("optimizer.lr", "lr_schedule.min_lr") {
		s.MinLR = tenth(l.cfg.Optimizer.LR)
	}
	switch t := &l.cfg.Train; {
	case t.Epochs > 0:
		t.Steps = 0
	case t.Samples > 0 && (t.Steps == 0 || !l.cfg.Given("train.steps")):
		if l.ok("train.samples", "train.global_batch_size") {
			l.cfg.counted = true
			l.cfg.countSteps(0, 0, l.faults)
		}
	case t.Steps == 0 && l.ok("train.steps", "train.epochs"):
		t.Steps = 100
	}
	if s := &l.cfg.LRSchedule; s.WarmupRatio > 0 {
		s.WarmupSteps = -1
	} else if l.ok("lr_schedule.warmup_steps", "lr_schedule.warmup_ratio") {
		s.WarmupSteps = max(0, s.WarmupSteps)
	}
	if d := &l.cfg.Data; d.Seed < 0 && l.ok("train.seed", "data.seed") {
		d.Seed = l.cfg.Train.Seed
		delete(l.where.keys, "data.seed") // an explicit null counts as not given
	}
}

// blankConfig returns a config in which every field of the table exists.
func blankConfig() *Config {
	c := &Config{}
	c.Model.RopeScaling, c.Model.Tuning.LoRA = &hf.RopeScaling{}, &hf.LoRA{}
	return c
}

// Completions returns the keys of train.yaml with a prefix, each followed by "=", for --set.
func Completions(prefix string) (found []string) {
	for i := range keys {
		if strings.HasPrefix(keys[i].path, prefix) {
			found = append(found, keys[i].path+"=")
		}
	}
	return found
}

// RunShape is the input of DefaultStrategy.
type RunShape struct {
	Device         string // cuda, or anything else for the CPU
	Documents      bool   // sequences are packed documents
	Ranks, PerHost int    // sharing a sequence; on one host
	Heads, KVHeads int
}

// DefaultStrategy returns the strategy with its open fields set by fixed rules, for machines without known costs. The
// backend and Gather stay open.
func DefaultStrategy(s ring.Strategy, by RunShape) ring.Strategy {
	layout, algorithm := partition.LayoutName("zigzag"), "ring"
	if by.Documents {
		layout = "document"
	}
	auto(&s.Layout, layout)
	if s.Layout == "document" && by.Device != "cuda" {
		algorithm = "allgather" // a ring sends several times as much: docs/concepts/documents.md; not measured on GPUs
	}
	auto(&s.Algorithm, algorithm)
	if s.Algorithm == "hierarchical" && s.Inner == 0 && by.Ranks > 0 {
		s.Inner = partition.Inner(by.Ranks, by.PerHost, by.Heads, by.KVHeads)
	}
	return s
}

func auto[S ~string](field *S, choice S) {
	if *field == "auto" || *field == "" {
		*field = choice
	}
}

// Bytes names the tokenizer that takes each byte of text as a token.
const Bytes = "bytes"

const (
	tokenizerFile = "tokenizer.json"
	tokenizerKey  = "data.tokenizer"
	eosKey        = "data.eos_token_id"
	templateKey   = "data.chat_template"
)

// resolveTokenizer sets data.tokenizer to "bytes" or the path of a tokenizer.json. It stays empty if the model has
// none: only text needs one.
func (l *loader) resolveTokenizer() {
	t := &l.cfg.Data.Tokenizer
	if !l.ok(tokenizerKey) || *t == Bytes {
		return
	}
	if *t == "" {
		if !l.ok("model.from") {
			return
		}
		if l.cfg.Model.From == "" {
			*t = Bytes
		} else if path := filepath.Join(l.cfg.Model.From, tokenizerFile); l.disk.isFile(path) {
			*t = path
		}
		return
	}
	given := *t
	abs, tried, missing := l.findModel(given, l.where.of(tokenizerKey).line == 0, func(path string) bool {
		return l.disk.isFile(path) || l.disk.isFile(filepath.Join(path, tokenizerFile))
	})
	if *t = abs; !l.disk.isFile(abs) && tried == "" {
		*t = filepath.Join(abs, tokenizerFile)
	}
	switch {
	case tried == "" || l.opts.NoFiles:
	case missing != nil:
		l.add(tokenizerKey, "%s: %v", clipped(given), missing)
	case Nearest(given, []string{Bytes, "auto"}) != "":
		l.add(tokenizerKey, "%s is not a choice; did you mean %s?", quoted(given),
			Nearest(given, []string{Bytes, "auto"}))
	default:
		l.add(tokenizerKey, "no tokenizer %s; name a tokenizer.json or its directory, or write bytes", tried)
	}
}

// resolveTemplate makes the path of data.chat_template absolute.
func (l *loader) resolveTemplate() {
	t := &l.cfg.Data.ChatTemplate
	if *t == "" || !l.ok(templateKey) {
		return
	}
	abs, tried := l.find(*t, l.where.of(templateKey).line == 0, l.disk.isFile)
	if *t = abs; tried != "" && !l.opts.NoFiles {
		l.add(templateKey, "no file %s; name a Jinja file, or write null for the tokenizer's own template", tried)
	}
}

// modelEOS replaces a null data.eos_token_id by the tokenizer's or the model's own. With the tokenizer bytes it ignores
// ids below 256.
func (l *loader) modelEOS() {
	d := &l.cfg.Data
	if d.EOSTokenID >= 0 || !l.fromRead || !l.ok(eosKey, tokenizerKey, "model.from", "model.vocab_size") {
		return
	}
	tokens := d.Tokenizer
	if tokens == Bytes {
		tokens = ""
	}
	e, err := l.disk.eos(tokens, l.cfg.Model.From)
	needed := func(f File) bool { return f.Kind == data.FormatText || f.Kind == data.FormatCompletion }
	switch size := l.cfg.Model.VocabSize; {
	case err != nil:
		l.add(eosKey, "null means the model's own token, which cannot be read: %v; write its number", err)
	case e.ID < size && (d.Tokenizer != Bytes || e.ID > 255):
		d.EOSTokenID = e.ID
		if note := e.Note(); note != "" {
			l.deprecations.add(eosKey, "is null: %s; write a number to choose", note)
		}
	case e.Text != "" && slices.ContainsFunc(slices.Concat(d.Path, d.Validation.Path), needed):
		l.add(eosKey, "null means the tokenizer's eos_token %.40q, which has the id %d, and vocab_size is %d; write the "+
			"number of another token, or change eos_token in tokenizer_config.json", e.Text, e.ID, size)
	}
}
