package data

import (
	"path/filepath"
	"strings"
	"testing"
)

// encodeUnder encodes a record under a template.
func encodeUnder(t testing.TB, template, record string, all bool) (docs []Document, notes []string, err error) {
	t.Helper()
	dir := put(t, map[string]string{"a.jsonl": record, "t.jinja": template})
	return documents(t, filepath.Join(dir, "a.jsonl"), filepath.Join(dir, "t.jinja"), all)
}

// targetText returns the text of the targets of a record, with | between parts, and the notes.
func targetText(t testing.TB, template, record string, all bool) (text string, notes []string, err error) {
	t.Helper()
	docs, notes, err := encodeUnder(t, template, record, all)
	if err != nil || len(docs) != 1 {
		return "", notes, err
	}
	var parts []string
	inside := false
	for _, label := range docs[0].Labels {
		if label != Ignore && !inside {
			parts = append(parts, "")
		}
		if inside = label != Ignore; inside {
			special := map[int32]string{0: "<s>", 1: "<|im_start|>", 2: "<|im_end|>"}[label] // the decoder leaves them out
			parts[len(parts)-1] += special + decodeIDs(t, []int32{label})
		}
	}
	return strings.Join(parts, "|"), notes, nil
}

const (
	// plainTurns has no generation blocks.
	plainTurns = "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}" +
		"{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
	// endTurns ends each conversation, so prefixes render differently.
	endTurns    = plainTurns + "{% if not add_generation_prompt %}<|im_end|>{% endif %}"
	markedTurns = "{% for m in messages %}<|im_start|>{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}" +
		"{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}" +
		"{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
	// lateTurns counts the messages, so prefixes render differently; a macro has its block.
	lateTurns = "{{ messages | length }}{% macro say(m) %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}" +
		"{% endmacro %}{% for m in messages[1:] %}{% if m.role == 'assistant' %}{{ say(m) }}{% for c in m.calls %}" +
		"{{ c.x }}{% endfor %}{% endif %}{% endfor %}"
	indexTurns = "{% for i in range(messages | length) %}{% if messages[i].role == 'assistant' %}{% generation %}" +
		"{{ messages[i].content }}<|im_end|>{% endgeneration %}{% endif %}{% endfor %}"
)

// four returns a record of two questions and answers, with these keys of each message.
func four(flags ...string) string {
	record := `{"messages":[{"role":"user","content":"u1"#},{"role":"assistant","content":"a1"#},` +
		`{"role":"user","content":"u2"#},{"role":"assistant","content":"a2"#}]}`
	for _, flag := range flags {
		if flag != "" {
			flag = "," + flag
		}
		record = strings.Replace(record, "#", flag, 1)
	}
	return strings.ReplaceAll(record, "#", "")
}

func TestFlagsOfTurns(t *testing.T) {
	const both = "a1<|im_end|>|a2<|im_end|>"
	for _, tc := range []struct {
		template, record string
		all              bool
		want             string
	}{
		{plainTurns, four(), false, both},
		{plainTurns, four("", `"loss":false`), false, "a2<|im_end|>"},
		{plainTurns, four("", `"weight":0`, "", `"weight":1`), false, "a2<|im_end|>"},
		{plainTurns, four("", `"train":true`, "", `"trainable":false`), false, "a1<|im_end|>"},
		{plainTurns, four(`"weight":0`, `"weight":1.0`, `"weight":0.0`, `"weight":null`), false, both},
		{plainTurns, four("", `"loss":false`, "", `"train":0`), false, ""},
		{markedTurns, four("", `"loss":false`), false, "a2<|im_end|>"},
		{markedTurns, four("", `"loss":true`, "", `"weight":0`), false, "a1<|im_end|>"},
		{markedTurns, four("", `"loss":false`, "", `"train":0`), false, ""},
		{endTurns, four("", `"weight":0`), false, "a2<|im_end|>"},
		{endTurns, four("", "", "", `"weight":0`), false, "a1<|im_end|>"},
		{lateTurns, four("", `"calls":[{"x":""}]`, "", `"weight":0`), false, "a1<|im_end|>"},
		{lateTurns, four("", `"weight":0`), false, "a2<|im_end|>"},
		{plainTurns, four(`"weight":0`, `"weight":0`), true, "<|im_start|>user:u2<|im_end|><|im_start|>assistant:a2<|im_end|>"},
		{markedTurns, four("", "", `"weight":0`), true, "<|im_start|>user:u1<|im_end|><|im_start|>assistant:a1<|im_end|>|" +
			"<|im_start|>assistant:a2<|im_end|>"},
		{plainTurns, four(`"weight":1`, "", "", `"weight":0`), true,
			"<|im_start|>user:u1<|im_end|><|im_start|>assistant:a1<|im_end|><|im_start|>user:u2<|im_end|>"},
		{plainTurns, `{"prompt":[{"role":"user","content":"u1","weight":0}],"completion":[` +
			`{"role":"assistant","content":"a1","weight":0},{"role":"user","content":"u2","weight":1},` +
			`{"role":"assistant","content":"a2"}]}`, false,
			"<|im_start|>user:u2<|im_end|><|im_start|>assistant:a2<|im_end|>"},
		{plainTurns, `{"system":"s","conversations":[{"from":"human","value":"u1","weight":0},` +
			`{"from":"gpt","value":"a1","weight":0},{"from":"human","value":"u2"},{"from":"function_call","value":"a2"},` +
			`{"from":"observation","value":"o"}]}`, false, "a2<|im_end|>"},
		{plainTurns, `{"system":"s","conversations":[{"from":"system","value":"s"},{"from":"gpt","value":"a1","weight":0},` +
			`{"from":"gpt","value":"a2"}]}`, false, "a2<|im_end|>"},
	} {
		got, _, err := targetText(t, tc.template, tc.record, tc.all)
		if err != nil || got != tc.want {
			t.Errorf("%s, all %t: %q, %v, want %q", tc.record, tc.all, got, err, tc.want)
		}
	}
}

