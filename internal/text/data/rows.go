package data

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"math"
	"os"
	"strconv"
	"unicode/utf8"
)

// A rowReader returns some rows of a file as lines of .jsonl, so that record.go checks them like other records; io.EOF
// at the end. These formats have every key in each row, and in each map of a list, so nulls are left out. A value that
// no record can have, or that no key in use has, is true.
type rowReader func() (lines [][]byte, err error)

// someRows is the number of rows in one call of a rowReader.
const someRows = 16

// rows yields the rows of a .parquet or .arrow file.
func rows(f *os.File, path string, size int64) iter.Seq2[[]byte, error] {
	open := openParquet
	if FileKind(path) == "arrow" {
		open = openArrow
	}
	return func(yield func([]byte, error) bool) {
		next, err := guard(func() (rowReader, error) { return open(f, size) })
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		for total := int64(0); err == nil; {
			var lines [][]byte
			lines, err = guard(next)
			for _, line := range lines {
				if len(line) > maxLine {
					yield(nil, errLong)
					return
				}
				if total += int64(len(line)); total > expansion(size) {
					yield(nil, fmt.Errorf("the rows up to this one make %d bytes of a file of %d, most of them in column %s; "+
						"such repeated values are not read", total, size, longest(line)))
					return
				}
				if !yield(line, nil) {
					return
				}
			}
		}
		if err != io.EOF {
			yield(nil, err)
		}
	}
}

// expansion bounds the bytes to which a file or column of some bytes expands. Compressed text has a tenth of its size;
// one of this share is made to fill the memory.
func expansion(size int64) int64 { return max(128<<20, 1100*size) }

// longest returns the key with the longest value in a line.
func longest(line []byte) (longest string) {
	var keys map[string]json.RawMessage
	_ = json.Unmarshal(line, &keys)
	for key, value := range keys {
		if longest == "" || len(value) > len(keys[longest]) {
			longest = key
		}
	}
	return longest
}

// A rowFault is an error that ends reading a row.
type rowFault struct{ error }

// checkLong ends a row that is too long.
func checkLong(b []byte) {
	if len(b) > maxLine {
		panic(rowFault{errLong})
	}
}

// appendJSON appends a value that is JSON already.
func appendJSON(b, value []byte) []byte {
	if value = finite(value); !json.Valid(value) {
		panic(rowFault{fmt.Errorf("a value of type json is not JSON: %.40q", value)})
	}
	return append(b, value...)
}

func appendUUID(b, u []byte) []byte {
	return fmt.Appendf(b, `"%x-%x-%x-%x-%x"`, u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}

// guard turns the panics of a library on damaged files into errors.
func guard[T any](call func() (T, error)) (t T, err error) {
	defer func() {
		p := recover()
		if fault, ok := p.(rowFault); ok {
			err = fault.error
		} else if p != nil {
			err = fmt.Errorf("the file is damaged: %v", p)
		}
	}()
	return call()
}

// A rowLine builds a line of .jsonl.
type rowLine []byte

// add adds a key of a record with the value that value appends, unless it is null. Only keys of records have a value.
func (l *rowLine) add(key string, value func(b []byte) []byte) {
	defer func() {
		switch p := recover().(type) {
		case nil:
		case rowFault:
			panic(rowFault{fmt.Errorf("column %s: %w", key, p.error)})
		default:
			panic(p)
		}
	}()
	if matters(key) {
		l.put(key, value)
		return
	}
	l.put(key, func(b []byte) []byte {
		at := len(b)
		if b = value(b); string(b[at:]) == "null" {
			return b
		}
		return append(b[:at], "true"...)
	})
}

// put adds a key with the value that value appends, unless it is null.
func (l *rowLine) put(key string, value func(b []byte) []byte) {
	before := len(*l)
	b := append(*l, ","...)
	if before == 0 {
		b[0] = '{'
	}
	b = append(appendString(b, key), ':')
	at := len(b)
	if b = value(b); string(b[at:]) == "null" {
		b = b[:before]
	}
	*l = b
}

func (l rowLine) end() []byte {
	if len(l) == 0 {
		l = append(l, '{')
	}
	return append(l, '}')
}

// appendFloat appends a float that no parser takes for an integer; null for a NaN or an infinity.
func appendFloat(b []byte, f float64) []byte {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return append(b, "null"...)
	}
	at := len(b)
	if b = strconv.AppendFloat(b, f, 'g', -1, 64); !bytes.ContainsAny(b[at:], ".e") {
		b = append(b, ".0"...)
	}
	return b
}

// appendString appends a JSON string. Bytes outside UTF-8 stay as they are, so that the record is refused.
func appendString(b []byte, s string) []byte {
	quoted, err := json.Marshal(s)
	if err != nil || !utf8.ValidString(s) {
		return append(append(append(b, '"'), s...), '"')
	}
	return append(b, quoted...)
}
