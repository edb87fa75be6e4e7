package generate

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
)

// Sampling says how a token is drawn from logits, in the order of transformers: temperature, then the
// TopK likeliest, then the smallest set of likeliest tokens that has the mass TopP.
type Sampling struct {
	Temperature float64 // 0: the likeliest token, the one of the lowest id where several are
	TopK        int     // 0: all
	TopP        float64 // 1: all
	Seed        int64
}

// Check returns an error that names what is out of its bounds as a flag does.
func (s Sampling) Check() error {
	switch {
	case !(s.Temperature >= 0) || math.IsInf(s.Temperature, 0):
		return fmt.Errorf("--temperature %v: want 0, for the likeliest token, or more", s.Temperature)
	case !(s.TopP > 0 && s.TopP <= 1):
		return fmt.Errorf("--top-p %v: want more than 0, up to 1 for all tokens", s.TopP)
	case s.TopK < 0:
		return fmt.Errorf("--top-k %d: want 0, for all tokens, or more", s.TopK)
	}
	return nil
}

// Sampler draws tokens. What it draws depends on the seed and on the logits alone.
type Sampler struct {
	Sampling
	random *rand.Rand
	heap   []candidate
}

// candidate is a token with its weight, exp of its score over that of the likeliest.
type candidate struct {
	id     int32
	weight float64
}

// stream is the second half of the generator's seed, so that the seeds of other things draw otherwise.
const stream = 0x67656e6572617465

// NewSampler returns a sampler at the start of its draws.
func NewSampler(s Sampling) *Sampler {
	return &Sampler{Sampling: s, random: rand.New(rand.NewPCG(uint64(s.Seed), stream))}
}

// errLogits is for a model that has diverged.
var errLogits = errors.New("the model's logits are no numbers; its weights have diverged, or are another model's")

// Next draws a token.
func (s *Sampler) Next(logits []float32) (int32, error) {
	best := 0
	for i, x := range logits {
		if math.IsNaN(float64(x)) || math.IsInf(float64(x), 1) {
			return 0, errLogits
		}
		if x > logits[best] {
			best = i
		}
	}
	if len(logits) == 0 || math.IsInf(float64(logits[best]), -1) {
		return 0, errLogits
	}
	if s.Temperature == 0 {
		return int32(best), nil
	}
	kept, mass := s.keep(logits, float64(logits[best]))
	at := s.random.Float64() * mass
	for _, c := range kept {
		if at -= c.weight; at < 0 {
			return c.id, nil
		}
	}
	return kept[len(kept)-1].id, nil // sums are rounded
}

// keep returns the tokens that may be drawn, and the sum of their weights. Where some are left out they
// come in the order of their weights, and else as they are.
func (s *Sampler) keep(logits []float32, most float64) (kept []candidate, mass float64) {
	s.heap = s.heap[:0]
	for i, x := range logits {
		w := math.Exp((float64(x) - most) / s.Temperature)
		s.heap = append(s.heap, candidate{int32(i), w})
		mass += w
	}
	if s.TopK > 0 && s.TopK < len(s.heap) {
		kept = s.likeliest(func(n int, _ float64) bool { return n == s.TopK })
		mass = 0
		for _, c := range kept {
			mass += c.weight
		}
		s.heap = append(s.heap[:0], kept...)
	}
	if s.TopP == 1 {
		return s.heap, mass
	}
	want, mass := s.TopP*mass, 0
	kept = s.likeliest(func(_ int, sum float64) bool { mass = sum; return sum >= want })
	return kept, mass
}

// likeliest takes tokens off the heap, the likeliest first, until enough says that their number and the
// sum of their weights suffice. Most tokens stay where they are: sorting a vocabulary for each token
// would take longer than a small model.
func (s *Sampler) likeliest(enough func(n int, sum float64) bool) (taken []candidate) {
	h := s.heap
	for i := len(h)/2 - 1; i >= 0; i-- {
		sink(h, i)
	}
	sum := 0.0
	for len(h) > 0 {
		c := h[0]
		taken = append(taken, c)
		if sum += c.weight; enough(len(taken), sum) {
			break
		}
		last := len(h) - 1
		h[0] = h[last]
		h = h[:last]
		sink(h, 0)
	}
	return taken
}

// sink moves an element of a heap down to its place.
func sink(h []candidate, i int) {
	for {
		child := 2*i + 1
		if child >= len(h) {
			return
		}
		if right := child + 1; right < len(h) && before(h[right], h[child]) {
			child = right
		}
		if !before(h[child], h[i]) {
			return
		}
		h[i], h[child] = h[child], h[i]
		i = child
	}
}

// before orders candidates: the likelier first, of two alike the one of the lower id.
func before(a, b candidate) bool { return a.weight > b.weight || a.weight == b.weight && a.id < b.id }