func TestWrongFlagsAreExplained(t *testing.T) {
	for _, tc := range []struct {
		template, record string
		all              bool
		want             string
	}{
		{plainTurns, four("", `"weight":0.5`), false, "messages[1]: weight is 0.5; want 0 or 1"},
		{plainTurns, four("", `"weight":2`), false, "weight is 2"},
		{plainTurns, four("", `"loss":"true"`), false, "loss is true; want"},
		{plainTurns, four("", `"train":[1]`), false, "messages[1]: train is"},
		{plainTurns, four("", `"train":true,"loss":false`), false, "train and loss disagree"},
		{plainTurns, four(`"weight":1`), false, "turn 1, of the role user, has weight"},
		{markedTurns, four("", "", `"train":true`), false, "turn 3, of the role user, has train"},
		{plainTurns, `{"prompt":[{"role":"assistant","content":"u1","weight":1}],"completion":[{"role":"assistant",` +
			`"content":"a1"}]}`, false, "turn 1, of the role assistant, has weight"},
		{indexTurns, four("", `"weight":0`), false, "outside of a loop over the messages"},
		{lateTurns, four("", `"weight":0`), true, "turn 2 has weight: the messages up to it do not render as the start"},
		{plainTurns, four("", `"images":["a"]`), false, `messages[1]: key "images" is not read`},
		{plainTurns, four("", `"token_mask":[1]`), false, `messages[1]: key "token_mask" is not read`},
		{plainTurns, four("", `"mask":true`), false, `messages[1]: key "mask" is not read`},
		{plainTurns, four("", `"function_call":{"name":"f"}`), false, "write it as tool_calls"},
		{plainTurns, `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":"x"}]}]}`, false,
			`messages[0]: content of type "image_url": only text is trained`},
		{plainTurns, `{"system":"s","messages":[{"role":"system","content":"other"}]}`, false,
			`"system" and messages[0] are different turns of the system`},
		{plainTurns, `{"system":["s"],"conversations":[{"from":"gpt","value":"a"}]}`, false, `"system" is not a string`},
		{plainTurns, `{"functions":[{}],"messages":[{"role":"assistant","content":"a"}]}`, false, `"functions" names the tools`},
		{plainTurns, `{"tools":[{"a":1}],"functions":[],"conversations":[{"from":"gpt","value":"a"}]}`, false,
			`"functions" names the tools`},
	} {
		_, _, err := targetText(t, tc.template, tc.record, tc.all)
		if err == nil || !strings.Contains(err.Error(), "a.jsonl: line 1: ") || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s, all %t: %v, want %q", tc.record, tc.all, err, tc.want)
		}
	}
}

// One line names the keys of turns that neither a rule nor the template names.
func TestUnknownKeysOfTurnsAreListed(t *testing.T) {
	dir := put(t, map[string]string{"t.jinja": plainTurns + "{% for m in messages %}{{ m.mood }}{% endfor %}",
		"a.jsonl": four(`"id":7,"mood":"x","name":"n"`, `"at":null,"score":NaN`)})
	var ignored Keys
	e := Encoding{Tokenizer: NewTokenizer(chatDir+"tokenizer.json", 0), EOS: 2, Ignored: &ignored,
		Chat: NewChat(chatDir+"tokenizer.json", filepath.Join(dir, "t.jinja"), true)}
	err := e.Each(t.Context(), []string{filepath.Join(dir, "a.jsonl")}, func(int, Document) error { return nil })
	if got := strings.Join(ignored.Sorted(), " "); err != nil || got != "messages[].id messages[].score" {
		t.Errorf("%s, %v", got, err)
	}
	for _, used := range []string{`"mood":NaN`, `"mood":[1,{"a":-Infinity}]`, `"mood":1e999`} {
		dir = put(t, map[string]string{"a.jsonl": four(used)})
		err = e.Each(t.Context(), []string{filepath.Join(dir, "a.jsonl")}, func(int, Document) error { return nil })
		if err == nil || !strings.Contains(err.Error(), "NaN, infinite or too large") {
			t.Errorf("%s: %v", used, err)
		}
	}
}
