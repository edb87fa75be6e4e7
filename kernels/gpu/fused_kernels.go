//go:build cuda

package gpu

import (
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// fusedKernels launches the functions of source/fused.cu.
type fusedKernels struct {
	loader *Loader
	sms    int
}

const fusedProgram = "fused"

// fusedNames names the kernels for one type of parts.
type fusedNames struct{ merge, mergeF32, sum string }

var fusedTypes = map[tensor.DType]fusedNames{
	tensor.BF16: {"fused_merge_bf16", "fused_merge_bf16_fp32", "fused_sum_bf16"},
	tensor.F16:  {"fused_merge_fp16", "fused_merge_fp16_fp32", "fused_sum_fp16"},
}

// loadFused looks up all functions, so that a missing one fails early.
func loadFused(loader *Loader) (fusedKernels, error) {
	k := fusedKernels{loader: loader, sms: loader.Device().SMs}
	names := []string{"fused_lse", "fused_fill"}
	for _, t := range fusedTypes {
		names = append(names, t.merge, t.mergeF32, t.sum)
	}
	for _, name := range names {
		if _, err := loader.Function(fusedProgram, name, 0); err != nil {
			return k, err
		}
	}
	return k, nil
}

func (k *fusedKernels) launch(s *cuda.Stream, name string, grid, block cuda.Dim, a *cuda.Args) {
	f, err := k.loader.Function(fusedProgram, name, 0)
	if err != nil {
		s.Fail(err)
		return
	}
	s.Launch(f, cuda.Launch{Grid: grid, Block: block}, a)
}

// axisStrides holds the strides of batch, seq and heads, in elements.
type axisStrides [3]int64

func stridesOf(v View) axisStrides {
	return axisStrides{v.Stride(tensor.Batch), v.Stride(tensor.Seq), v.Stride(tensor.Heads)}
}

// denseRows returns the strides of [batch, rows, heads, dim].
func denseRows(rows, heads, dim int) axisStrides {
	return axisStrides{int64(rows) * int64(heads) * int64(dim), int64(heads) * int64(dim), int64(dim)}
}

// headsFirst returns the strides of [batch, heads, rows].
func headsFirst(rows, heads int) axisStrides {
	return axisStrides{int64(heads) * int64(rows), 1, int64(rows)}
}

// A fusedPart is a partial result for rows [lo, hi): x, 16-bit and dense, and in a forward pass the LSE.
type fusedPart struct {
	x, lse uint64
	at     axisStrides // of the LSE
	lo, hi int
	gaps   bool // some rows have LSE = -Inf and unset x
}

func (s axisStrides) c() source.FusedStrides {
	return source.FusedStrides{Batch: s[0], Seq: s[1], Head: s[2]}
}

// The held parts must fit the kernel's arguments.
const _ = uint(source.FusedMaxParts - maxHeld)

func cParts(parts []fusedPart) (c [source.FusedMaxParts]source.FusedPart) {
	for i, p := range parts {
		c[i] = source.FusedPart{X: p.x, LSE: p.lse, L: p.at.c(), Lo: int32(p.lo), Hi: int32(p.hi)}
	}
	return c
}

// mergePairs bounds the (row, head) pairs of a block.
const mergePairs = 256

// A merging holds the arguments of fused_merge, which merges the parts, of type dtype, and the accumulator, unless it
// is fresh, into lse and out. With all, it also writes rows that have no part.
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
	name := fusedTypes[m.dtype].merge
	if m.out.DType() == tensor.F32 {
		name = fusedTypes[m.dtype].mergeF32
	}
	seq, heads := m.out.Len(tensor.Seq), m.out.Len(tensor.Heads)
	headsPerBlock, rowsPerBlock := min(heads, 32), 8
	for 2*rowsPerBlock*headsPerBlock <= mergePairs {
		rowsPerBlock *= 2
	}
	p := source.FusedMerge{
		Parts: cParts(m.parts), Count: int32(len(m.parts)), Fresh: cInt(m.fresh), All: cInt(m.all),
		State: m.acc.Addr(), StateAt: stridesOf(m.acc).c(),
		LSE: m.lse.Addr(), LSEAt: stridesOf(m.lse).c(),
		Out: m.out.Addr(), OutAt: stridesOf(m.out).c(),
		Seq: int32(seq), Heads: int32(heads), Dim: length(m.out, tensor.Dim),
		RowsPerBlock: int32(rowsPerBlock), HeadsPerBlock: int32(headsPerBlock),
	}
	grid := cuda.Dim{X: ceilDiv(seq, rowsPerBlock), Y: ceilDiv(heads, headsPerBlock), Z: m.out.Len(tensor.Batch)}
	k.launch(s, name, grid, cuda.Dim{X: 256}, cuda.Struct(&cuda.Args{}, &p))
}

