package tokenizer

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
)

// MaxFile bounds the size of a tokenizer.json in bytes. The largest known have 40 MB.
const MaxFile = 256 << 20

// A file is a tokenizer.json. Its entries truncation and padding change no ids here.
type file struct {
	Version       string          `json:"version"`
	AddedTokens   []addedToken    `json:"added_tokens"`
	Normalizer    json.RawMessage `json:"normalizer"`
	PreTokenizer  json.RawMessage `json:"pre_tokenizer"`
	PostProcessor json.RawMessage `json:"post_processor"`
	Decoder       json.RawMessage `json:"decoder"`
	Model         json.RawMessage `json:"model"`
}

// Parse reads a tokenizer.json.
func Parse(raw []byte) (*Tokenizer, error) {
	if len(raw) > MaxFile {
		return nil, fmt.Errorf("%d bytes; at most %d are read", len(raw), MaxFile)
	}
	var f file
	if err := json.Unmarshal(raw, &f); err != nil {
		return nil, fmt.Errorf("not a tokenizer.json: %w", err)
	}
	if f.Version != "" && f.Version != "1.0" {
		return nil, fmt.Errorf("version %.40q; version 1.0 is known", f.Version)
	}
	t := &Tokenizer{added: map[string]int32{}, tokens: map[int32]addedToken{}, decoder: f.Decoder}
	t.texts = sync.OnceValue(t.invert)
	var err error
	if t.model, err = parseModel(f.Model); err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	if !isNull(f.Normalizer) {
		if t.normalizer, err = parseNormalizer(f.Normalizer, 0); err != nil {
			return nil, fmt.Errorf("normalizer: %w", err)
		}
	}
	if !isNull(f.PreTokenizer) {
		if t.preTokenizer, err = parsePreTokenizer(f.PreTokenizer, 0); err != nil {
			return nil, fmt.Errorf("pre_tokenizer: %w", err)
		}
		t.preTokenizer, t.visible = lastVisible(t.preTokenizer)
	}
	if err = t.addAll(f.AddedTokens); err != nil {
		return nil, fmt.Errorf("added_tokens: %w", err)
	}
	if !isNull(f.PostProcessor) {
		if t.head, t.tail, err = parseProcessor(f.PostProcessor, 0); err != nil {
			return nil, fmt.Errorf("post_processor: %w", err)
		}
	}
	return t, nil
}

// addAll adds the tokens of the file. Their ids in the file must be those of add.
func (t *Tokenizer) addAll(tokens []addedToken) error {
	for _, a := range tokens {
		if said := a.ID; a.Content != "" && t.add(a) != said {
			return fmt.Errorf("the token %.40q has the id %d, and %d by the order of the file", a.Content, said,
				t.added[a.Content])
		}
	}
	return t.index()
}

// add adds a token, or replaces its flags, and returns its id. As in the library a new one gets the id of the model's
// token of that text, else the next free id, and a special one stays special.
func (t *Tokenizer) add(a addedToken) int32 {
	id, ok := t.ID(a.Content)
	if !ok {
		id = max(t.model.size(), t.next)
	}
	a.ID, t.next = int32(id), max(t.next, id+1)
	normalized := or(a.Normalized, !a.Special)
	a.Normalized, a.Special = &normalized, a.Special || t.tokens[a.ID].Special
	t.added[a.Content], t.tokens[a.ID] = a.ID, a
	return a.ID
}

// index fills the finders.
func (t *Tokenizer) index() error {
	t.raw, t.normal = finder{split: t.raw.split}, finder{split: t.raw.split}
	for _, id := range slices.Sorted(maps.Keys(t.tokens)) {
		a, to := t.tokens[id], &t.raw
		a.text = a.Content
		if *a.Normalized {
			to = &t.normal
		}
		if *a.Normalized && t.normalizer != nil {
			p, err := t.normalizer.normalize(&matcher{}, piece{a.text, true})
			if err != nil {
				return err
			}
			a.text = p.text
		}
		if err := to.add(&a); err != nil {
			return err
		}
	}
	return nil
}

func isNull(raw json.RawMessage) bool { return len(raw) == 0 || string(raw) == "null" }

const maxParts = 8

// component reads the fields of a component, and returns its type.
func component(raw json.RawMessage, depth int, fields any) (kind string, err error) {
	var k struct {
		Type string `json:"type"`
	}
	if depth > maxParts {
		return "", fmt.Errorf("components stand in one another more than %d deep", maxParts)
	}
	if err := json.Unmarshal(raw, &k); err != nil {
		return "", err
	}
	if k.Type == "" {
		return "", errors.New("it has no type")
	}
	return k.Type, inComponent(k.Type, json.Unmarshal(raw, fields))
}

