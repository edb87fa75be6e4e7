package data

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
)

// Pair writes documents as Megatron's .bin and .idx. Until Close the data is in temporary files, which Remove deletes.
// Memory does not grow with the documents.
type Pair struct {
	name    string // of the files, without extension
	dir     *os.Root
	width   int64
	bin     *draft
	lengths *draft // of documents, 4 bytes each
	docs    int64
	tokens  int64
	buf     []byte
}

// A draft is a file with a temporary name.
type draft struct {
	f *files.Draft
	w *bufio.Writer
}

// ErrExists reports that a file of the pair exists.
var ErrExists = errors.New("it is there already; name another, or remove it")

// NewPair begins to write name.bin and name.idx, of ids below vocab.
func NewPair(name string, vocab int) (*Pair, error) {
	p := &Pair{name: strings.TrimSuffix(name, ".bin"), width: 4}
	if vocab < maxShort {
		p.width = 2
	}
	for _, path := range p.Paths() {
		if _, err := os.Lstat(path); err == nil {
			return nil, fmt.Errorf("%s: %w", path, ErrExists)
		}
	}
	var err error
	if p.dir, err = files.OpenDir(filepath.Dir(p.name)); err != nil {
		return nil, err
	}
	if p.bin, err = p.temporary("bin"); err == nil {
		p.lengths, err = p.temporary("lengths")
	}
	if err != nil {
		p.Remove()
		return nil, err
	}
	return p, nil
}

// maxShort bounds vocabularies with two-byte ids, as in Megatron.
const maxShort = 65500

// Paths returns the names of the finished files.
func (p *Pair) Paths() []string { return []string{p.name + ".idx", p.name + ".bin"} }

// Counts returns the documents and tokens written so far.
func (p *Pair) Counts() (docs, tokens int64) { return p.docs, p.tokens }

// temporary creates a file of the pair under a temporary name.
func (p *Pair) temporary(kind string) (*draft, error) {
	f, err := files.Create(p.dir, filepath.Base(p.name)+"."+kind)
	if err != nil {
		return nil, err
	}
	return &draft{f, bufio.NewWriterSize(f, 1<<20)}, nil
}

// Add appends a document.
func (p *Pair) Add(ids []int32) error {
	le := binary.LittleEndian
	for chunk := range slices.Chunk(ids, scanChunk) {
		p.buf = p.buf[:0]
		for _, id := range chunk {
			if p.width == 2 {
				p.buf = le.AppendUint16(p.buf, uint16(id))
			} else {
				p.buf = le.AppendUint32(p.buf, uint32(id))
			}
		}
		if _, err := p.bin.w.Write(p.buf); err != nil {
			return err
		}
	}
	p.docs++
	p.tokens += int64(len(ids))
	_, err := p.lengths.w.Write(le.AppendUint32(p.buf[:0], uint32(len(ids))))
	return err
}

// Close finishes the files and renames them, the index first: a .bin without an index would be read as another format.
// After an error neither exists.
func (p *Pair) Close() (err error) {
	defer p.Remove()
	index, err := p.temporary("idx")
	if err != nil {
		return err
	}
	defer index.f.Discard()
	if err := errors.Join(p.bin.w.Flush(), p.lengths.w.Flush()); err != nil {
		return err
	}
	if err := p.index(index.w); err != nil {
		return err
	}
	if err := index.f.Commit(); err != nil {
		return err
	}
	if err := p.bin.f.Commit(); err != nil {
		return errors.Join(err, p.dir.Remove(filepath.Base(p.name)+".idx"))
	}
	return files.Sync(p.dir)
}

func (p *Pair) index(w *bufio.Writer) error {
	code := byte(4)
	if p.width == 2 {
		code = 8
	}
	le := binary.LittleEndian
	head := append(le.AppendUint64([]byte(megatronMagic), 1), code)
	head = le.AppendUint64(le.AppendUint64(head, uint64(p.docs)), uint64(p.docs+1))
	w.Write(head) // Flush returns the errors of w
	if _, err := p.lengths.f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	if _, err := io.Copy(w, p.lengths.f); err != nil {
		return err
	}
	if _, err := p.lengths.f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	at, r, b := int64(0), bufio.NewReaderSize(p.lengths.f, 1<<20), [8]byte{}
	for range p.docs {
		if _, err := io.ReadFull(r, b[:4]); err != nil {
			return err
		}
		n := int64(le.Uint32(b[:4]))
		le.PutUint64(b[:], uint64(at))
		w.Write(b[:])
		at += n * p.width
	}
	for k := range p.docs + 1 {
		le.PutUint64(b[:], uint64(k))
		w.Write(b[:])
	}
	return w.Flush()
}

// Remove deletes the temporary files.
func (p *Pair) Remove() {
	for _, t := range []*draft{p.bin, p.lengths} {
		if t != nil {
			t.f.Discard() // temporary files have telling names
		}
	}
	p.dir.Close()
}
