//go:build cuda

package gpu

import (
	"fmt"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// BenchmarkHeadDims measures entire passes of flash and of cuDNN on the same tensors in one process: 32:8 heads, 16K
// tokens, causal and without a mask. FLOPs count as in BenchmarkFlash.
func BenchmarkHeadDims(b *testing.B) {
	const seq, heads, kvHeads = 16384, 32, 8
	all := partition.Range{Hi: seq}
	for _, dims := range [][2]int{{64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}} {
		x := newFlashBench(b, tensor.BF16, seq, dims[0], dims[1])
		shape := FusedShape{
			Batch:    1,
			SeqQ:     seq,
			SeqK:     seq,
			Heads:    heads,
			KVHeads:  kvHeads,
			Dim:      dims[0],
			DimV:     dims[1],
			Calls:    1,
			Training: true,
		}
		fused, err := NewFused(x.stream, x.loader, FusedOptions{Workspace: FusedWorkspace(shape)})
		check(b, err)
		for _, mask := range []struct {
			name string
			band partition.Band
		}{{"causal", partition.Band{Lo: -partition.Unbounded}}, {"no mask", partition.Full()}} {
			x.tiles = []partition.Tile{{Q: all, K: all, Band: mask.band}}
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
	grads := attention.KeyGrads{DK: x.grads.DK, DV: x.grads.DV}
	return func() error {
		forward, err := k.Forward(x.o, x.acc, x.q, x.p)
		if err == nil {
			err = forward.Block(block)
		}
		if err == nil {
			err = forward.End()
		}
		if err != nil || !both {
			return err
		}
		backward, err := k.Backward(x.grads.DQ, x.do, x.q, saved, x.p)
		if err == nil {
			err = backward.Block(
				attention.GradBlock{Block: block, KeyGrads: grads, Fresh: partition.Range{Hi: x.k.Len(tensor.Seq)}},
			)
		}
		if err == nil {
			err = backward.End()
		}
		return err
	}
}
