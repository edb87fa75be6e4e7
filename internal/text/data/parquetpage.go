package data

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/andybalholm/brotli"
	"github.com/klauspost/compress/snappy"
	"github.com/klauspost/compress/zstd"
	"github.com/parquet-go/parquet-go/encoding/delta"
	"github.com/parquet-go/parquet-go/format"
)

// This file checks the pages of a Parquet file before the library reads them: it allocates what a header, a run or a
// compressed block claims.

// A compact walks a value of Thrift's compact protocol. The library would allocate the lengths in it.
type compact struct {
	r       *bufio.Reader
	left    int64 // bytes
	structs int   // that lists may still have
	ints    map[int]int64
	twice   bool // a field
}

// maxStructs bounds the structs in lists of a footer. Each takes hundreds of bytes of memory.
const maxStructs = 1 << 19

// walkStruct reads a struct of size bytes or fewer. It returns the values of integers and bools (1, 2: false) by their
// path: 501 is field 1 of field 5.
func walkStruct(r io.ReaderAt, at, size int64) (c *compact, length int64, err error) {
	c = &compact{r: bufio.NewReader(io.NewSectionReader(r, at, size)), left: size, structs: maxStructs,
		ints: map[int]int64{}}
	_, err = guard(func() (struct{}, error) {
		c.walk(12, 0, 0)
		return struct{}{}, nil
	})
	return c, size - c.left, err
}

func (c *compact) note(path int, v int64) {
	if _, had := c.ints[path]; had {
		c.twice = true
	}
	c.ints[path] = v
}

func (c *compact) skip(n uint64) {
	if n > uint64(c.left) {
		panic(rowFault{errors.New("a length beyond the end: it is damaged or cut short")})
	}
	if _, err := c.r.Discard(int(n)); err != nil {
		panic(rowFault{err})
	}
	c.left -= int64(n)
}

func (c *compact) byte() byte {
	b, err := c.r.Peek(1)
	if err != nil {
		panic(rowFault{io.ErrUnexpectedEOF})
	}
	v := b[0]
	c.skip(1)
	return v
}

func (c *compact) uvarint() (v uint64) {
	for shift := 0; shift < 64; shift += 7 {
		b := c.byte()
		if v |= uint64(b&0x7f) << shift; b < 0x80 {
			return v
		}
	}
	panic(rowFault{errors.New("an integer is too long")})
}

func (c *compact) walk(kind byte, path, depth int) {
	if depth > 32 {
		panic(rowFault{errors.New("structs are more than 32 deep")})
	}
	switch kind {
	case 1, 2, 3: // bool, int8
		c.skip(1)
	case 4, 5, 6: // integers
		v := c.uvarint()
		c.note(path, int64(v>>1)^-int64(v&1))
	case 7: // a float
		c.skip(8)
	case 8: // bytes
		c.skip(c.uvarint())
	case 9, 10: // a list or set
		head := c.byte()
		n := uint64(head >> 4)
		if n == 15 {
			n = c.uvarint()
		}
		c.items(n, head&15, path, depth)
	case 11: // a map
		if n := c.uvarint(); n > 0 {
			kinds := c.byte()
			for range min(n, uint64(c.left)+1) {
				c.items(1, kinds>>4, path, depth)
				c.items(1, kinds&15, path, depth)
			}
		}
	case 12: // a struct
		id := 0
		for head := c.byte(); head != 0; head = c.byte() {
			if id += int(head >> 4); head>>4 == 0 {
				v := c.uvarint()
				id = int(int64(v>>1) ^ -int64(v&1))
			}
			inner := path*100 + max(0, min(id, 99))
			if field := head & 15; field > 2 {
				c.walk(field, inner, depth+1)
			} else { // a bool
				c.note(inner, int64(field))
			}
		}
	default:
		panic(rowFault{fmt.Errorf("the type %d is unknown", kind)})
	}
}

// items walks n values of a list.
func (c *compact) items(n uint64, kind byte, path, depth int) {
	if kind == 12 {
		if c.structs -= int(min(n, maxStructs+1)); c.structs < 0 {
			panic(rowFault{fmt.Errorf("more than %d entries", maxStructs)})
		}
	}
	if n > uint64(c.left) {
		panic(rowFault{errors.New("a list beyond the end: it is damaged or cut short")})
	}
	for range n {
		c.walk(kind, path, depth+1)
	}
}

