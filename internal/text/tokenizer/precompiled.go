package tokenizer

import (
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/rivo/uniseg"
)

// A precompiled is sentencepiece's map of characters: a trie of texts (a double array of darts-clone) with the offsets
// of their replacements.
type precompiled struct {
	trie  []uint32
	texts string // each ends with a 0 byte
}

func newPrecompiled(charsmap string) (*precompiled, error) {
	raw, err := base64.StdEncoding.DecodeString(charsmap)
	if err != nil {
		return nil, fmt.Errorf("precompiled_charsmap is not base64: %w", err)
	}
	if len(raw) < 4 {
		return nil, errors.New("precompiled_charsmap is too short")
	}
	size := binary.LittleEndian.Uint32(raw)
	if raw = raw[4:]; uint64(size) > uint64(len(raw)) || size%4 != 0 || size == 0 {
		return nil, fmt.Errorf("precompiled_charsmap: a trie of %d bytes in %d", size, len(raw))
	}
	p := &precompiled{texts: string(raw[size:])}
	for at := uint32(0); at < size; at += 4 {
		p.trie = append(p.trie, binary.LittleEndian.Uint32(raw[at:]))
	}
	for text := range strings.SplitSeq(p.texts, "\x00") {
		if len(text) > maxReplacement {
			return nil, fmt.Errorf("precompiled_charsmap: a text of %d bytes replaces one; at most %d are read",
				len(text), maxReplacement)
		}
	}
	if !utf8.ValidString(p.texts) {
		return nil, errors.New("precompiled_charsmap: its texts are not UTF-8")
	}
	return p, nil
}

// find returns the replacement of the shortest text of the map at the start of s.
func (p *precompiled) find(s string) (string, bool) {
	offset := func(unit uint32) uint32 { return unit >> 10 << (unit & (1 << 9) >> 6) }
	at := offset(p.trie[0])
	for i := 0; i < len(s) && s[i] != 0; i++ {
		at ^= uint32(s[i])
		if uint64(at) >= uint64(len(p.trie)) {
			return "", false
		}
		unit := p.trie[at]
		if unit&(1<<31|0xff) != uint32(s[i]) {
			return "", false
		}
		if at ^= offset(unit); uint64(at) >= uint64(len(p.trie)) {
			return "", false
		}
		if unit>>8&1 == 0 {
			continue
		}
		from := p.trie[at] &^ (1 << 31)
		if uint64(from) > uint64(len(p.texts)) || int(from) < len(p.texts) && !utf8.RuneStart(p.texts[from]) {
			return "", false
		}
		text, _, _ := strings.Cut(p.texts[from:], "\x00")
		return text, true
	}
	return "", false
}

// maxReplacement bounds a replacement. The longest of sentencepiece has 33 bytes.
const maxReplacement = 1024

// maxCluster bounds the grapheme clusters that are looked up whole.
const maxCluster = 5

func (p *precompiled) normalize(_ *matcher, in piece) (piece, error) {
	var b strings.Builder
	s, state := in.text, -1
	for s != "" {
		cluster := s[:1]
		if len(s) > 1 && (s[0] >= utf8.RuneSelf || s[1] >= utf8.RuneSelf || s[0] == '\r') {
			cluster, s, _, state = uniseg.FirstGraphemeClusterInString(s, state)
		} else {
			s, state = s[1:], -1
			if cluster[0] >= utf8.RuneSelf {
				return in, errors.New("the text is not UTF-8")
			}
		}
		if len(cluster) <= maxCluster {
			if to, ok := p.find(cluster); ok {
				b.WriteString(to)
				if err := checkGrowth(len(in.text), b.Len()); err != nil {
					return in, err
				}
				continue
			}
		}
		for i, r := range cluster {
			c := cluster[i : i+utf8.RuneLen(r)]
			if to, ok := p.find(c); ok {
				b.WriteString(to)
			} else {
				b.WriteString(c)
			}
		}
		if err := checkGrowth(len(in.text), b.Len()); err != nil {
			return in, err
		}
	}
	in.text = b.String()
	return in, nil
}
