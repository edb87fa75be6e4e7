package generate

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// softmax returns the probabilities of logits at a temperature.
func softmax(logits []float32, temperature float64) []float64 {
	p, sum := make([]float64, len(logits)), 0.0
	for i, x := range logits {
		p[i] = math.Exp(float64(x) / temperature)
		sum += p[i]
	}
	for i := range p {
		p[i] /= sum
	}
	return p
}

// allowed defines the cuts: the k likeliest tokens, then the smallest set of likeliest ones with probability p among
// them.
func allowed(probs []float64, k int, p float64) map[int32]float64 {
	order := make([]int32, len(probs))
	for i := range order {
		order[i] = int32(i)
	}
	slices.SortStableFunc(order, func(a, b int32) int {
		switch {
		case probs[a] > probs[b]:
			return -1
		case probs[a] < probs[b]:
			return 1
		}
		return 0
	})
	if k > 0 {
		order = order[:min(k, len(order))]
	}
	total, sum := 0.0, 0.0
	for _, id := range order {
		total += probs[id]
	}
	set := map[int32]float64{}
	for _, id := range order {
		set[id] = probs[id]
		if sum += probs[id]; p < 1 && sum >= p*total {
			break
		}
	}
	for id := range set {
		if p < 1 {
			set[id] /= sum
		} else {
			set[id] /= total
		}
	}
	return set
}

func randomLogits(r *rand.Rand, n int) []float32 {
	logits := make([]float32, n)
	for i := range logits {
		logits[i] = float32(r.NormFloat64() * 2)
	}
	return logits
}

// The frequencies of the drawn tokens match the softmax. A correct sampler exceeds the bound of the chi-squared
// statistic once in a billion tests. The seed is fixed.
func TestDrawsFollowTheSoftmax(t *testing.T) {
	const draws = 40000
	r := rand.New(rand.NewPCG(1, 2))
	for _, s := range []Sampling{
		{Temperature: 1, TopP: 1}, {Temperature: 0.6, TopP: 1}, {Temperature: 2, TopP: 1, Seed: 9},
		{Temperature: 1, TopP: 0.9}, {Temperature: 1, TopK: 5, TopP: 1}, {Temperature: 1.3, TopK: 8, TopP: 0.8},
	} {
		logits := randomLogits(r, 20)
		want := allowed(softmax(logits, s.Temperature), s.TopK, s.TopP)
		sampler, counts := NewSampler(s), map[int32]float64{}
		for range draws {
			id, err := sampler.Next(logits)
			if err != nil {
				t.Fatal(err)
			}
			counts[id]++
		}
		chi := 0.0
		for id, n := range counts {
			if want[id] == 0 {
				t.Errorf("%+v: token %d was drawn, which is cut off", s, id)
			}
			chi += (n - draws*want[id]) * (n - draws*want[id]) / (draws * want[id])
		}
		for id, p := range want {
			if counts[id] == 0 {
				chi += draws * p
			}
		}
		// Wilson and Hilferty's approximation of the quantile at 6 standard deviations.
		free := float64(len(want) - 1)
		if limit := free * math.Pow(1-2/(9*free)+6*math.Sqrt(2/(9*free)), 3); chi > limit {
			t.Errorf("%+v: chi-squared is %.1f with %v degrees of freedom, above %.1f", s, chi, free, limit)
		}
	}
}

// keep returns the smallest set of likeliest tokens with the probability, for all logits, ties included.
func TestTopPKeepsTheSmallestSet(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 2000 {
		n := 1 + r.IntN(50)
		logits := randomLogits(r, n)
		if r.IntN(3) == 0 {
			for i := range logits {
				logits[i] = float32(r.IntN(3)) // ties
			}
		}
		if r.IntN(3) == 0 {
			logits[r.IntN(n)] = float32(math.Inf(-1))
		}
		s := Sampling{Temperature: 0.3 + r.Float64(), TopP: 0.01 + 0.98*r.Float64()}
		if r.IntN(2) == 0 {
			s.TopK = 1 + r.IntN(60)
		}
		most := float64(slices.Max(logits))
		if math.IsInf(most, -1) {
			continue
		}
		kept, mass := NewSampler(s).keep(logits, most)
		want := allowed(softmax(logits, s.Temperature), s.TopK, s.TopP)
		sum := 0.0
		for i, c := range kept {
			sum += c.weight
			if want[c.id] == 0 || !(math.Abs(c.weight/mass-want[c.id]) <= 1e-12) || i > 0 && !before(kept[i-1], c) {
				t.Fatalf("%+v of %v: kept %v, want %v", s, logits, kept, want)
			}
		}
		if len(kept) != len(want) || !(math.Abs(sum-mass) <= 1e-12*mass) {
			t.Fatalf("%+v of %v: kept %v with the mass %v, want %v", s, logits, kept, mass, want)
		}
	}
}

func TestGreedyIsTheFirstOfTheLikeliest(t *testing.T) {
	id, err := NewSampler(Sampling{TopP: 1}).Next([]float32{-1, 3, 2, 3})
	if err != nil || id != 1 {
		t.Errorf("%d, %v", id, err)
	}
}

func TestLogitsThatAreNoNumbersAreAnError(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	for _, logits := range [][]float32{{}, {1, nan}, {nan}, {0, inf}, {-inf, -inf}} {
		for _, temperature := range []float64{0, 1} {
			if id, err := NewSampler(Sampling{Temperature: temperature, TopP: 1}).Next(logits); err == nil {
				t.Errorf("%v: %d was drawn", logits, id)
			}
		}
	}
}

func TestSamplingIsChecked(t *testing.T) {
	for want, s := range map[string]Sampling{
		"--temperature -1":  {Temperature: -1, TopP: 1},
		"--temperature NaN": {Temperature: math.NaN(), TopP: 1},
		"--top-p 0":         {TopP: 0},
		"--top-p 1.5":       {TopP: 1.5},
		"--top-k -3":        {TopP: 1, TopK: -3},
	} {
		if err := s.Check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", s, err, want)
		}
	}
	if err := (Sampling{Temperature: 0.8, TopP: 0.95, TopK: 40}).Check(); err != nil {
		t.Error(err)
	}
}
