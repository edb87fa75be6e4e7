package data

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/cprun/cprun/internal/base/must"
)

// in holds the files of a directory.
type in = map[string]string

// sourceOf returns a source of the files that match a glob, with bytes as tokens.
func sourceOf(t testing.TB, files in, glob string, eos, vocab int) Source {
	return Source{Paths: []string{filepath.Join(put(t, files), glob)}, Tokenizer: asBytes, EOS: eos, Vocab: vocab}
}

// put writes files into a new directory.
func put(t testing.TB, files in) string {
	dir := t.TempDir()
	for name, content := range files {
		path := filepath.Join(dir, name)
		must.Do(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o700),
			os.WriteFile(path, []byte(content), 0o600)))
	}
	return dir
}

// v1 returns a uint16 token file of llm.c, and v7 one of uint32.
func v1(tokens ...uint16) string {
	b := header(magicGPT2, 1, len(tokens))
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint16(b, t)
	}
	return string(b)
}

func v7(tokens ...uint32) string {
	b := header(magicLlama3, 7, len(tokens))
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	return string(b)
}

func header(magic, version, count int) []byte {
	b := make([]byte, 0, llmcHeader)
	for _, x := range []int{magic, version, count} {
		b = binary.LittleEndian.AppendUint32(b, uint32(x))
	}
	return b[:llmcHeader]
}

// idx returns a Megatron index of int32 or uint16 tokens.
func idx(code byte, width int64, lengths ...int32) string {
	le := binary.LittleEndian
	b := append(le.AppendUint64([]byte(megatronMagic), 1), code)
	b = le.AppendUint64(le.AppendUint64(b, uint64(len(lengths))), uint64(len(lengths)+1))
	for _, n := range lengths {
		b = le.AppendUint32(b, uint32(n))
	}
	at := int64(0)
	for _, n := range lengths {
		b = le.AppendUint64(b, uint64(at))
		at += int64(n) * width
	}
	for k := range len(lengths) + 1 {
		b = le.AppendUint64(b, uint64(k))
	}
	return string(b)
}

// all reads a whole dataset, and once more in parts.
func all(t testing.TB, d *Dataset) []int32 {
	tokens := make([]int32, d.Len())
	must.Do(t, d.ReadTokens(tokens, 0))
	part := make([]int32, min(3, d.Len()))
	for at := int64(0); at+int64(len(part)) <= d.Len() && at < 100; at++ {
		must.Do(t, d.ReadTokens(part, at))
		if !slices.Equal(part, tokens[at:at+int64(len(part))]) {
			t.Fatalf("tokens from %d: %v, in one read %v", at, part, tokens[at:at+int64(len(part))])
		}
	}
	return tokens
}

