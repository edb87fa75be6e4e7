package data

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/bits"
	"slices"
	"sort"
	"sync/atomic"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/splitmix"
)

// Dataset is the tokens of all files of a source, in order. Its methods may be called concurrently. It keeps no file
// open, so that a corpus may have any number of files.
type Dataset struct {
	source Source
	parts  []part
	files  int64

	encoded   int64 // bytes of files encoded by this process, outside the cache
	tokenizer int64 // bytes of the tokenizer's file

	ignored Keys
	notes   Keys
	borders atomic.Bool // a record has several documents
	cut     int64       // number of packed documents; -1: not packed
}

// Ignored lists the record keys without effect, such as token_type_ids.
func (d *Dataset) Ignored() []string { return d.ignored.Sorted() }

// Notes lists warnings about the records.
func (d *Dataset) Notes() []string { return d.notes.Sorted() }

// A part is a file.
type part struct {
	path   string
	start  int64 // tokens before it
	codec  codec
	labels *labels // nil: each token is its own label
	whole  bool    // the codec knows the ends of documents; EOS marks none
}

// A labels has the labels of a part, and the number of targets of each document.
type labels struct {
	path    string
	from    int64 // tokens before it are their own labels
	codec   codec
	targets []int32
}

func (p part) end() int64 { return p.start + p.codec.tokens() }

// Len returns the number of tokens.
func (d *Dataset) Len() int64 {
	if len(d.parts) == 0 {
		return 0
	}
	return d.parts[len(d.parts)-1].end()
}

// ReadTokens fills dst with tokens from index at. It reads no byte beyond them.
func (d *Dataset) ReadTokens(dst []int32, at int64) error {
	if n := int64(len(dst)); at < 0 || n > d.Len() || at > d.Len()-n {
		return fmt.Errorf("data %s: tokens %d to %d of %d asked for", d.source.name(), at, at+n, d.Len())
	}
	return d.each(dst, at, d.readPart)
}

// each calls read with each part of a range, and the piece of the range in that part.
func (d *Dataset) each(dst []int32, at int64, read func(p part, dst []int32, at int64) error) error {
	k := sort.Search(len(d.parts), func(k int) bool { return d.parts[k].end() > at })
	for ; len(dst) > 0; k++ {
		p := d.parts[k]
		n := min(int64(len(dst)), p.end()-at)
		if n == 0 {
			continue // an empty file
		}
		if err := read(p, dst[:n], at-p.start); err != nil {
			return fmt.Errorf("data file %s: %w", p.path, err)
		}
		dst, at = dst[n:], at+n
	}
	return nil
}

// labelled reports whether some token has a label other than itself.
func (d *Dataset) labelled() bool {
	return slices.ContainsFunc(d.parts, func(p part) bool { return p.labels != nil })
}

// readLabels fills dst with the labels from index at.
func (d *Dataset) readLabels(dst []int32, at int64) error {
	return d.each(dst, at, func(p part, dst []int32, at int64) error {
		own := int64(len(dst))
		if l := p.labels; l != nil {
			own = min(own, max(0, l.from-at))
			err := d.readFile(l.path, l.codec, dst[own:], at+own-l.from, func(io.ReaderAt) error { return nil })
			if err != nil {
				return err
			}
		}
		return d.readPart(p, dst[:own], at)
	})
}

// readPart reads and checks tokens of one part.
func (d *Dataset) readPart(p part, dst []int32, at int64) error {
	return d.readFile(p.path, p.codec, dst, at, func(f io.ReaderAt) error { return d.checkIDs(f, p, dst, at) })
}

// readFile reads values of a codec, and calls check with the file if they were not encoded by this process.
func (d *Dataset) readFile(path string, c codec, dst []int32, at int64, check func(io.ReaderAt) error) error {
	if h, ok := c.(*encodedFile); ok {
		return h.read(nil, dst, at)
	}
	f, err := files.Open(path)
	if err != nil {
		return cause(err)
	}
	defer f.Close()
	if err := c.read(f, dst, at); err != nil {
		return err
	}
	return check(f)
}

