package tokenizer

import (
	"strings"
	"unicode/utf8"
)

// Specials lists the texts of special tokens.
func (t *Tokenizer) Specials() (list []string) {
	for _, f := range []*finder{&t.raw, &t.normal} {
		for _, a := range f.tokens {
			if a.Special {
				list = append(list, a.Content)
			}
		}
	}
	return list
}

// A Mark is a place between two bytes of a text, in tokens.
type Mark struct {
	At     int // in bytes
	Before int // tokens that end at or before the place
	After  int // tokens that begin before the place; above Before where a token lies across it
}

// AppendMarked appends the ids of a text without special tokens around it, and sets the tokens of the marks, which are
// in order of their place. A place is a border of tokens if the text before it, from the last added token, encodes to
// the same ids alone. If no border is near, the mark is one token wide.
func (e *Encoder) AppendMarked(dst []int32, text string, marks []Mark) ([]int32, error) {
	e.out = dst
	at := 0 // the end of the encoded text
	take := func(to int, mark func(m *Mark)) {
		for ; len(marks) > 0 && marks[0].At <= to; marks = marks[1:] {
			mark(&marks[0])
		}
		at = to
	}
	base := len(dst)
	token := func(id int32, from, to int) {
		n := len(e.out) - base
		take(to, func(m *Mark) {
			m.Before, m.After = n, n
			if m.At > from {
				m.After++
			}
			if m.At == to {
				m.Before++
			}
		})
		e.out = append(e.out, id)
	}
	stretch := func(p piece) error {
		start, first := at, len(e.out)
		if err := e.stretch(p); err != nil {
			return err
		}
		ids := e.out[first:]
		var err error
		take(start+len(p.text), func(m *Mark) {
			if err == nil {
				err = e.place(p, m, m.At-start, ids, first-base)
			}
		})
		return err
	}
	out, err := e.finish(dst, e.each(text, token, stretch))
	for i := range marks { // at the end of an empty text
		marks[i].Before, marks[i].After = len(out)-base, len(out)-base
	}
	return out, err
}

// near bounds the characters between a mark and the borders around its token.
const near = 16

// place sets a mark k bytes into a stretch, which has these ids from index base.
func (e *Encoder) place(p piece, m *Mark, k int, ids []int32, base int) error {
	out := e.out
	defer func() { e.out = out }()
	// common returns the number of ids that the first k bytes share with the stretch, and whether these are all of them.
	common := func(k int) (int, bool, error) {
		if k == len(p.text) {
			return len(ids), true, nil
		}
		e.out = nil
		err := e.stretch(piece{p.text[:k], p.first})
		n := 0
		for n < min(len(ids), len(e.out)) && ids[n] == e.out[n] {
			n++
		}
		return n, n == len(e.out), err
	}
	n, border, err := common(k)
	m.Before, m.After = base+n, base+n
	if err != nil || border {
		return err
	}
	m.After++
	left, right := k, k
	for tried, found := 0, false; !found && left > 0 && tried < near; tried++ {
		_, size := utf8.DecodeLastRuneInString(p.text[:left])
		left -= size
		if n, found, err = common(left); err != nil {
			return err
		} else if found {
			m.Before = base + n
		}
	}
	for tried, found := 0, false; !found && right < len(p.text) && tried < near; tried++ {
		_, size := utf8.DecodeRuneInString(p.text[right:])
		right += size
		if n, found, err = common(right); err != nil {
			return err
		} else if found {
			m.After = max(base+n, m.Before+1)
		}
	}
	e.t.narrow(m, k-left, right-left, ids, base)
	return nil
}

// narrow finds the mark among the tokens around it, k bytes after the start of the first. Their texts must have the
// length of the text that they cover: the pre-tokenizer cut it in another way than the text before the mark alone.
func (t *Tokenizer) narrow(m *Mark, k, length int, ids []int32, base int) {
	texts, at, before, after := t.texts(), 0, m.Before, m.Before
	for i := m.Before; i < m.After; i++ {
		text := texts.of[ids[i-base]]
		size := len(strings.ReplaceAll(text, "▁", " "))
		if t.visible {
			size = utf8.RuneCountInString(text)
		}
		if at < k {
			after++
		}
		if at += size; at <= k {
			before++
		}
	}
	if at == length {
		m.Before, m.After = before, after
	}
}
