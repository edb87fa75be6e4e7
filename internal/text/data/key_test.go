package data

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/base/must"
)

// rules is cacheVersion and the digest of the tokens and labels below. If a change of the rules for records, tokenizers
// or templates changes the digest, raise cacheVersion, and write both here.
const rules = "2 620314636f706480b01971de20c9cf7e"

// ruled has records of every kind.
var ruled = map[string][]string{
	"text":   {`{"text": "what is it?"}`, `{"text": "that</s>", "label": 1}`},
	"tokens": {`{"input_ids": [5, 6, 7, 8]}`, `{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 0], "position_ids": [0, 1, 2]}`},
	"labels": {`{"input_ids": [5, 6, 7], "labels": [-100, 6, 9]}`,
		`{"input_ids": [5, 6, 7], "labels": [5, 6, 7], "loss_mask": [0, 1, 1], "assistant_masks": [1, 1, 0]}`},
	"masks": {`{"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1]}`},
	"borders": {`{"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [2, 3]}`, `{"input_ids": [5, 6, 7], "position_ids": [0, 1, 0]}`,
		`{"input_ids": [5, 6, 7], "cu_seqlens": [0, 1, 3]}`, `{"input_ids": [5, 6, 7], "document_ids": [0, 0, 1]}`},
	"completion": {`{"prompt": "what", "completion": " that"}`,
		`{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}`},
	"messages": {`{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}`,
		`{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "loss": false}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d", "weight": 1}]}`,
		`{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "train": false, "reasoning_content": "r"}], "tools": [{"type": "function", "function": {"name": "f"}}]}`,
		`{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "function_call", "value": "c"}], "system": "s"}`},
}

// templates render messages with and without marks of the targets.
var ruledTemplates = []string{
	"{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}",
	"{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}" +
		"{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.role }} {{ m.content }}{% endif %}{% endfor %}",
}

// A change of the rules that decide tokens or targets needs another version of the cache: else a cache of the program
// before trains what was right then.
func TestCacheVersionFollowsTheRules(t *testing.T) {
	h, dir := sha256.New(), t.TempDir()
	encode := func(name string, s Source) {
		s.Paths, s.Vocab = []string{filepath.Join(dir, name)}, 2000
		d, err := Open(s)
		if err != nil {
			fmt.Fprintln(h, name, "refused")
			return
		}
		ends, targets, err := d.documents()
		ids, labels := make([]int32, d.Len()), make([]int32, d.Len())
		if err != nil || d.ReadTokens(ids, 0) != nil || d.readLabels(labels, 0) != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(h, name, len(ids), ends, targets)
		for _, list := range [][]int32{ids, labels} {
			must.Do(t, binary.Write(h, binary.LittleEndian, list))
		}
	}
	write := func(name, text string) {
		must.Do(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666))
	}
	kinds := []string{}
	for kind := range ruled {
		kinds = append(kinds, kind)
	}
	slices.Sort(kinds)
	tok := NewTokenizer(chatDir+"tokenizer.json", 0)
	for _, template := range ruledTemplates {
		write("t.jinja", template)
		for _, all := range []bool{false, true} {
			chat := NewChat(chatDir+"tokenizer.json", filepath.Join(dir, "t.jinja"), all)
			for _, kind := range kinds {
				for i, record := range ruled[kind] {
					name := fmt.Sprintf("%s-%d.jsonl", kind, i)
					write(name, record)
					encode(name, Source{Tokenizer: tok, EOS: 2, Chat: chat})
				}
			}
		}
	}
	for _, f := range Forms() {
		fmt.Fprintln(h, f.Source)
	}
	write("plain.txt", "to be or not to be\n\n that</s>")
	encode("plain.txt", Source{Tokenizer: tok, EOS: 2})
	encode("plain.txt", Source{Tokenizer: asBytes, EOS: 2})
	write("bytes.jsonl", `{"text": "to be"}`)
	encode("bytes.jsonl", Source{Tokenizer: asBytes, EOS: -1})
	if got := cacheVersion + " " + hexOf(h, 16); got != rules {
		t.Errorf("the rules that decide tokens or targets have changed: they are %q, and were %q; raise cacheVersion, "+
			"and write the new line in this test", got, rules)
	}
}

