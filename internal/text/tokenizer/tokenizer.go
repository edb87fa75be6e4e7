package tokenizer

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// Tokenizer is a parsed tokenizer.json. It never changes; its encoders may run concurrently.
type Tokenizer struct {
	raw, normal  finder // added tokens, found before and after normalization
	added        map[string]int32
	tokens       map[int32]addedToken // the added ones
	next         int                  // above all ids of added tokens
	normalizer   normalizer           // nil: none
	preTokenizer preTokenizer         // nil: none
	visible      bool                 // the encoder maps bytes to characters, after the cache
	model        model
	head, tail   []int32 // special tokens around each text
	decoder      json.RawMessage
	texts        func() *texts // computed on first use; training needs none
}

// Size returns the required vocabulary size: the highest id plus one.
func (t *Tokenizer) Size() int {
	top := t.model.top()
	for _, id := range t.added {
		top = max(top, id)
	}
	for _, id := range append(t.head[:len(t.head):len(t.head)], t.tail...) {
		top = max(top, id)
	}
	return int(top) + 1
}

// Base returns the vocabulary size without added tokens. A model may have rows for these alone, if it was never trained
// with the added tokens.
func (t *Tokenizer) Base() int { return int(t.model.top()) + 1 }

// ID returns the id of a token by its text.
func (t *Tokenizer) ID(token string) (int, bool) {
	if id, ok := t.added[token]; ok {
		return int(id), true
	}
	id, ok := t.model.tokens()[token]
	return int(id), ok
}

// Token returns the text of a token; "" for an unknown id.
func (t *Tokenizer) Token(id int32) string { return t.texts().of[id] }

// Encoder turns texts into ids. It is not for concurrent use; each goroutine makes its own.
type Encoder struct {
	t     *Tokenizer
	work  work
	words cache // by the text from the pre-tokenizer
	parts cache // parts of long words
	out   []int32
}

// NewEncoder returns an encoder.
func (t *Tokenizer) NewEncoder() *Encoder { return &Encoder{t: t} }

// ErrUTF8 reports a text that is not UTF-8.
var ErrUTF8 = errors.New("not UTF-8")

// Append appends the ids of a text to dst, with the special tokens around it.
func (e *Encoder) Append(dst []int32, text string) ([]int32, error) {
	e.out = append(dst, e.t.head...)
	out, err := e.finish(dst, e.each(text, e.added, e.stretch))
	if err != nil {
		return dst, err
	}
	return append(out, e.t.tail...), nil
}

// each calls token for each added token of a text, with its place, and stretch for the text between them.
func (e *Encoder) each(text string, token func(id int32, from, to int), stretch func(piece) error) error {
	if !utf8.ValidString(text) {
		at := 0
		for r, n := rune(0), 0; ; at += n {
			if r, n = utf8.DecodeRuneInString(text[at:]); r == utf8.RuneError && n <= 1 {
				break
			}
		}
		return fmt.Errorf("%w at byte %d", ErrUTF8, at)
	}
	return e.t.raw.each(piece{text, true}, token, stretch)
}

// finish returns the ids since the start of a call; dst after an error.
func (e *Encoder) finish(dst []int32, err error) ([]int32, error) {
	out := e.out
	e.out = nil
	if err != nil {
		return dst, err
	}
	return out, nil
}

func (e *Encoder) added(id int32, _, _ int) { e.out = append(e.out, id) }

// stretch encodes text without added tokens.
func (e *Encoder) stretch(p piece) (err error) {
	if e.t.normalizer != nil {
		if p, err = e.t.normalizer.normalize(&e.work.matcher, p); err != nil {
			return err
		}
	}
	return e.t.normal.each(p, e.added, e.cut)
}

func (e *Encoder) cut(p piece) error {
	if e.t.preTokenizer == nil {
		return e.word(p)
	}
	return e.t.preTokenizer.cut(&e.work.matcher, p, e.word)
}

func (e *Encoder) word(p piece) (err error) {
	if p.text == "" {
		return nil
	}
	if b, ok := e.t.model.(*bpe); ok && b.joins != nil && len(p.text) > longWord {
		text := e.visibleWord(p.text)
		if !b.whole(text) {
			return b.parts(text, e.part)
		}
	}
	if ids, ok := e.words.get(p.text); ok {
		e.out = append(e.out, ids...)
		return nil
	}
	start := len(e.out)
	if e.out, err = e.t.model.encode(&e.work, e.out, e.visibleWord(p.text)); err == nil {
		e.words.put(p.text, e.out[start:])
	}
	return err
}

func (e *Encoder) visibleWord(word string) string {
	if e.t.visible {
		return visible(word)
	}
	return word
}

// part encodes a part of a long word. A part is not a word: ignore_merges does not apply.
func (e *Encoder) part(text string) (err error) {
	if ids, ok := e.parts.get(text); ok {
		e.out = append(e.out, ids...)
		return nil
	}
	start := len(e.out)
	if e.out, err = e.t.model.(*bpe).merge(&e.work, e.out, text); err == nil {
		e.parts.put(text, e.out[start:])
	}
	return err
}

type cache struct {
	ids  map[string][]int32
	slab []int32 // memory of the ids
}

// These bounds of a cache are its words, and the bytes of a word.
const (
	cachedWords = 1 << 16
	cachedBytes = 64
)

func (c *cache) get(word string) ([]int32, bool) {
	if len(word) > cachedBytes {
		return nil, false
	}
	ids, ok := c.ids[word]
	return ids, ok
}

// put remembers a short word. A full cache starts again empty.
func (c *cache) put(word string, ids []int32) {
	if len(word) > cachedBytes {
		return
	}
	if c.ids == nil || len(c.ids) >= cachedWords {
		c.ids, c.slab = map[string][]int32{}, nil
	}
	if cap(c.slab)-len(c.slab) < len(ids) {
		c.slab = make([]int32, 0, max(4096, len(ids)))
	}
	n := len(c.slab)
	c.slab = append(c.slab, ids...)
	c.ids[strings.Clone(word)] = c.slab[n:len(c.slab):len(c.slab)]
}