// A leaf is a column of values.
type leaf struct {
	name string
	def  int // the largest levels
	rep  int
	bool bool
}

// Paths of a page's header.
const (
	pageType, pageSize, packedSize                           = 1, 2, 3
	v1Values, v1Encoding, v1Def, v1Rep                       = 501, 502, 503, 504
	dictValues, dictEncoding                                 = 701, 702
	v2Values, v2Encoding, v2Def, v2Rep, v2Compressed         = 801, 804, 805, 806, 807
	encPlain, encPlainDict, encRLE, encDelta, encDeltaLength = 0, 2, 3, 5, 6
	encDeltaBytes, encDict, encSplit                         = 7, 8, 9
)

// checkNext checks the next page of values and a dictionary before it, just before the library reads them.
func (c *column) checkNext(f io.ReaderAt) error {
	packed := c.meta.TotalCompressedSize
	for isDict := true; isDict && c.next < c.end; {
		head, n, err := walkStruct(f, c.next, c.end-c.next)
		if err == nil && head.twice {
			err = errors.New("the header of a page is damaged")
		}
		if err != nil {
			return err
		}
		h := head.ints
		c.next += n
		values := max(h[v1Values], h[v2Values], h[dictValues])
		if h[packedSize] < 0 || h[packedSize] > c.end-c.next || h[pageSize] < 0 || values < 0 {
			return errors.New("a page has a wrong size: the file is cut short or damaged")
		}
		cost := h[pageSize] + 8*values
		if cost > expansion(packed) {
			return fmt.Errorf("a page claims %d bytes and %d values, too many for a column of %d bytes", h[pageSize], values,
				packed)
		}
		raw := make([]byte, h[packedSize])
		if err := readFull(f, raw, c.next); err != nil {
			return err
		}
		grown, err := c.leaf.checkPage(h, raw, c.meta.Codec)
		if err != nil {
			return err
		}
		c.next += h[packedSize]
		if isDict = h[pageType] == int64(format.DictionaryPage); isDict {
			c.dict = max(c.dict, cost)
		} else {
			c.takes = cost + grown
		}
	}
	return nil
}

// checkPage checks the content of a page, and returns the bytes to which prefixes of values expand.
func (l leaf) checkPage(h map[int]int64, raw []byte, codec format.CompressionCodec) (grown int64, err error) {
	kinds := 0
	for _, path := range []int{v1Values, v2Values, dictValues} {
		if _, ok := h[path]; ok {
			kinds++
		}
	}
	switch _, isV1 := h[v1Values]; {
	case kinds != 1:
		return 0, errors.New("the header of a page is damaged")
	case h[pageType] == int64(format.DictionaryPage):
		if h[dictEncoding] != encPlain && h[dictEncoding] != encPlainDict {
			return 0, fmt.Errorf("a dictionary has the encoding %d", h[dictEncoding])
		}
		_, err := unpackPage(raw, h[pageSize], codec)
		return 0, err
	case isV1:
		page, err := unpackPage(raw, h[pageSize], codec)
		if err != nil {
			return 0, err
		}
		for _, level := range []struct{ most, encoding int }{{l.rep, v1Rep}, {l.def, v1Def}} {
			if level.most == 0 {
				continue
			}
			if h[level.encoding] != encRLE || len(page) < 4 || int(binary.LittleEndian.Uint32(page)) > len(page)-4 {
				return 0, errors.New("levels of a page are damaged, or have an old encoding")
			}
			n := 4 + int(binary.LittleEndian.Uint32(page))
			if err := checkRuns(page[4:n], level.most, h[v1Values]); err != nil {
				return 0, err
			}
			page = page[n:]
		}
		return l.checkValues(page, h[v1Encoding], h[v1Values])
	}
	n, m := h[v2Rep], h[v2Def]
	if n < 0 || m < 0 || n+m > int64(len(raw)) || n+m > h[pageSize] {
		return 0, errors.New("levels of a page are damaged")
	}
	err = errors.Join(checkRuns(raw[:n], l.rep, h[v2Values]), checkRuns(raw[n:n+m], l.def, h[v2Values]))
	if err != nil {
		return 0, err
	}
	page := raw[n+m:]
	if h[v2Compressed] == 2 {
		codec = format.Uncompressed
	}
	if page, err = unpackPage(page, h[pageSize]-n-m, codec); err != nil {
		return 0, err
	}
	return l.checkValues(page, h[v2Encoding], h[v2Values])
}

