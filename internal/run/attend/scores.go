package attend

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// Scores holds the options of a case other than scale, soft cap and mask.
type Scores struct {
	Sink     bool // the file has logits for the softmax's denominator
	OffByOne bool // a sink of constant 0
	ALiBi    bool
	Bias     []int // shape [1 or batch, 1 or heads, seq, seq_kv]; nil: none
	MaxLogit bool  // return the largest scores
}

var scoreTensors = []string{"sink", "alibi_slopes", "bias"}

const offByOne = "off_by_one"

func (c *Case) slopes() error {
	if !c.has("alibi_slopes") {
		return nil
	}
	c.Scores.ALiBi = true
	return c.shaped("alibi_slopes", c.Heads)
}

func (c *Case) bias() error {
	if !c.has("bias") {
		return nil
	}
	shape, err := c.readable("bias")
	if err != nil {
		return err
	}
	fits := len(shape) == 4 && (shape[0] == 1 || shape[0] == c.Batch) && (shape[1] == 1 || shape[1] == c.Heads) &&
		shape[2] == c.SeqQ && shape[3] == c.SeqKV
	if !fits {
		return fmt.Errorf("%s: tensor \"bias\" has shape %v; want [1 or %d, 1 or %d, %d, %d], [batch, heads, seq, "+
			"seq_kv]", c.Path, shape, c.Batch, c.Heads, c.SeqQ, c.SeqKV)
	}
	c.Scores.Bias = shape
	return nil
}

func (c *Case) maxLogit() (err error) {
	if s := c.file.Metadata()["max_logit"]; s != "" {
		if c.Scores.MaxLogit, err = strconv.ParseBool(s); err != nil {
			return fmt.Errorf("%s: metadata \"max_logit\" is %.64q; want true or false", c.Path, s)
		}
	}
	return nil
}

// Biased reports whether a bias or ALiBi is added to the scores.
func (s *Scores) Biased() bool { return s.Bias != nil || s.ALiBi }

func (c *Case) sink() error {
	word := c.file.Metadata()["sink"]
	switch {
	case c.has("sink") && word != "":
		return fmt.Errorf("%s: both tensor \"sink\" and metadata \"sink\" %.64q; remove one of the two", c.Path,
			word)
	case c.has("sink"):
		c.Scores.Sink = true
		return c.shaped("sink", c.Heads)
	case word == offByOne:
		c.Scores.OffByOne = true
	case word != "":
		return fmt.Errorf("%s: metadata \"sink\" is %.64q; want %s, or a tensor \"sink\" [heads]", c.Path, word,
			offByOne)
	}
	return nil
}

func (c *Case) shaped(name string, want ...int) error {
	shape, err := c.readable(name)
	if err == nil && !slices.Equal(shape, want) {
		err = fmt.Errorf("%s: tensor %q has shape %v; want %v", c.Path, name, shape, want)
	}
	return err
}

// terms holds a rank's tensors for the scores; absent ones are zero. A bias has the layout of the file, with the rank's
// rows: [batch times heads, rows, 1, seq_kv].
type terms struct {
	sink, slopes, bias         View
	dsink, dbias, largest      result
	biasBatch, biasHeads, rows int
	// dbiasOf is the gradient of one group of samples, if several groups share a bias.
	dbiasOf View
}

// loadTerms reads the vectors, which every rank needs completely, and the rows qs of the bias, and allocates results. t
// is the type of LSE.
func (c *Case) loadTerms(l *loader, t tensor.DType, qs []partition.Span) (x terms) {
	heads, nq := [4]int{1, 1, c.Heads, 1}, partition.Count(qs)
	x.rows = nq
	whole := func(name string) func(View) error {
		return func(host View) error { return c.file.ReadInto(name, host, 0) }
	}
	switch {
	case c.Scores.OffByOne:
		l.input("sink", &x.sink, t, heads, func(View) error { return nil }) // 0
	case c.Scores.Sink:
		l.input("sink", &x.sink, t, heads, whole("sink"))
	}
	if c.Scores.Sink && c.Backward {
		l.output(&x.dsink, t, heads)
	}
	if c.Scores.ALiBi {
		l.input("alibi_slopes", &x.slopes, t, heads, whole("alibi_slopes"))
	}
	if b := c.Scores.Bias; b != nil {
		x.biasBatch, x.biasHeads = b[0], b[1]
		rows := [4]int{b[0] * b[1], nq, 1, c.SeqKV}
		l.input("bias", &x.bias, t, rows, func(host View) error { return c.rows("bias", host, qs, c.SeqQ) })
		if c.Backward {
			l.output(&x.dbias, t, rows)
		}
		if b[0] == 1 && c.Backward && c.Masks.Apart() {
			var of result
			l.output(&of, t, rows)
			x.dbiasOf = of.dev
		}
	}
	if c.Scores.MaxLogit {
		l.output(&x.largest, t, [4]int{c.Batch, nq, c.Heads, 1})
	}
	return x
}

