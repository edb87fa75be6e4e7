package main

import (
	"compress/gzip"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/text/data"
)

// model creates a Hugging Face directory with a small Llama and the given kind of tokenizer, if any.
func model(t *testing.T, with string) string {
	t.Helper()
	const parity = "../../internal/model/testdata/parity/tiny-llama"
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(parity)); err != nil {
		t.Fatal(err)
	}
	if with == "" {
		return dir
	}
	f, err := os.Open("../../internal/text/tokenizer/testdata/" + with + ".json.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var o struct{ Tokenizer json.RawMessage }
	if err := json.NewDecoder(z).Decode(&o); err != nil {
		t.Fatal(err)
	}
	write(t, dir, "tokenizer.json", string(o.Tokenizer))
	return dir
}

// This tokenizer.json fits the 256 rows of the small llama.
const bytesOnly = `{"added_tokens":[{"id":2,"content":"</s>","special":true,"normalized":false}],
	"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false},"model":{"type":"BPE","merges":[],"vocab":{%s}}}`

// fitting creates a model directory with a tokenizer of the model's size; the letters begin at id 3.
func fitting(t *testing.T) string {
	t.Helper()
	dir := model(t, "")
	vocab := []string{`"<unk>":0`, `"<s>":1`, `"</s>":2`}
	for c := '!'; c <= '~'; c++ {
		vocab = append(vocab, fmt.Sprintf("%q:%d", string(c), len(vocab)))
	}
	vocab = append(vocab, `"Ġ":97`, `"Ċ":98`, `"Ã":99`, `"©":100`)
	write(t, dir, "tokenizer.json", fmt.Sprintf(bytesOnly, strings.Join(vocab, ",")))
	return dir
}

