package data

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
)

// Files between which some have labels end their documents, whether or not their last token is EOS. Empty files have
// none.
func TestFilesEndDocumentsBesideLabels(t *testing.T) {
	dir := put(t, map[string]string{
		"a.bin": v1(1, 2, 9), "b.bin": v1(3, 4), "c.bin": v1(), "d.bin": v1(5, 9, 6, 7, 8), "e.bin": v1(1, 9),
		"z.jsonl": `{"input_ids": [1, 2, 3], "labels": [-100, 2, -100]}`,
	})
	d := must.Have(Open(Source{Paths: []string{filepath.Join(dir, "*.bin"), filepath.Join(dir, "z.jsonl")}, EOS: 9,
		Vocab: 20, Tokenizer: asBytes}))
	ends, targets, err := d.documents()
	if got := fmt.Sprint(ends, targets, err); got != "[3 5 7 10 12 15] [2 1 1 2 1 1] <nil>" {
		t.Errorf("ends and targets %s", got)
	}
}

// Whole documents are those of the file: a rest after the last EOS is one, and no document is empty.
func TestWholeDocumentsHaveTokens(t *testing.T) {
	for _, tc := range []struct {
		tokens  []uint16
		samples int64
		targets int64
	}{
		{[]uint16{1, 2, 9}, 1, 2}, {[]uint16{1, 2, 9, 3, 4}, 2, 3}, {[]uint16{1, 2}, 1, 1}, {[]uint16{9, 1, 9}, 1, 1},
		{nil, 0, 0},
	} {
		d := must.Have(Open(sourceOf(t, in{"a.bin": v1(tc.tokens...)}, "*", 9, 20)))
		l, err := New(d, Plan{SeqLen: 3, Whole: true, PackDocuments: true})
		if tc.samples == 0 {
			if err == nil {
				t.Errorf("%v: %d samples", tc.tokens, l.Samples())
			}
			continue
		}
		if err != nil || l.Samples() != tc.samples || l.Targets() != tc.targets || l.Tokens() != int64(len(tc.tokens)) {
			t.Errorf("%v: %+v, %v, want %d samples, %d targets", tc.tokens, l, err, tc.samples, tc.targets)
		}
	}
}

// Every epoch of a mixture of one source has each sample once, shuffled in blocks that do not cross its end.
func TestBlocksOfAMixtureEndWithTheEpoch(t *testing.T) {
	for _, samples := range []int{40, mixBlock, 5, 2*mixBlock + 1} {
		parts := loaders(t, samples)
		m := must.Have(Mix(parts, []float64{1}, 3))
		moved := false
		for first := int64(0); first < 4*int64(samples); first += int64(samples) {
			for lo := int64(0); lo < int64(samples); lo += mixBlock {
				var got, want []int64
				for i := lo; i < min(lo+mixBlock, int64(samples)); i++ {
					got, want = append(got, m.Index(first+i)), append(want, parts[0].Index(first+i))
				}
				moved = moved || !slices.Equal(got, want)
				slices.Sort(got)
				slices.Sort(want)
				if !slices.Equal(got, want) {
					t.Fatalf("%d samples: those from %d are %v, want %v", samples, first+lo, got, want)
				}
			}
		}
		if !moved {
			t.Errorf("%d samples: in the order of the source", samples)
		}
	}
}

// A record that joins documents after many of one document is an error, unless attention stays inside documents, also
// if the tokens come from the cache.
func TestLateBordersAreNotCrossed(t *testing.T) {
	s := sourceOf(t, in{"a.jsonl": `{"input_ids": [1, 2, 3]}` + "\n" +
		`{"input_ids": [4, 5, 6, 7], "position_ids": [0, 1, 0, 1]}`}, "*", -1, 20)
	s.Cache.Dir = t.TempDir()
	for range 2 {
		d := must.Have(Open(s))
		if _, err := New(d, Plan{SeqLen: 3}); err == nil || !strings.Contains(err.Error(), "data.pack_documents") {
			t.Errorf("without packing: %v", err)
		}
		if l, err := New(d, Plan{SeqLen: 7, PackDocuments: true, Whole: true}); err != nil || len(l.Docs(0)) != 3 {
			t.Errorf("packed: %v, %v", l, err)
		}
	}
}
