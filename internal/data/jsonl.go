package data

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"iter"
	"sort"
	"sync"
)

// maxLine bounds a line of a .jsonl file, in bytes.
const maxLine = 64 << 20

// A jsonl is a file with a document of bytes in the "text" of each line. Its index is 16 bytes a
// document. Lines are parsed again when they are read.
type jsonl struct {
	size int64
	eos  int
	docs []document

	mu   sync.Mutex
	last int // the document in text; neighbouring reads want the same
	text []byte
}

// A document is a line with text.
type document struct {
	off int64 // byte that its line begins at
	end int64 // tokens up to and with its last
}

// indexJSONL passes over the file once and checks every line.
func indexJSONL(f io.ReaderAt, size int64, eos int, ignored *Keys) (codec, error) {
	j := &jsonl{size: size, eos: eos, last: -1}
	r := bufio.NewReaderSize(io.NewSectionReader(f, 0, size), int(min(size, 256<<10)))
	off, tokens := int64(0), int64(0)
	var line []byte
	for n := 1; ; n++ {
		var err error
		line, err = readLine(r, line[:0])
		if err != nil && err != io.EOF {
			return nil, fmt.Errorf("line %d: %w", n, reason(err))
		}
		text, bad := parseLine(line, ignored)
		if bad != nil {
			return nil, fmt.Errorf("line %d: %w", n, bad)
		}
		if len(text) > 0 { // an empty text is no document
			tokens += j.count(text)
			j.docs = append(j.docs, document{off, tokens})
		}
		if err == io.EOF {
			return j, nil
		}
		off += int64(len(line))
	}
}

// readLine appends a line with its end to buf; io.EOF comes with the last one, which may
// have none.
func readLine(r *bufio.Reader, buf []byte) ([]byte, error) {
	for {
		b, err := r.ReadSlice('\n')
		if len(buf)+len(b) > maxLine {
			return nil, fmt.Errorf("longer than %d bytes", maxLine)
		}
		buf = append(buf, b...)
		if err != bufio.ErrBufferFull {
			return buf, err
		}
	}
}

// errIDs reports a line with ids in place of text.
var errIDs = errors.New(`it has "input_ids"`)

// parseLine returns the text of a line; nothing for a blank one.
func parseLine(line []byte, ignored *Keys) ([]byte, error) {
	keys, err := fields(line, ignored)
	if err != nil || keys == nil {
		return nil, err
	}
	if _, ok := keys[keyIDs]; ok {
		return nil, errIDs
	}
	s, err := textOf(keys)
	return []byte(s), err
}

func (j *jsonl) count(text []byte) int64 {
	if j.eos >= 0 {
		return int64(len(text)) + 1
	}
	return int64(len(text))
}

func (j *jsonl) tokens() int64 {
	if len(j.docs) == 0 {
		return 0
	}
	return j.docs[len(j.docs)-1].end
}

// at finds the document of a token.
func (j *jsonl) at(token int64) int {
	return sort.Search(len(j.docs), func(k int) bool { return j.docs[k].end > token })
}

func (j *jsonl) where(at int64) string {
	return fmt.Sprintf("token %d (the line at byte %d)", at, j.docs[j.at(at)].off)
}

func (j *jsonl) ends() iter.Seq[int64] {
	return func(yield func(int64) bool) {
		for _, d := range j.docs {
			if !yield(d.end) {
				return
			}
		}
	}
}

func (j *jsonl) read(f io.ReaderAt, dst []int32, at int64) error {
	for k := j.at(at); len(dst) > 0; k++ {
		start := int64(0)
		if k > 0 {
			start = j.docs[k-1].end
		}
		text, err := j.document(f, k)
		if err == nil && j.count(text) != j.docs[k].end-start {
			err = errors.New("the file has changed since it was opened")
		}
		if err != nil {
			return fmt.Errorf("the line at byte %d: %w", j.docs[k].off, err)
		}
		n := int(min(int64(len(dst)), j.docs[k].end-at))
		for i := range n {
			if p := int(at-start) + i; p < len(text) {
				dst[i] = int32(text[p])
			} else {
				dst[i] = int32(j.eos)
			}
		}
		dst, at = dst[n:], at+int64(n)
	}
	return nil
}

// document returns the text of a document. The caller must not change it.
func (j *jsonl) document(f io.ReaderAt, k int) ([]byte, error) {
	j.mu.Lock()
	text, hit := j.text, j.last == k
	j.mu.Unlock()
	if hit {
		return text, nil
	}
	// The next document's line ends this one's at the latest; blank lines may lie between.
	end := j.size
	if k+1 < len(j.docs) {
		end = j.docs[k+1].off
	}
	n := end - j.docs[k].off
	r := bufio.NewReaderSize(io.NewSectionReader(f, j.docs[k].off, n), int(min(n, 64<<10)))
	line, err := readLine(r, nil)
	if err != nil && err != io.EOF {
		return nil, reason(err)
	}
	if text, err = parseLine(line, nil); err != nil {
		return nil, err
	}
	j.mu.Lock()
	j.last, j.text = k, text
	j.mu.Unlock()
	return text, nil
}
