package data

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	flatbuffers "github.com/google/flatbuffers/go"

	"github.com/cprun/cprun/internal/base/files"
)

// maxBody bounds each buffer of an Arrow file. datasets writes batches of 1,000 rows.
const maxBody = 4 << 30

// openArrow reads a stream of Arrow's IPC format, as datasets writes.
func openArrow(f *os.File, size int64) (rowReader, error) {
	if err := checkStream(f, size); err != nil {
		return nil, err
	}
	bounded := &boundedMemory{memory.NewGoAllocator(), 0, size}
	alloc := ipc.WithAllocator(bounded)
	r, err := ipc.NewReaderFromMessageReader(ipc.NewMessageReader(io.NewSectionReader(f, 0, size), alloc,
		ipc.WithMetadataSizeLimit(min(size, maxFooter)), ipc.WithBodySizeLimit(min(size, maxBody))), alloc)
	if err != nil {
		return nil, err
	}
	at := int64(0)
	return func() (lines [][]byte, err error) {
		batch := r.RecordBatch()
		for batch == nil || at == batch.NumRows() {
			bounded.used = 0
			if !r.Next() && r.Err() != nil {
				return nil, r.Err()
			} else if r.RecordBatch() == nil {
				return nil, io.EOF
			}
			batch, at = r.RecordBatch(), 0
		}
		bytes := 0
		for end := min(at+someRows, batch.NumRows()); at < end && bytes < batchBytes; at++ {
			line, err := guard(func() ([]byte, error) { return arrowRow(batch, int(at)), nil })
			if err != nil {
				return lines, err
			}
			lines, bytes = append(lines, line), bytes+len(line)
		}
		return lines, nil
	}, nil
}

func arrowRow(batch arrow.RecordBatch, at int) []byte {
	var line rowLine
	for k, column := range batch.Columns() {
		field := batch.Schema().Field(k)
		line.add(field.Name, func(b []byte) []byte { return appendArrow(b, field, column, at) })
	}
	return line.end()
}

// checkStream checks the heads of all messages. The library would take a file cut between messages for a whole one, and
// would allocate any length that a table claims.
func checkStream(f io.ReaderAt, size int64) error {
	left := 10_000 // fields of the schema
	for at := int64(0); ; {
		head := make([]byte, min(8, size-at))
		if err := readFull(f, head, at); err != nil {
			return err
		}
		if strings.HasPrefix(string(head), "ARROW1") {
			return errors.New("this is Arrow's file format (Feather), not its stream format, which datasets writes; " +
				"write it as .parquet")
		}
		if len(head) < 8 || string(head[:4]) != "\xff\xff\xff\xff" {
			return fmt.Errorf("no message of Arrow at byte %d: the file is cut short, damaged or still being written", at)
		}
		n := int64(binary.LittleEndian.Uint32(head[4:]))
		if n == 0 && at+8 == size { // the end
			return nil
		}
		if n == 0 {
			return fmt.Errorf("the stream ends at byte %d of %d: the file is damaged", at+8, size)
		}
		if n > min(size-at-8, maxFooter) {
			return fmt.Errorf("the message at byte %d has a head of %d bytes: it is cut short or damaged", at, n)
		}
		buf := make([]byte, n)
		if err := readFull(f, buf, at+8); err != nil {
			return err
		}
		message := flatbuffers.Table{Bytes: buf, Pos: flatbuffers.GetUOffsetT(buf)}
		if at == 0 {
			var schema flatbuffers.Table
			message.Union(&schema, flatbuffers.UOffsetT(message.Offset(8)))
			if err := checkFields(&schema, 6, 8, &left); err != nil {
				return err
			}
		}
		body := message.GetInt64Slot(10, 0)
		if o := flatbuffers.UOffsetT(message.Offset(12)); body < 0 || body > size-at-8-n ||
			o != 0 && message.VectorLen(o) > len(buf) {
			return fmt.Errorf("the message at byte %d has a body of %d bytes: the file is cut short or damaged", at, body)
		}
		at += 8 + n + body
	}
}

// checkFields checks the fields and metadata in these slots of a table, and inner fields. left bounds their number:
// damaged tables may contain each other.
func checkFields(t *flatbuffers.Table, fields, metadata flatbuffers.VOffsetT, left *int) error {
	if o := flatbuffers.UOffsetT(t.Offset(metadata)); o != 0 && t.VectorLen(o) > len(t.Bytes) {
		return errors.New("the schema is damaged")
	}
	o := flatbuffers.UOffsetT(t.Offset(fields))
	if o == 0 {
		return nil
	}
	n := t.VectorLen(o)
	if *left -= n; *left < 0 {
		return errors.New("the schema is damaged, or has more than 10,000 fields")
	}
	for i := range n {
		field := flatbuffers.Table{Bytes: t.Bytes, Pos: t.Indirect(t.Vector(o) + flatbuffers.UOffsetT(4*i))}
		if kind := field.GetByteSlot(8, 0); kind >= runEndEncoded {
			return fmt.Errorf("a column has a type of Arrow (number %d) that is not read, such as a view", kind)
		}
		if err := checkFields(&field, 14, 16, left); err != nil {
			return err
		}
	}
	return nil
}

