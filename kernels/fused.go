//go:build cuda

package kernels

import (
	"fmt"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/cuda"
	"github.com/cprun/cprun/internal/cuda/dnn"
	"github.com/cprun/cprun/internal/tensor"
	"github.com/cprun/cprun/partition"
)

// Fused is attention by cuDNN: 16-bit q, k and v, float32 accumulators. It implements
// attention.Kernel, and what the rules of package attention say about attention.Fused is what it
// can do. cuDNN cannot add to anything, so that results are held back as cuDNN gives them,
// up to maxHeld of them, and go into the accumulators, or at Finish into o, in one pass.
//
// One goroutine calls it. It holds results of one accumulator at a time; a call for another one
// folds them first.
type Fused struct {
	stream  *cuda.Stream
	dnn     *dnn.Handle
	options FusedOptions
	kernels fusedKernels
	scratch fusedScratch
	held    heldParts
	keys    heldKeys
	fresh   []freshRows
	tables  fusedTables
	packing packing
}

// FusedOptions say how Fused computes.
type FusedOptions struct {
	// Deterministic repeats gradients bit for bit. On Hopper cuDNN before 9.25 takes a workspace
	// of the square of the sequence for it.
	Deterministic bool
	// Packed says that sequences are packed documents, whose lengths change from step to step.
	// Tiles go to cuDNN as packed sequences then, many at once, under plans that fit
	// lengths of about the same size; without it each shape has a plan of its own, as it has in
	// the backward pass where head dims are above 192 or no multiples of 16, or tensors have gaps.
	Packed bool
	// ZeroWorkspace clears cuDNN's workspace before each backward call, which versions before 9.18
	// need on Hopper where Packed.
	ZeroWorkspace bool
	// Workspace is the device memory to begin with, as FusedWorkspace counts it. More is taken
	// when a call needs it.
	Workspace int64
}

// NewFused computes on stream. It loads cuDNN; the error says what is missing.
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

// Close lets go of cuDNN. The stream must be done.
func (f *Fused) Close() error { return f.dnn.Close() }

// Plans is how many plans cuDNN has built, each of which took up to a second.
func (f *Fused) Plans() int { return f.dnn.Built() }

// Workspace is the device memory that is taken, in bytes.
func (f *Fused) Workspace() int64 { return f.scratch.size() }

// Delta leaves delta alone: cuDNN computes it from do and o.
func (f *Fused) Delta(delta, do, o View) error { return attention.CheckDelta(delta, do, o) }

// usable is what is wrong with the inputs of a call beyond what attention checks.
func (f *Fused) usable(q View, p attention.Softmax, views ...View) error {
	if t := q.DType(); t != tensor.BF16 && t != tensor.F16 {
		return fmt.Errorf("fused attention in %v: cuDNN computes in bfloat16 and float16; set precision.compute to bf16 or fp16", t)
	}
	if p.Softcap > 0 {
		return fmt.Errorf("fused attention with soft cap %v: cuDNN has none; use the flash backend", p.Softcap)
	}
	if !(p.Scale > 0) {
		return fmt.Errorf("fused attention with scale %v: cuDNN's gradients fault at 0, and its largest score is that before scaling; use the flash backend", p.Scale)
	}
	return fusedAligned("fused attention", views...)
}

// fusedAligned is an error that names the first view whose rows do not begin on 16 bytes or are not
// multiples of 8 elements.
func fusedAligned(what string, views ...View) error {
	for _, v := range views {
		if v.Size() == 0 {
			continue
		}
		size := int64(v.DType().Size())
		bad := v.Len(tensor.Dim)%8 != 0 || cuda.Addr(v)%16 != 0
		for a := tensor.Batch; a < tensor.Dim; a++ {
			bad = bad || v.Len(a) > 1 && v.Stride(a)*size%16 != 0
		}
		if bad {
			return fmt.Errorf("%s: %v: head dims must be multiples of 8 and rows begin on 16 bytes; use the flash backend, or copy it to a dense tensor", what, v)
		}
	}
	return nil
}

// cutTiles is the calls of cuDNN that tiles are made of.
func cutTiles(tiles []partition.Tile) []dnn.Piece {
	var out []dnn.Piece
	for _, t := range tiles {
		out = dnn.Cut(out, t)
	}
	return out
}
