package attend

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// shapesOf returns tensors of the given lengths.
func shapesOf(batch, seqQ, seqKV int) shapes {
	return shapes{"q": {batch, seqQ, 2, 4}, "k": {batch, seqKV, 1, 4}, "v": {batch, seqKV, 1, 3}, "dout": {batch, seqQ,
		2, 3}}
}

// Malformed metadata is refused, with the name of its key.
func TestMasksThatAreRefused(t *testing.T) {
	for _, c := range []struct {
		meta  map[string]string
		key   string
		wants string
	}{
		{map[string]string{"causal": "bottom_right"}, "causal", "top_left"},
		{map[string]string{"causal": "Top_Left"}, "causal", "top_left"},
		{map[string]string{"window": "3,"}, "window", "L,R"},
		{map[string]string{"window": ",3"}, "window", "L,R"},
		{map[string]string{"window": "3,-2"}, "window", "L,R"},
		{map[string]string{"window": "-2,3"}, "window", "L,R"},
		{map[string]string{"window": "1,2,3"}, "window", "L,R"},
		{map[string]string{"window": "[1,2]"}, "window", "L,R"},
		{map[string]string{"window": "1.5"}, "window", "L,R"},
		{map[string]string{"docs": "[4,5.5]"}, "docs", "JSON list"},
		{map[string]string{"docs": "[9,null]"}, "docs", "JSON list"},
		{map[string]string{"docs": "[[9],9]"}, "docs", "JSON list"},
		{map[string]string{"docs": "[[9],null]"}, "docs", "JSON list"},
		{map[string]string{"docs": "[[9],[[9]]]"}, "docs", "JSON list"},
		{map[string]string{"docs": "[4,5] x"}, "docs", "JSON list"},
		{map[string]string{"docs": "{}"}, "docs", "JSON list"},
		{map[string]string{"docs": "9"}, "docs", "JSON list"},
		{map[string]string{"docs": "[10,-1]"}, "docs", "document 0 has 10"},
		{map[string]string{"docs": "[-1,10]"}, "docs", "document 0 has -1"},
		{map[string]string{"docs": "[[9]]"}, "docs", "1 samples"},
		{map[string]string{"docs": "[[9],[9],[9]]"}, "docs", "3 samples"},
		{map[string]string{"docs": "[[9],[4,4]]"}, "docs", "sample 1: documents hold 8"},
		{map[string]string{"docs": "[[9],[]]"}, "docs", "sample 1: there are no documents"},
		{map[string]string{"docs_kv": "[9]"}, "docs_kv", "\"docs\""},
		{map[string]string{"docs_kv": "[[9],[9]]", "docs": "[]"}, "docs_kv", "\"docs\""},
		{map[string]string{"docs_kv": "nine", "docs": "[9]"}, "docs_kv", "JSON list"},
		{map[string]string{"docs_kv": "[9]", "docs": "[4,5]"}, "docs",
			"2 in queries, 1 in keys"},
		{map[string]string{"docs_kv": "[4,4]", "docs": "[4,5]"}, "docs", "in keys"},
		{map[string]string{"docs_kv": "[[9],[9]]", "docs": "[9]"}, "docs", "must both"},
		{map[string]string{"docs_kv": "[9]", "docs": "[[9],[9]]"}, "docs", "must both"},
		{map[string]string{"slices": "{}"}, "slices", "JSON list"},
		{map[string]string{"slices": "[[0,9,0,9]]"}, "slices", "slice 0: want [q0, q1, k0, k1, mask]"},
		{map[string]string{"slices": `[[0,9,0,9,"full"],[0,9,0,9,"full",1]]`}, "slices", "slice 1: want"},
		{map[string]string{"slices": `[[0,9,0,9,null]]`}, "slices", "slice 0: want"},
		{map[string]string{"slices": `[[0,9,0,null,"full"]]`}, "slices", "slice 0: want"},
		{map[string]string{"slices": `[[0,9,0,"9","full"]]`}, "slices", "slice 0: want"},
		{map[string]string{"slices": `[[0,9,0,8.5,"full"]]`}, "slices", "slice 0: want"},
		{map[string]string{"slices": `[[0,9,0,99999999999999999999,"full"]]`}, "slices", "slice 0: want"},
		{map[string]string{"slices": `[[0,9,0,9,0]]`}, "slices", "slice 0: want"},
		{map[string]string{"slices": `[[0,9,0,9,"FULL"]]`}, "slices", "none of full, causal, inv_causal, bi_causal"},
		{map[string]string{"slices": `[[0,10,0,9,"full"]]`}, "slices", "slice 0: queries 0 to 10"},
		{map[string]string{"slices": `[[0,9,-1,9,"full"]]`}, "slices", "slice 0: keys -1 to 9"},
		{map[string]string{"slices": `[[5,4,0,9,"full"]]`}, "slices", "slice 0: queries 5 to 4"},
		{map[string]string{"slices": `[[0,9,0,9,"full"]]`, "causal": "true"}, "causal", "slices"},
		{map[string]string{"slices": `[[0,9,0,9,"full"]]`, "causal": "top_left"}, "causal", "slices"},
		{map[string]string{"slices": `[[0,9,0,9,"full"]]`, "window": "-1,3"}, "window", "slices"},
		{map[string]string{"slices": `[[0,9,0,9,"full"]]`, "docs": "[9]"}, "docs", "slices"},
		{map[string]string{"slices": `[[0,9,0,9,"full"]]`, "docs_kv": "[9]"}, "docs_kv", "slices"},
	} {
		f, err := Open(write(t, shapesOf(2, 9, 9), c.meta))
		if err == nil {
			f.Close()
			t.Errorf("%v: not refused", c.meta)
			continue
		}
		if !strings.Contains(err.Error(), "metadata \""+c.key+"\"") || !strings.Contains(err.Error(), c.wants) {
			t.Errorf("%v: %v; want %q of %q", c.meta, err, c.wants, c.key)
		}
	}
}

