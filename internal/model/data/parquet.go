package data

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/parquet-go/parquet-go"
	"github.com/parquet-go/parquet-go/format"
)

// A parquetColumn is the first leaf of a key. Levels count the optional and repeated nodes on the path to it that have
// a value.
type parquetColumn struct {
	key     string // "": a further leaf of the same key
	plain   bool   // a scalar, or a list of scalars
	lists   int
	present int // the level from which the key is not null
	filled  int // the level from which its list has an entry
	full    int // the level of a value
	text    bool
	kind    parquet.Kind
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
	columns, groups := parquetColumns(file.Schema()), file.RowGroups()
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
			lines = append(lines, parquetLine(columns, row))
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

func parquetColumns(schema *parquet.Schema) (columns []parquetColumn) {
	last := -1 // the first leaf of the key before
	for i, path := range schema.Columns() {
		if last >= 0 && columns[last].key == path[0] {
			columns[last].plain = false
			columns = append(columns, parquetColumn{})
			continue
		}
		c := parquetColumn{key: path[0]}
		node := parquet.Node(schema)
		for depth, name := range path {
			for _, field := range node.Fields() {
				if field.Name() == name {
					node = field
					break
				}
			}
			if !node.Required() {
				c.full++
			}
			if node.Repeated() {
				c.lists++
				c.filled = c.full
			}
			if depth == 0 && node.Optional() {
				c.present = 1
			}
		}
		c.kind, c.text = node.Type().Kind(), node.Type().String() == "STRING"
		c.plain = c.lists == 1 || len(path) == 1
		columns, last = append(columns, c), i
	}
	return columns
}

func parquetLine(columns []parquetColumn, row parquet.Row) []byte {
	var line rowLine
	row.Range(func(i int, values []parquet.Value) bool {
		if c := &columns[i]; c.key != "" {
			line.add(c.key, func(b []byte) []byte { return c.append(b, values) })
		}
		return true
	})
	return line.end()
}

func (c *parquetColumn) append(b []byte, values []parquet.Value) []byte {
	switch {
	case values[0].DefinitionLevel() < c.present:
		return append(b, "null"...)
	case !c.plain:
		return append(b, "true"...)
	case c.lists == 0:
		return c.value(b, values[0])
	case values[0].DefinitionLevel() < c.filled:
		return append(b, "[]"...)
	}
	for i, v := range values {
		b = append(b, "[,"[min(i, 1)])
		b = c.value(b, v)
	}
	return append(b, ']')
}

func (c *parquetColumn) value(b []byte, v parquet.Value) []byte {
	switch {
	case v.DefinitionLevel() < c.full:
		return append(b, "null"...)
	case c.text:
		return appendString(b, string(v.ByteArray()))
	case c.kind == parquet.Int32:
		return strconv.AppendInt(b, int64(v.Int32()), 10)
	case c.kind == parquet.Int64:
		return strconv.AppendInt(b, v.Int64(), 10)
	}
	return append(b, "true"...)
}
