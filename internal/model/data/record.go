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
	"strings"
	"sync"
	"unicode/utf8"
)

// Ignore is the label of a token that is not a target, as in Hugging Face's data.
const Ignore = -100

// A record is a line of .jsonl: a text, ids with labels, or a conversation.
type record struct {
	text   string
	ids    []int32 // nil: it has text
	labels []int32 // nil: each token is its own label
	chat   *conversation
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

// Keys is a set of record keys, safe for concurrent use. A nil set stays empty.
type Keys struct{ set sync.Map }

// Add adds keys.
func (k *Keys) Add(keys ...string) {
	for _, key := range keys {
		if k != nil {
			k.set.LoadOrStore(key, true)
		}
	}
}

// Sorted lists the keys.
func (k *Keys) Sorted() (keys []string) {
	k.set.Range(func(key, _ any) bool {
		keys = append(keys, key.(string))
		return true
	})
	slices.Sort(keys)
	return keys
}

const (
	keyText      = "text"
	keyIDs       = "input_ids"
	keyLabels    = "labels"
	keyAttention = "attention_mask"
	keyPositions = "position_ids"
)

var (
	// masks lists keys with a 1 for each possible target, else 0.
	masks = []string{"completion_mask", "loss_mask", "assistant_masks"}
	// defaultKeys lists keys that change nothing with a tokenizer's defaults.
	defaultKeys = []string{keyPositions, "special_tokens_mask", "token_type_ids"}
)

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

// fields returns the values of a line by key; nil for a blank line. It refuses unread keys that look like a choice of
// targets. A null value counts as absent, except of text and input_ids.
func fields(line []byte, ignored *Keys) (map[string]json.RawMessage, error) {
	line = bytes.TrimSpace(line)
	if len(line) == 0 {
		return nil, nil
	}
	if !utf8.Valid(line) || halfPair(line) { // the JSON parser would silently insert U+FFFD
		return nil, errors.New("not UTF-8, or an escape with half of a surrogate pair")
	}
	// A struct would also accept "Text" or "TEXT".
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(line, &keys); err != nil {
		return nil, fmt.Errorf("not a JSON object: %w", err)
	}
	maps.DeleteFunc(keys, func(key string, value json.RawMessage) bool {
		return key != keyText && key != keyIDs && string(value) == "null"
	})
	_, hasIDs := keys[keyIDs]
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		switch {
		case key == "label", hasIDs && slices.Contains(defaultKeys, key):
			ignored.Add(key)
		case key == "chosen" || key == "rejected":
			return nil, fmt.Errorf("key %q: preference pairs cannot be trained on; write the chosen answers alone", key)
		case key == keyLabels || key == keyAttention || slices.Contains(masks, key):
			if !hasIDs {
				return nil, fmt.Errorf("%q without %q; it has one entry for each of them", key, keyIDs)
			}
		case strings.HasSuffix(key, "_mask"), strings.HasSuffix(key, "labels"),
			strings.HasPrefix(key, "target_"), strings.HasPrefix(key, "loss_"):
			return nil, fmt.Errorf("key %q is not read, and looks as if it chose targets; "+
				"%s and %s do: rename or remove it", key, keyLabels, strings.Join(masks, ", "))
		}
	}
	return keys, nil
}

// parseRecord reads a line. format is "" for any; vocab bounds the ids, 0: any int32.
func parseRecord(line []byte, format string, vocab int, ignored *Keys) (r record, err error) {
	keys, err := fields(line, ignored)
	if err != nil || keys == nil {
		return r, err
	}
	if format, err = formatOf(keys, format); err != nil {
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
	return r, r.mask(keys)
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
	if keys[keyPositions] != nil {
		positions, err := readList(keys, keyPositions)
		if err == nil && len(positions) != len(r.ids) {
			err = lengthFault(keyPositions, len(positions), len(r.ids))
		}
		if err != nil {
			return err
		}
		for i, p := range positions[:n] {
			if p != int64(i) {
				return fmt.Errorf("%s[%d] is %d; positions count from 0 in each record: "+
					"write each document as a record, and set data.pack_documents", keyPositions, i, p)
			}
		}
	}
	r.ids = r.ids[:n]
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
	ids := make([]int32, len(list))
	for i, id := range list {
		if (id < 0 || id >= int64(vocab)) && !(ignore && id == Ignore) {
			return nil, fmt.Errorf("%s[%d] is %d; want an id below vocab_size %d%s", key, i, id, vocab,
				map[bool]string{true: ", or -100 for none"}[ignore])
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