// metadataOf converts a definition to metadata for all equal samples.
func metadataOf(t *testing.T, d attentiontest.Definition) map[string]string {
	t.Helper()
	text := func(x any) string {
		b, err := json.Marshal(x)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	meta := map[string]string{}
	if d.Slices != nil {
		var list [][]any
		for _, s := range d.Slices {
			list = append(list, []any{s.Q.Lo, s.Q.Hi, s.K.Lo, s.K.Hi, s.Mask.String()})
		}
		meta["slices"] = text(list)
		return meta
	}
	if d.Diagonal.Causal {
		meta["causal"] = map[bool]string{true: "top_left", false: "true"}[d.Diagonal.TopLeft]
	}
	if d.Diagonal.Left >= 0 || d.Diagonal.Right >= 0 {
		meta["window"] = fmt.Sprintf("%d,%d", d.Diagonal.Left, d.Diagonal.Right)
		if d.Diagonal.Right < 0 {
			meta["window"] = strconv.Itoa(d.Diagonal.Left)
		}
	}
	if d.Docs != nil {
		meta["docs"] = text(d.Docs)
	}
	if d.DocsKV != nil {
		meta["docs_kv"] = text(d.DocsKV)
	}
	return meta
}

// The metadata gives the mask of the definition, pair by pair.
func TestMetadataAreTheDefinition(t *testing.T) {
	kinds := map[string]int{}
	for seed := range uint64(300) {
		d := attentiontest.RandomDefinition(seed, 12)
		if !d.Diagonal.Causal {
			d.Diagonal.TopLeft = false // metadata sets only the alignment of a causal mask
		}
		if d.Slices != nil && len(d.Slices) == 0 {
			continue
		}
		meta := metadataOf(t, d)
		c, err := Open(write(t, shapesOf(2, d.SeqQ, d.SeqKV), meta))
		if err != nil {
			t.Fatalf("%v: %v", meta, err)
		}
		defer c.Close()
		if c.Masks.Apart() {
			t.Fatalf("%v: samples of their own", meta)
		}
		tiles := partition.Plan(partition.Shape{SeqQ: d.SeqQ, SeqKV: d.SeqKV, Size: 1, Layout: partition.Contiguous{},
			Mask: c.Masks.of[0]}, 0, 0)
		for i := range d.SeqQ {
			for j := range d.SeqKV {
				got := slices.ContainsFunc(tiles, func(t partition.Tile) bool {
					return t.Q.Lo <= i && i < t.Q.Hi && t.K.Lo <= j && j < t.K.Hi && t.Band.Sees(i, j)
				})
				if got != d.Sees(i, j) {
					t.Fatalf("%v of %d by %d: query %d sees key %d: %t", meta, d.SeqQ, d.SeqKV, i, j, got)
				}
			}
		}
		for key := range meta {
			kinds[key]++
		}
	}
	for _, key := range []string{"causal", "window", "docs", "docs_kv", "slices"} {
		if kinds[key] < 25 {
			t.Errorf("%d cases with %q", kinds[key], key)
		}
	}
}

// Samples with different documents give the same bits as each sample alone.
func TestSamplesOfTheirOwn(t *testing.T) {
	meta := map[string]string{"causal": "true"}
	docs := []string{"[9,4]", "[0,13]", "[0,13]", "[3,3,0,7]"}
	keys := []string{"[5,6]", "[11,0]", "[11,0]", "[2,0,4,5]"}
	for _, c := range []struct {
		seqKV   int
		layouts []partition.LayoutName
	}{
		{13, []partition.LayoutName{"zigzag", "striped", "window", "document"}},
		{11, []partition.LayoutName{"zigzag", "window", "contiguous"}},
	} {
		s, apart := shapesOf(4, 13, c.seqKV), maps.Clone(meta)
		apart["docs"] = "[" + strings.Join(docs, ",") + "]"
		if c.seqKV != 13 {
			apart["docs_kv"] = "[" + strings.Join(keys, ",") + "]"
		}
		path := write(t, s, apart)
		for _, layout := range c.layouts {
			spec := Spec{Strategy: ring.Strategy{Layout: layout, Algorithm: "ring", Backend: "flash"}, DType: "fp32"}
			got, report := run(t, path, 3, spec)
			pairs := 0
			for b := range docs {
				alone := maps.Clone(meta)
				alone["docs"] = docs[b]
				if c.seqKV != 13 {
					alone["docs_kv"] = keys[b]
				}
				if layout == "document" { // the rows of a rank follow the pieces of all samples
					spec.Layout = "zigzag"
				}
				want, one := run(t, sample(t, path, b, alone), 3, spec)
				pairs += one.Pairs
				for name, w := range want {
					allowed := 0.0
					if layout == "document" {
						allowed = 1e-6
					}
					if err := near.Each(got[name][b*len(w):(b+1)*len(w)], w, near.Infinities,
						func(int) float64 { return allowed }); err != nil {
						t.Fatalf("%s, layout %s, sample %d, not as alone: %s: %v", apart["docs"], layout, b, name, err)
					}
				}
			}
			if report.Pairs != pairs {
				t.Errorf("%d pairs, of the samples alone %d", report.Pairs, pairs)
			}
		}
	}
}

// sample writes one sample of a file as a new file.
func sample(t *testing.T, path string, b int, meta map[string]string) string {
	t.Helper()
	f, err := safetensors.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	all := results(t, path)
	var entries []safetensors.Entry
	for _, name := range f.Names() {
		info, _ := f.Info(name)
		n := len(all[name]) / info.Shape[0]
		entries = append(entries, safetensors.Floats(name, safetensors.F32, append([]int{1}, info.Shape[1:]...),
			all[name][b*n:(b+1)*n]))
	}
	out := filepath.Join(t.TempDir(), "sample.safetensors")
	if err := safetensors.WriteFile(out, meta, entries); err != nil {
		t.Fatal(err)
	}
	return out
}

// scripts/oracle/masks.py computed the mask fixtures in float64, pair by pair.
func TestMaskFixtures(t *testing.T) {
	paths, err := filepath.Glob("testdata/masks/*.safetensors")
	if err != nil || len(paths) != 16 {
		t.Fatalf("%d fixtures, %v", len(paths), err)
	}
	words := []string{
		"causal, documents", "causal, window (6, -1), documents, their lengths in keys",
		"window (4, 2), documents, their lengths in keys",
		"causal from the top left, documents, their lengths in keys", "causal, documents of each sample",
		"causal, window (8, -1), documents of each sample, their lengths in keys", "slices: 5", "slices: 5",
		"slices: 6", "slices: 2",
		"causal from the top left, window (12, -1)", "causal from the top left", "window (-1, 3)", "window (6, -1)",
		"window (7, 4)", "window (9, 5)",
	}
	for i, path := range paths {
		want := results(t, path)
		for ranks := 1; ranks <= 5; ranks++ {
			spec := Spec{Strategy: ring.Strategy{
				Layout:    []partition.LayoutName{"zigzag", "striped", "contiguous", "window"}[(i+ranks)%4],
				Algorithm: []string{"ring", "allgather"}[ranks/2%2], Backend: "flash",
			}, DType: "fp32"}
			got, report := run(t, path, ranks, spec)
			if report.Mask != words[i] {
				t.Errorf("%s: the mask is %q, want %q", filepath.Base(path), report.Mask, words[i])
			}
			for _, name := range []string{"out", "lse", "dq", "dk", "dv"} {
				if err := near.Within(got[name], want[name], near.Infinities, 3e-6); err != nil {
					t.Errorf("%s, %d ranks, %s, %s: %s: %v", filepath.Base(path), ranks, spec.Layout, spec.Algorithm,
						name, err)
				}
			}
		}
	}
}

// Consecutive documents may also have other lengths in keys.
func TestDocumentsOneBehindAnother(t *testing.T) {
	meta := map[string]string{"docs": "[4,0,5]", "docs_kv": "[2,1,8]", "causal": "true"}
	batched := shapes{"q": {1, 9, 2, 4}, "k": {1, 11, 1, 4}, "v": {1, 11, 1, 3}, "dout": {1, 9, 2, 3}}
	want, _ := run(t, write(t, batched, meta), 2, Spec{Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ring",
		Backend: "flash"}, DType: "fp32"})
	flat := shapes{"q": {9, 2, 4}, "k": {11, 1, 4}, "v": {11, 1, 3}, "dout": {1, 9, 2, 3}}
	for _, docs := range []string{"[4,0,5]", "[[4,0,5]]"} {
		meta := maps.Clone(meta)
		if meta["docs"] = docs; docs[1] == '[' {
			meta["docs_kv"] = "[[2,1,8]]"
		}
		got, _ := run(t, write(t, flat, meta), 2, Spec{Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ring",
			Backend: "flash"}, DType: "fp32"})
		for name, w := range want {
			if !slices.Equal(got[name], w) {
				t.Errorf("documents %s: %s is not that of tensors with a batch", docs, name)
			}
		}
	}
}

