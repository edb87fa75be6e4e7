// Package attend implements `cprun attention`: one distributed attention, forward and backward, on tensors from a file.
// Use it to compare a layout, an algorithm or a kernel with another implementation, without a model. A Case is an input
// file:
//
//	c, err := attend.Open("case.safetensors")
//	err = spec.Check(c, ranks)
//	report, err := c.Run(ctx, spec, world, dev) // on every rank
package attend

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// Case is an open input file: q, k and v in a layout of package qkv, dout [batch, seq, heads, head_dim_v], all in
// global order, and the mask in the metadata.
type Case struct {
	Path               string
	Batch, SeqQ, SeqKV int
	Heads, KVHeads     int
	HeadDim, HeadDimV  int
	Masks              Masks
	Softmax            attention.Softmax
	Scores             Scores
	Backward           bool // the file has dout
	Input              Input
	file               *safetensors.File
	batches            bool // the documents of q are the batch of k and v; see dims
}

// Open reads the header of a case and checks shapes and metadata. The error lists every fault of the file.
func Open(path string) (*Case, error) {
	f, err := safetensors.Open(path)
	if err != nil {
		return nil, err
	}
	c, err := read(terminal.Name(path), f)
	if err != nil {
		f.Close()
		return nil, err
	}
	return c, nil
}

func read(path string, f *safetensors.File) (*Case, error) {
	c := &Case{Path: path, file: f}
	if f.Holes() {
		return nil, fmt.Errorf("%s: the file is mostly holes; write its tensors completely", path)
	}
	if err := errors.Join(c.understood(), c.tensors()); err != nil {
		return nil, err
	}
	return c, errors.Join(c.metadata(), c.sink(), c.slopes(), c.bias(), c.maxLogit())
}

// Needs estimates the bytes of tensors and results over all ranks. It is a float, since the product of lengths in the
// header may overflow an int.
func (c *Case) Needs() float64 {
	q := float64(c.Batch) * float64(c.SeqQ) * float64(c.Heads)
	k := float64(c.Batch) * float64(c.SeqKV) * float64(c.KVHeads)
	n := (q + k) * (float64(c.HeadDim) + float64(c.HeadDimV))
	if b := c.Scores.Bias; b != nil {
		n += float64(b[0]) * float64(b[1]) * float64(c.SeqQ) * float64(c.SeqKV)
	}
	if c.Backward {
		n *= 2
	}
	return 2 * 4 * n // in float32, with a copy
}

// Close closes the file.
func (c *Case) Close() error { return c.file.Close() }

func (c *Case) metadata() error {
	m := c.file.Metadata()
	var errs []error
	fault := func(key, want string) {
		errs = append(errs, fmt.Errorf("%s: metadata %q is %s; want %s", c.Path, key,
			terminal.Clip(strconv.Quote(m[key]), 80), want))
	}
	var err error
	if c.Masks, err = c.readMasks(); err != nil {
		errs = append(errs, err)
	}
	c.Softmax.Scale = 1 / math.Sqrt(float64(max(c.HeadDim, 1)))
	c.Softmax.Scale = number(m["scale"], c.Softmax.Scale, func() { fault("scale", "a finite number") })
	if c.Softmax.Scale == 0 {
		c.Softmax.Scale = math.Copysign(0, -1) // 0 would mean unset
	}
	c.Softmax.Softcap = number(m["softcap"], 0, func() { fault("softcap", "a number of at least 0") })
	if c.Softmax.Softcap < 0 {
		fault("softcap", "a number of at least 0")
	}
	return errors.Join(errs...)
}

func number(s string, none float64, fault func()) float64 {
	if s == "" {
		return none
	}
	x, err := strconv.ParseFloat(s, 64)
	if err != nil || math.IsInf(x, 0) || math.IsNaN(x) {
		fault()
		return none
	}
	return x
}

var metadataKeys = []string{"causal", "window", "docs", "docs_kv", "slices", "softcap", "scale", "layout", "heads",
	"kv_heads", "head_dim", "sink", "max_logit"}

// harmless lists metadata written by cprun attention, and keys that contain one of attentionWords but change no result.
var harmless = []string{"format", "lse", "name", "description", "torch_version", "seed"}

// attentionWords occur in names of attention options of other tools.
var attentionWords = []string{
	"mask", "window", "causal", "doc", "seq", "slice", "range", "segment", "prefix", "block", "chunk", "local",
	"global", "band", "pad", "pack", "bias", "alibi", "slope", "sink", "score", "soft", "scale", "cap", "logit", "drop",
	"norm", "rope", "rotary", "pos", "offset", "align", "attn", "attention", "sliding", "sparse", "diagonal", "lens",
	"length", "visib", "decoder", "_left", "_right", "temperature",
	"layout", "format", "head", "dim", "group", "batch", "q_", "k_", "v_", "kv", "query", "key", "value", "lse",
}

