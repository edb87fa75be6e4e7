package attend

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/internal/model/qkv"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Input describes the tensors q, k and v of a file.
type Input struct {
	Layout   qkv.Layout
	Tensors  []string // tensors in the file: q, k, v; q, kv; qkv
	Declared bool     // the metadata names the layout
	shapes   [][]int
}

var floating = map[safetensors.DType]bool{
	safetensors.F64: true, safetensors.F32: true, safetensors.F16: true, safetensors.BF16: true,
	safetensors.F8E4M3: true, safetensors.F8E5M2: true,
}

func (c *Case) readable(name string) ([]int, error) {
	info, ok := c.file.Info(name)
	switch {
	case !ok:
		return nil, fmt.Errorf("%s: tensor %q is missing; it holds %.64q", c.Path, name,
			c.file.Names()[:min(len(c.file.Names()), 16)])
	case !floating[info.DType]:
		return nil, fmt.Errorf("%s: tensor %q has elements of type %.64s; want F64, F32, F16 or BF16", c.Path, name,
			info.DType)
	case slices.ContainsFunc(info.Shape, func(n int) bool { return n < 1 }):
		return nil, fmt.Errorf("%s: tensor %q has shape %v with an empty axis", c.Path, name, info.Shape)
	}
	return info.Shape, nil
}

// tensors finds q, k and v, their layout and lengths, and dout.
func (c *Case) tensors() error {
	in := &c.Input
	in.Tensors = []string{"q", "k", "v"}
	if c.has("qkv") {
		in.Tensors = []string{"qkv"}
	} else if c.has("kv") {
		in.Tensors = []string{"q", "kv"}
	}
	var errs []error
	for _, name := range []string{"q", "k", "v"} {
		if c.has(name) && !slices.Contains(in.Tensors, name) {
			errs = append(errs, fmt.Errorf("%s: tensor %q is also part of %q; remove one of the two",
				c.Path, name, in.Tensors[len(in.Tensors)-1]))
		}
	}
	for _, name := range in.Tensors {
		s, err := c.readable(name)
		errs = append(errs, err)
		in.shapes = append(in.shapes, s)
	}
	var dout []int
	if c.has("dout") {
		s, err := c.readable("dout")
		if err == nil && len(s) != 4 {
			err = fmt.Errorf("%s: tensor \"dout\" has shape %v; want [batch, seq, heads, head_dim]", c.Path, s)
		}
		errs = append(errs, err)
		dout, c.Backward = s, true
	}
	known, err := c.known()
	if err := errors.Join(append(errs, err)...); err != nil {
		return err
	}
	n, err := c.layoutOf(known, dout)
	if err != nil {
		return fmt.Errorf("%s: %w", c.Path, err)
	}
	c.Batch, c.SeqQ, c.SeqKV = n.Batch, n.SeqQ, n.SeqKV
	c.Heads, c.KVHeads, c.HeadDim, c.HeadDimV = n.Heads, n.KVHeads, n.HeadDim, n.HeadDimV
	if want := output(n); dout != nil && !slices.Equal(dout, want) {
		return fmt.Errorf("%s: dout has shape %v; want that of the output, %v", c.Path, dout, want)
	}
	return nil
}

func (c *Case) has(name string) bool {
	_, ok := c.file.Info(name)
	return ok
}

func output(n qkv.LayoutDims) []int { return []int{n.Batch, n.SeqQ, n.Heads, n.HeadDimV} }

func (c *Case) known() (k qkv.Known, err error) {
	var errs []error
	for name, at := range map[string]*int{"heads": &k.Heads, "kv_heads": &k.KVHeads, "head_dim": &k.HeadDim} {
		s := c.file.Metadata()[name]
		if s == "" {
			continue
		}
		if *at, err = strconv.Atoi(s); err != nil || *at < 1 {
			errs = append(errs, fmt.Errorf("%s: metadata %q is %.64q; want a number of at least 1", c.Path, name, s))
		}
	}
	return k, errors.Join(errs...)
}

