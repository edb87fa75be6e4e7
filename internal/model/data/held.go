package data

import (
	"context"
	"fmt"
	"io"
	"iter"
	"slices"
	"sort"
)

// A held is a file of text that was encoded once, with its ids in memory, 4 bytes each.
type held struct {
	ids    []int32
	labels []int32 // beside ids; nil: each token asks for itself
	docs   []int64 // where documents end
}

// hold makes the ids of files of text, one held for each.
func (d *Dataset) hold(paths []string) ([]*held, error) {
	files := make([]*held, len(paths))
	for i := range files {
		files[i] = &held{}
	}
	e := Encoding{Tokenizer: d.source.Tokenizer, EOS: d.source.EOS, Vocab: d.source.Vocab, Ignored: &d.ignored}
	err := e.Each(context.Background(), paths, func(file int, doc Document) error {
		files[file].add(doc)
		return nil
	})
	return files, err
}

// add appends a document.
func (h *held) add(doc Document) {
	if doc.Labels != nil && h.labels == nil {
		h.labels = append(make([]int32, 0, len(doc.IDs)), h.ids...) // never nil
	}
	h.ids = append(h.ids, doc.IDs...)
	if h.labels != nil {
		if doc.Labels == nil {
			doc.Labels = doc.IDs
		}
		h.labels = append(h.labels, doc.Labels...)
	}
	h.docs = append(h.docs, int64(len(h.ids)))
}

func (h *held) tokens() int64 { return int64(len(h.ids)) }

func (h *held) read(_ io.ReaderAt, dst []int32, at int64) error {
	copy(dst, h.ids[at:])
	return nil
}

func (h *held) where(at int64) string {
	k := sort.Search(len(h.docs), func(k int) bool { return h.docs[k] > at })
	return fmt.Sprintf("token %d (of document %d)", at, k+1)
}

func (h *held) ends() iter.Seq[int64] { return slices.Values(h.docs) }
