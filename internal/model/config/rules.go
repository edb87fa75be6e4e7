package config

import (
	"fmt"
	"math"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// rules checks combinations of keys, except those that depend on ranks or the device.
func rules(c *Config, f *faults) {
	modelRules(c, f)
	ropeRules(c, f)
	if !slices.ContainsFunc(keys, func(k key) bool { return strings.HasPrefix(k.path, "model.") && !f.ok(k.path) }) {
		for _, fault := range c.Model.Check() { // hf's own rules
			f.add("model."+fault.Key, "%s", fault.Msg)
		}
	}
	trainRules(c, f)
	if n := c.Attention.SMMargin; n > 0 && f.ok("attention.sm_margin", "attention.backend") &&
		!slices.Contains([]string{"flash", "auto"}, c.Parallel.Backend) {
		f.add("attention.sm_margin", "%d has no effect with attention.backend %s; write 0, or attention.backend: flash",
			n, c.Parallel.Backend)
	}
	if s := c.Memory.Shard; f.ok("memory.shard") && s == "parameters" {
		f.add("memory.shard", "%s is not in this build; write gradients, optimizer or none", s)
	}
}

func modelRules(c *Config, f *faults) {
	m := &c.Model
	if !f.ok("model.from") {
		return
	}
	heads, kv := m.NumAttentionHeads, m.NumKeyValueHeads
	if f.ok("model.num_attention_heads", "model.num_key_value_heads") && kv > 0 && heads%kv != 0 {
		f.add("model.num_key_value_heads", "%d key-value heads do not divide %d query heads; take one of %s", kv, heads,
			divisors(heads))
	}
	if f.ok("model.head_dim") && m.HeadDim%2 != 0 {
		path, from := "model.head_dim", ""
		if !f.where.given(path) && m.From == "" {
			path, from = "model.hidden_size", " (hidden_size / num_attention_heads)"
		}
		f.add(path, "head_dim is %d%s, but must be even, since rope rotates pairs", m.HeadDim, from)
	}
	types := m.LayerTypes
	if len(types) == 0 || !f.ok("model.layer_types", "model.num_hidden_layers") {
		return
	}
	if len(types) != m.NumHiddenLayers {
		f.add("model.layer_types", "has %d entries for %d layers; give one for each", len(types), m.NumHiddenLayers)
	} else if m.SlidingWindow == 0 && f.ok("model.sliding_window") && slices.Contains(types, "sliding_attention") {
		f.add("model.layer_types",
			"layer %d is sliding_attention, and sliding_window is null; give it a number of tokens",
			slices.Index(types, "sliding_attention"))
	}
}

func ropeRules(c *Config, f *faults) {
	r := c.Model.RopeScaling
	if r == nil {
		return
	}
	at := func(name string) string { return ropeSection + "." + name }
	if low, high := at("low_freq_factor"), at("high_freq_factor"); r.Type == "llama3" && f.ok(low, high) &&
		r.LowFreqFactor >= r.HighFreqFactor {
		f.add(low, "%g must be below high_freq_factor, which is %g", r.LowFreqFactor, r.HighFreqFactor)
	}
	if slow, fast := at("beta_slow"), at("beta_fast"); r.Type == "yarn" && f.ok(slow, fast) &&
		r.BetaSlow >= r.BetaFast {
		f.add(slow, "%g must be below beta_fast, which is %g", r.BetaSlow, r.BetaFast)
	}
}

func trainRules(c *Config, f *faults) {
	s := &c.LRSchedule
	if f.ok("lr_schedule.warmup_steps", "train.steps") && s.WarmupSteps > c.Train.Steps {
		f.add("lr_schedule.warmup_steps", "%d is more than train.steps, which is %d", s.WarmupSteps, c.Train.Steps)
	}
	if f.ok("lr_schedule.min_lr", "optimizer.lr", "lr_schedule.name") && s.Name != "constant" &&
		s.MinLR > c.Optimizer.LR {
		f.add("lr_schedule.min_lr", "%g is above optimizer.lr, which is %g", s.MinLR, c.Optimizer.LR)
	}
	if f.ok("train.micro_batch_size", "train.global_batch_size", "parallel.data") && c.Parallel.Data == 0 &&
		c.Train.GlobalBatchSize%c.Train.MicroBatchSize != 0 {
		f.add("train.global_batch_size", "%d is not a multiple of micro_batch_size %d; take %s",
			c.Train.GlobalBatchSize, c.Train.MicroBatchSize,
			multiples(c.Train.GlobalBatchSize, c.Train.MicroBatchSize))
	}
	d := &c.Data
	if f.ok("data.eos_token_id", "model.vocab_size", "model.from") && d.EOSTokenID >= c.Model.VocabSize {
		f.add("data.eos_token_id", "token %d is outside the vocabulary; vocab_size is %d", d.EOSTokenID,
			c.Model.VocabSize)
	}
	if f.ok("parallel.layout", "data.pack_documents") && c.Parallel.Layout.ByDocument() && !d.PackDocuments {
		f.add("parallel.layout", "%s needs data.pack_documents: true; set it, or write zigzag", c.Parallel.Layout)
	}
	v := &d.Validation
	if v.Every > 0 && f.ok("data.validation.every") {
		if v.Path == "" && f.ok("data.validation.path") {
			f.add("data.validation.path",
				"missing, since validation.every is %d; name held-out files, or set every to 0", v.Every)
		}
	}
	if p := c.Checkpoint.Local; f.ok("checkpoint.local") && p != "" && !filepath.IsAbs(p) {
		f.add("checkpoint.local", "%s is a relative path, and every node has its own disk; write an absolute one "+
			"such as /scratch", found(p))
	}
	if p := c.Log.Prometheus; f.ok("log.prometheus") && p != "" {
		_, port, err := net.SplitHostPort(p)
		if n, numErr := strconv.ParseUint(port, 10, 16); err != nil || numErr != nil || n == 0 {
			f.add("log.prometheus",
				"%s is no address to listen on; write one such as :9090 or localhost:9090", found(p))
		}
	}
}

// dataRules checks the keys that depend on the kind of the files, tokens or text. indexed: an index
// has the ends of documents, so that no token needs to. text: they cannot hold ids either. read: the model's directory
// was read.
func dataRules(c *Config, f *faults, path string, tokens, indexed, text, read bool) {
	switch {
	case text && read && c.Data.Tokenizer == "" && f.ok("model.from", tokenizerKey):
		f.add(tokenizerKey, "%s", c.NoTokenizer())
	case tokens && !indexed && c.Data.PackDocuments && c.Data.EOSTokenID < 0 &&
		f.ok("data.pack_documents", "data.eos_token_id"):
		f.add("data.pack_documents", "documents of .bin files without an .idx end at data.eos_token_id, which is "+
			"null; set it to the token's number")
	case text && c.Data.Tokenizer == Bytes && c.Model.VocabSize < 256 &&
		f.ok("model.from", "model.vocab_size", "data.tokenizer"):
		f.add("model.vocab_size", "%d is too small for the text of %s; bytes need 256 tokens", c.Model.VocabSize, path)
	}
}

// NoTokenizer says why text cannot be trained on where model.from has no tokenizer.json.
func (c *Config) NoTokenizer() string {
	return fmt.Sprintf("there is no tokenizer.json in %s, and text needs the tokenizer that the model was trained "+
		"with; transformers writes one "+
		"(AutoTokenizer.from_pretrained(dir).save_pretrained(dir)), or name it here, or write bytes if the model is "+
		"to learn bytes", short(c.Model.From))
}

// warnings lists allowed values that the writer probably did not mean.
func warnings(c *Config) Errors {
	f := newFaults(c.where)
	m := &c.Model
	reachWarning(c, f)
	if caveat := m.Caveat(); caveat != "" {
		f.add("model.sliding_window", "%s", caveat)
	}
	groupWarnings(c, f)
	if v := &c.Data.Validation; v.Every == 0 && (v.Path != "" || v.Samples > 0) {
		f.add("data.validation.every", "is 0, so nothing is validated; give the steps between two validations")
	}
	return f.list
}

// reachWarning compares seq_len with the positions that the rotary settings cover.
func reachWarning(c *Config, f *faults) {
	m, r, n := &c.Model, c.Model.RopeScaling, float64(c.Data.SeqLen)
	longest := float64(m.MaxPositionEmbedding)
	if r == nil {
		if m.From != "" && longest > 0 && n > longest {
			f.add("data.seq_len", "%d is longer than the %d positions that the model was trained on; "+
				"set model.rope_scaling to stretch them", c.Data.SeqLen, m.MaxPositionEmbedding)
		}
		return
	}
	trained := float64(r.OriginalMax)
	if r.Type == "linear" {
		trained = longest // linear has no key for it
	}
	reach := trained * r.Factor
	// Llama 3.1 states 131,072 positions, twice its trained length x factor. A scaling of the user's
	// own leaves the length in config.json without meaning.
	if c.Given(ropeSection) == c.Given("model.max_position_embeddings") {
		reach = max(reach, longest)
	}
	if reach > 0 && n > reach {
		f.add("data.seq_len", "%d is beyond the %.0f positions that rope_scaling reaches (%s, %.0f x factor %g); "+
			"set model.rope_scaling.factor to %g", c.Data.SeqLen, reach, r.Type, trained, r.Factor,
			math.Ceil(n/trained))
	}
}

// groupWarnings lists settings of ulysses that leave ranks idle or slow.
func groupWarnings(c *Config, f *faults) {
	p := &c.Parallel
	group := map[string]int{"ulysses": p.Context, "hierarchical": p.Inner}[p.Algorithm]
	if h := c.Model.NumAttentionHeads; group > h {
		f.add("parallel.algorithm", "%s over groups of %d ranks leaves %d of them without any of the %d query heads, "+
			"and those compute no attention", p.Algorithm, group, group-h, h)
	}
	if group > 1 && p.Layout == "striped" {
		f.add("parallel.layout", "striped makes %s compute %d x %d small rectangles in each hop; zigzag makes one",
			p.Algorithm, group, group)
	}
}

func divisors(n int) string {
	var list []string
	for d := 1; d <= n && d <= 1<<16; d++ {
		if n%d == 0 {
			list = append(list, strconv.Itoa(d))
		}
	}
	if len(list) > 12 {
		list = append(list[:12], "...")
	}
	return strings.Join(list, ", ")
}

func multiples(n, m int) string {
	if n < m {
		return strconv.Itoa(m)
	}
	return strconv.Itoa(n/m*m) + " or " + strconv.Itoa((n/m+1)*m)
}
