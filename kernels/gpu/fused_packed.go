//go:build cuda

package gpu

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/internal/base/cuda/dnn"
	"github.com/cprun/cprun/tensor"
)

// A packed call of cuDNN has one sequence for each piece and batch element. The device reads their offsets and lengths;
// the plan contains only their number and the largest length. Both are rounded up, and sequences of length 0 fill the
// batch, so that other documents can reuse the plan.

// In a backward pass, cuDNN uses the offsets of Q for dQ, of K for dK and of V for dV. So each pair has equal strides
// and equal offsets from the group's first row. Tensors that are not dense take one call per piece.

// takes reports whether a call can use packed sequences.
func (p packing) takes(c *fusedCall) bool {
	if !c.backward {
		return true
	}
	for _, v := range []View{c.q, c.k, c.v, c.do, c.saved.O} {
		at := denseRows(v.Len(tensor.Seq), v.Len(tensor.Heads), v.Len(tensor.Dim))
		if v.Stride(tensor.Seq) != at[1] || v.Len(tensor.Heads) > 1 && v.Stride(tensor.Heads) != at[2] ||
			v.Len(tensor.Batch) > 1 && v.Stride(tensor.Batch) != at[0] {
			return false
		}
	}
	return p.grads(c.dim(), c.dimV())
}

// packed returns the problem of a packed group.
func (f *Fused) packed(c *fusedCall, g *fusedGroup) dnn.Desc {
	d := f.problem(c)
	least := f.packing.least
	d.Batch, d.Mask, d.Loose = bucket(c.batch()*len(g.pieces)), g.mask, f.packing.loose
	for _, p := range g.pieces {
		d.SeqQ, d.SeqK = max(d.SeqQ, p.Q.Len()), max(d.SeqK, p.K.Len())
	}
	d.SeqQ = min(bucket(max(d.SeqQ, least)), max(least, c.q.Len(tensor.Seq)))
	d.SeqK = bucket(max(d.SeqK, least))
	d.TotalQ, d.TotalK = c.batch()*max(c.q.Len(tensor.Seq), least), bucket(c.batch()*max(g.keys.Len(), least))
	for t, s := range g.layout(c) {
		if s.used {
			longest := d.SeqQ
			if s.keys {
				longest = d.SeqK
			}
			d.Strides[t] = [3]int64{int64(longest) * max(s.at[1], s.at[2]), s.at[1], s.at[2]}
		}
	}
	return d
}

// A packedTensor describes the layout of a tensor, relative to the group's first row.
type packedTensor struct {
	used, keys bool
	at         axisStrides
}

// layout returns the layout of all tensors of a packed call.
func (g *fusedGroup) layout(c *fusedCall) [dnn.Tensors]packedTensor {
	var l [dnn.Tensors]packedTensor
	rows, keys := g.rows.Len(), g.keys.Len()
	l[dnn.Q] = packedTensor{used: true, at: stridesOf(c.q)}
	l[dnn.K] = packedTensor{used: true, keys: true, at: stridesOf(c.k)}
	l[dnn.V] = packedTensor{used: true, keys: true, at: stridesOf(c.v)}
	if !c.backward {
		l[dnn.O] = packedTensor{used: true, at: denseRows(rows, c.heads(), c.dimV())}
		l[dnn.Stats] = packedTensor{used: true, at: denseRows(rows, c.heads(), 1)}
		return l
	}
	l[dnn.O] = packedTensor{used: true, at: stridesOf(c.saved.O)}
	l[dnn.DO] = packedTensor{used: true, at: stridesOf(c.do)}
	l[dnn.Stats] = packedTensor{used: true, at: denseRows(rows, c.heads(), 1)}
	l[dnn.DQ] = packedTensor{used: true, at: denseRows(rows, c.heads(), c.dim())}
	l[dnn.DK] = packedTensor{used: true, keys: true, at: denseRows(keys, c.kvHeads(), c.dim())}
	l[dnn.DV] = packedTensor{used: true, keys: true, at: denseRows(keys, c.kvHeads(), c.dimV())}
	return l
}

func (f *Fused) forwardPacked(c *fusedCall, g *fusedGroup, held fusedPart) error {
	var at dnn.Pointers
	at[dnn.O], at[dnn.Stats] = held.x, held.lse
	return f.executePacked(c, g, &at)
}

