package tokenizer

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"github.com/cprun/cprun/internal/base/must"
)

// An oracle is a tokenizer with texts and their ids by the Python library, written by scripts/oracle/tokenizer_ids.py
// --testdata.
type oracle struct {
	Tokenizer json.RawMessage
	Cases     []struct {
		Text string
		IDs  []int32
	}
}

// oracles reads testdata, by kind.
func oracles(t testing.TB) map[string]oracle {
	t.Helper()
	paths, err := filepath.Glob("testdata/*.json.gz")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no testdata: %v", err)
	}
	all := map[string]oracle{}
	for _, path := range paths {
		f := must.Have(os.Open(path))
		z := must.Have(gzip.NewReader(f))
		var o oracle
		must.Do(t, json.NewDecoder(z).Decode(&o))
		f.Close()
		all[strings.TrimSuffix(filepath.Base(path), ".json.gz")] = o
	}
	return all
}

// parse reads a valid tokenizer.
func parse(t testing.TB, raw []byte) *Tokenizer {
	t.Helper()
	return must.Have(Parse(raw))
}

// encode returns the ids of a text by a new encoder.
func encode(t testing.TB, tok *Tokenizer, text string) []int32 {
	t.Helper()
	ids, err := tok.NewEncoder().Append([]int32{}, text)
	if err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	return ids
}

func TestIDsAreThoseOfTheLibrary(t *testing.T) {
	for kind, o := range oracles(t) {
		t.Run(kind, func(t *testing.T) {
			tok := parse(t, o.Tokenizer)
			e, size := tok.NewEncoder(), tok.Size() // which counts
			for range 2 {                           // the second time from the cache
				for _, c := range o.Cases {
					ids, err := e.Append([]int32{}, c.Text)
					if err != nil || !slices.Equal(ids, c.IDs) {
						t.Fatalf("%q: %v (%v), the library has %v", c.Text, ids, err, c.IDs)
					}
					for _, id := range ids {
						if int(id) >= size {
							t.Fatalf("%q: id %d of %d", c.Text, id, size)
						}
					}
				}
			}
		})
	}
}

func TestEncodersMayWorkSideBySide(t *testing.T) {
	o := oracles(t)["llama3"]
	tok := parse(t, o.Tokenizer)
	var g sync.WaitGroup
	for range 4 {
		g.Go(func() {
			e := tok.NewEncoder()
			for _, c := range o.Cases {
				if ids, err := e.Append(nil, c.Text); err != nil || !slices.Equal(ids, c.IDs) {
					t.Errorf("%q: %v (%v), want %v", c.Text, ids, err, c.IDs)
				}
			}
		})
	}
	g.Wait()
}

func TestAppendKeepsWhatIsThere(t *testing.T) {
	tok := parse(t, oracles(t)["gpt2"].Tokenizer)
	ids, err := tok.NewEncoder().Append([]int32{-7}, "ab")
	if err != nil || ids[0] != -7 || !slices.Equal(ids[1:], encode(t, tok, "ab")) {
		t.Errorf("%v, %v", ids, err)
	}
	ids, err = tok.NewEncoder().Append([]int32{-7}, "ab\xff")
	if !errors.Is(err, ErrUTF8) || !strings.Contains(err.Error(), "byte 2") || !slices.Equal(ids, []int32{-7}) {
		t.Errorf("%v, %v", ids, err)
	}
}

// A long word is cut at places that no merge crosses. The ids equal the ids of the whole word.
func TestLongWordsCutAreLongWordsWhole(t *testing.T) {
	for kind, o := range oracles(t) {
		cut, whole := parse(t, o.Tokenizer), parse(t, o.Tokenizer)
		b, ok := whole.model.(*bpe)
		if !ok || b.joins == nil {
			continue
		}
		b.joins = nil
		var text strings.Builder
		for _, c := range o.Cases {
			text.WriteString(strings.NewReplacer(" ", "", "\n", "").Replace(c.Text))
		}
		if got, want := encode(t, cut, text.String()), encode(t, whole, text.String()); !slices.Equal(got, want) {
			t.Errorf("%s: cut into parts a text has %d ids, whole %d, or others", kind, len(got), len(want))
		}
	}
}

// A part that is itself a token is still merged: ignore_merges applies to whole words.
func TestPartsOfLongWordsAreNoWords(t *testing.T) {
	tok := parse(t, []byte(
		`{"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2,"ba":3,"aba":4,"<":5},"merges":[["a","b"],["b","a"]],"ignore_merges":true}}`))
	if got := encode(t, tok, "aba"); !slices.Equal(got, []int32{4}) {
		t.Error(got)
	}
	if got, want := encode(t, tok, strings.Repeat("aba<", 20)),
		slices.Repeat([]int32{2, 0, 5}, 20); !slices.Equal(got, want) {
		t.Error(got)
	}
}

