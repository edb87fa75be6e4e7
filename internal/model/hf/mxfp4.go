package hf

import (
	"fmt"
	"math"
	"slices"

	"github.com/cprun/cprun/internal/base/safetensors"
)

// These end the names of the two tensors with a matrix in MXFP4 (OCP Microscaling Formats 1.0): of each row of it, in
// bytes of two values, the lower bits first, and a scale for each group.
const (
	blocksSuffix = "_blocks" // uint8 [experts, rows, groups, 16]
	scalesSuffix = "_scales" // uint8 [experts, rows, groups]
	groupFP4     = 32
)

// fp4 has the positive values of E2M1. The fourth bit is the sign.
var fp4 = [8]float32{0, 0.5, 1, 1.5, 2, 3, 4, 6}

// isFP4 reports whether files have the matrix of a piece in MXFP4.
func (w *Weights) isFP4(p piece) bool {
	return p.Across > 0 && w.find(p.in.Name) == "" && w.find(p.in.Name+blocksSuffix) != ""
}

// checkFP4 finds faults of the two tensors.
func (w *Weights) checkFP4(p piece) error {
	scales := []int{p.of.Experts, p.Across, p.of.cols() / groupFP4}
	for i, shape := range [][]int{append(slices.Clip(scales), groupFP4/2), scales} {
		suffix := []string{blocksSuffix, scalesSuffix}[i]
		name := w.find(p.in.Name + suffix)
		if name == "" {
			return fmt.Errorf("%s: tensor %.255q is missing", w.what, p.in.Name+suffix)
		}
		if in, _ := w.where[name].Info(w.stored(name)); !slices.Equal(in.Shape, shape) || in.DType != safetensors.U8 {
			return fmt.Errorf("%s: tensor %.255q: %.64s %v, but %s needs U8 %v", w.what, name, in.DType, in.Shape, w.needs,
				shape)
		}
	}
	if cols := p.of.cols(); cols%groupFP4 > 0 {
		return fmt.Errorf("%s: tensor %.255q: rows of %d values are no groups of %d", w.what, p.in.Name, cols, groupFP4)
	}
	return nil
}

// readFP4 fills dst with the elements of a piece, which are exact.
func (w *Weights) readFP4(p piece, dst []float32) error {
	if err := w.checkFP4(p); err != nil {
		return err
	}
	cols := int64(p.of.cols())
	values, scales := make([]byte, cols/2), make([]byte, cols/groupFP4)
	first := p.at / int64(p.of.Size()/p.of.Experts) * int64(p.Across) // row of the expert
	for r := p.off / cols; r*cols < p.off+p.n; r++ {
		row := first + int64(p.Before) + r*int64(p.Step)
		for i, b := range [][]byte{values, scales} {
			name := w.find(p.in.Name + []string{blocksSuffix, scalesSuffix}[i])
			if err := w.where[name].ReadBytes(w.stored(name), b, row*int64(len(b))); err != nil {
				return err
			}
		}
		for c := max(0, p.off-r*cols); c < min(cols, p.off+p.n-r*cols); c++ {
			bits := values[c/2] >> (c % 2 * 4)
			x := fp4[bits&7] * powerOfTwo(scales[c/groupFP4])
			if bits&8 > 0 {
				x = -x
			}
			dst[r*cols+c-p.off] = x
		}
	}
	return nil
}

// powerOfTwo returns the value of a scale, E8M0: 2^(b-127), or NaN for 255.
func powerOfTwo(b byte) float32 {
	switch b {
	case 0:
		return math.Float32frombits(1 << 22)
	case 255:
		return float32(math.NaN())
	}
	return math.Float32frombits(uint32(b) << 23)
}
