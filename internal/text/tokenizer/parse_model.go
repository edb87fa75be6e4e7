package tokenizer

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
)

type modelFile struct {
	Type         string          `json:"type"`
	Vocab        json.RawMessage `json:"vocab"`
	Merges       json.RawMessage `json:"merges"`
	Dropout      *float64        `json:"dropout"`
	UnkToken     *string         `json:"unk_token"`
	Prefix       *string         `json:"continuing_subword_prefix"`
	Suffix       *string         `json:"end_of_word_suffix"`
	FuseUnk      *bool           `json:"fuse_unk"`
	ByteFallback *bool           `json:"byte_fallback"`
	IgnoreMerges *bool           `json:"ignore_merges"`
	MaxRunes     *int            `json:"max_input_chars_per_word"`
	UnkID        *int            `json:"unk_id"`
	Alpha        *float64        `json:"alpha"`
}

func parseModel(raw json.RawMessage) (model, error) {
	if isNull(raw) {
		return nil, errors.New("it is missing")
	}
	var m modelFile
	if err := json.Unmarshal(raw, &m); err != nil {
		return nil, err
	}
	if m.Type == "" { // files of 2020 and earlier
		switch vocab := strings.TrimSpace(string(m.Vocab)); {
		case !isNull(m.Merges):
			m.Type = "BPE"
		case strings.HasPrefix(vocab, "["):
			m.Type = "Unigram"
		default:
			return nil, errors.New("it has no type")
		}
	}
	switch m.Type {
	case "BPE":
		b, err := m.bpe()
		return b, inComponent(m.Type, err)
	case "Unigram":
		u, err := m.unigram()
		return u, inComponent(m.Type, err)
	case "WordPiece":
		w, err := m.wordPiece()
		return w, inComponent(m.Type, err)
	case "WordLevel":
		v, err := m.vocabulary()
		return &wordLevel{v, or(m.UnkToken, "<unk>")}, inComponent(m.Type, err)
	}
	return nil, fmt.Errorf("the type %.40q is not known; BPE, Unigram, WordPiece and WordLevel are", m.Type)
}

func or[T any](p *T, missing T) T {
	if p == nil {
		return missing
	}
	return *p
}

// vocabulary reads {"token": id}.
func (m *modelFile) vocabulary() (vocabulary, error) {
	var v vocabulary
	if isNull(m.Vocab) {
		return nil, errors.New("vocab is missing")
	}
	if err := json.Unmarshal(m.Vocab, &v); err != nil {
		return nil, fmt.Errorf("vocab: %w", err)
	}
	return v, v.check()
}

func (m *modelFile) bpe() (*bpe, error) {
	if m.Dropout != nil && *m.Dropout != 0 {
		return nil, fmt.Errorf("dropout %v: ids would be drawn at random; set it to null", *m.Dropout)
	}
	v, err := m.vocabulary()
	if err != nil {
		return nil, err
	}
	pairs, err := readMerges(m.Merges)
	if err != nil {
		return nil, err
	}
	b := &bpe{
		vocabulary: v, unk: m.UnkToken, prefix: or(m.Prefix, ""), suffix: or(m.Suffix, ""),
		fuseUnk: or(m.FuseUnk, false), fallback: or(m.ByteFallback, false), ignoreMerges: or(m.IgnoreMerges, false),
	}
	return b, b.init(pairs)
}

// readMerges reads pairs, or the older form: two tokens separated by a space.
func readMerges(raw json.RawMessage) ([][2]string, error) {
	if isNull(raw) {
		return nil, errors.New("merges are missing")
	}
	var lines []string
	if json.Unmarshal(raw, &lines) == nil {
		pairs := make([][2]string, 0, len(lines))
		for n, line := range lines {
			if strings.HasPrefix(line, "#version") {
				continue
			}
			left, right, ok := strings.Cut(line, " ")
			if !ok || strings.Contains(right, " ") {
				return nil, fmt.Errorf("merge %d: %.40q is not two tokens", n, line)
			}
			pairs = append(pairs, [2]string{left, right})
		}
		return pairs, nil
	}
	var lists [][]string
	if err := json.Unmarshal(raw, &lists); err != nil {
		return nil, fmt.Errorf("merges: %w", err)
	}
	pairs := make([][2]string, len(lists))
	for n, l := range lists {
		if len(l) != 2 {
			return nil, fmt.Errorf("merge %d has %d tokens", n, len(l))
		}
		pairs[n] = [2]string(l)
	}
	return pairs, nil
}

func (m *modelFile) unigram() (*unigram, error) {
	if m.Alpha != nil && *m.Alpha != 0 {
		return nil, fmt.Errorf("alpha %v: ids would be drawn at random; set it to null", *m.Alpha)
	}
	var entries [][2]json.RawMessage
	if err := json.Unmarshal(m.Vocab, &entries); err != nil {
		return nil, fmt.Errorf("vocab: %w", err)
	}
	tokens, scores := make([]string, len(entries)), make([]float64, len(entries))
	for i, e := range entries {
		if err := errors.Join(json.Unmarshal(e[0], &tokens[i]), json.Unmarshal(e[1], &scores[i])); err != nil {
			return nil, fmt.Errorf("vocab, entry %d: %w", i, err)
		}
		if err := checkLength(tokens[i]); err != nil {
			return nil, err
		}
	}
	unk := or(m.UnkID, -1)
	if len(entries) > math.MaxInt32 || m.UnkID != nil && (unk < 0 || unk >= len(entries)) {
		return nil, fmt.Errorf("unk_id %d of %d tokens", unk, len(entries))
	}
	return newUnigram(tokens, scores, int32(unk), or(m.ByteFallback, false)), nil
}

func (m *modelFile) wordPiece() (*wordPiece, error) {
	v, err := m.vocabulary()
	if err != nil {
		return nil, err
	}
	w := &wordPiece{vocabulary: v, unk: or(m.UnkToken, "[UNK]"), prefix: or(m.Prefix, "##"),
		maxRunes: or(m.MaxRunes, 100)}
	for token := range v {
		if err := checkLength(token); err != nil {
			return nil, err
		}
		w.longest = max(w.longest, len(token))
	}
	return w, nil
}
