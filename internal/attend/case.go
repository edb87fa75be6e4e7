// Package attend runs one distributed attention, forward and backward, on tensors from a
// file: `cprun attention`. It is how a layout, an algorithm or a kernel is compared with
// anybody else's attention, without a model around it.
package attend

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/safetensors"
	"github.com/cprun/cprun/partition"
)

// Case is an open input: q [batch, seq, heads, head_dim], k [batch, seq_kv, kv_heads,
// head_dim], v [batch, seq_kv, kv_heads, head_dim_v] and dout [batch, seq, heads,
// head_dim_v] in global order, and the mask in the metadata.
type Case struct {
	Path               string
	Batch, SeqQ, SeqKV int
	Heads, KVHeads     int
	HeadDim, HeadDimV  int
	Causal             bool
	Window             int // keys before a query's own; -1: all
	Docs               []int
	Mask               partition.Mask
	Softmax            attention.Softmax
	Backward           bool // dout is there
	file               *safetensors.File
}

// Open reads the header of a case and checks shapes and metadata. Every fault of the file
// is in the error.
func Open(path string) (*Case, error) {
	f, err := safetensors.Open(path)
	if err != nil {
		return nil, err
	}
	c := &Case{Path: path, file: f}
	if err := errors.Join(c.shapes(), c.metadata()); err != nil {
		f.Close()
		return nil, err
	}
	return c, nil
}

// Close closes the file.
func (c *Case) Close() error { return c.file.Close() }

// floating is the element types that are read.
var floating = map[safetensors.DType]bool{
	safetensors.F64: true, safetensors.F32: true, safetensors.F16: true, safetensors.BF16: true,
	safetensors.F8E4M3: true, safetensors.F8E5M2: true,
}

func (c *Case) tensorShape(name string) ([]int, error) {
	info, ok := c.file.Info(name)
	if !ok {
		return nil, fmt.Errorf("%s: tensor %q is missing; it holds %v", c.Path, name, c.file.Names())
	}
	if !floating[info.DType] {
		return nil, fmt.Errorf("%s: tensor %q has elements of type %s; want F64, F32, F16 or BF16", c.Path, name, info.DType)
	}
	if len(info.Shape) != 4 {
		return nil, fmt.Errorf("%s: tensor %q has shape %v; want [batch, seq, heads, head_dim]", c.Path, name, info.Shape)
	}
	for _, n := range info.Shape {
		if n < 1 {
			return nil, fmt.Errorf("%s: tensor %q has shape %v with an empty axis", c.Path, name, info.Shape)
		}
	}
	return info.Shape, nil
}

func (c *Case) shapes() error {
	q, errQ := c.tensorShape("q")
	k, errK := c.tensorShape("k")
	v, errV := c.tensorShape("v")
	if err := errors.Join(errQ, errK, errV); err != nil {
		return err
	}
	c.Batch, c.SeqQ, c.Heads, c.HeadDim = q[0], q[1], q[2], q[3]
	c.SeqKV, c.KVHeads, c.HeadDimV = k[1], k[2], v[3]
	var errs []error
	fault := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf(c.Path+": "+format, args...))
	}
	if k[0] != q[0] || k[3] != q[3] {
		fault("k %v does not fit q %v: batch and head_dim must be the same", k, q)
	}
	if v[0] != k[0] || v[1] != k[1] || v[2] != k[2] {
		fault("v %v does not fit k %v: batch, seq_kv and kv_heads must be the same", v, k)
	}
	if c.Heads%c.KVHeads != 0 {
		fault("%d query heads are not a multiple of %d KV heads", c.Heads, c.KVHeads)
	}
	if _, ok := c.file.Info("dout"); ok {
		c.Backward = true
		want := [4]int{c.Batch, c.SeqQ, c.Heads, c.HeadDimV}
		if d, err := c.tensorShape("dout"); err != nil {
			errs = append(errs, err)
		} else if [4]int(d) != want {
			fault("dout %v is not like the output %v", d, want)
		}
	}
	return errors.Join(errs...)
}

// maskKeys are the metadata that are read.
var maskKeys = []string{"causal", "window", "docs", "softcap", "scale"}

// misnamed finds metadata that were probably meant to be one of maskKeys, such as windw or
// softmax_scale: without it the attention would be another one. Files may say anything else.
func (c *Case) misnamed() error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(c.file.Metadata())) {
		if slices.Contains(maskKeys, name) {
			continue
		}
		meant := config.Nearest(name, maskKeys)
		if i := slices.IndexFunc(maskKeys, func(k string) bool { return strings.Contains(strings.ToLower(name), k) }); meant == "" && i >= 0 {
			meant = maskKeys[i]
		}
		if meant != "" {
			errs = append(errs, fmt.Errorf("%s: metadata %q is unknown; did you mean %s? (the keys are %s)", c.Path, name, meant, strings.Join(maskKeys, ", ")))
		}
	}
	return errors.Join(errs...)
}

func (c *Case) metadata() error {
	m := c.file.Metadata()
	errs := []error{c.misnamed()}
	fault := func(key, want string) {
		errs = append(errs, fmt.Errorf("%s: metadata %q is %q; want %s", c.Path, key, m[key], want))
	}
	var err error
	if s := m["causal"]; s != "" {
		if c.Causal, err = strconv.ParseBool(s); err != nil {
			fault("causal", "true or false")
		}
	}
	c.Window = -1
	if s := m["window"]; s != "" {
		if c.Window, err = strconv.Atoi(s); err != nil {
			fault("window", "the number of keys before a query's own, or nothing")
		}
		c.Window = max(c.Window, -1)
	}
	if s := m["docs"]; s != "" {
		if err := json.Unmarshal([]byte(s), &c.Docs); err != nil {
			fault("docs", "a JSON list of document lengths")
		}
	}
	c.Softmax.Scale = 1 / math.Sqrt(float64(max(c.HeadDim, 1)))
	c.Softmax.Scale = number(m["scale"], c.Softmax.Scale, func() { fault("scale", "a finite number") })
	c.Softmax.Softcap = number(m["softcap"], 0, func() { fault("softcap", "a number of at least 0") })
	if c.Softmax.Softcap < 0 {
		fault("softcap", "a number of at least 0")
	}
	if c.Mask, err = partition.NewMask(c.Causal, c.Window, c.SeqQ, c.SeqKV, c.Docs); err != nil {
		errs = append(errs, fmt.Errorf("%s: metadata \"docs\": %w", c.Path, err))
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
