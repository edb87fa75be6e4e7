package model

import (
	"cmp"
	"fmt"
	"math"
	"sync"

	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

// Rope is a model's rotary position embedding (RoFormer, arXiv:2104.09864): pair i of a head rotates by position *
// InvFreq[i]. The frequencies, stretched or not, equal Hugging Face's modeling_rope_utils operation by operation and in
// its precision, since weights depend on the rounding of these tables.
type Rope struct {
	InvFreq []float32 // 0: the pair does not rotate
	// Local is the second table, if there is one: of layers with a window, never scaled, or of queries, whose cos and sin
	// grow as in hf.RopeScaling.QueryBeta.
	Local []float32
	beta  float64
	// Long replaces InvFreq in documents of more than Short tokens: longrope. nil: no other frequencies.
	Long  []float32
	Short int // the trained length
	// Factor multiplies cos and sin, so that attention scores grow by its square: the attention factor of yarn and
	// longrope, 1 for all others.
	Factor float64
}

// NewRope computes the frequencies of a model.
func NewRope(cfg *hf.Config) *Rope {
	pairs := cfg.RopePairs()
	powers := powersOf(cfg.RopeTheta, pairs[0])
	r := &Rope{InvFreq: inverse(powers, nil), Factor: 1}
	if len(pairs) > 1 { // unless they are of queries
		r.Local = inverse(powersOf(cmp.Or(cfg.RopeLocalBaseFreq, cfg.RopeTheta), pairs[1]), nil)
	}
	clear(r.InvFreq[cfg.RotatingPairs():])
	s := cfg.RopeScaling
	if s == nil {
		return r
	}
	switch s.Type {
	case "default", "":
	case "linear":
		for i := range r.InvFreq {
			r.InvFreq[i] /= float32(s.Factor)
		}
	case "llama3":
		r.llama3(s)
	case "yarn":
		r.yarn(cfg, s, powers)
	case "longrope":
		r.InvFreq, r.Long = inverse(powers, s.ShortFactor), inverse(powers, s.LongFactor)
		r.Short, r.Factor = s.OriginalMax, longFactor(s)
	default:
		panic(fmt.Sprintf("model: rope type %q in a resolved config", s.Type))
	}
	if s.QueryBeta > 0 {
		r.Local, r.beta, r.Short = r.InvFreq, s.QueryBeta, s.OriginalMax
	}
	return r
}

// longFactor returns longrope's attention factor (arXiv:2402.13753).
func longFactor(s *hf.RopeScaling) float64 {
	switch {
	case s.AttentionFactor != nil:
		return *s.AttentionFactor
	case s.Factor <= 1:
		return 1
	}
	return math.Sqrt(1 + math.Log(s.Factor)/math.Log(float64(s.OriginalMax)))
}

// powersOf returns the base to the power of each pair's exponent.
func powersOf(theta float64, pairs int) []float32 {
	powers := make([]float32, pairs)
	for i := range powers {
		// torch raises the base to a float32 tensor: the exponent and the power are rounded.
		powers[i] = float32(math.Pow(theta, float64(float32(2*i)/float32(2*pairs))))
	}
	return powers
}

// inverse returns the frequencies, divided by factors unless these are nil.
func inverse(powers []float32, factors []float64) []float32 {
	f := make([]float32, len(powers))
	for i, p := range powers {
		if factors != nil {
			p = float32(factors[i]) * p
		}
		f[i] = 1 / p
	}
	return f
}

// llama3 divides long wavelengths by the factor, keeps short ones, and blends in between (Llama 3.1's reference code).
func (r *Rope) llama3(s *hf.RopeScaling) {
	length := float32(s.OriginalMax)
	lowWavelen := float32(float64(s.OriginalMax) / s.LowFreqFactor)
	highWavelen := float32(float64(s.OriginalMax) / s.HighFreqFactor)
	factor, low := float32(s.Factor), float32(s.LowFreqFactor)
	for i, f := range r.InvFreq {
		wavelen := float32(2*math.Pi) / f
		switch {
		case wavelen > lowWavelen:
			r.InvFreq[i] = f / factor
		case wavelen >= highWavelen:
			smooth := (length/wavelen - low) / float32(s.HighFreqFactor-s.LowFreqFactor)
			// The conversion keeps the compiler from fusing product and sum, which would round differently on machines
			// with such an instruction.
			r.InvFreq[i] = float32((1-smooth)*f/factor) + float32(smooth*f)
		}
	}
}

// yarn interpolates dimensions with fewer than BetaSlow turns within the trained length, keeps dimensions with more
// than BetaFast turns, and ramps in between (arXiv:2309.00071).
func (r *Rope) yarn(cfg *hf.Config, s *hf.RopeScaling, powers []float32) {
	factor := s.Factor
	if factor == 0 { // as in DeepSeek's configs
		factor = float64(cfg.MaxPositionEmbedding) / float64(s.OriginalMax)
	}
	r.Factor = yarnFactor(s, factor)
	low, high := yarnRange(cfg, s)
	if low == high {
		high += 0.001
	}
	for i, f := range r.InvFreq {
		interpolated := 1 / (float32(factor) * powers[i])
		ramp := min(max((float32(i)-float32(low))/float32(high-low), 0), 1)
		keep := 1 - ramp
		r.InvFreq[i] = float32(interpolated*(1-keep)) + float32(f*keep)
	}
}

// yarnFactor returns the attention factor: given, or 0.1 ln(factor) + 1, or DeepSeek's ratio.
func yarnFactor(s *hf.RopeScaling, factor float64) float64 {
	mscale := func(m float64) float64 {
		if factor <= 1 {
			return 1
		}
		return 0.1*m*math.Log(factor) + 1
	}
	switch {
	case s.AttentionFactor != nil:
		return *s.AttentionFactor
	case s.MScale != 0 && s.MScaleAllDim != 0:
		return mscale(s.MScale) / mscale(s.MScaleAllDim)
	}
	return mscale(1)
}

func yarnRange(cfg *hf.Config, s *hf.RopeScaling) (low, high float64) {
	fast, slow := cmp.Or(s.BetaFast, 32), cmp.Or(s.BetaSlow, 1)
	dim := float64(cfg.RotaryDim())
	pairTurning := func(turns float64) float64 {
		return dim * math.Log(float64(s.OriginalMax)/(turns*2*math.Pi)) / (2 * math.Log(cfg.RopeTheta))
	}
	low, high = pairTurning(fast), pairTurning(slow)
	if s.Truncate == nil || *s.Truncate {
		low, high = math.Floor(low), math.Ceil(high)
	}
	return max(low, 0), min(high, dim-1)
}

// Fill writes the tables for positions, which count from 0 in each document: this rank's tokens, batch after batch.
// lengths are those of the tokens' documents, for Long; without it they may be nil. cos, sin: [batch, seq, 1, pairs] on
// the host, and with Local a table of it after that, float32, or float64 for a float64 model.
//
// The angle is the float32 product of position and frequency, as in Hugging Face and other trainers. At a million
// positions it is off by up to 0.03 rad in the fastest pairs, but an exact angle would disagree with every library that
// later runs the weights. Beyond 2^24, float32 lacks odd positions, and the angle is a float64 product. cos and sin of
// the angle are computed in float64 and rounded once.
func (r *Rope) Fill(cos, sin View, positions, lengths []int) {
	switch cos.DType() {
	case tensor.F64:
		fillRope(r, tensor.Data[float64](cos), tensor.Data[float64](sin), positions, lengths)
	default:
		fillRope(r, tensor.Data[float32](cos), tensor.Data[float32](sin), positions, lengths)
	}
}

// exactPositions is the last position before the first that float32 lacks.
const exactPositions = 1 << 24

func fillRope[T tensor.Float](r *Rope, cos, sin []T, positions, lengths []int) {
	n := len(r.InvFreq) * len(positions)
	if len(cos) != n+len(r.Local)*len(positions) || len(sin) != len(cos) || r.Long != nil &&
		len(lengths) != len(positions) {
		panic(fmt.Sprintf("model: rope tables of %d elements for %d positions of %d pairs, and %d lengths", len(cos),
			len(positions), len(r.InvFreq), len(lengths)))
	}
	fillTable(func(t int) ([]float32, float64) {
		if r.Long != nil && lengths[t] > r.Short {
			return r.Long, r.Factor
		}
		return r.InvFreq, r.Factor
	}, cos[:n], sin[:n], positions)
	fillTable(func(t int) ([]float32, float64) {
		if r.beta == 0 {
			return r.Local, 1
		}
		return r.Local, r.Factor * (1 + r.beta*math.Log1p(float64(positions[t]/r.Short)))
	}, cos[n:], sin[n:], positions)
}

// A goroutine fills the rows of ropeChunk tokens.
const ropeChunk = 1 << 10

// fillTable writes a table on all cores, given the frequencies of each token and the factor of its cos and sin.
func fillTable[T tensor.Float](of func(t int) ([]float32, float64), cos, sin []T, positions []int) {
	var filling sync.WaitGroup
	for lo := 0; lo < len(positions); lo += ropeChunk {
		filling.Go(func() {
			for t, p := range positions[lo:min(lo+ropeChunk, len(positions))] {
				list, factor := of(lo + t)
				at := (lo + t) * len(list)
				for i, f := range list {
					angle := float64(float32(p) * f)
					if p > exactPositions {
						angle = float64(p) * float64(f)
					}
					s, c := math.Sincos(angle)
					cos[at+i], sin[at+i] = T(c*factor), T(s*factor)
				}
			}
		})
	}
	filling.Wait()
}
