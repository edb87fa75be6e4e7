package data

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"unicode/utf8"
)

// Ignore is the label of a token that is not a target, as in Hugging Face's data.
const Ignore = -100

// A record is a line of .jsonl: a text, ids with labels, or a conversation.
type record struct {
	text    string
	ids     []int32 // nil: it has text
	labels  []int32 // nil: each token is its own label
	claimed int     // tokens with the padding
	ends    []int   // of the documents of ids; one if they have no borders
	chat    *conversation
}

// A Document is the ids of one record.
type Document struct {
	IDs []int32
	// Labels has one entry for each of IDs: the target of the previous place, or Ignore. Nil: every token is a target.
	Labels []int32
}

// labels returns the label of each token.
func (d Document) labels() []int32 {
	if d.Labels == nil {
		return d.IDs
	}
	return d.Labels
}

// targets counts the targets. Nothing predicts the first token.
func (d Document) targets() (n int32) {
	for _, label := range d.labels()[1:] {
		if label != Ignore {
			n++
		}
	}
	return n
}

const (
	keyText      = "text"
	keyIDs       = "input_ids"
	keyLabels    = "labels"
	keyAttention = "attention_mask"
	keyPositions = "position_ids"
)

// masks lists keys with a 1 for each possible target, else 0.
var masks = []string{"completion_mask", "loss_mask", "assistant_masks"}

// escapes matches an escape of JSON, and its code in UTF-16 unless it is a whole pair.
var escapes = regexp.MustCompile(`\\(?:[^u]|u[dD][89abAB]..\\u[dD][c-fC-F]|u(..))`)

// halfPair reports whether a line of JSON has half of a surrogate pair.
func halfPair(line []byte) bool {
	if !bytes.Contains(line, []byte(`\ud`)) && !bytes.Contains(line, []byte(`\uD`)) {
		return false
	}
	for _, m := range escapes.FindAllSubmatch(line, -1) {
		if code := m[1]; len(code) > 0 && code[0]|' ' == 'd' && code[1] > '7' {
			return true
		}
	}
	return false
}

// fields returns the values of a line by key, and the format of its record; nil for a blank line. It refuses keys by
// their rule, and adds those without effect to ignored. A null value counts as absent, except of text and input_ids. Of
// equal keys the last one counts, as in Python.
func fields(line []byte, format string, ignored *Keys) (map[string]json.RawMessage, string, error) {
	line = bytes.TrimSpace(bytes.TrimPrefix(line, []byte(byteOrderMark)))
	if len(line) == 0 {
		return nil, "", nil
	}
	if !utf8.Valid(line) || halfPair(line) { // the JSON parser would silently insert U+FFFD
		return nil, "", errors.New("not UTF-8, or an escape with half of a surrogate pair")
	}
	// A struct would also accept "Text" or "TEXT".
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(finite(line), &keys); err != nil {
		return nil, "", fmt.Errorf("not a JSON object: %w", err)
	}
	maps.DeleteFunc(keys, func(key string, value json.RawMessage) bool {
		return key != keyText && key != keyIDs && string(value) == "null"
	})
	format, unknown := formatOf(keys, format)
	_, hasIDs := keys[keyIDs]
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		unused, err := checkKey(key, format, keys[key], hasIDs)
		if err != nil {
			return nil, "", err
		}
		if unused && !ignored.has(key) {
			ignored.Add(shown(key))
		}
	}
	return keys, format, unknown
}

// byteOrderMark begins files that Windows writes, and lines where such files were joined.
const byteOrderMark = "\ufeff"

// notFinite matches a string of JSON, or a word that Python writes for a float without a value.
var notFinite = regexp.MustCompile(`"(?:[^"\\]|\\.)*"|\bNaN\b|-?\bInfinity\b`)

// finite writes NaN and infinities of Python's JSON as a number that no key in use accepts.
func finite(line []byte) []byte {
	if !bytes.Contains(line, []byte("NaN")) && !bytes.Contains(line, []byte("Infinity")) {
		return line
	}
	return notFinite.ReplaceAllFunc(line, func(word []byte) []byte {
		if word[0] == '"' {
			return word
		}
		return []byte("1e999")
	})
}

