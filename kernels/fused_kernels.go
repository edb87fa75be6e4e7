//go:build cuda

package kernels

import (
	"github.com/cprun/cprun/internal/cuda"
	"github.com/cprun/cprun/internal/tensor"
)

// fusedKernels are the functions of source/fused.cu.
type fusedKernels struct {
	merge, mergeF32, sum map[tensor.DType]*cuda.Function
	lse, fill            *cuda.Function
	sms                  int
}

func loadFused(loader *Loader) (fusedKernels, error) {
	k := fusedKernels{
		merge: map[tensor.DType]*cuda.Function{}, mergeF32: map[tensor.DType]*cuda.Function{}, sum: map[tensor.DType]*cuda.Function{},
		sms: loader.Device().SMs,
	}
	m, err := loader.Load("fused")
	if err != nil {
		return k, err
	}
	find := func(name string) *cuda.Function {
		f, e := m.Function(name, 0)
		if err == nil {
			err = e
		}
		return f
	}
	for t, name := range map[tensor.DType]string{tensor.BF16: "bf16", tensor.F16: "f16"} {
		k.merge[t], k.mergeF32[t], k.sum[t] = find("fused_merge_"+name), find("fused_merge_"+name+"_f32"), find("fused_sum_"+name)
	}
	k.lse, k.fill = find("fused_lse"), find("fused_fill")
	return k, err
}

// axisStrides are those of batch, seq and heads, in elements.
type axisStrides [3]int64

func stridesOf(v View) axisStrides {
	return axisStrides{v.Stride(tensor.Batch), v.Stride(tensor.Seq), v.Stride(tensor.Heads)}
}

// denseRows are the strides of [batch, rows, heads, dim].
func denseRows(rows, heads, dim int) axisStrides {
	return axisStrides{int64(rows) * int64(heads) * int64(dim), int64(heads) * int64(dim), int64(dim)}
}

// headsFirst are the strides of [batch, heads, rows].
func headsFirst(rows, heads int) axisStrides {
	return axisStrides{int64(heads) * int64(rows), 1, int64(rows)}
}

// fusedPart is a partial result for rows [lo, hi): x, 16-bit and dense, and for a forward pass the
// LSE.
type fusedPart struct {
	x, lse uint64
	at     axisStrides // of the LSE
	lo, hi int
	gaps   bool // there are rows with LSE = -Inf, whose x is not set
}

// address adds where a tensor begins and its strides.
func address(a *cuda.Args, p uint64, s axisStrides) {
	a.Addr(p).Int64(s[0]).Int64(s[1]).Int64(s[2])
}

// addParts adds an array of maxHeld parts.
func addParts(a *cuda.Args, parts []fusedPart) {
	for i := range maxHeld {
		var p fusedPart
		if i < len(parts) {
			p = parts[i]
		}
		a.Addr(p.x)
		address(a, p.lse, p.at)
		a.Int(p.lo).Int(p.hi)
	}
}

// mergePairs is the pairs of a row and a head that a block weighs at most.
const mergePairs = 256

// merging is one pass of fused_merge: the parts, of type dtype, and the accumulator where it is not
// fresh, go into lse and out. With all, rows that nothing is known of are written, too.
type merging struct {
	out, acc, lse View
	dtype         tensor.DType
	parts         []fusedPart
	fresh, all    bool
}

func (k *fusedKernels) mergeInto(s *cuda.Stream, m merging) {
	if m.out.Size() == 0 {
		return
	}
	f := k.merge[m.dtype]
	if m.out.DType() == tensor.F32 {
		f = k.mergeF32[m.dtype]
	}
	seq, heads := m.out.Len(tensor.Seq), m.out.Len(tensor.Heads)
	headsPerBlock, rowsPerBlock := min(heads, 32), 8
	for 2*rowsPerBlock*headsPerBlock <= mergePairs {
		rowsPerBlock *= 2
	}
	a := &cuda.Args{}
	addParts(a, m.parts)
	address(a, cuda.Addr(m.acc), stridesOf(m.acc))
	address(a, cuda.Addr(m.lse), stridesOf(m.lse))
	address(a, cuda.Addr(m.out), stridesOf(m.out))
	a.Int(len(m.parts)).Int(cInt(m.fresh)).Int(cInt(m.all))
	a.Int(seq).Int(heads).Int(m.out.Len(tensor.Dim)).Int(rowsPerBlock).Int(headsPerBlock)
	grid := cuda.Dim{X: ceilDiv(seq, rowsPerBlock), Y: ceilDiv(heads, headsPerBlock), Z: m.out.Len(tensor.Batch)}
	s.Launch(f, cuda.Launch{Grid: grid, Block: cuda.Dim{X: 256}}, a)
}

