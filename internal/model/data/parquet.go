package data

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/parquet-go/parquet-go"
	"github.com/parquet-go/parquet-go/format"
)

// A parquetNode is a node of the schema. Levels count the optional and repeated nodes on the path to it that have a
// value.
type parquetNode struct {
	name     string
	fields   []*parquetNode // of a map
	list     *parquetNode   // the element of a list
	optional bool
	present  int // the level from which it is not null
	filled   int // the level from which a list has an element
	repeated int // the lists around an element
	first    int // the columns below are [first, end)
	end      int
	text     bool
	kind     parquet.Kind
}

// maxFooter bounds the footer, or the schema of Arrow, which is held at its claimed size.
const maxFooter = 64 << 20

func openParquet(f *os.File, size int64) (rowReader, error) {
	var end [8]byte
	if size < 12 {
		return nil, fmt.Errorf("%d bytes are too few for Parquet: the file is cut short", size)
	}
	if err := readFull(f, end[:], size-8); err != nil {
		return nil, err
	}
	if n := int64(binary.LittleEndian.Uint32(end[:])); string(end[4:]) != "PAR1" || n > min(size-12, maxFooter) {
		return nil, errors.New("it does not end in a footer of Parquet and its size: the file is cut short, damaged, " +
			"encrypted or still being written")
	}
	file, err := parquet.OpenFile(f, size, parquet.SkipPageIndex(true), parquet.SkipBloomFilters(true))
	if err != nil {
		return nil, err
	}
	for _, group := range file.Metadata().RowGroups {
		for _, c := range group.Columns {
			// On a damaged block of LZ4, the library asks for ever more memory.
			if c.MetaData.Codec == format.Lz4 || c.MetaData.Codec == format.Lz4Raw {
				return nil, fmt.Errorf("column %s is compressed by LZ4, which is not read; write the file with zstd",
					strings.Join(c.MetaData.PathInSchema, "."))
			}
		}
	}
	columns := 0
	root, groups := newParquetNode(file.Schema(), "", 0, 0, &columns), file.RowGroups()
	values := make([][]parquet.Value, columns)
	var open parquet.Rows
	read, buf := int64(0), make([]parquet.Row, someRows)
	return func() (lines [][]byte, err error) {
		for open == nil {
			if len(groups) == 0 && read != file.NumRows() {
				return nil, fmt.Errorf("it has %d rows, and its footer claims %d: it is damaged", read, file.NumRows())
			}
			if len(groups) == 0 {
				return nil, io.EOF
			}
			open, groups = groups[0].Rows(), groups[1:]
		}
		n, err := open.ReadRows(buf)
		for _, row := range buf[:n] {
			row.Range(func(i int, column []parquet.Value) bool {
				values[i] = column
				return true
			})
			var line rowLine
			for _, key := range root.fields {
				line.add(key.name, func(b []byte) []byte { return key.append(b, values) })
			}
			lines = append(lines, line.end())
		}
		read += int64(n)
		if n == 0 && err == nil { // it would return this again
			err = io.ErrNoProgress
		}
		if err == io.EOF {
			err, open = open.Close(), nil
		}
		return lines, err
	}, nil
}

func newParquetNode(node parquet.Node, name string, level, lists int, column *int) *parquetNode {
	n := &parquetNode{name: name, optional: node.Optional(), first: *column}
	if n.optional {
		level++
	}
	n.present, n.filled, n.repeated = level, level+1, lists+1
	switch {
	case node.Repeated():
		n.list = newParquetNode(parquet.Required(node), name, level+1, lists+1, column)
	case node.Leaf():
		n.kind = node.Type().Kind()
		n.text = slices.Contains([]string{"STRING", "JSON", "ENUM"}, node.Type().String())
		*column++
	default:
		for _, field := range node.Fields() {
			n.fields = append(n.fields, newParquetNode(field, field.Name(), level, lists, column))
		}
		if len(n.fields) == 1 && name != "" && node.Fields()[0].Repeated() { // a LIST: a group of its elements
			n.list, n.fields = n.fields[0].list, nil
			if len(n.list.fields) == 1 {
				n.list = n.list.fields[0]
			}
		}
	}
	n.end = *column
	return n
}

// append appends the JSON of the next value, and removes it from its columns.
func (n *parquetNode) append(b []byte, columns [][]parquet.Value) []byte {
	level := columns[n.first][0].DefinitionLevel()
	switch {
	case n.optional && level < n.present:
		n.skip(columns)
		return append(b, "null"...)
	case n.list != nil && level < n.filled:
		n.skip(columns)
		return append(b, "[]"...)
	case n.list != nil:
		b = n.list.append(append(b, '['), columns)
		for len(columns[n.first]) > 0 && columns[n.first][0].RepetitionLevel() >= n.repeated {
			b = n.list.append(append(b, ','), columns)
		}
		return append(b, ']')
	case n.fields != nil:
		var line rowLine
		for _, field := range n.fields {
			line.put(field.name, func(b []byte) []byte { return field.append(b, columns) })
		}
		return append(b, line.end()...)
	}
	v := columns[n.first][0]
	n.skip(columns)
	switch {
	case n.text:
		return appendString(b, string(v.ByteArray()))
	case n.kind == parquet.Int32:
		return strconv.AppendInt(b, int64(v.Int32()), 10)
	case n.kind == parquet.Int64:
		return strconv.AppendInt(b, v.Int64(), 10)
	case n.kind == parquet.Boolean:
		return strconv.AppendBool(b, v.Boolean())
	case n.kind == parquet.Float:
		return appendFloat(b, float64(v.Float()))
	case n.kind == parquet.Double:
		return appendFloat(b, v.Double())
	}
	return append(b, "true"...)
}

func (n *parquetNode) skip(columns [][]parquet.Value) {
	for i := n.first; i < n.end; i++ {
		columns[i] = columns[i][1:]
	}
}
