package data

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"sort"

	"github.com/cprun/cprun/partition"
)

// Mixture draws samples from several loaders, with shares of the tokens by weight. Like a Loader it computes the n-th
// sample from n alone. A loader that runs out begins its next epoch.
type Mixture struct {
	parts  []*Loader
	starts []int64   // number of each part's first sample; last, the number of all samples
	order  []int     // the parts, that with the most tokens first
	shares []float64 // by place in order: the part's share of the samples that earlier parts leave
	epoch  int64
	seed   int64
}

// mixBlock bounds the samples that are shuffled together, so that every part of a run has the shares.
const mixBlock = 32

// maxEpoch bounds an epoch if the weight of the largest part is tiny.
const maxEpoch = 1 << 52

// Mix makes a mixture.
func Mix(parts []*Loader, weights []float64, seed int64) (*Mixture, error) {
	if len(parts) == 0 || len(parts) != len(weights) {
		return nil, fmt.Errorf("data: a mixture of %d parts with %d weights", len(parts), len(weights))
	}
	m := &Mixture{parts: parts, starts: []int64{0}, shares: make([]float64, len(parts)), seed: seed}
	shares := slices.Clone(weights)
	for k, w := range weights {
		if !(w > 0) || math.IsInf(w, 0) {
			return nil, fmt.Errorf("data: the weight %v of part %d", w, k)
		}
		n, p := parts[k].Samples(), parts[k].plan
		shares[k] *= float64(n*int64(p.SeqLen)) / float64(parts[k].Tokens()) // whole documents leave places empty
		m.starts, m.order = append(m.starts, m.starts[k]+n), append(m.order, k)
	}
	slices.SortStableFunc(m.order, func(a, b int) int { return cmp.Compare(parts[b].Tokens(), parts[a].Tokens()) })
	left := 0.0
	for place, k := range slices.Backward(m.order) {
		left += shares[k]
		m.shares[place] = shares[k] / left
	}
	n := parts[m.order[0]].Samples()
	m.epoch = int64(min(float64(n)/m.shares[0], maxEpoch))
	for m.before(0, m.epoch) < n && m.epoch < maxEpoch {
		m.epoch++
	}
	return m, nil
}

// Samples returns the samples of all loaders together.
func (m *Mixture) Samples() int64 { return m.starts[len(m.parts)] }

// Epoch returns the samples of the mixture in which the largest loader gives each of its samples once.
func (m *Mixture) Epoch() int64 { return m.epoch }

// before counts the samples of a part among n that earlier parts leave.
func (m *Mixture) before(place int, n int64) int64 { return int64(m.shares[place] * float64(n)) }

// Index returns the n-th sample of the training, from 0. Blocks are shuffled; none crosses the end of an epoch.
func (m *Mixture) Index(n int64) int64 {
	if n < 0 {
		panic(fmt.Sprintf("data: sample %d in the order of training", n))
	}
	at := n % m.epoch
	first := n - at%mixBlock
	n = first + newPermutation(min(mixBlock, m.epoch-at+at%mixBlock), m.seed, first).at(n-first)
	for place, k := range m.order {
		before := m.before(place, n)
		if m.before(place, n+1) > before {
			return m.starts[k] + m.parts[k].Index(before)
		}
		n -= before
	}
	panic("data: the last part takes all samples")
}

// part returns the loader of a sample and its number there.
func (m *Mixture) part(sample int64) (*Loader, int64) {
	if sample < 0 || sample >= m.Samples() {
		panic(fmt.Sprintf("data: sample %d of %d", sample, m.Samples()))
	}
	k := sort.Search(len(m.parts), func(k int) bool { return m.starts[k+1] > sample })
	return m.parts[k], sample - m.starts[k]
}

// Docs returns what Loader.Docs does.
func (m *Mixture) Docs(sample int64) []int {
	l, s := m.part(sample)
	return l.Docs(s)
}

// Valid returns what Loader.Valid does.
func (m *Mixture) Valid(sample int64) int {
	l, s := m.part(sample)
	return l.Valid(s)
}

// Tokens returns the number of tokens of all samples.
func (m *Mixture) Tokens() (n int64) {
	for _, l := range m.parts {
		n += l.Tokens()
	}
	return n
}

// Targets returns the number of targets of all samples.
func (m *Mixture) Targets() (n int64) {
	for _, l := range m.parts {
		n += l.Targets()
	}
	return n
}

// Dropped returns what Loader.Dropped does, over all loaders.
func (m *Mixture) Dropped() (documents int64, of Lengths) {
	for _, l := range m.parts {
		documents += l.dropped
		for i, n := range l.lengths {
			of[i] += n
		}
	}
	return documents, of
}

// Alike reports whether all samples have the same documents and number of targets.
func (m *Mixture) Alike() bool {
	return !slices.ContainsFunc(m.parts, func(l *Loader) bool { return !l.Alike() })
}

// Load reads what Loader.Load does.
func (m *Mixture) Load(sample int64, spans []partition.Span, ids, targets []int32, positions []int) error {
	l, s := m.part(sample)
	return l.Load(s, spans, ids, targets, positions)
}
