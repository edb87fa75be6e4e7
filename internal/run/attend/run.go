package attend

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// Spec describes how to run a case.
type Spec struct {
	In, Out       string
	ring.Strategy        // the backend must support the device
	DType         string // element type of the computation: fp64, fp32, bf16, fp16
	Device        string // cpu or cuda
	Machine       machine.Machine
}

// A Report is the result of rank 0, which `cprun attention --json` prints.
type Report struct {
	In        string  `json:"in"`
	Out       string  `json:"out"`
	Ranks     int     `json:"ranks"`
	Layout    string  `json:"layout"`
	Algorithm string  `json:"algorithm"`
	Backend   string  `json:"backend"`
	DType     string  `json:"dtype"`
	Device    string  `json:"device"`
	Hops      int     `json:"hops"`    // of rank 0, for the first sample
	Balance   float64 `json:"balance"` // mean over maximum of the ranks' visible pairs in all heads
	// Pairs counts the visible (query, key) pairs of one head: of one sample, or of all samples if their masks differ.
	Pairs int    `json:"pairs"`
	Mask  string `json:"mask"` // for people
	// QKVLayout names the tensor layout of the file, as in package qkv.
	QKVLayout         string  `json:"qkv_layout"`
	QKVLayoutDeclared bool    `json:"qkv_layout_declared"` // named in the metadata, not detected
	Seconds           float64 `json:"seconds"`             // forward and backward, on the slowest rank
}

// shape returns the partition of a case over ranks, with the mask of the first sample.
func (c *Case) shape(layout partition.LayoutName, ranks int) (partition.Shape, error) {
	var docs []int
	err := layout.Check()
	if layout.ByDocument() {
		docs, err = c.layoutDocs(layout)
	}
	if err != nil {
		return partition.Shape{}, err
	}
	mask := c.Masks.of[0]
	l := layout.Layout(docs, mask.Band)
	return partition.Shape{SeqQ: c.SeqQ, SeqKV: c.SeqKV, Size: ranks, Layout: l, Mask: mask}, nil
}

// Check reports faults of a spec before any process is spawned.
func (s Spec) Check(c *Case, ranks int) error {
	shape, err := c.shape(s.Layout, ranks)
	if err != nil {
		return err
	}
	if _, err := s.Element(); err != nil {
		return err
	}
	if has := backends[s.Device]; !slices.Contains(has, s.Backend) {
		return fmt.Errorf("backend %q: %[3]s supports %[2]s", s.Backend, strings.Join(has, ", "),
			s.where())
	}
	if s.Inner < 0 || s.GatherHeads < 0 {
		return fmt.Errorf("--ulysses-degree %d --gather-heads %d: want 0 or more", s.Inner, s.GatherHeads)
	}
	for _, f := range []struct {
		flag, needs string
		unread      bool
	}{
		{"--ulysses-degree", "hierarchical", s.Inner > 0 && s.Algorithm != "hierarchical"},
		{"--gather-heads", "allgather", s.GatherHeads > 0 && s.Algorithm != "allgather"},
		{"--gather", "allgather", s.Gather != "" && s.Gather != ring.Auto && (s.Algorithm == "ulysses" ||
			s.Algorithm != "allgather" && c.Masks.Left < 0 && c.Masks.Right < 0 && c.Masks.Slices == nil)},
	} {
		if f.unread {
			return fmt.Errorf("%s has no effect with --algorithm %s; drop it, or pass --algorithm %s", f.flag,
				s.Algorithm, f.needs)
		}
	}
	if s.GatherHeads > 0 && (c.Scores.Biased() || c.Scores.MaxLogit) {
		return fmt.Errorf("--gather-heads %d does not support slopes, a bias and max_logit; drop it", s.GatherHeads)
	}
	if _, err = ring.New(s.Algorithm, s.spec(c, shape), 0); err != nil && !slices.Contains(ring.Gathers, s.Gather) {
		return fmt.Errorf("--gather %q: want one of %s", s.Gather, strings.Join(ring.Gathers, ", "))
	}
	return err
}

func (s *Spec) spec(c *Case, shape partition.Shape) ring.Spec {
	out := s.Spec(shape, c.Heads, c.KVHeads)
	out.Positions = c.Scores.ALiBi || c.Scores.Bias != nil
	return out
}

var types = map[string]map[string]tensor.DType{
	"cpu":  {"bf16": tensor.BF16, "fp16": tensor.F16, "fp32": tensor.F32, "fp64": tensor.F64},
	"cuda": {"bf16": tensor.BF16, "fp16": tensor.F16, "fp32": tensor.F32},
}

var backends = map[string][]string{"cpu": {"flash", "reference"}, "cuda": {"fused", "flash", "reference"}}