// A gradTotal describes a sum into rows [lo, hi) of dst. Rows in fresh become the sum of the parts and of src; to other
// rows the sum is added. src, float32, belongs to the rows of dst since at; the zero View: none.
type gradTotal struct {
	dst    View
	parts  []fusedPart
	lo, hi int
	fresh  partition.Range
	src    View
	at     int
}

// withSrc returns t with src added to the rows since at.
func (t gradTotal) withSrc(src View, at int) gradTotal {
	t.lo, t.hi = min(t.lo, at), max(t.hi, at+src.Len(tensor.Seq))
	t.src, t.at = src, at
	return t
}

func (t *gradTotal) c() source.FusedSum {
	return source.FusedSum{
		Parts: cParts(t.parts), Count: int32(len(t.parts)),
		Dst: t.dst.Addr(), At: stridesOf(t.dst).c(),
		Src: t.src.Addr(), SrcAt: stridesOf(t.src).c(),
		Lo: int32(t.lo), Hi: int32(t.hi), Fresh0: int32(t.fresh.Lo), Fresh1: int32(t.fresh.Hi),
		Src0: int32(t.at), Src1: int32(t.at + t.src.Len(tensor.Seq)),
		Heads: length(t.dst, tensor.Heads), Dim: length(t.dst, tensor.Dim),
	}
}

// total computes one or two totals of parts of type t.
func (k *fusedKernels) total(s *cuda.Stream, t tensor.DType, totals ...gradTotal) {
	var p source.FusedSums
	most, batch := 0, 0
	for i, v := range totals {
		n := v.dst.Len(tensor.Heads) * v.dst.Len(tensor.Dim) / 8
		most = max(most, (v.hi-v.lo)*n)
		batch = v.dst.Len(tensor.Batch)
		p.Of[i] = v.c()
	}
	if most == 0 {
		return
	}
	k.launch(s, fusedTypes[t].sum, cuda.Dim{X: k.grid(most), Y: len(totals), Z: batch}, cuda.Dim{X: 256},
		cuda.Struct(&cuda.Args{}, &p))
}

// grid returns the number of blocks of 256 threads for n pieces of work, at most several waves.
func (k *fusedKernels) grid(n int) int { return min(ceilDiv(n, 256), 64*k.sms) }

// copyLSE copies the LSE [batch, rows, heads] from src to dst. With open, it replaces -Inf by Inf.
func (k *fusedKernels) copyLSE(s *cuda.Stream, dst uint64, dstAt axisStrides, src uint64, srcAt axisStrides, batch,
	rows, heads int, open bool) {
	p := source.FusedLSE{
		Src: src, SrcAt: srcAt.c(), Dst: dst, DstAt: dstAt.c(), Rows: int32(rows), Heads: int32(heads),
		Open: cInt(open),
	}
	k.launch(s, "fused_lse", cuda.Dim{X: ceilDiv(rows, 32), Y: ceilDiv(heads, 32), Z: batch}, cuda.Dim{X: 32, Y: 8},
		cuda.Struct(&cuda.Args{}, &p))
}

// fill32 sets n float32 to x.
func (k *fusedKernels) fill32(s *cuda.Stream, p uint64, n int, x float64) {
	a := (&cuda.Args{}).Addr(p).Int64(int64(n)).Float(x)
	k.launch(s, "fused_fill", cuda.Dim{X: k.grid(n)}, cuda.Dim{X: 256}, a)
}
