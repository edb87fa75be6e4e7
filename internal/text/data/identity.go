package data

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/internal/base/readable"
)

// An Identity identifies the files of a run wherever they are: a checkpoint keeps it, and a resume compares the present
// one with it.
type Identity struct {
	Digest  string   `json:"digest"`  // of the sizes and ends of all files, in order
	Encoder string   `json:"encoder"` // of the tokenizer's files and the chat template
	Records int64    `json:"records"` // -1: not counted
	Count   int64    `json:"files"`
	Ends    int64    `json:"ends"`  // checked bytes at each end of a file
	First   []FileID `json:"first"` // the first files

	paths []string
}

// A FileID identifies a file.
type FileID struct {
	Name string `json:"name"`
	Size int64  `json:"size"`
	Head string `json:"head"` // digest of the first Ends bytes
	Tail string `json:"tail"` // of the last ones
}

const (
	maxEnds   = 1 << 20
	minEnds   = 4 << 10
	endsRead  = 512 << 20 // bounds what Identify reads, as long as no more than minEnds of each file are read
	firstKept = 100       // files of an Identity
)

// Identify returns the identity of the files of sources that form one mixture, with the given number of records.
func Identify(sources []Source, records int64) (*Identity, error) {
	id := &Identity{Records: records}
	h := sha256.New()
	if err := sources[0].addEncoder(h); err != nil { // all have the same
		return nil, err
	}
	for _, s := range sources {
		for _, glob := range s.Paths {
			paths, _, err := find(glob)
			if err != nil {
				return nil, fmt.Errorf("data %s: %w", glob, err)
			}
			id.paths = append(id.paths, paths...)
		}
	}
	id.Encoder, id.Count = hexOf(h, 16), int64(len(id.paths))
	return id, id.read(min(maxEnds, max(minEnds, endsRead/(2*id.Count))))
}

// read sets what depends on the content of the files.
func (id *Identity) read(ends int64) error {
	list := make([]FileID, len(id.paths))
	var g errgroup.Group
	g.SetLimit(4 * runtime.GOMAXPROCS(0)) // mostly waits for disks
	for i, path := range id.paths {
		g.Go(func() (err error) { list[i], err = identify(path, ends); return err })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	h := sha256.New()
	for _, f := range list {
		fmt.Fprintln(h, f.Size, f.Head, f.Tail)
	}
	id.Ends, id.Digest, id.First = ends, hexOf(h, 16), list[:min(len(list), firstKept)]
	return nil
}

func identify(path string, ends int64) (FileID, error) {
	f, size, err := openSized(path)
	if err != nil {
		return FileID{}, fmt.Errorf("data file %s: %w", path, err)
	}
	f.Close()
	n := min(size, ends)
	head, err := hashRange(path, 0, n)
	if err != nil {
		return FileID{}, err
	}
	tail, err := hashRange(path, size-n, n)
	return FileID{filepath.Base(path), size, hex.EncodeToString(head[:8]), hex.EncodeToString(tail[:8])}, err
}

// Changes describes what has changed in the files since an earlier identity; none: they are equal.
func (id *Identity) Changes(was *Identity) (list []string, err error) {
	if id.Ends != was.Ends && was.Ends >= minEnds && was.Ends <= maxEnds {
		now := *id
		if err := now.read(was.Ends); err != nil {
			return nil, err
		}
		id = &now
	}
	if id.Digest != was.Digest {
		if list, err = id.differences(was); err != nil {
			return nil, err
		}
	}
	if id.Records != was.Records && id.Records >= 0 && was.Records >= 0 {
		list = append(list, fmt.Sprintf("%s, not %d", readable.Counted(id.Records, "record"), was.Records))
	}
	return list, nil
}

// differences describes how the lists of files differ.
func (id *Identity) differences(was *Identity) (list []string, err error) {
	before := map[string][]FileID{} // files of one name in their order
	for _, f := range was.First {
		before[f.Name] = append(before[f.Name], f)
	}
	for i, f := range id.First {
		same := before[f.Name]
		if len(same) == 0 {
			if i < int(was.Count) || was.Count <= firstKept {
				list = append(list, fmt.Sprintf("%s is added", id.paths[i]))
			}
			continue
		}
		before[f.Name] = same[1:]
		how, err := f.since(same[0], id.paths[i], id.Ends)
		if err != nil {
			return nil, err
		}
		if how != "" {
			list = append(list, id.paths[i]+" "+how)
		}
	}
	if id.Count <= firstKept {
		for _, f := range was.First {
			if same := before[f.Name]; len(same) > 0 {
				before[f.Name] = same[1:]
				list = append(list, f.Name+" is missing")
			}
		}
	}
	if id.Count != was.Count {
		list = append(list, fmt.Sprintf("%s, not %d", readable.Counted(id.Count, "file"), was.Count))
	}
	switch {
	case len(list) == 0 && id.Count <= firstKept:
		list = []string{"the files are in another order"}
	case len(list) == 0:
		list = []string{fmt.Sprintf("some file after the first %d has changed", firstKept)}
	}
	const most = 8
	if more := len(list) - most; more > 0 {
		list = append(list[:most], fmt.Sprintf("and %d more changes", more))
	}
	return list, nil
}

// since describes the change of a file: "grew from 10 to 20 bytes"; "": none.
func (f FileID) since(was FileID, path string, ends int64) (how string, err error) {
	switch {
	case f == was:
		return "", nil
	case f.Size == was.Size:
		return "has changed", nil
	case f.Size < was.Size:
		return fmt.Sprintf("has %d bytes, not %d", f.Size, was.Size), nil
	}
	head, err := hashRange(path, 0, min(was.Size, ends))
	if err != nil || !strings.HasPrefix(hex.EncodeToString(head), was.Head) {
		return fmt.Sprintf("has changed, and has %d bytes, not %d", f.Size, was.Size), err
	}
	return fmt.Sprintf("grew from %d to %d bytes", was.Size, f.Size), nil
}
