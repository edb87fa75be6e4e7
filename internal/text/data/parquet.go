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
	logical  string // the type of a value
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
	footer := int64(binary.LittleEndian.Uint32(end[:]))
	if _, _, err := walkStruct(f, size-8-footer, footer); err != nil {
		return nil, fmt.Errorf("its footer: %w", err)
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
	p := &parquetFile{f: f, size: size, groups: file.RowGroups(), metadata: file.Metadata()}
	p.root = p.node(file.Schema(), "", 0, 0)
	p.values = make([][]parquet.Value, len(p.leaves))
	return p.next, nil
}

// A parquetFile reads the rows of one row group after the other. Columns that no rule of keys needs are not read.
type parquetFile struct {
	f        *os.File
	size     int64
	root     *parquetNode
	leaves   []leaf
	groups   []parquet.RowGroup
	metadata *format.FileMetaData
	read     int64 // rows
	left     int64 // rows of the present group
	group    int   // the next
	columns  []*column
	packed   int64             // bytes of the columns
	values   [][]parquet.Value // of a row, by leaf
}

// next returns some rows.
func (p *parquetFile) next() (lines [][]byte, err error) {
	for p.left == 0 {
		if p.group == len(p.groups) && p.read != p.metadata.NumRows {
			return nil, fmt.Errorf("it has %d rows, and its footer claims %d: it is damaged", p.read, p.metadata.NumRows)
		}
		if p.group == len(p.groups) {
			return nil, io.EOF
		}
		if err := p.openGroup(); err != nil {
			return nil, err
		}
	}
	bytes := 0
	for ; p.left > 0 && len(lines) < someRows && bytes < batchBytes; p.left-- {
		line, err := guard(p.row)
		if err != nil {
			return lines, err
		}
		lines = append(lines, line)
		bytes += len(line)
		p.read++
	}
	for _, c := range p.columns {
		if p.left > 0 {
			break
		}
		if _, err := c.peek(); err != io.EOF {
			return lines, fmt.Errorf("column %s has more rows than its row group: it is damaged", c.leaf.name)
		}
	}
	return lines, nil
}

// row returns the next row.
func (p *parquetFile) row() (_ []byte, err error) {
	values := rowValues(p.size)
	for _, c := range p.columns {
		if p.values[c.place], err = c.row(&values); err != nil {
			return nil, fmt.Errorf("column %s: %w", c.leaf.name, err)
		}
	}
	var line rowLine
	for _, key := range p.root.fields {
		line.add(key.name, func(b []byte) []byte {
			if !matters(key.name) {
				return append(b, "true"...)
			}
			return key.append(b, p.values)
		})
	}
	return line.end(), nil
}

// openGroup opens the next row group.
func (p *parquetFile) openGroup() error {
	group := p.groups[p.group]
	chunks := p.metadata.RowGroups[p.group].Columns
	p.group, p.left, p.columns = p.group+1, group.NumRows(), nil
	if p.left < 0 || len(chunks) != len(p.leaves) {
		return errors.New("a row group is damaged")
	}
	if p.left == 0 {
		return nil
	}
	p.packed = 0
	for _, key := range p.root.fields {
		for i := key.first; i < key.end && matters(key.name); i++ {
			c := &column{file: p, leaf: &p.leaves[i], place: i, meta: &chunks[i].MetaData,
				pages: group.ColumnChunks()[i].Pages()}
			if c.next = c.meta.DataPageOffset; c.meta.DictionaryPageOffset != 0 {
				c.next = c.meta.DictionaryPageOffset
			}
			c.end = c.next + c.meta.TotalCompressedSize
			if c.next < 0 || c.meta.TotalCompressedSize < 0 || c.next > p.size || c.end > p.size {
				return fmt.Errorf("column %s lies outside of the file: it is cut short or damaged", c.leaf.name)
			}
			p.packed += c.meta.TotalCompressedSize
			p.columns = append(p.columns, c)
		}
	}
	return nil
}

// rowValues bounds the values of a row by the size of the file. Each takes 24 bytes of memory.
func rowValues(size int64) int { return int(min(32<<20, max(2<<20, 8*size))) }

