package data

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/text/chat"
)

// A form ends a conversation as the stock template does, and marks the answers as TRL's training template does.
// scripts/oracle/forms.py --write made the fixture by transformers 5.24.0 and TRL 1.16.0; answers are null where TRL's
// template renders another text.
func TestFormsEqualTRL(t *testing.T) {
	var rows []struct {
		Form, End string
		Messages  json.RawMessage
		Answers   []string
	}
	raw, err := os.ReadFile("testdata/forms.json")
	if err == nil {
		err = json.Unmarshal(raw, &rows)
	}
	if err != nil || len(rows) < 60 {
		t.Fatal(len(rows), err)
	}
	for i, row := range rows {
		k := slices.IndexFunc(Forms(), func(f Form) bool { return f.Name == row.Form })
		messages := must.Have(chat.Decode(row.Messages))
		vars := chat.Vars{keyMessages: messages, "eos_token": "<|endoftext|>"}
		text := "as much as you like" + row.End
		var got []string
		for _, s := range Forms()[k].Answers(vars, text) {
			got = append(got, text[s.From:s.To])
		}
		if len(got) == 0 || row.Answers != nil && strings.Join(got, "") != strings.Join(row.Answers, "") {
			t.Errorf("%s, row %d: answers %q, want %q in\n%s", row.Form, i, got, row.Answers, row.End)
		}
		if Forms()[k].Answers(vars, text+" ") != nil || Forms()[k].Answers(vars, row.End[1:]) != nil {
			t.Errorf("%s, row %d: another text has answers", row.Form, i)
		}
	}
}

var generationTags = regexp.MustCompile(`\{%- (end)?generation -%\}`)

// unmarked returns a template that renders the turns of a form, without {% generation %}.
func unmarked(f Form) string { return generationTags.ReplaceAllString(f.Source, "") }

// A template gets the form that renders all probes alike.
func TestTemplatesAreRecognised(t *testing.T) {
	names := map[string]string{"": "{{ messages | length }}", "<none>": "{{ nosuch.x }}", "marked": Forms()[0].Source}
	for _, f := range Forms() {
		names[f.Name] = "{{ bos_token }}You are a captain.{{ tools }}" + unmarked(f)
		names[f.Name+" that ends otherwise"] = unmarked(f) + "\n<end>"
	}
	names["ChatML"] = string(must.Have(os.ReadFile("../chat/testdata/plain.jinja")))
	for name, source := range names {
		template := must.Have(chat.Compile(source))
		got := ""
		if f := FormOf(template, chat.Vars{"bos_token": "<s>", "eos_token": "</s>"}); f != nil {
			got = f.Name
		}
		known := slices.ContainsFunc(Forms(), func(f Form) bool { return f.Name == name })
		if known && got != name || !known && got != "" {
			t.Errorf("%s: form %q", name, got)
		}
	}
	if FormOf(nil, nil) != nil {
		t.Error("no template has a form")
	}
	other, _ := chat.Decode([]byte(`[{"role":"assistant","content":"a"},{"role":"model","content":"b"}]`)) // which Qwen drops
	if spans := Forms()[0].Answers(chat.Vars{keyMessages: other}, "<|im_start|>assistant\na<|im_end|>\n"); spans != nil {
		t.Error("one answer for two turns", spans)
	}
}

const (
	two = `{"messages":[{"role":"system","content":"s"},{"role":"user","content":"a"},{"role":"assistant","content":" b "},` +
		`{"role":"user","content":"c"},{"role":"assistant","content":"d","thinking":"e"}]}`
	called = `{"tools":[{}],"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"","tool_calls":[{"x":1}]},` +
		`{"role":"tool","content":""},{"role":"assistant","content":"b"},{"role":"user","content":"c"},` +
		`{"role":"assistant","content":"d"}]}`
)

// The form of a template finds its answers, and one note names it. A conversation that the form renders otherwise has
// the answers that prefixes find.
func TestFormsFindAnswers(t *testing.T) {
	qwen := unmarked(Forms()[0]) + "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
	for _, c := range []struct {
		template, record string
		want             string // the answers, with | between
		forms            int
	}{
		{qwen, two, " b <|im_end|>\n|<think>\ne\n</think>\n\nd<|im_end|>\n", 1},
		{qwen + "{{ chat if not add_generation_prompt }}", strings.Replace(two, "{", `{"chat_template_kwargs":{"chat":"<s>"},`, 1),
			" b <|im_end|>|<think>\ne\n</think>\n\nd<|im_end|>", 0},
	} {
		got, notes, err := targetText(t, c.template, c.record, false)
		if err != nil || got != c.want || len(notes) != c.forms {
			t.Errorf("%s: %q, %q, %v, want %q", c.record, got, notes, err, c.want)
		}
		for _, note := range notes {
			if !strings.HasPrefix(note, FormNote+"Qwen3 ") || !strings.Contains(note, "data.chat_template") {
				t.Error(note)
			}
		}
	}
}

// Templates that render the messages up to a turn differently have answers if the text since the last content is alike.
func TestTurnsSinceTheLastContent(t *testing.T) {
	const (
		body = "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}:{{ m.content }}" +
			"{{ m.tool_calls or '' }}<|im_end|>;{% endif %}{% endfor %}"
		prompt = "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
		atEnd  = "{% if not add_generation_prompt %}\n<s>{% endif %}"
		late   = "{% for m in messages %}{% if m.role == 'user' %}[{% if loop.last %}{{ messages[0].content }};{% endif %}" +
			"{{ m.content }}]{% elif m.role == 'assistant' %} {{ m.content | trim }}<s>{% endif %}{% endfor %}"
		thought = "{% for m in messages %}<|im_start|>{{ m.role }}:{% if loop.last and m.role == 'assistant' %}({{ m.thinking }})" +
			"{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
	)
	for _, c := range []struct {
		template, record string
		want             string // the answers, with | between; "": refused
	}{
		{body + prompt + atEnd, two, " b <|im_end|>|d<|im_end|>"},
		{body + prompt + atEnd, called, "[{'x': 1}]<|im_end|>;|b<|im_end|>|d<|im_end|>"},
		{late, two, " b<s>| d<s>"},
		{thought + prompt, two, " b <|im_end|>|(e)d<|im_end|>"},
		{body + prompt + "{% if not add_generation_prompt %}!{% endif %}", two, ""},
		{body + "{% if add_generation_prompt %}<|im_start|>model:{% endif %}" + atEnd, two, ""},
		{"{{ messages | length }}" + body + prompt, strings.ReplaceAll(two, `"a"`, `" "`), ""},
		{"{% for m in messages %}{{ m.content | length }}{% endfor %}" + body + prompt + atEnd, two, ""}, // a mark changes it
		{strings.ReplaceAll(body, "{{ m.content }}", "{{ m.content }}{{ m.content }}") + prompt + atEnd, two,
			" b  b <|im_end|>|dd<|im_end|>"},
		{"{{ (messages[2] or {}).content }}<s>{% if messages | length != 3 %}" + body + "{% endif %}" + prompt, two, ""},
	} {
		got, _, err := targetText(t, c.template, c.record, false)
		if (err == nil) != (c.want != "") || got != c.want || err != nil && !strings.Contains(err.Error(), "turn ") {
			t.Errorf("%s:\n%q, %v, want %q", c.template, got, err, c.want)
		}
	}
}
