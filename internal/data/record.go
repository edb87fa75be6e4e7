package data

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"unicode/utf8"
)

// Ignore is a label that asks for no prediction, as in Hugging Face's data.
const Ignore = -100

// record is a line of .jsonl: a text, or ids with maybe labels.
type record struct {
	text   string
	ids    []int32 // nil: it has text
	labels []int32 // nil: each token is its own
}

// Document is the ids of one text.
type Document struct {
	IDs []int32
	// Labels are what each place asks for, beside IDs and like them: Ignore for nothing. The label of a
	// place is predicted at the place before it. Nil: each token asks for itself.
	Labels []int32
}

// fields are the values of a line by key; nil for a blank one.
func fields(line []byte) (map[string]json.RawMessage, error) {
	line = bytes.TrimSpace(line)
	if len(line) == 0 {
		return nil, nil
	}
	if !utf8.Valid(line) { // the JSON parser would put U+FFFD there without a word
		return nil, errors.New("not UTF-8")
	}
	// A struct would also take "Text" or "TEXT".
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(line, &keys); err != nil {
		return nil, fmt.Errorf("not a JSON object: %w", err)
	}
	return keys, nil
}

// parseRecord reads a line. vocab bounds the ids; 0: any that an int32 holds.
func parseRecord(line []byte, vocab int) (r record, err error) {
	keys, err := fields(line)
	if err != nil || keys == nil {
		return r, err
	}
	ids, hasIDs := keys["input_ids"]
	labels, hasLabels := keys["labels"]
	_, hasText := keys["text"]
	switch {
	case hasIDs && hasText:
		return r, errors.New(`both "text" and "input_ids"; leave one out`)
	case hasLabels && !hasIDs:
		return r, errors.New(`"labels" without "input_ids"; labels are for ids, one each`)
	case !hasIDs:
		r.text, err = textOf(keys)
		return r, err
	}
	if r.ids, err = readIDs("input_ids", ids, vocab, false); err != nil {
		return r, err
	}
	if hasLabels && string(labels) != "null" {
		if r.labels, err = readIDs("labels", labels, vocab, true); err == nil && len(r.labels) != len(r.ids) {
			err = fmt.Errorf("%d labels for %d input_ids; there is one for each, in the same place", len(r.labels), len(r.ids))
		}
	}
	return r, err
}

// textOf is the value of "text".
func textOf(keys map[string]json.RawMessage) (string, error) {
	raw, ok := keys["text"]
	if !ok {
		return "", errors.New(`no key "text", and no "input_ids"`)
	}
	var s *string
	if err := json.Unmarshal(raw, &s); err != nil || s == nil {
		return "", errors.New(`the value of "text" is not a string`)
	}
	return *s, nil
}

// readIDs reads a list of ids; labels may be Ignore.
func readIDs(key string, raw json.RawMessage, vocab int, ignore bool) ([]int32, error) {
	var list []int64
	if err := json.Unmarshal(raw, &list); err != nil || list == nil {
		return nil, fmt.Errorf("the value of %q is not a list of integers", key)
	}
	if vocab == 0 {
		vocab = math.MaxInt32
	}
	ids := make([]int32, len(list))
	for i, id := range list {
		if (id < 0 || id >= int64(vocab)) && !(ignore && id == Ignore) {
			return nil, fmt.Errorf("%s[%d] is %d; want an id below vocab_size %d%s", key, i, id, vocab, map[bool]string{true: ", or -100 for none"}[ignore])
		}
		ids[i] = int32(id)
	}
	return ids, nil
}
