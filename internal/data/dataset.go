package data

import (
	"errors"
	"fmt"
	"io"
	"sort"
)

// Dataset is the tokens of all files of a source, in order. Its methods may be called
// concurrently. It holds no file open, so that a corpus may have any number of them.
type Dataset struct {
	source Source
	kind   string // "tokens", "text" or "jsonl"
	parts  []part
	open   func(path string) (file, error)
}

// part is one file.
type part struct {
	path  string
	start int64 // tokens before it
	codec codec
}

func (p part) end() int64 { return p.start + p.codec.tokens() }

// Len is the number of tokens.
func (d *Dataset) Len() int64 {
	if len(d.parts) == 0 {
		return 0
	}
	return d.parts[len(d.parts)-1].end()
}

// ReadTokens fills dst with the tokens from the at-th on, and no byte beyond them is read
// but the rest of a .jsonl line.
func (d *Dataset) ReadTokens(dst []int32, at int64) error {
	if n := int64(len(dst)); at < 0 || n > d.Len() || at > d.Len()-n {
		return fmt.Errorf("data %s: tokens %d to %d of %d asked for", d.source.Path, at, at+n, d.Len())
	}
	k := sort.Search(len(d.parts), func(k int) bool { return d.parts[k].end() > at })
	for ; len(dst) > 0; k++ {
		p := d.parts[k]
		n := min(int64(len(dst)), p.end()-at)
		if n == 0 {
			continue // an empty file
		}
		if err := d.readPart(p, dst[:n], at-p.start); err != nil {
			return fmt.Errorf("data file %s: %w", p.path, err)
		}
		dst, at = dst[n:], at+n
	}
	return nil
}

func (d *Dataset) readPart(p part, dst []int32, at int64) error {
	f, err := d.open(p.path)
	if err != nil {
		return reason(err)
	}
	defer f.Close()
	if err := p.codec.read(f, dst, at); err != nil {
		return err
	}
	for i, id := range dst {
		if id < 0 || int(id) >= d.source.Vocab {
			return d.outside(f, p, at+int64(i), id)
		}
	}
	return nil
}

// outside is the error for a token of a part that the vocabulary does not have.
func (d *Dataset) outside(f io.ReaderAt, p part, at int64, id int32) error {
	said := int64(id)
	if t, ok := p.codec.(tokenFile); ok { // an int32 does not hold all that a file may have
		var err error
		if said, err = t.id(f, at); err != nil {
			return err
		}
	}
	if said < 0 {
		return fmt.Errorf("%s: token id %d is negative", p.codec.where(at), said)
	}
	return fmt.Errorf("%s: token id %d is not below vocab_size %d", p.codec.where(at), said, d.source.Vocab)
}

// scanChunk is how many tokens are read at a time, at most.
const scanChunk = 1 << 16

// scan calls f with all tokens in order.
func (d *Dataset) scan(f func(tokens []int32, at int64)) error {
	buf := make([]int32, min(scanChunk, d.Len()))
	for at := int64(0); at < d.Len(); {
		tokens := buf[:min(int64(len(buf)), d.Len()-at)]
		if err := d.ReadTokens(tokens, at); err != nil {
			return err
		}
		f(tokens, at)
		at += int64(len(tokens))
	}
	return nil
}

// Check reads everything once, so that a token id outside the vocabulary or an unreadable
// file is found before training starts and not in its middle.
func (d *Dataset) Check() error { return d.scan(func([]int32, int64) {}) }

// documents lists where documents end: the number of tokens up to and with the last of each.
// With an EOS token that takes reading everything once; without, documents are the files or
// lines of text, or those of Megatron's index. The tokens after the last end are one more document.
func (d *Dataset) documents() ([]int64, error) {
	var ends []int64
	if d.source.EOS < 0 {
		for _, p := range d.parts {
			if t, ok := p.codec.(tokenFile); ok && t.docs == nil {
				return nil, fmt.Errorf("data file %s: pack_documents needs eos_token_id: token files are cut into documents at that token", p.path)
			}
			for end := range p.codec.ends() {
				ends = append(ends, p.start+end)
			}
		}
		return ends, nil
	}
	// Text has the token too: it was appended to each document.
	err := d.scan(func(tokens []int32, at int64) {
		for i, id := range tokens {
			if int(id) == d.source.EOS {
				ends = append(ends, at+int64(i)+1)
			}
		}
	})
	return ends, err
}

// readFull fills p. A ReaderAt may return io.EOF with the last bytes.
func readFull(f io.ReaderAt, p []byte, off int64) error {
	n, err := f.ReadAt(p, off)
	if n == len(p) {
		return nil
	}
	if err == nil || err == io.EOF {
		err = errors.New("the file has become shorter since it was opened")
	}
	return fmt.Errorf("bytes %d to %d: %w", off, off+int64(len(p)), reason(err))
}