// layoutOf returns the lengths of the attention, and sets the layout: from the metadata, or else from the shapes.
func (c *Case) layoutOf(known qkv.Known, dout []int) (n qkv.LayoutDims, err error) {
	in := &c.Input
	if name := c.file.Metadata()["layout"]; name != "" {
		in.Declared = true
		if in.Layout, err = qkv.Named(name); err != nil {
			return n, fmt.Errorf("metadata \"layout\": %w", err)
		}
		if !slices.Equal(in.Layout.Tensors(), in.Tensors) {
			return n, fmt.Errorf("metadata \"layout\": %v needs the tensors %v; the file has %v",
				in.Layout, in.Layout.Tensors(), in.Tensors)
		}
		return c.dims(in.Layout, known, dout)
	}
	if len(in.Tensors) == 3 { // the order of axes is fixed
		in.Layout = qkv.Layout{Q: qkv.THD, KV: qkv.THD}
		if slices.ContainsFunc(in.shapes, func(s []int) bool { return len(s) != 3 }) {
			in.Layout = qkv.Layout{}
			if err := fitting(in.shapes[0], in.shapes[1], in.shapes[2]); err != nil {
				return n, err
			}
		}
		return c.dims(in.Layout, known, dout)
	}
	return c.detect(known, dout)
}

// detect finds the only layout of a packed tensor that fits the shapes. Layouts with equal addresses count as one.
// Layouts with consecutive documents need documents in the metadata. If query and KV heads share an axis, the metadata
// must give their numbers: dout could fit a wrong reading.
func (c *Case) detect(known qkv.Known, dout []int) (n qkv.LayoutDims, err error) {
	in := &c.Input
	given, _ := parseDocuments(c.file.Metadata()["docs"]) // readMasks reports their faults
	docs := given.tokens()
	var fits []qkv.Layout
	var names []string
	var errs []error
	batchFirst := map[qkv.Packing]bool{}
	for _, l := range qkv.Layouts() {
		if !slices.Equal(l.Tensors(), in.Tensors) || l.Q == qkv.THD && docs == 0 {
			continue
		}
		m, err := c.dims(l, known, dout)
		switch {
		case err != nil:
		case dout != nil && !slices.Equal(output(m), dout):
			err = fmt.Errorf("layout %v gives the output %v, but dout is %v", l, output(m), dout)
		case docs != 0 && docs != m.SeqQ:
			err = fmt.Errorf("layout %v has %d tokens, but the documents have %d", l, m.SeqQ, docs)
		}
		open := l.Packing == qkv.QKVHeads && known.Heads == 0 && known.KVHeads == 0 &&
			(err == nil || errors.Is(err, qkv.ErrHeads))
		if err != nil && !open {
			errs = append(errs, err)
			continue
		}
		if open {
			names = append(names, l.String())
			continue
		}
		// prefer the batch as the first axis, as for separate q, k and v
		if l.Q == qkv.SBHD && batchFirst[l.Packing] {
			continue
		}
		batchFirst[l.Packing] = batchFirst[l.Packing] || l.Q == qkv.BSHD
		if slices.ContainsFunc(fits, func(f qkv.Layout) bool { return m == n && qkv.Alike(f, l, m) }) {
			continue
		}
		fits, names, n = append(fits, l), append(names, l.String()), m
	}
	switch {
	case len(names) > len(fits) || len(fits) > 1:
		more := map[bool]string{true: ", or set heads or kv_heads"}[len(names) > len(fits)]
		return n, fmt.Errorf("shapes %v of %v fit the layouts %s; name one in metadata \"layout\"%s", in.shapes,
			in.Tensors, strings.Join(names, " and "), more)
	case len(fits) == 0:
		return n, fmt.Errorf("shapes %v of %v fit no layout; name it in metadata \"layout\":\n%w",
			in.shapes, in.Tensors, errors.Join(errs...))
	}
	in.Layout = fits[0]
	return n, nil
}

