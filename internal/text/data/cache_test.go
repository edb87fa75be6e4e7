package data

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
)

// view describes what a training run reads.
func view(t *testing.T, d *Dataset, p Plan) string {
	t.Helper()
	l := must.Have(New(d, p))
	labels := make([]int32, d.Len())
	must.Do(t, d.readLabels(labels, 0))
	n, of := l.Dropped()
	documents := must.Have(d.Check(true))
	text := fmt.Sprintln(d.Files(), documents, all(t, d), labels, d.labelled(), d.Ignored(), d.Notes(), l.Targets(), n, of.Kept(4))
	for s := range l.Samples() {
		text += fmt.Sprintln(l.Docs(s), l.Valid(s))
	}
	return text
}

// A dataset read through the cache equals the encoded one, when it is written and when it is there.
func TestCachedFilesEqualEncodedOnes(t *testing.T) {
	for name, lines := range map[string][]string{
		"text":   {`{"text":"ab","label":1}`, `{"text":"cdefg"}`},
		"ids":    {`{"input_ids":[1,2,256,3]}`, `{"text":"ab"}`},
		"masked": {`{"input_ids":[1,2,3],"loss_mask":[0,1,1]}`, `{"input_ids":[4,5]}`},
		"late":   {`{"text":"abc"}`, `{"input_ids":[4,5,6],"labels":[-100,9,-100]}`, `{"input_ids":[1,256,3]}`},
	} {
		dir := put(t, map[string]string{"1.jsonl": strings.Join(lines, "\n"), "2.jsonl": `{"text":"xyz"}`, "3.jsonl": ""})
		s := Source{Paths: []string{filepath.Join(dir, "*.jsonl")}, Tokenizer: asBytes, EOS: 256, Vocab: 70000}
		for _, p := range []Plan{{SeqLen: 6, Whole: true, PackDocuments: true}, {SeqLen: 3, PackDocuments: true}} {
			if !p.Whole && (name == "masked" || name == "late") {
				continue
			}
			plain := must.Have(Open(s))
			want := view(t, plain, p)
			s.Cache = Cache{Dir: filepath.Join(t.TempDir(), "a", "b")}
			for range 2 {
				d := must.Have(Open(s))
				if got := view(t, d, p); got != want {
					t.Errorf("%s: %s, want %s", name, got, want)
				}
			}
			s.Cache = Cache{}
		}
	}
}

// Conversations are cached with their targets and warnings.
func TestCachedConversationsEqualEncodedOnes(t *testing.T) {
	dir := put(t, map[string]string{
		"t.jinja": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}" +
			"{% else %}{{ m.content }}{% endif %}{% endfor %}",
		"a.jsonl": `{"messages":[{"role":"user","content":"what"},{"role":"assistant","content":"that"}]}`,
	})
	tok := NewTokenizer(chatDir+"tokenizer.json", 0)
	s := Source{Paths: []string{filepath.Join(dir, "a.jsonl")}, Tokenizer: tok, EOS: 2, Vocab: 2000,
		Chat: NewChat(chatDir+"tokenizer.json", filepath.Join(dir, "t.jinja"), false)}
	var views []string
	for _, cache := range []string{"", t.TempDir()} {
		for range 2 {
			s.Cache.Dir = cache
			d := must.Have(Open(s))
			if len(d.Notes()) != 1 || !d.labelled() {
				t.Errorf("notes %q, labels %t", d.Notes(), d.labelled())
			}
			views = append(views, view(t, d, Plan{SeqLen: 100, Whole: true, PackDocuments: true}))
		}
	}
	if views[0] != views[2] || views[0] != views[3] {
		t.Errorf("%q", views)
	}
}

// Processes that begin together encode once. A changed file, tokenizer key or vocabulary makes another entry.
func TestFilesAreEncodedOnce(t *testing.T) {
	dir := put(t, map[string]string{"a.jsonl": `{"text":"abc"}`})
	path, notes := filepath.Join(dir, "a.jsonl"), []string(nil)
	var mu sync.Mutex
	s := Source{Paths: []string{path}, Tokenizer: asBytes, EOS: -1, Vocab: 256, Cache: Cache{Dir: t.TempDir(),
		Note: func(text string) {
			mu.Lock()
			notes = append(notes, text)
			mu.Unlock()
		}}}
	open := func(s Source, want int) {
		t.Helper()
		if _, err := Open(s); err != nil {
			t.Error(err)
		}
		if len(notes) != want {
			t.Errorf("%d passes, want %d: %q", len(notes), want, notes)
		}
	}
	known := s
	known.Cache.Known = true
	if _, err := Open(known); !errors.Is(err, ErrNotCounted) {
		t.Errorf("no entry yet: %v", err)
	}
	var together sync.WaitGroup
	for range 8 {
		together.Go(func() {
			if _, err := Open(s); err != nil {
				t.Error(err)
			}
		})
	}
	together.Wait()
	open(known, 1)
	large := s
	large.Cache.Least = 1 << 20
	large.Vocab = 999
	open(large, 1) // too small for the cache
	template := filepath.Join(t.TempDir(), "template.jinja")
	for i, change := range []func(){
		func() { s.Vocab = 300 }, func() { s.EOS = 9 }, func() { s.Format = "text" },
		func() { s.Chat = NewChat("", template, false) }, func() { s.Chat.All = true },
		func() { must.Do(t, os.WriteFile(template, []byte("{{ messages }}"), 0o666)) },
		func() { must.Do(t, os.WriteFile(path, []byte(`{"text":"abcd"}`), 0o666)) },
	} {
		change()
		open(s, i+2)
		open(s, i+2)
	}
	entries, err := os.ReadDir(s.Cache.Dir)
	if err != nil || len(entries) != 16 || slices.ContainsFunc(entries, func(e os.DirEntry) bool {
		return strings.HasPrefix(e.Name(), ".")
	}) {
		t.Errorf("%v, %v: want an entry and a lock for each of 8", entries, err)
	}
}

// An entry that is cut short is encoded again, and so is one left by a killed process.
func TestDamagedEntriesAreEncodedAgain(t *testing.T) {
	dir := put(t, map[string]string{"a.jsonl": `{"input_ids":[1,2,3],"loss_mask":[0,1,1]}`})
	s := Source{Paths: []string{filepath.Join(dir, "a.jsonl")}, Tokenizer: asBytes, EOS: -1, Vocab: 256,
		Cache: Cache{Dir: t.TempDir()}}
	d := must.Have(Open(s))
	want := all(t, d)
	entry := filepath.Dir(d.parts[0].path)
	left := filepath.Join(s.Cache.Dir, "."+filepath.Base(entry)+".tmp-0123456789abcdef")
	for _, name := range []string{"tokens.bin", "tokens.idx", "labels", "targets", "entry.json"} {
		for _, remove := range []bool{true, false} {
			path := filepath.Join(entry, name)
			if remove {
				must.Do(t, os.Remove(path))
			} else {
				must.Do(t, os.Truncate(path, 1))
			}
			must.Do(t, os.MkdirAll(left, 0o777))
			d := must.Have(Open(s))
			if got := all(t, d); !reflect.DeepEqual(got, want) || !d.labelled() {
				t.Errorf("%s: %v, want %v", name, got, want)
			}
			if _, err := os.Stat(left); err == nil {
				t.Errorf("%s is left", left)
			}
		}
	}
	s.Cache.Dir = filepath.Join(dir, "a.jsonl")
	if _, err := Open(s); err == nil || !strings.Contains(err.Error(), "data.cache") {
		t.Errorf("a file as the directory of the cache: %v", err)
	}
}
