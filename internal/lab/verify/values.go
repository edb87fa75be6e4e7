package verify

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/parquet-go/parquet-go"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/text/chat"
)

// This file reads the records of a file as values of package chat, in the order of the file. It shares no code with
// package data: the columns come from the libraries' own readers.

// kindOf returns the kind of a file: text, tokens, json, parquet or arrow. A known extension decides, else the content.
func kindOf(path string) (string, error) {
	name := strings.ToLower(path)
	ext := filepath.Ext(strings.TrimSuffix(strings.TrimSuffix(name, ".gz"), ".zst"))
	for kind, list := range map[string]string{"tokens": ".bin", "text": ".txt .text .md .rst .tex",
		"json": ".jsonl .ndjson .jsonlines .json", "parquet": ".parquet", "arrow": ".arrow"} {
		if slices.Contains(strings.Fields(list), ext) {
			return kind, nil
		}
	}
	return unpacked(path, func(r io.Reader) (string, error) {
		b := bufio.NewReaderSize(r, 1<<20)
		head, _ := b.Peek(4)
		switch string(head) {
		case "PAR1":
			return "parquet", nil
		case "\xff\xff\xff\xff":
			return "arrow", nil
		}
		found := errors.New("an object")
		if err := objects(b, func(*chat.Dict) error { return found }); err == found {
			return "json", nil
		}
		return "text", nil
	})
}

// objects calls f with each object of JSON: one after the other, in a list, or in the only list of an outer object
// without keys of a record.
func objects(r io.Reader, f func(*chat.Dict) error) error {
	b := bufio.NewReader(r)
	if head, _ := b.Peek(3); string(head) == "\ufeff" {
		b.Discard(3)
	}
	d := json.NewDecoder(&lenient{in: b})
	for n := 0; d.More(); n++ {
		var raw json.RawMessage
		err := d.Decode(&raw)
		var v chat.Value
		if err == nil {
			v, err = chat.Decode(raw)
		}
		if err != nil {
			return err
		}
		list, ok := v.([]chat.Value)
		if o, only := v.(*chat.Dict); only && n == 0 && len(o.Keys) == 1 && !slices.Contains(recordKeys, o.Keys[0]) {
			list, ok = o.Data[o.Keys[0]].([]chat.Value)
		}
		if !ok {
			list = []chat.Value{v}
		}
		for _, v := range list {
			o, ok := v.(*chat.Dict)
			if !ok {
				return errors.New("a value that is no object")
			}
			if err := f(o); err != nil {
				return err
			}
		}
	}
	if _, err := d.Token(); err != io.EOF {
		return err
	}
	return nil
}

// recordKeys lists the keys that records have alone.
var recordKeys = []string{"text", "input_ids", "messages", "conversations"}

// A lenient replaces the NaN and infinities of Python's JSON by null, line by line: no string goes over two.
type lenient struct {
	in  *bufio.Reader
	out []byte
}

// notNumbers matches them, and strings, which may contain them.
var notNumbers = regexp.MustCompile(`"(?:[^"\\]|\\.)*"|NaN|-?Infinity`)

// Read reads at most one line.
func (l *lenient) Read(p []byte) (int, error) {
	if len(l.out) == 0 {
		line, err := l.in.ReadBytes('\n')
		if l.out = line; len(line) == 0 {
			return 0, err
		}
		if bytes.Contains(line, []byte("NaN")) || bytes.Contains(line, []byte("Infinity")) {
			l.out = notNumbers.ReplaceAllFunc(line, func(word []byte) []byte {
				if word[0] == '"' {
					return word
				}
				return []byte("null")
			})
		}
	}
	n := copy(p, l.out)
	l.out = l.out[n:]
	return n, nil
}

// arrowRows calls f with each row of a stream of Arrow.
func arrowRows(path string, f func(*chat.Dict) error) error {
	in, err := files.Open(path)
	if err != nil {
		return err
	}
	defer in.Close()
	r, err := ipc.NewReader(in)
	if err != nil {
		return err
	}
	defer r.Release()
	for r.Next() {
		batch := r.RecordBatch()
		for i := range int(batch.NumRows()) {
			o := chat.NewDict()
			for k, column := range batch.Columns() {
				if err := setArrow(o, batch.Schema().Field(k), column, i); err != nil {
					return err
				}
			}
			if err := f(o); err != nil {
				return err
			}
		}
	}
	return r.Err()
}

// setArrow sets a key to a value, unless it is null: every row has every key.
func setArrow(o *chat.Dict, field arrow.Field, a arrow.Array, i int) error {
	v, err := arrowValue(field, a, i)
	if err == nil && v != nil {
		o.Set(field.Name, v)
	}
	return err
}

