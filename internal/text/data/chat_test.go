package data

import (
	"bufio"
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
)

const chatDir = "testdata/chat/"

// documents encodes a file of records by the tokenizer of testdata/chat.
func documents(t testing.TB, path, template string, all bool) (docs []Document, notes []string, err error) {
	var keys Keys
	e := Encoding{Tokenizer: NewTokenizer(chatDir+"tokenizer.json", 0), EOS: 2, Notes: &keys,
		Chat: NewChat(chatDir+"tokenizer.json", template, all)}
	err = e.Each(t.Context(), []string{path}, func(_ int, d Document) error {
		docs = append(docs, d)
		return nil
	})
	return docs, keys.Sorted(), err
}

func expected(t testing.TB, name string) (docs []Document) {
	raw := must.Have(os.ReadFile(chatDir + name + ".expect.jsonl"))
	for lines := bufio.NewScanner(bytes.NewReader(raw)); lines.Scan(); {
		var d Document
		must.Do(t, json.Unmarshal(lines.Bytes(), &d))
		docs = append(docs, d)
	}
	return docs
}

// TRL's SFTTrainer made the ids and labels (scripts/oracle/chat.py). Without {% generation %}, a template that renders
// each turn alike gives the same targets.
func TestConversationsEqualTRL(t *testing.T) {
	const plain = "../chat/testdata/plain.jinja"
	for name, kinds := range map[string][]string{
		"messages": {"jsonl", "parquet", plain}, "tools": {"jsonl", "parquet", "arrow", plain}, "prompts": {"jsonl", "parquet"},
		"texts": {"jsonl", "parquet"}, "share": {"jsonl", "parquet"}, "all": {"jsonl"}, "shapes": {"parquet", "arrow"},
	} {
		want := expected(t, name)
		for _, kind := range kinds {
			path, template := chatDir+name+"."+kind, ""
			if kind == plain {
				path, template = chatDir+name+".jsonl", plain
			}
			got, notes, err := documents(t, path, template, name == "all")
			if err != nil || len(notes) > 0 || len(got) != len(want) {
				t.Fatalf("%s: %d documents, %q, %v, want %d", path, len(got), notes, err, len(want))
			}
			for i, d := range got {
				if !slices.Equal(d.IDs, want[i].IDs) || !slices.Equal(d.Labels, want[i].Labels) {
					t.Errorf("%s, %s, record %d:\n%v\n%v, want\n%v\n%v", path, kind, i+1, d.IDs, d.Labels, want[i].IDs,
						want[i].Labels)
				}
			}
		}
	}
}

const turn = `{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}`

func TestWrongConversationsAreExplained(t *testing.T) {
	two := strings.Replace(turn, `"b"}]`, `"b"},{"role":"user","content":"c"},{"role":"assistant","content":"d"}]`, 1)
	for _, tc := range []struct{ template, record, want string }{
		{"{{ messages | length }}", turn, "turn 2: the messages up to it do not render as the start of the whole"},
		{"{% for m in messages %}{{ m.content }}{% if loop.last %}!{% endif %}{% endfor %}", two, "turn 2: "},
		{"{{ nosuch.x }}", turn, "is not defined"},
		{"{% if x %}", turn, "t.jinja: line 1: endif is missing"},
		{"x", `{"messages":[]}`, `"messages" is not a list of messages, or is empty`},
		{"x", `{"messages":"a"}`, "not a list of messages"},
		{"x", `{"messages":[{"content":"a"}]}`, "messages[0] has no role"},
		{"x", `{"messages":[1]}`, "messages[0] is not a map"},
		{"x", `{"messages":[{"role":"user"}],"text":"a"}`, `both "text" and "messages"; leave one out`},
		{"x", `{"prompt":"a","completion":[]}`, "both texts or both lists"},
		{"x", `{"prompt":"a"}`, `or "prompt" with "completion"`},
		{"x", `{"messages":[{"role":"user"}],"tools":"[1"}`, `"tools": the JSON is cut short`},
		{"x", `{"messages":[{"role":"user"}],"chat_template_kwargs":[]}`, `"chat_template_kwargs": want a list, or`},
		{"x", `{"messages":[{"role":"user"}],"my_mask":[1]}`, `key "my_mask" is not read`},
		{"x", `{"messages":[{"role":"user"}],"chosen":[1]}`, "preference pairs"},
	} {
		before := turn
		if tc.template != "x" {
			before = ""
		}
		_, _, err := encodeUnder(t, tc.template, before+"\n"+tc.record, tc.template == "x")
		if err == nil || !strings.Contains(err.Error(), "a.jsonl: line 2: ") || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s, %s: %v, want %s", tc.template, tc.record, err, tc.want)
		}
	}
}

