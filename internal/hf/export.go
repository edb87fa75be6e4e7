package hf

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"github.com/cprun/cprun/internal/safetensors"
)

// ShardLimit is how large a file of weights is before another is begun: 5 GB, as
// huggingface_hub has it.
const ShardLimit = 5_000_000_000

// Model is what Export writes.
type Model struct {
	Config  *Config
	DType   safetensors.DType // F32, BF16 or F16
	Tensors []Tensor          // in the order of the model, which is that of the shards
	// Read fills dst with all elements of a tensor. It is called once for each, one at a
	// time, so that no more than one stands in memory.
	Read func(t Tensor, dst []float32) error

	From       string   // model directory that training began with; "" for none
	Companions []string // files of From that the export has too
}

// Export writes a model directory that transformers loads: config.json, the companions, and
// model.safetensors, or shards of at most limit bytes with their index. The directory
// appears whole or not at all; one that is there and has files in it is left alone.
func Export(path string, m Model, limit int64) (err error) {
	if left, err := os.ReadDir(path); err == nil && len(left) > 0 {
		return fmt.Errorf("export directory %s: has files in it; name another or empty it", path)
	} else if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("export directory: %w", err)
	}
	if path, err = filepath.Abs(path); err != nil {
		return fmt.Errorf("export directory: %w", err)
	}
	parent := filepath.Dir(path)
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return fmt.Errorf("export directory: %w", err)
	}
	tmp, err := os.MkdirTemp(parent, "."+filepath.Base(path)+".tmp-*")
	if err != nil {
		return fmt.Errorf("export directory: %w", err)
	}
	defer func() {
		if err != nil {
			os.RemoveAll(tmp)
			err = fmt.Errorf("export directory %s: %w", path, err)
		}
	}()
	if err := WriteConfig(tmp, m.Config, m.DType); err != nil {
		return err
	}
	if err := m.bring(tmp); err != nil {
		return err
	}
	if err := m.write(tmp, limit); err != nil {
		return err
	}
	if err := os.Chmod(tmp, 0o755); err != nil { // MkdirTemp makes it 0700
		return err
	}
	if err := safetensors.SyncDir(tmp); err != nil {
		return err
	}
	// An empty directory makes way; Remove fails if files have come into it meanwhile.
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		return err
	}
	return safetensors.SyncDir(parent)
}

// write writes the files of weights into dir.
func (m Model) write(dir string, limit int64) error {
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
		// Without this metadata older transformers refuse the file.
		meta := map[string]string{"format": "pt"}
		if err := safetensors.WriteFile(filepath.Join(dir, name), meta, entries); err != nil {
			return err
		}
	}
	if len(shards) == 1 {
		return nil
	}
	return writeJSON(filepath.Join(dir, indexFile), map[string]any{
		"metadata": map[string]int64{"total_size": total}, "weight_map": weightMap,
	})
}

func (m Model) elements(t Tensor) int64 {
	n := int64(1)
	for _, d := range t.Shape {
		n *= int64(d)
	}
	return n
}

func (m Model) bytes(t Tensor) int64 { return m.elements(t) * m.DType.Bits() / 8 }

// shards fills one file after another, in order. A tensor longer than the limit has a file
// of its own.
func (m Model) shards(limit int64) [][]Tensor {
	var all [][]Tensor
	var now []Tensor
	size := int64(0)
	for _, t := range m.Tensors {
		n := m.bytes(t)
		if len(now) > 0 && n > limit-size {
			all, now, size = append(all, now), nil, 0
		}
		now, size = append(now, t), size+n
	}
	return append(all, now)
}

// entry asks for a tensor's elements when its turn in the file comes.
func (m Model) entry(t Tensor) safetensors.Entry {
	return safetensors.Entry{Name: t.Name, DType: m.DType, Shape: t.Shape, Data: func(w io.Writer) error {
		data := make([]float32, m.elements(t))
		if err := m.Read(t, data); err != nil {
			return err
		}
		return safetensors.Floats(t.Name, m.DType, t.Shape, data).Data(w)
	}}
}

// torchNames are the names of element types in config.json.
var torchNames = map[safetensors.DType]string{
	safetensors.F32: "float32", safetensors.F16: "float16", safetensors.BF16: "bfloat16",
}

