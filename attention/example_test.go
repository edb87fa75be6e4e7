package attention_test

import (
	"fmt"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Three tokens under a causal mask: token 0 sees itself alone, so its output is its value; the others
// weigh the values that they see by the exponentials of their scores.
func ExampleWhole() {
	q := tensor.FromSlice([]float64{1, 1, 1}, 3, 1, 1) // [batch 1, seq 3, heads 1, dim 1]
	k := tensor.FromSlice([]float64{0, 0, 1}, 3, 1, 1)
	v := tensor.FromSlice([]float64{1, 3, 10}, 3, 1, 1)
	do := tensor.FromSlice([]float64{0, 1, 0}, 3, 1, 1) // the gradient of token 1's output alone
	acc, grads := attention.Whole[float64](q, k, v, do, partition.Mask{Band: partition.Causal()},
		attention.Softmax{Scale: 1})
	fmt.Printf("out %.3f\n", tensor.Data[float64](acc.O))
	fmt.Printf("lse %.3f\n", tensor.Data[float64](acc.LSE)) // log of the sum of exp(score)
	fmt.Printf("dv  %.3f\n", tensor.Data[float64](grads.DV))
	// Output:
	// out [1.000 2.000 6.609]
	// lse [0.000 0.693 1.551]
	// dv  [0.500 0.500 0.000]
}

// A pass folds blocks of keys into one result, one at a time: first the keys of positions 0 and 1, then of position 2.
func ExampleKernel() {
	q := tensor.FromSlice([]float64{1}, 1, 1, 1)
	k := tensor.FromSlice([]float64{0, 0, 1}, 3, 1, 1)
	v := tensor.FromSlice([]float64{1, 3, 10}, 3, 1, 1)
	acc := attention.Partial{O: tensor.New(tensor.F64, 1, 1, 1), LSE: tensor.New(tensor.F64, 1, 1, 1)}
	var kernel attention.Kernel = attention.NewReference[float64](nil)
	pass, err := kernel.Forward(acc.O, acc, q, attention.Softmax{Scale: 1})
	for _, rows := range []partition.Range{{Lo: 0, Hi: 2}, {Lo: 2, Hi: 3}} {
		if err != nil {
			break
		}
		tile := partition.Tile{Q: partition.Range{Hi: 1}, K: partition.Range{Hi: rows.Len()}, Band: partition.Full()}
		err = pass.Block(attention.Block{
			K: k.Slice(tensor.Seq, rows.Lo, rows.Hi), V: v.Slice(tensor.Seq, rows.Lo, rows.Hi),
			Tiles: []partition.Tile{tile}, First: rows.Lo == 0, Last: rows.Hi == 3,
		})
		fmt.Printf("after keys up to %d: out %.3f\n", rows.Hi, tensor.Data[float64](acc.O)[0])
	}
	fmt.Println(err, pass.End())
	// Output:
	// after keys up to 2: out 2.000
	// after keys up to 3: out 6.609
	// <nil> <nil>
}
