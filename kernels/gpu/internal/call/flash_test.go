//go:build cuda

package call

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// A rig adapts a kernel to the conformance suite. A case begins with all memory free.
func (k *hostFlash) rig() attentiontest.Rig {
	return attentiontest.Rig{
		Kernel: k,
		Upload: func(buffers []*tensor.Host) (copies []tensor.Memory, err error) {
			k.used = 0
			for _, h := range buffers {
				to, err := k.alloc(h.Bytes())
				if err != nil {
					return nil, err
				}
				copy(hostBytes(to), hostBytes(h))
				copies = append(copies, to)
			}
			return copies, nil
		},
		Download: func(dst []*tensor.Host, src []tensor.Memory) error {
			for i, h := range dst {
				copy(hostBytes(h), hostBytes(src[i].(*tensor.Host)))
			}
			return nil
		},
	}
}

func hostBytes(m *tensor.Host) []byte {
	return tensor.Bytes(tensor.Dense(m, tensor.U8, 0, [4]int{1, 1, 1, int(m.Bytes())}))
}

// large is the shared memory of a block on an A100, in bytes.
const large = 163 << 10

// suite runs the conformance suite on a kernel, except for the cases for which leaves returns true.
func (k *hostFlash) suite(t *testing.T, dtype tensor.DType, leaves func(attentiontest.Case) bool) {
	t.Run(fmt.Sprintf("%v, deterministic %t", dtype, k.deterministic), func(t *testing.T) {
		k.t = t
		attentiontest.TestKernel(t, func(testing.TB) attentiontest.Rig { return k.rig() }, attentiontest.Options{
			DTypes: []tensor.DType{dtype}, MaxHeadDim: source.FlashMaxDim, Leaves: leaves, NoScores: true,
		})
	})
}

// TestFlashOnHost runs the conformance suite on the flash kernels. In 16 bits, emulating the products of a warp takes
// long, so it runs only the cases with uncommon head dims, layouts, folds and caps.
func TestFlashOnHost(t *testing.T) {
	h := newHost(t)
	plain := func(c attentiontest.Case) bool {
		return c.Dim < 64 && c.Layout == attentiontest.Dense && c.Calls <= 1 && c.Softmax.Softcap == 0
	}
	fast, ordered := &hostFlash{h, false, large}, &hostFlash{h, true, large}
	fast.suite(t, tensor.F32, nil)
	ordered.suite(t, tensor.F32, someOf(nil))
	fast.suite(t, tensor.F16, someOf(plain))
	ordered.suite(t, tensor.BF16, someOf(plain))
}

// someOf leaves out the cases of leaves and, with -short, two of three others. These differ in masks, folds and
// layouts, for which all types run the same code.
func someOf(leaves func(attentiontest.Case) bool) func(attentiontest.Case) bool {
	if !testing.Short() {
		return leaves
	}
	n := -1
	return func(c attentiontest.Case) bool {
		if leaves != nil && leaves(c) {
			return true
		}
		n++
		return n%3 != 0
	}
}

// TestFlashShapesOnHost runs bands, tiles and folds in float32 with head dims of every program, including those for
// GPUs with little shared memory.
func TestFlashShapesOnHost(t *testing.T) {
	h := newHost(t)
	var programs []string
	for _, s := range source.FlashShapes {
		if s.Float32 {
			programs = append(programs, s.Forward().Name, s.Backward().Name, s.DQ().Name)
		}
	}
	h.compiler.prepare(t, programs...)
	for _, shared := range []int{large, source.SmallShared} {
		for _, deterministic := range []bool{false, true} {
			k := &hostFlash{h, deterministic, shared}
			rig := k.rig()
			for _, dims := range [][2]int{{32, 32}, {64, 64}, {128, 128}, {192, 192}, {256, 256}, {512, 512}, {72, 40}, {101, 33}} {
				of := fmt.Sprintf("%d and %d, %d bytes, deterministic %t", dims[0], dims[1], shared, deterministic)
				t.Run(of, func(t *testing.T) {
					h.t = t
					for seed := range uint64(2) {
						if testing.Short() && (seed == 0) != deterministic {
							continue
						}
						c := attentiontest.RandomCase(seed)
						c.Dim, c.DimV = dims[0], dims[1]
						c.Softmax.Scale = 1 / math.Sqrt(float64(c.Dim))
						attentiontest.Check(t, rig, c, tensor.F32)
					}
				})
			}
		}
	}
	for _, name := range programs {
		if !h.ran[name] {
			t.Errorf("%s has not run", name)
		}
	}
}