// checkValues checks the encoded values of a page.
func (l leaf) checkValues(page []byte, encoding, values int64) (grown int64, err error) {
	switch encoding {
	case encPlain, encSplit:
		return 0, nil
	case encPlainDict, encDict:
		if len(page) == 0 {
			return 0, nil
		}
		if page[0] > 32 {
			return 0, errors.New("indices of a page are damaged")
		}
		return 0, checkRuns(page[1:], 1<<page[0]-1, values)
	case encRLE:
		if !l.bool || len(page) < 4 {
			return 0, errors.New("values of a page are damaged")
		}
		return 0, checkRuns(page[4:], 1, values)
	case encDelta, encDeltaLength, encDeltaBytes:
		if err := checkDelta(page, values); err != nil || encoding != encDeltaBytes {
			return 0, err
		}
		prefixes, err := new(delta.BinaryPackedEncoding).DecodeInt32(nil, page)
		for _, n := range prefixes {
			grown += max(0, int64(n))
		}
		if grown > expansion(int64(len(page))) {
			err = fmt.Errorf("prefixes of values expand to %d bytes", grown)
		}
		return grown, err
	}
	return 0, fmt.Errorf("the encoding %d is not read", encoding)
}

var errRuns = errors.New("runs of a page have more values than its header: it is damaged")

// checkRuns checks the runs of RLE of integers up to most. They hold at most values, and padding.
func checkRuns(b []byte, most int, values int64) error {
	width := int64(0)
	for ; most>>width > 0; width++ {
	}
	for left := values + 512; len(b) > 0; {
		head, n := binary.Uvarint(b)
		if n <= 0 {
			return errRuns
		}
		count, bytes := int64(head>>1), (width+7)/8
		if head&1 == 1 {
			count, bytes = min(count, values+512)*8, count*width
		}
		if left -= count; count < 0 || left < 0 || bytes > int64(len(b)-n) && head&1 == 0 {
			return errRuns
		}
		b = b[min(int64(len(b)), int64(n)+bytes):]
	}
	return nil
}

// checkDelta checks the claimed number of delta-encoded integers.
func checkDelta(b []byte, values int64) error {
	var head [3]uint64
	for i := range head {
		v, n := binary.Uvarint(b)
		if n <= 0 {
			return errRuns
		}
		head[i], b = v, b[n:]
	}
	if head[2] > uint64(values) {
		return errRuns
	}
	return nil
}

// unpackPage decompresses a page of exactly size bytes.
func unpackPage(raw []byte, size int64, codec format.CompressionCodec) (page []byte, err error) {
	var r io.Reader
	switch codec {
	case format.Uncompressed:
		if int64(len(raw)) != size {
			return nil, errSize
		}
		return raw, nil
	case format.Snappy:
		if n, err := snappy.DecodedLen(raw); err != nil || int64(n) != size {
			return nil, errors.Join(err, errSize)
		}
		return snappy.Decode(nil, raw)
	case format.Gzip:
		r, err = gzip.NewReader(bytes.NewReader(raw))
	case format.Brotli:
		r = brotli.NewReader(bytes.NewReader(raw))
	case format.Zstd:
		var z *zstd.Decoder
		z, err = zstd.NewReader(bytes.NewReader(raw), zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
		if err == nil {
			defer z.Close()
			r = z
		}
	default:
		return nil, fmt.Errorf("compressed by %s, which is not read; write the file with zstd", codec)
	}
	if err == nil {
		page, err = io.ReadAll(io.LimitReader(r, size+1))
	}
	if err == nil && int64(len(page)) != size {
		err = errSize
	}
	return page, err
}

var errSize = errors.New("a page does not have the size in its header: it is damaged")
