package tokenizer

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// An addedToken is found in the text before the model runs.
type addedToken struct {
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized *bool  `json:"normalized"` // found in the normalized text
	Special    bool   `json:"special"`
	ID         int32  `json:"id"`

	text string // the text to find: the content, or its normalized form
}

// A finder finds added tokens in a text: the longest at each place, from left to right.
type finder struct {
	tokens []*addedToken
	starts [256]bool
	texts  trie // indexes of tokens
	split  bool // special tokens are not found
}

func (f *finder) add(t *addedToken) error {
	text := t.text
	if text == "" {
		return fmt.Errorf("the added token %.40q is empty once it is normalized", t.Content)
	}
	if len(text) > maxToken {
		return fmt.Errorf("the added token %.40q has %d bytes; at most %d are looked for", t.Content, len(text),
			maxToken)
	}
	f.starts[text[0]] = true
	at := f.texts.node(text)
	if f.texts.ends[at] >= 0 {
		return fmt.Errorf("the added tokens %.40q and %.40q are looked for as the same text",
			f.tokens[f.texts.ends[at]].Content, t.Content)
	}
	f.texts.ends[at] = int32(len(f.tokens))
	f.tokens = append(f.tokens, t)
	return nil
}

// find returns the first match at or after a place, or nil.
func (f *finder) find(text string, at int) (t *addedToken, from, to int) {
	for ; at < len(text); at++ {
		if !f.starts[text[at]] {
			continue
		}
		node := int32(0)
		for end := at; end < len(text); {
			var ok bool
			if node, ok = f.texts.next[pair(node, int32(text[end]))]; !ok {
				break
			}
			end++
			if k := f.texts.ends[node]; k >= 0 {
				t, to = f.tokens[k], end
			}
		}
		if t != nil {
			return t, at, to
		}
	}
	return nil, 0, 0
}

// each calls token for each added token in a text, with its place, and stretch for the text between them.
func (f *finder) each(p piece, token func(id int32, from, to int), stretch func(piece) error) error {
	give := func(from, to int) error {
		if from >= to {
			return nil
		}
		return stretch(piece{p.text[from:to], p.first && from == 0})
	}
	done := 0
	for at := 0; f.texts.next != nil; {
		t, from, to := f.find(p.text, at)
		if t == nil {
			break
		}
		if at = to; f.split && t.Special {
			continue
		}
		if t.SingleWord { // not inside a word
			before, _ := utf8.DecodeLastRuneInString(p.text[:from])
			after, _ := utf8.DecodeRuneInString(p.text[to:])
			if wordClass().has(before) || wordClass().has(after) {
				continue
			}
		}
		if t.LStrip {
			from = max(done, len(strings.TrimRightFunc(p.text[:from], isSpace)))
		}
		if t.RStrip {
			to = len(p.text) - len(strings.TrimLeftFunc(p.text[to:], isSpace))
		}
		if err := give(done, from); err != nil {
			return err
		}
		if from < to {
			token(t.ID, from, to)
		}
		done = to
	}
	return give(done, len(p.text))
}
