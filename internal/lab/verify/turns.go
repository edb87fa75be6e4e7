package verify

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/text/chat"
	"github.com/cprun/cprun/internal/text/data"
	"github.com/cprun/cprun/internal/text/tokenizer"
)

// This file finds the targets of conversations a second time. It shares the renderer and the tokenizer with package
// data, but neither the parser of messages, nor the search for turns, nor the masks, nor the renderer's
// {% generation %} and its resumed prefixes.

// A talk is a conversation, with the templates and the tokenizer of all.
type talk struct {
	*chat.Source
	compiled map[string]*chat.Template // by name
	encoder  *tokenizer.Encoder
	specials []string
	name     string // of the template
	vars     chat.Vars
	messages []chat.Value
	skipped  []int // the messages that are no targets
}

// generation matches the tags of {% generation %}. Plain Jinja that writes a mark replaces each.
var generation = regexp.MustCompile(`\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}`)

const (
	mark    = "\ufdd0\ufdd2" // no characters of any text
	marking = `{%$1 if true %}{{ '\ufdd0\ufdd2' }}{% endif $2%}`
)

func newTalk(d *config.Data) (*talk, error) {
	tok, err := data.LoadTokenizer(d.Tokenizer)
	if err != nil {
		return nil, err
	}
	found, err := chat.ReadSource(filepath.Dir(d.Tokenizer))
	if err == nil && d.ChatTemplate != "" {
		var raw []byte
		raw, err = files.Read(d.ChatTemplate, chat.MaxTemplate)
		found.Templates = map[string]string{"default": string(raw)}
	}
	c := &talk{Source: found, compiled: map[string]*chat.Template{}, encoder: tok.NewEncoder(), specials: tok.Specials()}
	for _, name := range []string{"default", "tool_use"} {
		if err == nil {
			source := generation.ReplaceAllString(found.Templates[name], marking)
			c.compiled[name], err = chat.Compile(source)
		}
	}
	return c, err
}

// messages adds a record of messages. Targets of a record outside the batch do not matter.
func (r *reader) messages(o *chat.Dict, format string) (err error) {
	if r.talk == nil {
		if r.talk, err = newTalk(&r.cfg.Data); err != nil {
			return err
		}
	}
	c := r.talk
	prompt, err := c.read(o, format)
	if err != nil {
		return err
	}
	if c.name = "default"; c.vars["tools"] != nil && c.Templates["tool_use"] != "" {
		c.name = "tool_use"
	}
	whole, marks, err := c.render(c.messages, false)
	if err != nil {
		return err
	}
	ids, err := c.encoder.AppendMarked(nil, whole, nil)
	rows, labels := make([]Row, len(ids)), ids
	for i, id := range ids {
		rows[i].ID = id
	}
	all := r.cfg.Data.TrainOn == "all"
	switch {
	case err != nil || all && len(c.skipped) == 0 || r.whole != nil && len(r.whole.fitting(rows)) == 0:
	case prompt >= 0 && !all && len(c.skipped) == 0:
		var text string
		if text, _, err = c.render(c.messages[:prompt], true); err == nil {
			labels, err = c.encoder.AppendMarked(nil, text, nil)
			labels = answer(ids, labels)
		}
	default:
		var spans []span
		switch {
		case all:
			spans = []span{{0, len(whole)}}
		case prompt >= 0:
			text, _, _ := c.render(c.messages[:prompt], true)
			spans = []span{{len(text), len(whole)}}
		case generation.MatchString(c.Templates[c.name]):
			spans = c.marked(marks)
		default:
			spans = c.turns(whole)
		}
		labels, err = c.labels(ids, whole, c.without(spans))
	}
	r.add(ids, labels, func(i int) bool { return i == 0 })
	return err
}

// A span is a range of a text; empty: not found.
type span struct{ from, to int }

// labels returns the labels of ids with targets in spans of the text: a token is one if any of its characters is.
func (c *talk) labels(ids []int32, whole string, spans []span) ([]int32, error) {
	var marks []tokenizer.Mark
	for _, s := range spans {
		marks = append(marks, tokenizer.Mark{At: s.from}, tokenizer.Mark{At: s.to})
	}
	_, err := c.encoder.AppendMarked(nil, whole, marks)
	labels := slices.Repeat([]int32{ignored}, len(ids))
	for turn := range slices.Chunk(marks, 2) {
		if from, to := turn[0].Before, turn[1].After; turn[0].At < turn[1].At {
			copy(labels[from:to], ids[from:to])
		}
	}
	return labels, err
}

// marked returns the spans of {% generation %}. Those of a skipped turn are the ones that it adds to a prefix.
func (c *talk) marked(marks []tokenizer.Mark) (spans []span) {
	owner := make([]int, len(marks)/2)
	for i := range c.messages {
		if len(c.skipped) == 0 {
			break
		}
		_, before, _ := c.render(c.messages[:i], false)
		for k := len(before) / 2; k < len(owner); k++ {
			owner[k] = i
		}
	}
	for k := range owner {
		if !slices.Contains(c.skipped, owner[k]) || len(c.skipped) == 0 {
			spans = append(spans, span{marks[2*k].At, marks[2*k+1].At})
		}
	}
	return spans
}

// without removes the text of skipped turns.
func (c *talk) without(spans []span) []span {
	for _, i := range c.skipped {
		before, _, err := c.render(c.messages[:i], false)
		upTo, _, err2 := c.render(c.messages[:i+1], false)
		if err != nil || err2 != nil {
			continue
		}
		if i == 0 {
			before = ""
		}
		var left []span
		for _, s := range spans {
			for _, part := range []span{{s.from, min(s.to, len(before))}, {max(s.from, len(upTo)), s.to}} {
				if part.from < part.to {
					left = append(left, part)
				}
			}
		}
		spans = left
	}
	return spans
}

