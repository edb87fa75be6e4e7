package data

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/text/tokenizer"
)

// Bytes names the tokenizer that takes each byte as a token.
const Bytes = "bytes"

// ErrNoTokenizer reports text without a tokenizer.
var ErrNoTokenizer = errors.New("there is no tokenizer for its text")

// Tokenizer encodes text. It is loaded on first use, since token files need none.
type Tokenizer struct {
	path string // Bytes, the path of a tokenizer.json, or "" for none
	read func() (*tokenizer.Tokenizer, error)
}

// NewTokenizer names a tokenizer: "bytes", the path of a tokenizer.json, or "" for none. Its own tokens must fit a
// vocabulary of vocab ids, unless vocab is 0.
func NewTokenizer(path string, vocab int) *Tokenizer {
	return &Tokenizer{path, sync.OnceValues(func() (*tokenizer.Tokenizer, error) {
		t, err := LoadTokenizer(path)
		if err == nil && vocab > 0 && t.Base() > vocab {
			err = fmt.Errorf("it has %d tokens, and vocab_size is %d: it is another model's", t.Base(), vocab)
		}
		if err != nil {
			return nil, &TokenizerError{path, err}
		}
		return t, nil
	})}
}

// UseTokenizer wraps a loaded tokenizer.
func UseTokenizer(t *tokenizer.Tokenizer) *Tokenizer {
	return &Tokenizer{"given", func() (*tokenizer.Tokenizer, error) { return t, nil }}
}

// TokenizerError is a fault of the tokenizer's file, not of the data.
type TokenizerError struct {
	Path string // of the tokenizer.json
	Err  error  // its fault
}

func (e *TokenizerError) Error() string { return fmt.Sprintf("tokenizer %s: %v", e.Path, e.Err) }

func (e *TokenizerError) Unwrap() error { return e.Err }

// LoadTokenizer reads a tokenizer.json with the files beside it.
func LoadTokenizer(path string) (*tokenizer.Tokenizer, error) {
	t, err := tokenizer.Load(path)
	return t, cause(err)
}

// files lists the files that decide the ids; some may be absent.
func (t *Tokenizer) files() []string {
	if t == nil || t.path == "" || t.bytes() {
		return nil
	}
	return append(tokenizer.Beside(t.path), t.path)
}

// token names an id in errors.
func (t *Tokenizer) token(id int32) string {
	if tok, err := t.read(); err == nil {
		return fmt.Sprintf("token %.40q of %s, id %d,", tok.Token(id), terminal.Name(t.path), id)
	}
	return fmt.Sprintf("token id %d", id)
}

func (t *Tokenizer) bytes() bool { return t != nil && t.path == Bytes }

// An encoder appends the ids of a text. It is for one goroutine.
type encoder func(dst []int32, text string) ([]int32, error)

func (t *Tokenizer) encoder() (encoder, error) {
	switch {
	case t == nil || t.path == "":
		return nil, ErrNoTokenizer
	case t.path == Bytes:
		return func(dst []int32, text string) ([]int32, error) {
			for i := range len(text) {
				dst = append(dst, int32(text[i]))
			}
			return dst, nil
		}, nil
	}
	tok, err := t.read()
	if err != nil {
		return nil, err
	}
	e := tok.NewEncoder()
	return func(dst []int32, text string) ([]int32, error) {
		dst, err := e.Append(dst, text)
		if errors.Is(err, tokenizer.ErrUTF8) {
			from := "latin1"
			if strings.HasPrefix(text, "\xff\xfe") || strings.HasPrefix(text, "\xfe\xff") ||
				strings.Contains(text, "\x00") {
				from = "utf-16"
			}
			err = fmt.Errorf("%w; convert it, such as with iconv -f %s -t utf-8", err, from)
		}
		return dst, err
	}, nil
}

// Encode returns the ids of a text, like those of a document but without EOS.
func (t *Tokenizer) Encode(text string) ([]int32, error) {
	encode, err := t.encoder()
	if err != nil {
		return nil, err
	}
	return encode(nil, text)
}

// NewDecoder returns a decoder at the start of a text.
func (t *Tokenizer) NewDecoder() (*tokenizer.Decoder, error) {
	if t.bytes() {
		return tokenizer.NewByteDecoder(), nil
	}
	tok, err := t.read()
	if err != nil {
		return nil, err
	}
	d, err := tok.NewDecoder()
	if err != nil {
		return nil, &TokenizerError{t.path, err}
	}
	return d, nil
}

func openSized(path string) (*os.File, int64, error) {
	f, err := files.Open(path)
	if err != nil {
		return nil, 0, cause(err)
	}
	st, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, 0, cause(err)
	}
	return f, st.Size(), nil
}
