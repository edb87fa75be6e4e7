package data

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/base/terminal"
)

// keyList returns the keys in docs/formats.md: read and ignored keys with their meaning, then refused keys.
func keyList() string {
	named := func(list, quote string) string {
		return quote + strings.Join(strings.Fields(list), quote+", "+quote) + quote
	}
	var kinds []string
	taken, refused := map[string]string{}, map[string]string{}
	for _, r := range keyRules {
		kind := strings.Replace(named(r.kinds, ""), named(allKinds, ""), "any record", 1)
		if !slices.Contains(kinds, kind) {
			kinds = append(kinds, kind)
		}
		if r.use == useRefused {
			refused[kind] += " " + r.keys
		} else {
			taken[kind] += "- " + named(r.keys, "`") + ": " + r.note + "\n"
		}
	}
	out, end := "", "*Refused:*\n\n"
	for _, kind := range kinds {
		if taken[kind] != "" {
			out += "*Of " + kind + ":*\n\n" + taken[kind] + "\n"
		}
		if refused[kind] != "" {
			end += "- of " + kind + ": " + named(refused[kind], "`") + "\n"
		}
	}
	return terminal.Wrap(out+end, 120, 2)
}

func TestTheDocsHaveTheKeys(t *testing.T) {
	page, err := os.ReadFile("../../../docs/formats.md")
	if err != nil || !strings.Contains(string(page), keyList()) {
		t.Errorf("docs/formats.md (%v) needs this list:\n%s", err, keyList())
	}
}

// An unknown key is ignored in each kind; a key has one effect in a kind.
func TestRulesOfKeys(t *testing.T) {
	for _, tc := range []struct {
		key, kind string
		want      use
	}{
		{"labels", FormatTokens, useRead}, {"labels", FormatText, useIgnored}, {"labels", kindTurn, useRefused},
		{"soft_labels", FormatText, useRefused}, {"loss", kindTurn, useRead}, {"loss", FormatText, useRead},
		{"loss_scale", kindTurn, useRefused}, {"special_tokens_mask", FormatTokens, useIgnored},
		{"images", "", useRefused}, {"images", kindTurn, useRefused}, {"system", FormatText, useIgnored},
		{"system", FormatCompletion, useRefused}, {"name", FormatMessages, useIgnored}, {"name", kindTurn, useRead},
		{"id", FormatMessages, useIgnored}, {"chosen", "", useRefused}, {"labels", "", useIgnored},
		{"cu_seq_lens_q", FormatTokens, useRefused}, {"target_x", "", useRefused},
	} {
		if got := ruleOf(tc.key, tc.kind).use; got != tc.want {
			t.Errorf("%s of %q: %s, want %s", tc.key, tc.kind, got, tc.want)
		}
	}
}

