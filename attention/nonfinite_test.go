package attention_test

import (
	"math"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// The reference in float32 arithmetic, over three hops, keeps to the contract that kernels have.
func TestReferenceNonFinite(t *testing.T) {
	sample := 1
	if testing.Short() {
		sample = 6
	}
	attentiontest.TestNonFinite(t, func(testing.TB) attentiontest.Rig {
		return attentiontest.Rig{Kernel: attention.NewReference[float32](nil)}
	}, attentiontest.Options{DTypes: []tensor.DType{tensor.F32}, Sample: sample})
}

// The definition itself: an element depends on the visible pairs of its row and on nothing else. Two documents of four
// positions, causal; one of q, k, v or do is NaN.
func TestNaNReachesWhatDependsOnIt(t *testing.T) {
	const seq, heads, kvHeads, dim = 8, 4, 2, 3
	mask, err := partition.NewMask(true, -1, seq, seq, []int{4, 4})
	if err != nil {
		t.Fatal(err)
	}
	sees := func(i, j int) bool { return i/4 == j/4 && j <= i }
	fill := func(v tensor.View) {
		for i := range tensor.Data[float64](v) {
			tensor.Data[float64](v)[i] = math.Sin(float64(i*i + 1))
		}
	}
	for _, input := range []string{"q", "k", "v", "do"} {
		for row := range seq {
			for head := range heads {
				if head >= kvHeads && (input == "k" || input == "v") {
					continue
				}
				const at = 1 // of dim
				q, do := tensor.New(tensor.F64, 1, seq, heads, dim), tensor.New(tensor.F64, 1, seq, heads, dim)
				k, v := tensor.New(tensor.F64, 1, seq, kvHeads, dim), tensor.New(tensor.F64, 1, seq, kvHeads, dim)
				for name, x := range map[string]tensor.View{"q": q, "k": k, "v": v, "do": do} {
					fill(x)
					if name == input {
						tensor.Data[float64](x)[(row*x.Len(tensor.Heads)+head)*dim+at] = math.NaN()
					}
				}
				acc, g := attention.Whole[float64](q, k, v, do, mask, attention.Softmax{Scale: 0.5})

				// direct: a pair with a NaN in its score or its value; row: of a query with such a pair.
				pair := func(i, h, j int) bool {
					switch input {
					case "q":
						return sees(i, j) && i == row && h == head
					case "do":
						return sees(i, j) && i == row && h == head
					}
					return sees(i, j) && j == row && h/2 == head
				}
				query := func(i, h int) (any bool) {
					for j := range seq {
						any = any || pair(i, h, j)
					}
					return any
				}
				key := func(j, g int) (any bool) {
					for i := range seq {
						for h := 2 * g; h < 2*g+2; h++ {
							any = any || sees(i, j) && query(i, h)
						}
					}
					return any
				}
				score := input == "q" || input == "k"
				check := func(name string, x tensor.View, want func(row, head, d int) bool) {
					n := x.Shape()
					for i, y := range tensor.Data[float64](x) {
						r, h, d := i/n[3]/n[2], i/n[3]%n[2], i%n[3]
						if math.IsNaN(y) != want(r, h, d) || math.IsInf(y, 0) {
							t.Fatalf("NaN in %s of row %d, head %d: %s of row %d, head %d, dim %d is %v", input, row,
								head, name, r, h, d, y)
						}
					}
				}
				check("out", acc.O, func(i, h, d int) bool { return query(i, h) && (score || input == "v" && d == at) })
				check("lse", acc.LSE, func(i, h, _ int) bool { return query(i, h) && score })
				check("dq", g.DQ, func(i, h, _ int) bool { return query(i, h) })
				check("dk", g.DK, func(j, h, _ int) bool { return key(j, h) })
				check("dv", g.DV, func(j, h, d int) bool { return key(j, h) && (score || input == "do" && d == at) })
			}
		}
	}
}

// A row of scores that are all -Inf is broken, not empty; a bias of -Inf hides.
func TestScoresOfMinusInf(t *testing.T) {
	q, k, v := tensor.New(tensor.F64, 1, 2, 1, 1), tensor.New(tensor.F64, 1, 1, 1, 1),
		tensor.New(tensor.F64, 1, 1, 1, 1)
	o, lse := tensor.New(tensor.F64, 1, 2, 1, 1), tensor.New(tensor.F64, 1, 2, 1, 1)
	bias := tensor.New(tensor.F64, 1, 2, 1, 1)
	run := func(p attention.Softmax) (float64, float64) {
		pass, err := attention.NewReference[float64](nil).Forward(o, attention.Partial{O: o, LSE: lse}, q, p)
		if err != nil {
			t.Fatal(err)
		}
		tiles := []partition.Tile{{Q: partition.Range{Lo: 1, Hi: 2}, K: partition.Range{Hi: 1}, Band: partition.Full()}}
		if err := pass.Block(attention.Block{K: k, V: v, Tiles: tiles, Columns: []int{0}, First: true,
			Last: true}); err != nil {
			t.Fatal(err)
		}
		if x, z := tensor.Data[float64](o)[0], tensor.Data[float64](lse)[0]; x != 0 || !math.IsInf(z, -1) {
			t.Errorf("a row that sees no key has O = %v, LSE = %v", x, z)
		}
		return tensor.Data[float64](o)[1], tensor.Data[float64](lse)[1]
	}
	tensor.Data[float64](q)[1] = -1
	tensor.Data[float64](k)[0] = math.Inf(1)
	if x, z := run(attention.Softmax{Scale: 1}); !math.IsNaN(x) || !math.IsNaN(z) {
		t.Errorf("a score of -Inf alone: O = %v, LSE = %v", x, z)
	}
	tensor.Data[float64](k)[0] = 1
	tensor.Data[float64](bias)[1] = math.Inf(-1)
	if x, z := run(attention.Softmax{Scale: 1, Scores: &attention.Scores{Bias: bias}}); x != 0 || !math.IsInf(z, -1) {
		t.Errorf("a bias of -Inf: O = %v, LSE = %v", x, z)
	}
}
