package data

import (
	"fmt"
	"slices"

	"github.com/cprun/cprun/partition"
)

// Plan selects how a dataset is cut into samples, and their order.
type Plan struct {
	SeqLen  int // global tokens of a sample, at most
	Shuffle bool
	Seed    int64
	// PackDocuments separates documents inside a sample: positions restart in each, and the last token of each has no
	// target.
	PackDocuments bool
	// Whole drops documents longer than SeqLen, and cuts none: they are packed, or without PackDocuments, each is one
	// sample. Documents with labels need it.
	Whole bool
}

// Loader reads samples. Its methods may be called concurrently.
type Loader struct {
	data    *Dataset
	plan    Plan
	samples int64
	ends    []int64 // of documents, ascending; only with PackDocuments, if not Whole
	pack    *pack   // nil if not Whole
	valid   []int32 // targets of each sample; nil if not Whole
	dropped int64
	lengths Lengths // of all documents, if Whole
}

// New cuts a dataset into samples. With PackDocuments and an EOS token it reads the dataset once to find the ends of
// documents: 8 bytes of memory for each.
func New(d *Dataset, p Plan) (*Loader, error) {
	if p.SeqLen < 1 {
		return nil, fmt.Errorf("data %s: seq_len %d is not positive", d.source.name(), p.SeqLen)
	}
	l := &Loader{data: d, plan: p, samples: (d.Len() - 1) / int64(p.SeqLen)}
	var err error
	var targets []int32
	if p.Whole || p.PackDocuments {
		if l.ends, targets, err = d.documents(); err != nil {
			return nil, err
		}
	}
	if p.Whole {
		if err := l.packWhole(targets); err != nil {
			return nil, err
		}
	} else if d.labelled() {
		return nil, fmt.Errorf("data %s: a record has labels or a mask, and the first has none; write "+
			"data.overlong: drop and data.pack_documents: true, so that no record is cut", d.source.name())
	} else if d.borders.Load() && !p.PackDocuments {
		return nil, fmt.Errorf("data %s: a record has the borders of several documents, and the first ones have none; write "+
			"data.pack_documents: true, so that attention stays inside documents", d.source.name())
	}
	if l.samples < 1 {
		return nil, fmt.Errorf(
			"data %s: %d tokens make no sample of seq_len %d, which needs %d (one more, for the last "+
				"target); lower data.seq_len or add data",
			d.source.name(), d.Len(), p.SeqLen, int64(p.SeqLen)+1)
	}
	if l.Targets() == 0 {
		return nil, fmt.Errorf("data %s: none of the %d tokens is a target: every label is %d, every mask is 0, or "+
			"every document has one token", d.source.name(), d.Len(), Ignore)
	}
	return l, nil
}

// packWhole packs whole documents, given the targets of each; nil: all their tokens except the first.
func (l *Loader) packWhole(targets []int32) error {
	var starts []int64
	var lens, valid []int32
	at, most := int64(0), int64(l.plan.SeqLen)
	ends := l.ends
	if n := l.data.Len(); n > 0 && (len(ends) == 0 || ends[len(ends)-1] < n) {
		ends = append(ends, n)
	}
	for i, end := range ends {
		if l.lengths.add(end - at); end-at > most {
			l.dropped++
		} else {
			starts, lens = append(starts, at), append(lens, int32(end-at))
			if targets == nil {
				valid = append(valid, int32(end-at-1))
			} else {
				valid = append(valid, targets[i])
			}
		}
		at = end
	}
	if l.dropped > 0 && len(lens) == 0 {
		return fmt.Errorf("data %s: all %d documents are longer than seq_len %d, and none is cut; raise data.seq_len",
			l.data.source.name(), l.dropped, l.plan.SeqLen)
	}
	l.ends, l.pack = nil, newPack(starts, lens, l.plan)
	l.samples = int64(len(l.pack.first) - 1)
	l.valid = make([]int32, l.samples)
	for s := range l.samples {
		for _, doc := range l.pack.of(s) {
			l.valid[s] += valid[doc]
		}
	}
	return nil
}

// A piece is a range of tokens in a sample with positions from 0.
type piece struct {
	start int64
	n     int
	open  bool // the token after it is the target of the last
}

// pieces returns the documents of a sample, or their parts in it.
func (l *Loader) pieces(sample int64) (list []piece) {
	if sample < 0 || sample >= l.samples {
		panic(fmt.Sprintf("data: sample %d of %d", sample, l.samples))
	}
	if k := l.pack; k != nil {
		for _, doc := range k.of(sample) {
			list = append(list, piece{start: k.starts[doc], n: int(k.lens[doc])})
		}
		return list
	}
	at := sample * int64(l.plan.SeqLen)
	stop := at + int64(l.plan.SeqLen)
	for _, end := range l.docEnds(sample) {
		list = append(list, piece{start: at, n: int(end - at)})
		at = end
	}
	if at < stop {
		list = append(list, piece{start: at, n: int(stop - at), open: true})
	}
	return list
}

