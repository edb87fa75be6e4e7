package data

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/partition"
)

// llama returns the path of a small tokenizer.json, which puts <|begin|> (0) in front of each text.
func llama(t testing.TB) string {
	t.Helper()
	f := must.Have(os.Open("../tokenizer/testdata/llama3.json.gz"))
	defer f.Close()
	z := must.Have(gzip.NewReader(f))
	var o struct{ Tokenizer json.RawMessage }
	must.Do(t, json.NewDecoder(z).Decode(&o))
	path := filepath.Join(t.TempDir(), "tokenizer.json")
	must.Do(t, os.WriteFile(path, o.Tokenizer, 0o666))
	return path
}

const llamaVocab = 603

// direct returns the ids of a text.
func direct(t testing.TB, path, text string) []int32 {
	t.Helper()
	tok := must.Have(LoadTokenizer(path))
	return must.Have(tok.NewEncoder().Append(nil, text))
}

func TestTextIsWhatTheTokenizerMakesOfIt(t *testing.T) {
	path := llama(t)
	long := strings.Repeat("many words of light, ", 20000) // several batches
	lines := []string{`{"text":"the first"}`, "", `{"text":"` + long + `"}`, `{"text":""}`, `{"text":"ends<|end|>"}`,
		`{"input_ids":[5,6,7]}`}
	dir := put(t, map[string]string{"a.txt": "a text\nof lines", "b.txt": "", "c.jsonl": strings.Join(lines, "\n")})
	const end = 1 // <|end|>
	var want []int32
	var docs []int64
	note := func(ids ...int32) {
		want = append(want, ids...)
		docs = append(docs, int64(len(want)))
	}
	note(append(direct(t, path, "a text\nof lines"), end)...)
	note(append(direct(t, path, "the first"), end)...)
	note(append(direct(t, path, long), end)...)
	note(direct(t, path, "ends<|end|>")...)
	note(5, 6, 7)
	d := must.Have(Open(Source{Paths: []string{filepath.Join(dir, "*.txt"), filepath.Join(dir, "c.jsonl")},
		Tokenizer: NewTokenizer(path, llamaVocab), EOS: end, Vocab: llamaVocab}))
	if got := all(t, d); !slices.Equal(got, want) {
		t.Errorf("%d ids, want %d, or others", len(got), len(want))
	}
	if got, _, err := d.documents(); err != nil || !slices.Equal(got, docs) {
		t.Errorf("documents end at %v (%v), want %v", got, err, docs)
	}
	must.Have(d.Check(true))
}

