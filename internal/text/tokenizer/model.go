package tokenizer

import (
	"fmt"
	"unicode/utf8"
)

// A model turns a word into ids. Its tables never change; the memory of a call is in work.
type model interface {
	// encode appends the ids of a word that is not empty.
	encode(w *work, dst []int32, word string) ([]int32, error)
	// tokens returns the ids of tokens by their texts.
	tokens() vocabulary
	// size returns the number of tokens.
	size() int
	// top returns the highest id.
	top() int32
}

// work holds memory that a model reuses from word to word.
type work struct {
	matcher
	symbols []symbol
	queue   []candidate
	nodes   []pathNode
	ids     []int32
}

type vocabulary map[string]int32

func (v vocabulary) tokens() vocabulary { return v }

func (v vocabulary) size() int { return len(v) }

func (v vocabulary) top() (most int32) {
	for _, id := range v {
		most = max(most, id)
	}
	return most
}

// check refuses negative ids and ids that two tokens share.
func (v vocabulary) check() error {
	seen := make(map[int32]string, len(v))
	for token, id := range v {
		if id < 0 {
			return fmt.Errorf("the token %.40q has the id %d", token, id)
		}
		if other, ok := seen[id]; ok {
			return fmt.Errorf("the tokens %.40q and %.40q have the same id %d", min(token, other), max(token, other),
				id)
		}
		seen[id] = token
	}
	return nil
}

// maxToken bounds the length in bytes of tokens that are searched for at each place of a text.
const maxToken = 1024

// checkLength refuses a token longer than maxToken.
func checkLength(token string) error {
	if len(token) > maxToken {
		return fmt.Errorf("the token %.40q… has %d bytes; at most %d are looked for", token, len(token), maxToken)
	}
	return nil
}

// byteTokens returns the ids of <0x00> to <0xFF>. ok: all exist.
func (v vocabulary) byteTokens() (ids [256]int32, ok bool) {
	ok = true
	for b := range ids {
		id, is := v[fmt.Sprintf("<0x%02X>", b)]
		if ids[b] = id; !is {
			ids[b], ok = -1, false
		}
	}
	return ids, ok
}

// appendBytes appends the tokens of the bytes of a text, if all exist.
func appendBytes(dst []int32, ids *[256]int32, text string) ([]int32, bool) {
	start := len(dst)
	for i := range len(text) {
		id := ids[text[i]]
		if id < 0 {
			return dst[:start], false
		}
		dst = append(dst, id)
	}
	return dst, true
}

// A wordLevel is a model with one id for each word.
type wordLevel struct {
	vocabulary
	unk string
}

func (w *wordLevel) encode(_ *work, dst []int32, word string) ([]int32, error) {
	id, ok := w.vocabulary[word]
	if !ok {
		if id, ok = w.vocabulary[w.unk]; !ok {
			return dst, fmt.Errorf("%.40q is no token, and neither is unk_token %.40q", word, w.unk)
		}
	}
	return append(dst, id), nil
}

// A wordPiece is BERT's model: the longest token at the start of the word, then the longest that continues it.
type wordPiece struct {
	vocabulary
	unk, prefix string
	maxRunes    int // of a word; longer words are unknown
	longest     int // token, in bytes
}

func (w *wordPiece) encode(_ *work, dst []int32, word string) ([]int32, error) {
	start, count := len(dst), utf8.RuneCountInString(word)
	for at := 0; at < len(word) && count <= w.maxRunes; {
		end, id := w.next(word, at)
		if end < 0 {
			count = w.maxRunes + 1
			break
		}
		dst, at = append(dst, id), end
	}
	if count <= w.maxRunes {
		return dst, nil
	}
	id, ok := w.vocabulary[w.unk]
	if !ok {
		return dst, fmt.Errorf("%.40q is unknown, and unk_token %.40q is no token", word, w.unk)
	}
	return append(dst[:start], id), nil
}

func (w *wordPiece) next(word string, at int) (end int, id int32) {
	prefix := ""
	if at > 0 {
		prefix = w.prefix
	}
	for end = min(len(word), at+w.longest); end > at; end-- {
		if end < len(word) && word[end]&0xc0 == 0x80 { // inside a rune
			continue
		}
		if id, ok := w.vocabulary[prefix+word[at:end]]; ok {
			return end, id
		}
	}
	return -1, 0
}
