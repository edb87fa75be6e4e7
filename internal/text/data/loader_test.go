package data

import (
	"fmt"
	"io"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/partition"
)

// random returns n tokens below vocab.
func random(r *rand.Rand, n, vocab int) []uint16 {
	tokens := make([]uint16, n)
	for i := range tokens {
		tokens[i] = uint16(r.IntN(vocab))
	}
	return tokens
}

func openTokens(t testing.TB, eos int, tokens ...uint16) *Dataset {
	t.Helper()
	// There are two files, so that a sample crosses from one into the other.
	half := len(tokens) / 2
	dir := put(t, map[string]string{"a.bin": v1(tokens[:half]...), "b.bin": v1(tokens[half:]...)})
	return must.Have(Open(Source{Paths: []string{filepath.Join(dir, "*.bin")}, EOS: eos, Vocab: 1 << 16}))
}

// A sample holds the expected tokens, targets and positions over all ranks, computed token by token.
type sample struct {
	ids, targets []int32
	positions    []int
	docs         []int
	valid        int
}

func expect(tokens []uint16, index, seqLen, eos int, pack bool) sample {
	var s sample
	pos := 0
	for i := range seqLen {
		id, next := int32(tokens[index*seqLen+i]), int32(tokens[index*seqLen+i+1])
		last := pack && int(id) == eos
		if last {
			next = -1
		} else {
			s.valid++
		}
		s.ids, s.targets, s.positions = append(s.ids, id), append(s.targets, next), append(s.positions, pos)
		pos++
		if last || i == seqLen-1 {
			s.docs = append(s.docs, pos)
			pos = 0
		}
	}
	return s
}

func TestRanksTogetherLoadTheSample(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for trial := range 60 {
		seqLen, size, pack := 1+r.IntN(70), 1+r.IntN(9), r.IntN(2) == 0
		tokens := random(r, seqLen*(1+r.IntN(4))+1+r.IntN(seqLen), 2+r.IntN(30))
		eos := 0
		l := must.Have(New(openTokens(t, eos, tokens...), Plan{SeqLen: seqLen, PackDocuments: pack}))
		if want := int64((len(tokens) - 1) / seqLen); l.Samples() != want {
			t.Fatalf("%d samples of %d tokens from %d, want %d", l.Samples(), seqLen, len(tokens), want)
		}
		for i := range l.Samples() {
			want := expect(tokens, int(i), seqLen, eos, pack)
			if got := l.Docs(i); !slices.Equal(got, want.docs) {
				t.Fatalf("documents %v, want %v", got, want.docs)
			}
			if got := l.Valid(i); got != want.valid {
				t.Fatalf("%d valid targets, want %d", got, want.valid)
			}
			for _, name := range partition.Names {
				got := gather(t, l, i, partition.LayoutName(name).Layout(l.Docs(i)), size)
				if !slices.Equal(got.ids, want.ids) || !slices.Equal(got.targets, want.targets) ||
					!slices.Equal(got.positions, want.positions) {
					t.Fatalf("trial %d, %s over %d ranks, pack %t:\ngot  %v\nwant %v", trial, name, size, pack, got,
						want)
				}
			}
		}
	}
}

// gather loads a sample on all ranks and returns the tokens in global order.
func gather(t testing.TB, l *Loader, index int64, layout partition.Layout, size int) sample {
	n := l.plan.SeqLen
	s := sample{ids: make([]int32, n), targets: make([]int32, n), positions: make([]int, n)}
	for rank := range size {
		spans := layout.Spans(n, size, rank)
		m := partition.Count(spans)
		ids, targets, positions := make([]int32, m), make([]int32, m), make([]int, m)
		must.Do(t, l.Load(index, spans, ids, targets, positions))
		for k, p := range partition.Positions(spans) {
			s.ids[p], s.targets[p], s.positions[p] = ids[k], targets[k], positions[k]
		}
	}
	return s
}

// Spans and strides may be longer than one read.
func TestLongSpans(t *testing.T) {
	const seqLen = 3*scanChunk + 5
	tokens := random(rand.New(rand.NewPCG(3, 4)), seqLen+1, 50)
	for _, pack := range []bool{false, true} {
		l := must.Have(New(openTokens(t, 7, tokens...), Plan{SeqLen: seqLen, PackDocuments: pack}))
		want := expect(tokens, 0, seqLen, 7, pack)
		for start, stride := range []int{1, 2, 3, scanChunk - 2, scanChunk - 1, scanChunk, scanChunk + 9} {
			n := 1 + (seqLen-1-start)/stride
			ids, targets, positions := make([]int32, n), make([]int32, n), make([]int, n)
			must.Do(t, l.Load(0, []partition.Span{{Start: start, Len: n, Stride: stride}}, ids, targets, positions))
			for i := range ids {
				if p := start + i*stride; ids[i] != want.ids[p] || targets[i] != want.targets[p] ||
					positions[i] != want.positions[p] {
					t.Fatalf("pack %t, stride %d: token %d is %d, %d, %d", pack, stride, p, ids[i], targets[i], positions[i])
				}
			}
		}
	}
}