// sequence parses the components of a Sequence.
func sequence[T any](raws []json.RawMessage, depth int, parse func(json.RawMessage, int) (T, error)) (all []T,
	err error) {
	for _, raw := range raws {
		x, err := parse(raw, depth+1)
		if err != nil {
			return nil, err
		}
		all = append(all, x)
	}
	return all, nil
}

func inComponent(kind string, err error) error {
	if err != nil {
		return fmt.Errorf("%s: %w", kind, err)
	}
	return nil
}

// lastVisible removes the byte-to-character mapping of a final ByteLevel, so that words are looked up in the cache
// before it.
func lastVisible(c preTokenizer) (preTokenizer, bool) {
	switch c := c.(type) {
	case *byteLevel:
		if c.split != nil && !c.prefix {
			return c.split, true
		}
		return &byteLevel{prefix: c.prefix, split: c.split, hidden: true}, true
	case preTokenizers:
		if len(c) == 0 {
			return c, false
		}
		last, ok := lastVisible(c[len(c)-1])
		if !ok {
			return c, false
		}
		return append(slices.Clone(c[:len(c)-1]), last), true
	}
	return c, false
}

// parseProcessor reads a post-processor: the ids before and after each text.
func parseProcessor(raw json.RawMessage, depth int) (head, tail []int32, err error) {
	var k struct {
		Processors []json.RawMessage `json:"processors"`
		Cls        *[2]any           `json:"cls"`
		Sep        *[2]any           `json:"sep"`
		Single     []templateItem    `json:"single"`
		Special    map[string]struct {
			IDs []int32 `json:"ids"`
		} `json:"special_tokens"`
	}
	kind, err := component(raw, depth, &k)
	if err != nil {
		return nil, nil, err
	}
	switch kind {
	case "ByteLevel": // changes only offsets
		return nil, nil, nil
	case "Sequence":
		for _, raw := range k.Processors {
			h, t, err := parseProcessor(raw, depth+1)
			if err != nil {
				return nil, nil, err
			}
			head, tail = append(h, head...), append(tail, t...)
		}
		return head, tail, nil
	case "BertProcessing", "RobertaProcessing":
		cls, err := tokenID(k.Cls)
		sep, err2 := tokenID(k.Sep)
		return []int32{cls}, []int32{sep}, inComponent(kind, errors.Join(err, err2))
	case "TemplateProcessing":
		at := slices.IndexFunc(k.Single, func(i templateItem) bool { return i.Sequence != nil })
		for n, item := range k.Single {
			switch {
			case item.Sequence != nil && (n != at || item.Sequence.ID != "A"),
				(item.Sequence == nil) == (item.SpecialToken == nil):
				return nil, nil, fmt.Errorf(
					"TemplateProcessing: item %d of single is neither the one text nor a special token", n)
			case item.SpecialToken != nil:
				s, ok := k.Special[item.SpecialToken.ID]
				if !ok {
					return nil, nil, fmt.Errorf("TemplateProcessing: special_tokens has no %.40q", item.SpecialToken.ID)
				}
				if n < at {
					head = append(head, s.IDs...)
				} else {
					tail = append(tail, s.IDs...)
				}
			}
		}
		if len(head)+len(tail) > maxSpecial {
			return nil, nil, fmt.Errorf("TemplateProcessing: %d special tokens around each text; at most %d are read",
				len(head)+len(tail), maxSpecial)
		}
		if at < 0 {
			return nil, nil, errors.New("TemplateProcessing: single has no text in it")
		}
		return head, tail, nil
	}
	return nil, nil, fmt.Errorf("the type %.40q is not known", kind)
}

// maxSpecial bounds the special tokens of a template.
const maxSpecial = 100

type templateItem struct {
	SpecialToken *struct {
		ID string `json:"id"`
	} `json:"SpecialToken"`
	Sequence *struct {
		ID string `json:"id"`
	} `json:"Sequence"`
}

// tokenID reads a pair such as ["[CLS]", 101].
func tokenID(p *[2]any) (int32, error) {
	if p == nil {
		return 0, errors.New("cls or sep is missing")
	}
	id, ok := p[1].(float64)
	if !ok || id < 0 || id != float64(int32(id)) {
		return 0, fmt.Errorf("%v is no id", p[1])
	}
	return int32(id), nil
}
