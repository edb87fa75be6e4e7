package data

import (
	"embed"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/cprun/cprun/internal/text/chat"
)

// A Form is a training form of a stock chat template. It renders a conversation from the first answer on as the stock
// template does, and marks each answer by {% generation %}. Texts before the first answer, such as lists of tools, have
// no targets, so that a form also serves copies with other system prompts.
type Form struct {
	Name   string
	Source string // Jinja
	*chat.Template
}

//go:embed forms/*.jinja
var formFiles embed.FS

// Forms compiles the training forms.
var Forms = sync.OnceValue(func() (list []Form) {
	for _, f := range [][2]string{{"Qwen3", "qwen"}, {"Qwen3-2507", "qwen"}, {"Qwen2.5", "qwen"}, {"Gemma", "gemma"},
		{"Phi-3", "phi3"}} {
		raw, err := formFiles.ReadFile("forms/" + f[1] + ".jinja")
		source := fmt.Sprintf("{%%- set form = '%s' -%%}", f[0]) + string(raw)
		t, err2 := chat.Compile(source)
		if err != nil || err2 != nil {
			panic(fmt.Sprint(err, err2))
		}
		list = append(list, Form{f[0], source, t})
	}
	return list
})

// probes are conversations that the stock templates render differently. A template that refuses one, such as for its
// roles, is compared by the others.
var probes = sync.OnceValue(func() (list [][]chat.Value) {
	for _, text := range []string{
		`[{"role":"user","content":"a"},{"role":"assistant","content":" b\n"},{"role":"user","content":"c "},
		{"role":"assistant","content":"<think>\nd\n</think>\n\ne"},{"role":"user","content":"f"},
		{"role":"assistant","content":"g","reasoning_content":"h"}]`,
		`[{"role":"user","content":"a"},{"role":"assistant","content":"","tool_calls":[{"type":"function","id":"123456789",
		"function":{"name":"b","arguments":{"c":1}}}]},{"role":"tool","content":"d","tool_call_id":"123456789"},
		{"role":"assistant","content":"e"}]`,
		`[{"role":"user","content":"a"},{"role":"assistant","content":"b","reasoning_content":"c","tool_calls":[
		{"function":{"name":"d","arguments":"{}"}},{"function":{"name":"e","arguments":"{\"f\": \"g\"}"}}]},
		{"role":"tool","content":"h"},{"role":"tool","content":"i"},
		{"role":"assistant","content":"j","reasoning_content":"k"}]`,
	} {
		v, err := chat.Decode([]byte(text))
		if err != nil {
			panic(err)
		}
		list = append(list, v.([]chat.Value))
	}
	return list
})

// FormOf returns the training form of a template without {% generation %}: the one that renders all probes as it does;
// nil: none. tokens are the special tokens by name.
func FormOf(t *chat.Template, tokens chat.Vars) *Form {
	if t == nil || t.Spans {
		return nil
	}
	for _, f := range Forms() {
		alike, other := 0, false
		for _, probe := range probes() {
			vars := maps.Clone(tokens)
			maps.Copy(vars, chat.Vars{keyMessages: probe, promptKey: false, keyTools: nil, keyDocuments: nil})
			if text, _, err := t.Render(vars); err == nil {
				alike++
				other = other || f.Answers(vars, text) == nil
			}
		}
		if alike > 0 && !other {
			return &f
		}
	}
	return nil
}

const promptKey = "add_generation_prompt"

// Answers returns the answers in the text of a conversation, one for each message of the assistant; nil if the text
// does not end as the form renders it.
func (f *Form) Answers(vars chat.Vars, text string) []chat.Span {
	messages := vars[keyMessages].([]chat.Value)
	first := slices.IndexFunc(messages, isAnswer)
	if f == nil || first < 0 {
		return nil
	}
	vars = maps.Clone(vars)
	vars[keyMessages] = messages[first:]
	end, spans, err := f.Render(vars)
	at := len(text) - len(end)
	answers := 0
	for _, m := range messages {
		if isAnswer(m) {
			answers++
		}
	}
	if err != nil || !strings.HasSuffix(text, end) || len(spans) != answers {
		return nil
	}
	for i := range spans {
		spans[i].From, spans[i].To = spans[i].From+at, spans[i].To+at
	}
	return spans
}

// isAnswer reports whether the assistant writes a message.
func isAnswer(m chat.Value) bool {
	role, _ := m.(*chat.Dict).Data["role"].(string)
	return slices.Contains(assistants, role)
}
