package data

import (
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
)

// Source selects the data.
type Source struct {
	// Paths are files or globs (files.Glob), read in order, each of one kind (FileKind). .bin is an llm.c token
	// file, or Megatron's if an .idx of the same name exists; files of JSON, Parquet and Arrow have a document in each
	// record: a text, ids with labels and masks, or a conversation; other files are raw text. A directory of
	// datasets stands for its .arrow files.
	Paths []string
	// Tokenizer encodes text. Token files need none.
	Tokenizer *Tokenizer
	// EOS is the token that ends a document; -1 for none. It is appended to each document of text: a file, or a line of
	// .jsonl. Token files and input_ids already contain it.
	EOS int
	// Vocab is the number of token ids. Larger ids are an error.
	Vocab int
	// Format is that of all records; "": each by its keys.
	Format string
	// Chat encodes conversations; nil: they are refused.
	Chat *Chat
	// Cache keeps the tokens of text and records.
	Cache Cache
}

// A codec reads the tokens of one file. Its methods may be called concurrently.
type codec interface {
	// tokens counts the file's tokens.
	tokens() int64
	// read fills dst with the tokens from index at.
	read(f io.ReaderAt, dst []int32, at int64) error
	// where describes the place of a token in the file.
	where(at int64) string
	// ends yields the ends of documents by the file's format; none if only a token marks them.
	ends() iter.Seq[int64]
}

// Open finds the files of a source and their lengths. It reads the headers of token files and the sizes of raw byte
// files, and encodes other text.
func Open(s Source) (*Dataset, error) {
	if s.Vocab < 1 {
		return nil, fmt.Errorf("data %s: a vocabulary of %d tokens", s.name(), s.Vocab)
	}
	if s.EOS >= s.Vocab || s.EOS < -1 {
		return nil, fmt.Errorf("data %s: eos_token_id %d is not below vocab_size %d", s.name(), s.EOS, s.Vocab)
	}
	d := &Dataset{source: s, cut: -1}
	for _, glob := range s.Paths {
		paths, kind, err := find(glob)
		if err != nil {
			return nil, fmt.Errorf("data %s: %w", glob, err)
		}
		if err := d.addAll(paths, kind); err != nil { // it names the file
			return nil, err
		}
	}
	if t := s.Tokenizer; t != nil && !t.bytes() {
		if st, err := os.Stat(t.path); err == nil {
			d.tokenizer = st.Size()
		}
	}
	d.source.Tokenizer, d.source.Chat = nil, nil // frees their tables
	return d, nil
}

func (s Source) name() string { return strings.Join(s.Paths, ", ") }

// addAll appends files of one kind. It reads and encodes text now, except raw byte files.
func (d *Dataset) addAll(paths []string, kind string) error {
	if kind == "tokens" || kind == "text" && d.source.Tokenizer.bytes() {
		for _, path := range paths {
			if err := d.add(path, kind); err != nil {
				return fmt.Errorf("data file %s: %w", path, err)
			}
		}
		return nil
	}
	size := int64(0)
	for _, path := range paths {
		if st, err := os.Stat(path); err == nil {
			size += st.Size()
		}
	}
	if d.source.Cache.Dir == "" || size < d.source.Cache.Least {
		d.encoded += size
		return d.encodeFiles(paths)
	}
	return d.cached(paths)
}

// Find lists the files of a glob, sorted by name. text: they are text, not tokens.
func Find(glob string) (paths []string, text bool, err error) {
	paths, kind, err := find(glob)
	return paths, kind != "tokens", err
}

func find(pattern string) (paths []string, kind string, err error) {
	matches := []string{pattern}
	if _, err := os.Stat(pattern); err != nil { // a file name may contain brackets
		if matches, err = files.Glob(pattern); err != nil {
			return nil, "", fmt.Errorf("%w; docs/formats.md describes globs", err)
		}
	}
	example := map[string]string{}
	for i := 0; i < len(matches); i++ {
		m := matches[i]
		st, err := os.Stat(m)
		if err == nil && st.IsDir() {
			var saved []string
			saved, err = datasetFiles(m)
			matches = slices.Insert(matches, i+1, saved...)
		}
		if err != nil {
			return nil, "", err
		}
		k := FileKind(m)
		if st.IsDir() || k == "" {
			continue
		}
		if !st.Mode().IsRegular() {
			return nil, "", fmt.Errorf("%s is not a regular file", m)
		}
		paths = append(paths, m)
		if example[k] == "" {
			example[k], kind = m, k
		}
	}
	switch {
	case len(matches) == 0:
		return nil, "", errors.New("no such file, and as a glob it matches none")
	case len(paths) == 0:
		return nil, "", fmt.Errorf("only directories or .idx files match, such as %s; name the files in it, as in %s",
			matches[0], filepath.Join(matches[0], "*.bin"))
	case len(example) > 1:
		var kinds []string
		for k, m := range example {
			kinds = append(kinds, k+" ("+m+")")
		}
		slices.Sort(kinds)
		return nil, "", fmt.Errorf("matches files of different kinds: %s; narrow the glob", strings.Join(kinds, ", "))
	}
	return paths, kind, nil
}

func (d *Dataset) add(path, kind string) error {
	f, size, err := openSized(path)
	if err != nil {
		return err
	}
	defer f.Close()
	var c codec
	if _, compressed := unpacked(path); compressed {
		c, err = hold(f, path, size, d.source.EOS)
	} else if kind != "tokens" {
		if how := guessed(path); how != "" {
			d.notes.Add(how)
		}
		c, err = rawText(size, d.source.EOS), checkText(f, path, size)
	} else if c, err = megatron(path, size); c == nil && err == nil {
		c, err = llmc(f, size, d.source.Vocab)
	}
	if err != nil {
		return err
	}
	d.parts = append(d.parts, part{path: path, start: d.Len(), codec: c})
	d.files++
	return nil
}

// cause returns the cause of a file's error without the path, which the caller adds.
func cause(err error) error {
	var pe *os.PathError
	if errors.As(err, &pe) {
		return pe.Err
	}
	return err
}