// inputTensors are read. resultTensors are written; an input file may contain them for comparison.
var (
	inputTensors  = slices.Concat([]string{"q", "k", "v", "kv", "qkv", "dout"}, scoreTensors)
	resultTensors = []string{"out", "lse", "dq", "dk", "dv", "dsink", "dbias", "max_logit"}
)

// understood refuses unknown tensors, and unknown metadata with names like attention options.
func (c *Case) understood() error {
	var faults terminal.Faults
	for _, name := range c.file.Names() {
		if !slices.Contains(inputTensors, name) && !slices.Contains(resultTensors, name) {
			faults.Addf("%s: tensor %.255q is unknown and may change the result; known tensors are %s (and %s, "+
				"which are ignored)",
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

func understand(name string) error {
	if slices.Contains(metadataKeys, name) || slices.Contains(harmless, name) || strings.HasPrefix(name, "__") {
		return nil
	}
	keys := strings.Join(metadataKeys, ", ")
	if meant := meantBy(name); meant != "" {
		return fmt.Errorf("is unknown; did you mean %s? (the keys are %s)", meant, keys)
	}
	if lower := strings.ToLower(name); slices.ContainsFunc(attentionWords,
		func(w string) bool { return strings.Contains(lower, w) }) {
		return fmt.Errorf("is unknown and may change the result; the keys are %s; if it does not concern the "+
			"attention, begin it with __", keys)
	}
	return nil
}

// meantBy returns the key that a name probably means: a similar one, or one that it contains.
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

// A group holds neighbouring samples with the same mask. They share ring passes, since a kernel call has one list of
// tiles for all samples.
type group struct {
	lo, hi   int // samples
	shape    partition.Shape
	schedule *ring.Schedule
}

func (s *Spec) groups(c *Case, shape partition.Shape, rank int) ([]group, error) {
	list := []group{{0, c.Batch, shape, nil}}
	if c.Masks.Apart() {
		list = list[:0]
		last := ""
		for i, mask := range c.Masks.of {
			masked := shape
			masked.Mask = mask
			if key := masked.Key(); key == last {
				list[len(list)-1].hi++
			} else {
				list, last = append(list, group{i, i + 1, masked, nil}), key
			}
		}
	}
	for i := range list {
		var err error
		if list[i].schedule, err = ring.New(s.Algorithm, s.spec(c, list[i].shape), rank); err != nil {
			return nil, err
		}
	}
	return list, nil
}

func (l *local) of(g group) local {
	if l.q.Len(tensor.Batch) == g.hi-g.lo {
		return *l
	}
	part := *l
	part.terms = l.terms.of(g.lo, g.hi)
	for _, v := range []*View{&part.q, &part.k, &part.v, &part.do, &part.out.dev, &part.lse.dev, &part.dq.dev,
		&part.dk.dev, &part.dv.dev} {
		if v.Len(tensor.Batch) > 0 { // else absent
			*v = v.Slice(tensor.Batch, g.lo, g.hi)
		}
	}
	return part
}

func (l *local) partial() attention.Partial { return attention.Partial{O: l.out.dev, LSE: l.lse.dev} }

func (l *local) grads() attention.Grads {
	return attention.Grads{DQ: l.dq.dev, DK: l.dk.dev, DV: l.dv.dev}
}

// work returns the visible pairs of every rank: of one sample if all share a mask, else of all samples.
func (c *Case) work(groups []group) []int {
	total := partition.Work(groups[0].shape)
	if !c.Masks.Apart() {
		return total
	}
	clear(total)
	for _, g := range groups {
		for r, n := range partition.Work(g.shape) {
			total[r] += n * (g.hi - g.lo)
		}
	}
	return total
}

// layoutDocs returns the documents for a layout by documents. If samples differ, it merges the document ends of all
// samples, so that no piece crosses a document end.
func (c *Case) layoutDocs(layout partition.LayoutName) ([]int, error) {
	if c.SeqQ != c.SeqKV {
		return nil, fmt.Errorf("layout %s needs equal numbers of queries (%d) and keys (%d); use zigzag", layout, c.SeqQ,
			c.SeqKV)
	}
	switch len(c.Masks.Docs) {
	case 0:
		return []int{c.SeqQ}, nil
	case 1:
		return c.Masks.Docs[0], nil
	}
	var ends []int
	for _, docs := range c.Masks.Docs {
		at := 0
		for _, n := range docs {
			at += n
			ends = append(ends, at)
		}
	}
	slices.Sort(ends)
	docs, at := []int{}, 0
	for _, end := range slices.Compact(ends) {
		if end > at {
			docs, at = append(docs, end-at), end
		}
	}
	return docs, nil
}
