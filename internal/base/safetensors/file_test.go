package safetensors

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/tensor"
)

// file returns a file with the given header and data zero bytes of data.
func file(header string, data int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(b, header...), make([]byte, data)...)
}

func open(b []byte) (*File, error) { return New("test", bytes.NewReader(b), int64(len(b))) }

func TestMalformedFilesAreRefused(t *testing.T) {
	const one = `{"dtype":"F32","shape":[2],"data_offsets":[0,8]}`
	for _, tc := range []struct {
		name string
		file []byte
		want string
	}{
		{"empty", nil, "too short"},
		{"only a length", []byte{1, 0, 0}, "too short"},
		{"header beyond file", file(`{}`, 0)[:9], "claims 2 bytes of a file of 9"},
		{"header bomb", binary.LittleEndian.AppendUint64(nil, 1<<40), "at most 33554432 are read"},
		{"negative length", binary.LittleEndian.AppendUint64(nil, 1<<63), "at most"},
		{"no header", file("", 0), "begin with '{'"},
		{"space first", file(` {}`, 0), "begin with '{'"},
		{"array", file(`[]`, 0), "begin with '{'"},
		{"cut JSON", file(`{"a":`, 0), "unexpected EOF"},
		{"trailing JSON", file(`{} {}`, 0), "goes on after"},
		{"bad UTF-8", file("{\"\xff\":1}", 0), "not UTF-8"},
		{"duplicate tensor", file(`{"a":`+one+`,"a":`+one+`}`, 8), `key "a" stands twice`},
		{"duplicate by escape", file(`{"a":`+one+`,"\u0061":`+one+`}`, 8), `key "a" stands twice`},
		{"duplicate metadata", file(`{"__metadata__":{"k":"1","k":"2"}}`, 0), `key "k" stands twice`},
		{"duplicate dtype", file(`{"a":{"dtype":"F32","dtype":"F32","shape":[2]}}`, 8), `"dtype" stands twice`},
		{"metadata number", file(`{"__metadata__":{"k":1}}`, 0), "a string belongs"},
		{"metadata not object", file(`{"__metadata__":"x"}`, 0), "{ belongs"},
		{"unknown key", file(`{"a":{"dtype":"F32","shape":[2],"offsets":[0,8]}}`, 8), `unknown key "offsets"`},
		{"missing key", file(`{"a":{"dtype":"F32","shape":[2]}}`, 8), "needs the keys"},
		{"unknown dtype", file(`{"a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}}`, 8), `unknown element type "F99"`},
		{"dtype number", file(`{"a":{"dtype":1,"shape":[2],"data_offsets":[0,8]}}`, 8), "a string belongs"},
		{"negative shape", file(`{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}`, 8), "-2 where an integer"},
		{"fraction in shape", file(`{"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}}`, 8), "2.0 where an integer"},
		{"huge dim", file(`{"a":{"dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,8]}}`, 8),
			"where an integer"},
		{"element overflow", file(`{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}`, 0),
			"more elements than"},
		{"byte overflow", file(`{"a":{"dtype":"F64","shape":[1152921504606846976],"data_offsets":[0,0]}}`, 0),
			"more bytes than"},
		{"half a byte", file(`{"a":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}}`, 1), "ends inside a byte"},
		{"three offsets", file(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,9]}}`, 8), "3 numbers"},
		{"wrong size", file(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}`, 4), "do not hold the 8 bytes"},
		{"reversed offsets", file(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}`, 8), "do not hold"},
		{"hole at start", file(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}`, 12), "bytes 0 to 4"},
		{"hole between", file(`{"a":`+one+`,"b":{"dtype":"U8","shape":[1],"data_offsets":[9,10]}}`, 10), "bytes 8 to 9"},
		{"overlap", file(`{"a":`+one+`,"b":{"dtype":"U8","shape":[4],"data_offsets":[6,10]}}`, 10),
			"inside the tensor that ends at 8"},
		{"data cut", file(`{"a":`+one+`}`, 7), "cut short"},
		{"data after", file(`{"a":`+one+`}`, 9), "goes on to 9"},
		{"deep JSON", file(`{"a":`+strings.Repeat("[", 20000)+`}`, 0), "where { belongs"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := open(tc.file)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want an error with %q", err, tc.want)
			}
		})
	}
}

