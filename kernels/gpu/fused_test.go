//go:build cuda

package gpu

import (
	"context"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/tensor"
)

// fusedRig has a Fused on the first GPU, and copies data to and from it.
type fusedRig struct {
	*Fused
	dev       *cuda.Device
	transfers *transfers
}

func newFused(t testing.TB, options FusedOptions) fusedRig {
	t.Helper()
	dev, stream, loader := openGPU(t)
	f, err := NewFused(stream, loader, options)
	check(t, err)
	t.Cleanup(func() {
		check(t, stream.Sync(context.Background()))
		t.Logf("cuDNN built %d plans", f.Plans())
		check(t, f.Close())
	})
	return fusedRig{f, dev, &transfers{dev: dev, stream: stream}}
}

func (r fusedRig) rig() attentiontest.Rig {
	return attentiontest.Rig{
		Kernel: r.Fused, Sync: r.stream.Sync, Upload: r.transfers.uploadAll, Download: r.transfers.downloadAll,
	}
}

// beyondFused lists cases that cuDNN does not support. The rules of package attention reject them.
func beyondFused(c attentiontest.Case) bool {
	return c.Dim%8 != 0 || c.DimV%8 != 0 || beyondAnyDims(c)
}

// beyondAnyDims reports whether a case is unsupported for another reason than its head dims: rows not aligned to 16
// bytes, a single query and key, for which cuDNN has no gradient, or a scale of 0 or less, for which its gradient is
// wrong.
func beyondAnyDims(c attentiontest.Case) bool {
	gaps := c.Layout == attentiontest.Padded || c.Layout == attentiontest.Interleaved
	return c.Softmax.Softcap > 0 || c.Softmax.Scale <= 0 || gaps || c.SeqQ == 1 && c.SeqK == 1
}

// Each shape of a case takes a plan, so not every case runs in every way.
var fusedSuite = attentiontest.Options{DTypes: []tensor.DType{tensor.BF16}, MaxHeadDim: 256, NoDelta: true,
	NoScores: true, Leaves: beyondFused}

func TestFused(t *testing.T) { testFused(t, FusedOptions{}, fusedSuite) }

func testFused(t *testing.T, o FusedOptions, suite attentiontest.Options) {
	attentiontest.TestKernel(t, func(t testing.TB) attentiontest.Rig { return newFused(t, o).rig() }, suite)
}

// TestFusedPacked runs the cases with several tiles, calls or batches as packed calls.
func TestFusedPacked(t *testing.T) {
	suite := fusedSuite
	suite.Leaves = func(c attentiontest.Case) bool {
		return beyondFused(c) || len(c.Tiles) < 2 && c.Calls < 2 && c.Batch < 2
	}
	testFused(t, FusedOptions{Packed: true}, suite)
}

// TestFusedBands runs the cases with head dims too small for cuDNN with other head dims.
func TestFusedBands(t *testing.T) {
	for _, packed := range []bool{false, true} {
		t.Run(fmt.Sprintf("packed %t", packed), func(t *testing.T) {
			rig := newFused(t, FusedOptions{Packed: packed}).rig()
			for i, c := range attentiontest.Cases() {
				if !beyondFused(c) || beyondAnyDims(c) || !packed && c.SeqQ == 5 && i%5 != 0 {
					continue
				}
				c.Dim, c.DimV = 64, 64
				t.Run(c.Name, func(t *testing.T) { attentiontest.CheckWith(t, rig, c, tensor.BF16, fusedSuite) })
			}
		})
	}
}

// TestFusedHalf runs a few cases in float16.
func TestFusedHalf(t *testing.T) {
	rig := newFused(t, FusedOptions{}).rig()
	for _, c := range attentiontest.Cases() {
		if slices.Contains([]string{"heads 8 over 2", "zigzag pair", "gradients that hold something",
			"8 calls, reversed true, inputs of size 1"}, c.Name) {
			t.Run(c.Name, func(t *testing.T) { attentiontest.CheckWith(t, rig, c, tensor.F16, fusedSuite) })
		}
	}
}

func TestFusedRefusals(t *testing.T) {
	f := newFused(t, FusedOptions{})
	view := func(dtype tensor.DType, dim int) View { return f.empty(t, dtype, 64, 1, dim) }
	for _, c := range []struct {
		name  string
		dtype tensor.DType
		dim   int
		p     attention.Softmax
	}{
		{"float32", tensor.F32, 64, attention.Softmax{Scale: 1}},
		{"soft cap", tensor.BF16, 64, attention.Softmax{Scale: 1, Softcap: 30}},
		{"scale 0", tensor.BF16, 64, attention.Softmax{}},
		{"scale below 0", tensor.BF16, 64, attention.Softmax{Scale: -1}},
		{"scale that is no number", tensor.BF16, 64, attention.Softmax{Scale: math.NaN()}},
		{"head dim 20", tensor.BF16, 20, attention.Softmax{Scale: 1}},
	} {
		q, k, v := view(c.dtype, c.dim), view(c.dtype, c.dim), view(c.dtype, c.dim)
		acc := attention.Partial{O: view(tensor.F32, c.dim), LSE: view(tensor.F32, 1)}
		pass, err := f.Forward(acc.O, acc, q, c.p)
		if err == nil {
			err = pass.Block(attention.Block{K: k, V: v})
		}
		if err == nil {
			t.Errorf("%s: no error", c.name)
		}
	}
	check(t, f.stream.Sync(context.Background()))
}
