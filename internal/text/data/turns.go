package data

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"github.com/cprun/cprun/internal/text/chat"
)

// prefixTurn returns turn i. The whole text must begin with the rendered messages before the turn, and with those up to
// it.
func prefixTurn(whole *chat.Trace, i int) (from, to int, err error) {
	prefix := func(n int, prompt bool) (length int, begins bool, err error) {
		same, rest, err := whole.Prefix(n, prompt)
		return same + len(rest), strings.HasPrefix(whole.Text[same:], rest), err
	}
	from, before, err := prefix(i, true)
	upTo := false
	if err == nil {
		to, upTo, err = prefix(i+1, false)
	}
	if err == nil && (!before || !upTo || from > to) {
		err = errors.New("the messages up to it do not render as the start of the whole conversation")
	}
	return from, to, err
}

// A markedTrace renders a conversation with a mark after the content of each message. It finds turns in templates that
// render prefixes differently, such as with a token at the end or with the system prompt in the last question: the text
// since the content before a turn is compared in place of the whole.
type markedTrace struct {
	*chat.Trace
	plain string // without marks
}

// contentMark matches marks. Their characters are no characters of any text (Unicode noncharacters).
var contentMark = regexp.MustCompile("\ufdd3[0-9]+\ufdd3")

func markOf(i int) string { return fmt.Sprintf("\ufdd3%d\ufdd3", i) }

// mark renders a conversation with marks; nil if they change the text.
func (e *chatEncoder) mark(c *conversation, plain string) *markedTrace {
	with := *c
	with.messages = slices.Clone(c.messages)
	for i, m := range c.messages {
		d := m.(*chat.Dict)
		content, _ := d.Data["content"].(string)
		if words := strings.TrimSpace(content); words != "" {
			marked := &chat.Dict{Keys: d.Keys, Data: maps.Clone(d.Data)}
			marked.Data["content"] = strings.Replace(content, words, words+markOf(i), 1)
			with.messages[i] = marked
		}
	}
	trace, err := e.render(&with, len(with.messages), false)
	if err != nil || contentMark.ReplaceAllString(trace.Text, "") != plain {
		return nil
	}
	return &markedTrace{trace, plain}
}

// since cuts a prefix and the whole after the content of message i, or after the last earlier content in both. It
// removes the marks.
func (c *markedTrace) since(prefix string, i int) (part, rest string) {
	for rest = c.Text; i >= 0; i-- {
		_, after, found := strings.Cut(prefix, markOf(i))
		if _, whole, both := strings.Cut(c.Text, markOf(i)); found && both {
			prefix, rest = after, whole
			break
		}
	}
	return contentMark.ReplaceAllString(prefix, ""), contentMark.ReplaceAllString(rest, "")
}

// turn returns turn i in the whole text, and whether it is found. ends are the special tokens.
func (c *markedTrace) turn(i int, ends []string) (from, to int, ok bool) {
	if c == nil {
		return 0, 0, false
	}
	var texts [2]string // before the turn with a prompt, up to its end
	for k := range texts {
		same, rest, err := c.Prefix(i+k, k == 0)
		if err != nil {
			return 0, 0, false
		}
		texts[k] = c.Text[:same] + rest
	}
	head, rest := c.since(texts[0], i-1)
	if from = len(c.plain) - len(rest) + len(head); !strings.HasPrefix(rest, head) {
		return 0, 0, false
	}
	tail, rest := c.since(texts[1], i)
	n := sharedEnd(tail, rest, ends)
	to = len(c.plain) - len(rest) + max(n, 0)
	return from, to, n >= 0 && from < to
}

// sharedEnd returns how much of a text begins another one, apart from special tokens and space at its end; -1: other
// characters differ.
func sharedEnd(text, other string, ends []string) int {
	for !strings.HasPrefix(other, text) {
		short := strings.TrimRightFunc(text, unicode.IsSpace)
		for i := 0; i < len(ends) && len(short) == len(text); i++ {
			short = strings.TrimSuffix(text, ends[i])
		}
		if len(short) == len(text) {
			return -1
		}
		text = short
	}
	return len(text)
}
