package data

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/snappy"
	"github.com/klauspost/compress/zstd"
	"github.com/parquet-go/parquet-go/deprecated"
	"github.com/parquet-go/parquet-go/encoding/delta"
	"github.com/parquet-go/parquet-go/encoding/thrift"
	"github.com/parquet-go/parquet-go/format"

	"github.com/cprun/cprun/internal/base/must"
)

// A bomb is a Parquet file of one column, with pages that no writer makes.
type bomb struct {
	codec   format.CompressionCodec
	rows    int64
	more    int64 // rows that only the footer claims
	list    bool  // the column input_ids of lists of text; else the column text
	pages   []format.PageHeader
	bodies  [][]byte // unpacked
	schemas int      // entries that the footer claims; 0: the right number
}

func encoded(t testing.TB, v any) []byte {
	return must.Have(thrift.Marshal(new(thrift.CompactProtocol), v))
}

func (b bomb) file(t testing.TB) string {
	out := []byte("PAR1")
	for i, h := range b.pages {
		body := b.bodies[i]
		if h.UncompressedPageSize == 0 {
			h.UncompressedPageSize = int32(len(body))
		}
		switch b.codec {
		case format.Zstd:
			z := must.Have(zstd.NewWriter(nil))
			body = z.EncodeAll(body, nil)
		case format.Snappy:
			body = snappy.Encode(nil, body)
		}
		h.CompressedPageSize = int32(len(body))
		out = append(append(out, encoded(t, &h)...), body...)
	}
	optional, repeated, utf8 := format.Optional, format.Repeated, deprecated.UTF8
	path := []string{"text"}
	schema := []format.SchemaElement{{Name: "root", NumChildren: thrift.New[int32](1)}}
	text := format.SchemaElement{Name: "text", Type: thrift.New(format.ByteArray), RepetitionType: thrift.New(optional),
		ConvertedType: thrift.New(utf8)}
	if b.list {
		text.RepetitionType, text.Name, path[0] = thrift.New(repeated), "input_ids", "input_ids"
	}
	meta := format.ColumnMetaData{Type: format.ByteArray, Codec: b.codec, PathInSchema: path, DataPageOffset: 4,
		NumValues: b.rows, TotalCompressedSize: int64(len(out)) - 4, TotalUncompressedSize: int64(len(out)) - 4}
	if b.pages[0].Type == format.DictionaryPage {
		meta.DictionaryPageOffset = 4
	}
	footer := encoded(t, &format.FileMetaData{Version: 1, Schema: append(schema, text), NumRows: b.rows + b.more,
		RowGroups: []format.RowGroup{{NumRows: b.rows, Columns: []format.ColumnChunk{{MetaData: meta}}}}})
	if b.schemas > 0 { // the list of the schema follows the version
		at := bytes.IndexByte(footer, 0x19) + 1
		footer = append(append(footer[:at:at], binary.AppendUvarint([]byte{0xfc}, uint64(b.schemas))...), footer[at+1:]...)
	}
	out = append(out, footer...)
	return string(append(binary.LittleEndian.AppendUint32(out, uint32(len(footer))), "PAR1"...))
}

// resident returns the most memory of this process since the last reset, in MiB.
func resident(t testing.TB, reset bool) (mib int) {
	if reset {
		debug.FreeOSMemory()
		must.Do(t, os.WriteFile("/proc/self/clear_refs", []byte("5"), 0))
	}
	status := must.Have(os.ReadFile("/proc/self/status"))
	_, peak, _ := strings.Cut(string(status), "VmHWM:")
	must.Have(fmt.Sscan(peak, &mib))
	return mib >> 10
}

// run returns a run of RLE of n values of one byte.
func run(n uint64, value byte) []byte { return append(binary.AppendUvarint(nil, n<<1), value) }

// sized puts the length before levels.
func sized(levels []byte) []byte {
	return append(binary.LittleEndian.AppendUint32(nil, uint32(len(levels))), levels...)
}

func plain(text string) []byte {
	return append(binary.LittleEndian.AppendUint32(nil, uint32(len(text))), text...)
}

func v1Page(values int32, encoding format.Encoding) format.PageHeader {
	return format.PageHeader{Type: format.DataPage, DataPageHeader: thrift.New(format.DataPageHeader{NumValues: values,
		Encoding: encoding, DefinitionLevelEncoding: format.RLE, RepetitionLevelEncoding: format.RLE})}
}