// Values without effect may be combined, since some programs write every key.
func TestMasksThatAskForNothing(t *testing.T) {
	for _, meta := range []map[string]string{
		{"causal": "true", "window": "", "docs": "[]", "docs_kv": "", "slices": ""},
		{"causal": "true", "window": "-1", "docs": "null", "docs_kv": "[]", "slices": "[]"},
		{"causal": "false", "window": "-1,-1", "docs": "[]", "docs_kv": "[]", "slices": `[[0,9,0,9,"causal"]]`},
	} {
		c, err := Open(write(t, shapesOf(2, 9, 9), meta))
		if err != nil {
			t.Errorf("%v: %v", meta, err)
			continue
		}
		defer c.Close()
		s := partition.Shape{SeqQ: 9, SeqKV: 9, Size: 1, Layout: partition.Contiguous{}, Mask: c.Masks.of[0]}
		if n := partition.Work(s)[0]; len(c.Masks.of) != 1 || n != 45 {
			t.Errorf("%v: %d pairs, want those of a causal mask", meta, n)
		}
	}
	// Equal samples, and equal lengths in keys, have no effect.
	c, err := Open(write(t, shapesOf(2, 9, 9), map[string]string{"docs": "[[4,5],[4,5]]", "docs_kv": "[[4,5],[4,5]]"}))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if words := c.Masks.String(); words != "documents" || c.Masks.Apart() || len(c.Masks.Docs) != 1 ||
		c.Masks.DocsKV != nil {
		t.Errorf("documents that are alike are %q: %+v", words, c.Masks)
	}
}

