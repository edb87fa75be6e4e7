package attend

import (
	"github.com/cprun/cprun/internal/model/qkv"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// own reads a rank's rows of q, k and v into host memory of type t, in the layout of the file, and no others.
func (c *Case) own(t tensor.DType, qs, ks []partition.Span) (*qkv.QKV, error) {
	layout := c.Input.Layout
	if c.batches {
		layout.Q = qkv.BSHD // documents of one length, one after another, are a batch
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
	return layout.Place(tensors, n)
}

// among is a shape on the axes [outer, sequence, 1, inner]: rows of the sequence are what is read.
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

// rows reads the rows at spans of a tensor [outer, seq, inner], of every outer element, into dst.
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

// unpack copies the heads of q, of k or of v, group by group, into a dense view of them all.
func unpack(dst View, three *qkv.QKV, of func(q, k, v View) View) {
	heads := dst.Len(tensor.Heads) / three.Groups()
	for g := range three.Groups() {
		tensor.Copy(dst.Slice(tensor.Heads, g*heads, (g+1)*heads), of(three.Group(g)))
	}
}
