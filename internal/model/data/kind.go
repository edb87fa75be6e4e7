package data

import "slices"

// Kind returns the kind of a file's records by the keys of the first: text, tokens, masked (tokens with labels or
// masks), messages or completion. It is empty if there is no record.
func Kind(path string) (kind string, err error) {
	switch kind = kindOf(path); kind {
	case "jsonl", "parquet", "arrow":
	default:
		return kind, nil
	}
	f, size, err := openSized(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	r, free, err := unpack(f, path, size)
	if err != nil {
		return "", err
	}
	defer free()
	records := lines(r)
	if kind != "jsonl" {
		records = rows(f, path, size)
	}
	for line, err := range records {
		keys, bad := fields(line, nil)
		if err != nil || bad != nil {
			return "", err
		}
		if keys == nil {
			continue
		}
		has := func(key string) bool { return keys[key] != nil }
		switch {
		case has(keyIDs) && (has(keyLabels) || slices.ContainsFunc(masks, has)):
			return "masked", nil
		case has(keyIDs):
			return "tokens", nil
		case has("messages"), has("conversations"):
			return "messages", nil
		case has("prompt") && has("completion"):
			return "completion", nil
		}
		return "text", nil
	}
	return "", nil
}

// Conversation reports whether records of a kind are never cut.
func Conversation(kind string) bool {
	return slices.Contains([]string{"masked", "messages", "completion"}, kind)
}