func v2Page(values, rep, def int32) format.PageHeader {
	return format.PageHeader{Type: format.DataPageV2, DataPageHeaderV2: thrift.New(format.DataPageHeaderV2{NumValues: values,
		NumRows: values, Encoding: format.Plain, RepetitionLevelsByteLength: rep, DefinitionLevelsByteLength: def})}
}

func dictPage(values int32) format.PageHeader {
	return format.PageHeader{Type: format.DictionaryPage, DictionaryPageHeader: thrift.New(format.DictionaryPageHeader{
		NumValues: values, Encoding: format.Plain})}
}

// A small file takes little memory, whatever it claims: the check names the column before the library allocates.
func TestParquetBombs(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(100)) // as users have it
	const many = 1 << 29
	some := plain("some text")
	long := plain(strings.Repeat("a", 64<<10))
	big, short := v1Page(1, format.Plain), v1Page(1, format.Plain)
	big.UncompressedPageSize, short.UncompressedPageSize = 1<<30, 100
	prefixes := must.Have(new(delta.BinaryPackedEncoding).EncodeInt32(nil, slices.Repeat([]int32{1 << 20}, 4096)))
	deltas := binary.AppendUvarint(binary.AppendUvarint(binary.AppendUvarint(nil, 128), 4), many)
	for name, tc := range map[string]struct {
		bomb
		want string // of the error; "": rows
	}{
		"right":            {bomb{rows: 2, pages: []format.PageHeader{v1Page(2, format.Plain)}, bodies: [][]byte{append(sized(run(2, 1)), append(some, some...)...)}}, ""},
		"right v2":         {bomb{rows: 2, pages: []format.PageHeader{v2Page(2, 0, 2)}, bodies: [][]byte{append(run(2, 1), append(some, some...)...)}}, ""},
		"right dictionary": {bomb{rows: 2, codec: format.Snappy, pages: []format.PageHeader{dictPage(1), v1Page(2, format.RLEDictionary)}, bodies: [][]byte{some, append(sized(run(2, 1)), append([]byte{1}, run(2, 0)...)...)}}, ""},
		"rows of a footer": {bomb{rows: 1, more: 1, pages: []format.PageHeader{v1Page(1, format.Plain)},
			bodies: [][]byte{append(sized(run(1, 1)), some...)}}, "it has 1 rows, and its footer claims 2"},
		"rows of a group": {bomb{rows: 2, pages: []format.PageHeader{v1Page(1, format.Plain)},
			bodies: [][]byte{append(sized(run(1, 1)), some...)}}, "column text: unexpected EOF"},
		"rows of a page": {bomb{rows: 1, pages: []format.PageHeader{v1Page(2, format.Plain)},
			bodies: [][]byte{append(sized(run(2, 1)), append(some, some...)...)}}, "column text has more rows"},
		"values of a header": {bomb{rows: many, pages: []format.PageHeader{v1Page(many, format.Plain)},
			bodies: [][]byte{sized(run(many, 0))}}, "column text: a page claims"},
		"a dictionary and a page": {bomb{rows: 13_000_000, pages: []format.PageHeader{dictPage(13_000_000),
			v1Page(13_000_000, format.RLEDictionary)}, bodies: [][]byte{some, sized(run(13_000_000, 0))}},
			"column text: with other columns it takes"},
		"a run of levels": {bomb{rows: 10, pages: []format.PageHeader{v1Page(10, format.Plain)},
			bodies: [][]byte{sized(run(many, 0))}}, "column text: runs of a page"},
		"a run of levels v2": {bomb{rows: 10, pages: []format.PageHeader{v2Page(10, 0, 6)},
			bodies: [][]byte{run(many, 0)}}, "column text: runs of a page"},
		"a run of indices": {bomb{rows: 10, pages: []format.PageHeader{dictPage(1), v1Page(10, format.RLEDictionary)},
			bodies: [][]byte{some, append(sized(run(10, 1)), append([]byte{1}, run(many, 0)...)...)}}, "column text: runs of a page"},
		"a claimed size": {bomb{rows: 1, codec: format.Zstd, pages: []format.PageHeader{big}, bodies: [][]byte{some}},
			"column text: a page claims 1073741824 bytes"},
		"an unpacked size": {bomb{rows: 1, codec: format.Zstd, pages: []format.PageHeader{short},
			bodies: [][]byte{make([]byte, 256<<20)}}, "column text: a page does not have the size in its header"},
		"a snappy size": {bomb{rows: 1, codec: format.Snappy, pages: []format.PageHeader{short},
			bodies: [][]byte{make([]byte, 1000)}}, "column text: a page does not have the size in its header"},
		"deltas": {bomb{rows: 10, pages: []format.PageHeader{v1Page(10, format.DeltaLengthByteArray)},
			bodies: [][]byte{append(sized(run(10, 1)), append(deltas, 0)...)}}, "column text: runs of a page"},
		"prefixes": {bomb{rows: 4096, pages: []format.PageHeader{v1Page(4096, format.DeltaByteArray)},
			bodies: [][]byte{append(sized(run(4096, 1)), prefixes...)}}, "column text: prefixes of values expand to 4294967296"},
		"the footer": {bomb{rows: 1, schemas: 1 << 28, pages: []format.PageHeader{v1Page(1, format.Plain)},
			bodies: [][]byte{some}}, "its footer: more than 524288 entries"},
		"repeated rows": {bomb{rows: 10_000, pages: []format.PageHeader{dictPage(1), v1Page(10_000, format.RLEDictionary)},
			bodies: [][]byte{long, append(sized(run(10_000, 1)), append([]byte{1}, run(10_000, 0)...)...)}},
			"most of them in column text"},
		"a long row": {bomb{rows: 1, list: true, pages: []format.PageHeader{dictPage(1), v1Page(10_000, format.RLEDictionary)},
			bodies: [][]byte{long, append(append(sized(append(run(1, 0), run(9_999, 1)...)), sized(run(10_000, 1))...),
				append([]byte{1}, run(10_000, 0)...)...)}}, "column input_ids: longer than"},
		"a row of many values": {bomb{rows: 1, list: true, pages: []format.PageHeader{dictPage(1),
			v1Page(3_000_001, format.RLEDictionary)}, bodies: [][]byte{plain(""), append(append(
			sized(append(run(1, 0), run(3_000_000, 1)...)), sized(run(3_000_001, 1))...),
			append([]byte{1}, run(3_000_001, 0)...)...)}}, "column input_ids: a row has too many values"},
	} {
		path := filepath.Join(put(t, map[string]string{"a.parquet": tc.file(t)}), "a.parquet")
		resident(t, true)
		n := 0
		var err error
		f, size, _ := openSized(path)
		for line, bad := range rows(f, path, size) {
			if err = bad; bad == nil && len(line) > 0 {
				n++
			}
		}
		f.Close()
		took := resident(t, false)
		if tc.want == "" && (err != nil || int64(n) != tc.rows) || tc.want != "" && (err == nil ||
			!strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: %d rows, %v, want %q", name, n, err, tc.want)
		}
		if took > 450 {
			t.Errorf("%s: %d bytes took %d MiB", name, size, took)
		}
	}
}

// Buffers of Arrow that claim more than the file can hold are refused before they are allocated.
func TestArrowBombs(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	raw := must.Have(os.ReadFile("testdata/rows/zstd.arrow"))
	const magic = "\x28\xb5\x2f\xfd" // of zstd, after the length of a buffer
	if n := len(values(t, "testdata/rows/zstd.arrow")); n != 3 || bytes.Count(raw, []byte(magic)) < 2 {
		t.Fatalf("%d rows", n)
	}
	for at := 0; ; at++ {
		next := bytes.Index(raw[at:], []byte(magic))
		if next < 0 {
			break
		}
		at += next
		bad := bytes.Clone(raw)
		binary.LittleEndian.PutUint64(bad[at-8:], 200<<20)
		path := filepath.Join(put(t, map[string]string{"a.arrow": string(bad)}), "a.arrow")
		resident(t, true)
		_, err := openRows(t, path)
		if took := resident(t, false); took > 100 || err == nil ||
			!strings.Contains(err.Error(), "a batch takes more than") {
			t.Errorf("the buffer at %d: %d MiB, %v", at, took, err)
		}
	}
}