func TestFormatsByteByByte(t *testing.T) {
	for _, tc := range []struct {
		name  string
		files in
		glob  string
		eos   int
		vocab int
		want  []int32
	}{
		{"v1", in{"a.bin": v1(1, 258, 65535)}, "a.bin", -1, 65536, []int32{1, 258, 65535}},
		{"v7", in{"a.bin": v7(1, 70000, 128000)}, "a.bin", -1, 128256, []int32{1, 70000, 128000}},
		{"sorted and joined, an empty one between", in{"b.bin": v1(), "c.bin": v7(4), "a.bin": v1(1, 2)},
			"*.bin", -1, 9, []int32{1, 2, 4}},
		{"text", in{"a.txt": "hé"}, "a.txt", -1, 256, []int32{'h', 0xc3, 0xa9}},
		{"text with eos, an empty file is no document", in{"a.txt": "ab", "b.txt": "", "c": "d"}, "*", 256, 257,
			[]int32{'a', 'b', 256, 'd', 256}},
		{"words that files of other kinds begin with", in{"a.txt": "PAR1", "b.txt": "%PDF-é"}, "*.txt", -1, 256,
			[]int32{'P', 'A', 'R', '1', '%', 'P', 'D', 'F', '-', 0xc3, 0xa9}},
		{"jsonl", in{"a.jsonl": `{"text":"ab","id":1}` + "\n\n" + `{"x":{"text":"no"},"text":"c\u00e9"}`},
			"*.jsonl", -1, 256, []int32{'a', 'b', 'c', 0xc3, 0xa9}},
		{"jsonl with eos", in{"a.jsonl": `{"text":"ab"}` + "\r\n" + `{"text":""}` + "\n" + `{"text":"c"}` + "\n"},
			"*.jsonl", 0, 256, []int32{'a', 'b', 0, 'c', 0}},
		{"megatron uint16", in{"a.bin": "\x01\x00\xff\xff\x02\x00", "a.idx": idx(8, 2, 2, 1)}, "a.*", -1, 65536,
			[]int32{1, 65535, 2}},
		{"megatron int32", in{"a.bin": "\x01\x00\x01\x00\x02\x00\x00\x00", "a.idx": idx(4, 4, 2)}, "a.bin", -1, 65538,
			[]int32{65537, 2}},
		{"megatron int8", in{"a.bin": "\x01\x7f", "a.idx": idx(2, 1, 0, 2)}, "a.bin", -1, 128, []int32{1, 127}},
		{"megatron int64", in{"a.bin": "\x07\x00\x00\x00\x00\x00\x00\x00", "a.idx": idx(5, 8, 1)}, "a.bin", -1, 128,
			[]int32{7}},
		{"directories within directories, without dot files",
			in{"a.txt": "a", ".b.txt": "b", "in/c.txt": "c", "in/.d/e.txt": "e"}, "**/*.txt", -1, 256, []int32{'a', 'c'}},
		{"a table by another name", in{"a.txt": "x,y"}, "*", -1, 256, []int32{'x', ',', 'y'}},
		{"a name with brackets", in{"a[1].txt": "x"}, "a[1].txt", -1, 256, []int32{'x'}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := must.Have(Open(sourceOf(t, tc.files, tc.glob, tc.eos, tc.vocab)))
			if got := all(t, d); !slices.Equal(got, tc.want) {
				t.Errorf("got %v, want %v", got, tc.want)
			}
			if _, err := d.Check(true); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestWrongSourcesAreExplained(t *testing.T) {
	check := func(name string, files in, glob string, eos, vocab int, want string) {
		t.Run(name, func(t *testing.T) {
			_, err := Open(sourceOf(t, files, glob, eos, vocab))
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("got %v, want %q", err, want)
			}
		})
	}
	check("no match", nil, "*.bin", -1, 256, "no such file, and as a glob it matches none")
	check("bad glob", nil, "[", -1, 256, "syntax error in pattern")
	check("directory", in{"a.bin": v1()}, "", -1, 256, "only directories")
	check("uint16 for a large vocabulary", in{"a.bin": v1(1)}, "*", -1, 128256, "vocab_size 128256 needs version 7")
	check("eos", in{"a.txt": "a"}, "*", 256, 256, "eos_token_id 256 is not below vocab_size 256")
	check("vocabulary", in{"a.txt": "a"}, "*", -1, 0, "a vocabulary of 0 tokens")
	for _, tc := range []struct {
		name  string
		files in
		want  string
	}{
		{"only an index", in{"a.idx": ""}, ".idx files match"},
		{"mixed", in{"a.bin": v1(1), "b.txt": "x"}, "files of different kinds: text ("},
		{"short", in{"a.bin": "abc"}, "a.bin: 3 bytes are too short for the header"},
		{"no magic", in{"a.bin": strings.Repeat("\x01\x00", 600)}, "begins with 65537"},
		{"tokenizer", in{"a.bin": string(header(20240328, 2, 3))}, "a tokenizer.bin of llm.c"},
		{"evaluation", in{"a.bin": string(header(20240522, 1, 3))}, "an evaluation file"},
		{"weights", in{"a.bin": string(header(20240326, 3, 3))}, "GPT-2 weights"},
		{"version", in{"a.bin": string(header(magicGPT2, 7, 0))}, "version 7; version 1 is known"},
		{"cut", in{"a.bin": v1(1, 2, 3)[:llmcHeader+5]},
			"1029 bytes, but the header claims 3 tokens of 2 bytes, which makes 1030"},
		{"long", in{"a.bin": v7(1, 2) + "x"}, "which makes 1032"},
		{"negative count", in{"a.bin": string(header(magicGPT2, 1, -1))}, "claims 4294967295 tokens"},
		{"jsonl without text", in{"a.jsonl": `{"text":"a"}` + "\n" + `{"Text":"a"}`}, `a.jsonl: line 2: no key "text"`},
		{"jsonl null", in{"a.jsonl": `{"text":null}`}, `is not a string`},
		{"jsonl syntax", in{"a.jsonl": "\n{"}, "line 2: not a JSON object"},
		{"jsonl array", in{"a.jsonl": `["a"]`}, "line 1: not a JSON object"},
		{"jsonl encoding", in{"a.jsonl": "{\"text\":\"\xff\"}"}, "line 1: not UTF-8"},
		{"jsonl half of a pair", in{"a.jsonl": `{"text":"a \\ud83d \ud83d\ude00"}` + "\n" + `{"text":"\uD83d b"}`},
			"line 2: not UTF-8, or an escape"},
		{"jsonl second half", in{"a.jsonl": `{"text":"\ude00"}`}, "line 1: not UTF-8, or"},
		{"npy", in{"a": "\x93NUMPY\x01\x00"},
			"this is a NumPy array, which is not read as text; write its tokens as .bin"},
		{"parquet", in{"a.txt": "PAR1\x00"}, "this is Parquet, which is not read as text; end its name in .parquet"},
		{"pickle", in{"a.PT": "?"}, "by its name, .pt, this is a pickle"},
		{"gzip", in{"a.txt": "\x1f\x8b\x08"},
			"this is compressed by gzip, which is not read as text; end its name in .gz"},
		{"zstd", in{"a.txt": "\x28\xb5\x2f\xfd"}, "end its name in .zst"},
		{"compressed twice", in{"a.txt.gz.gz": gz(gz("a"))}, "this is compressed by gzip"},
		{"compressed tokens", in{"a.bin.gz": gz(v1(1))},
			"only text and .jsonl are read compressed, not .bin; unpack it first"},
		{"compressed JSON", in{"a.json.gz": gz("{}")}, "record 1: no key"},
		{"no compressed bytes", in{"a.txt.zst": ""}, "a.txt.zst: 0 bytes"},
		{"compressed line", in{"a.jsonl.gz": gz("\n{}")}, "a.jsonl.gz: line 2: no key"},
		{"bzip2", in{"a.txt": "BZh91AY&SY\xd1\x00"}, "compressed by bzip2"},
		{"tar", in{"a": strings.Repeat("x", 257) + "ustar\x00"}, "a tar archive"},
		{"a table", in{"a.csv": "x,y"}, "by its name, .csv, this is a table"},
		{"markup", in{"a.HTML": "<p>"}, "by its name, .html, this is markup"},
		{"an image by its name", in{"a.png": "x"}, "by its name, .png, this is an image"},
		{"an image by its bytes", in{"a.txt": "\x89PNG\r\n\x1a\n"}, "this is an image"},
		{"a program", in{"a": "\x7fELF\x02"}, "this is a program"},
		{"binary", in{"a.txt": "ab\x00c"}, "byte 2 is 0"},
		{"megatron magic", in{"a.bin": "", "a.idx": "x"}, "does not begin with MMIDIDX"},
		{"megatron version", in{"a.bin": "", "a.idx": megatronMagic + "\x02" + strings.Repeat("\x00", 24)},
			"version 2; version 1"},
		{"megatron float", in{"a.bin": "", "a.idx": idx(7, 4)}, "type code 7 is not an integer type"},
		{"megatron cut index", in{"a.bin": "", "a.idx": idx(8, 2, 1)[:40]},
			"40 bytes; 1 sequences and 2 document boundaries need 62"},
		{"megatron bomb",
			in{"a.bin": "", "a.idx": megatronMagic + "\x01\x00\x00\x00\x00\x00\x00\x00\x08" + strings.Repeat("\xff", 16)},
			"claims 18446744073709551615 sequences"},
		{"megatron pointer", in{"a.bin": "\x01\x00\x00\x00\x01\x00", "a.idx": idx(8, 4, 1, 1)},
			"sequence 1 begins at byte 4 of the .bin, not at 2"},
		{"megatron size", in{"a.bin": "\x01", "a.idx": idx(8, 2, 1)}, "but the .bin has 1 bytes"},
		{"megatron more bytes", in{"a.bin": "\x01\x00\x02\x00", "a.idx": idx(8, 2, 1)},
			"1 tokens of 2 bytes make 2, but the .bin has 4 bytes"},
		{"megatron documents", in{"a.bin": "\x01", "a.idx": idx(1, 1, 1)[:54] + "\x07" + strings.Repeat("\x00", 7)},
			"document boundary 1 is sequence 7 of 1"},
		{"megatron negative", in{"a.bin": "", "a.idx": idx(8, 2, -1)}, "sequence 0 has -1 tokens"},
	} {
		check(tc.name, tc.files, "*", -1, 256, tc.want)
	}
	dir := put(t, map[string]string{"a.txt": "a", "tokenizer.json": "{}"})
	for path, want := range map[string]string{"": "there is no tokenizer",
		filepath.Join(dir, "tokenizer.json"): "tokenizer.json: model: it is missing"} {
		_, err := Open(Source{Paths: []string{filepath.Join(dir, "a.txt")}, Tokenizer: NewTokenizer(path, 0), EOS: -1,
			Vocab: 256})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("tokenizer %q: %v, want %q", path, err, want)
		}
	}
}

func TestTokensOutsideTheVocabularyAreFound(t *testing.T) {
	for name, want := range map[string]string{
		"a.bin":   "a.bin: token 2 (byte 1028): token id 300 is not below vocab_size 100",
		"b.bin":   "b.bin: token 1 (byte 1028): token id 4294967295 is not below vocab_size 100",
		"c.txt":   "c.txt: token 1 (byte 1): token id 122 is not below",
		"d.jsonl": "d.jsonl: line 3: token id 122",
		"e.bin":   "e.bin: token 0 (byte 0): token id -1 is negative",
		"f.bin":   "f.bin: token 0 (byte 0): token id -5 is negative",
		"g.bin":   "g.bin: token 1 (byte 8): token id 1099511627776 is not below vocab_size 100",
		"h.bin":   "h.bin: token 1 (byte 2): token id -2 is negative",
		"i.jsonl": "i.jsonl: line 1: token id 100 is not below vocab_size 100",
		"j.bin":   "j.bin: token 0 (byte 0): token id -1 is negative",
	} {
		t.Run(name, func(t *testing.T) {
			dir := put(t, map[string]string{
				"a.bin": v1(1, 2, 300), "b.bin": v7(1, 1<<32-1), "c.txt": "az",
				"d.jsonl": `{"text":"a"}` + "\n\n" + `{"text":"z"}`,
				"e.bin":   "\xff", "e.idx": idx(2, 1, 1), "f.bin": "\xfb" + strings.Repeat("\xff", 7),
				"f.idx": idx(5, 8, 1),
				"h.bin": "\x01\x00\xfe\xff", "h.idx": idx(3, 2, 2), "i.jsonl": `{"text":"d"}`,
				"j.bin": "\xff\xff\xff\xff", "j.idx": idx(4, 4, 1),
				"g.bin": strings.Repeat("\x00", 13) + "\x01\x00\x00", "g.idx": idx(5, 8, 2),
			})
			d, err := Open(Source{Paths: []string{filepath.Join(dir, name)}, Tokenizer: asBytes, EOS: -1, Vocab: 100})
			if err == nil { // Open has encoded and checked text already
				_, err = d.Check(true)
			}
			if err == nil || !strings.Contains(err.Error(), want) || strings.Count(err.Error(), "/"+name) > 1 {
				t.Errorf("got %v, want %q once", err, want)
			}
		})
	}
}

func TestFilesThatChangeAreErrors(t *testing.T) {
	dir := put(t, map[string]string{"a.txt": "hello"})
	open := func(name string) *Dataset {
		return must.Have(Open(Source{Paths: []string{filepath.Join(dir, name)}, Tokenizer: asBytes, EOS: -1, Vocab: 256}))
	}
	text := open("a.txt")
	must.Do(t, os.WriteFile(filepath.Join(dir, "a.txt"), []byte("he"), 0o600))
	if _, err := text.Check(true); err == nil || !strings.Contains(err.Error(), "has become shorter") {
		t.Errorf("text: %v", err)
	}
	must.Do(t, os.Remove(filepath.Join(dir, "a.txt")))
	if _, err := text.Check(true); err == nil || !strings.Contains(err.Error(), "a.txt: no such file") {
		t.Errorf("removed: %v", err)
	}
	for _, at := range []int64{-1, 1, 6} {
		if err := text.ReadTokens(make([]int32, 5), at); err == nil {
			t.Errorf("5 tokens at %d of 5 were read", at)
		}
	}
}

// FuzzBin checks that llmc and megatron read an accepted file completely, and agree with a plain decoding.
func FuzzBin(f *testing.F) {
	f.Add([]byte(v1(1, 2, 65535)), []byte(nil))
	f.Add([]byte(v7(1, 2, 1<<31)), []byte(nil))
	f.Add([]byte("\x01\x00\x02\x00"), []byte(idx(8, 2, 1, 1)))
	f.Add([]byte("\x01\x02"), []byte(idx(1, 1, 2)))
	f.Add(header(magicGPT2, 1, 1<<30), []byte(nil))
	f.Fuzz(func(t *testing.T, bin, index []byte) {
		var c codec
		if m, err := parseMegatron(bytes.NewReader(index), int64(len(index)), int64(len(bin))); err == nil {
			c = m
		} else if c, err = llmc(bytes.NewReader(bin), int64(len(bin)), 1<<16); err != nil {
			return
		}
		tf := c.(tokenFile)
		if tf.header+tf.count*tf.width != int64(len(bin)) {
			t.Fatalf("%+v of %d bytes", tf, len(bin))
		}
		tokens := make([]int32, c.tokens())
		must.Do(t, c.read(bytes.NewReader(bin), tokens, 0))
		for i, id := range tokens {
			raw := make([]byte, 8)
			copy(raw, bin[tf.header+int64(i)*tf.width:][:tf.width])
			if x := binary.LittleEndian.Uint64(raw); tf.width == 2 && !tf.signed && uint64(id) != x || id >= 0 &&
				!tf.signed && uint64(id) != x {
				t.Fatalf("token %d is %d of %x", i, id, raw)
			}
		}
	})
}

// FuzzJSONL checks that the tokens are the texts of the lines, in order.
func FuzzJSONL(f *testing.F) {
	f.Add(`{"text":"ab"}`+"\n\n"+`{"text":"c\u00e9"}`, true)
	f.Add(`{"text":""}`, false)
	f.Add(`{"text":"\ud800"}`+"\r\n"+`{"text":"a","text":"b"}`, true)
	f.Fuzz(func(t *testing.T, file string, withEOS bool) {
		eos := -1
		if withEOS {
			eos = 256
		}
		path := filepath.Join(t.TempDir(), "a.jsonl")
		must.Do(t, os.WriteFile(path, []byte(file), 0o600))
		d, err := Open(Source{Paths: []string{path}, Tokenizer: asBytes, EOS: eos, Vocab: 257})
		if err != nil || strings.Contains(file, keyIDs) {
			return
		}
		var want []int32
		for _, line := range strings.Split(file, "\n") {
			if strings.TrimSpace(line) == "" {
				continue
			}
			var v struct {
				Text string `json:"text"`
			}
			if !utf8.ValidString(line) || json.Unmarshal([]byte(strings.TrimSpace(line)), &v) != nil {
				t.Fatalf("accepted line %s", strconv.Quote(line))
			}
			for _, b := range []byte(v.Text) {
				want = append(want, int32(b))
			}
			if withEOS && v.Text != "" {
				want = append(want, 256)
			}
		}
		got := make([]int32, d.Len())
		must.Do(t, d.ReadTokens(got, 0))
		// The struct of this test takes keys of other case too; the index must not.
		if !slices.Equal(got, want) && !strings.Contains(strings.ToLower(file), "\\u") &&
			strings.Count(strings.ToLower(file), "text") == strings.Count(file, "text") {
			t.Fatalf("got %v, want %v", got, want)
		}
		for at := range min(d.Len(), 20) {
			one := make([]int32, 1)
			if err := d.ReadTokens(one, at); err != nil || one[0] != got[at] {
				t.Fatalf("token %d is %v (%v), in one read %d", at, one, err, got[at])
			}
		}
	})
}

// asBytes takes each byte as a token.
var asBytes = NewTokenizer(Bytes, 0)