// Layout document is refused only for masks that it does not support.
func TestLayoutDocumentNeedsAsManyKeys(t *testing.T) {
	for _, c := range []struct {
		seqKV int
		meta  map[string]string
		good  bool
	}{
		{11, map[string]string{"docs": "[4,5]", "docs_kv": "[5,6]"}, false},
		{9, map[string]string{"docs": "[4,5]", "docs_kv": "[5,4]"}, true},
		{9, map[string]string{"slices": `[[0,9,0,4,"full"]]`}, true},
		{11, map[string]string{"slices": `[[0,9,0,4,"full"]]`}, false},
	} {
		f, err := Open(write(t, shapesOf(1, 9, c.seqKV), c.meta))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		s := Spec{Strategy: ring.Strategy{Layout: "document", Algorithm: "ring", Backend: "flash"}, DType: "fp32",
			Device: "cpu"}
		if err := s.Check(f, 2); (err == nil) != c.good {
			t.Errorf("%d keys, %v: %v", c.seqKV, c.meta, err)
		}
	}
}

// acceptedMasks returns the fault of masks that were wrongly accepted.
func acceptedMasks(c *Case) error {
	if n := len(c.Masks.of); n != 1 && n != c.Batch {
		return fmt.Errorf("%d masks of %d samples", n, c.Batch)
	}
	for i, docs := range c.Masks.Docs {
		inKeys := docs
		if c.Masks.DocsKV != nil {
			inKeys = c.Masks.DocsKV[i]
		}
		q, k := 0, 0
		for n := range docs {
			q, k = q+docs[n], k+inKeys[n]
			if docs[n] < 0 || inKeys[n] < 0 {
				return fmt.Errorf("documents %v, in keys %v", docs, inKeys)
			}
		}
		if q != c.SeqQ || k != c.SeqKV {
			return fmt.Errorf("documents %v, in keys %v", docs, inKeys)
		}
	}
	for _, m := range c.Masks.of {
		s := partition.Shape{SeqQ: c.SeqQ, SeqKV: c.SeqKV, Size: 2, Layout: partition.Zigzag{}, Mask: m}
		for _, n := range partition.Work(s) {
			if n < 0 || n > c.SeqQ*c.SeqKV {
				return fmt.Errorf("%d pairs of %d by %d", n, c.SeqQ, c.SeqKV)
			}
		}
	}
	return nil
}