func TestRecordsByTheirKeys(t *testing.T) {
	for _, tc := range []struct{ record, want string }{ // the names of ignored keys, or a part of the error
		{`{"text":"a","url":"x","title":1}`, "title url"},
		{`{"text":"a","weight":1,"train":true}`, ""},
		{`{"text":"a","weight":0}`, `key "weight" of a record must be 1 or true`},
		{`{"text":"a","loss":2.5}`, `key "loss" of a record must be 1 or true`},
		{`{"text":"a","images":[],"audio":null,"videos":""}`, ""},
		{`{"text":"a","images":["x.png"]}`, `key "images" is not read: only text is trained`},
		{`{"input_ids":[1],"token_weights":[1]}`, `key "token_weights" is not read`},
		{`{"input_ids":[1],"mask":[1]}`, `key "mask" is not read`},
		{`{"input_ids":[1],"pixel_values":[1]}`, `key "pixel_values" is not read`},
		{`{"text":"a","seq_lengths":[1]}`, `"seq_lengths" without "input_ids"`},
		{`{"text":"a","tools":[],"system":"s"}`, "system tools"},
		{`{"messages":[{"role":"user","content":"a"}],"prompt":"a","id":7}`, "id prompt"},
		{`{"prompt":"a","completion":"b","system":"s"}`, "first turn of the prompt"},
		{`{"messages":[{"role":"user","content":"a"}],"system_prompt":"s"}`, "name it system"},
		{`{"messages":[{"role":"user","content":"a","training":false}]}`, "weight, loss, train, trainable"},
		{`{"messages":[{"role":"user","content":"a","token_weight":1}]}`, "weight, loss, train, trainable"},
		{`{"prompt":"a","completion":"b","tools":[{}]}`, `"tools" reaches no template`},
		{`{"prompt":[{"role":"user","content":"a"}],"completion":[{"role":"assistant"}],"functions":[{}]}`, "name it tools"},
		{"{\"text\":\"a\",\"a\x1bb\":1}", "invalid character"},
		{`{"text":"a","a\u001b[2Jb":1}`, `"a\x1b[2Jb"`},
		{`{"text":"a","` + strings.Repeat("k", 99) + `":1}`, strings.Repeat("k", 40) + "…"},
		{"\ufeff" + `{"text":"a","score":NaN,"x":[-Infinity,{"y":Infinity}],"z":1e999}`, "score x z"},
		{`{"text":"NaN \" Infinity","a":NaN}`, "a"},
		{`{"input_ids":[NaN]}`, `"input_ids" is not a list of integers`},
		{`{"text":NaN}`, `"text" is not a string`},
		{`{"text":"a","n":123456789012345678901234567890}`, "n"},
	} {
		var ignored Keys
		_, err := parseRecord([]byte(tc.record), "", 300, &ignored)
		got := strings.Join(ignored.Sorted(), " ")
		if err != nil {
			got = err.Error()
		}
		if err == nil && got != tc.want || err != nil && (tc.want == "" || !strings.Contains(got, tc.want)) {
			t.Errorf("%s: %s, want %s", tc.record, got, tc.want)
		}
	}
}

// The line about ignored keys stays short.
func TestIgnoredKeysAreBounded(t *testing.T) {
	var ignored Keys
	for i := range 500 {
		must.Have(parseRecord(fmt.Appendf(nil, `{"text":"a","k%d":1}`, i), "", 0, &ignored))
	}
	if keys := ignored.Sorted(); len(keys) != maxKeys+1 || !slices.Contains(keys, "and others") {
		t.Errorf("%d keys", len(keys))
	}
}