// counted counts the bytes read from a file.
type counted struct {
	codec
	n *atomic.Int64
}

func (c counted) read(f io.ReaderAt, dst []int32, at int64) error {
	return c.codec.read(countingFile{f, c.n}, dst, at)
}

type countingFile struct {
	io.ReaderAt
	n *atomic.Int64
}

func (c countingFile) ReadAt(p []byte, off int64) (int, error) {
	c.n.Add(int64(len(p)))
	return c.ReaderAt.ReadAt(p, off)
}

func TestARankReadsOnlyItsTokens(t *testing.T) {
	const seqLen, size = 1000, 4
	d := openTokens(t, -1, random(rand.New(rand.NewPCG(5, 6)), 2*seqLen+1, 50)...)
	l := must.Have(New(d, Plan{SeqLen: seqLen}))
	var n atomic.Int64
	for i, p := range d.parts {
		d.parts[i].codec = counted{p.codec, &n}
	}
	for rank := range size {
		spans := partition.Zigzag{}.Spans(seqLen, size, rank)
		m := partition.Count(spans)
		n.Store(0)
		must.Do(t, l.Load(1, spans, make([]int32, m), make([]int32, m), make([]int, m)))
		if want := int64(2 * (m + len(spans))); n.Load() != want {
			t.Errorf("rank %d read %d bytes for %d tokens in %d spans, want %d", rank, n.Load(), m, len(spans), want)
		}
	}
}

func TestDocumentsEndWhereTheFilesSay(t *testing.T) {
	text := map[string]string{"a.txt": "abc", "b.txt": "de", "c.txt": "fghi"}
	lines := map[string]string{"a.jsonl": "{\"text\":\"abc\"}\n{\"text\":\"de\"}\n{\"text\":\"fghi\"}"}
	pair := map[string]string{"a.bin": "abcdefghi", "a.idx": idx(1, 1, 3, 2, 0, 4)}
	for _, tc := range []struct {
		glob          string
		files         map[string]string
		eos, seqLen   int
		docs, targets string
	}{
		{"*.txt", text, -1, 8, "[3 2 3]", "[98 99 -1 101 -1 103 104 105]"},
		{"*.txt", text, 0, 11, "[4 3 4]", "[98 99 0 -1 101 0 -1 103 104 105 0]"},
		{"*.bin", pair, -1, 8, "[3 2 3]", "[98 99 -1 101 -1 103 104 105]"},
		{"*.bin", pair, 'd', 8, "[4 4]", "[98 99 100 -1 102 103 104 105]"},
		{"*.jsonl", lines, -1, 8, "[3 2 3]", "[98 99 -1 101 -1 103 104 105]"},
		{"*.jsonl", lines, 0, 7, "[4 3]", "[98 99 0 -1 101 0 -1]"},
	} {
		t.Run(fmt.Sprint(tc.glob, tc.eos), func(t *testing.T) {
			d := must.Have(Open(sourceOf(t, tc.files, tc.glob, tc.eos, 256)))
			l := must.Have(New(d, Plan{SeqLen: tc.seqLen, PackDocuments: true}))
			got := gather(t, l, 0, partition.Zigzag{}, 3)
			if fmt.Sprint(l.Docs(0)) != tc.docs || fmt.Sprint(got.targets) != tc.targets {
				t.Errorf("documents %v, targets %v; want %s, %s", l.Docs(0), got.targets, tc.docs, tc.targets)
			}
		})
	}
}

func TestPlansThatCannotBe(t *testing.T) {
	d := openTokens(t, -1, 1, 2, 3, 4)
	for _, tc := range []struct {
		plan Plan
		want string
	}{
		{Plan{SeqLen: 0}, "seq_len 0 is not positive"},
		{Plan{SeqLen: 4}, "4 tokens make no sample of seq_len 4, which needs 5"},
		{Plan{SeqLen: 3, PackDocuments: true}, "pack_documents needs eos_token_id"},
	} {
		if _, err := New(d, tc.plan); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%+v: got %v, want %q", tc.plan, err, tc.want)
		}
	}
	if _, err := New(openTokens(t, -1), Plan{SeqLen: 1}); err == nil ||
		!strings.Contains(err.Error(), "0 tokens make no sample") {
		t.Errorf("no tokens: %v", err)
	}
	if l, err := New(d, Plan{SeqLen: 3}); err != nil || l.Samples() != 1 {
		t.Errorf("the shortest data: %v", err)
	}
}

func TestLoadsMayRunConcurrently(t *testing.T) {
	lines := strings.Repeat("{\"text\":\"some words\"}\n{\"text\":\"and others\"}\n", 50)
	d := must.Have(Open(sourceOf(t, in{"a.jsonl": lines}, "*", 0, 256)))
	l := must.Have(New(d, Plan{SeqLen: 32, Shuffle: true, PackDocuments: true}))
	want := all(t, d)
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for n := range l.Samples() {
				i := l.Index(n + int64(g))
				got := gather(t, l, i, partition.Striped{}, 3)
				if !slices.Equal(got.ids, want[i*32:i*32+32]) {
					t.Errorf("sample %d differs", i)
				}
			}
		})
	}
	wg.Wait()
}
