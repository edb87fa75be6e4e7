package hf

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/internal/base/terminal"
)

// ShardLimit bounds a file of weights: 5 GB, as in huggingface_hub.
const ShardLimit = 5_000_000_000

// Model is the input of Export.
type Model struct {
	Config  *Config
	DType   safetensors.DType // F32, BF16 or F16
	Tensors []Tensor          // in the order of the model and of the shards
	// Read fills dst with the elements of a tensor from element off. Export calls it for each tensor in pieces, so that
	// memory stays small for any tensor.
	Read func(t Tensor, off int64, dst []float32) error

	From       string // model directory at the start of training; "" for none
	Companions []Companion
	Changed    bool // of an adapter: the run changed the model's config.json

	// Bytes: the tokens are bytes, so the export gets a tokenizer for them. EOS is the token that ends a document, -1
	// for none.
	Bytes bool
	EOS   int

	base *Weights // of From, for an export of a Family.Whole
}

// Export writes a model directory that transformers loads: config.json, the companions, and model.safetensors, or
// shards of at most limit bytes with their index. The directory appears complete or not at all. Export refuses a
// directory with files in it. Of a Family.Whole, it copies tensors of m.From beside the language model, and returns
// their names.
func Export(path string, m Model, limit int64) (copied []string, err error) {
	if m.Config.Family().Whole && m.From != "" {
		if m.base, err = OpenWeights(m.From); err != nil {
			return nil, err
		}
		defer m.base.Close()
		copied = slices.Sorted(maps.Keys(m.base.beside))
	}
	return copied, writeExport(path, func(dir *os.Root) error {
		write := func() error { return WriteConfig(dir, m.Config, m.DType) }
		if m.base != nil {
			write = func() error { return m.writeWhole(dir) }
		}
		if err := write(); err != nil {
			return err
		}
		if err := m.copyCompanions(dir); err != nil {
			return err
		}
		if m.Bytes {
			if err := writeBytes(dir, m.EOS); err != nil {
				return err
			}
		}
		return m.write(dir, limit)
	})
}

// writeExport creates a directory that write fills.
func writeExport(path string, write func(dir *os.Root) error) error {
	if empty, err := files.Empty(path); err != nil {
		return fmt.Errorf("export directory: %w", err)
	} else if !empty {
		return fmt.Errorf("export directory %s: has files in it; name another or empty it", terminal.Name(path))
	}
	path, err := filepath.Abs(path)
	if err != nil {
		return fmt.Errorf("export directory: %w", err)
	}
	parent, err := files.Make(filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("export directory: %w", err)
	}
	defer parent.Close()
	err = files.WriteDir(parent, filepath.Base(path), write)
	if err != nil {
		return fmt.Errorf("export directory %s: %w", terminal.Name(path), err)
	}
	return nil
}

func (m Model) write(dir *os.Root, limit int64) error {
	shards := m.shards(limit)
	total := int64(0)
	weightMap := map[string]string{}
	for k, shard := range shards {
		name := singleFile
		if len(shards) > 1 {
			name = fmt.Sprintf("model-%05d-of-%05d.safetensors", k+1, len(shards))
		}
		var entries []safetensors.Entry
		for _, t := range shard {
			entries = append(entries, m.entry(t))
			weightMap[t.Name] = name
			total += m.bytes(t)
		}
		// Older transformers refuse a file without this metadata.
		meta := map[string]string{"format": "pt"}
		if err := safetensors.WriteIn(dir, name, meta, entries); err != nil {
			return err
		}
	}
	if len(shards) == 1 {
		return nil
	}
	return writeJSON(dir, indexFile, map[string]any{
		"metadata": map[string]int64{"total_size": total}, "weight_map": weightMap,
	})
}

func (m Model) bytes(f filed) int64 {
	if f.from != nil {
		i, _ := f.from.Info(f.Name)
		return i.Bytes()
	}
	return int64(f.Size()) * m.dtype(f.Tensor).Bits() / 8
}

// dtype returns the type of a tensor in files. As in transformers, corrections stay float32.
func (m Model) dtype(t Tensor) safetensors.DType {
	if t.Role == Correction {
		return safetensors.F32
	}
	return m.DType
}

// shards fills the files in order. A tensor longer than the limit gets its own file.
func (m Model) shards(limit int64) [][]filed {
	var all [][]filed
	var now []filed
	size := int64(0)
	for _, t := range m.inFiles() {
		n := m.bytes(t)
		if len(now) > 0 && n > limit-size {
			all, now, size = append(all, now), nil, 0
		}
		now, size = append(now, t), size+n
	}
	return append(all, now)
}

const pieceSize = 4 << 20

// A filed is a tensor in files: a parameter, several in the order of their rows, or a copy.
type filed struct {
	Tensor
	parts []piece
	from  *safetensors.File // of a copy
}