// parseRecord reads a line. format is "" for any; vocab bounds the ids, 0: any int32.
func parseRecord(line []byte, format string, vocab int, ignored *Keys) (r record, err error) {
	keys, format, err := fields(line, format, ignored)
	if err != nil || keys == nil {
		return r, err
	}
	switch format {
	case FormatText:
		r.text, err = textOf(keys)
		return r, err
	case FormatMessages, FormatCompletion:
		r.chat, err = parseConversation(keys, format)
		return r, err
	}
	if keys[keyIDs] == nil {
		return r, fmt.Errorf("no key %q", keyIDs)
	}
	if r.ids, err = readIDs(keys, keyIDs, vocab, false); err != nil {
		return r, err
	}
	if keys[keyLabels] != nil {
		if r.labels, err = readIDs(keys, keyLabels, vocab, true); err != nil {
			return r, err
		}
		if len(r.labels) != len(r.ids) {
			return r, lengthFault(keyLabels, len(r.labels), len(r.ids))
		}
	}
	if err := r.mask(keys); err != nil {
		return r, err
	}
	err = r.cutAtBorders(keys)
	if keys[keyPositions] != nil && len(r.ends) == 1 {
		ignored.Add(keyPositions) // the default
	}
	return r, err
}

// mask applies the masks: a target needs a 1 in each of them, and a label, as in TRL's collator. Then it removes
// padding.
func (r *record) mask(keys map[string]json.RawMessage) error {
	n := len(r.ids)
	for _, key := range masks {
		mask, err := readMask(keys, key, n)
		if err != nil {
			return err
		}
		for i, one := range mask {
			if one != 0 {
				continue
			}
			if r.labels == nil {
				r.labels = slices.Clone(r.ids)
			}
			r.labels[i] = Ignore
		}
	}
	mask, err := readMask(keys, keyAttention, n)
	if err != nil {
		return err
	}
	if at := slices.Index(mask, 0); at >= 0 {
		if slices.Contains(mask[at:], 1) {
			return fmt.Errorf("%s[%d] is 0 and a later entry is 1; only padding at the end can be cut: "+
				"leave such tokens out, or give them the label %d", keyAttention, at, Ignore)
		}
		n = at
	}
	r.claimed, r.ids = len(r.ids), r.ids[:n]
	if r.labels != nil {
		r.labels = r.labels[:n]
	}
	return nil
}

func textOf(keys map[string]json.RawMessage) (string, error) {
	raw, ok := keys[keyText]
	if !ok {
		return "", fmt.Errorf("no key %q", keyText)
	}
	var s *string
	if err := json.Unmarshal(raw, &s); err != nil || s == nil {
		return "", fmt.Errorf("the value of %q is not a string", keyText)
	}
	return *s, nil
}

// readIDs reads a list of ids; labels may be Ignore.
func readIDs(keys map[string]json.RawMessage, key string, vocab int, ignore bool) ([]int32, error) {
	list, err := readList(keys, key)
	if err != nil {
		return nil, err
	}
	if vocab == 0 {
		vocab = math.MaxInt32
	}
	ids, or := make([]int32, len(list)), ""
	if ignore {
		or = ", or -100 for none"
	}
	for i, id := range list {
		if (id < 0 || id >= int64(vocab)) && !(ignore && id == Ignore) {
			return nil, fmt.Errorf("%s[%d] is %d; want an id below vocab_size %d%s", key, i, id, vocab, or)
		}
		ids[i] = int32(id)
	}
	return ids, nil
}

// readMask reads a list of n zeros and ones; nil if the key is absent.
func readMask(keys map[string]json.RawMessage, key string, n int) ([]int64, error) {
	if keys[key] == nil {
		return nil, nil
	}
	mask, err := readList(keys, key)
	if err == nil && len(mask) != n {
		err = lengthFault(key, len(mask), n)
	}
	for i, x := range mask {
		if err == nil && x != 0 && x != 1 {
			err = fmt.Errorf("%s[%d] is %d; want 0 or 1", key, i, x)
		}
	}
	return mask, err
}

func readList(keys map[string]json.RawMessage, key string) ([]int64, error) {
	var list []int64
	err := json.Unmarshal(keys[key], &list)
	if err != nil || list == nil || bytes.Contains(keys[key], []byte("null")) { // an entry of null would become 0
		return nil, fmt.Errorf("the value of %q is not a list of integers", key)
	}
	return list, nil
}

func lengthFault(key string, have, want int) error {
	return fmt.Errorf("%d %s for %d %s; there is one for each, in the same place", have, key, want, keyIDs)
}