func TestTextThatCannotBeEncodedIsExplained(t *testing.T) {
	path := llama(t)
	for _, tc := range []struct{ name, content, want string }{
		{"a.txt", "caf\xe9", "a.txt: not UTF-8 at byte 3; convert it"},
		{"a.jsonl", `{"text":"x"}` + "\n" + `{"text":2}`, `a.jsonl: line 2: the value of "text" is not a string`},
		{"a.jsonl", `{"text":"x","input_ids":[1]}`, `both "text" and "input_ids"`},
		{"a.jsonl", `{"text":"x","labels":[1]}`, `"labels" without "input_ids"`},
		{"a.jsonl", `{"input_ids":[1,603]}`, "input_ids[1] is 603; want an id below vocab_size 603"},
		{"a.jsonl", `{"input_ids":[1,-100]}`, "input_ids[1] is -100"},
		{"a.jsonl", `{"input_ids":[1.5]}`, `"input_ids" is not a list of integers`},
		{"a.jsonl", `{"input_ids":[1,null]}`, `"input_ids" is not a list of integers`},
		{"a.jsonl", `{"input_ids":null}`, `"input_ids" is not a list of integers`},
		{"a.jsonl", `{"input_ids":[1],"labels":[-1]}`,
			"labels[0] is -1; want an id below vocab_size 603, or -100 for none"},
		{"a.jsonl", `{"input_ids":[1,2],"labels":[1]}`, "1 labels for 2 input_ids"},
		{"a.jsonl.xz", "x", "is compressed"},
	} {
		dir := put(t, map[string]string{tc.name: tc.content})
		_, err := Open(Source{Paths: []string{filepath.Join(dir, tc.name)}, Tokenizer: NewTokenizer(path, llamaVocab),
			EOS: -1, Vocab: llamaVocab})
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want %q", tc.content, err, tc.want)
		}
	}
	dir := put(t, map[string]string{"a.txt": "x"})
	_, err := Open(Source{Paths: []string{filepath.Join(dir, "a.txt")}, Tokenizer: NewTokenizer(path, 599), EOS: -1,
		Vocab: 599})
	if bad := (*TokenizerError)(nil); !errors.As(err, &bad) ||
		!strings.Contains(err.Error(), "it has 600 tokens, and vocab_size is 599") {
		t.Errorf("a model with fewer tokens: %v", err)
	}
	// An added token needs no row of the model unless a text contains it.
	for text, want := range map[string]string{"x": "", "x lonely x": `token "lonely"`} {
		dir := put(t, map[string]string{"a.txt": text})
		_, err := Open(Source{Paths: []string{filepath.Join(dir, "a.txt")}, Tokenizer: NewTokenizer(path, 600), EOS: -1,
			Vocab: 600})
		if fmt.Sprint(err) != "<nil>" != (want != "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

func TestEncodingStopsWhereItsReaderDoes(t *testing.T) {
	path := llama(t)
	dir := put(t, map[string]string{"a.jsonl": strings.Repeat(`{"text":"some words of a line"}`+"\n", 100_000)})
	e := Encoding{Tokenizer: NewTokenizer(path, 0), EOS: -1}
	stop, n := errors.New("enough"), 0
	err := e.Each(context.Background(), []string{filepath.Join(dir, "a.jsonl")}, func(int, Document) error {
		if n++; n == 10 {
			return stop
		}
		return nil
	})
	if !errors.Is(err, stop) {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := e.Each(ctx, []string{filepath.Join(dir, "a.jsonl")},
		func(int, Document) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// The target of a place is the label of the next one, and -100 is none, under every layout.
func TestLabelsAreTheTargets(t *testing.T) {
	lines := `{"input_ids":[1,2,3,4],"labels":[-100,-100,3,4]}` + "\n" + `{"input_ids":[5,6,7],"labels":[5,-100,9]}` +
		"\n" + `{"input_ids":[8,9,10,11,12]}` + "\n"
	s := sourceOf(t, in{"a.jsonl": lines}, "*", -1, 20)
	s.Tokenizer = NewTokenizer("", 0)
	d := must.Have(Open(s))
	for _, tc := range []struct {
		pack    bool
		samples int64
		targets string // of the first two
		valid   [2]int
	}{
		{false, 3, "[-1 3 4 -1 -1 -1 -1 -1] [-1 9 -1 -1 -1 -1 -1 -1]", [2]int{2, 1}},
		{true, 2, "[-1 3 4 -1 -1 -1 -1 -1] [-1 9 -1 9 10 11 12 -1]", [2]int{2, 5}},
	} {
		l := must.Have(New(d, Plan{SeqLen: 8, PackDocuments: tc.pack, Whole: true}))
		if l.Samples() != tc.samples || [2]int{l.Valid(0), l.Valid(1)} != tc.valid || l.Alike() {
			t.Errorf("pack %v: %d samples, %d and %d targets, alike %v", tc.pack, l.Samples(), l.Valid(0), l.Valid(1),
				l.Alike())
		}
		for name, layout := range map[string]partition.Layout{"zigzag": partition.Zigzag{},
			"striped": partition.Striped{}, "contiguous": partition.Contiguous{}} {
			for size := 1; size <= 4; size++ {
				got := fmt.Sprint(gather(t, l, 0, layout, size).targets, gather(t, l, 1, layout, size).targets)
				if got != tc.targets {
					t.Errorf("pack %v, %s, %d ranks: %s, want %s", tc.pack, name, size, got, tc.targets)
				}
			}
		}
	}
}

// FuzzRecord checks that an accepted line has a text, or ids within the vocabulary and as many labels.
func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"text":"a"}`))
	f.Add([]byte(`{"input_ids":[1,2],"labels":[-100,2]}`))
	f.Add([]byte(`{"input_ids":[1e2]}`))
	f.Add([]byte(`{"messages":[{"role":"user","content":[{"type":"text"}]}],"tools":"[]","chat_template_kwargs":{"a":1}}`))
	f.Add([]byte(`{"prompt":[{"from":"human","value":null}],"completion":[{"role":"assistant"}]}`))
	f.Add([]byte(`{"input_ids":[1,2,3],"seq_lengths":[1,2],"cu_seqlens":[0,1,3],"position_ids":[0,0,1],"segment_ids":[1,2,2]}`))
	f.Add([]byte(`{"input_ids":[1,2],"attention_mask":[1,0],"document_ids":[1,0],"n":NaN,"m":-Infinity}`))
	f.Add([]byte(`{"system":"s","conversations":[{"from":"function_call","value":"x","weight":0.0}],"functions":"[]"}`))
	f.Add([]byte("\ufeff" + `{"text":"a","images":[],"loss":1,"k":123456789012345678901}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		r, err := parseRecord(line, "", 1000, nil)
		if err != nil {
			return
		}
		if c := r.chat; c != nil {
			if c.messages == nil && c.split >= 0 || c.split > len(c.messages) {
				t.Fatalf("%+v", c)
			}
			return
		}
		n := 0
		for _, d := range r.documents() {
			n += len(d.IDs)
		}
		if n != len(r.ids) {
			t.Fatalf("%d tokens in documents: %+v", n, r)
		}
		if r.ids != nil && r.text != "" || r.labels != nil && len(r.labels) != len(r.ids) {
			t.Fatalf("%+v", r)
		}
		for i, id := range r.ids {
			if id < 0 || id >= 1000 || r.labels != nil && r.labels[i] != Ignore &&
				(r.labels[i] < 0 || r.labels[i] >= 1000) {
				t.Fatalf("%+v", r)
			}
		}
	})
}

// A text of which the normalizer leaves nothing is a document of the EOS token.
func TestATextWithoutTokensIsItsEOS(t *testing.T) {
	dir := put(t, map[string]string{"a.jsonl": `{"text":" "}`, "tokenizer.json": `{"version":"1.0","added_tokens":[],` +
		`"normalizer":{"type":"Strip","strip_left":true,"strip_right":true},"pre_tokenizer":{"type":"Whitespace"},` +
		`"post_processor":null,"decoder":null,"model":{"type":"WordLevel","vocab":{"a":0,"b":1},"unk_token":"a"}}`})
	d, err := Open(Source{Paths: []string{filepath.Join(dir, "a.jsonl")}, EOS: 1, Vocab: 2,
		Tokenizer: NewTokenizer(filepath.Join(dir, "tokenizer.json"), 0)})
	if err != nil || d.Len() != 1 || all(t, d)[0] != 1 {
		t.Error(err)
	}
}

// A token that stands only in tokenizer_config.json has an id, and the token cache notices it.
func TestFilesBesideTheTokenizerDecideTokens(t *testing.T) {
	raw := must.Have(os.ReadFile(chatDir + "tokenizer.json"))
	dir := put(t, map[string]string{"tokenizer.json": string(raw), "a.txt": "a<new>b"})
	path := filepath.Join(dir, "tokenizer.json")
	s := Source{Paths: []string{filepath.Join(dir, "a.txt")}, EOS: -1, Cache: Cache{Dir: t.TempDir()}}
	read := func() (ids []int32, key string) {
		s.Tokenizer = NewTokenizer(path, 0)
		return must.Have(s.Tokenizer.Encode("a<new>b")), must.Have((&Dataset{source: s}).cacheKey(s.Paths))
	}
	ids, key := read()
	settings := filepath.Join(dir, "tokenizer_config.json")
	must.Do(t, os.WriteFile(settings, []byte(`{"pad_token": "<new>"}`), 0o666))
	more, other := read()
	if len(more) != 4 || len(ids) <= 4 || key == other {
		t.Errorf("ids %v, then %v; keys %s, %s", ids, more, key, other)
	}
	e := Encoding{Tokenizer: s.Tokenizer, EOS: -1, Vocab: int(more[2])}
	err := e.Each(t.Context(), s.Paths, func(int, Document) error { return nil })
	if err == nil || !strings.Contains(err.Error(), `"<new>"`) || !strings.Contains(err.Error(), fmt.Sprint(more[2])) {
		t.Errorf("a token beyond the vocabulary: %v", err)
	}
}