func TestATemplateWithoutAnEndOfTurnWarns(t *testing.T) {
	docs, notes, err := encodeUnder(t, "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"+
		"{{ eos_token }}{% endfor %}", turn, false)
	if err != nil || len(docs) != 1 || len(notes) != 1 || !strings.Contains(notes[0], "where its turn ends") {
		t.Errorf("%v, %q, %v", docs, notes, err)
	}
}

// The first special token after the content ends a turn; without the content, the last one with only space after it.
func TestEndsOfTurns(t *testing.T) {
	const long = "bcdefghijklmnop"
	for _, c := range [][3]string{
		{long, "{{ m.content }}<|im_end|>\n<s>", long + "<|im_end|>"},
		{" end", "{{ m.content }}<|im_end|>\n<s>", " end<|im_end|>"}, // the content is also in the token
		{long, "{{ m.content[:3] }}<s><|im_end|> \n", "bcd<s><|im_end|>"},
		{long, "<|im_start|>{{ m.content }}x<|im_end|>y", "<|im_start|>" + long + "x<|im_end|>"},
		{long, "{{ m.content }} the end", long + " the end"},
		{long, "<s>{{ m.content[:3] }}.", "<s>bcd."},
	} {
		record := `{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"` + c[0] + `"}]}`
		got, _, err := targetText(t, "{% for m in messages %}{{ '[' }}{%- if m.role == 'assistant' %}"+c[1]+
			"{% else %}{{ m.content }}]{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '[' }}{% endif %}", record, false)
		if err != nil || got != c[2] {
			t.Errorf("%q: %q, %v, want %q", c, got, err, c[2])
		}
	}
}

// Nulls of .jsonl stay; those that Parquet and Arrow add are left out. Other variables reach the template. A system
// prompt beside the messages is their first; the functions of ShareGPT are tools; text may be JSON.
func TestVariablesOfTemplates(t *testing.T) {
	const (
		talk  = `"conversations":[{"from":"human","value":"q"},{"from":"function_call","value":"{\"name\": \"f\"}"}]`
		turns = `{"role": "user", "content": "q"}, {"role": "assistant", "content": "{\"name\": \"f\"}"}]`
		none  = "nullFalse" // no tools, no b
	)
	for record, want := range map[string]string{
		`{"messages":[{"role":"user","content":null,"reasoning":"r"}],"tools":"[{\"b\":null,\"a\":1}]",` +
			`"chat_template_kwargs":{"a":2}}`: `[{"role": "user", "content": null, "reasoning": "r", "reasoning_content": "r", ` +
			`"thinking": "r"}][{"b": null, "a": 1}]2False`,
		`{"conversations":[{"from":"gpt","value":"x"},{"from":"other","value":"y"}],"tools":null}`: `[{"role": "assistant", ` +
			`"content": "x"}, {"role": "other", "content": "y"}]` + none,
		`{"system":"s",` + talk + `}`:                             `[{"role": "system", "content": "s"}, ` + turns + none,
		`{"system":"",` + talk + `}`:                              "[" + turns + none,
		`{"system":null,"functions":"",` + talk + `}`:             "[" + turns + none,
		`{"functions":[{"name":"f"}],` + talk + `}`:               "[" + turns + `[{"name": "f"}]False`,
		`{"functions":"[{\"n\":NaN1}]",` + talk + `}`:             "", // refused
		`{"tools":"[{\"n\":18446744073709551616}]",` + talk + `}`: "[" + turns + `[{"n": 18446744073709551616}]False`,
		`{"system":"s","conversations":[{"from":"system","value":"s"},{"from":"observation","value":"o"}]}`: `[{"role": ` +
			`"system", "content": "s"}, {"role": "tool", "content": "o"}]` + none,
	} {
		docs, _, err := encodeUnder(t, "{{ messages | tojson }}{{ tools | tojson }}{{ a }}{{ b is defined }}", record, true)
		if want == "" || err != nil {
			if want != "" || err == nil {
				t.Errorf("%s: %v, want %s", record, err, want)
			}
		} else if got := decodeIDs(t, docs[0].IDs); got != want {
			t.Errorf("%s:\n%s, want\n%s", record, got, want)
		}
	}
}

