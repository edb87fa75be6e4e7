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

// tokenTexts holds the text of each token, by id.
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
		d.chain.take(text, true)
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

// A decoder is a chain of steps. Each step takes pieces of the output of the step before. begins marks the first piece
// of a token.

// A link is a step and all steps after it.
type link interface {
	take(piece string, begins bool)
}

// A step makes a link in front of the next one.
type step struct {
	make func(next link) link
	// fuses: its output is one token. whole: its input must be whole tokens.
	fuses, whole bool
	kind         string
}

type sink func(piece string)

func (s sink) take(piece string, _ bool) { s(piece) }

// fuseDecoder joins all tokens to one: Fuse.
type fuseDecoder struct {
	next link
	some bool
}

func (s *fuseDecoder) take(piece string, _ bool) {
	s.next.take(piece, !s.some)
	s.some = true
}

// byteLevelDecoder turns the characters of ByteRunes back into bytes: ByteLevel. It keeps a token with any other
// character.
type byteLevelDecoder struct{ fuseDecoder }

var runeBytes = func() map[rune]byte {
	t := map[rune]byte{}
	for b, r := range ByteRunes {
		t[r] = byte(b)
	}
	return t
}()

func (s *byteLevelDecoder) take(token string, begins bool) {
	b := make([]byte, 0, len(token))
	for _, r := range token {
		x, ok := runeBytes[r]
		if !ok {
			b = append(b[:0], token...)
			break
		}
		b = append(b, x)
	}
	s.fuseDecoder.take(string(b), begins)
}

// byteFallbackDecoder turns <0x41> into its byte: ByteFallback.
type byteFallbackDecoder struct{ next link }

func (s byteFallbackDecoder) take(token string, begins bool) {
	if len(token) == 6 && strings.HasPrefix(token, "<0x") && token[5] == '>' {
		if b, err := strconv.ParseUint(token[3:5], 16, 8); err == nil {
			token = string([]byte{byte(b)})
		}
	}
	s.next.take(token, begins)
}

// replaceDecoder replaces a pattern in each token: Replace.
type replaceDecoder struct {
	next    link
	by      replace
	matcher matcher
}

func (s *replaceDecoder) take(token string, begins bool) {
	// On an error of the pattern the token stays as it is.
	if p, err := s.by.normalize(&s.matcher, piece{token, true}); err == nil {
		token = p.text
	}
	s.next.take(token, begins)
}

// stripDecoder removes up to start and stop copies of a character at the ends of each token: Strip.
type stripDecoder struct {
	next        link
	char        string
	start, stop int
	left        int // characters still to remove at the start of this token
}

func (s *stripDecoder) take(piece string, begins bool) {
	if begins {
		s.left = s.start
	}
	for s.left > 0 && strings.HasPrefix(piece, s.char) {
		piece, s.left = piece[len(s.char):], s.left-1
	}
	if piece != "" {
		s.left = 0
	}
	for range s.stop {
		piece = strings.TrimSuffix(piece, s.char)
	}
	s.next.take(piece, begins)
}

// metaspaceDecoder turns marks into spaces: Metaspace.
type metaspaceDecoder struct {
	next  link
	mark  string
	drops bool // remove the marks of the first token, which the pre-tokenizer added
	some  bool
}

func (s *metaspaceDecoder) take(token string, begins bool) {
	space := " "
	if s.drops && !s.some {
		space = ""
	}
	s.some = true
	s.next.take(strings.ReplaceAll(token, s.mark, space), begins)
}

// wordPieceDecoder puts a space before tokens that begin a word: WordPiece.
type wordPieceDecoder struct {
	next   link
	prefix string
	tidy   bool
	some   bool
}