// An entry belongs to the content of files: not to their times, and not to their place.
func TestTheCacheIsKeyedByContent(t *testing.T) {
	dir := put(t, map[string]string{"a.jsonl": `{"text":"abc"}`, "tok/tokenizer_config.json": "{}"})
	path, passes := filepath.Join(dir, "a.jsonl"), 0
	tok := must.Have(os.ReadFile(chatDir + "tokenizer.json"))
	must.Do(t, os.WriteFile(filepath.Join(dir, "tok/tokenizer.json"), tok, 0o666))
	step := clockStep
	defer func() { clockStep = step }()
	s := Source{Paths: []string{path}, Tokenizer: asBytes, EOS: -1, Vocab: 2000,
		Cache: Cache{Dir: t.TempDir(), Note: func(string) { passes++ }}}
	open := func(what string, encoded bool, want string) {
		t.Helper()
		before := passes
		d := must.Have(Open(s))
		if got := fmt.Sprint(all(t, d)); encoded != (passes > before) || want != "" && got != want {
			t.Errorf("%s: tokens %s, encoded %t, want %s, %t", what, got, passes > before, want, encoded)
		}
	}
	write := func(name, text string, at time.Time) {
		t.Helper()
		must.Do(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666))
		must.Do(t, os.Chtimes(filepath.Join(dir, name), at, at))
	}
	sums := func() []string {
		list, _ := filepath.Glob(filepath.Join(s.Cache.Dir, "sum-*"))
		return list
	}
	then := time.Now().Add(-time.Hour)
	write("a.jsonl", `{"text":"abc"}`, then)
	open("new", true, "[97 98 99]")
	write("a.jsonl", `{"text":"abd"}`, then)
	open("same size and time", true, "[97 98 100]")
	write("b.jsonl", `{"text":"abc"}`, time.Now())
	s.Paths = []string{filepath.Join(dir, "b.jsonl")}
	open("moved", false, "[97 98 99]")
	write("b.json1", `{"text":"abc"}`, time.Now())
	if n := len(sums()); n != 0 {
		t.Errorf("%d digests of files that may change at the same time of change", n)
	}
	// A digest is kept under the file's time of change, which nobody can set.
	clockStep = -time.Hour
	open("settled", false, "[97 98 99]")
	list := sums()
	if len(list) != 1 {
		t.Fatalf("digests %q, want one", list)
	}
	write("b.jsonl", `{"text":"abe"}`, then)
	open("settled and replaced", true, "[97 98 101]")
	list = slices.DeleteFunc(sums(), func(p string) bool { return p == list[0] })
	must.Do(t, os.WriteFile(list[0], []byte(strings.Repeat("0", 2*sumBytes)), 0o666))
	open("by the digest that is kept", true, "[97 98 101]")
	s.Tokenizer = NewTokenizer(filepath.Join(dir, "tok/tokenizer.json"), 0)
	open("another tokenizer", true, "")
	open("the same", false, "")
	write("tok/tokenizer_config.json", `{ }`, then)
	open("another tokenizer_config.json", true, "")
}

// Every byte of a large file counts, and every size: also in a hole, and in any piece.
func TestFilesAreHashedWhole(t *testing.T) {
	path, empty := filepath.Join(t.TempDir(), "large"), filepath.Join(t.TempDir(), "empty")
	seen := map[string]string{}
	check := func(what string, paths ...string) {
		t.Helper()
		h := must.Have(hashFiles(paths))
		if other, ok := seen[hexOf(h, 32)]; ok {
			t.Errorf("%s and %s have one digest", what, other)
		}
		seen[hexOf(h, 32)] = what
	}
	must.Do(t, os.WriteFile(empty, nil, 0o666))
	f := must.Have(os.Create(path))
	defer f.Close()
	must.Do(t, f.Truncate(hashPiece+2))
	check("zeros", path)
	check("zeros and nothing", path, empty)
	for _, at := range []int64{0, hashPiece - 1, hashPiece, hashPiece + 1} {
		must.Have(f.WriteAt([]byte{1}, at))
		check(fmt.Sprint("a byte at ", at), path)
	}
	if _, err := hashRange(path, hashPiece, 3); err == nil {
		t.Error("bytes after the end of a file have a digest")
	}
}
