package attention_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

func draw(rng *rand.Rand, shape ...int) attention.View {
	v := tensor.New(tensor.F64, shape...)
	for i := range tensor.Data[float64](v) {
		tensor.Data[float64](v)[i] = rng.NormFloat64()
	}
	return v
}

// TestGradients holds dq, dk and dv against central differences of sum(out * do).
func TestGradients(t *testing.T) {
	for _, c := range []struct {
		name        string
		seqQ, seqK  int
		mask        partition.Mask
		softcap     float64
		heads, over int
	}{
		{"full", 5, 6, partition.Mask{Band: partition.Full()}, 0, 4, 2},
		{"causal", 6, 6, partition.Mask{Band: partition.Band{Lo: -partition.Unbounded, Hi: 0}}, 0, 2, 1},
		{"soft cap", 5, 5, partition.Mask{Band: partition.Full()}, 1.5, 3, 3},
		{"rows that see nothing", 6, 4, partition.Mask{Band: partition.Band{Lo: -partition.Unbounded, Hi: -2}}, 2, 2,
			2},
		{"documents with a window", 7, 7, partition.Mask{Band: partition.Band{Lo: -1, Hi: 0}, Docs: []int{3, 1, 3}}, 0,
			2, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(3, 4))
			q, k, v := draw(rng, 2, c.seqQ, c.heads, 3), draw(rng, 2, c.seqK, c.over, 3),
				draw(rng, 2, c.seqK, c.over, 2)
			do := draw(rng, 2, c.seqQ, c.heads, 2)
			p := attention.Softmax{Scale: 0.8, Softcap: c.softcap}
			loss := func() float64 {
				acc, _ := attention.Whole[float64](q, k, v, do, c.mask, p)
				sum := 0.0
				for i, y := range tensor.Data[float64](acc.O) {
					sum += y * tensor.Data[float64](do)[i]
				}
				return sum
			}
			_, grads := attention.Whole[float64](q, k, v, do, c.mask, p)
			for _, g := range []struct {
				name      string
				x, gradOf attention.View
			}{{"dq", q, grads.DQ}, {"dk", k, grads.DK}, {"dv", v, grads.DV}} {
				attentiontest.Slopes(t, g.name, g.x, g.gradOf, 1e-8, loss)
			}
		})
	}
}

// TestTilesAreTheMask holds the tile form of the reference, ranks and hops played through in
// turn, against the mask form, which knows of neither.
func TestTilesAreTheMask(t *testing.T) {
	const seq = 37
	kernel := attention.NewReference[float64](nil)
	p := attention.Softmax{Scale: 0.5}
	rng := rand.New(rand.NewPCG(5, 6))
	q, k, v, do := draw(rng, 1, seq, 2, 4), draw(rng, 1, seq, 1, 4), draw(rng, 1, seq, 1, 4), draw(rng, 1, seq, 2, 4)
	docs := []int{9, 1, 20, 7}
	for _, layout := range []partition.Layout{partition.Contiguous{}, partition.Zigzag{}, partition.Striped{},
		partition.Document{Docs: docs}, partition.DocumentZigzag{Docs: docs}} {
		for _, mask := range []partition.Mask{
			{Band: partition.Full()}, {Band: partition.Band{Lo: -partition.Unbounded, Hi: 0}},
			{Band: partition.Band{Lo: -5, Hi: 0}}, {Band: partition.Band{Lo: -partition.Unbounded, Hi: 0}, Docs: docs},
		} {
			t.Run(fmt.Sprintf("%s, %v", layout.Name(), mask), func(t *testing.T) {
				wantAcc, wantGrads := attention.Whole[float64](q, k, v, do, mask, p)
				shape := partition.Shape{SeqQ: seq, SeqKV: seq, Size: 3, Layout: layout, Mask: mask}
				dk, dv := tensor.New(tensor.F64, 1, seq, 1, 4), tensor.New(tensor.F64, 1, seq, 1, 4)
				for rank := range 3 {
					at := partition.Positions(layout.Spans(seq, 3, rank))
					acc := attention.Partial{O: tensor.New(tensor.F64, 1, len(at), 2, 4),
						LSE: tensor.New(tensor.F64, 1, len(at), 2, 1)}
					dq, delta := tensor.New(tensor.F64, 1, len(at), 2, 4), tensor.New(tensor.F64, 1, len(at), 2, 1)
					mine, mineDo := tensor.Gather(q, at), tensor.Gather(do, at)
					forward, err := kernel.Forward(acc.O, acc, mine, p)
					check(t, err)
					for owner := range 3 {
						from := partition.Positions(layout.Spans(seq, 3, owner))
						check(t, forward.Block(attention.Block{K: tensor.Gather(k, from), V: tensor.Gather(v, from),
							Tiles: partition.Plan(shape, rank, owner)}))
					}
					check(t, forward.End())
					backward, err := kernel.Backward(dq, mineDo, mine,
						attention.Saved{O: acc.O, LSE: acc.LSE, Delta: delta}, p)
					check(t, err)
					for owner := range 3 {
						from := partition.Positions(layout.Spans(seq, 3, owner))
						b := attention.Block{K: tensor.Gather(k, from), V: tensor.Gather(v, from),
							Tiles: partition.Plan(shape, rank, owner)}
						g := attention.KeyGrads{DK: tensor.Gather(dk, from), DV: tensor.Gather(dv, from)}
						check(t, backward.Block(attention.GradBlock{Block: b, KeyGrads: g}))
						tensor.Scatter(dk, g.DK, from)
						tensor.Scatter(dv, g.DV, from)
					}
					check(t, backward.End())
					attentiontest.Compare(t, "out", acc.O, tensor.Gather(wantAcc.O, at), 1e-13)
					attentiontest.Compare(t, "lse", acc.LSE, tensor.Gather(wantAcc.LSE, at), 1e-13)
					attentiontest.Compare(t, "dq", dq, tensor.Gather(wantGrads.DQ, at), 1e-13)
				}
				attentiontest.Compare(t, "dk", dk, wantGrads.DK, 1e-13)
				attentiontest.Compare(t, "dv", dv, wantGrads.DV, 1e-13)
			})
		}
	}
}