// render renders messages. It also returns the places of marks.
func (c *talk) render(messages []chat.Value, prompt bool) (text string, marks []tokenizer.Mark, err error) {
	vars := chat.Vars{}
	for name, text := range c.Tokens {
		vars[name] = text
	}
	maps.Copy(vars, c.vars)
	vars["messages"], vars["add_generation_prompt"] = messages, prompt
	raw, _, err := c.compiled[c.name].Render(vars)
	for i, part := range strings.Split(raw, mark) {
		if i > 0 {
			marks = append(marks, tokenizer.Mark{At: len(text)})
		}
		text += part
	}
	return text, marks, err
}

// turns finds the starts and ends of the assistant's turns. One begins after the prompt for it.
func (c *talk) turns(whole string) (found []span) {
	for i, m := range c.messages {
		if !answers(m) {
			continue
		}
		before, _, err := c.render(c.messages[:i], true)
		upTo, _, err2 := c.render(c.messages[:i+1], false)
		if err == nil && err2 == nil && strings.HasPrefix(whole, upTo) && strings.HasPrefix(upTo, before) {
			found = append(found, span{len(before), c.end(i, i+1, upTo, len(before), len(upTo))})
		} else {
			found = append(found, c.apart(i, whole))
		}
	}
	return slices.DeleteFunc(c.formed(whole, found), func(s span) bool { return s.from >= s.to })
}

// read reads the variables and messages of a record. It returns the number of messages before a completion; -1: none.
func (c *talk) read(o *chat.Dict, format string) (prompt int, err error) {
	c.vars, c.messages, c.skipped, prompt = chat.Vars{"tools": nil, "documents": nil}, nil, nil, -1
	lists := []string{"messages"}
	share := o.Data["conversations"] != nil
	if share {
		lists[0] = "conversations"
	}
	if format == data.FormatCompletion {
		lists, share = []string{"prompt", "completion"}, false
	}
	if system, _ := o.Data["system"].(string); system != "" && format != data.FormatCompletion {
		first := chat.NewDict()
		first.Set("role", "system")
		first.Set("content", system)
		c.messages = append(c.messages, first)
	}
	for k, key := range lists {
		list, _ := o.Data[key].([]chat.Value)
		if len(list) == 0 {
			return -1, fmt.Errorf("no messages in %q", key)
		}
		if k == 1 {
			prompt = len(c.messages)
		}
		for _, v := range list {
			if err := c.message(v); err != nil {
				return -1, err
			}
		}
	}
	for key, as := range map[string]string{"functions": "tools", "tools": "tools", "documents": "documents"} {
		v := parsed(o.Data[key])
		if v != nil && (key != "functions" || share) {
			c.vars[as] = v
		}
	}
	if kwargs, ok := parsed(o.Data["chat_template_kwargs"]).(*chat.Dict); ok {
		maps.Copy(c.vars, kwargs.Data)
	}
	return prompt, nil
}

// parsed returns a value that may be held as JSON.
func parsed(v chat.Value) chat.Value {
	if text, ok := v.(string); ok {
		v, _ = chat.Decode([]byte(text))
	}
	return v
}

// roles maps the names of ShareGPT.
var roles = map[string]string{"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}

// message adds a message with the names of keys that templates read.
func (c *talk) message(v chat.Value) error {
	old, ok := v.(*chat.Dict)
	if !ok {
		return errors.New("a message is no map")
	}
	m := chat.NewDict()
	for _, key := range old.Keys {
		name := map[string]string{"from": "role", "value": "content"}[key]
		if name == "" || old.Has(name) {
			name = key
		}
		m.Set(name, old.Data[key])
	}
	role, ok := m.Data["role"].(string)
	if !ok {
		return errors.New("a message has no role")
	}
	if name := roles[role]; old.Has("from") && name != "" {
		m.Set("role", name)
	}
	if n := len(c.messages); n == 1 && role == "system" && c.messages[0].(*chat.Dict).Data["role"] == role {
		c.messages = nil // said twice
	}
	for _, name := range []string{"reasoning", "thinking", "reasoning_content"} { // the last one counts
		if thought := m.Data[name]; thought != nil {
			m.Set("reasoning_content", thought)
		}
	}
	if thought := m.Data["reasoning_content"]; thought != nil && !m.Has("thinking") {
		m.Set("thinking", thought)
	}
	for _, flag := range []string{"weight", "loss", "train", "trainable"} {
		if on := m.Data[flag]; on == false || on == 0 || on == 0.0 {
			c.skipped = append(c.skipped, len(c.messages))
			break
		}
	}
	c.messages = append(c.messages, m)
	return nil
}

// end returns the end of message i, which is text[from:to] at most, in the text of the first n messages: after its
// content and a special token, or after a special token that only white space follows if the template changes or drops
// the content.
func (c *talk) end(i, n int, text string, from, to int) int {
	rest, known := c.after(i, n, false)
	if known = known && !c.messages[i].(*chat.Dict).Has("tool_calls"); known {
		from = max(from, len(text)-len(rest))
	}
	text, end := text[:to], to
	trimmed := strings.TrimSpace(text[from:])
	for _, s := range c.specials {
		if at := strings.Index(text[from:], s); known && at >= 0 {
			end = min(end, from+at+len(s))
		} else if !known && strings.HasSuffix(trimmed, s) {
			end = from + strings.LastIndex(text[from:], s) + len(s)
		}
	}
	return end
}