// A step holds the results of a forward and a backward pass over one block.
type step struct{ o, lse, dq, dk, dv View }

func (k *hostFlash) step(kernel attention.Kernel, q, keys, v, do View, list ...partition.Tile) step {
	k.t.Helper()
	like := func(v View, dim int) View { return k.draw(0, v.Len(tensor.Seq), v.Len(tensor.Heads), dim) }
	dim, dimV := q.Len(tensor.Dim), v.Len(tensor.Dim)
	s := step{like(q, dimV), like(q, 1), like(q, dim), like(keys, dim), like(v, dimV)}
	p := attention.Softmax{Scale: 0.2}
	b := attention.Block{K: keys, V: v, Tiles: list, First: true, Last: true}
	forward, err := kernel.Forward(s.o, attention.Partial{O: s.o, LSE: s.lse}, q, p)
	ok(k.t, err)
	ok(k.t, errors.Join(forward.Block(b), forward.End()))
	backward, err := kernel.Backward(s.dq, do, q, attention.Saved{O: s.o, LSE: s.lse, Delta: like(q, 1)}, p)
	ok(k.t, err)
	grads := attention.GradBlock{Block: b, KeyGrads: attention.KeyGrads{DK: s.dk, DV: s.dv},
		Fresh: span(0, keys.Len(tensor.Seq))}
	ok(k.t, backward.Block(grads))
	return s
}

// same returns an error unless two steps have the same bits.
func (s step) same(t *testing.T, what string, other step) {
	t.Helper()
	for name, pair := range map[string][2]View{"O": {s.o, other.o}, "LSE": {s.lse, other.lse}, "dQ": {s.dq, other.dq},
		"dK": {s.dk, other.dk}, "dV": {s.dv, other.dv}} {
		if !bytes.Equal(tensor.Bytes(pair[0]), tensor.Bytes(pair[1])) {
			t.Errorf("%s: %s is not the same bits", what, name)
		}
	}
}

// TestFlashRepeatsOnHost checks that results of the deterministic kernels do not depend on the order of threads, which
// the host reverses from launch to launch. A forward and backward pass has three launches.
func TestFlashRepeatsOnHost(t *testing.T) {
	k := &hostFlash{newHost(t), true, large}
	q, keys, do := k.draw(1, 150, 4, 40), k.draw(2, 150, 2, 40), k.draw(3, 150, 4, 40)
	window := doc(0, 150, partition.Band{Lo: -100})
	k.step(k, q, keys, keys, do, window).same(t, "twice", k.step(k, q, keys, keys, do, window))
}

// TestFlashReadsNothingOutsideTilesOnHost checks that rows in no tile may have any values, including NaN.
func TestFlashReadsNothingOutsideTilesOnHost(t *testing.T) {
	h := newHost(t)
	for _, deterministic := range []bool{false, true} {
		k := &hostFlash{h, deterministic, large}
		outside := func(row int) bool { return row < 3 || row >= 40 && row < 50 || row >= 60 }
		run := func(fill float32) step {
			rows := func(seed uint64, heads int) View {
				v := k.draw(seed, 70, heads, 40)
				each(v, func(x float32, at [4]int) float32 {
					if outside(at[tensor.Seq]) {
						return fill
					}
					return x
				})
				return v
			}
			return k.step(k, rows(1, 4), rows(2, 2), rows(3, 2), rows(4, 4), doc(3, 40, full), doc(50, 60, full))
		}
		zero, nan := run(0), run(float32(math.NaN()))
		nan.same(t, fmt.Sprintf("deterministic %t", deterministic), zero)
	}
}

// draw returns a tensor of random numbers.
func (k *hostFlash) draw(seed uint64, seq, heads, dim int) View {
	k.t.Helper()
	return random(rand.New(rand.NewPCG(seed, 0)), k.empty(tensor.F32, seq, heads, dim))
}

// empty returns a dense tensor of old values.
func (h *host) empty(dtype tensor.DType, seq, heads, dim int) View {
	h.t.Helper()
	m, err := h.alloc(int64(seq * heads * dim * dtype.Size()))
	ok(h.t, err)
	return tensor.Dense(m, dtype, 0, [4]int{1, seq, heads, dim})
}
