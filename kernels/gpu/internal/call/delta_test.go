//go:build cuda

package call

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/attention/delta/deltatest"
	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/tensor"
)

// hostDelta runs the kernels of the gated delta rule on a host, with a limit of workspace in bytes.
type hostDelta struct {
	*host
	hopper    bool
	shared    int // bytes of a block
	sms       int // of the GPU
	most      int64
	workspace *tensor.Host
}

func (h *hostDelta) call(op string, a delta.Args) error {
	a, err := a.Check(op)
	if err != nil {
		return err
	}
	alloc := func(n int64) (at uint64, err error) {
		if h.workspace == nil || h.workspace.Bytes() < n {
			h.workspace, err = h.alloc(n)
			ok(h.t, err)
		}
		xs := unsafe.Slice((*byte)(h.workspace.Ptr()), n)
		for i := range xs {
			xs[i] = 0xff // NaN
		}
		return uint64(uintptr(h.workspace.Ptr())), nil
	}
	c := Delta{Args: a, Op: op, Hopper: h.hopper, Shared: h.shared, SMs: h.sms, Most: h.most, Alloc: alloc}
	program, err := c.Program()
	if err != nil {
		return err
	}
	launches, err := c.Launches()
	for _, l := range launches {
		p := &l.Params
		for _, x := range []*source.Strided{&p.Q, &p.K, &p.V, &p.G, &p.Beta, &p.Dout, &p.O, &p.DQ, &p.DK, &p.DV, &p.DG,
			&p.Dbeta, &p.From, &p.To} {
			h.move(&x.At)
		}
		h.move(&p.T, &p.P, &p.E, &p.X, &p.S, &p.DS, &p.Factors)
		if err == nil {
			err = h.start(program, l.Kernel, l.Grid, [2]int{source.DeltaThreads, 1}, l.Shared, argumentsOf(p))
		}
	}
	return err
}

func (h *hostDelta) Summarize(a delta.Args) error { return h.call("delta summarize", a) }
func (h *hostDelta) Forward(a delta.Args) error   { return h.call("delta forward", a) }
func (h *hostDelta) SummarizeBackward(a delta.Args) error {
	return h.call("delta summarize backward", a)
}
func (h *hostDelta) Backward(a delta.Args) error { return h.call("delta backward", a) }

func (h *hostDelta) Compose(dst, later, earlier View) error {
	if err := delta.CheckCompose(dst, later, earlier); err != nil {
		return err
	}
	p, grid, shared := DeltaCompose(dst, later, earlier)
	h.move(&p.To.At, &p.Later.At, &p.Earlier.At)
	return h.start("delta", "delta_compose", grid, [2]int{source.DeltaThreads, 1}, shared, argumentsOf(&p))
}

// newDeltaRig returns a rig with limits of a block's shared memory and of workspace, in bytes.
func newDeltaRig(t testing.TB, shared int, most int64) deltatest.Rig {
	return (&hostDelta{host: newHostOf(t, 1<<30), shared: shared, most: most}).rig()
}

func (h *hostDelta) rig() deltatest.Rig {
	return deltatest.Rig{Kernel: h, Upload: func(v View) View {
		mem, err := h.alloc(int64(v.Size()*v.DType().Size()+15) &^ 15)
		ok(h.t, err)
		to := tensor.Dense(mem, v.DType(), 0, v.Shape())
		tensor.Copy(to, v)
		return to
	}, Download: func(v View) (View, error) { return v, nil }, Rounds: true}
}

// TestDelta runs some cases of the suite, which takes minutes on a host: rows that need no full chunk, views with gaps,
// and every program and kernel.
func TestDelta(t *testing.T) {
	needCompiler(t).prepare(t, "delta", "delta_fp32", "delta_hopper")
	h := &hostDelta{host: newHostOf(t, 1<<30), shared: 227 << 10, most: 1 << 30}
	for i, dtype := range []tensor.DType{tensor.BF16, tensor.F16, tensor.F32, tensor.BF16, tensor.F16} {
		h.hopper = i > 2
		h.sms = 1000 * (i % 2) // of more, blocks have fewer columns
		for beta, dims := range [][2]int{{5, 70}, {16, 48}, {144, 5}} {
			c := deltatest.Case{Name: "host", Batch: 2, KeyHeads: 1, Heads: 2, Dim: dims[0], DimV: dims[1],
				Segments: []delta.Segment{{Lo: 1, Hi: 20}, {Lo: 20, Hi: 90}}, Decay: 0.1, Drop: -1e4, Beta: float64(min(beta, 1)),
				Gaps: dims[0] == 16}
			t.Run(fmt.Sprint(dtype, h.hopper, dims), func(t *testing.T) { deltatest.Check(t, h.rig(), c, dtype) })
		}
	}
}

