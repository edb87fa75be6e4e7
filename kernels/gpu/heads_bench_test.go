//go:build cuda

package gpu

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// BenchmarkHeadDims measures entire passes of flash and of cuDNN on the same tensors in one process: 32:8 heads, 16K
// tokens, causal and without a mask. FLOPs count as in BenchmarkFlash.
func BenchmarkHeadDims(b *testing.B) {
	const seq = 16384
	for _, dims := range [][2]int{{64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}} {
		x := newFlashBench(b, tensor.BF16, seq, dims[0], dims[1])
		shape := trainingShape(seq, 32, 8, dims[0], dims[1])
		fused, err := NewFused(x.stream, x.loader, FusedOptions{Workspace: FusedWorkspace(shape)})
		check(b, err)
		for _, mask := range []struct {
			name string
			band partition.Band
		}{{"causal", causal}, {"no mask", partition.Full()}} {
			x.tiles = []partition.Tile{wholeTile(seq, mask.band)}
			for _, k := range []struct {
				name string
				attention.Kernel
			}{{"flash", x.fast}, {"fused", fused}} {
				of := fmt.Sprintf("dim=%d,%d/%s/%s", dims[0], dims[1], mask.name, k.name)
				b.Run("forward/"+of, func(b *testing.B) { x.time(b, 2, 2, x.whole(k.Kernel, false)) })
				b.Run("both/"+of, func(b *testing.B) { x.time(b, 8, 6, x.whole(k.Kernel, true)) })
			}
		}
		check(b, fused.Close())
	}
}

// whole runs a forward pass and, if both are wanted, the backward pass.
func (x *flashBench) whole(k attention.Kernel, both bool) func() error {
	block := attention.Block{K: x.k, V: x.v, Tiles: x.tiles, First: true, Last: true}
	saved := attention.Saved{O: x.o, LSE: x.acc.LSE, Delta: x.delta}
	grads := attention.GradBlock{Block: block, KeyGrads: x.keyGrads(), Fresh: span(0, x.k.Len(tensor.Seq))}
	return func() error {
		forward, err := k.Forward(x.o, x.acc, x.q, x.p)
		if err == nil {
			err = errors.Join(forward.Block(block), forward.End())
		}
		if err != nil || !both {
			return err
		}
		backward, err := k.Backward(x.grads.DQ, x.do, x.q, saved, x.p)
		if err != nil {
			return err
		}
		return errors.Join(backward.Block(grads), backward.End())
	}
}
