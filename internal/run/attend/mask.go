package attend

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/partition"
)

// Masks holds the masks of the metadata.
type Masks struct {
	partition.Diagonal
	// Docs are the lengths of packed documents in queries: one list for all samples, or one per sample; nil: none.
	// DocsKV are the lengths in keys; nil: equal.
	Docs, DocsKV [][]int
	Slices       []partition.Slice // in place of all other masks

	of []partition.Mask // one for all samples, or one per sample
}

// Apart reports whether samples may have different masks.
func (m *Masks) Apart() bool { return len(m.of) > 1 }

// String returns the mask in words: "causal from the top left, window (9, 5), documents of each sample".
func (m *Masks) String() string {
	var words []string
	add := func(is bool, format string, args ...any) {
		if is {
			words = append(words, fmt.Sprintf(format, args...))
		}
	}
	from := map[bool]string{true: " from the top left"}[m.TopLeft]
	each := map[bool]string{true: " of each sample"}[len(m.Docs) > 1]
	add(m.Slices != nil, "slices: %d", len(m.Slices))
	add(m.Causal, "causal%s", from)
	add(m.Left >= 0 || m.Right >= 0, "window (%d, %d)", m.Left, m.Right)
	add(m.Docs != nil, "documents%s", each)
	add(m.DocsKV != nil, "their lengths in keys")
	if len(words) == 0 {
		return "full"
	}
	return strings.Join(words, ", ")
}

// readMasks reads the masks of a case with known lengths. The error lists all faults.
func (c *Case) readMasks() (m Masks, err error) {
	r := reader{path: c.Path, metadata: c.file.Metadata()}
	r.diagonal(&m.Diagonal)
	var queries, keys documents
	r.parse("docs", func(s string) (err error) { queries, err = parseDocuments(s); return err })
	r.parse("docs_kv", func(s string) (err error) { keys, err = parseDocuments(s); return err })
	r.parse("slices", func(s string) (err error) { m.Slices, err = parseSlices(s); return err })
	switch {
	case len(r.faults) > 0:
		return m, errors.Join(r.faults...)
	case m.Slices != nil:
		r.alone(&m, queries, keys)
		if len(r.faults) == 0 {
			m.of, err = c.slicesOf(m.Slices)
			r.fault("slices", err)
		}
		return m, errors.Join(r.faults...)
	case keys.lists != nil && queries.lists == nil:
		r.fault("docs_kv", errors.New("it needs \"docs\""))
		return m, errors.Join(r.faults...)
	}
	m.of, err = c.documentsOf(&m, queries, keys)
	r.fault("docs", err)
	return m, errors.Join(r.faults...)
}

type reader struct {
	path     string
	metadata map[string]string
	faults   []error
}

func (r *reader) fault(key string, err error) {
	if err != nil {
		r.faults = append(r.faults, fmt.Errorf("%s: metadata %q is %s: %w", r.path, key,
			terminal.Clip(strconv.Quote(r.metadata[key]), 80), err))
	}
}

func (r *reader) parse(key string, parse func(string) error) {
	if s := r.metadata[key]; s != "" {
		r.fault(key, parse(s))
	}
}

func (r *reader) diagonal(d *partition.Diagonal) {
	d.Left, d.Right = -1, -1
	r.parse("causal", func(s string) (err error) {
		if s == "top_left" {
			d.Causal, d.TopLeft = true, true
			return nil
		}
		if d.Causal, err = strconv.ParseBool(s); err != nil {
			return errors.New("want true, false or top_left")
		}
		return nil
	})
	r.parse("window", func(s string) (err error) {
		d.Left, d.Right, err = parseWindow(s)
		return err
	})
}

// parseWindow reads "L", the keys before a query's own (below 0: all), or "L,R", the keys before and after it (-1:
// all).
func parseWindow(s string) (left, right int, err error) {
	l, r, sides := strings.Cut(s, ",")
	left, err = strconv.Atoi(strings.TrimSpace(l))
	if right = -1; sides && err == nil {
		right, err = strconv.Atoi(strings.TrimSpace(r))
	} else {
		left = max(left, -1)
	}
	if err != nil || left < -1 || right < -1 {
		return -1, -1, errors.New("want the number of keys before a query's own, or L,R for before and after; -1 " +
			"or nothing: all")
	}
	return left, right, nil
}

// alone rejects other masks besides slices. Values without effect are allowed.
func (r *reader) alone(m *Masks, queries, keys documents) {
	for _, other := range []struct {
		key  string
		asks bool
	}{{"causal", m.Causal}, {"window", m.Left >= 0 || m.Right >= 0}, {"docs", queries.lists != nil},
		{"docs_kv", keys.lists != nil}} {
		if other.asks {
			r.fault(other.key, errors.New(`"slices" replace causal, window and docs; remove one of the two`))
		}
	}
}

func (c *Case) slicesOf(list []partition.Slice) ([]partition.Mask, error) {
	if c.batches {
		return nil, fmt.Errorf("layout %v has queries of documents and keys of samples, which slices do not support",
			c.Input.Layout)
	}
	mask, err := partition.SliceMaskOf(c.SeqQ, c.SeqKV, list)
	return []partition.Mask{mask}, err
}

