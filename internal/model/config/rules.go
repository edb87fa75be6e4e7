package config

import (
	"cmp"
	"fmt"
	"math"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/text/data"
	"github.com/cprun/cprun/kernels"
)

// rules checks combinations of keys, except those that depend on ranks or the device.
func rules(c *Config, f *faults) {
	modelRules(c, f)
	scaledRule(c, f)
	trainRules(c, f)
	if n := c.Attention.SMMargin; n > 0 && f.ok("attention.sm_margin", "attention.backend") &&
		!slices.Contains([]string{"flash", "auto"}, c.Parallel.Backend) {
		f.add("attention.sm_margin", "%d has no effect with attention.backend %s; write 0, or attention.backend: flash",
			n, c.Parallel.Backend)
	}
}

// modelRules adds the faults found by package hf, except consequences of faults already listed.
func modelRules(c *Config, f *faults) {
	if !f.ok("model.from") {
		return
	}
	for _, fault := range c.Model.Check() {
		if k := keyAt["model."+fault.Key]; f.ok(k.path) && f.ok(k.with...) {
			f.add(k.path, "%s", fault.Msg)
		}
	}
	if f.within("model", "lora", "train.freeze") {
		return
	}
	for _, fault := range c.Model.CheckTuning() {
		f.add(fault.Key, "%s", fault.Msg)
	}
	sizeRule(c, f)
}

// scaledRule refuses matrices that have no products in E4M3.
func scaledRule(c *Config, f *faults) {
	if !f.ok("precision.linears") || f.within("model", "lora", "train.freeze") {
		return
	}
	if !c.Model.Tuning.FP8() {
		if l := c.Model.Tuning.LoRA; l != nil && l.Base == "fp8" {
			f.add("lora.base", "fp8 needs precision.linears: fp8; set it, or write auto")
		}
		return
	}
	for _, t := range c.Model.Tensors() {
		if n := t.Shape; c.Model.InE4M3(t) && (n[0]%kernels.ScaledUnit != 0 || n[1]%kernels.ScaledUnit != 0) {
			f.add("precision.linears", "fp8 needs rows and columns that %d divides, and %s has %d x %d; write bf16",
				kernels.ScaledUnit, t.Name, n[0], n[1])
			return
		}
	}
}

// maxNumbers bounds the activations and the weights, so that counts of bytes fit 64 bits.
const maxNumbers = 1 << 56

// sizeRule refuses a model beyond maxNumbers, at the key of its widest matrix.
func sizeRule(c *Config, f *faults) {
	m := &c.Model
	if !f.ok("data.seq_len", "train.micro_batch_size") {
		return
	}
	rows := max(float64(c.Data.SeqLen)*float64(c.Train.MicroBatchSize), float64(m.HiddenSize))
	for _, w := range []struct {
		key   string
		width float64
	}{
		{"model.hidden_size", float64(m.HiddenSize) * float64(m.NumHiddenLayers)},
		{"model.intermediate_size", 2 * float64(m.IntermediateSize) * float64(m.NumHiddenLayers)},
		{"model.num_experts", 2 * float64(m.NumExperts) * float64(cmp.Or(m.MoEIntermediateSize, m.IntermediateSize)) *
			float64(m.NumHiddenLayers)},
		{"model.head_dim", float64(m.NumAttentionHeads) * float64(max(m.HeadDim, m.GlobalHeadDim)) *
			float64(m.NumHiddenLayers)},
		{"model.vocab_size", float64(m.VocabSize)},
	} {
		if n := rows * w.width; n > maxNumbers {
			f.add(w.key, "with data.seq_len %d, train.micro_batch_size %d and model.num_hidden_layers %d it makes %.2g "+
				"numbers, and the most is %.2g; lower one of them", c.Data.SeqLen, c.Train.MicroBatchSize,
				m.NumHiddenLayers, n, float64(maxNumbers))
			return
		}
	}
}

