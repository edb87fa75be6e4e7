package data

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
)

const (
	megatronMagic  = "MMIDIDX\x00\x00"
	megatronHeader = 9 + 8 + 1 + 8 + 8
)

// megatronTypes maps the codes of the index to integer types.
var megatronTypes = map[byte]tokenFile{
	1: {width: 1}, 2: {width: 1, signed: true}, 3: {width: 2, signed: true},
	4: {width: 4, signed: true}, 5: {width: 8, signed: true}, 8: {width: 2},
}

// maxEmpty bounds the empty sequences of an index.
const maxEmpty = 1 << 20

// megatron reads the .idx of a .bin; nil if there is none.
func megatron(path string, size int64) (codec, error) {
	idx := strings.TrimSuffix(path, ".bin") + ".idx"
	f, err := files.Open(idx)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("its index: %w", err)
	}
	defer f.Close()
	st, err := f.Stat()
	var t tokenFile
	if err == nil {
		t, err = parseMegatron(f, st.Size(), size)
	}
	if err != nil {
		return nil, fmt.Errorf("its index %s: %w", idx, cause(err))
	}
	return t, nil
}

// parseMegatron checks an index of size bytes against a .bin of binSize bytes. Sequences must be adjacent, as Megatron
// writes them.
func parseMegatron(r io.Reader, size, binSize int64) (t tokenFile, err error) {
	br := bufio.NewReaderSize(r, int(min(size, 256<<10)))
	var h [megatronHeader]byte
	if _, err := io.ReadFull(br, h[:]); err != nil || string(h[:9]) != megatronMagic {
		return t, errors.New("does not begin with MMIDIDX; a .bin with an .idx beside it is read as Megatron's pair")
	}
	le := binary.LittleEndian
	version, code := le.Uint64(h[9:]), h[17]
	sequences, documents := le.Uint64(h[18:]), le.Uint64(h[26:])
	if version != 1 {
		return t, fmt.Errorf("version %d; version 1 is known", version)
	}
	t, ok := megatronTypes[code]
	if !ok {
		return t, fmt.Errorf("element type code %d is not an integer type", code)
	}
	if sequences > math.MaxInt32*64 || documents > sequences+1 {
		return t, fmt.Errorf("claims %d sequences and %d document boundaries", sequences, documents)
	}
	want := int64(megatronHeader + 12*sequences + 8*documents)
	if size != want && size != want+int64(sequences) { // a byte each more for multimodal data
		return t, fmt.Errorf("%d bytes; %d sequences and %d document boundaries need %d", size, sequences, documents,
			want)
	}
	// Adjacent means that a pointer equals the bytes of all earlier sequences. All lengths come before the first
	// pointer.
	lengths := make([]int32, 0, min(sequences, 1<<20))
	empty, left := 0, binSize/t.width
	for k := range sequences {
		var b [4]byte
		if _, err := io.ReadFull(br, b[:]); err != nil {
			return t, err
		}
		n := int32(le.Uint32(b[:]))
		if n < 0 {
			return t, fmt.Errorf("sequence %d has %d tokens", k, n)
		}
		if left -= int64(n); left < 0 {
			return t, fmt.Errorf("sequences up to %d have more tokens of %d bytes than fit, but the .bin has %d bytes",
				k, t.width, binSize)
		}
		if n == 0 {
			empty++ // a sparse file may claim nothing else
		}
		if empty > maxEmpty {
			return t, fmt.Errorf("more than %d of its sequences have no tokens", maxEmpty)
		}
		lengths = append(lengths, n)
	}
	starts := make([]int64, 0, len(lengths)+1) // of sequences, in tokens
	for k, n := range lengths {
		starts = append(starts, t.count)
		var b [8]byte
		if _, err := io.ReadFull(br, b[:]); err != nil {
			return t, err
		}
		if p := le.Uint64(b[:]); p != uint64(t.count*t.width) {
			return t, fmt.Errorf("sequence %d begins at byte %d of the .bin, not at %d where the one before it ends", k,
				p, t.count*t.width)
		}
		t.count += int64(n)
	}
	if t.count*t.width != binSize {
		return t, fmt.Errorf("%d tokens of %d bytes make %d, but the .bin has %d bytes", t.count, t.width,
			t.count*t.width, binSize)
	}
	t.docs, err = megatronDocuments(br, documents, append(starts, t.count))
	return t, err
}

// megatronDocuments reads the first sequence of each document and a final boundary, and returns the ends of documents
// in tokens.
func megatronDocuments(r io.Reader, n uint64, starts []int64) ([]int64, error) {
	ends := make([]int64, 0, n)
	before := uint64(0)
	for k := range n {
		var b [8]byte
		if _, err := io.ReadFull(r, b[:]); err != nil {
			return nil, err
		}
		at := binary.LittleEndian.Uint64(b[:])
		if at >= uint64(len(starts)) || at < before || k == 0 && at != 0 || k == n-1 && at != uint64(len(starts)-1) {
			return nil, fmt.Errorf(
				"document boundary %d is sequence %d of %d; they rise from 0 to the number of sequences", k,
				at, len(starts)-1)
		}
		if end := starts[at]; end > starts[before] { // skip empty documents
			ends = append(ends, end)
		}
		before = at
	}
	return ends, nil
}