func (m Model) inFiles() (list []filed) {
	at := map[string]int{}
	for _, t := range m.Tensors {
		whole := t
		whole.FileRows = 0
		for _, p := range whole.inFiles() {
			p.of = t
			i, ok := at[p.in.Name]
			if !ok {
				i, list = len(list), append(list, filed{Tensor: p.in})
				at[p.in.Name] = i
			}
			list[i].parts = append(list[i].parts, p)
		}
	}
	for _, f := range list { // parts of a key head alternate
		slices.SortStableFunc(f.parts, func(a, b piece) int {
			if a.Step > 0 {
				return 0
			}
			return cmp.Compare(a.start, b.start)
		})
	}
	if m.base != nil {
		list = m.addWhole(list)
	}
	return list
}

// entry reads a tensor's elements when the file reaches it.
func (m Model) entry(f filed) safetensors.Entry {
	if f.from != nil {
		return f.copied()
	}
	dtype := m.dtype(f.Tensor)
	return safetensors.Entry{Name: f.Name, DType: dtype, Shape: f.Shape, Data: func(w io.Writer) error {
		var part []float32 // of one expert, or of all, with elements in another order
		left, from := int64(0), 0
		for _, p := range f.parts {
			if p.Step == 0 {
				if err := m.copy(w, p, dtype); err != nil {
					return err
				}
				continue
			}
			if left == 0 {
				if left, from = int64(f.Size()/p.of.Experts), int(p.start)-p.Before; p.Next > 0 {
					left = int64(f.Size())
				}
				part = slices.Grow(part[:0], int(left))[:left]
			}
			data := make([]float32, p.n)
			if err := m.Read(p.of, p.at, data); err != nil {
				return err
			}
			cols := p.of.cols()
			for i, x := range data {
				part[int(p.start)-from+i/cols*p.Step+i%cols*p.Across] = x
			}
			if left -= p.n; left > 0 {
				continue
			}
			if err := safetensors.Floats(f.Name, dtype, f.Shape, part).Data(w); err != nil {
				return err
			}
		}
		return nil
	}}
}

func (m Model) copy(w io.Writer, p piece, dtype safetensors.DType) error {
	data := make([]float32, min(p.n, pieceSize))
	for off := int64(0); off < p.n; off += int64(len(data)) {
		data = data[:min(int64(len(data)), p.n-off)]
		if err := m.Read(p.of, p.at+off, data); err != nil {
			return err
		}
		if err := safetensors.Floats(p.in.Name, dtype, p.in.Shape, data).Data(w); err != nil {
			return err
		}
	}
	return nil
}

var torchNames = map[safetensors.DType]string{
	safetensors.F32: "float32", safetensors.F16: "float16", safetensors.BF16: "bfloat16",
}

// ElementType returns the type for a name in config.json, or "" for an unknown one.
func ElementType(name string) safetensors.DType {
	for t, n := range torchNames {
		if n == name {
			return t
		}
	}
	return ""
}

// WriteConfig writes config.json for transformers 4 and 5: the rotary settings and the element type are written in both
// forms.
func WriteConfig(dir *os.Root, c *Config, dtype safetensors.DType) error {
	m, err := c.keys(dir.Name(), dtype)
	if err != nil {
		return err
	}
	return writeJSON(dir, "config.json", m)
}

// Changed lists the keys of config.json, sorted, that c has and a model directory has not, or with another value.
// Those of the element type and of tokens do not count.
func (c *Config) Changed(from string) (list []string, err error) {
	base, err := ReadConfig(from)
	if err != nil {
		return nil, err
	}
	now := c.unresized()
	now.TokenIDs = base.TokenIDs
	was, err := base.keys(from, safetensors.F32)
	if err != nil {
		return nil, err
	}
	is, err := now.keys(from, safetensors.F32)
	for _, key := range slices.Sorted(maps.Keys(is)) {
		a, _ := json.Marshal(was[key])
		if b, _ := json.Marshal(is[key]); !bytes.Equal(a, b) {
			list = append(list, key)
		}
	}
	return list, err
}