func TestIDFindsTokens(t *testing.T) {
	tok := parse(t, oracles(t)["llama3"].Tokenizer)
	for token, want := range map[string]int{"<|begin|>": 0, "<pad>": 3, "!": 4} {
		if id, ok := tok.ID(token); !ok || id != want {
			t.Errorf("%s: %d, %v; want %d", token, id, ok, want)
		}
	}
	if id, ok := tok.ID("no such token"); ok {
		t.Errorf("a token that is not there has the id %d", id)
	}
}

// bomb has a pattern that doubles its paths with each letter.
const bomb = `{"version":"1.0","model":{"type":"WordLevel","vocab":{"a":0,"<unk>":1}},
	"pre_tokenizer":{"type":"Split","pattern":{"Regex":"(?:a|a)+b"},"behavior":"Isolated","invert":false}}`

func TestPatternsThatTakeTooLongEnd(t *testing.T) {
	tok := parse(t, []byte(bomb))
	if ids := encode(t, tok, "aaab"); !slices.Equal(ids, []int32{1}) {
		t.Error(ids)
	}
	_, err := tok.NewEncoder().Append(nil, strings.Repeat("a", 60))
	if !errors.Is(err, errSteps) {
		t.Errorf("got %v", err)
	}
}

// FuzzParse checks that an accepted file encodes texts without a panic, to ids below its size.
func FuzzParse(f *testing.F) {
	f.Add([]byte(bomb), "aab")
	for _, m := range []string{
		`{"type":"BPE","vocab":{"a":0,"b":1,"ab":2,"<0x00>":3},"merges":[["a","b"]],"byte_fallback":true,"unk_token":"a","fuse_unk":true}`,
		`{"type":"BPE","vocab":{"a":0,"##b":1,"ab":2},"merges":["a ##b"],"continuing_subword_prefix":"##","end_of_word_suffix":"."}`,
		`{"type":"Unigram","vocab":[["<unk>",0],["a",-1],["ab",-1.5]],"unk_id":0,"byte_fallback":true}`,
		`{"type":"WordPiece","vocab":{"a":0,"##b":1,"[UNK]":2}}`,
	} {
		f.Add([]byte(`{"added_tokens":[{"id":0,"content":"a","lstrip":true,"rstrip":true,"single_word":true,"normalized":false}],"model":`+m+
			`,"normalizer":{"type":"Sequence","normalizers":[{"type":"NFKC"},{"type":"Replace","pattern":{"Regex":"\\s+"},"content":" "},{"type":"Strip","strip_left":true}]}`+
			`,"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Metaspace","replacement":"_"},{"type":"ByteLevel"}]}`+
			`,"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"a"}},{"Sequence":{"id":"A"}}],"special_tokens":{"a":{"ids":[0]}}}}`), "a b  c\u00e9")
	}
	f.Fuzz(func(t *testing.T, raw []byte, text string) {
		tok, err := Parse(raw)
		if err != nil || len(text) > 1000 {
			return
		}
		ids, err := tok.NewEncoder().Append(nil, text)
		if err != nil {
			return
		}
		if !utf8.ValidString(text) {
			t.Fatal("a text that is not UTF-8 was encoded")
		}
		for _, id := range ids {
			if id < 0 || int(id) >= tok.Size() {
				t.Fatalf("id %d of %d", id, tok.Size())
			}
		}
	})
}

// FuzzAppend checks that any text has ids in every kind of tokenizer, the same with and without a cache.
func FuzzAppend(f *testing.F) {
	var toks []*Tokenizer
	all := oracles(f)
	for _, kind := range []string{"llama3", "llama2", "t5", "bert", "thousands", "qwen", "clip"} {
		toks = append(toks, parse(f, all[kind].Tokenizer))
	}
	for _, c := range all["t5"].Cases[:40] {
		f.Add(c.Text)
	}
	var encoders []*Encoder
	for _, tok := range toks {
		encoders = append(encoders, tok.NewEncoder())
	}
	f.Fuzz(func(t *testing.T, text string) {
		for k, tok := range toks {
			ids, err := encoders[k].Append(nil, text)
			again, err2 := tok.NewEncoder().Append(nil, text)
			if !slices.Equal(ids, again) || (err == nil) != (err2 == nil) {
				t.Fatalf("%v (%v), and without a cache %v (%v)", ids, err, again, err2)
			}
			if utf8.ValidString(text) && err != nil && !errors.Is(err, errSteps) {
				t.Fatal(err)
			}
		}
	})
}

func BenchmarkAppend(b *testing.B) {
	book, err := os.ReadFile("../../../examples/data/opticks-books-1-2.txt")
	if err != nil {
		b.Fatal(err)
	}
	for kind, o := range oracles(b) {
		b.Run(kind, func(b *testing.B) {
			e := parse(b, o.Tokenizer).NewEncoder()
			b.SetBytes(int64(len(book)))
			for b.Loop() {
				if _, err := e.Append(nil, string(book)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