// cleanups lists the replacements with which the library cleans up spaces in English text.
var cleanups = [][2]string{
	{" .", "."}, {" ?", "?"}, {" !", "!"}, {" ,", ","}, {" ' ", "'"}, {" n't", "n't"}, {" 'm", "'m"},
	{" do not", " don't"}, {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"},
}

func (s *wordPieceDecoder) take(token string, begins bool) {
	if s.some {
		if rest, ok := strings.CutPrefix(token, s.prefix); ok {
			token = rest
		} else {
			token = " " + token
		}
	}
	s.some = true
	if s.tidy {
		for _, t := range cleanups {
			token = strings.ReplaceAll(token, t[0], t[1])
		}
	}
	s.next.take(token, begins)
}

// bpeDecoder turns the end-of-word suffix into a space before the next word: BPEDecoder.
type bpeDecoder struct {
	next   link
	suffix string
	owed   string // the space, once a word follows
}

func (s *bpeDecoder) take(token string, begins bool) {
	if s.owed != "" {
		s.next.take(s.owed, true)
	}
	s.owed = ""
	if rest, ok := strings.CutSuffix(token, s.suffix); ok {
		token, s.owed = rest, " "
	}
	s.next.take(strings.ReplaceAll(token, s.suffix, " "), begins)
}

// spaceDecoder puts a space between tokens, for a file without a decoder.
type spaceDecoder struct {
	next link
	some bool
}

func (s *spaceDecoder) take(token string, begins bool) {
	if s.some {
		s.next.take(" ", true)
	}
	s.some = true
	s.next.take(token, begins)
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

// parseDecoder reads a decoder as a list of steps.
func parseDecoder(raw json.RawMessage, depth int) ([]step, error) {
	if isNull(raw) {
		return []step{{kind: "null", make: func(next link) link { return &spaceDecoder{next: next} }}}, nil
	}
	kind, err := kindOf(raw, depth)
	if err != nil {
		return nil, err
	}
	var k decoderFile
	if err := json.Unmarshal(raw, &k); err != nil {
		return nil, inComponent(kind, err)
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
		return step{fuses: true, whole: true, make: func(next link) link {
			return &byteLevelDecoder{fuseDecoder{next: next}}
		}}, nil
	case "Fuse":
		return step{fuses: true, make: func(next link) link { return &fuseDecoder{next: next} }}, nil
	case "ByteFallback":
		return step{whole: true, make: func(next link) link { return byteFallbackDecoder{next} }}, nil
	case "Replace":
		by, err := newReplace(k.Pattern, k.Content)
		return step{whole: !oneChar(by.pattern.literal), make: func(next link) link {
			return &replaceDecoder{next: next, by: by}
		}}, err
	case "Strip":
		if k.Content == nil || !oneChar(*k.Content) || k.Start < 0 || k.Stop < 0 || k.Start > maxTrim ||
			k.Stop > maxTrim {
			return step{}, fmt.Errorf("want one character as content, and start and stop from 0 to %d", maxTrim)
		}
		return step{whole: k.Stop > 0, make: func(next link) link {
			return &stripDecoder{next: next, char: *k.Content, start: k.Start, stop: k.Stop}
		}}, nil
	case "Metaspace":
		c, err := newMetaspace(k.Replacement, k.PrependScheme, k.AddPrefixSpace, false)
		if err != nil {
			return step{}, err
		}
		m := c.(*metaspace)
		return step{whole: true, make: func(next link) link {
			return &metaspaceDecoder{next: next, mark: m.mark, drops: m.scheme != "never"}
		}}, nil
	case "WordPiece":
		return step{whole: true, make: func(next link) link {
			return &wordPieceDecoder{next: next, prefix: or(k.Prefix, "##"), tidy: or(k.Cleanup, true)}
		}}, nil
	case "BPEDecoder":
		suffix := or(k.Suffix, "</w>")
		if suffix == "" {
			return step{}, errors.New("an empty suffix")
		}
		return step{whole: true, make: func(next link) link { return &bpeDecoder{next: next, suffix: suffix} }}, nil
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
	chain := link(sink(emit))
	for i := len(steps) - 1; i >= 0; i-- {
		chain = steps[i].make(chain)
	}
	return chain, nil
}