// tokensOf reads a pair.
func tokensOf(t *testing.T, path string) []int32 {
	t.Helper()
	d, err := data.Open(data.Source{Paths: []string{path}, EOS: -1, Vocab: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	ids := make([]int32, d.Len())
	if err := d.ReadTokens(ids, 0); err != nil {
		t.Fatal(err)
	}
	return ids
}

func TestTokenizeWritesWhatTrainingReads(t *testing.T) {
	t.Parallel()
	hf, dir := fitting(t), t.TempDir()
	text := strings.Repeat("to be, or not to be</s>that is the question! ", 40)
	a, b := write(t, dir, "a.txt", text), write(t, dir, "b.jsonl",
		`{"text":"ends</s>"}`+"\n"+`{"text":"caf\u00e9"}`+"\n"+`{"input_ids":[5,6]}`)
	out := filepath.Join(dir, "out")
	said, _ := must(t, "tokenize", "--tokenizer", hf, "--to", out, a, b)
	if !strings.Contains(said, "4 documents") || !strings.Contains(said, out+".bin") {
		t.Error(said)
	}
	ids := tokensOf(t, out+".bin")
	tail := []int32{'e' - 30, 'n' - 30, 'd' - 30, 's' - 30, 2, 'c' - 30, 'a' - 30, 'f' - 30, 99, 100, 2, 5, 6}
	if len(ids) < 50 || ids[0] != 't'-30 || ids[2] != 97 || !slices.Equal(ids[len(ids)-len(tail):], tail) ||
		ids[len(ids)-len(tail)-1] != 2 {
		t.Errorf("%v", ids)
	}
	// Text and its token files train to the same bits. Text is read with the model's own tokenizer and EOS.
	runs := map[string]string{}
	for name, path := range map[string]string{"text": "[" + a + ", " + b + "]", "pair": out + ".bin"} {
		runs[name], _ = trains(t, "--nproc", "2", write(t, dir, name+".yaml", fmt.Sprintf("model: {from: %s}\n"+
			"data: {path: %s, seq_len: 64, pack_documents: false}\ntrain: {steps: 3, deterministic: true}\n", hf, path)))
		contains(t, name, content(t, runs[name], "config.yaml"), "eos_token_id: 2",
			"tokenizer: "+filepath.Join(hf, "tokenizer.json"))
	}
	alike(t, "text and its token files", runs["text"], runs["pair"])
	// The file alone, and no EOS.
	must(t, "tokenize", "--quiet", "--tokenizer", filepath.Join(hf, "tokenizer.json"), "--eos=false", "--to", out+"2",
		b)
	if got := tokensOf(t, out+"2.bin"); !slices.Equal(got, append(slices.Clone(tail[:10]), 5, 6)) {
		t.Errorf("%v", got)
	}
	must(t, "tokenize", "--tokenizer", "bytes", "--to", out+"3", a)
	if got := tokensOf(t, out+"3.bin"); len(got) != len(text) {
		t.Errorf("%d tokens of %d bytes", len(got), len(text))
	}
}

func TestWrongTokenizeIsRefused(t *testing.T) {
	t.Parallel()
	hf, bare, dir := fitting(t), t.TempDir(), t.TempDir()
	good := write(t, dir, "a.txt", "some text")
	write(t, bare, "tokenizer.json", `{"model":{"type":"WordLevel","vocab":{"a":0}}}`)
	out := filepath.Join(dir, "out")
	write(t, dir, "there.bin", "")
	gpt2 := filepath.Join(model(t, "gpt2"), "tokenizer.json")
	invalid(t, []string{"tokenize", "--tokenizer", hf, "--to", out}, "FILE")
	invalid(t, []string{"tokenize", "--to", out, good}, "--tokenizer is missing")
	invalid(t, []string{"tokenize", "--tokenizer", hf, good}, "--to is missing")
	for _, c := range [][]string{
		{"tokenizer.json: ", dir, out, good},
		{"not a tokenizer.json", good, out, good},
		{"--eos=false", bare, out, good},
		{`a.txt: "some text" is no token`, bare, out, good, "--eos=false"},
		{"none.txt: no such file", hf, out, filepath.Join(dir, "none.txt")},
		{"there.bin: ", hf, out, filepath.Join(dir, "there.bin")},
		{"there.bin: it is there already", hf, filepath.Join(dir, "there"), good},
		{"no such file or directory", hf, filepath.Join(dir, "no", "out"), good},
		{"b.txt: not UTF-8 at byte 3", hf, out, write(t, dir, "b.txt", "caf\xe9")},
		{"-f utf-16", gpt2, out, write(t, dir, "little.txt", "\xff\xfeh\x00i\x00")},
		{"-f utf-16", gpt2, out, write(t, dir, "big.txt", "\xfe\xff\x00h\x00i")},
		{"-f latin1", gpt2, out, filepath.Join(dir, "b.txt")},
		{`c.jsonl: line 2: no key "text"`, hf, out, good, write(t, dir, "c.jsonl", "{\"text\":\"a\"}\n{}")},
		{"d.jsonl: ", hf, out, write(t, dir, "d.jsonl", `{"input_ids":[1],"labels":[-100]}`)},
		{"no text", hf, out, write(t, dir, "e.txt", "")},
	} {
		invalid(t, append([]string{"tokenize", "--tokenizer", c[1], "--to", c[2]}, c[3:]...), c[0])
	}
	list, err := filepath.Glob(filepath.Join(dir, "*out*"))
	hidden, _ := filepath.Glob(filepath.Join(dir, ".*tmp*"))
	if err != nil || len(list)+len(hidden) > 0 {
		t.Errorf("left are %v, %v", list, hidden)
	}
}

// Each row is a mistake that a user could make with text for a Hugging Face model.
func TestTextIsNeverBytesByMistake(t *testing.T) {
	t.Parallel()
	text := write(t, t.TempDir(), "a.jsonl", strings.Repeat(`{"text":"some words"}`+"\n", 30))
	none, other := model(t, ""), model(t, "gpt2")
	config := func(from, more string) string {
		return write(t, t.TempDir(), "train.yaml",
			fmt.Sprintf("model: {from: %s}\ndata:\n  path: %s\n  seq_len: 32\n%strain: {steps: 1}\n", from, text, more))
	}
	for _, c := range []struct{ yaml, want string }{
		{config(none, ""), "train.yaml:2: data.tokenizer: data file " + text},
		{config(none, "  tokenizer: auto\n"), "train.yaml:5: data.tokenizer: data file " + text},
		{config(none, ""), "or write bytes if the model is to learn bytes"},
		{config(other, ""), "train.yaml:2: data.tokenizer: data file " + text},
		{config(other, ""), "it has 600 tokens, and vocab_size is 256"},
		{config(none, "  tokenizer: none.json\n"), "train.yaml:5: data.tokenizer: no tokenizer none.json in"},
	} {
		dir := filepath.Join(t.TempDir(), "run")
		invalid(t, []string{"--run-dir", dir, c.yaml}, c.want)
		if _, err := os.Stat(dir); err == nil {
			t.Errorf("%s: a run directory was made", c.want)
		}
	}
	must(t, "--run-dir", filepath.Join(t.TempDir(), "run"), config(none, "  tokenizer: bytes\n"))
}
