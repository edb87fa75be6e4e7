package attentiontest

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/tensor"
)

// TestSinks runs the suite of attention.Sinks on those from newRig, over element types of o and do.
// Results are held against sums over scores in float64, which know nothing of the fold.
func TestSinks(t *testing.T, newRig func(testing.TB) (Rig, attention.Sinks), dtypes ...tensor.DType) {
	rig, sinks := newRig(t)
	for _, dtype := range dtypes {
		for n, c := range []struct {
			batch, seq, heads, dim int
			layout                 Layout
			sink                   float64 // of head 0; others are drawn
		}{
			{1, 1, 1, 1, Dense, 0}, {2, 37, 3, 40, Dense, 1.5}, {2, 37, 3, 40, HeadsFirst, -3},
			{2, 70, 5, 33, Padded, 0},
			{1, 300, 2, 128, Dense, -200}, {1, 9, 2, 8, Dense, 300}, {1, 9, 2, 8, Dense, math.Inf(-1)},
			{1, 0, 2, 8, Dense, 0},
		} {
			t.Run(fmt.Sprintf("%v/%d", dtype, n), func(t *testing.T) {
				s := newSinkSet(rand.New(rand.NewPCG(uint64(n), 3)), c.layout, dtype,
					[4]int{c.batch, c.seq, c.heads, c.dim}, c.sink)
				s.check(t, rig, sinks)
			})
		}
	}
	t.Run("not finite", func(t *testing.T) { checkPoisonedSinks(t, rig, sinks, dtypes) })
	t.Run("faults", func(t *testing.T) {
		s := newSinkSet(rand.New(rand.NewPCG(9, 3)), Dense, tensor.F32, [4]int{1, 4, 2, 8}, 0)
		device, err := s.upload(rig)
		must(t, err)
		if sinks.FoldSink(device.o, device.lse, device.sink.Slice(tensor.Heads, 0, 1)) == nil {
			t.Error("FoldSink took a sink of fewer heads")
		}
		if sinks.SinkGrad(device.dsink, device.do.Slice(tensor.Seq, 0, 3), device.o, device.lse, device.sink) == nil {
			t.Error("SinkGrad took a do of fewer rows")
		}
	})
}

// A sinkSet holds the tensors of a case. It has no keys: any o and lse belong to some keys.
type sinkSet struct {
	set
	o, do, lse, sink, dsink tensor.View
}

func newSinkSet(rng *rand.Rand, l Layout, dtype tensor.DType, shape [4]int, first float64) *sinkSet {
	acc := attention.AccumulatorType(dtype)
	s := &sinkSet{}
	row := shape
	row[3] = 1
	heads := [4]int{1, 1, shape[2], 1}
	s.o, s.do, s.lse = s.place(l, dtype, shape), s.place(l, dtype, shape), s.place(l, acc, row)
	s.sink, s.dsink = s.place(Dense, acc, heads), s.place(Dense, acc, heads)
	draw := func(v tensor.View, spread float64) {
		xs := make([]float64, v.Size())
		for i := range xs {
			xs[i] = near.Round(rng.NormFloat64()*spread, v.DType())
		}
		if v == s.sink {
			xs[0] = first
		}
		write(v, xs)
	}
	draw(s.o, 1)
	draw(s.do, 1)
	draw(s.lse, 3)
	draw(s.sink, 2)
	if shape[1] > 2 { // a row that saw no key
		lse, o := s.lse.Slice(tensor.Seq, 1, 2), s.o.Slice(tensor.Seq, 1, 2)
		write(lse, slices.Repeat([]float64{math.Inf(-1)}, lse.Size()))
		write(o, make([]float64, o.Size()))
	}
	return s
}

func (s *sinkSet) views() []*tensor.View {
	return []*tensor.View{&s.o, &s.do, &s.lse, &s.sink, &s.dsink}
}

func (s *sinkSet) upload(rig Rig) (*sinkSet, error) {
	d := *s
	return &d, rig.move(s.buffers, d.views())
}

// want computes o, lse and dsink from the sums of exponentials.
func (s *sinkSet) want() (o, lse, dsink []float64) {
	o, lse = read(s.o), read(s.lse)
	do, sink := read(s.do), read(s.sink)
	n := s.o.Shape()
	dsink = make([]float64, n[2])
	for row := range lse {
		h := row % n[2]
		m := max(lse[row], sink[h])
		if math.IsInf(m, -1) {
			continue
		}
		keys, extra := math.Exp(lse[row]-m), math.Exp(sink[h]-m)
		sum := 0.0
		for d := range n[3] {
			o[row*n[3]+d] *= keys / (keys + extra)
			sum += o[row*n[3]+d] * do[row*n[3]+d]
		}
		lse[row] = m + math.Log(keys+extra)
		dsink[h] -= extra / (keys + extra) * sum
	}
	return o, lse, dsink
}

// checkPoisonedSinks holds that a NaN or infinity of o, do or lse reaches the elements that depend on it alone.
func checkPoisonedSinks(t *testing.T, rig Rig, sinks attention.Sinks, dtypes []tensor.DType) {
	for _, dtype := range dtypes {
		for _, value := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
			for row := range 9 {
				s := newSinkSet(rand.New(rand.NewPCG(uint64(row), 3)), Dense, dtype, [4]int{1, 9, 2, 8}, 0)
				at := s.o
				switch {
				case row%3 == 1:
					at = s.do
				case row%3 == 2 && math.IsNaN(value): // an LSE is never infinite, except for rows without keys
					at = s.lse
				}
				at = at.Slice(tensor.Seq, row, row+1).Slice(tensor.Heads, row%2, row%2+1)
				write(at.Slice(tensor.Dim, at.Len(tensor.Dim)-1, at.Len(tensor.Dim)), []float64{value})
				s.check(t, rig, sinks)
			}
		}
	}
}

func (s *sinkSet) check(t *testing.T, rig Rig, sinks attention.Sinks) {
	t.Helper()
	o, lse, dsink := s.want()
	device, err := s.upload(rig)
	must(t, err)
	must(t, sinks.FoldSink(device.o, device.lse, device.sink))
	must(t, sinks.SinkGrad(device.dsink, device.do, device.o, device.lse, device.sink))
	if rig.Sync != nil {
		must(t, rig.Sync(context.Background()))
	}
	must(t, rig.fetch(s.views(), device.views()))
	tolerance := map[tensor.DType]float64{tensor.F64: 1e-13, tensor.F32: 4e-6, tensor.F16: 2e-3,
		tensor.BF16: 1e-2}[s.o.DType()]
	compare := func(name string, v tensor.View, want []float64, scale float64) {
		got := read(v)
		broken := func(x float64) bool { return !finite(x) && !(name == "lse" && math.IsInf(x, -1)) }
		for i := range want {
			if broken(want[i]) && broken(got[i]) { // not always alike
				want[i], got[i] = 0, 0
			}
		}
		report(t, name, v, got, want, scale, func(int) float64 { return tolerance })
	}
	if s.o.Size() > 0 {
		compare("o", s.o, o, largest(o))
		compare("lse", s.lse, lse, largest(lse))
	}
	compare("dsink", s.dsink, dsink, largest(dsink)+math.Sqrt(float64(s.o.Rows())))
}