// Element returns the element type of the computation.
func (s Spec) Element() (tensor.DType, error) {
	t, ok := types[s.Device][s.DType]
	if !ok {
		names := slices.Sorted(maps.Keys(types[s.Device]))
		return tensor.Invalid, fmt.Errorf("dtype %q: %[3]s supports %[2]s", s.DType,
			strings.Join(names, ", "), s.where())
	}
	return t, nil
}

func (s Spec) where() string {
	if s.Device == "cuda" {
		return "a GPU"
	}
	return "a CPU"
}

// View is a strided window onto device memory; see package tensor.
type View = tensor.View

// Run computes this rank's part of the case. Rank 0 gathers and writes the result. Every rank of the world calls it.
func (c *Case) Run(ctx context.Context, s Spec, world comm.Communicator, dev *device.Device) (*Report, error) {
	shape, err := c.shape(s.Layout, world.Size())
	if err != nil {
		return nil, err
	}
	groups, err := s.groups(c, shape, world.Rank())
	if err != nil {
		return nil, err
	}
	l, err := c.load(ctx, s, shape, world.Rank(), dev)
	if err != nil {
		return nil, err
	}
	took, err := c.compute(ctx, world, dev, groups, l)
	if err != nil {
		return nil, err
	}
	slowest := tensor.FromSlice([]float64{took.Seconds()}, 1)
	if err := comm.Finish(ctx)(world.AllReduce(slowest, comm.Max)); err != nil {
		return nil, err
	}
	if err := c.write(ctx, s, shape, world, l); err != nil {
		return nil, err
	}
	work := c.work(groups)
	shared := partition.WorkOfHeads(work, s.UlyssesDegree(shape.Size), c.Heads)
	pairs := 0
	for _, w := range work {
		pairs += w
	}
	return &Report{
		In: s.In, Out: s.Out, Ranks: world.Size(), Layout: string(s.Layout), Algorithm: s.Algorithm, Backend: s.Backend,
		DType: s.DType, Device: dev.Name, Hops: len(groups[0].schedule.Forward), Balance: partition.Balance(shared),
		Pairs: pairs, Mask: c.Masks.String(), QKVLayout: c.Input.Layout.String(), QKVLayoutDeclared: c.Input.Declared,
		Seconds: tensor.Data[float64](slowest)[0],
	}, nil
}

func (c *Case) compute(ctx context.Context, world comm.Communicator, dev *device.Device, groups []group,
	l *local) (took time.Duration, err error) {
	defer device.Caught(&err)
	arena, err := dev.Arena("buffers of the ring", 0)
	if err != nil {
		return 0, err
	}
	r := &ring.Ring{Kernel: dev.Kernel, Comm: world, Mover: dev.Ops, Stream: dev.Stream, Arena: arena}
	if err := world.Barrier(ctx); err != nil {
		return 0, err
	}
	start := time.Now()
	for _, g := range groups {
		x := l.of(g)
		if err := r.Forward(x.partial(), x.q, x.k, x.v, g.schedule, x.softmax(c.Softmax)); err != nil {
			return 0, err
		}
	}
	if err := l.sinks(dev.Sinks, l.partial()); err != nil {
		return 0, err
	}
	for i, g := range groups {
		if !c.Backward {
			break
		}
		x := l.of(g)
		if err := r.Backward(x.grads(), x.do, x.q, x.k, x.v, x.partial(), g.schedule,
			x.softmax(c.Softmax)); err != nil {
			return 0, err
		}
		l.addBias(dev.Ops, i == 0)
	}
	if err := dev.Stream.Sync(ctx); err != nil {
		return 0, err
	}
	took = time.Since(start)
	for _, r := range l.results(c.Backward) {
		if r.wide != r.dev {
			dev.Ops.Copy(r.wide, r.dev)
		}
		dev.Store.Download(r.host, r.wide)
	}
	return took, dev.Stream.Sync(ctx)
}

type local struct {
	q, k, v, do          View
	out, lse, dq, dk, dv result
	terms
}

// A result is a computed tensor: on the device, on the device in the type of the file, and on the host.
type result struct{ dev, wide, host View }

func (l *local) results(backward bool) []*result {
	list := []*result{&l.out, &l.lse}
	if backward {
		list = append(list, &l.dq, &l.dk, &l.dv)
	}
	return append(list, l.terms.results()...)
}

// wide returns the type of the files: float32, or float64 if the computation uses it.
func wide(t tensor.DType) tensor.DType {
	if t == tensor.F64 {
		return tensor.F64
	}
	return tensor.F32
}

