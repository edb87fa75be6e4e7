package data

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/cprun/cprun/internal/base/files"
)

// A Cache keeps the tokens of encoded files in a directory. An entry is a directory for the files of one glob.
type Cache struct {
	Dir string // "": none; tokens stay in memory
	// Least is the size from which files are cached, in bytes. Smaller ones are quickly encoded again.
	Least int64
	// Known refuses files without an entry, with ErrNotCounted.
	Known bool
	// Note is called before files are encoded, unless nil.
	Note func(text string)
}

// ErrNotCounted reports files that no run has encoded yet.
var ErrNotCounted = errors.New("not counted yet: the first run encodes them")

// The files of an entry. The documents are a Pair.
const (
	cachedPair    = "tokens"
	cachedLabels  = "labels"  // of all tokens from Entry.Masked on, int32
	cachedTargets = "targets" // of each document, int32
	cachedInfo    = "entry.json"
)

// An Entry describes the files of a cached glob.
type Entry struct {
	Paths   []string `json:"paths"`   // of the files
	Ignored []string `json:"ignored"` // keys of records
	Notes   []string `json:"notes"`   // warnings about the records
	Borders bool     `json:"borders"` // a record has several documents
	Masked  int64    `json:"masked"`  // the first token with a label of its own; -1: none
}

// cached adds files through the cache, and encodes them first if they are not there. Other processes wait meanwhile.
func (d *Dataset) cached(paths []string) error {
	c := d.source.Cache
	key, err := d.cacheKey(paths)
	if err != nil {
		return err
	}
	dir := filepath.Join(c.Dir, key)
	if key != "" && d.addEntry(dir) == nil {
		return nil
	}
	if c.Known {
		return ErrNotCounted
	}
	root, err := files.Make(c.Dir)
	if err != nil {
		return cacheFault(err)
	}
	defer root.Close()
	unlock, err := lock(root, key+".lock")
	if err != nil {
		return cacheFault(err)
	}
	defer unlock()
	if d.addEntry(dir) == nil {
		return nil
	}
	if c.Note != nil {
		c.Note(fmt.Sprintf("encoding %s once; its tokens stay in %s", d.source.name(), dir))
	}
	left, err := filepath.Glob(filepath.Join(c.Dir, "."+key+".tmp-*")) // of processes that were killed
	for _, path := range append(left, dir) {
		err = errors.Join(err, os.RemoveAll(path))
	}
	if err == nil {
		err = files.WriteDir(root, key, func(to *os.Root) error { return d.encodeTo(to, paths) })
	}
	if err != nil {
		return err
	}
	return d.addEntry(dir)
}

func cacheFault(err error) error {
	return fmt.Errorf("the token cache: %w; name another directory as data.cache", err)
}

// lock waits for a lock, and returns a function that releases it. The end of a process also releases it.
func lock(root *os.Root, name string) (func(), error) {
	f, err := files.Lockable(root, name)
	if err != nil {
		return nil, err
	}
	// If this fails, two processes may encode the same files; one entry remains.
	for syscall.Flock(int(f.Fd()), syscall.LOCK_EX) == syscall.EINTR {
	}
	return func() { f.Close() }, nil
}

// encodeTo writes an entry.
func (d *Dataset) encodeTo(to *os.Root, paths []string) error {
	pair, err := NewPair(filepath.Join(to.Name(), cachedPair), d.source.Vocab)
	if err != nil {
		return err
	}
	defer pair.Remove()
	e := Entry{Paths: paths, Masked: -1}
	err = files.Write(to, cachedLabels, func(labels io.Writer) error {
		return files.Write(to, cachedTargets, func(targets io.Writer) error {
			l, t := bufio.NewWriterSize(labels, 1<<20), bufio.NewWriterSize(targets, 1<<16)
			err := d.encoding().Each(context.Background(), paths, func(_ int, doc Document) error {
				if _, tokens := pair.Counts(); doc.Labels != nil && e.Masked < 0 {
					e.Masked = tokens
				}
				if e.Masked >= 0 {
					writeInts(l, doc.labels())
				}
				writeInts(t, []int32{doc.targets()})
				return pair.Add(doc.IDs)
			})
			return errors.Join(err, l.Flush(), t.Flush())
		})
	})
	if err == nil {
		err = pair.Close()
	}
	if err != nil {
		return err
	}
	e.Ignored, e.Notes, e.Borders = d.ignored.Sorted(), d.notes.Sorted(), d.borders.Load()
	text, err := json.Marshal(&e)
	if err != nil {
		return err
	}
	return files.WriteData(to, cachedInfo, text)
}

// writeInts appends numbers; Flush returns the error.
func writeInts(w *bufio.Writer, list []int32) {
	var b [4]byte
	for _, x := range list {
		binary.LittleEndian.PutUint32(b[:], uint32(x))
		w.Write(b[:])
	}
}

// addEntry adds the files of an entry as one part.
func (d *Dataset) addEntry(dir string) error {
	text, err := files.Read(filepath.Join(dir, cachedInfo), 1<<26)
	var e Entry
	if err == nil {
		err = json.Unmarshal(text, &e)
	}
	if err != nil {
		return err
	}
	p := part{path: filepath.Join(dir, cachedPair+".bin"), start: d.Len(), whole: true}
	st, err := os.Stat(p.path)
	if err != nil {
		return err
	}
	c, err := megatron(p.path, st.Size())
	if err != nil {
		return err
	}
	if c == nil {
		return os.ErrNotExist
	}
	if p.codec = c; e.Masked >= 0 {
		if p.labels, err = cachedLabelsOf(dir, c.(tokenFile), e.Masked); err != nil {
			return err
		}
	}
	d.parts = append(d.parts, p)
	d.files += int64(len(e.Paths))
	d.ignored.Add(e.Ignored...)
	d.notes.Add(e.Notes...)
	d.borders.Store(d.borders.Load() || e.Borders)
	return nil
}

func cachedLabelsOf(dir string, tokens tokenFile, from int64) (*labels, error) {
	n := tokens.count - from
	l := &labels{path: filepath.Join(dir, cachedLabels), from: from,
		codec: tokenFile{width: 4, signed: true, count: n}}
	st, err := os.Stat(l.path)
	if err == nil && st.Size() != 4*n {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return nil, err
	}
	raw, err := files.Read(filepath.Join(dir, cachedTargets), 4*int64(len(tokens.docs)))
	if err == nil && len(raw) != 4*len(tokens.docs) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return nil, err
	}
	for b := range slices.Chunk(raw, 4) {
		l.targets = append(l.targets, int32(binary.LittleEndian.Uint32(b)))
	}
	return l, nil
}
