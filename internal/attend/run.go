package attend

import (
	"context"
	"fmt"
	"time"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/safetensors"
	"github.com/cprun/cprun/internal/tensor"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// Spec is how a case is run.
type Spec struct {
	In, Out   string
	Layout    string // contiguous, zigzag, striped, document
	Algorithm string // one of ring.Algorithms
	Backend   string // flash or reference
	DType     string // fp32 or fp64: what is computed in
}

// Report is what rank 0 knows at the end: what `cprun attention --json` prints.
type Report struct {
	In        string  `json:"in"`
	Out       string  `json:"out"`
	Ranks     int     `json:"ranks"`
	Layout    string  `json:"layout"`
	Algorithm string  `json:"algorithm"`
	Backend   string  `json:"backend"`
	DType     string  `json:"dtype"`
	Device    string  `json:"device"`
	Hops      int     `json:"hops"`    // of rank 0
	Balance   float64 `json:"balance"` // mean over maximum of the ranks' visible pairs
	Pairs     int     `json:"pairs"`   // visible (query, key) pairs of one head
	Seconds   float64 `json:"seconds"` // forward and backward, the slowest rank
}

// shape is the case's partition over that many ranks.
func (c *Case) shape(layout string, ranks int) (partition.Shape, error) {
	docs := c.Docs
	if layout == "document" && len(docs) == 0 {
		if c.SeqQ != c.SeqKV {
			return partition.Shape{}, fmt.Errorf("layout document needs as many queries (%d) as keys (%d); use zigzag", c.SeqQ, c.SeqKV)
		}
		docs = []int{c.SeqQ}
	}
	l, err := partition.New(layout, docs)
	return partition.Shape{SeqQ: c.SeqQ, SeqKV: c.SeqKV, Size: ranks, Layout: l, Mask: c.Mask}, err
}

// Check finds what is wrong with a spec before any process is spawned.
func (s Spec) Check(c *Case, ranks int) error {
	if _, err := c.shape(s.Layout, ranks); err != nil {
		return err
	}
	if _, err := s.dtype(); err != nil {
		return err
	}
	if _, err := s.kernel(nil); err != nil {
		return err
	}
	for _, a := range ring.Algorithms {
		if a == s.Algorithm {
			return nil
		}
	}
	return fmt.Errorf("algorithm %q is none of %v", s.Algorithm, ring.Algorithms)
}

func (s Spec) dtype() (tensor.DType, error) {
	switch s.DType {
	case "fp32":
		return tensor.F32, nil
	case "fp64":
		return tensor.F64, nil
	}
	return tensor.Invalid, fmt.Errorf("dtype %q is none of fp32, fp64, which are what a CPU computes in", s.DType)
}

func (s Spec) kernel(stream *tensor.HostStream) (attention.Kernel, error) {
	switch s.Backend {
	case "flash":
		return kernels.NewCPU(stream), nil
	case "reference":
		if stream == nil {
			return attention.NewReference[float64](nil), nil
		}
		return attention.NewReference[float64](stream.Do), nil
	}
	return nil, fmt.Errorf("backend %q is none of flash, reference, which are what a CPU has", s.Backend)
}

// local is a rank's rows of every tensor of a case.
type local struct {
	q, k, v, do View
	acc         attention.Partial
	grads       attention.Grads
}

// View is a strided window onto device memory; see internal/tensor.
type View = tensor.View

// Run computes this rank's part of the case and, on rank 0, gathers and writes the result.
// Every rank of the world calls it.
func (c *Case) Run(ctx context.Context, s Spec, world comm.Communicator, stream *tensor.HostStream) (*Report, error) {
	shape, err := c.shape(s.Layout, world.Size())
	if err != nil {
		return nil, err
	}
	kernel, err := s.kernel(stream)
	if err != nil {
		return nil, err
	}
	schedule, err := ring.New(s.Algorithm, shape, world.Rank())
	if err != nil {
		return nil, err
	}
	l, err := c.load(s, shape, world.Rank())
	if err != nil {
		return nil, err
	}
	r := &ring.Ring{
		Kernel: kernel, Comm: world, Stream: stream,
		Arena: tensor.NewArena(0, func(n int64) tensor.Memory { return tensor.NewHost(n) }),
	}
	if err := world.Barrier(ctx); err != nil {
		return nil, err
	}
	start := time.Now()
	if err := r.Forward(l.acc, l.q, l.k, l.v, schedule, c.Softmax); err != nil {
		return nil, err
	}
	if c.Backward {
		if err := r.Backward(l.grads, l.do, l.q, l.k, l.v, l.acc, schedule, c.Softmax); err != nil {
			return nil, err
		}
	}
	if err := stream.Sync(ctx); err != nil {
		return nil, err
	}
	took := tensor.FromSlice([]float64{time.Since(start).Seconds()}, 1)
	if err := wait(ctx)(world.AllReduce(took, comm.Max)); err != nil {
		return nil, err
	}
	if err := c.write(ctx, s, shape, world, l); err != nil {
		return nil, err
	}
	work := partition.Work(shape)
	pairs := 0
	for _, w := range work {
		pairs += w
	}
	return &Report{
		In: s.In, Out: s.Out, Ranks: world.Size(), Layout: s.Layout, Algorithm: s.Algorithm, Backend: s.Backend,
		DType: s.DType, Device: "cpu", Hops: len(schedule.Forward), Balance: partition.Balance(work), Pairs: pairs,
		Seconds: tensor.Data[float64](took)[0],
	}, nil
}

// wait blocks for a transfer that has just been begun.
func wait(ctx context.Context) func(comm.Pending, error) error {
	return func(p comm.Pending, err error) error {
		if err != nil {
			return err
		}
		return p.Sync(ctx)
	}
}

// load reads this rank's rows, and no others, and makes room for its results.
func (c *Case) load(s Spec, shape partition.Shape, rank int) (*local, error) {
	dtype, err := s.dtype()
	if err != nil {
		return nil, err
	}
	qs := shape.Layout.Spans(c.SeqQ, shape.Size, rank)
	ks := shape.Layout.Spans(c.SeqKV, shape.Size, rank)
	nq, nk := partition.Count(qs), partition.Count(ks)
	l := &local{
		q: tensor.New(dtype, c.Batch, nq, c.Heads, c.HeadDim),
		k: tensor.New(dtype, c.Batch, nk, c.KVHeads, c.HeadDim),
		v: tensor.New(dtype, c.Batch, nk, c.KVHeads, c.HeadDimV),
		acc: attention.Partial{
			O:   tensor.New(dtype, c.Batch, nq, c.Heads, c.HeadDimV),
			LSE: tensor.New(dtype, c.Batch, nq, c.Heads, 1),
		},
	}
	if err := c.rows("q", l.q, qs, c.SeqQ); err != nil {
		return nil, err
	}
	if err := c.rows("k", l.k, ks, c.SeqKV); err != nil {
		return nil, err
	}
	if err := c.rows("v", l.v, ks, c.SeqKV); err != nil {
		return nil, err
	}
	if !c.Backward {
		return l, nil
	}
	l.do = tensor.New(dtype, c.Batch, nq, c.Heads, c.HeadDimV)
	l.grads = attention.Grads{
		DQ: tensor.New(dtype, c.Batch, nq, c.Heads, c.HeadDim),
		DK: tensor.New(dtype, c.Batch, nk, c.KVHeads, c.HeadDim),
		DV: tensor.New(dtype, c.Batch, nk, c.KVHeads, c.HeadDimV),
	}
	return l, c.rows("dout", l.do, qs, c.SeqQ)
}

// rows reads the rows at spans, of every batch element, into dst.
func (c *Case) rows(name string, dst View, spans []partition.Span, seq int) error {
	row := int64(dst.Cols())
	for b := range dst.Len(tensor.Batch) {
		at := 0
		err := eachRun(spans, func(start, n int) error {
			part := dst.Slice(tensor.Batch, b, b+1).Slice(tensor.Seq, at, at+n)
			at += n
			return c.file.ReadInto(name, part, (int64(b)*int64(seq)+int64(start))*row)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// eachRun calls f with every run of neighbouring positions.
func eachRun(spans []partition.Span, f func(start, n int) error) error {
	for _, s := range spans {
		if s.Stride == 1 {
			if err := f(s.Start, s.Len); err != nil {
				return err
			}
			continue
		}
		for i := range s.Len {
			if err := f(s.Start+i*s.Stride, 1); err != nil {
				return err
			}
		}
	}
	return nil
}

// write gathers every result on rank 0, tensor by tensor, and writes them in global order.
func (c *Case) write(ctx context.Context, s Spec, shape partition.Shape, world comm.Communicator, l *local) error {
	type result struct {
		name string
		seq  int
		view View
	}
	results := []result{{"out", c.SeqQ, l.acc.O}, {"lse", c.SeqQ, l.acc.LSE}}
	if c.Backward {
		results = append(results, result{"dq", c.SeqQ, l.grads.DQ}, result{"dk", c.SeqKV, l.grads.DK}, result{"dv", c.SeqKV, l.grads.DV})
	}
	var entries []safetensors.Entry
	for _, r := range results {
		whole, err := gather(ctx, world, shape, r.seq, r.view)
		if err != nil {
			return fmt.Errorf("gathering %s: %w", r.name, err)
		}
		if world.Rank() != 0 {
			continue
		}
		data := floats(whole)
		shape := whole.Shape()
		dims := shape[:]
		if r.name == "lse" {
			data = transpose(data, c.Batch, c.SeqQ, c.Heads)
			dims = []int{c.Batch, c.Heads, c.SeqQ}
		}
		entries = append(entries, safetensors.Floats(r.name, safetensors.F32, dims, data))
	}
	if world.Rank() != 0 {
		return nil
	}
	meta := map[string]string{"lse": "[batch, heads, seq], natural log", "layout": "bshd"}
	return safetensors.WriteFile(s.Out, meta, entries)
}

// gather brings every rank's rows to rank 0 and puts them in global order.
func gather(ctx context.Context, world comm.Communicator, shape partition.Shape, seq int, v View) (View, error) {
	if world.Rank() != 0 {
		var send []comm.Message
		if v.Size() > 0 {
			send = []comm.Message{{Peer: 0, View: v}}
		}
		return View{}, wait(ctx)(world.Exchange(send, nil))
	}
	parts := []View{v}
	var recv []comm.Message
	for r := 1; r < shape.Size; r++ {
		n := partition.Count(shape.Layout.Spans(seq, shape.Size, r))
		part := tensor.New(v.DType(), v.Len(tensor.Batch), n, v.Len(tensor.Heads), v.Len(tensor.Dim))
		parts = append(parts, part)
		if part.Size() > 0 {
			recv = append(recv, comm.Message{Peer: r, View: part})
		}
	}
	if err := wait(ctx)(world.Exchange(nil, recv)); err != nil {
		return View{}, err
	}
	whole := tensor.New(v.DType(), v.Len(tensor.Batch), seq, v.Len(tensor.Heads), v.Len(tensor.Dim))
	for r, part := range parts {
		at := 0
		_ = eachRun(shape.Layout.Spans(seq, shape.Size, r), func(start, n int) error {
			tensor.Copy(whole.Slice(tensor.Seq, start, start+n), part.Slice(tensor.Seq, at, at+n))
			at += n
			return nil
		})
	}
	return whole, nil
}

// floats is the elements of a dense view as float32, which the output file holds.
func floats(v View) []float32 {
	if v.DType() == tensor.F32 {
		return tensor.Data[float32](v)
	}
	out := make([]float32, v.Size())
	for i, x := range tensor.Data[float64](v) {
		out[i] = float32(x)
	}
	return out
}

// transpose turns [batch, seq, heads] into [batch, heads, seq].
func transpose(x []float32, batch, seq, heads int) []float32 {
	out := make([]float32, len(x))
	for b := range batch {
		for s := range seq {
			for h := range heads {
				out[(b*heads+h)*seq+s] = x[(b*seq+s)*heads+h]
			}
		}
	}
	return out
}
