package data

import "slices"

// masked is the kind of tokens with labels or masks.
const masked = "masked"

// Kind returns the kind of a file's records: their format, which is by the keys of the first unless it is given, or
// masked. It is empty if there is no record.
func Kind(path, format string) (kind string, err error) {
	switch kind = FileKind(path); kind {
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
		format, bad = formatOf(keys, format)
		has := func(key string) bool { return keys[key] != nil }
		if format == FormatTokens && (has(keyLabels) || slices.ContainsFunc(masks, has)) {
			return masked, nil
		}
		return format, bad
	}
	return "", nil
}

// Conversation reports whether records of a kind are never cut.
func Conversation(kind string) bool {
	return slices.Contains([]string{masked, FormatMessages, FormatCompletion}, kind)
}
