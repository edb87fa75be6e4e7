//go:build cuda

package kernels

import (
	"context"
	"encoding/binary"
	"fmt"
	"unsafe"

	"github.com/cprun/cprun/internal/cuda"
	"github.com/cprun/cprun/internal/cuda/dnn"
	"github.com/cprun/cprun/internal/tensor"
)

// A packed call of cuDNN has a sequence for each piece and batch. They lie in the tensors at
// offsets that the device reads, and have lengths that it reads; the plan knows only how many
// they are and how long at most. Both are rounded up, and sequences of length 0 added, so that
// other documents find the plan that these have built.

// leastLength is what the longest sequence of a packed problem counts as at least.
const leastLength = 64

// packed is the problem of a packed group.
func (f *Fused) packed(c *fusedCall, g *fusedGroup) dnn.Desc {
	d := f.problem(c)
	d.Batch, d.Mask = bucket(c.batch()*len(g.pieces)), g.mask
	for _, p := range g.pieces {
		d.SeqQ, d.SeqK = max(d.SeqQ, p.Q.Len()), max(d.SeqK, p.K.Len())
	}
	d.SeqQ = min(bucket(max(d.SeqQ, leastLength)), max(d.SeqQ, c.q.Len(tensor.Seq)))
	d.SeqK = bucket(max(d.SeqK, leastLength))
	d.TotalQ, d.TotalK = c.batch()*c.q.Len(tensor.Seq), bucket(c.batch()*max(g.keys.Len(), leastLength))
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

// packedTensor says how the rows of a tensor lie: those of a part begin with the first row of
// the group, others with row 0.
type packedTensor struct {
	used, keys, part bool
	at               axisStrides
}

// layout is that of all tensors of a packed call.
func (g *fusedGroup) layout(c *fusedCall) [dnn.Tensors]packedTensor {
	var l [dnn.Tensors]packedTensor
	rows, keys := g.rows.Len(), g.keys.Len()
	l[dnn.Q] = packedTensor{used: true, at: stridesOf(c.q)}
	l[dnn.K] = packedTensor{used: true, keys: true, at: stridesOf(c.k)}
	l[dnn.V] = packedTensor{used: true, keys: true, at: stridesOf(c.v)}
	if !c.backward {
		l[dnn.O] = packedTensor{used: true, part: true, at: denseRows(rows, c.heads(), c.dimV())}
		l[dnn.Stats] = packedTensor{used: true, part: true, at: denseRows(rows, c.heads(), 1)}
		return l
	}
	l[dnn.O] = packedTensor{used: true, at: stridesOf(c.saved.O)}
	l[dnn.DO] = packedTensor{used: true, at: stridesOf(c.do)}
	l[dnn.Stats] = packedTensor{used: true, at: denseRows(c.q.Len(tensor.Seq), c.heads(), 1)}
	l[dnn.DQ] = packedTensor{used: true, part: true, at: denseRows(rows, c.heads(), c.dim())}
	l[dnn.DK] = packedTensor{used: true, keys: true, part: true, at: denseRows(keys, c.kvHeads(), c.dim())}
	l[dnn.DV] = packedTensor{used: true, keys: true, part: true, at: denseRows(keys, c.kvHeads(), c.dimV())}
	return l
}

// forwardPacked is one call of cuDNN for a group.
func (f *Fused) forwardPacked(c *fusedCall, g *fusedGroup, held fusedPart) error {
	var at dnn.Pointers
	at[dnn.O], at[dnn.Stats] = held.x, held.lse
	return f.executePacked(c, g, &at)
}

// backwardPacked is the same for gradients.
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
	whole := g.rows
	whole.Lo, whole.Hi = 0, c.q.Len(tensor.Seq)
	var at dnn.Pointers
	at[dnn.O], at[dnn.DO] = cuda.Addr(c.saved.O), cuda.Addr(c.do)
	at[dnn.Stats] = f.stats(c, whole, denseRows(whole.Len(), c.heads(), 1))
	at[dnn.DQ], at[dnn.DK], at[dnn.DV] = dq, dk, dv
	if err := f.executePacked(c, g, &at); err != nil {
		return err
	}
	sum.add(dk, dv, g.keys, last)
	return nil
}

func (f *Fused) executePacked(c *fusedCall, g *fusedGroup, at *dnn.Pointers) error {
	d := f.packed(c, g)
	at[dnn.Q], at[dnn.K], at[dnn.V] = cuda.Addr(c.q), cuda.Addr(c.k), cuda.Addr(c.v)
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

// packedTable is the offsets of every tensor that is used, int64, and the lengths, int32.
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
				if !s.part {
					from = 0
				}
				at := int64(batch)*s.at[0] + int64(row.Lo-from)*s.at[1]
				out, end = binary.LittleEndian.AppendUint64(out, uint64(at)), at+int64(row.Len())*s.at[1]
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

// fusedTables are small tables on the device. There are two halves; one is filled while the device
// reads the other. A table that is still there is not sent again: the layers of a step ask for
// the same ones.
type fusedTables struct {
	host  *cuda.Pinned
	mem   *cuda.Memory
	half  int
	at    int64
	known map[string]uint64
	used  [2]tensor.Event // when the device was done with a half; nil: never
}

const tableBytes = 4 << 20 // of a half

// upload is the address of the table on the device.
func (t *fusedTables) upload(s *cuda.Stream, table []byte) (uint64, error) {
	if p, ok := t.known[string(table)]; ok {
		return p, nil
	}
	n := int64(len(table))
	if n > tableBytes {
		return 0, fmt.Errorf("%d bytes of offsets of packed documents, with room for %d; use longer documents or the flash backend", n, tableBytes)
	}
	if t.mem == nil {
		if err := t.open(s.Device()); err != nil {
			return 0, err
		}
	}
	if t.at+n > tableBytes {
		t.used[t.half] = s.Record()
		t.half, t.at = 1-t.half, 0
		if e := t.used[t.half]; e != nil { // long ago, unless documents are very many
			if err := e.Sync(context.Background()); err != nil {
				return 0, err
			}
		}
		clear(t.known)
	}
	off := int64(t.half)*tableBytes + t.at
	bytes := tensor.Dense(t.host.Host(), tensor.U8, off, [4]int{1, 1, 1, int(n)})
	copy(tensor.Bytes(bytes), table)
	p := cuda.Addr(tensor.Dense(t.mem, tensor.U8, off, [4]int{1, 1, 1, int(n)}))
	s.Copy(p, uint64(uintptr(unsafe.Pointer(unsafe.SliceData(tensor.Bytes(bytes))))), n)
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
