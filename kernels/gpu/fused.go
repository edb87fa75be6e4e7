//go:build cuda

package gpu

import (
	"fmt"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/internal/base/cuda/dnn"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Fused computes attention with cuDNN: 16-bit q, k and v, float32 accumulators. It implements attention.Kernel;
// the rules of package attention for attention.Fused describe its limits. cuDNN cannot add to a tensor. So Fused keeps
// up to maxHeld results of cuDNN, and merges them into the accumulators, or at the end into o, in one pass over memory.
type Fused struct {
	attention.Launches
	stream  *cuda.Stream
	dnn     *dnn.Handle
	options FusedOptions
	kernels fusedKernels
	scratch fusedScratch
	held    heldParts
	keys    heldKeys
	tables  fusedTables
	packing packing

	forward  fusedForward // the current pass
	backward fusedBackward
}

// FusedOptions configure a Fused.
type FusedOptions struct {
	// Deterministic makes gradients repeatable bit for bit. cuDNN may need a workspace quadratic in the sequence length
	// for it, which Fused allocates at any size; see backends.KeepsMatrix.
	Deterministic bool
	// Packed means that sequences are packed documents with lengths that change from step to step. Many tiles then
	// share one call of cuDNN, and similar lengths share a plan. Otherwise each shape has its own plan. So has a
	// backward pass if head dims are above 192 or no multiples of 16, or tensors have gaps.
	Packed bool
	// ZeroWorkspace clears cuDNN's workspace before each backward call, for backends.ZeroWorkspace.
	ZeroWorkspace bool
	// Workspace is the initial device memory, from FusedWorkspace. It grows if a call needs more.
	Workspace int64
}

// NewFused loads cuDNN and returns a Fused that computes on stream. The error names a missing library.
func NewFused(stream *cuda.Stream, loader *Loader, options FusedOptions) (*Fused, error) {
	f := &Fused{stream: stream, options: options, scratch: fusedScratch{dev: stream.Device()}, packing: defaultPacking}
	var err error
	if f.dnn, err = dnn.Open(stream); err != nil {
		return nil, err
	}
	if f.kernels, err = loadFused(loader); err != nil {
		return nil, err
	}
	return f, f.scratch.reserve(options.Workspace)
}

// Close releases cuDNN. The stream must be done.
func (f *Fused) Close() error { return f.dnn.Close() }

// Plans returns the number of plans that cuDNN has built. A plan takes up to a second.
func (f *Fused) Plans() int { return f.dnn.Built() }

// usable checks the inputs beyond the checks of package attention.
func (f *Fused) usable(q View, p attention.Softmax, views ...View) error {
	if t := q.DType(); t != tensor.BF16 && t != tensor.F16 {
		return fmt.Errorf("fused attention in %v: cuDNN computes in bfloat16 and float16; set precision.compute to "+
			"bf16 or fp16", t)
	}
	if p.Softcap > 0 {
		return fmt.Errorf("fused attention with soft cap %v: cuDNN has none; use the flash backend", p.Softcap)
	}
	if !(p.Scale > 0) {
		return fmt.Errorf("fused attention with scale %v: cuDNN's gradients fault at 0, and its largest score is "+
			"that before scaling; use the flash backend", p.Scale)
	}
	if err := p.Plain("fused attention"); err != nil {
		return err
	}
	return fusedAligned("fused attention", views...)
}

// fusedAligned returns an error for the first view with rows that are not aligned to 16 bytes or not a multiple of 8
// elements.
func fusedAligned(what string, views ...View) error {
	for _, v := range views {
		if v.Size() == 0 {
			continue
		}
		size := int64(v.DType().Size())
		bad := v.Len(tensor.Dim)%8 != 0 || v.Addr()%16 != 0
		for a := tensor.Batch; a < tensor.Dim; a++ {
			bad = bad || v.Len(a) > 1 && v.Stride(a)*size%16 != 0
		}
		if bad {
			return fmt.Errorf("%s: %v: head dims must be multiples of 8 and rows begin on 16 bytes; use the flash "+
				"backend, or copy it to a dense tensor", what, v)
		}
	}
	return nil
}

func cutTiles(tiles []partition.Tile) []dnn.Piece {
	var out []dnn.Piece
	for _, t := range tiles {
		out = dnn.Cut(out, t)
	}
	return out
}
