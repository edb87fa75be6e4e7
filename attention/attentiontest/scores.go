package attentiontest

import (
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Scores lists the terms of the scores of a case.
type Scores struct {
	ALiBi bool
	Bias  [2]int // batches and heads of the bias; 0: there is none
	Hides bool   // the bias is -Inf for every third key, and for all keys of some rows
	Max   bool
}

// queryRow and column give positions, which tiles lack: queries and keys are in no order, and not all columns of a bias
// have a key here.
func (c Case) queryRow(i int) int { return (i*5 + 2) % c.SeqQ }
func (c Case) column(j int) int   { return c.width() - 2 - j }

// positions lists the positions of n queries or keys.
func positions(n int, at func(int) int) []int {
	list := make([]int, n)
	for i := range list {
		list[i] = at(i)
	}
	return list
}

func (c Case) width() int { return c.SeqK + 5 }

func scoreCases() []Case {
	var cs []Case
	add := func(name string, s Scores, change func(*Case)) {
		c := base("scores: " + name)
		c.Heads, c.KVHeads, c.Batch, c.Scores = 4, 2, 2, &s
		change(&c)
		cs = append(cs, c)
	}
	as := func(*Case) {}
	add("largest", Scores{Max: true}, as)
	add("largest with a soft cap, in parts", Scores{Max: true}, func(c *Case) { c.Softmax.Softcap, c.Calls = 3, 3 })
	add("largest of rows that see nothing", Scores{Max: true},
		func(c *Case) { c.Tiles = []partition.Tile{tile(0, 70, 0, 150, causal(-20))} })
	add("slopes", Scores{ALiBi: true}, as)
	add("slopes in parts", Scores{ALiBi: true, Max: true},
		func(c *Case) { c.Calls, c.Reversed, c.Layout = 3, true, Padded })
	for _, b := range [][2]int{{1, 1}, {2, 4}, {1, 4}, {2, 1}} {
		add(fmt.Sprintf("bias %v", b), Scores{Bias: b}, func(c *Case) { c.Softmax.Softcap = 2 * float64(b[0]-1) })
	}
	add("bias that hides", Scores{Bias: [2]int{1, 4}, Hides: true}, func(c *Case) { c.Calls = 3 })
	add("all in parts", Scores{ALiBi: true, Bias: [2]int{1, 4}, Max: true}, func(c *Case) {
		c.Calls, c.Softmax.Softcap, c.Layout, c.Started = 4, 5, HeadsFirst, true
		c.Tiles = []partition.Tile{tile(3, 20, 10, 40, partition.Full()), tile(40, 41, 149, 150, partition.Full()),
			tile(50, 70, 60, 140, causal(40))}
	})
	add("no tile", Scores{ALiBi: true, Bias: [2]int{2, 1}, Max: true}, func(c *Case) { c.Tiles = nil })
	return cs
}

// A scored holds the tensors of Scores; absent ones are zero.
type scored struct{ slopes, bias, dbias, largest tensor.View }

func (s *set) placeScores(c Case, l Layout, acc tensor.DType) {
	x := c.Scores
	if x == nil {
		return
	}
	if x.ALiBi {
		s.slopes = s.place(Dense, acc, [4]int{1, 1, c.Heads, 1})
	}
	if x.Bias[0] > 0 {
		shape := [4]int{x.Bias[0], c.SeqQ, x.Bias[1], c.width()}
		s.bias, s.dbias = s.place(l, acc, shape), s.place(l, acc, shape)
	}
	if x.Max {
		s.largest = s.place(l, acc, [4]int{c.Batch, c.SeqQ, c.Heads, 1})
	}
}

func (s *scored) views() (list []*tensor.View) {
	for _, v := range []*tensor.View{&s.slopes, &s.bias, &s.dbias, &s.largest} {
		if !v.IsZero() {
			list = append(list, v)
		}
	}
	return list
}

// softmax returns the Softmax of the case, with the tensors of a set.
func (c Case) softmax(s *set) attention.Softmax {
	p := c.Softmax
	if c.Scores != nil {
		p.Scores = &attention.Scores{Slopes: s.slopes, Bias: s.bias, DBias: s.dbias, Max: s.largest,
			Rows: positions(c.SeqQ, c.queryRow)}
	}
	return p
}

// scoreInputs draws the slopes and the bias. Cases without have none, so that their numbers stay as they
// are.
func (c Case) scoreInputs(rng *rand.Rand, t tensor.DType) (slopes, bias []float64) {
	if c.Scores == nil {
		return nil, nil
	}
	for h := range c.Heads {
		slopes = append(slopes, math.Exp2(-float64(h+2)))
	}
	for n := range c.Scores.Bias[0] * c.Scores.Bias[1] * c.SeqQ * c.width() {
		bias = append(bias, near.Round(rng.NormFloat64(), t))
		if c.Scores.Hides && (n%3 == 0 || n/c.width()%5 == 0) {
			bias[n] = math.Inf(-1)
		}
	}
	return slopes, bias
}

func (c Case) extra(in inputs, b, i, h, j int) float64 {
	x, sum := c.Scores, 0.0
	if x == nil {
		return 0
	}
	row, column := c.queryRow(i), c.column(j)
	if x.ALiBi {
		sum -= in.slopes[h] * math.Abs(float64(row-column))
	}
	if x.Bias[0] > 0 {
		sum += in.bias[((b%x.Bias[0]*c.SeqQ+i)*x.Bias[1]+h%x.Bias[1])*c.width()+column]
	}
	return sum
}
