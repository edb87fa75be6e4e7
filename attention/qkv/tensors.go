package qkv

import (
	"github.com/cprun/cprun/tensor"
)

// The axes of a TensorDesc. The heads of a View are split in two, because in a layout such
// as sbg(h/g+2)d the query heads of different groups are not evenly spaced.
const (
	axisBatch = iota
	axisSeq
	axisGroup
	axisHead
	axisDim
	axes
)

var axisNames = [axes]string{"batch", "seq", "group", "head", "dim"}

// TensorDesc is one of q, k and v in memory, on the axes [batch, seq, group, head in the
// group, dim]: a group is one KV head with the query heads that read it. Offset and Strides
// count elements. Packed documents (thd) have batch 1 and their tokens on seq.
type TensorDesc struct {
	Memory  tensor.Memory
	Offset  int64 // of the first element in Memory
	DType   tensor.DType
	Shape   [axes]int
	Strides [axes]int64
}

// QKV is the three inputs of one call in memory: Q, K and V. K and V have one head in a group.
type QKV struct{ Q, K, V TensorDesc }

// Describe returns the description of three views. Where the query heads are no multiple of the
// KV heads the result fits no layout.
func Describe(q, k, v tensor.View) QKV {
	groups := k.Len(tensor.Heads)
	if groups == 0 || q.Len(tensor.Heads)%groups != 0 {
		groups = 1
	}
	return QKV{describe(q, groups), describe(k, k.Len(tensor.Heads)), describe(v, v.Len(tensor.Heads))}
}

// describe splits the heads of v in groups. No heads at all are one group without heads.
func describe(v tensor.View, groups int) TensorDesc {
	groups = max(groups, 1)
	n, stride := v.Shape(), v.Strides()
	heads := n[tensor.Heads] / groups
	return TensorDesc{
		Memory: v.Memory(), Offset: v.Offset(), DType: v.DType(),
		Shape:   [axes]int{n[0], n[1], groups, heads, n[3]},
		Strides: [axes]int64{stride[0], stride[1], int64(heads) * stride[2], stride[2], stride[3]},
	}
}

// group is the view [batch, seq, heads of the group, dim] of group i.
func (d *TensorDesc) group(i int) tensor.View {
	n, s := d.Shape, d.Strides
	return tensor.NewView(d.Memory, d.DType, d.Offset+int64(i)*s[axisGroup],
		[4]int{n[axisBatch], n[axisSeq], n[axisHead], n[axisDim]},
		[4]int64{s[axisBatch], s[axisSeq], s[axisHead], s[axisDim]})
}

// view joins the groups again. ok is false where the heads are not evenly spaced.
func (d *TensorDesc) view() (_ tensor.View, ok bool) {
	n, s := d.Shape, d.Strides
	between := s[axisHead]
	switch {
	case n[axisHead] == 1:
		between = s[axisGroup]
	case n[axisGroup] > 1 && s[axisGroup] != int64(n[axisHead])*s[axisHead]:
		return tensor.View{}, false
	}
	return tensor.NewView(d.Memory, d.DType, d.Offset,
		[4]int{n[axisBatch], n[axisSeq], n[axisGroup] * n[axisHead], n[axisDim]},
		[4]int64{s[axisBatch], s[axisSeq], between, s[axisDim]}), true
}

// Groups returns the number of KV heads.
func (t *QKV) Groups() int { return t.K.Shape[axisGroup] }

// Group returns the three views of one KV head and the query heads that read it. Attention of the
// whole is attention of each group, whatever the layout.
func (t *QKV) Group(i int) (q, k, v tensor.View) {
	return t.Q.group(i), t.K.group(i), t.V.group(i)
}

// Views returns all heads in one view each. ok is false for a q whose heads are not evenly
// spaced, in sbg(h/g+2)d with several groups of several heads: it goes to kernels group by
// group.
func (t *QKV) Views() (q, k, v tensor.View, ok bool) {
	q, okQ := t.Q.view()
	k, okK := t.K.view()
	v, okV := t.V.view()
	if !okQ || !okK || !okV {
		return tensor.View{}, tensor.View{}, tensor.View{}, false
	}
	return q, k, v, true
}
