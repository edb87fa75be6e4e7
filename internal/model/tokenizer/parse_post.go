package tokenizer

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
)

// parseProcessor reads a post-processor: the ids that come before and behind each text.
func parseProcessor(raw json.RawMessage, depth int) (head, tail []int32, err error) {
	kind, err := kindOf(raw, depth)
	if err != nil {
		return nil, nil, err
	}
	var k struct {
		Processors []json.RawMessage `json:"processors"`
		Cls        *[2]any           `json:"cls"`
		Sep        *[2]any           `json:"sep"`
		Single     []templateItem    `json:"single"`
		Special    map[string]struct {
			IDs []int32 `json:"ids"`
		} `json:"special_tokens"`
	}
	if err := json.Unmarshal(raw, &k); err != nil {
		return nil, nil, named(kind, err)
	}
	switch kind {
	case "ByteLevel": // changes offsets
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
		return []int32{cls}, []int32{sep}, named(kind, errors.Join(err, err2))
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

// maxSpecial is how many special tokens one template puts around a text.
const maxSpecial = 100

type templateItem struct {
	SpecialToken *struct {
		ID string `json:"id"`
	} `json:"SpecialToken"`
	Sequence *struct {
		ID string `json:"id"`
	} `json:"Sequence"`
}

// tokenID reads ["[CLS]", 101].
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