func TestUnusualFilesAreRead(t *testing.T) {
	b := file(
		`{"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"e":{"dtype":"F64","shape":[0,3],"data_offsets":[4,4]},`+
			`"f4":{"dtype":"F4","shape":[4],"data_offsets":[4,6]}, "b":{"data_offsets":[6,7],"shape":[1],"dtype":"BOOL"}}   `,
		7,
	)
	f := must.Have(open(b))
	if got := f.Names(); !slices.Equal(got, []string{"b", "e", "f4", "s"}) {
		t.Errorf("names %v", got)
	}
	must.Do(t, f.ReadFloat32("s", make([]float32, 1), 0))
	must.Do(t, f.ReadFloat32("e", nil, 0))
	must.Do(t, f.ReadBytes("f4", make([]byte, 2), 0))
	if err := f.ReadFloat32("f4", make([]float32, 1), 0); err == nil ||
		!strings.Contains(err.Error(), "do not convert") {
		t.Errorf("F4 as float32: %v", err)
	}
	if _, err := open(file(`{}`, 0)); err != nil {
		t.Errorf("file without tensors: %v", err)
	}
}

func TestAllTypesOfTheFormatAreKnown(t *testing.T) {
	for _, d := range strings.Fields("BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ " +
		"I16 U16 F16 BF16 I32 U32 F32 C64 F64 I64 U64") {
		n := DType(d).Bits() // eight elements
		b := file(fmt.Sprintf(`{"a":{"dtype":%q,"shape":[8],"data_offsets":[0,%d]}}`, d, n), int(n))
		f, err := open(b)
		if err != nil {
			t.Fatalf("%s: %v", d, err)
		}
		if i, _ := f.Info("a"); i.Bytes() != n || i.Elements() != 8 {
			t.Errorf("%s: %v", d, i)
		}
	}
}

// The bytes are the output of the reference implementation (Python package safetensors 0.8) for the same tensors.
func TestWriteGivesTheBytesOfTheReferenceWriter(t *testing.T) {
	var b bytes.Buffer
	must.Do(t, Write(&b, map[string]string{"format": "pt"}, []Entry{
		Floats("b", BF16, []int{2}, []float32{1, -2}),
		rawEntry("u", U8, []int{3}, []byte{7, 8, 9}),
		Floats("w<", F32, []int{1, 2}, []float32{0.5, 3}),
		Floats("a", F32, nil, []float64{4}),
	}))
	header := `{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},` +
		`"w<":{"dtype":"F32","shape":[1,2],"data_offsets":[4,12]},"b":{"dtype":"BF16","shape":[2],"data_offsets":[12,16]},` +
		`"u":{"dtype":"U8","shape":[3],"data_offsets":[16,19]}}`
	for len(header)%8 != 0 {
		header += " "
	}
	want := file(header, 0)
	want = append(want, 0, 0, 0x80, 0x40, 0, 0, 0, 0x3f, 0, 0, 0x40, 0x40, 0x80, 0x3f, 0, 0xc0, 7, 8, 9)
	if !bytes.Equal(b.Bytes(), want) {
		t.Errorf("got\n%q\nwant\n%q", b.Bytes(), want)
	}
}

func TestReadsPartsAndConverts(t *testing.T) {
	const n = chunk/2 + 77 // more than one chunk of every type
	data := make([]float64, n)
	for i := range data {
		data[i] = float64(i%251) - 125 // exact in every type
	}
	for _, d := range []DType{F64, F32, F16, BF16} {
		t.Run(string(d), func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "f.safetensors")
			must.Do(t, WriteFile(path, nil, []Entry{Floats("x", d, []int{n}, data),
				rawEntry("a", U8, []int{1}, []byte{1})}))
			f := must.Have(Open(path))
			defer f.Close()
			if f.Metadata() != nil {
				t.Errorf("metadata %v", f.Metadata())
			}
			for _, at := range [][2]int{{0, n}, {0, 0}, {n, 0}, {n - 1, 1}, {5, n / 2}} {
				lo, hi := at[0], at[0]+at[1]
				f32, f64 := make([]float32, at[1]), make([]float64, at[1])
				must.Do(t, errors.Join(f.ReadFloat32("x", f32, int64(lo)), read(f, "x", f64, int64(lo))))
				if !slices.Equal(f64, data[lo:hi]) ||
					!slices.EqualFunc(f32, f64, func(a float32, b float64) bool { return float64(a) == b }) {
					t.Errorf("elements %v differ", at)
				}
			}
			v, same := tensor.New(tensor.F32, 3, 7), tensor.New(d.Tensor(), 3, 7)
			must.Do(t, errors.Join(f.ReadInto("x", v, 11), f.ReadInto("x", same, 11)))
			if got := tensor.Data[float32](v); float64(got[20]) != data[31] {
				t.Errorf("view holds %v", got)
			}
			raw := make([]byte, 21*d.Bits()/8)
			if err := f.ReadBytes("x", raw, 11*d.Bits()/8); err != nil || !bytes.Equal(raw, tensor.Bytes(same)) {
				t.Errorf("view of the same type differs: %v", err)
			}
			for _, err := range []error{
				f.ReadFloat32("x", f32(2), n-1), f.ReadFloat32("x", f32(1), -1), f.ReadFloat32("y", nil, 0),
				f.ReadFloat32("a", f32(1), 0), f.ReadBytes("a", make([]byte, 2), 0),
				f.ReadInto("x", tensor.New(tensor.I32, 1), 0),
				f.ReadInto("x", tensor.New(tensor.F32, 4, 4).Slice(tensor.Dim, 0, 2), 0),
			} {
				if err == nil || !strings.Contains(err.Error(), "f.safetensors") {
					t.Errorf("bad read: %v", err)
				}
			}
		})
	}
}

