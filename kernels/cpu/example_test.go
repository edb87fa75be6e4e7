package cpu_test

import (
	"errors"
	"fmt"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// This example computes attention of two queries over two blocks of keys, as a rank of a ring does: its own keys under
// a causal mask, then an earlier rank's block that both queries see entirely.
func Example() {
	stream := tensor.NewHostStream("compute")
	kernel := cpu.New(stream)
	row := func(xs ...float32) tensor.View { return tensor.FromSlice(xs, len(xs), 1, 1) }
	q := row(1, 1)
	own := attention.Block{
		K: row(0, 1), V: row(1, 3), First: true,
		Tiles: []partition.Tile{{Q: partition.Range{Hi: 2}, K: partition.Range{Hi: 2}, Band: partition.Causal()}},
	}
	earlier := attention.Block{
		K: row(0), V: row(7), Last: true,
		Tiles: []partition.Tile{{Q: partition.Range{Hi: 2}, K: partition.Range{Hi: 1}, Band: partition.Full()}},
	}
	out := attention.Partial{O: tensor.New(tensor.F32, 2, 1, 1), LSE: tensor.New(tensor.F32, 2, 1, 1)}
	pass, err := kernel.Forward(out.O, out, q, attention.Softmax{Scale: 1})
	if err != nil {
		fmt.Println(err)
		return
	}
	// The calls queue work; Close waits for it.
	err = errors.Join(pass.Block(own), pass.Block(earlier), pass.End(), stream.Close())
	fmt.Printf("out %.3f, lse %.3f, %v\n", tensor.Data[float32](out.O), tensor.Data[float32](out.LSE), err)
	// Output:
	// out [4.000 3.424], lse [0.693 1.551], <nil>
}