// A column reads the values of a leaf in a row group.
type column struct {
	file   *parquetFile
	leaf   *leaf
	place  int // of the leaf
	meta   *format.ColumnMetaData
	next   int64 // the place of the next page that is not checked
	end    int64
	dict   int64 // bytes that the dictionary and the page take
	takes  int64
	pages  parquet.Pages
	page   parquet.ValueReader // nil: none yet
	buf    [256]parquet.Value
	at, n  int // of buf
	values []parquet.Value
}

// peek returns the next value; io.EOF after the last.
func (c *column) peek() (parquet.Value, error) {
	for c.at == c.n {
		if c.page == nil {
			if err := c.check(); err != nil {
				return parquet.Value{}, err
			}
			page, err := c.pages.ReadPage()
			if err != nil {
				return parquet.Value{}, err
			}
			c.page = page.Values()
		}
		n, err := c.page.ReadValues(c.buf[:])
		if c.at, c.n = 0, n; err == io.EOF {
			c.page = nil
		} else if err == nil && n == 0 {
			err = io.ErrNoProgress
		}
		if err != nil && err != io.EOF {
			return parquet.Value{}, err
		}
	}
	return c.buf[c.at], nil
}

// check checks the next page, and the memory of all columns.
func (c *column) check() error {
	err, takes := c.checkNext(c.file.f), int64(0)
	for _, other := range c.file.columns {
		takes += other.dict + other.takes
	}
	if err == nil && takes > expansion(c.file.packed) {
		err = fmt.Errorf("with other columns it takes %d bytes, too many for a file of %d", takes, c.file.size)
	}
	return err
}

// row returns the values of a row, and subtracts their number from left.
func (c *column) row(left *int) ([]parquet.Value, error) {
	c.values = c.values[:0]
	for {
		v, err := c.peek()
		if err == io.EOF && len(c.values) > 0 || err == nil && len(c.values) > 0 && v.RepetitionLevel() == 0 {
			return c.values, nil
		}
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return nil, err
		}
		if *left--; *left < 0 {
			return nil, errors.New("a row has too many values for the size of the file")
		}
		c.values, c.at = append(c.values, v), c.at+1
	}
}

func (p *parquetFile) node(node parquet.Node, name string, level, lists int) *parquetNode {
	n := &parquetNode{name: name, optional: node.Optional(), first: len(p.leaves)}
	if n.optional {
		level++
	}
	n.present, n.filled, n.repeated = level, level+1, lists+1
	switch {
	case node.Repeated():
		n.list = p.node(parquet.Required(node), name, level+1, lists+1)
	case node.Leaf():
		n.kind = node.Type().Kind()
		n.logical = node.Type().String()
		p.leaves = append(p.leaves, leaf{name, level, lists, n.kind == parquet.Boolean})
	default:
		for _, field := range node.Fields() {
			n.fields = append(n.fields, p.node(field, field.Name(), level, lists))
		}
		if len(n.fields) == 1 && name != "" && node.Fields()[0].Repeated() { // a LIST: a group of its elements
			n.list, n.fields = n.fields[0].list, nil
			if len(n.list.fields) == 1 {
				n.list = n.list.fields[0]
			}
		}
	}
	n.end = len(p.leaves)
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
		for checkLong(b); len(columns[n.first]) > 0 && columns[n.first][0].RepetitionLevel() >= n.repeated; checkLong(b) {
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
	case n.logical == "JSON":
		return appendJSON(b, v.ByteArray())
	case n.logical == "UUID" && len(v.ByteArray()) == 16:
		return appendUUID(b, v.ByteArray())
	case n.logical == "STRING", n.logical == "ENUM":
		return appendString(b, string(v.ByteArray()))
	case n.kind == parquet.Int32 && strings.HasPrefix(n.logical, "INT(") && strings.HasSuffix(n.logical, "false)"):
		return strconv.AppendUint(b, uint64(v.Uint32()), 10)
	case n.kind == parquet.Int64 && strings.HasPrefix(n.logical, "INT(") && strings.HasSuffix(n.logical, "false)"):
		return strconv.AppendUint(b, v.Uint64(), 10)
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
