package tokenizer

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Decoder turns ids into text one by one, as a model generates them. The text equals the decode of the Python library
// with skip_special_tokens, with one exception: an incomplete character becomes one U+FFFD and the bytes around it
// stay. It is not for concurrent use.
type Decoder struct {
	bytes bool // each id is a byte
	words *texts
	chain link
	held  []byte // the start of an incomplete character
	out   []byte
}

// A texts has the text of each token, by id.
type texts struct {
	of      map[int32]string
	special map[int32]bool // without text
}

// NewDecoder returns a decoder at the start of a text. It refuses an unknown decoder in the file by name.
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

// Append appends the text of an id, in whole characters. Unknown ids and special tokens have no text.
func (d *Decoder) Append(dst []byte, id int32) []byte {
	d.out = dst
	if d.bytes {
		if id >= 0 && id <= 255 {
			d.emit(string([]byte{byte(id)}))
		}
	} else if text, ok := d.words.of[id]; ok && !d.words.special[id] {
		d.chain(text, true)
	}
	return d.taken()
}

// Flush ends a text: it appends U+FFFD for an incomplete character.
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

// emit passes on complete characters. Invalid bytes become U+FFFD, one for each longest start of a character, as in
// Rust's from_utf8_lossy and in browsers.
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

func (t *Tokenizer) invert() *texts {
	w := &texts{of: map[int32]string{}, special: map[int32]bool{}}
	for token, id := range t.model.tokens() {
		w.of[id] = token
	}
	for _, f := range []*finder{&t.raw, &t.normal} {
		for _, a := range f.tokens {
			w.of[a.ID], w.special[a.ID] = a.text, a.Special
		}
	}
	return w
}

// A decoder is a chain of steps. Each step takes pieces of the output of the step before.

// A link takes a piece of text, for a step and all steps after it. begins marks the first piece of a token.
type link func(piece string, begins bool)

// A step makes a link in front of the next one.
type step struct {
	make func(next link) link
	// fuses: its output is one token. whole: its input must be whole tokens.
	fuses, whole bool
	kind         string
}

// perToken returns the links of a step that rewrites each token; first marks the first one.
func perToken(rewrite func(token string, first bool) string) func(next link) link {
	return func(next link) link {
		some := false
		return func(token string, begins bool) {
			first := !some
			some = true
			next(rewrite(token, first), begins)
		}
	}
}

// fuse joins all tokens to one: Fuse.
func fuse(next link) link {
	some := false
	return func(piece string, _ bool) {
		next(piece, !some)
		some = true
	}
}

var runeBytes = func() map[rune]byte {
	t := map[rune]byte{}
	for b, r := range ByteRunes {
		t[r] = byte(b)
	}
	return t
}()

// hiddenBytes turns the characters of ByteRunes back into bytes: ByteLevel. It keeps a token with any other character.
func hiddenBytes(token string, _ bool) string {
	b := make([]byte, 0, len(token))
	for _, r := range token {
		x, ok := runeBytes[r]
		if !ok {
			return token
		}
		b = append(b, x)
	}
	return string(b)
}

// fallbackByte turns <0x41> into its byte: ByteFallback.
func fallbackByte(token string, _ bool) string {
	if len(token) == 6 && strings.HasPrefix(token, "<0x") && token[5] == '>' {
		if b, err := strconv.ParseUint(token[3:5], 16, 8); err == nil {
			return string([]byte{byte(b)})
		}
	}
	return token
}

// stripped removes up to start and stop copies of a character at the ends of each token: Strip.
func stripped(char string, start, stop int) func(next link) link {
	return func(next link) link {
		left := 0 // characters still to remove at the start of this token
		return func(piece string, begins bool) {
			if begins {
				left = start
			}
			for left > 0 && strings.HasPrefix(piece, char) {
				piece, left = piece[len(char):], left-1
			}
			if piece != "" {
				left = 0
			}
			for range stop {
				piece = strings.TrimSuffix(piece, char)
			}
			next(piece, begins)
		}
	}
}

