package data

import (
	"fmt"
	"slices"

	"github.com/cprun/cprun/partition"
)

// Plan selects how a dataset is cut into samples, and their order.
type Plan struct {
	SeqLen  int // global tokens of a sample
	Shuffle bool
	Seed    int64
	// PackDocuments separates documents inside a sample: positions restart in each, and the last token of each has no
	// target.
	PackDocuments bool
}

// Loader reads samples. Its methods may be called concurrently.
type Loader struct {
	data    *Dataset
	plan    Plan
	samples int64
	ends    []int64 // of documents, ascending; only with PackDocuments
	valid   []int32 // targets of each sample; nil: all tokens, except at ends of documents
}

// New cuts a dataset into samples. With PackDocuments and an EOS token it reads the dataset once to find the ends of
// documents: 8 bytes of memory for each.
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
		if err := l.countTargets(); err != nil {
			return nil, err
		}
	}
	if l.Targets() == 0 {
		return nil, fmt.Errorf("data %s: none of the %d tokens is a target: every label is %d, every mask is 0, or "+
			"every document has one token", d.source.name(), d.Len(), Ignore)
	}
	return l, nil
}

// countTargets counts the unmasked labels of each sample.
func (l *Loader) countTargets() error {
	l.valid = make([]int32, l.samples)
	labels := make([]int32, l.plan.SeqLen)
	for s := range l.samples {
		first := s*int64(l.plan.SeqLen) + 1 // the first target
		if err := l.data.readLabels(labels, first); err != nil {
			return err
		}
		for _, end := range l.docEnds(s) { // the first token of a document is no target
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

// Samples returns the number of samples of an epoch. It leaves out an incomplete last one.
func (l *Loader) Samples() int64 { return l.samples }

// Epoch returns the same.
func (l *Loader) Epoch() int64 { return l.samples }

// Index returns the n-th sample of the training, from 0. Every epoch has every sample once, shuffled in its own order.
func (l *Loader) Index(n int64) int64 {
	if n < 0 {
		panic(fmt.Sprintf("data: sample %d in the order of training", n))
	}
	epoch, i := n/l.samples, n%l.samples
	if !l.plan.Shuffle {
		return i
	}
	return newPermutation(l.samples, l.plan.Seed, epoch).at(i)
}

// docEnds returns the document ends inside the sample.
func (l *Loader) docEnds(sample int64) []int64 {
	if sample < 0 || sample >= l.samples {
		panic(fmt.Sprintf("data: sample %d of %d", sample, l.samples))
	}
	s := int64(l.plan.SeqLen)
	lo, _ := slices.BinarySearch(l.ends, sample*s+1)
	hi, _ := slices.BinarySearch(l.ends, sample*s+s+1)
	return l.ends[lo:hi]
}

// Docs returns the lengths of the documents in a sample, cut at its borders; they sum to SeqLen. It reads no file, so
// every rank can call it for every sample. Without PackDocuments a sample is one document.
func (l *Loader) Docs(sample int64) []int {
	var docs []int
	at := sample * int64(l.plan.SeqLen)
	stop := at + int64(l.plan.SeqLen)
	for _, end := range l.docEnds(sample) {
		docs = append(docs, int(end-at))
		at = end
	}
	if at < stop {
		docs = append(docs, int(stop-at))
	}
	return docs
}

// Valid returns the number of targets of a whole sample, over all ranks. It reads no file.
func (l *Loader) Valid(sample int64) int {
	if l.valid != nil {
		return int(l.valid[sample])
	}
	return l.plan.SeqLen - len(l.docEnds(sample))
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

// Load reads one rank's shard of a sample: the tokens at spans in that order, the next token of each as its target, and
// their positions for rotary embeddings. With PackDocuments positions count from 0 in each document, and the last token
// of a document has the target -1. A masked target is also -1. ids, targets and positions have the length of the spans
// (partition.Count).
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
// strided span, since a read for each token would be slower.
func (l *Loader) loadSpan(sample int64, s partition.Span, buf, labels, ids, targets []int32, positions []int) error {
	base := sample * int64(l.plan.SeqLen)
	ends := l.docEnds(sample)
	doc := 0         // documents that end at or before the token
	docStart := base // start of the token's document, or of its part in the sample
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