func TestBordersOfOtherPackers(t *testing.T) {
	const ids = `{"input_ids":[1,2,3,4,5,6],`
	for _, tc := range []struct{ keys, want string }{ // the documents, or a part of the error
		{`"seq_lengths":[2,4]`, "[1 2] [3 4 5 6]"},
		{`"seq_lengths":[2,0,4,0]`, "[1 2] [3 4 5 6]"},
		{`"cu_seqlens":[0,2,3,6]`, "[1 2] [3] [4 5 6]"},
		{`"cu_seqlens":[0,2,6,6]`, "[1 2] [3 4 5 6]"},
		{`"document_ids":[7,7,3,3,3,9]`, "[1 2] [3 4 5] [6]"},
		{`"segment_ids":[0,0,1,1,2,2]`, "[1 2] [3 4] [5 6]"},
		{`"position_ids":[0,1,0,1,2,0]`, "[1 2] [3 4 5] [6]"},
		{`"position_ids":[0,1,2,3,4,5]`, "[1 2 3 4 5 6]"},
		{`"position_ids":[0,1,0,1,2,3],"seq_lengths":[2,4],"cu_seqlens":[0,2,6],"segment_ids":[1,1,2,2,2,2]`,
			"[1 2] [3 4 5 6]"},
		{`"seq_lengths":[2,2],"attention_mask":[1,1,1,1,0,0]`, "[1 2] [3 4]"},
		{`"seq_lengths":[2,2,2],"attention_mask":[1,1,1,1,0,0]`, "[1 2] [3 4]"},
		{`"seq_lengths":[2,4],"attention_mask":[1,1,1,1,0,0]`, "[1 2] [3 4]"},
		{`"segment_ids":[1,1,2,2,0,0],"attention_mask":[1,1,1,1,0,0]`, "[1 2] [3 4]"},
		{`"position_ids":[0,1,0,1,1,1],"attention_mask":[1,1,1,1,0,0]`, "[1 2] [3 4]"},
		{`"seq_lengths":[2,4],"labels":[1,-100,3,4,-100,6]`, "[1 2]/[1 -100] [3 4 5 6]/[3 4 -100 6]"},
		{`"seq_lengths":[2,4],"loss_mask":[1,1,1,0,0,1]`, "[1 2]/[1 2] [3 4 5 6]/[3 -100 -100 6]"},
		{`"seq_lengths":[2,3]`, "seq_lengths describes 5 of 6 tokens"},
		{`"seq_lengths":[]`, "seq_lengths describes 0 of 6 tokens"},
		{`"seq_lengths":[2,5]`, "seq_lengths[1] is 5, and 4 tokens are left"},
		{`"seq_lengths":[7,-1]`, "seq_lengths[0] is 7"},
		{`"seq_lengths":[-1,7]`, "seq_lengths[0] is -1"},
		{`"seq_lengths":[9223372036854775807,1]`, "seq_lengths[0] is 9223372036854775807"},
		{`"seq_lengths":[1.5]`, `"seq_lengths" is not a list of integers`},
		{`"seq_lengths":[2,2,1],"attention_mask":[1,1,1,1,0,0]`, "seq_lengths describes 5 of 6 tokens"},
		{`"cu_seqlens":[2,6]`, "cu_seqlens[0] is 2; they rise from 0"},
		{`"cu_seqlens":[0,4,2,6]`, "cu_seqlens[2] is 2"},
		{`"cu_seqlens":[0,4]`, "cu_seqlens describes 4 of 6 tokens"},
		{`"cu_seqlens":[0,4,8]`, "cu_seqlens[2] is 8"},
		{`"document_ids":[1,1,2]`, "3 document_ids for 6 input_ids"},
		{`"document_ids":[1,1,2,2,1,1]`, "document_ids[4] is 1 again"},
		{`"segment_ids":[1,1,2,2,0,0]`, "segment_ids ends with 0, as padding does"},
		{`"position_ids":[1,2,3,4,5,6]`, "position_ids[0] is 1"},
		{`"position_ids":[0,1,0,2,3,4]`, "position_ids[3] is 2"},
		{`"position_ids":[0,1,2,3,4,5],"seq_lengths":[2,4]`, "seq_lengths and position_ids place documents differently"},
		{`"cu_seqlens":[0,3,6],"seq_lengths":[2,4]`, "seq_lengths and cu_seqlens place documents differently"},
	} {
		r, err := parseRecord([]byte(ids+tc.keys+"}"), "", 300, nil)
		var docs []string
		if err == nil {
			for _, d := range r.documents() {
				if docs = append(docs, fmt.Sprint(d.IDs)); d.Labels != nil {
					docs[len(docs)-1] += "/" + fmt.Sprint(d.Labels)
				}
			}
		}
		if got := strings.Join(docs, " "); err == nil && got != tc.want || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %s, %v, want %s", tc.keys, got, err, tc.want)
		}
	}
}

// Records with borders are packed whole, by any of the first records if only positions show them.
func TestKindsOfRecordsWithBorders(t *testing.T) {
	one := `{"input_ids":[1,2],"position_ids":[0,1]}` + "\n"
	for lines, want := range map[string]string{
		`{"input_ids":[1,2],"seq_lengths":[2]}`:                 Packed,
		`{"input_ids":[1,2],"labels":[1,2],"cu_seqlens":[0,2]}`: Packed,
		`{"input_ids":[1,2],"document_ids":[3,3]}`:              Packed,
		`{"input_ids":[1,2],"position_ids":[0,0]}`:              Packed,
		one + one + `{"input_ids":[1,2],"position_ids":[0,0]}`:  Packed,
		one + one: FormatTokens,
		one + `{"input_ids":[1,2]}` + "\n" + `{"input_ids":[1,2],"position_ids":[0,0]}`: FormatTokens,
		`{"input_ids":[1,2],"labels":[1,2]}`:                                            masked,
	} {
		dir := put(t, map[string]string{"a.jsonl": lines})
		if kind, err := Kind(dir+"/a.jsonl", ""); err != nil || kind != want {
			t.Errorf("%s: %s, %v, want %s", lines, kind, err, want)
		}
	}
	if !Conversation(Packed) || !PackedByDefault(Packed) || PackedByDefault(masked) || !PackedByDefault(FormatMessages) ||
		PackedByDefault(FormatText) {
		t.Error("defaults of packing")
	}
}
