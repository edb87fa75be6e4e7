package verify

import (
	"errors"
	"slices"

	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/text/data"
)

// The loader decides the sample of a whole document. So this file takes the places of documents from the batch, and
// their tokens and targets from the records: each record may have one place in an epoch.

// A place is a document of a sample, as loaded.
type place struct {
	loaded []Row
	rows   []Row // by the records; nil if there is none
}

// A finder finds the records of places.
type finder struct {
	most    int // tokens of a sample; longer records are dropped
	places  map[string][]*place
	cut     []*place // the end of a prefix may cut these
	present []Row    // the rows of the present record; their targets are labels
}

// errMixture reports a mixture of sources with whole documents and others.
var errMixture = errors.New("mixtures of conversations with other data are not counted a second time")

// wholes counts the sources with whole documents, and the others.
func wholes(cfg *config.Config) (whole, others int) {
	for _, s := range cfg.Data.Path.Sources() {
		if cfg.Data.Whole(s) {
			whole++
		} else {
			others++
		}
	}
	return whole, others
}

// wholeRecords returns the rows of samples by the records, given the rows of the batch. A sample has length tokens.
func wholeRecords(cfg *config.Config, length int, samples []int64, batch [][]Row) (map[int64][]Row, error) {
	f := &finder{most: length, places: map[string][]*place{}}
	bySample := map[int64][]*place{}
	for i, s := range samples {
		if bySample[s] != nil {
			continue
		}
		docs := cut(batch[i])
		for k, d := range docs {
			p := &place{loaded: d}
			bySample[s] = append(bySample[s], p)
			if k == len(docs)-1 && len(batch[i]) == cfg.Data.SeqLen && length > cfg.Data.SeqLen {
				f.cut = append(f.cut, p)
			}
			f.places[text(d)] = append(f.places[text(d)], p)
		}
	}
	r := &reader{cfg: cfg, tok: data.NewTokenizer(cfg.Data.Tokenizer, cfg.Model.VocabSize), length: int64(length),
		whole: f}
	if _, err := r.source(cfg.Data.Path.Globs(), nil, 0); err != nil {
		return nil, err
	}
	out := map[int64][]Row{}
	for s, places := range bySample {
		for i, p := range places {
			for _, row := range p.rows {
				row.Document = int32(i)
				out[s] = append(out[s], row)
			}
		}
	}
	return out, nil
}

// add appends tokens of the present record.
func (f *finder) add(ids, labels []int32, begins func(i int) bool) {
	for i, id := range ids {
		if begins(i) {
			f.end()
		}
		f.present = append(f.present, Row{ID: id, Target: labels[i], Position: int32(len(f.present))})
	}
}

// end gives the present record to a place with its tokens; of several, to one with its targets.
func (f *finder) end() {
	rows := f.present
	f.present = nil
	for i := range rows { // the label of a token is the target of the one before it
		if rows[i].Target = -1; i+1 < len(rows) && rows[i+1].Target != ignored {
			rows[i].Target = rows[i+1].Target
		}
	}
	list := f.fitting(rows)
	if len(list) == 0 {
		return
	}
	same := slices.IndexFunc(list, func(p *place) bool {
		return slices.EqualFunc(p.loaded, rows[:len(p.loaded)], func(a, b Row) bool { return a.Target == b.Target })
	})
	p := list[max(0, same)]
	p.rows = rows[:len(p.loaded)]
}

// fitting returns the places without a record that have these tokens.
func (f *finder) fitting(rows []Row) []*place {
	return slices.DeleteFunc(slices.Concat(f.places[text(rows)], f.cut), func(p *place) bool {
		n := len(p.loaded)
		return p.rows != nil || n > len(rows) || len(rows) > f.most || text(p.loaded) != text(rows[:n])
	})
}