// TestScoreGradients holds the gradients of a bias, of sinks, and of q, k and v beside them, against
// central differences of sum(out * do).
func TestScoreGradients(t *testing.T) {
	const batch, heads = 2, 4
	for _, c := range []struct {
		name        string
		seqQ, seqK  int
		mask        partition.Mask
		softcap     float64
		bias        [2]int // batches, heads
		alibi, sink bool
	}{
		{"sink", 5, 6, partition.Mask{Band: partition.Full()}, 0, [2]int{}, false, true},
		{"sink, rows that see nothing", 6, 4, partition.Mask{Band: partition.Band{Lo: -partition.Unbounded, Hi: -2}}, 2,
			[2]int{}, false, true},
		{"slopes", 6, 6, partition.Mask{Band: partition.Causal()}, 1.5, [2]int{}, true, false},
		{"bias", 5, 6, partition.Mask{Band: partition.Full()}, 1.5, [2]int{batch, heads}, false, false},
		{"bias of all heads, documents", 7, 7, partition.Mask{Band: partition.Band{Lo: -1, Hi: 0},
			Docs: []int{3, 1, 3}}, 0, [2]int{batch, 1}, true, true},
		{"bias of all batches", 4, 6, partition.Mask{Band: partition.Band{Lo: -partition.Unbounded, Hi: 2}}, 2,
			[2]int{1, heads}, true, true},
		{"one bias", 4, 4, partition.Mask{Band: partition.Causal()}, 0, [2]int{1, 1}, false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(13, 14))
			q, k, v := draw(rng, batch, c.seqQ, heads, 3), draw(rng, batch, c.seqK, 2, 3),
				draw(rng, batch, c.seqK, 2, 2)
			do, sink, dsink := draw(rng, batch, c.seqQ, heads, 2), draw(rng, 1, 1, heads, 1),
				tensor.New(tensor.F64, 1, 1, heads, 1)
			p := attention.Softmax{Scale: 0.8, Softcap: c.softcap, Scores: &attention.Scores{}}
			if c.alibi {
				p.Scores.Slopes = draw(rng, 1, 1, heads, 1)
			}
			if c.bias[0] > 0 {
				p.Scores.Bias = draw(rng, c.bias[0], c.seqQ, c.bias[1], c.seqK)
				p.Scores.DBias = draw(rng, c.bias[0], c.seqQ, c.bias[1], c.seqK)
			}
			kernel := attention.NewReference[float64](nil)
			tiles := partition.Plan(partition.Shape{SeqQ: c.seqQ, SeqKV: c.seqK, Size: 1,
				Layout: partition.Contiguous{}, Mask: c.mask}, 0, 0)
			acc := attention.Partial{O: tensor.New(tensor.F64, batch, c.seqQ, heads, 2),
				LSE: tensor.New(tensor.F64, batch, c.seqQ, heads, 1)}
			for i := range c.seqQ {
				p.Scores.Rows = append(p.Scores.Rows, i+c.seqK-c.seqQ)
			}
			block := attention.Block{K: k, V: v, Tiles: tiles}
			for j := range c.seqK {
				block.Columns = append(block.Columns, j)
			}
			loss := func() float64 {
				pass, err := kernel.Forward(acc.O, acc, q, p)
				check(t, err)
				check(t, pass.Block(block))
				check(t, pass.End())
				if c.sink {
					check(t, kernel.FoldSink(acc.O, acc.LSE, sink))
				}
				sum := 0.0
				for i, y := range tensor.Data[float64](acc.O) {
					sum += y * tensor.Data[float64](do)[i]
				}
				return sum
			}
			loss()
			dq, dk, dv := tensor.New(tensor.F64, batch, c.seqQ, heads, 3), tensor.New(tensor.F64, batch, c.seqK, 2, 3),
				tensor.New(tensor.F64, batch, c.seqK, 2, 2)
			pass, err := kernel.Backward(dq, do, q, attention.Saved{O: acc.O, LSE: acc.LSE,
				Delta: tensor.New(tensor.F64, batch, c.seqQ, heads, 1)}, p)
			check(t, err)
			check(t, pass.Block(attention.GradBlock{Block: block, KeyGrads: attention.KeyGrads{DK: dk, DV: dv},
				Fresh: partition.Range{Hi: c.seqK}}))
			check(t, pass.End())
			grads := map[string][2]attention.View{"dq": {q, dq}, "dk": {k, dk}, "dv": {v, dv}}
			if c.sink {
				check(t, kernel.SinkGrad(dsink, do, acc.O, acc.LSE, sink))
				grads["dsink"] = [2]attention.View{sink, dsink}
			}
			if c.bias[0] > 0 {
				grads["dbias"] = [2]attention.View{p.Scores.Bias, p.Scores.DBias}
			}
			for name, g := range grads {
				attentiontest.Slopes(t, name, g[0], g[1], 1e-8, loss)
			}
		})
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
