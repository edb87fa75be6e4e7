package attentiontest

import (
	"bytes"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// An inputs holds the numbers of a case, row-major, exact in the type that the kernel gets.
type inputs struct {
	q, k, v, do      []float64
	dk, dv           []float64 // gradients before the backward pass, if started
	otherDK, otherDV []float64 // gradients from elsewhere
	slopes, bias     []float64 // terms of the scores
	started, folded  bool
	fresh            partition.Range
}

func (c Case) inputs(rng *rand.Rand, dtype tensor.DType) inputs {
	spread := c.Spread
	if spread == 0 {
		spread = 1
	}
	draw := func(shape [4]int, spread float64, t tensor.DType) []float64 {
		xs := make([]float64, shape[0]*shape[1]*shape[2]*shape[3])
		for i := range xs {
			xs[i] = near.Round(rng.NormFloat64()*spread, t)
		}
		return xs
	}
	acc := attention.AccumulatorType(dtype)
	q, k, v, o, _ := c.shapes()
	in := inputs{
		q: draw(q, spread, dtype), k: draw(k, spread, dtype), v: draw(v, 1, dtype), do: draw(o, 1, dtype),
		dk: draw(k, 1, acc), dv: draw(v, 1, acc), otherDK: draw(k, 1, acc), otherDV: draw(v, 1, acc),
		started: c.Started, folded: c.Folded, fresh: c.fresh(),
	}
	in.slopes, in.bias = c.scoreInputs(rng, acc)
	if c.Level != 0 {
		level(in.q, c.Dim, 4)
		level(in.k, c.Dim, near.Round(c.Level/(4*c.Softmax.Scale), dtype))
	}
	return in
}

// level sets the first element of each row.
func level(rows []float64, dim int, x float64) {
	for i := 0; i < len(rows); i += dim {
		rows[i] = x
	}
}

func (c Case) shapes() (q, k, v, o, row [4]int) {
	return [4]int{c.Batch, c.SeqQ, c.Heads, c.Dim}, [4]int{c.Batch, c.SeqK, c.KVHeads, c.Dim},
		[4]int{c.Batch, c.SeqK, c.KVHeads, c.DimV}, [4]int{c.Batch, c.SeqQ, c.Heads, c.DimV},
		[4]int{c.Batch, c.SeqQ, c.Heads, 1}
}

// scoreMagnitude returns the largest sum of |scale q_d k_d|. The rounding of a score is relative to it.
func (c Case) scoreMagnitude(in inputs) float64 {
	norm := func(xs []float64) float64 {
		largest := 0.0
		for i := 0; i+c.Dim <= len(xs); i += c.Dim {
			sum := 0.0
			for _, x := range xs[i : i+c.Dim] {
				sum += x * x
			}
			largest = max(largest, sum)
		}
		return math.Sqrt(largest)
	}
	// By Cauchy and Schwarz; the largest pair comes within a small factor of it.
	return math.Abs(c.Softmax.Scale) * norm(in.q) * norm(in.k)
}

// A set holds the tensors of one run of a case, with their buffers.
type set struct {
	q, k, v, do tensor.View
	acc         attention.Partial
	out         tensor.View // of the type of q, which End sets; acc.O if the types agree
	delta       tensor.View
	grads       attention.Grads
	other       attention.KeyGrads // from elsewhere, to be folded
	scored
	buffers []*tensor.Host
}

func newSet(c Case, l Layout, dtype tensor.DType) *set {
	s := &set{}
	acc := attention.AccumulatorType(dtype)
	q, k, v, o, row := c.shapes()
	if l == Interleaved && c.SeqQ == c.SeqK {
		s.q, s.k, s.v = s.interleave(dtype, q, k, v)
		s.grads.DQ, s.grads.DK, s.grads.DV = s.interleave(acc, q, k, v)
	} else {
		s.q, s.k, s.v = s.place(l, dtype, q), s.place(l, dtype, k), s.place(l, dtype, v)
		s.grads = attention.Grads{DQ: s.place(l, acc, q), DK: s.place(l, acc, k), DV: s.place(l, acc, v)}
	}
	s.do, s.delta = s.place(l, dtype, o), s.place(l, acc, row)
	s.acc = attention.Partial{O: s.place(l, acc, o), LSE: s.place(l, acc, row)}
	s.other = attention.KeyGrads{DK: s.place(l, acc, k), DV: s.place(l, acc, v)}
	s.placeScores(c, l, acc)
	s.out = s.acc.O
	if dtype != acc {
		s.out = s.place(l, dtype, o)
	}
	return s
}

// sentinel fills every byte of a buffer before the case's numbers come: NaN in all float types, so that reads and
// writes outside a view show.
const sentinel = 0xff

func (s *set) buffer(elements int, dtype tensor.DType) *tensor.Host {
	h := tensor.NewHost(int64(elements * dtype.Size()))
	b := tensor.Bytes(tensor.Dense(h, tensor.U8, 0, [4]int{1, 1, 1, int(h.Bytes())}))
	for i := range b {
		b[i] = sentinel
	}
	s.buffers = append(s.buffers, h)
	return h
}

func (s *set) place(l Layout, dtype tensor.DType, n [4]int) tensor.View {
	switch l {
	case Dense:
		return tensor.Dense(s.buffer(n[0]*n[1]*n[2]*n[3], dtype), dtype, 0, n)
	case HeadsFirst:
		stride := [4]int64{int64(n[2] * n[1] * n[3]), int64(n[3]), int64(n[1] * n[3]), 1}
		return tensor.NewView(s.buffer(n[0]*n[1]*n[2]*n[3], dtype), dtype, 0, n, stride)
	}
	const before, after = 7, 11
	head := n[3] + 3
	position := n[2]*head + 5
	batch := n[1]*position + 2
	mem := s.buffer(before+n[0]*batch+after, dtype)
	return tensor.NewView(mem, dtype, before, n, [4]int64{int64(batch), int64(position), int64(head), 1})
}

// interleave makes three views of one buffer. A position has its q heads, k heads and v heads side by side.
func (s *set) interleave(dtype tensor.DType, q, k, v [4]int) (qv, kv, vv tensor.View) {
	nq, nk, nv := q[2]*q[3], k[2]*k[3], v[2]*v[3]
	position := nq + nk + nv
	mem := s.buffer(q[0]*q[1]*position, dtype)
	at := func(off int, n [4]int) tensor.View {
		return tensor.NewView(mem, dtype, int64(off), n,
			[4]int64{int64(n[1] * position), int64(position), int64(n[3]), 1})
	}
	return at(0, q), at(nq, k), at(nq+nk, v)
}

// fill writes the numbers; fresh gradients keep their sentinels.
func (s *set) fill(in inputs) {
	write(s.q, in.q)
	write(s.k, in.k)
	write(s.v, in.v)
	write(s.do, in.do)
	if !s.slopes.IsZero() {
		write(s.slopes, in.slopes)
	}
	if !s.bias.IsZero() {
		write(s.bias, in.bias)
	}
	if in.folded {
		write(s.other.DK, in.otherDK)
		write(s.other.DV, in.otherDV)
	}
	if in.started {
		for _, x := range []struct {
			v  tensor.View
			xs []float64
		}{{s.grads.DK, in.dk}, {s.grads.DV, in.dv}} {
			write(x.v, x.xs)
			rows := x.v.Slice(tensor.Seq, in.fresh.Lo, in.fresh.Hi)
			write(rows, slices.Repeat([]float64{math.NaN()}, rows.Size()))
		}
	}
}

func (s *set) views() []*tensor.View {
	return append(s.scored.views(), &s.q, &s.k, &s.v, &s.do, &s.delta, &s.acc.O, &s.out, &s.acc.LSE, &s.grads.DQ,
		&s.grads.DK, &s.grads.DV, &s.other.DK, &s.other.DV)
}

// upload returns the set on the rig's device; on the host it returns the set itself.
func (s *set) upload(rig Rig) (*set, error) {
	d := *s
	return &d, rig.move(s.buffers, d.views())
}

// move copies buffers to the device and points their views at the copies.
func (r *Rig) move(buffers []*tensor.Host, views []*tensor.View) error {
	if r.Upload == nil {
		return nil
	}
	copies, err := r.Upload(buffers)
	if err != nil {
		return err
	}
	there := map[tensor.Memory]tensor.Memory{}
	for i, h := range buffers {
		there[h] = copies[i]
	}
	for _, v := range views {
		*v = tensor.NewView(there[v.Memory()], v.DType(), v.Offset(), v.Shape(), v.Strides())
	}
	return nil
}

// fetch copies the memory of views on the device to that of their counterparts here.
func (r *Rig) fetch(here, there []*tensor.View) error {
	if r.Download == nil {
		return nil
	}
	var dst []*tensor.Host
	var src []tensor.Memory
	for i, v := range there {
		if !slices.Contains(src, v.Memory()) {
			dst, src = append(dst, here[i].Memory().(*tensor.Host)), append(src, v.Memory())
		}
	}
	return r.Download(dst, src)
}

type result struct {
	name string
	view tensor.View
}

func (s *set) results() []result {
	list := []result{{"out", s.out}, {"lse", s.acc.LSE}, {"delta", s.delta}, {"dq", s.grads.DQ}, {"dk", s.grads.DK},
		{"dv", s.grads.DV}}
	if !s.dbias.IsZero() {
		list = append(list, result{"dbias", s.dbias})
	}
	if !s.largest.IsZero() {
		list = append(list, result{"max", s.largest})
	}
	return list
}

// checkSentinels fails where anything was written between or around the views.
func (s *set) checkSentinels(t *testing.T) {
	t.Helper()
	for _, h := range s.buffers {
		rest := slices.Clone(tensor.Bytes(tensor.Dense(h, tensor.U8, 0, [4]int{1, 1, 1, int(h.Bytes())})))
		for _, v := range s.views() {
			if v.Memory() != tensor.Memory(h) {
				continue
			}
			n, size := v.Len(tensor.Dim), int64(v.DType().Size())
			row := bytes.Repeat([]byte{sentinel}, n*int(size)) // in all layouts, its elements are side by side
			each(v.Slice(tensor.Dim, 0, min(1, n)), func(at int64, _ [4]int) { copy(rest[(v.Offset()+at)*size:], row) })
		}
		if i := slices.IndexFunc(rest, func(x byte) bool { return x != sentinel }); i >= 0 {
			t.Errorf("byte %d of a buffer of %d bytes, in no view, was written", i, len(rest))
			return
		}
	}
}

// each visits the elements of a view in row-major order with their index from its first one.
func each(v tensor.View, visit func(at int64, coord [4]int)) {
	n, stride := v.Shape(), v.Strides()
	for b := range n[0] {
		for s := range n[1] {
			for h := range n[2] {
				for d := range n[3] {
					visit(int64(b)*stride[0]+int64(s)*stride[1]+int64(h)*stride[2]+int64(d)*stride[3],
						[4]int{b, s, h, d})
				}
			}
		}
	}
}

func write(v tensor.View, xs []float64) {
	shape := v.Shape()
	dense := tensor.New(v.DType(), shape[:]...)
	near.Encode(dense, xs)
	tensor.Copy(v, dense)
}

func read(v tensor.View) []float64 {
	shape := v.Shape()
	dense := tensor.New(v.DType(), shape[:]...)
	tensor.Copy(dense, v)
	return near.Decode(dense)
}
