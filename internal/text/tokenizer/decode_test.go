package tokenizer

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/cprun/cprun/internal/base/must"
)

// decoded holds the output of scripts/oracle/tokenizer_decode.py, by kind.
type decoded struct {
	Decoder json.RawMessage
	Cases   []struct {
		IDs  []int32
		Text string
	}
}

func decoders(t testing.TB) map[string]decoded {
	t.Helper()
	raw := must.Have(os.ReadFile("testdata/decoders.json"))
	var all map[string]decoded
	must.Do(t, json.Unmarshal(raw, &all))
	return all
}

// decoding returns a tokenizer with that decoder.
func decoding(t testing.TB, raw, decoder json.RawMessage) *Tokenizer {
	t.Helper()
	var f map[string]json.RawMessage
	must.Do(t, json.Unmarshal(raw, &f))
	f["decoder"] = decoder
	whole := must.Have(json.Marshal(f))
	return parse(t, whole)
}

// decode returns the text of ids, and the text that each of them added.
func decode(t testing.TB, d *Decoder, ids []int32) (text string, parts []string) {
	t.Helper()
	var out []byte
	for _, id := range ids {
		n := len(out)
		out = d.Append(out, id)
		parts = append(parts, string(out[n:]))
	}
	return string(d.Flush(out)), parts
}

func TestTextsAreThoseOfTheLibrary(t *testing.T) {
	all := oracles(t)
	for kind, o := range decoders(t) {
		t.Run(kind, func(t *testing.T) {
			tok := decoding(t, all[kind].Tokenizer, o.Decoder)
			for _, c := range o.Cases {
				d := must.Have(tok.NewDecoder())
				text, parts := decode(t, d, c.IDs)
				if text != c.Text {
					t.Errorf("%v: %q, the library has %q", c.IDs, text, c.Text)
				}
				for _, p := range parts {
					if !utf8.ValidString(p) {
						t.Errorf("%v: %q is not whole characters", c.IDs, p)
					}
				}
			}
		})
	}
}

func TestCharactersComeWhole(t *testing.T) {
	d := NewByteDecoder()
	var ids []int32
	for _, b := range []byte("aé€😀\xffb\xe2\x82c\xf0\x9f") {
		ids = append(ids, int32(b))
	}
	text, parts := decode(t, d, append(ids, 256, -1))
	if want := "aé€😀\ufffdb\ufffdc\ufffd"; text != want {
		t.Errorf("%q, want %q", text, want)
	}
	if got := strings.Join(parts[:10], "|"); got != "a||é|||€||||😀" {
		t.Errorf("piece by piece it is %q", got)
	}
	if got, _ := decode(t, d, []int32{'x'}); got != "x" {
		t.Errorf("after the end of a text the next is %q", got)
	}
}

func TestDecodersThatAreNotKnownAreRefusedByName(t *testing.T) {
	for _, tc := range []struct{ decoder, want string }{
		{`{"type":"CTC"}`, `the type "CTC" is not known`},
		{`{"type":"Sequence","decoders":[{"type":"Fuse"},{"type":"ByteFallback"}]}`, "ByteFallback behind Fuse"},
		{`{"type":"Sequence","decoders":[{"type":"Fuse"},{"type":"Strip","content":" ","stop":1}]}`,
			"Strip behind Fuse"},
		{`{"type":"Strip","content":"ab"}`, "want one character"},
		{`{"type":"Strip","content":" ","start":99999}`, "want one character"},
		{`{"type":"Replace","pattern":{"String":"a"}}`, "no content"},
		{`{"type":"BPEDecoder","suffix":""}`, "empty suffix"},
		{strings.Repeat(`{"type":"Sequence","decoders":[`, 20) + strings.Repeat(`]}`, 20), "more than 8 deep"},
	} {
		_, err := parse(t, []byte(with(`,"decoder":`+tc.decoder))).NewDecoder()
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", tc.decoder, err, tc.want)
		}
	}
}

// For any file and ids, Append does not panic and returns whole characters.
func FuzzDecode(f *testing.F) {
	for _, o := range decoders(f) {
		f.Add([]byte(o.Decoder), []byte("\x00\x01\x02\x03\x04\x05"))
	}
	vocab := map[string]int{"a": 0, "b": 1, "ab": 2, "▁a": 3, "<0xE2>": 4, "<0x82>": 5, "<0xAC>": 6, "b</w>": 7,
		"##a": 8, "Ġ": 9, "â": 10, "": 11, "<0xZZ>": 12}
	model := must.Have(json.Marshal(vocab))
	f.Fuzz(func(t *testing.T, decoder, ids []byte) {
		if !json.Valid(decoder) {
			return
		}
		tok, err := Parse([]byte(`{"model":{"type":"WordPiece","vocab":` + string(model) + `},"decoder":` +
			string(decoder) + `}`))
		if err != nil {
			return
		}
		d, err := tok.NewDecoder()
		if err != nil || len(ids) > 200 {
			return
		}
		var all []int32
		for _, id := range ids {
			all = append(all, int32(id))
		}
		text, parts := decode(t, d, all)
		for _, p := range append(parts, text) {
			if !utf8.ValidString(p) {
				t.Fatalf("%q", p)
			}
		}
	})
}
