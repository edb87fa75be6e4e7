package data

import (
	"fmt"
	"slices"

	"github.com/cprun/cprun/partition"
)

// Plan says how a dataset is cut into samples and in which order they come.
type Plan struct {
	SeqLen  int // global tokens of a sample
	Shuffle bool
	Seed    int64
	// PackDocuments keeps documents apart inside a sample: positions restart in each, and
	// the last token of each has no target.
	PackDocuments bool
}

// Loader reads samples. Its methods may be called concurrently.
type Loader struct {
	data    *Dataset
	plan    Plan
	samples int64
	ends    []int64 // of documents, ascending; only with PackDocuments
	valid   []int32 // targets of each sample; nil where no label takes any away
}

// New cuts a dataset into samples. With PackDocuments and an EOS token it reads the dataset
// once, to know where documents end: 8 bytes of memory a document.
func New(d *Dataset, p Plan) (*Loader, error) {
	if p.SeqLen < 1 {
		return nil, fmt.Errorf("data %s: seq_len %d is not positive", d.source.name(), p.SeqLen)
	}
	l := &Loader{data: d, plan: p, samples: (d.Len() - 1) / int64(p.SeqLen)}
	if l.samples < 1 {
		return nil, fmt.Errorf(
			"data %s: %d tokens make no sample of seq_len %d, which needs %d (one more, for the last "+
				"target); lower data.seq_len or add data",
			d.source.name(), d.Len(), p.SeqLen, int64(p.SeqLen)+1)
	}
	if p.PackDocuments {
		var err error
		if l.ends, err = d.documents(); err != nil {
			return nil, err
		}
	}
	if d.labelled() {
		if err := l.count(); err != nil {
			return nil, err
		}
	}
	if l.Targets() == 0 {
		return nil, fmt.Errorf("data %s: none of the %d tokens is a target: every label is %d, every mask is 0, or "+
			"every document has one token", d.source.name(), d.Len(), Ignore)
	}
	return l, nil
}

// count finds the targets of each sample, which labels make fewer.
func (l *Loader) count() error {
	l.valid = make([]int32, l.samples)
	labels := make([]int32, l.plan.SeqLen)
	for s := range l.samples {
		first := s*int64(l.plan.SeqLen) + 1 // the first token that is a target
		if err := l.data.readLabels(labels, first); err != nil {
			return err
		}
		for _, end := range l.within(s) { // the first token of a document is no target
			labels[end-first] = Ignore
		}
		for _, label := range labels {
			if label != Ignore {
				l.valid[s]++
			}
		}
	}
	return nil
}

// Alike reports whether all samples have the same documents and number of targets.
func (l *Loader) Alike() bool { return !l.plan.PackDocuments && l.valid == nil }

// Samples returns the number of samples of an epoch. The tokens that are left over at the end
// belong to none.
func (l *Loader) Samples() int64 { return l.samples }

// Index returns the sample that is the n-th to be consumed since training began, counted from 0.
// Every epoch has every sample once; shuffled, in an order of its own.
func (l *Loader) Index(n int64) int64 {
	if n < 0 {
		panic(fmt.Sprintf("data: sample %d in the order of training", n))
	}
	epoch, i := n/l.samples, n%l.samples
	if !l.plan.Shuffle {
		return i
	}
	return newOrder(l.samples, l.plan.Seed, epoch).at(i)
}

// within returns the ends of documents in the sample: above its first token, up to its last.
func (l *Loader) within(sample int64) []int64 {
	if sample < 0 || sample >= l.samples {
		panic(fmt.Sprintf("data: sample %d of %d", sample, l.samples))
	}
	s := int64(l.plan.SeqLen)
	lo, _ := slices.BinarySearch(l.ends, sample*s+1)
	hi, _ := slices.BinarySearch(l.ends, sample*s+s+1)
	return l.ends[lo:hi]
}

