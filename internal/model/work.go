package model

import (
	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// Work counts the model FLOPs of a forward and a backward pass, as a rehearsal records them. It leaves out recomputed
// products and the embedding lookup.
type Work struct {
	token float64   // of the products of a token with all matrices
	pair  []float64 // of attention for each visible (query, key) pair, by layer
	cfg   *hf.Config
}

// WorkOf returns the work of a model, the same for products in E4M3.
func WorkOf(cfg *hf.Config) *Work {
	plain := *cfg
	plain.Tuning.Linears = ""
	cfg = &plain
	r := &workRecorder{Still: Still{segments: 1}, seen: map[product]bool{},
		Work: Work{cfg: cfg, pair: make([]float64, cfg.NumHiddenLayers)}}
	if err := Rehearse(cfg, Options{}, 1, 1, tensor.F32, r, r); err != nil {
		panic("model: a rehearsal met an error, which its operations do not return: " + err.Error())
	}
	return &r.Work
}

// FLOPs returns the model FLOPs for one sequence of documents with the given lengths.
func (w *Work) FLOPs(docs []int) float64 {
	tokens := 0
	for _, n := range docs {
		tokens += n
	}
	return w.token*float64(tokens) + w.Attention(docs)
}

// Attention returns the part of attention in FLOPs. It counts pairs exactly: a causal mask costs half, and a window its
// visible part.
func (w *Work) Attention(docs []int) (flops float64) {
	pairs := map[int]float64{}
	for _, window := range w.cfg.Windows() {
		pairs[window] = VisiblePairs(docs, window)
	}
	for i, l := range w.cfg.Layers() {
		flops += w.pair[i] * pairs[l.Mixer.Window]
	}
	return flops
}

// workRecorder records each product of a matrix once, since a pass may compute it again.
type workRecorder struct {
	nopOps
	Still
	Work
	seen map[product]bool
}

type product struct {
	kind string
	at   int64 // the matrix
}

// add counts a part of a matrix.
func (r *workRecorder) add(kind string, w View, part float64) {
	if p := (product{kind, w.Offset()}); !r.seen[p] {
		r.seen[p] = true
		r.token += 2 * float64(w.Size()) * part
	}
}

// active returns the part of the experts that a token has.
func active(p kernels.Pairs) float64 { return float64(p.Places.Cols()) / float64(p.Starts.Size()-1) }

func (r *workRecorder) Linear(_, _, w, _ View)         { r.add("forward", w, 1) }
func (r *workRecorder) LinearDX(_, _, w View, _ bool)  { r.add("dx", w, 1) }
func (r *workRecorder) LinearDW(dw, _, _ View, _ bool) { r.add("dw", dw, 1) }
func (r *workRecorder) GroupLinear(_ View, _ kernels.Operand, w View, p kernels.Pairs, _ bool) {
	r.add("forward", w, active(p))
}
func (r *workRecorder) GroupLinearDX(_ View, _ kernels.Operand, w View, p kernels.Pairs, _ bool) {
	r.add("dx", w, active(p))
}
func (r *workRecorder) GroupLinearDW(dw View, _, _ kernels.Operand, p kernels.Pairs, _ bool) {
	r.add("dw", dw, active(p))
}
func (r *workRecorder) mix(layer int, products float64) error {
	m := r.cfg.Layer(layer).Mixer
	r.pair[layer] += 2 * products * float64(m.Heads) * float64(m.Dim+m.DimV)
	return nil
}

// Forward multiplies by K and by V.
func (r *workRecorder) Forward(layer int, _ attention.Partial, _, _, _ View) error {
	return r.mix(layer, 1)
}

// Backward multiplies twice as often.
func (r *workRecorder) Backward(layer int, _ attention.Grads, _, _, _, _ View, _ attention.Partial) error {
	return r.mix(layer, 2)
}

// Recur reads the state by k and by q, and adds k u to it.
func (r *workRecorder) Recur(layer int, _ delta.Args, beside func()) error {
	beside()
	return r.step(layer, 1)
}

// RecurBackward multiplies twice as often.
func (r *workRecorder) RecurBackward(layer int, _ delta.Args, beside func()) error {
	beside()
	return r.step(layer, 2)
}

// step counts passes of the recurrence, not of the chunks that compute it.
func (r *workRecorder) step(layer, passes int) error {
	d := r.cfg.Layer(layer).Mixer.Delta
	r.token += float64(passes * 6 * d.Heads * d.Dim * d.DimV)
	return nil
}

// VisiblePairs counts the (query, key) pairs of causal attention inside documents. A query sees itself and window keys
// before it; -1: all before it. The count is exact up to 2^53.
func VisiblePairs(docs []int, window int) float64 {
	pairs := 0.0
	for _, n := range docs {
		pairs += triangle(n)
		if window >= 0 && n > window+1 {
			pairs -= triangle(n - window - 1) // keys hidden from the last query
		}
	}
	return pairs
}

// triangle returns 1 + 2 + ... + n, which may exceed an integer.
func triangle(n int) float64 {
	if n%2 == 0 {
		return float64(n/2) * float64(n+1)
	}
	return float64(n) * float64((n+1)/2)
}
