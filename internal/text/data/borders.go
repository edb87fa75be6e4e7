package data

import (
	"encoding/json"
	"fmt"
	"slices"
)

// borderKeys lists the keys by which another packer keeps the documents of a record apart. Each function returns the
// ends of documents by the values of its key, for n tokens.
var borderKeys = []struct {
	key  string
	ends func(key string, values []int64, n int) ([]int, error)
}{
	{"seq_lengths", func(key string, lengths []int64, n int) (ends []int, err error) {
		at := int64(0)
		for i, length := range lengths {
			if length < 0 || length > int64(n)-at {
				return nil, fmt.Errorf("%s[%d] is %d, and %d tokens are left", key, i, length, int64(n)-at)
			}
			at += length
			ends = append(ends, int(at))
		}
		return ends, nil
	}},
	{"cu_seqlens", func(key string, values []int64, n int) (ends []int, err error) {
		for i, v := range values {
			if i == 0 && v != 0 || i > 0 && v < values[i-1] || v > int64(n) {
				return nil, fmt.Errorf("%s[%d] is %d; they rise from 0 to the number of tokens, %d", key, i, v, n)
			}
			ends = append(ends, int(v))
		}
		return ends, nil
	}},
	{"document_ids", idEnds}, {"segment_ids", idEnds},
	{keyPositions, func(key string, values []int64, n int) (ends []int, err error) {
		for i, p := range values {
			if p != 0 && (i == 0 || p != values[i-1]+1) {
				return nil, fmt.Errorf("%s[%d] is %d; positions count from 0 in each document", key, i, p)
			}
			if p == 0 {
				ends = append(ends, i)
			}
		}
		return append(ends, len(values)), nil
	}},
}

// idEnds returns the places where the number of a document changes.
func idEnds(key string, ids []int64, _ int) (ends []int, err error) {
	seen := map[int64]bool{}
	for i, id := range ids {
		if i > 0 && id == ids[i-1] {
			continue
		}
		if seen[id] {
			return nil, fmt.Errorf("%s[%d] is %d again, after another document; the tokens of one are adjacent", key, i, id)
		}
		seen[id] = true
		ends = append(ends, i)
	}
	if n := len(ids); n > 0 && ids[0] > 0 && ids[n-1] <= 0 {
		return nil, fmt.Errorf("%s ends with %d, as padding does; give such tokens a 0 in %s", key, ids[n-1], keyAttention)
	}
	return append(ends, len(ids)), nil
}

// cutAtBorders sets the ends of documents. Padding, which mask has cut off, may belong to the last ones.
func (r *record) cutAtBorders(keys map[string]json.RawMessage) error {
	n, by := len(r.ids), ""
	for _, b := range borderKeys {
		if keys[b.key] == nil {
			continue
		}
		values, err := readList(keys, b.key)
		if err != nil {
			return err
		}
		each := b.key != "seq_lengths" && b.key != "cu_seqlens"
		if each && len(values) != r.claimed {
			return lengthFault(b.key, len(values), r.claimed)
		}
		if each {
			values = values[:n]
		}
		ends, err := b.ends(b.key, values, r.claimed)
		if err != nil {
			return err
		}
		if last := len(ends) - 1; last < 0 && n > 0 || last >= 0 && ends[last] != r.claimed && ends[last] != n {
			return fmt.Errorf("%s describes %d of %d tokens", b.key, slices.Max(append(ends, 0)), r.claimed)
		}
		for i := range ends {
			ends[i] = min(ends[i], n)
		}
		ends = slices.DeleteFunc(slices.Compact(ends), func(end int) bool { return end == 0 })
		if by != "" && !slices.Equal(ends, r.ends) {
			return fmt.Errorf("%s and %s place documents differently; leave one out", by, b.key)
		}
		r.ends, by = ends, b.key
	}
	if len(r.ends) == 0 {
		r.ends = []int{n}
	}
	return nil
}

// documents returns the documents of a record of ids.
func (r *record) documents() (docs []Document) {
	from := 0
	for _, end := range r.ends {
		d := Document{IDs: r.ids[from:end:end]}
		if r.labels != nil {
			d.Labels = r.labels[from:end:end]
		}
		docs, from = append(docs, d), end
	}
	return docs
}