func (x *terms) softmax(p attention.Softmax) attention.Softmax {
	dbias := x.dbias.dev
	if !x.dbiasOf.IsZero() {
		dbias = x.dbiasOf
	}
	s := attention.Scores{Slopes: x.slopes, Bias: x.byHeads(x.bias), DBias: x.byHeads(dbias), Max: x.largest.dev}
	if !s.Slopes.IsZero() || !s.Bias.IsZero() || !s.Max.IsZero() {
		p.Scores = &s
	}
	return p
}

func (x *terms) of(lo, hi int) terms {
	part := *x
	if !x.largest.dev.IsZero() {
		part.largest.dev = x.largest.dev.Slice(tensor.Batch, lo, hi)
	}
	if x.biasBatch > 1 {
		part.biasBatch = hi - lo
		for _, v := range []*View{&part.bias, &part.dbias.dev} {
			if !v.IsZero() {
				*v = v.Slice(tensor.Batch, lo*x.biasHeads, hi*x.biasHeads)
			}
		}
	}
	return part
}

// addBias accumulates the gradient of a bias shared by several groups of samples. The first group sets it.
func (x *terms) addBias(ops ring.Mover, first bool) {
	switch {
	case x.dbiasOf.IsZero():
	case first:
		ops.Copy(x.dbias.dev, x.dbiasOf)
	default:
		ops.Add(x.dbias.dev, x.dbiasOf)
	}
}

// byHeads returns a view of a bias in the order of kernels, [batch, rows, heads, columns].
func (x *terms) byHeads(v View) View {
	if v.IsZero() {
		return v
	}
	n := v.Len(tensor.Dim)
	head := int64(x.rows) * int64(n)
	return tensor.NewView(v.Memory(), v.DType(), v.Offset(), [4]int{x.biasBatch, x.rows, x.biasHeads, n},
		[4]int64{int64(x.biasHeads) * head, int64(n), head, 1})
}

func (x *terms) results() (list []*result) {
	for _, r := range []*result{&x.dsink, &x.dbias, &x.largest} {
		if !r.dev.IsZero() {
			list = append(list, r)
		}
	}
	return list
}

// sinks folds the sinks into the result, if there are any, and computes their gradient.
func (l *local) sinks(s attention.Sinks, acc attention.Partial) error {
	if l.sink.IsZero() {
		return nil
	}
	if err := s.FoldSink(acc.O, acc.LSE, l.sink); err != nil {
		return err
	}
	if l.dsink.dev.IsZero() {
		return nil
	}
	return s.SinkGrad(l.dsink.dev, l.do, acc.O, acc.LSE, l.sink)
}

// writeTerms reduces or gathers the results, and returns their entries on rank 0.
func (c *Case) writeTerms(ctx context.Context, world comm.Communicator, shape partition.Shape,
	x *terms) (entries []safetensors.Entry, err error) {
	reduced := func(name string, v View, op comm.Op, dims ...int) {
		if err == nil {
			err = comm.Finish(ctx)(world.AllReduce(v, op))
		}
		if err != nil {
			err = fmt.Errorf("gathering %s: %w", name, err)
			return
		}
		entries = append(entries, safetensors.Floats(name, safetensors.F32, dims, floats(v)))
	}
	if v := x.dsink.host; !v.IsZero() {
		reduced("dsink", v, comm.Sum, c.Heads)
	}
	if v := x.largest.host; !v.IsZero() {
		reduced("max_logit", overRows(v), comm.Max, c.Batch, c.Heads)
	}
	if v := x.dbias.host; err == nil && !v.IsZero() {
		var whole View
		if whole, err = gather(ctx, world, shape, c.SeqQ, v); err != nil {
			return nil, fmt.Errorf("gathering dbias: %w", err)
		}
		if world.Rank() == 0 {
			entries = append(entries, safetensors.Floats("dbias", safetensors.F32, c.Scores.Bias, floats(whole)))
		}
	}
	return entries, err
}

// overRows returns the largest element of each batch and head; -Inf without rows.
func overRows(v View) View {
	out := tensor.New(v.DType(), v.Len(tensor.Batch), 1, v.Len(tensor.Heads), 1)
	if v.DType() == tensor.F64 {
		largest[float64](out, v)
	} else {
		largest[float32](out, v)
	}
	return out
}

// largest sets to [batch, 1, heads, 1] to the maximum of from [batch, rows, heads, 1] over the rows.
func largest[T tensor.Float](to, from View) {
	x, y, heads := tensor.Data[T](from), tensor.Data[T](to), from.Len(tensor.Heads)
	for i := range y {
		y[i] = T(math.Inf(-1))
	}
	for i := range from.Size() {
		at := i/(heads*from.Len(tensor.Seq))*heads + i%heads
		y[at] = max(y[at], x[i])
	}
}
