package attend

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/partition"
)

// maxDocs is how many documents a case may have, maxSlices how many slices.
const (
	maxDocs   = 1 << 20
	maxSlices = 1 << 16
)

// documents is lengths as the metadata have them: a list for all samples, or one for each.
type documents struct {
	lists   [][]int // nil: none
	samples bool    // a list for each sample
}

// length is an integer of JSON: null, fractions and numbers beyond an int are none.
type length int

// UnmarshalJSON reads a length.
func (n *length) UnmarshalJSON(b []byte) error {
	if bytes.Equal(b, []byte("null")) {
		return errors.New("null is no length")
	}
	return json.Unmarshal(b, (*int)(n))
}

// lengthList is a list of lengths: null is none.
type lengthList []length

// UnmarshalJSON reads a list.
func (l *lengthList) UnmarshalJSON(b []byte) error {
	if !bytes.HasPrefix(b, []byte("[")) {
		return errors.New("not a list")
	}
	return json.Unmarshal(b, (*[]length)(l))
}

func (l lengthList) ints() []int {
	out := make([]int, len(l))
	for i, n := range l {
		out[i] = int(n)
	}
	return out
}

// parseDocuments reads a JSON list of lengths, or a list of such lists, one for each sample. An empty list, and null, are
// no documents.
func parseDocuments(text string) (d documents, err error) {
	if err := files.Modest([]byte(text), maxDocs+1); err != nil {
		return d, err
	}
	var one []length
	if json.Unmarshal([]byte(text), &one) == nil {
		if len(one) > 0 {
			d.lists = [][]int{lengthList(one).ints()}
		}
		return d, nil
	}
	var each []lengthList
	if json.Unmarshal([]byte(text), &each) != nil {
		return d, errors.New("want a JSON list of document lengths, or a list of such lists, one for each sample")
	}
	d.samples = true
	for _, l := range each {
		d.lists = append(d.lists, l.ints())
	}
	return d, nil
}

// tokens is how many the documents of one list hold; 0: there are none, or several lists, or ones that
// cannot be, which readMasks says.
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

// errSlice is what every slice must be.
var errSlice = errors.New("want [q0, q1, k0, k1, mask]: queries q0 to q1 and keys k0 to k1, the ends excluded, and full, causal, inv_causal or bi_causal")

// parseSlices reads a JSON list of slices. An empty list, and null, are none, as of documents.
func parseSlices(text string) ([]partition.Slice, error) {
	if err := files.Modest([]byte(text), 6*maxSlices+1); err != nil {
		return nil, err
	}
	var list []json.RawMessage
	if json.Unmarshal([]byte(text), &list) != nil {
		return nil, errors.New("want a JSON list of slices [q0, q1, k0, k1, mask]")
	}
	if len(list) > maxSlices {
		return nil, fmt.Errorf("there are %d slices; at most %d are read", len(list), maxSlices)
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
	var bounds [4]length
	for i := range bounds {
		if json.Unmarshal(fields[i], &bounds[i]) != nil {
			return s, errSlice
		}
	}
	var mask *string
	if json.Unmarshal(fields[4], &mask) != nil || mask == nil {
		return s, errSlice
	}
	s.Q = partition.Range{Lo: int(bounds[0]), Hi: int(bounds[1])}
	s.K = partition.Range{Lo: int(bounds[2]), Hi: int(bounds[3])}
	s.Mask, err = partition.ParseSliceMask(*mask)
	return s, err
}
