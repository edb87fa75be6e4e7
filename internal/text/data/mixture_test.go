package data

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/partition"
)

// loaders returns sources with these numbers of samples. Each source has one token id; each sample has 4 tokens.
func loaders(t testing.TB, samples ...int) (parts []*Loader) {
	t.Helper()
	for k, n := range samples {
		tokens := make([]uint16, 4*n+1)
		for i := range tokens {
			tokens[i] = uint16(k)
		}
		d := must.Have(Open(sourceOf(t, in{"a.bin": v1(tokens...)}, "*", -1, 100)))
		parts = append(parts, must.Have(New(d, Plan{SeqLen: 4, Shuffle: true, Seed: int64(k)})))
	}
	return parts
}

// From the start to any sample, the shares equal the weights to within a block. Each source keeps its own order and
// gives every sample once an epoch. The n-th sample depends on n alone.
func TestMixturesKeepTheirWeights(t *testing.T) {
	for _, tc := range []struct {
		samples []int
		weights []float64
	}{
		{[]int{10, 10}, []float64{1, 1}},
		{[]int{7, 300, 2}, []float64{0.5, 0.2, 0.3}},
		{[]int{50, 50, 50, 50}, []float64{1e-6, 3, 1, 1e-3}},
		{[]int{5}, []float64{2}},
	} {
		parts := loaders(t, tc.samples...)
		m := must.Have(Mix(parts, tc.weights, 3))
		total, sum := 0, 0.0
		for k := range tc.samples {
			total, sum = total+tc.samples[k], sum+tc.weights[k]
		}
		if m.Samples() != int64(total) {
			t.Errorf("%v: %d samples", tc, m.Samples())
		}
		const n = 20_000
		drawn := make([]map[int64]int, len(parts)) // by part: how often each sample was drawn
		counts := make([]int64, len(parts))
		for k := range drawn {
			drawn[k] = map[int64]int{}
		}
		for i := range int64(n) {
			sample := m.Index(i)
			if m.Index(i) != sample {
				t.Fatal("not a function of its argument")
			}
			var k int
			for sample >= m.starts[k+1] {
				k++
			}
			drawn[k][sample]++
			counts[k]++
			bound := float64(len(parts)) // at the end of a block, and beside it
			if at := (i + 1) % m.Epoch(); at%mixBlock != 0 {
				bound += mixBlock / 2
			}
			for k, c := range counts {
				if want := float64(i+1) * tc.weights[k] / sum; math.Abs(float64(c)-want) > bound {
					t.Fatalf("%v: after %d samples %d of part %d, want %.1f", tc, i+1, c, k, want)
				}
			}
			if largest := slices.Index(tc.samples, slices.Max(tc.samples)); i+1 == m.Epoch() &&
				(counts[largest] != int64(tc.samples[largest]) || len(drawn[largest]) != tc.samples[largest]) {
				t.Fatalf("%v: an epoch of %d has %d samples of the largest, %d different", tc, i+1, counts[largest],
					len(drawn[largest]))
			}
		}
		for k := range parts {
			epochs := counts[k] / parts[k].Samples()
			for s, c := range drawn[k] {
				part := mixBlock / parts[k].Samples() // of the last block
				if int64(c) < epochs-part-1 || int64(c) > epochs+part+2 {
					t.Errorf("%v: sample %d of part %d was drawn %d times in %d epochs", tc, s, k, c, epochs)
				}
			}
		}
	}
}

func TestMixturesReadWhatTheyDraw(t *testing.T) {
	m := must.Have(Mix(loaders(t, 3, 5), []float64{1, 2}, 1))
	spans := partition.Contiguous{}.Spans(4, 1, 0)
	ids, targets, positions := make([]int32, 4), make([]int32, 4), make([]int, 4)
	for s := range m.Samples() {
		must.Do(t, m.Load(s, spans, ids, targets, positions))
		want := int32(0)
		if s >= 3 {
			want = 1
		}
		if ids[0] != want || fmt.Sprint(m.Docs(s)) != "[4]" || m.Valid(s) != 4 {
			t.Errorf("sample %d is of part %d, %v, %d", s, ids[0], m.Docs(s), m.Valid(s))
		}
	}
	if !m.Alike() {
		t.Error("samples without documents are alike")
	}
	first := fmt.Sprint(m.Index(0), m.Index(1), m.Index(2), m.Index(3), m.Index(4), m.Index(5))
	other := must.Have(Mix(loaders(t, 3, 5), []float64{1, 2}, 2))
	if fmt.Sprint(other.Index(0), other.Index(1), other.Index(2), other.Index(3), other.Index(4),
		other.Index(5)) == first {
		t.Error("another seed draws the same")
	}
}

func TestWrongMixturesAreExplained(t *testing.T) {
	parts := loaders(t, 1, 1)
	for _, weights := range [][]float64{nil, {1}, {1, 0}, {1, math.NaN()}, {1, math.Inf(1)}, {-1, 2}} {
		if _, err := Mix(parts, weights, 1); err == nil || !strings.HasPrefix(err.Error(), "data: ") {
			t.Errorf("%v: %v", weights, err)
		}
	}
}

// Weights are shares of tokens, also where whole documents leave places empty.
func TestWeightsAreSharesOfTokens(t *testing.T) {
	text := loaders(t, 40)[0]
	lens := make([]int, 60)
	for i := range lens {
		lens[i] = 1 + i%text.plan.SeqLen
	}
	whole := packed(t, Plan{SeqLen: text.plan.SeqLen}, lens...)
	m := must.Have(Mix([]*Loader{text, whole}, []float64{1, 3}, 5))
	var tokens [2]float64
	for n := range int64(20_000) {
		s := m.Index(n)
		part := 0
		if s >= m.starts[1] {
			part = 1
		}
		for _, d := range m.Docs(s) {
			tokens[part] += float64(d)
		}
	}
	if share := tokens[1] / (tokens[0] + tokens[1]); !(math.Abs(share-0.75) < 1e-3) {
		t.Errorf("%v of the tokens, want 0.75", share)
	}
	if got, want := m.Epoch(), int64(math.Ceil(float64(text.Samples())/m.shares[0])); got != want {
		t.Errorf("an epoch has %d samples, want %d", got, want)
	}
}
