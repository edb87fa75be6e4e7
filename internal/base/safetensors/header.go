package safetensors

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"unicode/utf8"
)

// Limits of a header, so that a small file does not take much memory. The format allows 100 MB. The largest known
// models have a tenth of MaxTensors in all of their files.
const (
	MaxHeader  = 32 << 20 // bytes
	MaxTensors = 1 << 18

	maxDims     = 32 // axes of a tensor
	maxName     = 512
	maxMetadata = 1 << 12 // keys
	maxFields   = 8       // keys of a tensor, of which the format has 3
)

const metadataKey = "__metadata__"

// Info is the header's entry of one tensor.
type Info struct {
	Name  string
	DType DType
	Shape []int // outermost first; empty for a scalar
	// Begin and End are the range of its bytes, relative to the end of the header.
	Begin, End int64
}

// Elements returns the number of elements.
func (i Info) Elements() int64 {
	n := int64(1)
	for _, d := range i.Shape {
		n *= int64(d)
	}
	return n
}

// Bytes returns the size of the elements.
func (i Info) Bytes() int64 { return i.End - i.Begin }

// ByteSize returns the size of a tensor in bytes. It fails on overflow.
func ByteSize(d DType, shape []int) (int64, error) {
	if !d.Known() {
		return 0, fmt.Errorf("unknown element type %.64q", d)
	}
	if len(shape) > maxDims {
		return 0, fmt.Errorf("a shape of %d axes; at most %d are read", len(shape), maxDims)
	}
	n := uint64(1)
	for _, dim := range shape {
		if dim < 0 {
			return 0, fmt.Errorf("negative length in shape %v", shape)
		}
		hi, lo := bits.Mul64(n, uint64(dim))
		if hi != 0 || lo > math.MaxInt64 {
			return 0, fmt.Errorf("shape %v has more elements than can be counted", shape)
		}
		n = lo
	}
	hi, lo := bits.Mul64(n, uint64(d.Bits()))
	if hi != 0 || lo > math.MaxInt64 {
		return 0, fmt.Errorf("shape %v of %s has more bytes than can be counted", shape, d)
	}
	if lo%8 != 0 {
		return 0, fmt.Errorf("shape %v of %s ends inside a byte", shape, d)
	}
	return int64(lo / 8), nil
}