// runEndEncoded is the first of the later types in Arrow's Schema.fbs.
const runEndEncoded = 22

// boundedMemory refuses sizes that a damaged file claims for the unpacked buffers of a batch.
type boundedMemory struct {
	memory.Allocator
	used int64 // by the present batch
	size int64 // of the file
}

func (m *boundedMemory) Allocate(size int) []byte {
	if m.used += int64(size); m.used > expansion(m.size) {
		panic(rowFault{fmt.Errorf("a batch takes more than %d bytes of a file of %d", expansion(m.size), m.size)})
	}
	return m.Allocator.Allocate(size)
}

// appendArrow appends a value as JSON. The library leaves extension types to their storage.
func appendArrow(b []byte, field arrow.Field, a arrow.Array, i int) []byte {
	if _, null := a.(*array.Null); null || a.IsNull(i) {
		return append(b, "null"...)
	}
	extension, _ := field.Metadata.GetValue("ARROW:extension:name")
	switch a := a.(type) {
	case *array.Dictionary:
		return appendArrow(b, field, a.Dictionary(), a.GetValueIndex(i))
	case array.StringLike:
		if extension == "arrow.json" {
			return appendJSON(b, []byte(a.Value(i)))
		}
		return appendString(b, a.Value(i))
	case *array.FixedSizeBinary:
		if extension == "arrow.uuid" && len(a.Value(i)) == 16 {
			return appendUUID(b, a.Value(i))
		}
	case *array.Int64:
		return strconv.AppendInt(b, a.Value(i), 10)
	case *array.Int32:
		return strconv.AppendInt(b, int64(a.Value(i)), 10)
	case *array.Int8:
		if extension == "arrow.bool8" {
			return strconv.AppendBool(b, a.Value(i) != 0)
		}
	case *array.Struct:
		var line rowLine
		for k := range a.NumField() {
			inner := a.DataType().(*arrow.StructType).Field(k)
			line.put(inner.Name, func(b []byte) []byte { return appendArrow(b, inner, a.Field(k), i) })
		}
		return append(b, line.end()...)
	case *array.Boolean:
		return strconv.AppendBool(b, a.Value(i))
	case *array.Float64:
		return appendFloat(b, a.Value(i))
	case *array.Float32:
		return appendFloat(b, float64(a.Value(i)))
	case array.ListLike:
		from, to := a.ValueOffsets(i)
		inner := a.DataType().(arrow.ListLikeType).ElemField()
		b = append(b, '[')
		for k := from; k < to; k++ {
			if k > from {
				b = append(b, ',')
			}
			checkLong(b)
			b = appendArrow(b, inner, a.ListValues(), int(k))
		}
		return append(b, ']')
	}
	if arrow.IsInteger(a.DataType().ID()) {
		return append(b, a.ValueStr(i)...)
	}
	return append(b, "true"...)
}

// datasetFiles lists the files of a directory that datasets has saved; none of another directory.
func datasetFiles(dir string) (paths []string, err error) {
	raw, err := files.Read(filepath.Join(dir, "state.json"), 16<<20)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(filepath.Join(dir, "dataset_dict.json")); err == nil {
			return nil, fmt.Errorf("%s has several splits; name one, as in %s", dir, filepath.Join(dir, "train"))
		}
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	type names []struct{ Filename string }
	var state struct {
		Data    names `json:"_data_files"`
		Indices names `json:"_indices_files"`
	}
	if err := json.Unmarshal(raw, &state); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, "state.json"), err)
	}
	if len(state.Indices) > 0 {
		return nil, fmt.Errorf("%s selects rows by an index, which is not read; call flatten_indices() and save it again",
			dir)
	}
	for _, f := range state.Data {
		if !filepath.IsLocal(f.Filename) || filepath.Ext(f.Filename) != ".arrow" {
			return nil, fmt.Errorf("%s: %q is not an .arrow file in this directory", filepath.Join(dir, "state.json"),
				f.Filename)
		}
		paths = append(paths, filepath.Join(dir, f.Filename))
	}
	return paths, nil
}