// Alike reports whether all samples have the same documents and number of targets.
func (l *Loader) Alike() bool { return !l.plan.PackDocuments && l.pack == nil }

// Dropped returns the number of documents left out because of their length, and the lengths of all.
func (l *Loader) Dropped() (documents int64, of Lengths) { return l.dropped, l.lengths }

// Tokens returns the tokens of all samples.
func (l *Loader) Tokens() (n int64) {
	if l.pack == nil {
		return l.samples * int64(l.plan.SeqLen)
	}
	for _, len := range l.pack.lens {
		n += int64(len)
	}
	return n
}

// Samples returns the number of samples of an epoch. Unless documents are whole, it leaves out an incomplete last one.
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

// docEnds returns the document ends inside a sample that cuts documents.
func (l *Loader) docEnds(sample int64) []int64 {
	s := int64(l.plan.SeqLen)
	lo, _ := slices.BinarySearch(l.ends, sample*s+1)
	hi, _ := slices.BinarySearch(l.ends, sample*s+s+1)
	return l.ends[lo:hi]
}

// Docs returns the lengths of the documents in a sample, cut at its borders; they sum to SeqLen, or less if they are
// whole. It reads no file, so every rank can call it for every sample. Without PackDocuments a sample is one document.
func (l *Loader) Docs(sample int64) (docs []int) {
	for _, p := range l.pieces(sample) {
		docs = append(docs, p.n)
	}
	return docs
}

// Valid returns the number of targets of a whole sample, over all ranks. It reads no file.
func (l *Loader) Valid(sample int64) int {
	if l.pack != nil {
		return int(l.valid[sample])
	}
	return l.plan.SeqLen - len(l.docEnds(sample))
}

// Targets returns the number of targets of an epoch.
func (l *Loader) Targets() (n int64) {
	if l.pack == nil {
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
// of a document has the target -1. A masked target is also -1. After the documents of a sample come tokens 0 without
// targets. ids, targets and positions have the length of the spans (partition.Count).
func (l *Loader) Load(sample int64, spans []partition.Span, ids, targets []int32, positions []int) error {
	n := partition.Count(spans)
	if len(ids) != n || len(targets) != n || len(positions) != n {
		panic(fmt.Sprintf("data: %d ids, %d targets and %d positions for %d tokens", len(ids), len(targets),
			len(positions), n))
	}
	buf := make([]int32, min(scanChunk, l.plan.SeqLen+1))
	labels := buf
	if l.data.labelled() {
		labels = make([]int32, len(buf))
	}
	pieces := l.pieces(sample)
	for _, s := range spans {
		if s.Start < 0 || s.Len < 1 || s.Stride < 1 || s.Start+(s.Len-1)*s.Stride >= l.plan.SeqLen {
			panic(fmt.Sprintf("data: span %+v in a sample of %d tokens", s, l.plan.SeqLen))
		}
		r := spanRows{span: s, ids: ids, targets: targets, positions: positions}
		for _, p := range pieces {
			if err := l.loadPiece(p, &r, buf, labels); err != nil {
				return err
			}
		}
		r.pad()
		ids, targets, positions = ids[s.Len:], targets[s.Len:], positions[s.Len:]
	}
	return nil
}

// A spanRows is the rows of a span, filled in order.
type spanRows struct {
	span         partition.Span
	ids, targets []int32
	positions    []int
	done         int // rows
	before       int // tokens of earlier pieces
}

// at returns the place of the next row after the earlier pieces.
func (r *spanRows) at() int { return r.span.Start + r.done*r.span.Stride - r.before }

func (r *spanRows) put(id, target int32) {
	r.ids[r.done], r.targets[r.done], r.positions[r.done] = id, target, r.at()
	r.done++
}

// loadPiece fills the rows in a piece, through buf and labels, which are the same if the data have none. It reads the
// whole range of a strided span, since a read for each token would be slower.
func (l *Loader) loadPiece(p piece, r *spanRows, buf, labels []int32) error {
	stride := r.span.Stride
	for r.done < r.span.Len && r.at() < p.n {
		n := min(r.span.Len-r.done, 1+(p.n-1-r.at())/stride, 1+(len(buf)-2)/stride)
		from, asked := p.start+int64(r.at()), (n-1)*stride+1
		if last := r.at() + asked; last < p.n || p.open { // the target of the last
			asked++
		}
		if err := l.data.ReadTokens(buf[:asked], from); err != nil {
			return err
		}
		if &labels[0] != &buf[0] {
			if err := l.data.readLabels(labels[:asked], from); err != nil {
				return err
			}
		}
		for i := range n {
			target := int32(-1)
			if k := i*stride + 1; k < asked && labels[k] != Ignore {
				target = labels[k]
			}
			r.put(buf[i*stride], target)
		}
	}
	r.before += p.n
	return nil
}

// pad fills the rows after all pieces.
func (r *spanRows) pad() {
	for r.done < r.span.Len {
		r.put(0, -1)
	}
}