// FuzzMaskText checks that the mask parsers accept only JSON with the same meaning.
func FuzzMaskText(f *testing.F) {
	for _, s := range []string{
		"[]", "null", "[4,5]", "[[4,5],[9]]", "[[],[0]]", "[-1]", "[1e3]", "[null]", "[[null]]", "[[1],2]", " [1 ] ",
		`[[0,9,0,9,"full"]]`,
		`[[0,9,0,9,"causal"],[1,2,3,4,"bi_causal"]]`, `[[0,9,0,9,null]]`, "3", "3,4", "-1,-1", " 3 , 4", "+3,04",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if d, err := parseDocuments(text); err == nil && d.lists != nil {
			var same any = d.lists
			if !d.samples {
				same = d.lists[0]
			}
			equalJSON(t, text, same)
		}
		if list, err := parseSlices(text); err == nil && list != nil {
			var same [][]any
			for _, s := range list {
				same = append(same, []any{s.Q.Lo, s.Q.Hi, s.K.Lo, s.K.Hi, s.Mask.String()})
			}
			equalJSON(t, text, same)
		}
		if l, r, err := parseWindow(text); err == nil && (l < -1 || r < -1) {
			t.Fatalf("window %q is %d and %d", text, l, r)
		}
	})
}

func equalJSON(t *testing.T, text string, same any) {
	t.Helper()
	var compact bytes.Buffer
	if err := json.Compact(&compact, []byte(text)); err != nil {
		t.Fatalf("%q is no JSON: %v", text, err)
	}
	want, err := json.Marshal(same)
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.ReplaceAll(compact.String(), "-0", "0"); got != string(want) && !strings.Contains(text, "\\") {
		t.Fatalf("%q is read as %s", text, want)
	}
}
