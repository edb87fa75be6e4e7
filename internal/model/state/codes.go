package state

import (
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// LoadSize is the most elements of frozen matrices that are in memory in another type before they are codes, unless a
// row has more. Tests change it.
var LoadSize = 8 << 20

// Rows are whole rows of a matrix in E4M3, or a part of one.
type Rows struct {
	model.Range             // in the flat space
	Whole       model.Range // the rows that they are in
	first, n    int         // of the factors
}

// cut reports whether these are a part of a row.
func (r Rows) cut() bool { return r.Range != r.Whole }

// Rows divides a range of a bucket of matrices in E4M3, each of most elements or a row.
func (s *State) Rows(bucket int, of model.Range, most int) (list []Rows) {
	for i, p := range s.Flat.Params {
		if s.Flat.Of(i) != bucket {
			continue
		}
		width := int64(p.Shape[1])
		lo, hi := max(p.Offset, of.Lo), min(p.Offset+int64(p.Size()), of.Hi)
		for lo < hi {
			row, n := (lo-p.Offset)/width, int64(1)
			start := p.Offset + row*width
			if lo == start {
				n = max(1, min(hi-lo, int64(most))/width)
			}
			end := start + n*width
			list = append(list, Rows{model.Range{Lo: lo, Hi: min(hi, end)}, model.Range{Lo: start, Hi: end},
				p.Row + int(row), int(n)})
			lo = end
		}
	}
	return list
}

// Quantize sets the codes of this rank's part of a bucket from updated weights, and the factors of its rows. Ranks with
// parts of a row then take the largest factor, and again sets only the codes of such parts, by that factor.
func (s *State) Quantize(ops model.ScaledProducts, bucket int, again bool) {
	held := s.HeldRange(bucket)
	codes, x := s.Held(s.codes, bucket), s.Copied(bucket, 0, int(held.Size()))
	if x.IsZero() {
		x = s.Held(s.Masters, bucket)
	}
	for _, r := range s.Rows(bucket, held, int(held.Size())) {
		if lo, hi := int(r.Lo-held.Lo), int(r.Hi-held.Lo); !again || r.cut() {
			s.quantize(ops, r, Part(codes, lo, hi), Part(x, lo, hi), again)
		}
	}
}

// Loaded returns the memory for whole rows of a base, the input of QuantizeLoaded.
func (s *State) Loaded(r Rows) View { return Part(s.updated, 0, int(r.Whole.Size())) }

// QuantizeLoaded sets codes of r, and the factors of its rows.
func (s *State) QuantizeLoaded(ops model.ScaledProducts, r Rows, codes View) {
	x := s.Loaded(r)
	if r.cut() {
		s.quantize(ops, r, Part(s.cut, 0, x.Size()), x, false) // for the factor
		x = Part(x, int(r.Lo-r.Whole.Lo), int(r.Hi-r.Whole.Lo))
	}
	s.quantize(ops, r, codes, x, r.cut())
}

// quantize sets codes and factors of r, given its elements. With known, the factors are no less than before.
func (s *State) quantize(ops model.ScaledProducts, r Rows, codes, x View, known bool) {
	matrix := func(v View) View { return v.Reshape([4]int{1, r.n, 1, v.Size() / r.n}) }
	to := kernels.Scaled{View: matrix(codes), Factors: Part(s.Factors, r.first, r.first+r.n)}
	if known {
		to.Least = to.Factors
	}
	ops.Quantize(to, kernels.Scaled{}, matrix(x), View{})
}

// takeCodes allocates codes, in a buffer of that many parts of each bucket, and factors.
func (s *State) takeCodes(t *taking, what string, parts int64) {
	s.codes = t.vector(what, tensor.U8, int(s.codesIn(parts)))
	s.Factors = t.vector(what, tensor.F32, s.Flat.FactorsSize())
}

// takeUpdated allocates updated.
func (s *State) takeUpdated(t *taking, dtype tensor.DType) {
	most, all := int64(0), int64(0)
	for b := range s.Flat.Buckets {
		if n := s.HeldRange(b).Size(); s.Flat.Scaled(b) {
			most, all = max(most, n), all+n
		}
	}
	// On the host, updates run ahead of the passes that quantize. In fp16, a skipped step sets nothing.
	if s.keeps = s.OnHost || dtype == tensor.F16; s.keeps {
		most = all
	}
	s.updated = t.vector(Compute, dtype, int(most))
}

// codesIn returns the elements of matrices in E4M3 in a buffer of that many parts of each bucket; 0: of everything.
func (s *State) codesIn(parts int64) int64 {
	if parts == 0 {
		return s.Flat.CodesSize()
	}
	return parts * s.parts[s.Flat.Embedding()].Lo
}

// Read returns the buffer from which the model reads a bucket.
func (s *State) Read(bucket int) View {
	if s.Flat.Scaled(bucket) {
		return s.codes
	}
	return s.compute
}

// skipped returns the elements of the flat space that a buffer lacks at its begin.
func (s *State) skipped(v View) int64 {
	if v == s.compute && v != s.Masters {
		return s.codesIn(s.partsIn(v))
	}
	return 0
}

// takeBuffers allocates the memory for gathered weights.
func (s *State) takeBuffers(t *taking, what string, dtype tensor.DType, slots int) []View {
	return stages(s.Flat, slots, s.vectors, func(stage, n int) View {
		if stage > slots+1 {
			return t.vector(what, tensor.U8, n)
		}
		return t.vector(what, dtype, n)
	})
}
