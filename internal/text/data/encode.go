package data

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"
)

// Encoding selects how files of text become documents.
type Encoding struct {
	Tokenizer *Tokenizer
	// EOS is appended to each text that does not end in it; -1: none. Lines of input_ids stay unchanged.
	EOS int
	// Vocab bounds the ids; 0: any id.
	Vocab int
	// Format is that of all records; "": each by its keys.
	Format string
	// Chat encodes conversations; nil: they are refused.
	Chat *Chat
	// Notes collects warnings; nil: not collected.
	Notes *Keys
	// Borders is set if a record has several documents, unless nil.
	Borders *atomic.Bool
	// Ignored collects the record keys without effect; nil: not collected.
	Ignored *Keys
	// Empty makes Each also give records without tokens.
	Empty bool
	// Read is called with the number of bytes read since the last call, unless nil.
	Read func(bytes int64)
}

// These bounds are for a batch, for all batches in flight, and for one text.
const (
	batchBytes = 1 << 20
	batchLines = 4096
	pending    = 256 << 20
	maxText    = 1 << 30
)

// A batch is some texts of one file.
type batch struct {
	file  int
	unit  string // of records: line or record; "" of a text
	lines [][]byte
	at    []int  // the number of each
	text  string // of a file of text
	size  int64
	docs  []Document
	err   error
	done  chan struct{}
}

// isText reports whether the whole file is one text, without records.
func (b *batch) isText() bool { return b.unit == "" }

