package tokenizer

import (
	"fmt"
	"unicode/utf8"
)

// Decoder turns ids into text, id by id, as they come out of a model. The text of all ids together is
// that of the Python library's decode with skip_special_tokens, but that a character of which a part
// is missing becomes one U+FFFD and leaves the bytes around it alone. It is not for concurrent use.
type Decoder struct {
	bytes bool // each id is a byte
	words *texts
	chain link
	held  []byte // the start of an incomplete character
	out   []byte
}

// texts holds the text of each token, by id.
type texts struct {
	of      map[int32]string
	special map[int32]bool // has no text for a reader
}

// NewDecoder returns a decoder at the start of a text. It refuses a decoder of the file that is not known,
// by its name.
func (t *Tokenizer) NewDecoder() (*Decoder, error) {
	d := &Decoder{words: t.texts()}
	steps, err := parseDecoder(t.decoder, 0)
	if err != nil {
		return nil, fmt.Errorf("decoder: %w", err)
	}
	if d.chain, err = joined(steps, d.emit); err != nil {
		return nil, fmt.Errorf("decoder: %w", err)
	}
	return d, nil
}

// NewByteDecoder returns a decoder of ids that are bytes. Ids above 255 have no text.
func NewByteDecoder() *Decoder { return &Decoder{bytes: true} }

// Append appends the text that an id adds: whole characters only.
// An id that the tokenizer does not have, and a special token, have no text.
func (d *Decoder) Append(dst []byte, id int32) []byte {
	d.out = dst
	if d.bytes {
		if id >= 0 && id <= 255 {
			d.emit(string([]byte{byte(id)}))
		}
	} else if text, ok := d.words.of[id]; ok && !d.words.special[id] {
		d.chain.take(text, true)
	}
	return d.taken()
}

// Flush appends the rest at the end of a text: U+FFFD for a character that has not become whole.
func (d *Decoder) Flush(dst []byte) []byte {
	d.out = dst
	if len(d.held) > 0 {
		d.out = utf8.AppendRune(d.out, utf8.RuneError)
		d.held = d.held[:0]
	}
	return d.taken()
}

func (d *Decoder) taken() []byte {
	out := d.out
	d.out = nil
	return out
}

// emit passes on the characters that are whole. Bytes that begin none become U+FFFD, as many as there
// are longest starts of a character among them: the way of Rust's from_utf8_lossy and of browsers.
func (d *Decoder) emit(text string) {
	d.held = append(d.held, text...)
	b := d.held
	for len(b) > 0 && utf8.FullRune(b) {
		r, n := utf8.DecodeRune(b)
		if r == utf8.RuneError && n == 1 {
			for n+1 < len(b) && !utf8.FullRune(b[:n+1]) {
				n++
			}
		}
		d.out = utf8.AppendRune(d.out, r)
		b = b[n:]
	}
	d.held = append(d.held[:0], b...)
}

// invert lists the tokens by their ids.
func (t *Tokenizer) invert() *texts {
	w := &texts{of: map[int32]string{}, special: map[int32]bool{}}
	t.model.each(func(token string, id int32) { w.of[id] = token })
	for text, id := range t.added {
		w.of[id] = text
	}
	for _, f := range []*finder{&t.raw, &t.normal} {
		for _, a := range f.tokens {
			w.special[a.ID] = a.Special
		}
	}
	return w
}