// WriteConfig writes config.json, in a form that transformers 4 and 5 both read: the rotary
// settings and the element type stand there twice.
func WriteConfig(dir string, c *Config, dtype safetensors.DType) error {
	if faults := c.Check(); len(faults) > 0 {
		return &ConfigError{filepath.Join(dir, "config.json"), faults}
	}
	name, ok := torchNames[dtype]
	if !ok {
		return fmt.Errorf("weights are exported as F32, F16 or BF16, not as %q", dtype)
	}
	m := map[string]any{
		"architectures": []string{classes[c.Architecture]}, "model_type": c.Architecture,
		"dtype": name, "torch_dtype": name,
		"vocab_size": c.VocabSize, "hidden_size": c.HiddenSize, "intermediate_size": c.IntermediateSize,
		"num_hidden_layers": c.NumHiddenLayers, "num_attention_heads": c.NumAttentionHeads,
		"num_key_value_heads": c.NumKeyValueHeads, "head_dim": c.HeadDim, "hidden_act": "silu",
		"rms_norm_eps": number(c.RMSNormEps), "initializer_range": number(c.InitializerRange),
		"tie_word_embeddings": c.TieWordEmbeddings, "attention_bias": false, "attention_dropout": number(0),
		// No id is better than the default of transformers, which would end a text at the
		// byte 2.
		"bos_token_id": nil, "eos_token_id": nil, "pad_token_id": nil,
		"use_cache": true,
	}
	if c.Architecture == Llama {
		m["mlp_bias"] = false
	}
	if c.MaxPositionEmbedding > 0 {
		m["max_position_embeddings"] = c.MaxPositionEmbedding
	}
	for key, raw := range c.TokenIDs {
		m[key] = raw
	}
	writeRope(m, c)
	writeWindow(m, c)
	return writeJSON(filepath.Join(dir, "config.json"), m)
}

func writeRope(m map[string]any, c *Config) {
	v5 := map[string]any{"rope_type": "default", "rope_theta": number(c.RopeTheta)}
	m["rope_theta"], m["rope_parameters"], m["rope_scaling"] = number(c.RopeTheta), v5, nil
	s := c.RopeScaling
	if s == nil {
		return
	}
	v4 := map[string]any{"rope_type": s.Type, "factor": number(s.Factor)}
	m["rope_scaling"] = v4
	switch s.Type {
	case "llama3":
		v4["low_freq_factor"], v4["high_freq_factor"] = number(s.LowFreqFactor), number(s.HighFreqFactor)
		v4["original_max_position_embeddings"] = s.OriginalMax
	case "yarn":
		v4["original_max_position_embeddings"] = s.OriginalMax
		v4["beta_fast"], v4["beta_slow"] = number(cmp.Or(s.BetaFast, 32)), number(cmp.Or(s.BetaSlow, 1))
		if s.AttentionFactor != nil {
			v4["attention_factor"] = number(*s.AttentionFactor)
		}
		if s.MScale != 0 {
			v4["mscale"] = number(s.MScale)
		}
		if s.MScaleAllDim != 0 {
			v4["mscale_all_dim"] = number(s.MScaleAllDim)
		}
		if s.Truncate != nil {
			v4["truncate"] = *s.Truncate
		}
	}
	for key, value := range v4 {
		v5[key] = value
	}
}

// writeWindow writes the window. layer_types and max_window_layers say the same to newer
// and older transformers, as far as the older can be told.
func writeWindow(m map[string]any, c *Config) {
	if c.Architecture == Llama && c.SlidingWindow == 0 {
		return
	}
	types, full := make([]string, c.NumHiddenLayers), 0
	for i := range types {
		types[i] = SlidingAttention
		if c.Window(i) < 0 {
			types[i] = FullAttention
			full = i + 1
		}
	}
	m["layer_types"], m["max_window_layers"] = types, full
	m["use_sliding_window"], m["sliding_window"] = c.SlidingWindow > 0, nil
	if c.SlidingWindow > 0 {
		m["sliding_window"] = c.SlidingWindow
	}
}

// number is a float that Python reads as a float and not as an integer.
func number(x float64) json.RawMessage {
	b := strconv.AppendFloat(nil, x, 'g', -1, 64)
	for _, c := range b {
		if c == '.' || c == 'e' {
			return b
		}
	}
	return append(b, '.', '0')
}

func writeJSON(path string, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(append(b, '\n'))
	return errors.Join(err, f.Sync(), f.Close())
}