// keys returns the content of config.json.
func (c *Config) keys(dir string, dtype safetensors.DType) (map[string]any, error) {
	if faults := c.Check(); len(faults) > 0 {
		return nil, &ConfigError{terminal.Name(filepath.Join(dir, "config.json")), faults}
	}
	name, ok := torchNames[dtype]
	if !ok {
		return nil, fmt.Errorf("weights are exported as F32, F16 or BF16, not as %q", dtype)
	}
	f := c.Family()
	m := map[string]any{
		"architectures": []string{f.Class}, "model_type": c.Architecture,
		"dtype": name, "torch_dtype": name, "attention_dropout": number(0),
		// A null id is better than the default of transformers, which would end a text at byte 2.
		"bos_token_id": nil, "eos_token_id": nil, "pad_token_id": nil,
		"use_cache": true,
	}
	key, act := f.activation()
	m[key] = act
	d := *c // with values where transformers wants no null
	d.PartialRotaryFactor = cmp.Or(c.PartialRotaryFactor, 1)
	d.RopeLocalBaseFreq = cmp.Or(c.RopeLocalBaseFreq, c.RopeTheta)
	d.AttentionMultiplier, d.EmbeddingMultiplier = c.SoftmaxScale(), cmp.Or(c.EmbeddingMultiplier, 1)
	d.ResidualMultiplier, d.LogitsScaling = cmp.Or(c.ResidualMultiplier, 1), cmp.Or(c.LogitsScaling, 1)
	d.DecoderSparseStep, d.NGroup, d.TopkGroup = max(c.DecoderSparseStep, 1), max(c.NGroup, 1), max(c.TopkGroup, 1)
	d.RoutedScalingFactor, d.MLPOnlyLayers = cmp.Or(c.RoutedScalingFactor, 1), append([]int{}, c.MLPOnlyLayers...)
	if len(c.NoRopeLayers) == 0 {
		d.NoRopeLayers = slices.Repeat([]int{1}, c.NumHiddenLayers)
	}
	for i := range ConfigKeys {
		k := &ConfigKeys[i]
		if k.Ropes != "" || k.ours || !k.in(f) {
			continue
		}
		field := k.Field(&d)
		if m[k.Name] = nil; !isZero(field) || !k.zeroIsValid() {
			m[k.Name] = written(field)
		}
	}
	if _, ok := m[scalarKey]; ok { // transformers wants an integer
		m[scalarKey] = cmp.Or(c.QueryPreAttnScalar, float64(c.HeadDim))
	}
	if f.Biased {
		delete(m, "attention_bias")
	}
	if c.MaxPositionEmbedding == 0 {
		delete(m, "max_position_embeddings")
	}
	if c.NumExperts > 0 { // beside num_experts, which transformers 4 reads in qwen3_moe
		m[f.Experts.Count] = c.NumExperts
	}
	writeGlobal(m, c)
	maps.Copy(m, f.Export)
	for _, kept := range []map[string]json.RawMessage{c.TokenIDs, c.Unused} {
		for key, raw := range kept {
			m[key] = raw
		}
	}
	writeRope(m, c)
	writeWindow(m, c)
	return m, nil
}

func writeRope(m map[string]any, c *Config) {
	v5 := map[string]any{"rope_type": "default", "rope_theta": number(c.RopeTheta)}
	m["rope_parameters"], m["rope_scaling"] = v5, nil
	f, s := c.Family(), c.RopeScaling
	if part, ok := m["partial_rotary_factor"]; ok {
		v5["partial_rotary_factor"] = part
	}
	if f.Proportional { // transformers has the part inside, and rope_scaling would replace rope_parameters
		v5["rope_type"] = proportional
		delete(m, "partial_rotary_factor")
		delete(m, "rope_scaling")
	}
	for _, key := range mropeKeys {
		if raw, ok := c.Unused[key]; ok {
			v5[key] = raw
			delete(m, key)
		}
	}
	if c.localRope() {
		m["rope_parameters"] = map[string]any{FullAttention: v5,
			SlidingAttention: map[string]any{"rope_type": "default", "rope_theta": m[localKey]}}
	}
	if s == nil {
		return
	}
	v4 := map[string]any{}
	m["rope_scaling"] = v4
	for i := range ConfigKeys {
		if k := &ConfigKeys[i]; k.OfRope(s.Type) && !isZero(k.Field(c)) {
			v4[strings.TrimPrefix(k.Name, ropePrefix)] = written(k.Field(c))
		}
	}
	if f.Trained > 0 {
		m[trainedKey] = s.OriginalMax
	}
	maps.Copy(v5, v4)
	if implied := float64(c.MaxPositionEmbedding) / float64(s.OriginalMax); f.Trained > 0 &&
		s.AttentionFactor == nil && s.Factor == implied { // transformers 4 accepts no other keys
		m["rope_scaling"] = map[string]any{"type": s.Type, "short_factor": s.ShortFactor, "long_factor": s.LongFactor}
		delete(v5, "factor")
	}
}

// writeWindow writes the window. layer_types is for newer transformers, max_window_layers approximates it for older
// ones.
func writeWindow(m map[string]any, c *Config) {
	f := c.Family()
	delete(m, "layer_types")
	if c.SlidingWindow == 0 && f.Defaults.SlidingWindow == 0 {
		delete(m, "sliding_window")
	}
	if f.Interval > 0 {
		m["layer_types"] = c.LayerTypes
	}
	if _, ok := m["sliding_window"]; !ok || f.Windows.Uniform {
		return
	}
	types, full := make([]string, c.NumHiddenLayers), 0
	for i := range types {
		types[i] = SlidingAttention
		if c.Layer(i).Mixer.Window < 0 {
			types[i] = FullAttention
			full = i + 1
		}
	}
	m["layer_types"], m["max_window_layers"] = types, full
	m["use_sliding_window"] = c.SlidingWindow > 0
}

func writeJSON(dir *os.Root, name string, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return files.WriteData(dir, name, append(b, '\n'))
}