func (d *Dataset) checkIDs(f io.ReaderAt, p part, dst []int32, at int64) error {
	for i, id := range dst {
		if id < 0 || int(id) >= d.source.Vocab {
			return d.outside(f, p, at+int64(i), id)
		}
	}
	return nil
}

// outside returns the error for a token outside the vocabulary.
func (d *Dataset) outside(f io.ReaderAt, p part, at int64, id int32) error {
	said := int64(id)
	if t, ok := p.codec.(tokenFile); ok { // the value in the file may exceed an int32
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

const scanChunk = 1 << 16

// eachEOS reads a part, and calls f with the index after each EOS token.
func (d *Dataset) eachEOS(p part, f func(end int64)) error {
	buf := make([]int32, min(scanChunk, p.end()-p.start))
	for at := p.start; at < p.end(); {
		tokens := buf[:min(int64(len(buf)), p.end()-at)]
		if err := d.ReadTokens(tokens, at); err != nil {
			return err
		}
		for _, id := range tokens {
			if at++; int(id) == d.source.EOS {
				f(at)
			}
		}
	}
	return nil
}

// Files returns the number of files.
func (d *Dataset) Files() int64 { return d.files }

// Check counts the documents. With read it also reads every token once, which finds ids outside the vocabulary and
// unreadable files before training. It counts packed documents, if they were packed; else records (files, lines of
// text, documents of Megatron's index, or token files cut at the EOS token). It returns -1 if that takes a pass over
// the tokens.
func (d *Dataset) Check(read bool) (documents int64, err error) {
	known := true
	for _, p := range d.parts {
		n, last := int64(0), int64(0)
		for end := range p.codec.ends() {
			n, last = n+1, end
		}
		byToken := n == 0 && d.source.EOS >= 0
		if read {
			err := d.eachEOS(p, func(end int64) {
				if byToken {
					n, last = n+1, end-p.start
				}
			})
			if err != nil {
				return 0, err
			}
		}
		if last < p.codec.tokens() { // the rest is one more
			known = known && (n > 0 || byToken && read)
			n++
		}
		documents += n
	}
	if d.cut >= 0 {
		return d.cut, nil
	}
	if !known {
		return -1, nil
	}
	return documents, nil
}

// documents returns the ends of documents: the tokens up to and including the last of each, and the targets of each if
// there are labels. It cuts files at the EOS token, in one pass over them. Without that token, documents are files or
// lines of text, or those of Megatron's index; encoded text always has its own. Tokens after the last end are one more
// document.
func (d *Dataset) documents() (ends []int64, targets []int32, err error) {
	for _, p := range d.parts {
		t, tokens := p.codec.(tokenFile)
		if tokens && t.docs == nil && d.source.EOS < 0 {
			return nil, nil, fmt.Errorf(
				"data file %s: pack_documents needs eos_token_id: token files are cut into documents at "+
					"that token", p.path)
		}
		known := len(ends)
		if !p.whole && d.source.EOS >= 0 {
			// Raw bytes also have the token, appended to each document.
			if err := d.eachEOS(p, func(end int64) { ends = append(ends, end) }); err != nil {
				return nil, nil, err
			}
		}
		if len(ends) == known {
			for end := range p.codec.ends() {
				ends = append(ends, p.start+end)
			}
		}
		if d.labelled() { // documents with labels do not go on in the next file
			ends, targets = d.countTargets(p, ends, targets)
		}
	}
	d.cut = int64(len(ends))
	if len(ends) == 0 || ends[len(ends)-1] < d.Len() {
		d.cut++
	}
	return ends, targets, nil
}

// countTargets appends the targets of a part's documents, those after the ones counted so far.
func (d *Dataset) countTargets(p part, ends []int64, targets []int32) ([]int64, []int32) {
	if p.labels != nil {
		return ends, append(targets, p.labels.targets...)
	}
	if n := len(ends); p.end() > p.start && (n == len(targets) || ends[n-1] < p.end()) {
		ends = append(ends, p.end())
	}
	at := p.start
	for _, end := range ends[len(targets):] {
		targets = append(targets, int32(end-at-1))
		at = end
	}
	return ends, targets
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
	return fmt.Errorf("bytes %d to %d: %w", off, off+int64(len(p)), cause(err))
}

// A permutation of 0 to n-1 takes no memory. It is a Feistel network over the smallest even number of bits that holds
// n, repeated until the result is below n (Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002). A
// shuffled list would take memory on every rank, and could change with the version of Go, so that a resumed run would
// read other samples.
type permutation struct {
	n    uint64
	half uint // bits of each side
	keys [feistelRounds]uint64
}

const feistelRounds = 8

func newPermutation(n, seed, epoch int64) permutation {
	half := max(1, uint(bits.Len64(uint64(n-1))+1)/2)
	o := permutation{n: uint64(n), half: half}
	// The constant, an arbitrary odd one, keeps an epoch apart from a seed of the same number.
	first := splitmix.Mix(uint64(seed)) ^ splitmix.Mix(uint64(epoch)+0x632be59bd9b4e019)
	for i := range o.keys {
		o.keys[i] = splitmix.Mix(first + splitmix.Step(uint64(i)+1))
	}
	return o
}

func (o permutation) at(i int64) int64 {
	mask := uint64(1)<<o.half - 1
	x := uint64(i)
	for {
		l, r := x>>o.half, x&mask
		for _, k := range o.keys {
			l, r = r, l^splitmix.Mix(r^k)&mask
		}
		if x = l<<o.half | r; x < o.n {
			return int64(x)
		}
	}
}

// An encodedFile is a file of text encoded once, with its ids or labels in memory, 4 bytes each.
type encodedFile struct {
	ids  []int32
	docs []int64 // ends of documents; none of labels
}

// encodeFiles encodes files of text.
func (d *Dataset) encodeFiles(paths []string) error {
	parts := make([]part, len(paths))
	for i, path := range paths {
		parts[i] = part{path: path, codec: &encodedFile{}, labels: &labels{from: -1, codec: &encodedFile{}}, whole: true}
	}
	err := d.encoding().Each(context.Background(), paths, func(file int, doc Document) error {
		p := parts[file]
		h, l := p.codec.(*encodedFile), p.labels.codec.(*encodedFile)
		if doc.Labels != nil && p.labels.from < 0 {
			p.labels.from = h.tokens()
		}
		if p.labels.from >= 0 {
			l.ids = append(l.ids, doc.labels()...)
		}
		h.ids = append(h.ids, doc.IDs...)
		h.docs = append(h.docs, int64(len(h.ids)))
		p.labels.targets = append(p.labels.targets, doc.targets())
		return nil
	})
	for _, p := range parts {
		if p.start = d.Len(); p.labels.from < 0 {
			p.labels = nil
		}
		d.parts = append(d.parts, p)
	}
	d.files += int64(len(paths))
	return err
}

func (d *Dataset) encoding() *Encoding {
	return &Encoding{Tokenizer: d.source.Tokenizer, EOS: d.source.EOS, Vocab: d.source.Vocab, Ignored: &d.ignored,
		Format: d.source.Format, Chat: d.source.Chat, Notes: &d.notes,
		Borders: &d.borders}
}

func (h *encodedFile) tokens() int64 { return int64(len(h.ids)) }

func (h *encodedFile) read(_ io.ReaderAt, dst []int32, at int64) error {
	copy(dst, h.ids[at:])
	return nil
}

func (h *encodedFile) where(at int64) string {
	k := sort.Search(len(h.docs), func(k int) bool { return h.docs[k] > at })
	return fmt.Sprintf("token %d (of document %d)", at, k+1)
}

func (h *encodedFile) ends() iter.Seq[int64] { return slices.Values(h.docs) }
