package tokenizer

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
)

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
				s.kind,
				fused)
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
