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

// The steps of a decoder. Each takes the output of the one before, in pieces: begins says that a piece
// begins a token, as the next step counts them, and does not go on with the one before.

// A link is a step with all that follow it.
type link interface {
	take(piece string, begins bool)
}

// step puts a step in front of the next.
type step struct {
	make func(next link) link
	// fuses: its output is one token. whole: it must see whole tokens.
	fuses, whole bool
	kind         string
}

type sink func(piece string)

func (s sink) take(piece string, _ bool) { s(piece) }

// asOne gives all that comes as one token: Fuse.
type asOne struct {
	next link
	some bool
}

func (s *asOne) take(piece string, _ bool) {
	s.next.take(piece, !s.some)
	s.some = true
}

// unseen turns characters that stand for bytes back into these: ByteLevel. A token with any other
// character stays as it is.
type unseen struct{ asOne }

var runeBytes = func() map[rune]byte {
	t := map[rune]byte{}
	for b, r := range ByteRunes {
		t[r] = byte(b)
	}
	return t
}()

func (s *unseen) take(token string, begins bool) {
	b := make([]byte, 0, len(token))
	for _, r := range token {
		x, ok := runeBytes[r]
		if !ok {
			b = append(b[:0], token...)
			break
		}
		b = append(b, x)
	}
	s.asOne.take(string(b), begins)
}

// byteNames turns <0x41> into the byte: ByteFallback.
type byteNames struct{ next link }

func (s byteNames) take(token string, begins bool) {
	if len(token) == 6 && strings.HasPrefix(token, "<0x") && token[5] == '>' {
		if b, err := strconv.ParseUint(token[3:5], 16, 8); err == nil {
			token = string([]byte{byte(b)})
		}
	}
	s.next.take(token, begins)
}

// replaced puts a text in place of a pattern in each token: Replace.
type replaced struct {
	next    link
	by      replace
	matcher matcher
}

func (s *replaced) take(token string, begins bool) {
	// else it is a token that no pattern gets through
	if p, err := s.by.normalize(&s.matcher, piece{token, true}); err == nil {
		token = p.text
	}
	s.next.take(token, begins)
}

// trimmed takes a character off the ends of each token, up to a number of times: Strip.
type trimmed struct {
	next        link
	char        string
	start, stop int
	left        int // characters to take off the start of this token
}

func (s *trimmed) take(piece string, begins bool) {
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

// spaced turns marks into spaces: Metaspace.
type spaced struct {
	next  link
	mark  string
	drops bool // the marks of the first token, which the pre-tokenizer has put there
	some  bool
}

func (s *spaced) take(token string, begins bool) {
	space := " "
	if s.drops && !s.some {
		space = ""
	}
	s.some = true
	s.next.take(strings.ReplaceAll(token, s.mark, space), begins)
}

// continued puts a space in front of tokens that do not continue a word: WordPiece.
type continued struct {
	next   link
	prefix string
	tidy   bool
	some   bool
}

// tidied is how the library cleans English of the spaces of tokens.
var tidied = [][2]string{
	{" .", "."}, {" ?", "?"}, {" !", "!"}, {" ,", ","}, {" ' ", "'"}, {" n't", "n't"}, {" 'm", "'m"},
	{" do not", " don't"}, {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"},
}

func (s *continued) take(token string, begins bool) {
	if s.some {
		if rest, ok := strings.CutPrefix(token, s.prefix); ok {
			token = rest
		} else {
			token = " " + token
		}
	}
	s.some = true
	if s.tidy {
		for _, t := range tidied {
			token = strings.ReplaceAll(token, t[0], t[1])
		}
	}
	s.next.take(token, begins)
}

// ended turns what ends a word into a space before the next: BPEDecoder.
type ended struct {
	next   link
	suffix string
	owed   string // the space, once there is a next word
}

func (s *ended) take(token string, begins bool) {
	if s.owed != "" {
		s.next.take(s.owed, true)
	}
	s.owed = ""
	if rest, ok := strings.CutSuffix(token, s.suffix); ok {
		token, s.owed = rest, " "
	}
	s.next.take(strings.ReplaceAll(token, s.suffix, " "), begins)
}

// apart puts a space between tokens: a file without a decoder.
type apart struct {
	next link
	some bool
}

func (s *apart) take(token string, begins bool) {
	if s.some {
		s.next.take(" ", true)
	}
	s.some = true
	s.next.take(token, begins)
}

// oneChar reports whether a text is one character, which no cut between pieces can divide.
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

// parseDecoder reads a decoder as the steps that it is made of.
func parseDecoder(raw json.RawMessage, depth int) ([]step, error) {
	if null(raw) {
		return []step{{kind: "null", make: func(next link) link { return &apart{next: next} }}}, nil
	}
	kind, err := kindOf(raw, depth)
	if err != nil {
		return nil, err
	}
	var k decoderFile
	if err := json.Unmarshal(raw, &k); err != nil {
		return nil, named(kind, err)
	}
	if kind == "Sequence" {
		all, err := sequence(k.Decoders, depth, parseDecoder)
		return slices.Concat(all...), err
	}
	s, err := k.step(kind)
	s.kind = kind
	return []step{s}, named(kind, err)
}

func (k *decoderFile) step(kind string) (step, error) {
	switch kind {
	case "ByteLevel":
		return step{fuses: true, whole: true, make: func(next link) link { return &unseen{asOne{next: next}} }}, nil
	case "Fuse":
		return step{fuses: true, make: func(next link) link { return &asOne{next: next} }}, nil
	case "ByteFallback":
		return step{whole: true, make: func(next link) link { return byteNames{next} }}, nil
	case "Replace":
		by, err := newReplace(k.Pattern, k.Content)
		return step{whole: !oneChar(by.pattern.literal), make: func(next link) link {
			return &replaced{next: next, by: by}
		}}, err
	case "Strip":
		if k.Content == nil || !oneChar(*k.Content) || k.Start < 0 || k.Stop < 0 || k.Start > maxTrim ||
			k.Stop > maxTrim {
			return step{}, fmt.Errorf("want one character as content, and start and stop from 0 to %d", maxTrim)
		}
		return step{whole: k.Stop > 0, make: func(next link) link {
			return &trimmed{next: next, char: *k.Content, start: k.Start, stop: k.Stop}
		}}, nil
	case "Metaspace":
		c, err := newMetaspace(k.Replacement, k.PrependScheme, k.AddPrefixSpace, false)
		if err != nil {
			return step{}, err
		}
		m := c.(*metaspace)
		return step{whole: true, make: func(next link) link {
			return &spaced{next: next, mark: m.mark, drops: m.scheme != "never"}
		}}, nil
	case "WordPiece":
		return step{whole: true, make: func(next link) link {
			return &continued{next: next, prefix: or(k.Prefix, "##"), tidy: or(k.Cleanup, true)}
		}}, nil
	case "BPEDecoder":
		suffix := or(k.Suffix, "</w>")
		if suffix == "" {
			return step{}, errors.New("an empty suffix")
		}
		return step{whole: true, make: func(next link) link { return &ended{next: next, suffix: suffix} }}, nil
	}
	return step{}, fmt.Errorf("the type %.40q is not known", kind)
}

// joined returns the steps as a chain that ends in emit. A step that has to see whole tokens cannot stand
// behind one that makes one token of all: it would have to wait for the end of the text.
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