// Docs returns the lengths of the documents in a sample, or of the parts of them that lie in it;
// they sum to SeqLen. It reads nothing, so every rank knows it. Without PackDocuments a
// sample is one document.
func (l *Loader) Docs(sample int64) []int {
	var docs []int
	at := sample * int64(l.plan.SeqLen)
	stop := at + int64(l.plan.SeqLen)
	for _, end := range l.within(sample) {
		docs = append(docs, int(end-at))
		at = end
	}
	if at < stop {
		docs = append(docs, int(stop-at))
	}
	return docs
}

// Valid returns the number of targets of a whole sample, over all ranks. It reads nothing.
func (l *Loader) Valid(sample int64) int {
	if l.valid != nil {
		return int(l.valid[sample])
	}
	return l.plan.SeqLen - len(l.within(sample))
}

// Targets returns the number of targets of an epoch.
func (l *Loader) Targets() (n int64) {
	if l.valid == nil {
		used := l.samples * int64(l.plan.SeqLen)
		ends, _ := slices.BinarySearch(l.ends, used+1)
		return used - int64(ends)
	}
	for _, v := range l.valid {
		n += int64(v)
	}
	return n
}

// Load reads one rank's shard of a sample: the tokens at spans, in that order, the token after each as its target, and
// their positions for rotary embeddings. With PackDocuments positions count from 0 in each document, and the last token
// of a document has the target -1, since the token after it belongs to another. A masked target is also -1. ids,
// targets and positions have the length of the spans (partition.Count).
func (l *Loader) Load(sample int64, spans []partition.Span, ids, targets []int32, positions []int) error {
	n := partition.Count(spans)
	if len(ids) != n || len(targets) != n || len(positions) != n {
		panic(fmt.Sprintf("data: %d ids, %d targets and %d positions for %d tokens", len(ids), len(targets),
			len(positions), n))
	}
	buf := make([]int32, min(scanChunk, l.plan.SeqLen+1))
	var labels []int32
	if l.valid != nil {
		labels = make([]int32, len(buf))
	}
	for _, s := range spans {
		if s.Start < 0 || s.Len < 1 || s.Stride < 1 || s.Start+(s.Len-1)*s.Stride >= l.plan.SeqLen {
			panic(fmt.Sprintf("data: span %+v in a sample of %d tokens", s, l.plan.SeqLen))
		}
		if err := l.loadSpan(sample, s, buf, labels, ids, targets, positions); err != nil {
			return err
		}
		ids, targets, positions = ids[s.Len:], targets[s.Len:], positions[s.Len:]
	}
	return nil
}

// loadSpan reads one span through buf and, if the data have labels, through labels. It reads the whole range of a
// strided span: a read for each token would be slower.
func (l *Loader) loadSpan(sample int64, s partition.Span, buf, labels, ids, targets []int32, positions []int) error {
	base := sample * int64(l.plan.SeqLen)
	ends := l.within(sample)
	doc := 0         // documents that end at or before the token
	docStart := base // begin of the token's document, or of its part in the sample
	for done := 0; done < s.Len; {
		n := min(s.Len-done, 1+(len(buf)-2)/s.Stride)
		from := base + int64(s.Start) + int64(done)*int64(s.Stride)
		tokens := buf[:(n-1)*s.Stride+2]
		if err := l.data.ReadTokens(tokens, from); err != nil {
			return err
		}
		asked := tokens
		if labels != nil {
			asked = labels[:len(tokens)]
			if err := l.data.readLabels(asked, from); err != nil {
				return err
			}
		}
		for i := range n {
			at := from + int64(i)*int64(s.Stride)
			for doc < len(ends) && ends[doc] <= at {
				docStart = ends[doc]
				doc++
			}
			k := done + i
			ids[k], targets[k], positions[k] = tokens[i*s.Stride], asked[i*s.Stride+1], int(at-docStart)
			if targets[k] == Ignore || doc < len(ends) && ends[doc] == at+1 {
				targets[k] = -1
			}
		}
		done += n
	}
	return nil
}