func decodeIDs(t testing.TB, ids []int32) string {
	d := must.Have(NewTokenizer(chatDir+"tokenizer.json", 0).NewDecoder())
	var b []byte
	for _, id := range ids {
		b = d.Append(b, id)
	}
	return string(d.Flush(b))
}

// A template named tool_use renders conversations with tools, as in transformers.
func TestTemplatesByName(t *testing.T) {
	raw := must.Have(os.ReadFile(chatDir + "tokenizer.json"))
	dir := put(t, map[string]string{"tokenizer.json": string(raw), "tokenizer_config.json": `{"eos_token": {"content": "E"},` +
		`"chat_template": [{"name": "default", "template": "plain{{ eos_token }}"}, {"name": "tool_use", "template": "tools"}]}`,
		"a.jsonl": turn + "\n" + strings.Replace(turn, "{", `{"tools":[],`, 1)})
	for want := range strings.FieldsSeq("plainE,tools file,tools") {
		e := Encoding{Tokenizer: NewTokenizer(filepath.Join(dir, "tokenizer.json"), 0), EOS: -1,
			Chat: NewChat(filepath.Join(dir, "tokenizer.json"), "", true)}
		var got []string
		err := e.Each(t.Context(), []string{filepath.Join(dir, "a.jsonl")}, func(_ int, d Document) error {
			got = append(got, decodeIDs(t, d.IDs))
			return nil
		})
		if err != nil || strings.Join(got, ",") != want {
			t.Errorf("%q, %v, want %s", got, err, want)
		}
		must.Do(t, os.WriteFile(filepath.Join(dir, "chat_template.jinja"), []byte("file"), 0o666))
	}
}

func TestPromptsOfChats(t *testing.T) {
	tok, chat := NewTokenizer(chatDir+"tokenizer.json", 0), NewChat(chatDir+"tokenizer.json", "", false)
	for text, want := range map[string]string{
		"hi \"you\"":                          "<|im_start|>user\nhi \"you\"<|im_end|>\n<|im_start|>assistant\n",
		"[INST] hi":                           "<|im_start|>user\n[INST] hi<|im_end|>\n<|im_start|>assistant\n",
		"{":                                   "<|im_start|>user\n{<|im_end|>\n<|im_start|>assistant\n",
		` [ {"role":"system","content":"s"}]`: "<|im_start|>system\ns<|im_end|>\n<|im_start|>assistant\n",
		`{"conversations":[{"from":"human","value":"a"}]}` + "\n": "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n",
	} {
		ids, end, err := chat.Prompt(tok, text)
		wanted, _ := tok.Encode(want)
		if err != nil || end != 2 || !slices.Equal(ids, wanted[1:]) { // Encode adds <s>
			t.Errorf("%s: %v, end %d, %v, want %v", text, ids, end, err, wanted[1:])
		}
	}
	for text, want := range map[string]string{`{"text":"a"}`: `no key "messages"`, `[{"role":"user"}, 1]`: "is not a map",
		`{"`: "not a JSON object", "[{": "messages"} {
		if _, _, err := chat.Prompt(tok, text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
	if _, _, err := NewChat(Bytes, "", false).Prompt(NewTokenizer(Bytes, 0), "a"); err == nil ||
		!strings.Contains(err.Error(), "need the tokenizer of a model") {
		t.Error(err)
	}
	dir := put(t, map[string]string{"t.jinja": "{{ messages[-1].content }}"})
	if _, end, err := NewChat(chatDir+"tokenizer.json", filepath.Join(dir, "t.jinja"), false).Prompt(tok, "a"); err != nil ||
		end != -1 {
		t.Error("a template without an end of turn", end, err)
	}
}
