package generate

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// Sampling configures the draw of a token, in the order of transformers: temperature, then the TopK likeliest tokens,
// then the smallest set of likeliest tokens with probability TopP.
type Sampling struct {
	Temperature float64 // 0: the likeliest token, with the lowest id among equals
	TopK        int     // 0: all
	TopP        float64 // 1: all
	Seed        int64
}

// Check returns an error with the flag of a value out of its bounds.
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

// Sampler draws tokens. The draws depend only on the seed and the logits.
type Sampler struct {
	Sampling
	random *rand.Rand
	heap   []candidate
}

// A candidate is a token with its weight exp(score - best score).
type candidate struct {
	id     int32
	weight float64
}

// stream is the second half of the generator's seed. It separates the draws from others with the same seed.
const stream = 0x67656e6572617465

// NewSampler returns a sampler at the start of its draws.
func NewSampler(s Sampling) *Sampler {
	return &Sampler{Sampling: s, random: rand.New(rand.NewPCG(uint64(s.Seed), stream))}
}

var errLogits = errors.New("the model's logits are not finite; its weights have diverged, or belong to another model")

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
	return kept[len(kept)-1].id, nil // after rounding of the sum
}

// keep returns the candidates and the sum of their weights. If it drops some, the rest is in order of weight.
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

// likeliest returns the likeliest tokens in order, until enough accepts their number and the sum of their weights. It
// uses a heap, since sorting the vocabulary for each token would take longer than a small model.
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

// before orders candidates by weight, then by id.
func before(a, b candidate) bool { return a.weight > b.weight || a.weight == b.weight && a.id < b.id }

// End names the reason why a text ends.
type End string

const (
	EndOfText   End = "end of text" // the model generated an end token
	EndTokens   End = "all tokens"  // MaxTokens are done
	EndRoom     End = "no room"     // the model's capacity is full
	Interrupted End = "interrupted" // the context was cancelled
)

// Request describes a text to generate.
type Request struct {
	Prompt    []int32 // one token or more
	MaxTokens int     // new tokens
	Ends      []int   // ids of end tokens, which are not part of the text
	Sampling  Sampling
}

// Report describes a generated text.
type Report struct {
	End    End
	Tokens int           // generated tokens
	Prompt time.Duration // time to read the prompt
	Write  time.Duration // time to generate the text
}

// Write reads the prompt into a new model and passes generated tokens to each. An interrupt is not an error.
func (m *Model) Write(ctx context.Context, r Request, each func(id int32) error) (Report, error) {
	var rep Report
	began := time.Now()
	logits, err := m.Read(ctx, r.Prompt)
	rep.Prompt = time.Since(began)
	began = time.Now()
	s := NewSampler(r.Sampling)
	for err == nil {
		if rep.End = m.end(r, rep.Tokens); rep.End != "" {
			break
		}
		var id int32
		if id, err = s.Next(logits); err != nil {
			break
		}
		if slices.Contains(r.Ends, int(id)) {
			rep.End = EndOfText
			break
		}
		if err = each(id); err != nil {
			break
		}
		if rep.Tokens++; m.end(r, rep.Tokens) == "" { // else the logits are not needed
			logits, err = m.Read(ctx, []int32{id})
		}
	}
	rep.Write = time.Since(began)
	if err != nil && ctx.Err() != nil {
		rep.End, err = Interrupted, nil
	}
	return rep, err
}

// end returns the reason to stop after a number of new tokens; "" to continue.
func (m *Model) end(r Request, tokens int) End {
	switch {
	case tokens >= r.MaxTokens:
		return EndTokens
	case len(r.Prompt)+tokens >= m.Room():
		return EndRoom
	}
	return ""
}