// TestDeltaWaves checks calls with workspace for one chunk, on GPUs with little shared memory.
func TestDeltaWaves(t *testing.T) {
	c := deltatest.Case{Name: "waves", Batch: 1, KeyHeads: 1, Heads: 1, Dim: 15, DimV: 5,
		Segments: []delta.Segment{{Lo: 0, Hi: 70}, {Lo: 70, Hi: 200}, {Lo: 200, Hi: 270}}, Decay: 0.05, Beta: 1}
	deltatest.Check(t, newDeltaRig(t, source.SmallShared, 1), c, tensor.BF16)
}

// TestDeltaTypes checks that dO and results in float32 and in bfloat16 are equal, except for rounding.
func TestDeltaTypes(t *testing.T) {
	rig, rng := newDeltaRig(t, 227<<10, 1<<30), rand.New(rand.NewPCG(1, 2))
	const seq, dim, dimV = 70, 16, 16
	keys, wide, row := [4]int{1, seq, 1, dim}, [4]int{1, seq, 2, dimV}, [4]int{1, seq, 2, 1}
	state, maps := [4]int{1, 2, dim, dimV}, [4]int{1, 2, dim, dim + dimV}
	shapes := [][4]int{keys, keys, wide, row, row, wide, state, state, maps, maps, wide, keys, keys, wide, row, row}
	inputs := make([]View, 8)
	for i := range inputs {
		n := shapes[i]
		inputs[i] = tensor.New(tensor.BF16, n[:]...)
		xs := make([]float64, inputs[i].Size())
		for j := range xs {
			if xs[j] = rng.NormFloat64() / 4; delta.Names[i] == "g" {
				xs[j] = -math.Abs(xs[j])
			}
		}
		near.Encode(inputs[i], xs)
	}
	run := func(of tensor.DType) (results [][]float64) {
		a := delta.Args{Scale: 0.25, Segments: []delta.Segment{{Lo: 0, Hi: seq}}, Entered: []int{0},
			Followed: []int{0}}
		for i, v := range a.Views() {
			dtype := tensor.F32
			switch name := delta.Names[i]; name {
			case "q", "k", "v":
				dtype = tensor.BF16
			case "do", "o", "dq", "dk", "dv":
				dtype = of
			}
			n := shapes[i]
			host := tensor.New(dtype, n[:]...)
			if i < len(inputs) {
				near.Encode(host, near.Decode(inputs[i]))
			}
			*v = rig.Upload(host)
		}
		ok(t, errors.Join(rig.Kernel.SummarizeBackward(a), rig.Kernel.Forward(a), rig.Kernel.Backward(a)))
		for _, v := range a.Views()[9:] {
			results = append(results, near.Decode(*v))
		}
		return results
	}
	got := run(tensor.BF16)
	for i, want := range run(tensor.F32) {
		name := delta.Names[9+i]
		for j, x := range want {
			if slices.Contains([]string{"o", "dq", "dk", "dv"}, name) {
				x = near.Round(x, tensor.BF16)
			}
			if got[i][j] != x {
				t.Fatalf("%s[%d] is %v in bfloat16, but %v in float32", name, j, got[i][j], x)
			}
		}
	}
}

// TestDeltaCompose compares with the reference, in place and elsewhere.
func TestDeltaCompose(t *testing.T) {
	rig, rng := newDeltaRig(t, 0, 0), rand.New(rand.NewPCG(1, 2))
	const dim, dimV = 20, 30
	draw := func(columns int) View {
		v := tensor.New(tensor.F32, 2, 2, dim, columns)
		for i := range tensor.Data[float32](v) {
			tensor.Data[float32](v)[i] = float32(rng.NormFloat64())
		}
		return v
	}
	for _, columns := range []int{dim + dimV, dimV} {
		later, earlier, want := draw(dim+dimV), draw(columns), draw(columns)
		ok(t, delta.Reference{}.Compose(want, later, earlier))
		for place := range 3 {
			a, b := rig.Upload(later), rig.Upload(earlier)
			to := []View{rig.Upload(draw(columns)), a, b}[place]
			if place == 1 && columns == dimV {
				continue
			}
			ok(t, rig.Kernel.Compose(to, a, b))
			ok(t, near.Within(near.Decode(to), near.Decode(want), near.Finite, 1e-6))
		}
	}
}

// TestDeltaFaults checks calls that the kernels do not support.
func TestDeltaFaults(t *testing.T) {
	for _, c := range []struct {
		dtype       tensor.DType
		dim, shared int
	}{{tensor.F64, 16, 1 << 30}, {tensor.BF16, 257, 1 << 30}, {tensor.F32, 128, source.SmallShared}} {
		q := tensor.New(c.dtype, 1, 1, 1, c.dim)
		d := Delta{Args: delta.Args{Q: q, K: q, V: q}, Op: "delta backward", Shared: c.shared}
		if _, err := d.Program(); err == nil {
			t.Errorf("%v with dim %d takes %d bytes of shared memory", c.dtype, c.dim, c.shared)
		}
	}
	q := tensor.New(tensor.BF16, 1, 1, 1, 128)
	d := Delta{Args: delta.Args{Q: q, K: q, V: q}, Op: "delta backward", Shared: source.SmallShared}
	_, err := d.Program()
	ok(t, err)
}
