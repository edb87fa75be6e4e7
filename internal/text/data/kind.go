package data

import (
	"io"
	"slices"
)

// Kinds of tokens beside FormatTokens.
const (
	// Packed tokens have the borders of documents in a record.
	Packed = "packed"
	masked = "masked" // with labels or masks
)

// These bound the records, and their bytes, in which Kind looks for position_ids that restart: the first ones may have
// one document.
const (
	someRecords = 1000
	someBytes   = 64 << 20
)

// Kind returns the kind of a file's records: their format, which is by the keys of the first unless it is given, or
// masked or Packed. It is empty if there is no record.
func Kind(path, format string) (kind string, err error) {
	switch kind = FileKind(path); kind {
	case kindJSON, "parquet", "arrow":
	default:
		return kind, nil
	}
	f, size, err := openSized(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	records, free, err := recordsOf(f, path, size)
	if err != nil {
		return "", err
	}
	defer free()
	n, read, kind := 0, 0, ""
	for line, err := range records.each {
		if err == nil && len(line) > 0 {
			n, read = n+1, read+len(line)
			err = kindOf(line, format, n == 1, &kind)
		}
		if err != nil && err != io.EOF && n <= 1 {
			return kind, err
		}
		if err != nil || n == someRecords || read > someBytes {
			break
		}
	}
	return kind, nil
}

// kindOf sets the kind by the first record, and to Packed by any. It returns io.EOF if later records do not matter.
func kindOf(line []byte, format string, first bool, kind *string) error {
	keys, format, err := fields(line, format, nil)
	if err != nil || keys == nil {
		return err
	}
	has := func(key string) bool { return keys[key] != nil }
	if first {
		*kind = format
	}
	if first && format == FormatTokens && (has(keyLabels) || slices.ContainsFunc(masks, has)) {
		*kind = masked
	}
	if format != FormatTokens {
		return io.EOF
	}
	for _, b := range borderKeys {
		if b.key != keyPositions && has(b.key) {
			*kind = Packed
		}
	}
	if *kind == Packed || !has(keyPositions) {
		return io.EOF
	}
	if r, err := parseRecord(line, format, 0, nil); err == nil && len(r.ends) > 1 {
		*kind = Packed
	}
	return nil
}

// Conversation reports whether records of a kind are never cut.
func Conversation(kind string) bool {
	return slices.Contains([]string{Packed, masked, FormatMessages, FormatCompletion}, kind)
}

// PackedByDefault reports whether data.pack_documents is true for records of a kind, unless the config sets it.
func PackedByDefault(kind string) bool { return Conversation(kind) && kind != masked }