func f32(n int) []float32 { return make([]float32, n) }

func TestBadEntriesAreNotWritten(t *testing.T) {
	ok := Floats("a", F32, []int{1}, []float32{1})
	for _, tc := range []struct {
		name    string
		entries []Entry
		want    string
	}{
		{"twice", []Entry{ok, ok}, "stands twice"},
		{"reserved", []Entry{Floats("__metadata__", F32, []int{1}, []float32{1})}, "reserved"},
		{"type", []Entry{Floats("a", "F99", []int{1}, []float32{1})}, "unknown element type"},
		{"unwritable", []Entry{Floats("a", I64, []int{1}, []float32{1})}, "are written as"},
		{"short", []Entry{Floats("a", F32, []int{2}, []float32{1})}, "4 of 8 bytes were not written"},
		{"long", []Entry{Floats("a", F32, []int{1}, []float32{1, 2})}, "more data"},
		{"utf8", []Entry{Floats("\xff", F32, []int{1}, []float32{1})}, "not UTF-8"},
		{"negative", []Entry{Floats("a", F32, []int{-1}, []float32{1})}, "negative"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			err := WriteFile(filepath.Join(dir, "f"), nil, tc.entries)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
			if left, _ := os.ReadDir(dir); len(left) != 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
	if err := Write(io.Discard, map[string]string{"k": "\xff"}, nil); err == nil {
		t.Error("metadata that is not UTF-8 was written")
	}
}

func TestOpenWantsARegularFile(t *testing.T) {
	if _, err := Open(t.TempDir()); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("directory: %v", err)
	}
	if _, err := Open(filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing file: %v", err)
	}
}

// FuzzOpen checks that a file that opens has a complete description, can be read entirely, and is unchanged after a
// rewrite.
func FuzzOpen(f *testing.F) {
	var b bytes.Buffer
	_ = Write(&b, map[string]string{"format": "pt"}, []Entry{
		Floats("w", F32, []int{2, 2}, []float32{1, 2, 3, 4}), Floats("h", BF16, []int{3}, []float32{1, 2, 3}),
		rawEntry("e", U8, []int{0}, nil),
	})
	f.Add(b.Bytes())
	f.Add(file(`{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}`, 1))
	f.Add(file(`{}`, 0))
	f.Add(file(`{"a":{"dtype":"F32","shape":[2,0],"data_offsets":[0,0]},"__metadata__":{}}`, 0))
	f.Fuzz(func(t *testing.T, b []byte) {
		in, err := open(b)
		if err != nil {
			return
		}
		var entries []Entry
		total := in.data
		for _, name := range in.Names() {
			i, _ := in.Info(name)
			raw := make([]byte, i.Bytes())
			must.Do(t, in.ReadBytes(name, raw, 0))
			if i.DType.Tensor() == tensor.F32 || i.DType == BF16 || i.DType == F8E4M3 {
				must.Do(t, in.ReadFloat32(name, make([]float32, i.Elements()), 0))
			}
			total += i.Bytes()
			entries = append(entries, rawEntry(name, i.DType, i.Shape, raw))
		}
		if total != int64(len(b)) {
			t.Fatalf("%d bytes described of %d", total, len(b))
		}
		var again bytes.Buffer
		must.Do(t, Write(&again, in.Metadata(), entries))
		out := must.Have(open(again.Bytes()))
		if !slices.Equal(in.Names(), out.Names()) || !maps.Equal(in.Metadata(), out.Metadata()) {
			t.Fatalf("written again: %v %v", out.Names(), out.Metadata())
		}
	})
}

// rawEntry returns an entry of bytes that are already encoded.
func rawEntry(name string, dtype DType, shape []int, data []byte) Entry {
	return Entry{Name: name, DType: dtype, Shape: shape, Data: func(w io.Writer) error {
		_, err := w.Write(data)
		return err
	}}
}
