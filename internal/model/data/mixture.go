package data

import (
	"fmt"
	"math"
	"slices"
	"sort"

	"github.com/cprun/cprun/partition"
)

// Mixture draws samples from several loaders, with shares of the tokens by weight. Like a Loader it computes the n-th
// sample from n alone: samples come in blocks, each with the same shares, in an order given by the seed. A loader that
// runs out begins its next epoch.
type Mixture struct {
	parts  []*Loader
	starts []int64   // number of each part's first sample; last, the number of all samples
	shares []float64 // of the samples; they sum to 1
	most   int       // the part with the largest share
	block  int64
	seed   int64
}

// minBlock bounds the samples of a block, which set the precision of a share.
const minBlock = 1024

// Mix makes a mixture.
func Mix(parts []*Loader, weights []float64, seed int64) (*Mixture, error) {
	if len(parts) == 0 || len(parts) != len(weights) {
		return nil, fmt.Errorf("data: a mixture of %d parts with %d weights", len(parts), len(weights))
	}
	m := &Mixture{parts: parts, starts: []int64{0}, shares: slices.Clone(weights), seed: seed}
	sum := 0.0
	for k, w := range weights {
		if !(w > 0) || math.IsInf(w, 0) {
			return nil, fmt.Errorf("data: the weight %v of part %d", w, k)
		}
		n, p := parts[k].Samples(), parts[k].plan
		m.shares[k] *= float64(n*int64(p.SeqLen)) / float64(parts[k].Tokens()) // whole documents leave places empty
		sum += m.shares[k]
		m.starts = append(m.starts, m.starts[k]+n)
		if m.shares[k] > m.shares[m.most] {
			m.most = k
		}
	}
	for k := range m.shares {
		m.shares[k] /= sum
	}
	// The largest share takes the rounding of the others, so the block must be large enough for it.
	m.block = max(minBlock, int64(len(parts)*len(parts)))
	return m, nil
}

// Samples returns the samples of all loaders together.
func (m *Mixture) Samples() int64 { return m.starts[len(m.parts)] }

// Epoch returns the samples of the mixture in which the largest loader gives each of its samples once.
func (m *Mixture) Epoch() int64 {
	largest := 0
	for k, l := range m.parts {
		if l.Tokens() > m.parts[largest].Tokens() {
			largest = k
		}
	}
	return int64(math.Ceil(float64(m.parts[largest].Samples()) / m.shares[largest]))
}

// before counts the samples of a part in all earlier blocks.
func (m *Mixture) before(part int, block int64) int64 {
	if part != m.most {
		return int64(m.shares[part] * float64(block*m.block))
	}
	n := block * m.block
	for k := range m.parts {
		if k != part {
			n -= m.before(k, block)
		}
	}
	return n
}

// Index returns the n-th sample of the training, from 0.
func (m *Mixture) Index(n int64) int64 {
	if n < 0 {
		panic(fmt.Sprintf("data: sample %d in the order of training", n))
	}
	block := n / m.block
	at := newPermutation(m.block, m.seed, block).at(n % m.block)
	for k, p := range m.parts {
		before := m.before(k, block)
		if here := m.before(k, block+1) - before; at >= here {
			at -= here
			continue
		}
		return m.starts[k] + p.Index(before+at)
	}
	panic("data: the shares of a block do not fill it")
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