// gradTotal is what sum does to rows [lo, hi) of dst: those in fresh become the sum of the parts
// and of src, others that one of them has get it added. src, float32, is rows [at, at + its length) of
// dst; the zero View: none.
type gradTotal struct {
	dst    View
	parts  []fusedPart
	lo, hi int
	fresh  rowInterval
	src    View
	at     int
}

// withSrc is t with src, which is added to rows from at on.
func (t gradTotal) withSrc(src View, at int) gradTotal {
	t.lo, t.hi = min(t.lo, at), max(t.hi, at+src.Len(tensor.Seq))
	t.src, t.at = src, at
	return t
}

// total computes one or two totals of parts of type t.
func (k *fusedKernels) total(s *cuda.Stream, t tensor.DType, totals ...gradTotal) {
	a, most, batch := &cuda.Args{}, 0, 0
	for i := range 2 {
		var v gradTotal
		if i < len(totals) {
			v = totals[i]
			n := v.dst.Len(tensor.Heads) * v.dst.Len(tensor.Dim) / 8
			most = max(most, (v.hi-v.lo)*n)
			batch = v.dst.Len(tensor.Batch)
		}
		addParts(a, v.parts)
		address(a, cuda.Addr(v.dst), stridesOf(v.dst))
		address(a, cuda.Addr(v.src), stridesOf(v.src))
		a.Int(len(v.parts)).Int(v.lo).Int(v.hi).Int(v.fresh.lo).Int(v.fresh.hi)
		a.Int(v.at).Int(v.at + v.src.Len(tensor.Seq))
		a.Int(v.dst.Len(tensor.Heads)).Int(v.dst.Len(tensor.Dim)).Int(0)
	}
	if most == 0 {
		return
	}
	s.Launch(k.sum[t], cuda.Launch{Grid: cuda.Dim{X: k.grid(most), Y: len(totals), Z: batch}, Block: cuda.Dim{X: 256}}, a)
}

// grid is the blocks of 256 threads for n pieces of work, several waves at most.
func (k *fusedKernels) grid(n int) int { return min(ceilDiv(n, 256), 64*k.sms) }

// copyLSE copies rows of [batch, rows, heads] from src to dst. With open, -Inf becomes Inf.
func (k *fusedKernels) copyLSE(s *cuda.Stream, dst uint64, dstAt axisStrides, src uint64, srcAt axisStrides, batch, rows, heads int, open bool) {
	a := &cuda.Args{}
	address(a, src, srcAt)
	address(a, dst, dstAt)
	a.Int(rows).Int(heads).Int(cInt(open)).Int(0)
	s.Launch(k.lse, cuda.Launch{Grid: cuda.Dim{X: ceilDiv(rows, 32), Y: ceilDiv(heads, 32), Z: batch}, Block: cuda.Dim{X: 32, Y: 8}}, a)
}

// fill32 sets n float32 to x.
func (k *fusedKernels) fill32(s *cuda.Stream, p uint64, n int, x float64) {
	a := (&cuda.Args{}).Addr(p).Int64(int64(n)).Float(x)
	s.Launch(k.fill, cuda.Launch{Grid: cuda.Dim{X: k.grid(n)}, Block: cuda.Dim{X: 256}}, a)
}

func ceilDiv(n, of int) int { return (n + of - 1) / of }

func cInt(b bool) int {
	if b {
		return 1
	}
	return 0
}