// documentsOf sets the documents of m, and returns one mask for all samples, or one per sample.
func (c *Case) documentsOf(m *Masks, queries, keys documents) ([]partition.Mask, error) {
	if c.batches && queries.lists != nil {
		if err := c.evenly(queries, keys); err != nil {
			return nil, err
		}
		queries, keys = documents{}, documents{}
	}
	for _, d := range []documents{queries, keys} {
		if d.samples && len(d.lists) != c.Batch {
			return nil, fmt.Errorf("lists for %d samples, but the batch has %d", len(d.lists), c.Batch)
		}
	}
	if keys.lists != nil && keys.samples != queries.samples {
		return nil, errors.New("\"docs\" and \"docs_kv\" must both be lists of lengths, or both lists per sample")
	}
	m.Docs, m.DocsKV = queries.lists, keys.lists
	if slices.EqualFunc(m.Docs, m.DocsKV, slices.Equal) && c.SeqQ == c.SeqKV {
		m.DocsKV = nil
	}
	if alike(m.Docs) && alike(m.DocsKV) {
		m.Docs, m.DocsKV = m.Docs[:min(1, len(m.Docs))], m.DocsKV[:min(1, len(m.DocsKV))]
	}
	if m.Docs == nil {
		mask, err := m.Diagonal.Mask(c.SeqQ, c.SeqKV, nil, nil)
		return []partition.Mask{mask}, err
	}
	masks := make([]partition.Mask, len(m.Docs))
	for i := range masks {
		var inKeys []int
		if m.DocsKV != nil {
			inKeys = m.DocsKV[i]
		}
		err := errors.New("there are no documents")
		if len(m.Docs[i]) > 0 {
			masks[i], err = m.Diagonal.Mask(c.SeqQ, c.SeqKV, m.Docs[i], inKeys)
		}
		if err != nil {
			if queries.samples {
				err = fmt.Errorf("sample %d: %w", i, err)
			}
			return nil, err
		}
	}
	return masks, nil
}

func alike(lists [][]int) bool {
	return !slices.ContainsFunc(lists, func(l []int) bool { return !slices.Equal(l, lists[0]) })
}

// evenly returns an error unless the documents equal the samples of k and v.
func (c *Case) evenly(queries, keys documents) error {
	other := func(n int) bool { return n != c.SeqKV }
	even := func(d documents) bool {
		return !d.samples && len(d.lists[0]) == c.Batch && !slices.ContainsFunc(d.lists[0], other)
	}
	if !even(queries) || keys.lists != nil && !even(keys) {
		return fmt.Errorf("layout %v has %d documents of %d keys; other lengths are not in this build",
			c.Input.Layout, c.Batch, c.SeqKV)
	}
	return nil
}

// maxDocs and maxSlices bound the documents and the slices of a case.
const (
	maxDocs   = 1 << 20
	maxSlices = 1 << 16
)

// documents holds document lengths: one list for all samples, or one per sample.
type documents struct {
	lists   [][]int // nil: none
	samples bool    // one list per sample
}

// values returns the integers of a JSON list without null.
func values(list []*int) []int {
	out := make([]int, len(list))
	for i, n := range list {
		out[i] = *n
	}
	return out
}

// parseDocuments reads a JSON list of lengths, or a list of such lists, one per sample. An empty list or null means no
// documents.
func parseDocuments(text string) (d documents, err error) {
	if err := files.Modest([]byte(text), maxDocs+1); err != nil {
		return d, err
	}
	var one []*int
	if json.Unmarshal([]byte(text), &one) == nil && !slices.Contains(one, nil) {
		if len(one) > 0 {
			d.lists = [][]int{values(one)}
		}
		return d, nil
	}
	var each [][]*int
	hasNull := func(l []*int) bool { return l == nil || slices.Contains(l, nil) }
	if json.Unmarshal([]byte(text), &each) != nil || slices.ContainsFunc(each, hasNull) {
		return d, errors.New("want a JSON list of document lengths, or a list of such lists, one per sample")
	}
	d.samples = true
	for _, l := range each {
		d.lists = append(d.lists, values(l))
	}
	return d, nil
}

// tokens counts the tokens of a single list; 0 for none, several, or one that readMasks refuses.
func (d documents) tokens() (sum int) {
	if len(d.lists) != 1 {
		return 0
	}
	for _, n := range d.lists[0] {
		if n < 0 || n > math.MaxInt-sum {
			return 0
		}
		sum += n
	}
	return sum
}

var errSlice = errors.New("want [q0, q1, k0, k1, mask]: queries q0 to q1 and keys k0 to k1, ends excluded, and mask " +
	"full, causal, inv_causal or bi_causal")

// parseSlices reads a JSON list of slices. An empty list or null means none.
func parseSlices(text string) ([]partition.Slice, error) {
	if err := files.Modest([]byte(text), 6*maxSlices+1); err != nil {
		return nil, err
	}
	var list []json.RawMessage
	if json.Unmarshal([]byte(text), &list) != nil {
		return nil, errors.New("want a JSON list of slices [q0, q1, k0, k1, mask]")
	}
	if len(list) > maxSlices {
		return nil, fmt.Errorf("%d slices; want at most %d", len(list), maxSlices)
	}
	var out []partition.Slice
	for i, text := range list {
		s, err := parseSlice(text)
		if err != nil {
			return nil, fmt.Errorf("slice %d: %w", i, err)
		}
		out = append(out, s)
	}
	return out, nil
}

func parseSlice(text []byte) (s partition.Slice, err error) {
	var fields []json.RawMessage
	if json.Unmarshal(text, &fields) != nil || len(fields) != 5 {
		return s, errSlice
	}
	var bounds [4]*int
	for i := range bounds {
		if json.Unmarshal(fields[i], &bounds[i]) != nil || bounds[i] == nil {
			return s, errSlice
		}
	}
	var mask *string
	if json.Unmarshal(fields[4], &mask) != nil || mask == nil {
		return s, errSlice
	}
	s.Q = partition.Range{Lo: *bounds[0], Hi: *bounds[1]}
	s.K = partition.Range{Lo: *bounds[2], Hi: *bounds[3]}
	s.Mask, err = partition.ParseSliceMask(*mask)
	return s, err
}
