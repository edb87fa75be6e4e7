package verify

import (
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/model/chat"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/data"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/model/tokenizer"
)

// This file finds the targets of conversations a second time. It shares the parser of messages, the renderer and the
// tokenizer with package data, but neither the search for turns, nor the masks, nor the renderer's {% generation %} and
// its resumed prefixes.

// A talk is a conversation, with the templates and the tokenizer of all.
type talk struct {
	*hf.Chat
	compiled map[string]*chat.Template // by name
	encoder  *tokenizer.Encoder
	specials []string
	name     string // of the template
	vars     chat.Vars
	messages []chat.Value
}

// generation matches the tags of {% generation %}. Plain Jinja that writes a mark replaces each.
var generation = regexp.MustCompile(`\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}`)

const mark = "\ufdd0\ufdd2" // no characters of any text

func newTalk(d *config.Data) (*talk, error) {
	tok, err := data.LoadTokenizer(d.Tokenizer)
	if err != nil {
		return nil, err
	}
	found, err := hf.ReadChat(filepath.Dir(d.Tokenizer))
	if err == nil && d.ChatTemplate != "" {
		var raw []byte
		raw, err = files.Read(d.ChatTemplate, 1<<20)
		found.Templates = map[string]string{"default": string(raw)}
	}
	c := &talk{Chat: found, compiled: map[string]*chat.Template{}, encoder: tok.NewEncoder(), specials: tok.Specials()}
	for _, name := range []string{"default", "tool_use"} {
		if err == nil {
			source := generation.ReplaceAllString(found.Templates[name], `{%$1 if true %}{{ '\ufdd0\ufdd2' }}{% endif $2%}`)
			c.compiled[name], err = chat.Compile(source)
		}
	}
	return c, err
}

// messages adds a record of messages. Targets of a record outside the batch do not matter.
func (r *reader) messages(line []byte) (err error) {
	if r.talk == nil {
		if r.talk, err = newTalk(&r.cfg.Data); err != nil {
			return err
		}
	}
	c, prompt := r.talk, 0
	c.vars, c.messages, prompt, err = data.Messages(line, strings.TrimPrefix(r.cfg.Data.Format, "auto"))
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
	switch {
	case err != nil || r.cfg.Data.TrainOn == "all" || len(r.whole.fitting(rows)) == 0:
	case prompt >= 0:
		var text string
		if text, _, err = c.render(c.messages[:prompt], true); err == nil {
			labels, err = c.encoder.AppendMarked(nil, text, nil)
			labels = answer(ids, labels)
		}
	default:
		if !generation.MatchString(c.Templates[c.name]) {
			marks = c.turns(whole)
		}
		_, err = c.encoder.AppendMarked(nil, whole, marks)
		labels = slices.Repeat([]int32{ignored}, len(ids))
		for turn := range slices.Chunk(marks, 2) { // a token is a target if any of its characters is
			if from, to := turn[0].Before, turn[1].After; turn[0].At < turn[1].At {
				copy(labels[from:to], ids[from:to])
			}
		}
	}
	r.add(ids, labels, func(i int) bool { return i == 0 })
	return err
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
func (c *talk) turns(whole string) (marks []tokenizer.Mark) {
	for i, m := range c.messages {
		if role := m.(*chat.Dict).Data["role"]; role != "assistant" && role != "model" {
			continue
		}
		before, _, err := c.render(c.messages[:i], true)
		upTo, _, err2 := c.render(c.messages[:i+1], false)
		if err == nil && err2 == nil && strings.HasPrefix(whole, upTo) && strings.HasPrefix(upTo, before) {
			marks = append(marks, tokenizer.Mark{At: len(before)}, tokenizer.Mark{At: c.end(i, upTo, len(before))})
		}
	}
	return marks
}

// end returns the end of message i in the text up to it: after its content and a special token, or after a special
// token with only white space behind if the template changes or drops the content.
func (c *talk) end(i int, text string, from int) int {
	m := c.messages[i].(*chat.Dict)
	content, _ := m.Data["content"].(string)
	words, known := strings.TrimSpace(content), false
	if words != "" && !m.Has("tool_calls") {
		marked := &chat.Dict{Keys: m.Keys, Data: maps.Clone(m.Data)}
		marked.Data["content"] = strings.Replace(content, words, words+mark, 1)
		same, marks, _ := c.render(append(c.messages[:i:i], marked), false)
		if known = same == text && len(marks) == 1; known {
			from = marks[0].At
		}
	}
	end, trimmed := len(text), strings.TrimSpace(text[from:])
	for _, s := range c.specials {
		if at := strings.Index(text[from:], s); known && at >= 0 {
			end = min(end, from+at+len(s))
		} else if !known && strings.HasSuffix(trimmed, s) {
			end = from + strings.LastIndex(text[from:], s) + len(s)
		}
	}
	return end
}
