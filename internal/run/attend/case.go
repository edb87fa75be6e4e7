// Package attend runs one distributed attention, forward and backward, on tensors from a
// file: `cprun attention`. It is how a layout, an algorithm or a kernel is compared with
// anybody else's attention, without a model around it.
package attend

import (
	"errors"
	"fmt"
	"math"
	"strconv"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/internal/base/terminal"
)

// Case is an open input: q, k and v in one of the layouts of package qkv, dout [batch, seq, heads,
// head_dim_v], all in global order, and the mask in the metadata.
type Case struct {
	Path               string
	Batch, SeqQ, SeqKV int
	Heads, KVHeads     int
	HeadDim, HeadDimV  int
	Masks              Masks
	Softmax            attention.Softmax
	Scores             Scores
	Backward           bool // dout is there
	Input              Input
	file               *safetensors.File
	batches            bool // documents of q are the batch of k and v; see layoutOf
}

// Open reads the header of a case and checks shapes and metadata. Every fault of the file
// is in the error.
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

// read is the case of an open file.
func read(path string, f *safetensors.File) (*Case, error) {
	c := &Case{Path: path, file: f}
	if f.Holes() {
		return nil, fmt.Errorf("%s: most of it are holes that nobody has written; write its tensors whole", path)
	}
	if err := errors.Join(c.understood(), c.tensors()); err != nil {
		return nil, err
	}
	return c, errors.Join(c.metadata(), c.scores())
}

// Needs returns about how many bytes the tensors and the results take, over all ranks. It is no integer,
// since what a file claims may not be one.
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
	return 2 * 4 * n // in float32, and once more on its way
}

// Close closes the file.
func (c *Case) Close() error { return c.file.Close() }

func (c *Case) metadata() error {
	m := c.file.Metadata()
	var errs []error
	fault := func(key, want string) {
		errs = append(errs, fmt.Errorf("%s: metadata %q is %s; want %s", c.Path, key, terminal.Clip(strconv.Quote(m[key]), 80), want))
	}
	var err error
	if c.Masks, err = c.readMasks(); err != nil {
		errs = append(errs, err)
	}
	c.Softmax.Scale = 1 / math.Sqrt(float64(max(c.HeadDim, 1)))
	c.Softmax.Scale = number(m["scale"], c.Softmax.Scale, func() { fault("scale", "a finite number") })
	if c.Softmax.Scale == 0 {
		c.Softmax.Scale = math.Copysign(0, -1) // else it would count as not set
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