// load reads only this rank's rows, and allocates its results.
func (c *Case) load(ctx context.Context, s Spec, shape partition.Shape, rank int, dev *device.Device) (*local, error) {
	dtype, err := s.Element()
	if err != nil {
		return nil, err
	}
	qs := shape.Layout.Spans(c.SeqQ, shape.Size, rank)
	ks := shape.Layout.Spans(c.SeqKV, shape.Size, rank)
	nq, nk := partition.Count(qs), partition.Count(ks)
	q, k := [4]int{c.Batch, nq, c.Heads, c.HeadDim}, [4]int{c.Batch, nk, c.KVHeads, c.HeadDim}
	v, o := [4]int{c.Batch, nk, c.KVHeads, c.HeadDimV}, [4]int{c.Batch, nq, c.Heads, c.HeadDimV}
	three, err := c.own(wide(dtype), qs, ks)
	if err != nil {
		return nil, err
	}
	l := &local{}
	part := func(of func(q, k, v View) View) func(View) error {
		return func(host View) error { unpack(host, three, of); return nil }
	}
	x := loader{dev: dev}
	x.input("q", &l.q, dtype, q, part(func(q, _, _ View) View { return q }))
	x.input("k", &l.k, dtype, k, part(func(_, k, _ View) View { return k }))
	x.input("v", &l.v, dtype, v, part(func(_, _, v View) View { return v }))
	x.output(&l.out, dtype, o)
	x.output(&l.lse, wide(dtype), [4]int{c.Batch, nq, c.Heads, 1})
	if c.Backward {
		x.input("dout", &l.do, dtype, o, func(host View) error { return c.rows("dout", host, qs, c.SeqQ) })
		x.output(&l.dq, wide(dtype), q)
		x.output(&l.dk, wide(dtype), k)
		x.output(&l.dv, wide(dtype), v)
	}
	l.terms = c.loadTerms(&x, wide(dtype), qs)
	if x.err != nil {
		return nil, x.err
	}
	return l, dev.Stream.Sync(ctx)
}

// A loader allocates the tensors of a case. After an error it does nothing.
type loader struct {
	dev *device.Device
	err error
}

// input uploads a tensor that fill reads in the type of the file.
func (x *loader) input(name string, to *View, t tensor.DType, shape [4]int, fill func(host View) error) {
	if x.err != nil {
		return
	}
	var r result
	if x.output(&r, t, shape); x.err == nil {
		x.err = fill(r.host)
	}
	if x.err != nil {
		x.err = fmt.Errorf("%s: %w", name, x.err)
		return
	}
	x.dev.Store.Upload(r.wide, r.host)
	if r.dev != r.wide {
		x.dev.Ops.Copy(r.dev, r.wide)
	}
	*to = r.dev
}

// output allocates a tensor on the device and on the host.
func (x *loader) output(r *result, dtype tensor.DType, shape [4]int) {
	n := shape[0] * shape[1] * shape[2] * shape[3]
	vector := func(to *View, of func(string, tensor.DType, int) (View, error), what string, t tensor.DType) {
		if x.err == nil {
			*to, x.err = of(what, t, n)
		}
		if x.err == nil {
			*to = to.Reshape(shape)
		}
	}
	vector(&r.dev, x.dev.Vector, "tensor", dtype)
	if r.wide = r.dev; wide(dtype) != dtype {
		vector(&r.wide, x.dev.Vector, "tensor", wide(dtype))
	}
	vector(&r.host, x.dev.HostVector, "staging memory", wide(dtype))
}

// eachRun calls f for every run of consecutive positions.
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

func (c *Case) write(ctx context.Context, s Spec, shape partition.Shape, world comm.Communicator, l *local) error {
	type named struct {
		name string
		seq  int
		view View
	}
	results := []named{{"out", c.SeqQ, l.out.host}, {"lse", c.SeqQ, l.lse.host}}
	if c.Backward {
		results = append(results, named{"dq", c.SeqQ, l.dq.host}, named{"dk", c.SeqKV, l.dk.host},
			named{"dv", c.SeqKV, l.dv.host})
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
	more, err := c.writeTerms(ctx, world, shape, &l.terms)
	if err != nil {
		return err
	}
	entries = append(entries, more...)
	if world.Rank() != 0 {
		return nil
	}
	meta := map[string]string{"lse": "[batch, heads, seq], natural log", "layout": "bshd"}
	return safetensors.WriteFile(s.Out, meta, entries)
}

func gather(ctx context.Context, world comm.Communicator, shape partition.Shape, seq int, v View) (View, error) {
	if world.Rank() != 0 {
		var send []comm.Message
		if v.Size() > 0 {
			send = []comm.Message{{Peer: 0, View: v}}
		}
		return View{}, comm.Finish(ctx)(world.Exchange(send, nil))
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
	if err := comm.Finish(ctx)(world.Exchange(nil, recv)); err != nil {
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