func arrowValue(field arrow.Field, a arrow.Array, i int) (v chat.Value, err error) {
	if a.IsNull(i) || a.DataType().ID() == arrow.NULL {
		return nil, nil
	}
	if x, ok := a.(array.ExtensionArray); ok { // of a type that the library knows
		field.Metadata = arrow.NewMetadata([]string{nameKey}, []string{x.ExtensionType().ExtensionName()})
		return arrowValue(field, x.Storage(), i)
	}
	switch a := a.(type) {
	case *array.Dictionary:
		return arrowValue(field, a.Dictionary(), a.GetValueIndex(i))
	case *array.Struct:
		o := chat.NewDict()
		for k, f := range a.DataType().(*arrow.StructType).Fields() {
			if err := setArrow(o, f, a.Field(k), i); err != nil {
				return nil, err
			}
		}
		return o, nil
	case array.ListLike:
		list := []chat.Value{}
		elem := a.DataType().(arrow.ListLikeType).ElemField()
		for lo, hi := a.ValueOffsets(i); lo < hi && err == nil; lo++ {
			v, err = arrowValue(elem, a.ListValues(), int(lo))
			list = append(list, v)
		}
		return list, err
	case *array.Boolean:
		return a.Value(i), nil
	case *array.Float32:
		return float64(a.Value(i)), nil
	case *array.Float64:
		return a.Value(i), nil
	}
	switch name, _ := field.Metadata.GetValue(nameKey); name {
	case "arrow.json":
		return chat.Decode([]byte(a.ValueStr(i)))
	case "arrow.bool8":
		return a.ValueStr(i) != "0", nil
	case "arrow.uuid":
		if b, ok := a.(*array.FixedSizeBinary); ok {
			return uuid(b.Value(i)), nil
		}
	}
	switch a.DataType().ID() {
	case arrow.STRING, arrow.LARGE_STRING, arrow.STRING_VIEW:
		return a.ValueStr(i), nil
	}
	if arrow.IsInteger(a.DataType().ID()) {
		return chat.Decode([]byte(a.ValueStr(i)))
	}
	return true, nil // no record has it
}

// nameKey is the key of a field's extension type.
const nameKey = "ARROW:extension:name"

func uuid(b []byte) string {
	if len(b) != 16 {
		return ""
	}
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// parquetRows calls f with each row of a file of Parquet.
func parquetRows(path string, f func(*chat.Dict) error) error {
	in, err := files.Open(path)
	if err != nil {
		return err
	}
	defer in.Close()
	st, err := in.Stat()
	if err != nil {
		return err
	}
	file, err := parquet.OpenFile(in, st.Size())
	if err != nil {
		return err
	}
	schema := parquet.NewSchema("", raw{file.Schema()})
	for _, group := range file.RowGroups() {
		if err := groupRows(group, schema, file.Schema(), f); err != nil {
			return err
		}
	}
	return nil
}

func groupRows(group parquet.RowGroup, schema *parquet.Schema, types parquet.Node, f func(*chat.Dict) error) error {
	if group.NumRows() == 0 {
		return nil
	}
	rows, buf := group.Rows(), make([]parquet.Row, 16)
	defer rows.Close()
	for {
		n, end := rows.ReadRows(buf)
		for _, row := range buf[:n] {
			var v any
			if err := schema.Reconstruct(&v, row); err != nil {
				return err
			}
			v, err := parquetValue(v, types)
			if err != nil {
				return err
			}
			if err := f(v.(*chat.Dict)); err != nil { // a group has a map
				return err
			}
		}
		switch {
		case end == io.EOF:
			return nil
		case end != nil:
			return end
		case n == 0: // it would return this again
			return io.ErrNoProgress
		}
	}
}

// A raw is a node of a schema whose JSON is text, since the library's own values of JSON forget the order of keys.
type raw struct{ parquet.Node }

// Fields returns the fields likewise.
func (r raw) Fields() (list []parquet.Field) {
	for _, f := range r.Node.Fields() {
		list = append(list, rawField{f, raw{f}})
	}
	return list
}

// Type returns text in place of JSON.
func (r raw) Type() parquet.Type {
	if r.Leaf() && r.Node.Type().String() == "JSON" {
		return parquet.String().Type()
	}
	return r.Node.Type()
}

type rawField struct {
	parquet.Field
	raw raw
}

// Fields returns the fields of raw.
func (f rawField) Fields() []parquet.Field { return f.raw.Fields() }

// Type returns the type of raw.
func (f rawField) Type() parquet.Type { return f.raw.Type() }

// parquetValue gives a value of the library the order and the types of the schema.
func parquetValue(v any, node parquet.Node) (chat.Value, error) {
	switch v := v.(type) {
	case []any:
		list := []chat.Value{}
		for _, x := range v {
			y, err := parquetValue(x, element(node))
			if err != nil {
				return nil, err
			}
			list = append(list, y)
		}
		return list, nil
	case map[string]any:
		o := chat.NewDict()
		for _, field := range node.Fields() {
			x, err := parquetValue(v[field.Name()], field)
			if err != nil {
				return nil, err
			}
			if x != nil {
				o.Set(field.Name(), x)
			}
		}
		return o, nil
	case []byte:
		return parquetValue(string(v), node)
	case [16]byte:
		return uuid(v[:]), nil
	case string:
		if node.Leaf() && node.Type().String() == "JSON" {
			return chat.Decode([]byte(v))
		}
		return v, nil
	case int32, int64, uint32, uint64:
		return chat.Decode(fmt.Append(nil, v))
	case float32:
		return float64(v), nil
	}
	return v, nil
}

// element returns the node of a list's elements: below the group of a LIST, or the repeated node itself.
func element(node parquet.Node) parquet.Node {
	for !node.Leaf() && !node.Repeated() && len(node.Fields()) == 1 && node.Fields()[0].Repeated() {
		if node = node.Fields()[0]; !node.Leaf() && len(node.Fields()) == 1 {
			return node.Fields()[0]
		}
	}
	return node
}