// parseHeader parses the JSON and checks that the tensors cover dataSize bytes exactly. It returns the tensors sorted
// by offset.
func parseHeader(raw []byte, dataSize int64) (map[string]string, []Info, error) {
	if len(raw) == 0 || raw[0] != '{' {
		return nil, nil, errors.New("the header does not begin with '{'")
	}
	if !utf8.Valid(raw) {
		return nil, nil, errors.New("the header is not UTF-8")
	}
	p := parser{json.NewDecoder(bytes.NewReader(raw))}
	p.dec.UseNumber()
	var meta map[string]string
	var infos []Info
	err := p.object(MaxTensors+1, func(key string) (err error) {
		if key == metadataKey {
			meta, err = p.metadata()
			return wrapKey(key, err)
		}
		info, err := p.info(key)
		infos = append(infos, info)
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	if _, err := p.dec.Token(); err != io.EOF {
		return nil, nil, errors.New("the header goes on after its JSON object")
	}
	return meta, infos, cover(infos, dataSize)
}

// cover sorts tensors by offset and checks that they fill the data without holes and overlaps.
func cover(infos []Info, dataSize int64) error {
	slices.SortFunc(infos, func(a, b Info) int {
		return cmp.Or(cmp.Compare(a.Begin, b.Begin), cmp.Compare(a.End, b.End), cmp.Compare(a.Name, b.Name))
	})
	at := int64(0)
	for _, i := range infos {
		if i.Begin > at {
			return fmt.Errorf("tensor %q: bytes %d to %d before it belong to no tensor", i.Name, at, i.Begin)
		}
		if i.Begin < at {
			return fmt.Errorf("tensor %q: begins at byte %d, inside the tensor that ends at %d", i.Name, i.Begin, at)
		}
		at = i.End
	}
	switch {
	case at > dataSize:
		return fmt.Errorf("the tensors end at byte %d of the data, the file after %d: it is cut short", at, dataSize)
	case at < dataSize:
		return fmt.Errorf("the tensors end at byte %d of the data, the file goes on to %d", at, dataSize)
	}
	return nil
}

func wrapKey(key string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("header key %.255q: %w", key, err)
}

// A parser reads JSON by tokens. Decoding into a map or struct would ignore duplicate keys.
type parser struct{ dec *json.Decoder }

func (p parser) token() (json.Token, error) {
	t, err := p.dec.Token()
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return nil, fmt.Errorf("header JSON at byte %d: %w", p.dec.InputOffset(), err)
	}
	return t, nil
}

func (p parser) delim(want json.Delim) error {
	t, err := p.token()
	if err == nil && t != want {
		err = fmt.Errorf("header JSON at byte %d: %.64v where %v belongs", p.dec.InputOffset(), t, want)
	}
	return err
}

// object calls f at the value of each key. It fails for more than most keys.
func (p parser) object(most int, f func(key string) error) error {
	if err := p.delim('{'); err != nil {
		return err
	}
	seen := map[string]bool{}
	for p.dec.More() {
		t, err := p.token()
		if err != nil {
			return err
		}
		key, ok := t.(string)
		if !ok {
			return fmt.Errorf("header JSON at byte %d: %.64v where a key belongs", p.dec.InputOffset(), t)
		}
		switch {
		case seen[key]:
			return fmt.Errorf("header key %.255q stands twice", key)
		case len(key) > maxName:
			return fmt.Errorf("header key %.64q... has %d bytes; at most %d are read", key, len(key), maxName)
		case len(seen) >= most:
			return fmt.Errorf("the header has more than %d keys in one object", most)
		}
		seen[key] = true
		if err := f(key); err != nil {
			return err
		}
	}
	return p.delim('}')
}

func (p parser) metadata() (map[string]string, error) {
	m := map[string]string{}
	err := p.object(maxMetadata, func(key string) (err error) {
		m[key], err = p.str()
		return wrapKey(key, err)
	})
	return m, err
}

func (p parser) str() (string, error) {
	t, err := p.token()
	if err != nil {
		return "", err
	}
	s, ok := t.(string)
	if !ok {
		return "", fmt.Errorf("%.64v where a string belongs", t)
	}
	return s, nil
}

// ints parses an array of integers from 0 to the largest int64.
func (p parser) ints() ([]int64, error) {
	if err := p.delim('['); err != nil {
		return nil, err
	}
	xs := []int64{}
	for p.dec.More() {
		if len(xs) == maxDims {
			return nil, fmt.Errorf("more than %d numbers in a list", maxDims)
		}
		t, err := p.token()
		if err != nil {
			return nil, err
		}
		n, ok := t.(json.Number)
		if !ok {
			return nil, fmt.Errorf("%.64v where an integer belongs", t)
		}
		x, err := strconv.ParseUint(n.String(), 10, 63)
		if err != nil {
			return nil, fmt.Errorf("%.64s where an integer of at most 63 bits, not negative, belongs", n)
		}
		xs = append(xs, int64(x))
	}
	return xs, p.delim(']')
}

// info parses the value of one tensor's key.
func (p parser) info(name string) (Info, error) {
	i := Info{Name: name}
	var offsets []int64
	seen := 0
	err := p.object(maxFields, func(key string) error {
		seen++
		switch key {
		case "dtype":
			s, err := p.str()
			i.DType = DType(s)
			return wrapKey(key, err)
		case "shape":
			dims, err := p.ints()
			i.Shape = make([]int, len(dims))
			for k, d := range dims {
				if d > math.MaxInt {
					return fmt.Errorf("shape %v is too long for this machine", dims)
				}
				i.Shape[k] = int(d)
			}
			return wrapKey(key, err)
		case "data_offsets":
			var err error
			offsets, err = p.ints()
			return wrapKey(key, err)
		}
		return fmt.Errorf("unknown key %.64q", key)
	})
	if err == nil && seen != 3 {
		err = errors.New("needs the keys dtype, shape and data_offsets")
	}
	if err == nil && len(offsets) != 2 {
		err = fmt.Errorf("data_offsets has %d numbers, not 2", len(offsets))
	}
	if err != nil {
		return i, fmt.Errorf("tensor %q: %w", name, err)
	}
	i.Begin, i.End = offsets[0], offsets[1]
	size, err := ByteSize(i.DType, i.Shape)
	if err == nil && (i.End < i.Begin || i.End-i.Begin != size) {
		err = fmt.Errorf("data_offsets %d to %d do not hold the %d bytes of shape %v of %s", i.Begin, i.End, size,
			i.Shape, i.DType)
	}
	if err != nil {
		return i, fmt.Errorf("tensor %q: %w", name, err)
	}
	return i, nil
}