// fitting checks the shapes of q, k and v [batch, seq, heads, head_dim].
func fitting(q, k, v []int) error {
	var errs []error
	fault := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	for i, s := range [][]int{q, k, v} {
		if len(s) != 4 {
			fault("tensor %q has shape %v; want [batch, seq, heads, head_dim], or metadata \"layout\"", "qkv"[i:i+1], s)
		}
	}
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	if k[0] != q[0] || k[3] != q[3] {
		fault("k %v does not fit q %v: batch and head_dim must be equal", k, q)
	}
	if v[0] != k[0] || v[1] != k[1] || v[2] != k[2] {
		fault("v %v does not fit k %v: batch, seq_kv and kv_heads must be equal", v, k)
	}
	if q[2]%k[2] != 0 {
		fault("%d query heads are not a multiple of %d KV heads", q[2], k[2])
	}
	return errors.Join(errs...)
}

// dims returns the lengths of the attention in a layout. Queries as consecutive documents (thd) with keys as a batch
// form a batch of documents of equal length, with the Batch and SeqQ of the keys.
func (c *Case) dims(l qkv.Layout, known qkv.Known, dout []int) (qkv.LayoutDims, error) {
	if l.Packing == qkv.QKVHeads && known.Heads == 0 && known.KVHeads == 0 && dout != nil {
		known.Heads = dout[2] // the output has as many heads as q
	}
	n, err := l.Dims(c.Input.shapes, known)
	if err != nil || l.Q != qkv.THD || n.Batch == 1 {
		return n, err
	}
	if n.SeqQ != n.Batch*n.SeqKV || c.file.Metadata()["docs"] == "" {
		return n, fmt.Errorf("layout %v has %d queries in all, and keys of batch %d by %d tokens; this build needs "+
			"equal numbers in each document, and metadata \"docs\"",
			l, n.SeqQ, n.Batch, n.SeqKV)
	}
	n.SeqQ = n.SeqKV
	c.batches = true
	return n, nil
}

// own reads only this rank's rows of q, k and v into host memory of type t, in the layout of the file.
func (c *Case) own(t tensor.DType, qs, ks []partition.Span) (*qkv.QKV, error) {
	layout := c.Input.Layout
	if c.batches {
		layout.Q = qkv.BSHD // consecutive documents of equal length are a batch
	}
	n := qkv.LayoutDims{
		Batch: c.Batch, SeqQ: partition.Count(qs), SeqKV: partition.Count(ks),
		Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim, HeadDimV: c.HeadDimV,
	}
	var tensors []View
	for i, shape := range layout.Shapes(n) {
		format, spans, seq := layout.KV, ks, c.SeqKV
		if i == 0 {
			format, spans, seq = layout.Q, qs, c.SeqQ
		}
		dst := tensor.New(t, among(format, shape)...)
		if err := c.rows(c.Input.Tensors[i], dst, spans, seq); err != nil {
			return nil, err
		}
		tensors = append(tensors, dst)
	}
	return layout.Bind(tensors, n)
}

// among folds a shape to the axes [outer, sequence, 1, inner], to read rows of the sequence.
func among(f qkv.Format, shape []int) []int {
	product := func(s []int) int {
		n := 1
		for _, d := range s {
			n *= d
		}
		return n
	}
	if f == qkv.BSHD {
		return []int{shape[0], shape[1], 1, product(shape[2:])}
	}
	return []int{1, shape[0], 1, product(shape[1:])}
}

// rows reads the rows at spans of a tensor [outer, seq, inner] into dst, for every outer index.
func (c *Case) rows(name string, dst View, spans []partition.Span, seq int) error {
	row := int64(dst.Cols())
	for b := range dst.Len(tensor.Batch) {
		at := 0
		err := eachRun(spans, func(start, n int) error {
			part := dst.Slice(tensor.Batch, b, b+1).Slice(tensor.Seq, at, at+n)
			at += n
			return c.file.ReadInto(name, part, (int64(b)*int64(seq)+int64(start))*row)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// unpack copies the heads of q, k or v, group by group, into a dense view.
func unpack(dst View, three *qkv.QKV, of func(q, k, v View) View) {
	heads := dst.Len(tensor.Heads) / three.Groups()
	for g := range three.Groups() {
		tensor.Copy(dst.Slice(tensor.Heads, g*heads, (g+1)*heads), of(three.Group(g)))
	}
}
