package tokenizer

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
)

func parseNormalizer(raw json.RawMessage, depth int) (normalizer, error) {
	var k struct {
		Normalizers        []json.RawMessage `json:"normalizers"`
		StripLeft          bool              `json:"strip_left"`
		StripRight         bool              `json:"strip_right"`
		Prepend            *string           `json:"prepend"`
		Pattern            map[string]string `json:"pattern"`
		Content            *string           `json:"content"`
		Charsmap           string            `json:"precompiled_charsmap"`
		CleanText          bool              `json:"clean_text"`
		HandleChineseChars bool              `json:"handle_chinese_chars"`
		StripAccents       *bool             `json:"strip_accents"`
		Lowercase          bool              `json:"lowercase"`
	}
	kind, err := component(raw, depth, &k)
	if err != nil {
		return nil, err
	}
	switch kind {
	case "Sequence":
		all, err := sequence(k.Normalizers, depth, parseNormalizer)
		return normalizers(all), err
	case "NFC", "NFD", "NFKC", "NFKD":
		return rewrite(forms[kind].normalizeText), nil
	case "Lowercase":
		return rewrite(lowercase), nil
	case "StripAccents":
		return filter(newClass(unicodeTables().sets["mark"]).has), nil
	case "Strip":
		return strip{k.StripLeft, k.StripRight}, nil
	case "Nmt":
		return nmt(), nil
	case "ByteLevel":
		return rewrite(visible), nil
	case "BertNormalizer":
		return bert(k.CleanText, k.HandleChineseChars, or(k.StripAccents, k.Lowercase), k.Lowercase), nil
	case "Prepend":
		if k.Prepend == nil {
			return nil, inComponent(kind, errors.New("no prepend"))
		}
		return rewrite(func(s string) string {
			if s == "" {
				return s
			}
			return *k.Prepend + s
		}), nil
	case "Replace":
		r, err := newReplace(k.Pattern, k.Content)
		return r, inComponent(kind, err)
	case "Precompiled":
		p, err := newPrecompiled(k.Charsmap)
		return p, inComponent(kind, err)
	}
	return nil, fmt.Errorf("the type %.40q is not known", kind)
}

func parsePreTokenizer(raw json.RawMessage, depth int) (preTokenizer, error) {
	var k struct {
		PreTokenizers    []json.RawMessage `json:"pretokenizers"`
		Pattern          map[string]string `json:"pattern"`
		Behavior         string            `json:"behavior"`
		Invert           bool              `json:"invert"`
		AddPrefixSpace   *bool             `json:"add_prefix_space"`
		UseRegex         *bool             `json:"use_regex"`
		IndividualDigits bool              `json:"individual_digits"`
		Delimiter        string            `json:"delimiter"`
		Length           *int              `json:"length"`
		Replacement      string            `json:"replacement"`
		PrependScheme    string            `json:"prepend_scheme"`
		Split            *bool             `json:"split"`
	}
	kind, err := component(raw, depth, &k)
	if err != nil {
		return nil, err
	}
	switch kind {
	case "Sequence":
		all, err := sequence(k.PreTokenizers, depth, parsePreTokenizer)
		return preTokenizers(all), err
	case "ByteLevel":
		c, err := newByteLevel(or(k.AddPrefixSpace, true), or(k.UseRegex, true))
		return c, inComponent(kind, err)
	case "Split":
		p, err := newPattern(k.Pattern)
		b, ok := behaviors[k.Behavior]
		if err == nil && !ok {
			err = fmt.Errorf("the behavior %.40q is not known", k.Behavior)
		}
		return &split{at: p, invert: k.Invert, behavior: b}, inComponent(kind, err)
	case "Metaspace":
		c, err := newMetaspace(k.Replacement, k.PrependScheme, k.AddPrefixSpace, or(k.Split, true))
		return c, inComponent(kind, err)
	case "Whitespace":
		return words{}, nil
	case "WhitespaceSplit":
		return &split{at: runes(isSpace), behavior: removed}, nil
	case "CharDelimiterSplit", "Delimiter":
		r, err := oneRune(k.Delimiter)
		return &split{at: runes(func(x rune) bool { return x == r }), behavior: removed}, inComponent(kind, err)
	case "Digits":
		b := contiguous
		if k.IndividualDigits {
			b = isolated
		}
		return &split{at: runes(newClass(unicodeTables().sets["rust_numeric"]).has), behavior: b}, nil
	case "Punctuation":
		b, ok := behaviors[cmp.Or(k.Behavior, "Isolated")]
		if !ok {
			return nil, inComponent(kind, fmt.Errorf("the behavior %.40q is not known", k.Behavior))
		}
		return &split{at: runes(newClass(unicodeTables().sets["punctuation"]).has), behavior: b}, nil
	case "BertPreTokenizer":
		return preTokenizers{&split{at: runes(isSpace), behavior: removed},
			&split{at: runes(newClass(unicodeTables().sets["punctuation"]).has), behavior: isolated}}, nil
	case "FixedLength":
		n := or(k.Length, 5)
		if n < 1 {
			return nil, inComponent(kind, fmt.Errorf("the length %d", n))
		}
		return fixed(n), nil
	}
	return nil, fmt.Errorf("the type %.40q is not known", kind)
}

// newMetaspace returns the pre-tokenizer Metaspace. It also reads the older form with add_prefix_space.
func newMetaspace(mark, scheme string, prefix *bool, cuts bool) (*metaspace, error) {
	r, err := oneRune(mark)
	if err != nil {
		return nil, err
	}
	switch {
	case scheme == "" && prefix != nil && !*prefix:
		return nil, errors.New("add_prefix_space false without prepend_scheme never")
	case scheme == "":
		scheme = "always"
	case scheme != "always" && scheme != "first" && scheme != "never":
		return nil, fmt.Errorf("the prepend_scheme %.40q is not known", scheme)
	case prefix != nil && !*prefix && scheme != "never":
		return nil, fmt.Errorf("add_prefix_space false with prepend_scheme %s", scheme)
	}
	m := &metaspace{mark: mark, scheme: scheme}
	if cuts {
		m.split = &split{at: runes(func(x rune) bool { return x == r }), behavior: mergedWithNext}
	}
	return m, nil
}