// cleanups lists the replacements with which the library cleans up spaces in English text.
var cleanups = [][2]string{
	{" .", "."}, {" ?", "?"}, {" !", "!"}, {" ,", ","}, {" ' ", "'"}, {" n't", "n't"}, {" 'm", "'m"},
	{" do not", " don't"}, {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"},
}

// spacedWord puts a space before a token that begins a word: WordPiece.
func spacedWord(token, prefix string, tidy, first bool) string {
	if rest, ok := strings.CutPrefix(token, prefix); ok && !first {
		token = rest
	} else if !first {
		token = " " + token
	}
	for _, t := range cleanups {
		if tidy {
			token = strings.ReplaceAll(token, t[0], t[1])
		}
	}
	return token
}

// endOfWords turns the end-of-word suffix into a space before the next word: BPEDecoder.
func endOfWords(suffix string) func(next link) link {
	return func(next link) link {
		owed := "" // the space, once a word follows
		return func(token string, begins bool) {
			if owed != "" {
				next(owed, true)
			}
			owed = ""
			if rest, ok := strings.CutSuffix(token, suffix); ok {
				token, owed = rest, " "
			}
			next(strings.ReplaceAll(token, suffix, " "), begins)
		}
	}
}

// spaced puts a space between tokens, for a file without a decoder.
func spaced(token string, first bool) string {
	if first {
		return token
	}
	return " " + token
}

// oneChar reports whether a text is one character. No border between pieces divides one.
func oneChar(s string) bool { return utf8.RuneCountInString(s) == 1 }

const maxTrim = 1 << 10

type decoderFile struct {
	Decoders       []json.RawMessage `json:"decoders"`
	Pattern        map[string]string `json:"pattern"`
	Content        *string           `json:"content"`
	Start          int               `json:"start"`
	Stop           int               `json:"stop"`
	Replacement    string            `json:"replacement"`
	PrependScheme  string            `json:"prepend_scheme"`
	AddPrefixSpace *bool             `json:"add_prefix_space"`
	Prefix         *string           `json:"prefix"`
	Cleanup        *bool             `json:"cleanup"`
	Suffix         *string           `json:"suffix"`
}

func parseDecoder(raw json.RawMessage, depth int) ([]step, error) {
	if isNull(raw) {
		return []step{{kind: "null", make: perToken(spaced)}}, nil
	}
	var k decoderFile
	kind, err := component(raw, depth, &k)
	if err != nil {
		return nil, err
	}
	if kind == "Sequence" {
		all, err := sequence(k.Decoders, depth, parseDecoder)
		return slices.Concat(all...), err
	}
	s, err := k.step(kind)
	s.kind = kind
	return []step{s}, inComponent(kind, err)
}

func (k *decoderFile) step(kind string) (step, error) {
	switch kind {
	case "ByteLevel":
		bytes := perToken(hiddenBytes)
		return step{fuses: true, whole: true, make: func(next link) link { return bytes(fuse(next)) }}, nil
	case "Fuse":
		return step{fuses: true, make: fuse}, nil
	case "ByteFallback":
		return step{whole: true, make: perToken(fallbackByte)}, nil
	case "Replace":
		by, err := newReplace(k.Pattern, k.Content)
		var m matcher
		return step{whole: !oneChar(by.pattern.literal), make: perToken(func(token string, _ bool) string {
			// On an error of the pattern the token stays as it is.
			if p, err := by.normalize(&m, piece{token, true}); err == nil {
				token = p.text
			}
			return token
		})}, err
	case "Strip":
		if k.Content == nil || !oneChar(*k.Content) || k.Start < 0 || k.Stop < 0 || k.Start > maxTrim ||
			k.Stop > maxTrim {
			return step{}, fmt.Errorf("want one character as content, and start and stop from 0 to %d", maxTrim)
		}
		return step{whole: k.Stop > 0, make: stripped(*k.Content, k.Start, k.Stop)}, nil
	case "Metaspace":
		m, err := newMetaspace(k.Replacement, k.PrependScheme, k.AddPrefixSpace, false)
		return step{whole: true, make: perToken(func(token string, first bool) string {
			if first && m.scheme != "never" { // the pre-tokenizer added these marks
				return strings.ReplaceAll(token, m.mark, "")
			}
			return strings.ReplaceAll(token, m.mark, " ")
		})}, err
	case "WordPiece":
		prefix, tidy := or(k.Prefix, "##"), or(k.Cleanup, true)
		return step{whole: true, make: perToken(func(token string, first bool) string {
			return spacedWord(token, prefix, tidy, first)
		})}, nil
	case "BPEDecoder":
		suffix := or(k.Suffix, "</w>")
		if suffix == "" {
			return step{}, errors.New("an empty suffix")
		}
		return step{whole: true, make: endOfWords(suffix)}, nil
	}
	return step{}, fmt.Errorf("the type %.40q is not known", kind)
}

// joined returns the steps as a chain that ends in emit. It refuses a step with whole tokens as input after one that
// fuses all tokens: it would have to wait for the end of the text.
func joined(steps []step, emit func(string)) (link, error) {
	fused := ""
	for _, s := range steps {
		if fused != "" && s.whole {
			return nil, fmt.Errorf("%s behind %s: it would have to see the whole text, which comes token by token here",
				s.kind, fused)
		}
		if s.fuses {
			fused = s.kind
		}
	}
	chain := func(piece string, _ bool) { emit(piece) }
	for _, s := range slices.Backward(steps) {
		chain = s.make(chain)
	}
	return chain, nil
}