func trainRules(c *Config, f *faults) {
	s := &c.LRSchedule
	c.warmup(f)
	if f.ok("lr_schedule.min_lr", "optimizer.lr", "lr_schedule.name") && s.Name != "constant" &&
		s.MinLR > c.Optimizer.LR {
		f.add("lr_schedule.min_lr", "%g is above optimizer.lr, which is %g; write at most that", s.MinLR,
			c.Optimizer.LR)
	}
	if f.ok("train.micro_batch_size", "train.global_batch_size", "parallel.data") && c.Parallel.Data == 0 &&
		c.Train.GlobalBatchSize%c.Train.MicroBatchSize != 0 {
		f.add("train.global_batch_size", "%d is not a multiple of micro_batch_size %d; take %s",
			c.Train.GlobalBatchSize, c.Train.MicroBatchSize,
			multiples(c.Train.GlobalBatchSize, c.Train.MicroBatchSize))
	}
	d := &c.Data
	if f.ok("data.eos_token_id", "model.vocab_size", "model.from") && d.EOSTokenID >= c.Model.VocabSize {
		f.add("data.eos_token_id", "token %d is outside the vocabulary of %d; write a smaller id, or null",
			d.EOSTokenID, c.Model.VocabSize)
	}
	if f.ok("parallel.layout", "data.pack_documents") && c.Parallel.Layout.ByDocument() && !d.PackDocuments {
		f.add("parallel.layout", "%s needs data.pack_documents: true; set it, or write zigzag", c.Parallel.Layout)
	}
	v := &d.Validation
	if v.Every > 0 && len(v.Path) == 0 && f.ok("data.validation.every", "data.validation.path") {
		f.add("data.validation.path",
			"missing, since validation.every is %d; name held-out files, or set every to 0", v.Every)
	}
	if n := c.Train.EarlyStop.Patience; n > 0 && v.Every == 0 && f.ok("train.early_stop.patience",
		"data.validation.every") {
		f.add("train.early_stop.patience", "%d needs the loss on held-out text; set data.validation.path and every, or "+
			"write 0", n)
	}
	if s := c.Log.Samples; s.Every > 0 && len(s.Prompts) == 0 && f.ok("log.samples.every", "log.samples.prompts") {
		f.add("log.samples.prompts", "missing, since samples.every is %d; write some, or set every to 0", s.Every)
	} else if n := len(s.Prompts); n > MaxPrompts {
		f.add("log.samples.prompts", "has %d; the most is %d", n, MaxPrompts)
	}
	if c.Checkpoint.Best && v.Every == 0 && f.ok("checkpoint.best", "data.validation.every") {
		f.add("checkpoint.best", "true needs the loss on held-out text; set data.validation.path and every, or write "+
			"false")
	}
	if p := c.Log.Prometheus; f.ok("log.prometheus") && p != "" {
		_, port, err := net.SplitHostPort(p)
		if n, numErr := strconv.ParseUint(port, 10, 16); err != nil || numErr != nil || n == 0 {
			f.add("log.prometheus",
				"%s is not an address to listen on; write one such as :9090 or localhost:9090", quoted(p))
		}
	}
}

// dataRules checks the keys that depend on the kind of files. tokens: token files. indexed: an index has the ends of
// documents, so no token marks them. text: neither tokens nor .jsonl with ids. read: the model's directory was read.
func dataRules(c *Config, f *faults, path string, tokens, indexed, text, read bool) {
	switch {
	case text && read && c.Data.Tokenizer == "" && f.ok("model.from", tokenizerKey):
		f.add(tokenizerKey, "%s", c.NoTokenizer())
	case tokens && !indexed && c.Data.Packs() && c.Data.EOSTokenID < 0 &&
		f.ok("data.pack_documents", "data.eos_token_id"):
		f.add("data.pack_documents", "documents of .bin files without an .idx end at data.eos_token_id, which is "+
			"null; set it to the token's number")
	case text && c.Data.Tokenizer == Bytes && c.Model.VocabSize < 256 &&
		f.ok("model.from", "model.vocab_size", "data.tokenizer"):
		f.add("model.vocab_size", "%d is too small for the text of %s; bytes need 256 tokens", c.Model.VocabSize, path)
	}
}

