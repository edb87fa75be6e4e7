package attend

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/model/config"
)

// metadataKeys are the metadata that are read: the mask and the softmax, and what is said of the
// tensors.
var metadataKeys = []string{"causal", "window", "docs", "docs_kv", "slices", "softcap", "scale", "layout", "heads", "kv_heads", "head_dim", "sink", "max_logit"}

// harmless are metadata that cprun attention writes itself, and words that hold one of attentionWords
// and change no result.
var harmless = []string{"format", "lse", "name", "description", "torch_version", "seed"}

// attentionWords are in the names of what changes an attention, in whatever tool's words.
var attentionWords = []string{
	"mask", "window", "causal", "doc", "seq", "slice", "range", "segment", "prefix", "block", "chunk", "local", "global", "band", "pad", "pack",
	"bias", "alibi", "slope", "sink", "score", "soft", "scale", "cap", "logit", "drop", "norm", "rope", "rotary", "pos", "offset", "align",
	"layout", "format", "head", "dim", "group", "batch", "q_", "k_", "v_", "kv", "query", "key", "value", "lse",
}

// inputTensors are the tensors that are read, resultTensors those that `cprun attention` writes: a file may hold
// them to be compared with.
var (
	inputTensors  = slices.Concat([]string{"q", "k", "v", "kv", "qkv", "dout"}, scoreTensors)
	resultTensors = []string{"out", "lse", "dq", "dk", "dv", "dsink", "dbias", "max_logit"}
)

// understood finds tensors that are not read, and metadata that are not and are named like what
// changes an attention: none of these is ignored.
func (c *Case) understood() error {
	var faults terminal.Faults
	for _, name := range c.file.Names() {
		if !slices.Contains(inputTensors, name) && !slices.Contains(resultTensors, name) {
			faults.Addf("%s: tensor %.255q is not understood, and without it the result might be another; tensors are %s (%s may be there and are not read)",
				c.Path, name, strings.Join(inputTensors, ", "), strings.Join(resultTensors, ", "))
		}
	}
	meta := c.file.Metadata()
	for _, name := range slices.Sorted(maps.Keys(meta)) {
		if err := understand(name); err != nil {
			faults.Addf("%s: metadata %.255q %w", c.Path, name, err)
		}
	}
	return faults.Err()
}

// understand is why a key of the metadata cannot stand as it is.
func understand(name string) error {
	if slices.Contains(metadataKeys, name) || slices.Contains(harmless, name) || strings.HasPrefix(name, "__") {
		return nil
	}
	keys := strings.Join(metadataKeys, ", ")
	if meant := meantBy(name); meant != "" {
		return fmt.Errorf("is unknown; did you mean %s? (the keys are %s)", meant, keys)
	}
	if lower := strings.ToLower(name); slices.ContainsFunc(attentionWords, func(w string) bool { return strings.Contains(lower, w) }) {
		return fmt.Errorf("is not understood, and without it the result might be another; the keys are %s; begin it with __ if it says nothing of the attention", keys)
	}
	return nil
}

// meantBy returns the key that a name was meant for: one like it, or one that it contains.
func meantBy(name string) string {
	if meant := config.Nearest(name, metadataKeys); meant != "" {
		return meant
	}
	for _, key := range metadataKeys {
		if strings.Contains(strings.ToLower(name), key) {
			return key
		}
	}
	return ""
}