// Each reads files of text and lines of .jsonl on all cores, and calls emit with their documents in order; file is the
// index in paths. It skips records without tokens, unless Empty. It holds at most some hundred megabytes at a time, or
// one longer text or record.
func (e *Encoding) Each(ctx context.Context, paths []string, emit func(file int, d Document) error) error {
	workers := runtime.GOMAXPROCS(0)
	g, ctx := errgroup.WithContext(ctx)
	room := semaphore.NewWeighted(pending)
	jobs, order := make(chan *batch), make(chan *batch, 4*workers)
	g.Go(func() error {
		defer close(jobs)
		defer close(order)
		return e.split(ctx, paths, func(b *batch) error {
			b.done, b.size = make(chan struct{}), min(b.size, pending)
			if err := room.Acquire(ctx, b.size); err != nil {
				return err
			}
			for _, to := range []chan *batch{order, jobs} {
				select {
				case to <- b:
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			return nil
		})
	})
	for range workers {
		g.Go(func() error { return e.work(jobs) })
	}
	g.Go(func() error {
		for b := range order {
			select {
			case <-b.done:
			case <-ctx.Done():
				return ctx.Err()
			}
			if b.err != nil {
				return fmt.Errorf("data file %s: %w", paths[b.file], b.err)
			}
			for _, d := range b.docs {
				if err := emit(b.file, d); err != nil {
					return err
				}
			}
			room.Release(b.size)
		}
		return nil
	})
	return g.Wait()
}

func (e *Encoding) split(ctx context.Context, paths []string, give func(*batch) error) error {
	for file, path := range paths {
		if err := e.splitFile(file, path, give); err != nil {
			if ctx.Err() != nil {
				return err // another goroutine has failed
			}
			return fmt.Errorf("data file %s: %w", path, err)
		}
	}
	return nil
}

func (e *Encoding) splitFile(file int, path string, give func(*batch) error) error {
	f, size, err := openSized(path)
	if err != nil {
		return err
	}
	defer f.Close()
	read := int64(0)
	note := func(at int64) {
		if e.Read != nil {
			e.Read(at - read)
		}
		read = at
	}
	if how := guessed(path); how != "" {
		e.Notes.Add(how)
	}
	if FileKind(path) == "text" {
		err = e.giveText(&batch{file: file}, f, path, size, give)
	} else {
		err = split(&batch{file: file}, f, path, size, give, note)
	}
	note(size)
	return err
}

// giveText gives a file of text.
func (e *Encoding) giveText(b *batch, f *os.File, path string, size int64, give func(*batch) error) error {
	r, free, err := unpack(f, path, size)
	if err != nil {
		return err
	}
	defer free()
	if b.text, err = readText(r, path, size); err != nil {
		return err
	}
	b.lines, b.at, b.size = [][]byte{nil}, []int{1}, int64(len(b.text))
	return give(b)
}

// readText reads a file of text, after a check of its first bytes.
func readText(r io.Reader, path string, size int64) (string, error) {
	in := bufio.NewReaderSize(r, 256<<10)
	head, err := in.Peek(foreignHead)
	if err != nil && err != io.EOF {
		return "", cause(err)
	}
	name, _ := unpacked(path)
	if err := checkText(bytes.NewReader(head), name, int64(len(head))); err != nil {
		return "", err
	}
	var text strings.Builder
	if size <= maxText {
		text.Grow(int(size))
		if _, err := io.Copy(&text, io.LimitReader(in, maxText+1)); err != nil {
			return "", cause(err)
		}
	}
	if max(size, int64(text.Len())) > maxText {
		return "", fmt.Errorf("one text of more than %d bytes, the most of one document: cut it into files, or write "+
			"its documents as .jsonl", maxText)
	}
	return text.String(), nil
}

// split cuts the records of a file into batches like b, the first.
func split(b *batch, f *os.File, path string, size int64, give func(*batch) error, note func(int64)) error {
	records, free, err := recordsOf(f, path, size)
	if err != nil {
		return err
	}
	defer free()
	b.unit = records.unit
	for line, err := range records.each {
		if err != nil {
			return fmt.Errorf("%s %d: %w", b.unit, records.n, cause(err))
		}
		b.lines, b.at = append(b.lines, line), append(b.at, records.n)
		if b.size += int64(len(line)); b.size >= batchBytes || len(b.lines) == batchLines {
			if b.unit == "line" {
				at, _ := f.Seek(0, io.SeekCurrent) // in the compressed file
				note(at)
			}
			if err := give(b); err != nil {
				return err
			}
			b = &batch{file: b.file, unit: b.unit}
		}
	}
	return give(b)
}

// work encodes batches until none are left. A batch carries its error to the reader.
func (e *Encoding) work(jobs <-chan *batch) error {
	var encoders encoders
	for b := range jobs {
		for i, line := range b.lines {
			docs, err := e.documents(&encoders, b, line)
			if err != nil {
				if b.err = err; !b.isText() {
					b.err = fmt.Errorf("%s %d: %w", b.unit, b.at[i], err)
				}
				break
			}
			for _, d := range docs {
				if len(d.IDs) > 0 || e.Empty {
					b.docs = append(b.docs, d)
				}
			}
			b.lines[i] = nil
		}
		close(b.done)
	}
	return nil
}

// encoders of one goroutine are made on first use.
type encoders struct {
	text encoder
	chat *chatEncoder
}

// documents returns the documents of a record: one, unless it has borders.
func (e *Encoding) documents(made *encoders, b *batch, line []byte) (docs []Document, err error) {
	r := record{}
	if b.isText() {
		r.text, b.text = b.text, ""
	} else if len(bytes.TrimSpace(bytes.TrimPrefix(line, []byte(byteOrderMark)))) == 0 {
		return nil, nil
	} else if r, err = parseRecord(line, e.Format, e.Vocab, e.Ignored); err != nil {
		return nil, err
	}
	if r.ids != nil {
		if len(r.ends) > 1 && e.Borders != nil {
			e.Borders.Store(true)
		}
		return r.documents(), nil
	}
	d, err := e.document(made, &r)
	return []Document{d}, err
}

func (e *Encoding) document(made *encoders, r *record) (d Document, err error) {
	if r.chat != nil {
		if made.chat == nil {
			if made.chat, err = e.newChatEncoder(); err != nil {
				return d, err
			}
		}
		if d, err = made.chat.document(r.chat, e.EOS); err == nil {
			e.noteUnnamed(made.chat, r.chat)
			err = e.check(d.IDs)
		}
		return d, err
	}
	if r.text == "" {
		return d, nil
	}
	if made.text == nil {
		if made.text, err = e.Tokenizer.encoder(); err != nil {
			return d, err
		}
	}
	if d.IDs, err = made.text(make([]int32, 0, len(r.text)/4+8), r.text); err != nil {
		return d, err
	}
	if n := len(d.IDs); e.EOS >= 0 && (n == 0 || int(d.IDs[n-1]) != e.EOS || e.Tokenizer.bytes()) {
		d.IDs = append(d.IDs, int32(e.EOS))
	}
	return d, e.check(d.IDs)
}

// noteUnnamed notes keys of messages that neither a rule nor the template names.
func (e *Encoding) noteUnnamed(made *chatEncoder, c *conversation) {
	for key := range c.unnamed {
		if e.Ignored != nil && !made.template(c).Names(key) {
			e.Ignored.Add("messages[]." + shown(key))
		}
	}
}

func (e *Encoding) check(ids []int32) error {
	for _, id := range ids {
		if e.Vocab > 0 && int(id) >= e.Vocab {
			return fmt.Errorf("%s is not below vocab_size %d; take the tokenizer of this model, or add rows by "+
				"model.resize_embeddings", e.Tokenizer.token(id), e.Vocab)
		}
	}
	return nil
}
