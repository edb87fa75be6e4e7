package hf

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/kernels"
)

// These bounds of config.json (some kilobytes) and of the index of weights (a few megabytes) are their bytes and
// values.
const (
	maxConfig       = 4 << 20
	maxConfigValues = 1 << 18
	maxIndex        = 64 << 20
	maxIndexValues  = 3 * safetensors.MaxTensors
)

// ReadConfig reads config.json of a model directory. If it is wrong or unsupported, the error is a *ConfigError with
// every fault.
func ReadConfig(dir string) (*Config, error) {
	d, err := files.OpenRepo(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	if d.Exists(adapterConfig) && !d.Exists(singleFile) && !d.Exists(indexFile) {
		return nil, fmt.Errorf(
			"model directory %s: it holds a LoRA adapter (adapter_config.json), not a model: name its "+
				"base model, or merge the two "+
				"in peft (merge_and_unload) and save_pretrained", d.Path)
	}
	raw, err := d.ReadJSON("config.json", maxConfig, maxConfigValues)
	if err != nil && isGGUF(dir) {
		return nil, fmt.Errorf("%s: %w", terminal.Name(dir), errGGUF)
	}
	if err != nil {
		return nil, err
	}
	c, faults := parseConfig(raw)
	if len(faults) > 0 {
		return nil, &ConfigError{terminal.Name(filepath.Join(dir, "config.json")), faults}
	}
	c.readLayout(dir)
	return c, nil
}

func parseConfig(raw []byte) (*Config, []Fault) {
	var faults faults
	o := object{faults: &faults}
	if err := json.Unmarshal(raw, &o.keys); err != nil {
		return nil, []Fault{{"", fmt.Sprintf("not a JSON object: %v", err)}}
	}
	o, wrapper := unwrapped(o)
	f := families[architecture(o)]
	if f == nil {
		return nil, faults // every other rule depends on it
	}
	c := f.Defaults
	c.Architecture, c.Wrapper = f.Name, wrapper
	refuse(f, o)
	readKeys(&c, o)
	readNoRope(&c, o)
	readHybrid(&c, o)
	rope := readRope(&c, o)
	c.Derive()
	readWindow(&c, o)
	readGlobal(&c, o)
	for _, key := range []string{"bos_token_id", "eos_token_id", padKey} {
		raw, ok := o.keys[key]
		if !ok && key == padKey && f.Pad > 0 && f.Pad <= c.VocabSize {
			raw, ok = strconv.AppendInt(nil, int64(f.Pad)-1, 10), true
		}
		if ok {
			if c.TokenIDs == nil {
				c.TokenIDs = map[string]json.RawMessage{}
			}
			c.TokenIDs[key] = raw
		}
	}
	for _, key := range unusedKeys {
		if raw, ok := o.keys[key]; ok && f.Experts != nil {
			c.keep(key, raw)
		}
	}
	for _, key := range []string{"dtype", "torch_dtype"} { // in transformers 5 and 4
		var name string
		if raw, ok := o.keys[key]; ok && c.DType == "" && json.Unmarshal(raw, &name) == nil {
			c.DType = strings.TrimPrefix(name, "torch.")
		}
	}
	for _, f := range c.Check() {
		if key, ok := strings.CutPrefix(f.Key, ropePrefix); ok {
			f.Key = rope + key // the form of this file
		}
		for i := range ConfigKeys {
			if k := &ConfigKeys[i]; k.also != nil && k.Name == f.Key {
				f.Key = k.nameIn(o)
			}
		}
		faults.add(f.Key, "%s", f.Msg)
	}
	if len(faults) > 0 {
		return nil, faults
	}
	return &c, nil
}

// keep adds to Unused.
func (c *Config) keep(key string, raw json.RawMessage) {
	if c.Unused == nil {
		c.Unused = map[string]json.RawMessage{}
	}
	var b bytes.Buffer
	_ = json.Compact(&b, raw) // it was parsed
	c.Unused[key] = b.Bytes()
}

// unwrapped returns the description of the language model in a larger one, such as of text and images. The keys outside
// have priority, as in transformers.
func unwrapped(o object) (_ object, wrapper string) {
	for _, name := range Families() {
		f := families[name]
		if kind := ""; f.Wrapper == "" || json.Unmarshal(o.keys["model_type"], &kind) != nil || kind != f.Wrapper {
			continue
		}
		text := o.object("text_config")
		if text.keys == nil {
			text.keys = map[string]json.RawMessage{}
		}
		// Several models may be in a mistral3; transformers takes mistral if the file names none.
		if kind := text.text("model_type", "mistral"); f.Wrapper == "mistral3" && kind != name {
			continue
		}
		text.keys["model_type"], _ = json.Marshal(name)
		for _, key := range outerKeys {
			if raw, ok := o.keys[key]; ok {
				text.keys[key] = raw
			}
		}
		return text, f.Wrapper
	}
	return o, ""
}

// lacking has what cprun lacks for the families that people bring.
var lacking = map[string]string{
	"deepseek_v3": "latent attention and experts", "glm4_moe_lite": "latent attention and experts",
	"glm4":       "the rotation of adjacent pairs",
	"granitemoe": "its experts", "minimax_m2": "its experts",
	"llama4_text":      "chunked attention and experts",
	"granitemoehybrid": "Mamba2 layers", "nemotron_h": "Mamba2 layers",
	"kimi_linear": "delta-rule layers with a decay for each channel",
	"qwen4_exp":   "sparse indexers and hyper-connections", "qwen4_exp_text": "sparse indexers and hyper-connections",
}

// architecture returns the family of a file. If unknown, it adds a fault and returns "".
func architecture(o object) string {
	kind := o.text("model_type", "")
	var names []string
	o.get("architectures", "a list of strings", &names)
	if len(*o.faults) > 0 {
		return ""
	}
	if kind == "" {
		for _, name := range Families() {
			if slices.Contains(names, families[name].Class) {
				kind = name
			}
		}
	}
	f, known := families[kind], wordList(Families()...)
	switch {
	case kind == "" && len(names) == 0:
		o.fault("model_type", "missing; cprun trains %s", known)
	case kind == "":
		var classes []string
		for _, name := range Families() {
			classes = append(classes, families[name].Class)
		}
		o.fault("architectures", "%.64q is not supported; cprun trains %s", few(names), wordList(classes...))
	case f == nil && lacking[kind] != "":
		o.fault("model_type", "%q is not supported: cprun lacks %s; it trains %s", kind, lacking[kind], known)
	case f == nil:
		o.fault("model_type", "%.64q is not supported; cprun trains %s", kind, known)
	case len(names) > 0 && !slices.Contains(names, f.Class):
		o.fault("architectures", "%.64q is not supported; cprun trains the language model, %s", few(names), f.Class)
	default:
		return kind
	}
	return ""
}

func few[T any](list []T) []T { return list[:min(len(list), 8)] }

// refuse reports keys of unsupported computations.
func refuse(f *Family, o object) {
	for _, key := range []string{"lm_head_bias", "attention_out_bias"} {
		if o.boolean(key, false) {
			o.fault(key, "true is not supported: cprun has no such bias")
		}
	}
	key, want := f.activation()
	if act := kernels.Activation(o.text(key, string(want))); act != want {
		o.fault(key, "%.64q is not supported; cprun has %s in %s", act, want, f.Name)
	}
	const both = "use_bidirectional_attention"
	if raw := string(o.keys[both]); o.has(both) && raw != "false" && raw != `"vision"` { // text is causal beside images
		o.fault(both, "%s is not supported; cprun has causal attention", clip(o.keys[both]))
	}
	for _, key := range []string{"attention_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout",
		"router_jitter_noise"} {
		if p := o.number(key, 0); p != 0 {
			o.fault(key, "%v is not supported; set it to 0", p)
		}
	}
	for i, key := range []string{limitKey, alphaKey} {
		want := []float64{gateLimit, gateAlpha}[i]
		if v := o.number(key, want); f.Activation == kernels.ClampedSiLU && v != want {
			o.fault(key, "%v is not supported; cprun has %v", v, want)
		}
	}
	mxfp4 := f.Experts != nil && f.Experts.InputFirst
	if o.has("quantization_config") && !(mxfp4 && o.object("quantization_config").text("quant_method", "") == "mxfp4") {
		o.fault("quantization_config", "quantised weights are not read; convert them to bfloat16 first")
	}
}

// readKeys reads the keys of the table. Those of rope_scaling depend on its type.
func readKeys(c *Config, o object) {
	if o.has("sliding_window") && o.integer("sliding_window", 0) == 0 {
		o.fault("sliding_window", "0 hides every token from itself; null is no window")
	}
	if c.Family().Biased { // it ignores the key, as in transformers
		delete(o.keys, "attention_bias")
	}
	for i := range ConfigKeys {
		k := &ConfigKeys[i]
		if k.Ropes != "" {
			continue
		}
		field := k.Field(c)
		// transformers has defaults for all keys, of one model of 2023. A file without these is more likely a mistake,
		// unless published models omit them.
		if k.Default == "" && !o.has(k.Name) && isZero(field) {
			o.fault(k.Name, "missing")
		}
		o.read(k, field)
	}
}

// readNoRope finds the layers that do not rotate.
func readNoRope(c *Config, o object) {
	missing := c.Family().NoRope
	if n := o.integer("no_rope_layer_interval", missing); c.NoRopeLayers == nil && n > 0 {
		c.NoRopeLayers = NoRopeLayers(min(c.NumHiddenLayers, maxLayers), n)
	} else if c.NoRopeLayers == nil && missing > 0 {
		o.fault("no_rope_layer_interval", "0 is not positive")
	}
	if n := c.NumHiddenLayers; len(c.NoRopeLayers) > n { // transformers ignores the others
		c.NoRopeLayers = c.NoRopeLayers[:n]
	}
	if missing == 0 && !slices.ContainsFunc(c.NoRopeLayers, func(v int) bool { return v != 1 }) {
		c.NoRopeLayers = nil // as without the key
	}
}

// Derive sets fields that follow from others, if they are zero. Without the others they stay zero, which Check reports.
func (c *Config) Derive() {
	if c.NumKeyValueHeads == 0 {
		c.NumKeyValueHeads = c.NumAttentionHeads
	}
	if heads := c.NumAttentionHeads; c.HeadDim == 0 && heads > 0 && c.HiddenSize%heads == 0 {
		c.HeadDim = c.HiddenSize / heads
	}
	if f := families[c.Architecture]; f != nil && c.NoRopeLayers == nil && f.NoRope > 0 {
		c.NoRopeLayers = NoRopeLayers(min(c.NumHiddenLayers, maxLayers), f.NoRope)
	}
	if f := families[c.Architecture]; f != nil && f.Interval > 0 {
		c.deriveHybrid(f)
	}
	if s := c.RopeScaling; s != nil {
		if s.Type == "yarn" && s.OriginalMax == 0 {
			s.OriginalMax = c.MaxPositionEmbedding
		}
		// the ratio of the lengths, in DeepSeek's and Phi's form
		if (s.Type == "yarn" || s.Type == "longrope") && s.Factor == 0 && s.OriginalMax > 0 {
			s.Factor = float64(c.MaxPositionEmbedding) / float64(s.OriginalMax)
		}
	}
}

// NoRopeLayers returns Config.NoRopeLayers with a layer that does not rotate in each interval.
func NoRopeLayers(layers, interval int) []int {
	list := slices.Repeat([]int{1}, layers)
	for i := interval - 1; i < layers; i += interval {
		list[i] = 0
	}
	return list
}

// readWindow finds the layers with a sliding window. cprun also obeys the key in a llama, which transformers ignores;
// Caveat reports the difference.
func readWindow(c *Config, o object) {
	family := c.Family().Windows
	use := o.boolean("use_sliding_window", family.Use == nil || *family.Use)
	if family.Use != nil && !use {
		c.SlidingWindow = 0
	}
	if family.Slides != nil {
		slides := family.Slides(c, o)
		if c.LayerTypes == nil && c.SlidingWindow > 0 && len(*o.faults) == 0 {
			for i := range c.NumHiddenLayers {
				kind := FullAttention
				if slides(i) {
					kind = SlidingAttention
				}
				c.LayerTypes = append(c.LayerTypes, kind)
			}
		}
	}
	other := func(t string) bool { return t != FullAttention }
	if c.LayerTypes != nil && len(c.LayerTypes) == c.NumHiddenLayers && c.Family().Interval == 0 &&
		!slices.ContainsFunc(c.LayerTypes, other) {
		// No layer slides: use one form for it.
		c.SlidingWindow, c.LayerTypes = 0, nil
	}
}

// Fault is one fault of a config.json.
type Fault struct {
	Key string // as in "rope_parameters.factor"; empty for the whole file
	Msg string
}

// ConfigError lists the Faults of the config.json at Path.
type ConfigError struct {
	Path   string
	Faults []Fault
}

// Error returns one line for each fault, with the file.
func (e *ConfigError) Error() string {
	lines := make([]string, len(e.Faults))
	for i, f := range e.Faults {
		lines[i] = e.Path + ": " + f.Msg
		if f.Key != "" {
			lines[i] = e.Path + ": " + f.Key + ": " + f.Msg
		}
	}
	return strings.Join(lines, "\n")
}

type faults []Fault

func (f *faults) add(key, format string, args ...any) {
	// A second fault of a key would report the same mistake.
	if !f.has(key) {
		*f = append(*f, Fault{key, fmt.Sprintf(format, args...)})
	}
}

func (f faults) has(key string) bool {
	return slices.ContainsFunc(f, func(g Fault) bool { return g.Key == key })
}

// readRope reads the rotary settings in either form. As in transformers, rope_scaling has priority over
// rope_parameters, and a rope_theta inside over one outside. It returns the prefix of the keys in this file.
func readRope(c *Config, o object) string {
	f := c.Family()
	r, all := o.object("rope_scaling"), o.object("rope_parameters")
	if s := c.RopeScaling; s != nil { // of the defaults
		c.RopeScaling = nil
		if len(r.keys)+len(all.keys) == 0 {
			s := *s
			c.RopeScaling = &s
		}
	}
	if c.localRope() {
		all = readLocalRope(c, all)
	}
	if len(r.keys) == 0 {
		r = all
	}
	for _, kind := range []string{FullAttention, SlidingAttention} {
		if r.has(kind) {
			r.fault(kind, "rotary settings that differ by layer are not supported")
			return r.prefix
		}
	}
	c.RopeTheta = r.number("rope_theta", c.RopeTheta)
	if c.PartialRotaryFactor = r.number("partial_rotary_factor", c.PartialRotaryFactor); c.PartialRotaryFactor == 1 {
		c.PartialRotaryFactor = 0
	}
	for _, key := range mropeKeys {
		switch {
		case !r.has(key):
		case f.Interval > 0:
			c.keep(key, r.keys[key])
		default:
			r.fault(key, "rotation by image coordinates is not supported")
		}
	}
	if f.Proportional {
		if kind := r.text("rope_type", proportional); kind != proportional {
			r.fault("rope_type", "%.64q is not supported; cprun has %s in %s", kind, proportional, f.Name)
		}
		if by := r.number("factor", 1); by != 1 {
			r.fault("factor", "%v is not supported; cprun does not stretch %s", by, proportional)
		}
		return r.prefix
	}
	kind := r.text("rope_type", r.text("type", "default"))
	kind = cmp.Or(f.RopeNames[kind], kind)
	if kind == "default" {
		return r.prefix
	}
	if !slices.Contains(ropes, kind) {
		key := "rope_type"
		if !r.has(key) {
			key = "type"
		}
		r.fault(key, "%.64q is not supported; cprun has %s", kind, wordList(append([]string{"default"}, f.ropes()...)...))
		return r.prefix
	}
	c.RopeScaling = &RopeScaling{Type: kind}
	for i := range ConfigKeys {
		k := &ConfigKeys[i]
		if !k.OfRope(kind) || k.Name == ropePrefix+"rope_type" {
			continue
		}
		r.read(k, k.Field(c))
		if k.Name == ropePrefix+trainedKey { // outside, it has priority
			c.RopeScaling.OriginalMax = cmp.Or(f.Trained, c.RopeScaling.OriginalMax, c.MaxPositionEmbedding)
			o.read(k, k.Field(c))
		}
	}
	if s := c.RopeScaling; kind == "yarn" { // as in transformers, 0 is the default
		s.BetaFast, s.BetaSlow = cmp.Or(s.BetaFast, 32), cmp.Or(s.BetaSlow, 1)
	}
	return r.prefix
}

// readLocalRope reads the rotary settings of layers with a window, and returns the settings of the others. Their base
// also applies to rope_scaling.
func readLocalRope(c *Config, o object) (full object) {
	full, local := o.object(FullAttention), o.object(SlidingAttention)
	if len(o.keys) > 0 && len(full.keys)+len(local.keys) == 0 {
		o.fault(FullAttention, "missing: settings are by kind of layer in a %s", c.Architecture)
	}
	if kind := local.text("rope_type", "default"); kind != "default" {
		local.fault("rope_type", "%.64q is not supported; cprun scales no layers with a window", kind)
	}
	c.RopeLocalBaseFreq = local.number("rope_theta", c.RopeLocalBaseFreq)
	c.RopeTheta = full.number("rope_theta", c.RopeTheta)
	return full
}

// Positions returns max_position_embeddings for a model without it, trained on samples of seqLen: the reach of its
// rotary settings, and at least seqLen. For yarn it is the reach alone, since transformers derives the factor from it.
func (c *Config) Positions(seqLen int) int {
	reach := 0
	if s := c.RopeScaling; s != nil {
		reach = int(min(math.Round(float64(s.OriginalMax)*s.Factor), maxInt))
		if s.Type == "yarn" {
			return max(reach, 1)
		}
	}
	return min(max(reach, seqLen), maxInt)
}

// An object is a JSON object. Typed getters read its values, so that every wrong one is reported.
type object struct {
	prefix string // of its keys in faults
	keys   map[string]json.RawMessage
	faults *faults
}

func (o object) has(key string) bool {
	raw, ok := o.keys[key]
	return ok && !bytes.Equal(bytes.TrimSpace(raw), []byte("null"))
}

func (o object) fault(key, format string, args ...any) {
	o.faults.add(o.prefix+key, format, args...)
}

// get decodes a key into v. It leaves v unchanged if the key is absent or null.
func (o object) get(key, want string, v any) {
	if o.has(key) && json.Unmarshal(o.keys[key], v) != nil {
		o.fault(key, "%s where %s belongs", clip(o.keys[key]), want)
	}
}

func clip(raw []byte) []byte {
	if len(raw) > 60 {
		return append(bytes.Clone(raw[:57]), "..."...)
	}
	return raw
}

// maxInt bounds every length of a config, so that products of a few do not overflow.
const maxInt = math.MaxInt32

func (o object) integer(key string, missing int) int {
	v := missing
	o.get(key, "an integer", &v)
	if v < 0 || v > maxInt {
		o.fault(key, "%d is not from 0 to %d", v, maxInt)
		return missing
	}
	return v
}

func (o object) number(key string, missing float64) float64 {
	v := missing
	o.get(key, "a number", &v)
	return v
}

func (o object) boolean(key string, missing bool) bool {
	v := missing
	o.get(key, "true or false", &v)
	return v
}

func (o object) text(key, missing string) string {
	v := missing
	o.get(key, "a string", &v)
	return v
}

// object returns a nested object. Its keys are nil if it is absent, null or empty.
func (o object) object(key string) object {
	in := object{prefix: o.prefix + key + ".", faults: o.faults}
	o.get(key, "an object", &in.keys)
	return in
}