// recordRules checks the keys that depend on the kinds of the records.
func recordRules(c *Config, f *faults) {
	const key = "data.overlong"
	d := &c.Data
	for _, e := range slices.Concat(d.Path, d.Validation.Path) {
		whole := data.Conversation(e.Kind)
		switch {
		case !f.ok(key) || e.Kind == "": // the data of a run may be elsewhere by now
		case whole && d.Overlong == "split":
			f.add(key, "split would cut the conversations of %s; write auto, or drop", clipped(e.Path))
		case !whole && d.Overlong == "drop" && !c.Data.Packs() && f.ok("data.pack_documents"):
			f.add(key, "drop keeps the documents of %s whole, which needs data.pack_documents: true; set it, or write auto",
				clipped(e.Path))
		}
	}
}

// NoTokenizer returns the message for text with a model.from that lacks a tokenizer.json.
func (c *Config) NoTokenizer() string {
	return fmt.Sprintf("there is no tokenizer.json in %s, and text needs the tokenizer that the model was trained "+
		"with; transformers writes one "+
		"(AutoTokenizer.from_pretrained(dir).save_pretrained(dir)), or name it here, or write bytes if the model is "+
		"to learn bytes", clipped(c.Model.From))
}

// warnings lists allowed values that are probably mistakes.
func warnings(c *Config) Errors {
	f := newFaults(c.where)
	m := &c.Model
	contextWarning(c, f)
	if caveat := m.Caveat(); caveat.Msg != "" {
		f.add("model."+caveat.Key, "%s", caveat.Msg)
	}
	groupWarnings(c, f)
	if m.Tuning.LoRA != nil && m.FileVocab > 0 && m.Frozen(m.Tensors()[0]) {
		f.add("model.resize_embeddings", "the new rows do not train with lora; set lora.modules_to_save: [embed_tokens, "+
			"lm_head]")
	}
	if v := &c.Data.Validation; v.Every == 0 && (len(v.Path) > 0 || v.Samples > 0) {
		f.add("data.validation.every", "is 0, so nothing is validated; give the steps between two validations")
	}
	if e := &c.Train.EarlyStop; e.Patience == 0 && e.MinDelta > 0 {
		f.add("train.early_stop.min_delta", "has no effect, since patience is 0; give the validations to wait for")
	}
	return f.list
}

// contextWarning compares seq_len with the positions covered by the rotary settings.
func contextWarning(c *Config, f *faults) {
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
		trained = longest // linear has no key for the trained length
	}
	reach := trained * r.Factor
	// Llama 3.1 has 131,072 positions, twice its trained length x factor, and Llama 3.2 half of it. Files of YaRN keep
	// the length before it. With a user's scaling the length in config.json no longer applies.
	scaled := c.Given(ropeSection) || c.Given(ropeSection+".factor")
	own := longest > reach || longest > 0 && r.Type == "llama3"
	if own && scaled == c.Given("model.max_position_embeddings") {
		if n > longest {
			f.add("data.seq_len", "%d is beyond the model's %.0f positions at factor %g of rope_scaling; set "+
				"model.max_position_embeddings to %d and model.rope_scaling.factor to %g", c.Data.SeqLen, longest, r.Factor,
				c.Data.SeqLen, math.Ceil(r.Factor*n/longest))
		}
		return
	}
	if reach > 0 && n > reach {
		f.add("data.seq_len", "%d is beyond the %.0f positions that rope_scaling reaches (%s, %.0f x factor %g); "+
			"set model.rope_scaling.factor to %g", c.Data.SeqLen, reach, r.Type, trained, r.Factor,
			math.Ceil(n/trained))
	}
}

// groupWarnings lists settings of ulysses that leave ranks idle or make them slow.
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