// backwardPacked does the same for gradients.
func (f *Fused) backwardPacked(c *fusedCall, g *fusedGroup, dq uint64, sum *keySum, last bool) error {
	dk, dv, err := f.keyGrads(c, g.keys.Len())
	if err != nil {
		return err
	}
	if g.keyGaps() {
		n := int64(c.batch()*g.keys.Len()*c.kvHeads()) * 2
		f.stream.Memset(dk, 0, n*int64(c.dim()))
		f.stream.Memset(dv, 0, n*int64(c.dimV()))
	}
	var at dnn.Pointers
	at[dnn.O], at[dnn.DO] = seqRows(c.saved.O, g.rows).Addr(), seqRows(c.do, g.rows).Addr()
	at[dnn.Stats] = f.stats(c, g.rows, denseRows(g.rows.Len(), c.heads(), 1))
	at[dnn.DQ], at[dnn.DK], at[dnn.DV] = dq, dk, dv
	if err := f.executePacked(c, g, &at); err != nil {
		return err
	}
	sum.add(dk, dv, g.keys, last)
	return nil
}

func (f *Fused) executePacked(c *fusedCall, g *fusedGroup, at *dnn.Pointers) error {
	d := f.packed(c, g)
	at[dnn.Q] = seqRows(c.q, g.rows).Addr()
	at[dnn.K], at[dnn.V] = seqRows(c.k, g.keys).Addr(), seqRows(c.v, g.keys).Addr()
	table := packedTable(c, g, d.Batch)
	p, err := f.tables.upload(f.stream, table)
	if err != nil {
		return err
	}
	for t, s := range g.layout(c) {
		if s.used {
			at[dnn.Offsets(dnn.Tensor(t))] = p
			p += uint64(d.Batch+1) * 8
		}
	}
	at[dnn.LensQ], at[dnn.LensK] = p, p+uint64(d.Batch)*4
	return f.execute(d, at)
}

// packedTable returns the offsets of every used tensor, int64, and the lengths, int32.
func packedTable(c *fusedCall, g *fusedGroup, n int) []byte {
	var out []byte
	for _, s := range g.layout(c) {
		if !s.used {
			continue
		}
		end := int64(0)
		for i := range n + 1 {
			if i < c.batch()*len(g.pieces) {
				batch, p := i/len(g.pieces), g.pieces[i%len(g.pieces)]
				row, from := p.Q, g.rows.Lo
				if s.keys {
					row, from = p.K, g.keys.Lo
				}
				at := int64(batch)*s.at[0] + int64(row.Lo-from)*s.at[1]
				out, end = binary.LittleEndian.AppendUint64(out, uint64(at)), max(end, at+int64(row.Len())*s.at[1])
				continue
			}
			out = binary.LittleEndian.AppendUint64(out, uint64(end))
		}
	}
	for _, keys := range []bool{false, true} {
		for i := range n {
			length := 0
			if i < c.batch()*len(g.pieces) {
				p := g.pieces[i%len(g.pieces)]
				if length = p.Q.Len(); keys {
					length = p.K.Len()
				}
			}
			out = binary.LittleEndian.AppendUint32(out, uint32(length))
		}
	}
	return out
}

// fusedTables keeps small tables on the device, in two halves: the host fills one while the device reads the other. It
// does not send a known table again, since the layers of a step use the same ones.
type fusedTables struct {
	host  *cuda.Pinned
	mem   *cuda.Memory
	half  int
	at    int64
	known map[string]uint64
	used  [2]tensor.Event // the device's last use of a half; nil: never
}

const tableBytes = 4 << 20 // size of a half

// upload returns the address of the table on the device.
func (t *fusedTables) upload(s *cuda.Stream, table []byte) (uint64, error) {
	if p, ok := t.known[string(table)]; ok {
		return p, nil
	}
	n := int64(len(table))
	if n > tableBytes {
		return 0, fmt.Errorf("offsets of packed documents take %d bytes, more than %d; use longer documents or the "+
			"flash backend", n, tableBytes)
	}
	if t.mem == nil {
		if err := t.open(s.Device()); err != nil {
			return 0, err
		}
	}
	if t.at+n > tableBytes {
		t.used[t.half] = s.Record()
		t.half, t.at = 1-t.half, 0
		if e := t.used[t.half]; e != nil { // usually long ago
			if err := e.Sync(context.Background()); err != nil {
				return 0, err
			}
		}
		clear(t.known)
	}
	off := int64(t.half)*tableBytes + t.at
	bytes := tensor.Dense(t.host.Host(), tensor.U8, off, [4]int{1, 1, 1, int(n)})
	copy(tensor.Bytes(bytes), table)
	p := t.mem.Addr() + uint64(off)
	s.Copy(p, bytes.Addr(), n)
	t.at = roundUp64(t.at+n, scratchAlign)
	t.known[string(table)] = p
	return p, nil
}

func (t *fusedTables) open(dev *cuda.Device) (err error) {
	if t.host, err = dev.AllocHost(2 * tableBytes); err != nil {
		return err
	}
	t.known = map[string]uint64{}
	t.mem, err = dev.Alloc(2 * tableBytes)
	return err
}
