package verify

import (
	"maps"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/text/chat"
	"github.com/cprun/cprun/internal/text/data"
)

// This file finds answers under templates with a training form, and under templates that render prefixes differently.
// It shares the forms with package data, but neither their spans nor the marks of contents.

// after renders the first n messages with a mark after the content of message i, and returns the text after it.
func (c *talk) after(i, n int, prompt bool) (text string, ok bool) {
	if i < 0 {
		text, _, err := c.render(c.messages[:n], prompt)
		return text, err == nil
	}
	m := c.messages[i].(*chat.Dict)
	content, _ := m.Data["content"].(string)
	words := strings.TrimSpace(content)
	marked := &chat.Dict{Keys: m.Keys, Data: maps.Clone(m.Data)}
	marked.Data["content"] = strings.Replace(content, words, words+mark, 1)
	list := slices.Clone(c.messages[:n])
	list[i] = marked
	plain, _, err := c.render(c.messages[:n], prompt)
	text, marks, err2 := c.render(list, prompt)
	if err != nil || err2 != nil || words == "" || text != plain || len(marks) != 1 {
		return "", false
	}
	return text[marks[0].At:], true
}

// apart returns message i in a text. The messages up to it render otherwise than the text begins, so apart compares
// both after the last content that they share.
func (c *talk) apart(i int, whole string) span {
	since := func(last, n int, prompt bool) (part, rest string) {
		for ; last >= -1; last-- {
			part, ok := c.after(last, n, prompt)
			rest, ok2 := c.after(last, len(c.messages), false)
			if ok && ok2 {
				return part, rest
			}
		}
		return "", ""
	}
	head, rest := since(i-1, i, true)
	if head == "" || !strings.HasPrefix(rest, head) {
		return span{}
	}
	from := len(whole) - len(rest) + len(head)
	tail, rest := since(i, i+1, false)
	for n := len(tail); n >= 0; n-- { // without what ends a conversation
		if strings.HasPrefix(rest, tail[:n]) && c.blank(tail[n:]) {
			return span{from, c.end(i, len(c.messages), whole, from, len(whole)-len(rest)+n)}
		}
	}
	return span{}
}

// blank reports whether a text holds only special tokens and white space.
func (c *talk) blank(text string) bool {
	eos, _ := c.vars["eos_token"].(string)
	for _, s := range append(c.specials[:len(c.specials):len(c.specials)], eos) {
		text = strings.ReplaceAll(text, s, "")
	}
	return strings.TrimSpace(text) == ""
}

// formed returns the answers that the training form of the template marks. If one differs from the found answer by more
// than white space and special tokens, it returns the found ones.
func (c *talk) formed(whole string, found []span) []span {
	tokens := chat.Vars{}
	for name, text := range c.Tokens {
		tokens[name] = text
	}
	stock := c.compiled[c.name]
	f, first := data.FormOf(stock, tokens), slices.IndexFunc(c.messages, answers)
	if f == nil || first < 0 {
		return found
	}
	form, err := chat.Compile(generation.ReplaceAllString(f.Source, marking))
	c.compiled[c.name] = form
	text, marks, err2 := c.render(c.messages[first:], false)
	c.compiled[c.name] = stock
	if err != nil || err2 != nil || !strings.HasSuffix(whole, text) || len(marks) != 2*len(found) {
		return found
	}
	formed := make([]span, len(found))
	for i, turn := range found {
		from, to := len(whole)-len(text)+marks[2*i].At, len(whole)-len(text)+marks[2*i+1].At
		formed[i] = span{from, to}
		more := whole[min(from, turn.from):max(from, turn.from)] + whole[min(to, turn.to):max(to, turn.to)]
		if turn.from < turn.to && !c.blank(more) {
			return found
		}
	}
	return formed
}

// answers reports whether the assistant writes a message.
func answers(m chat.Value) bool {
	role := m.(*chat.Dict).Data["role"]
	return role == "assistant" || role == "model"
}
