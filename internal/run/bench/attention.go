package bench

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/kernels/gpu"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// An AttentionSpec describes the rows of `bench attention`: every combination of algorithm, layout and length.
type AttentionSpec struct {
	Seq        []int    `json:"seq"` // global tokens
	Algorithms []string `json:"algorithms"`
	// with hierarchical: ranks that exchange heads; 0: auto
	Inner       int `json:"inner,omitempty"`
	GatherHeads int `json:"gather_heads,omitempty"` // with allgather: key heads per gather; 0: all
	// values of ring.Gathers, one row each with allgather; other algorithms use the first
	Gathers       []string `json:"gather"`
	Layouts       []string `json:"layouts"`
	Backend       string   `json:"backend"`
	DType         string   `json:"dtype"`
	Heads         int      `json:"heads"`
	KVHeads       int      `json:"kv_heads"`
	HeadDim       int      `json:"head_dim"`
	Causal        bool     `json:"causal"`
	Window        int      `json:"window"` // visible keys before a query; -1: all
	Deterministic bool     `json:"deterministic"`
	Iters         int      `json:"iters"`             // 0: for two seconds, or Seconds
	Seconds       float64  `json:"seconds,omitempty"` // minimum time of a figure
	Warmup        int      `json:"warmup"`
	Quick         bool     `json:"quick,omitempty"` // time the two passes only

	// Rows are the cases with their chosen strategies; none: see Asked.
	Rows []AttentionCase `json:"rows,omitempty"`
	// Predicted lists the candidates of auto with their predicted seconds, the best first, if there is only one row.
	Predicted []planner.Timed `json:"predicted,omitempty"`

	// Documents is the source of packed documents: "magi", a file, or "" for none. PackCount limits the packs.
	Documents string  `json:"documents,omitempty"`
	PackCount int     `json:"pack_count,omitempty"`
	Packs     [][]int `json:"packs,omitempty"` // document lengths of each pack, set by Load
}

// Default fills unset fields with sizes that take a device some seconds. Packed documents follow MagiAttention's
// benchmark, with shorter sequences on a CPU.
func (s *AttentionSpec) Default(device string, ranks int) {
	d := AttentionSpec{Seq: []int{512, 1 << 10}, Heads: 4, KVHeads: 2, HeadDim: 32, DType: "fp32",
		Layouts: []string{"zigzag"}}
	if s.Documents != "" {
		d.Seq, d.Layouts = []int{512 * ranks}, []string{"document"}
	}
	if device != "cpu" {
		d.Seq, d.Heads, d.KVHeads, d.HeadDim, d.DType = []int{32 << 10, 128 << 10, 512 << 10}, 32, 8, 128, "bf16"
		if s.Documents != "" {
			d.Seq, d.Heads = []int{8192 * ranks}, 64
		}
	}
	if len(s.Layouts) == 0 {
		s.Layouts = d.Layouts
	}
	if len(s.Seq) == 0 {
		s.Seq = d.Seq
	}
	if s.Heads == 0 {
		s.Heads, s.KVHeads = d.Heads, cmp.Or(s.KVHeads, d.KVHeads)
	}
	s.KVHeads = cmp.Or(s.KVHeads, s.Heads)
	s.HeadDim = cmp.Or(s.HeadDim, d.HeadDim)
	if s.DType == "auto" {
		s.DType = d.DType
	}
}

// Check reports faults of a spec before any process is spawned.
func (s *AttentionSpec) Check(ranks int) error {
	switch {
	case s.Documents != "" && len(s.Packs) == 0:
		return fmt.Errorf("--documents %s: it has no packs", terminal.Name(s.Documents))
	case len(s.Seq) == 0:
		return fmt.Errorf("--seq: no length given")
	case s.Documents == "" && slices.Min(s.Seq) < 1:
		return fmt.Errorf("--seq %d: want at least 1", slices.Min(s.Seq))
	case len(s.Algorithms) == 0 || slices.Contains(s.Algorithms, ""):
		return fmt.Errorf("--algorithm: want NAME,... of %s, or auto", strings.Join(ring.Algorithms, ", "))
	case s.Heads < 1 || s.KVHeads < 1 || s.Heads%s.KVHeads != 0:
		return fmt.Errorf("--heads %d --kv-heads %d: the first must be a multiple of the second", s.Heads, s.KVHeads)
	case s.Inner < 0 || s.GatherHeads < 0:
		return fmt.Errorf("--ulysses-degree %d --gather-heads %d: want 0 or more", s.Inner, s.GatherHeads)
	case s.HeadDim < 1:
		return fmt.Errorf("--head-dim %d: want at least 1", s.HeadDim)
	case s.Window < -1 || s.Window >= 0 && !s.Causal:
		return fmt.Errorf("--window %d: want the number of visible keys before a query, with --causal; -1 is all", s.Window)
	case s.Iters < 0 || s.Warmup < 0:
		return fmt.Errorf("--iters %d --warmup %d: want 0 or more", s.Iters, s.Warmup)
	case !(s.Seconds >= 0) || math.IsInf(s.Seconds, 0) || s.Seconds > 0 && s.Iters > 0:
		return fmt.Errorf("--seconds %v: want a number above 0, without --iters", s.Seconds)
	}
	early := slices.ContainsFunc(s.Gathers, func(g string) bool { return g != ring.Auto })
	for _, f := range []struct {
		flag, needs string
		set         bool
	}{
		{"--ulysses-degree", "hierarchical", s.Inner > 0},
		{"--gather-heads", "allgather", s.GatherHeads > 0},
		{"--gather", "allgather", early && s.Window < 0},
	} {
		if f.set && !slices.Contains(s.Algorithms, f.needs) && !slices.Contains(s.Algorithms, "auto") {
			return fmt.Errorf("%s has no effect without --algorithm %s; drop it", f.flag, f.needs)
		}
	}
	for _, g := range s.Gathers {
		if !slices.Contains(ring.Gathers, g) {
			return fmt.Errorf("--gather %q is none of %v", g, ring.Gathers)
		}
	}
	for _, w := range s.rows() {
		if err := w.Layout.Check(); err != nil {
			return fmt.Errorf("--layout: %w", err)
		}
		if w.Layout.ByDocument() && s.Documents == "" {
			return fmt.Errorf("--layout %s needs --documents; without them use zigzag, striped, contiguous or window", w.Layout)
		}
		for i, docs := range s.sequences(w) {
			shape, err := s.shape(w.Layout, docs, ranks)
			switch {
			case err != nil && s.Documents != "":
				return fmt.Errorf("--documents %s: pack %d: %w", terminal.Name(s.Documents), i+1, err)
			case err != nil:
				return err
			case sum(docs) < 2*ranks && s.Documents != "":
				return fmt.Errorf("--documents %s: pack %d: its %d tokens are too few for %d ranks", terminal.Name(s.Documents),
					i+1, sum(docs), ranks)
			case w.Seq < 2*ranks:
				return fmt.Errorf("--seq %d: too short for %d ranks", w.Seq, ranks)
			}
			if _, err := ring.New(w.Algorithm, s.spec(w.Strategy, shape), 0); err != nil {
				return fmt.Errorf("--algorithm: %w", err)
			}
		}
	}
	return nil
}

// Needs returns the bytes of q, k, v, the output and their gradients in 16 bits. A run takes more.
func (s *AttentionSpec) Needs(seq int) float64 {
	return 2 * float64(seq) * float64(s.HeadDim) * (4*float64(s.Heads) + 4*float64(s.KVHeads))
}

// sequences returns the document lengths of each sequence of a row.
func (s *AttentionSpec) sequences(w AttentionCase) [][]int {
	if s.Documents != "" {
		return s.Packs
	}
	return [][]int{{w.Seq}}
}

// Longest returns the documents of the longest pack; nil without documents.
func (s *AttentionSpec) Longest() (docs []int) {
	for _, pack := range s.Packs {
		if sum(pack) > sum(docs) {
			docs = pack
		}
	}
	return docs
}

func (s *AttentionSpec) shape(layout partition.LayoutName, docs []int, ranks int) (partition.Shape, error) {
	if i := slices.IndexFunc(docs, func(d int) bool { return d < 1 }); i >= 0 {
		return partition.Shape{}, fmt.Errorf("document %d has %d tokens", i, docs[i])
	}
	n, packed := sum(docs), docs
	if s.Documents == "" {
		packed = nil
	}
	mask, err := partition.NewMask(s.Causal, s.Window, n, n, packed)
	if err != nil {
		return partition.Shape{}, err
	}
	l := partition.Ready(layout.Layout(docs, mask.Band), n, ranks)
	return partition.Shape{SeqQ: n, SeqKV: n, Size: ranks, Layout: l, Mask: mask}, nil
}

func (s *AttentionSpec) spec(w ring.Strategy, shape partition.Shape) ring.Spec {
	return w.Spec(shape, s.Heads, s.KVHeads)
}

// Attention measures every row and passes it to emit. Every rank calls it; the rows of rank 0 count.
func (r *Rank) Attention(ctx context.Context, s AttentionSpec, emit func(AttentionRow) error) (err error) {
	defer device.Caught(&err)
	r.Seconds = s.Seconds
	t, err := r.attentionRun(s)
	if err != nil {
		return err
	}
	for _, w := range s.rows() {
		row, err := t.row(ctx, w.Strategy, w.Seq)
		if err != nil {
			//lint:ignore ST1005 S is the length of the sequence
			return fmt.Errorf("S=%s, %s: %w", readable.Size(int64(w.Seq)), w.Strategy, err)
		}
		if err := emit(*row); err != nil {
			return err
		}
	}
	return nil
}

// An AttentionCase is a row to measure: attention over a sequence by a strategy. With packed documents, Seq is the
// length of the longest pack.
type AttentionCase struct {
	Seq int `json:"seq"`
	ring.Strategy
}

func (s *AttentionSpec) rows() []AttentionCase {
	if len(s.Rows) > 0 {
		return s.Rows
	}
	return s.Asked()
}

// pattern names an algorithm in a table, with the gather mode if one is set.
func pattern(algorithm, gather string) string {
	if algorithm != "allgather" || gather == "" || gather == ring.Auto {
		return algorithm
	}
	return algorithm + " (" + gather + ")"
}

// Asked lists the rows of the spec before auto is resolved: every length, layout and algorithm, and for all-gather
// every gather mode.
func (s *AttentionSpec) Asked() (all []AttentionCase) {
	gathers, lengths := s.Gathers, s.Seq
	if len(gathers) == 0 {
		gathers = []string{""}
	}
	if s.Documents != "" && len(s.Seq) > 0 {
		lengths = []int{slices.Max(s.Seq)}
	}
	for _, seq := range lengths {
		for _, layout := range s.Layouts {
			for _, algorithm := range s.Algorithms {
				for i, gather := range gathers {
					w := ring.Strategy{Layout: partition.LayoutName(layout), Algorithm: algorithm, Gather: gather, Backend: s.Backend}
					switch {
					case i > 0 && algorithm != "allgather":
						continue
					case algorithm == "allgather" || algorithm == "auto":
						w.GatherHeads = s.GatherHeads
					}
					if algorithm == "hierarchical" || algorithm == "auto" {
						w.Inner = s.Inner
					}
					all = append(all, AttentionCase{seq, w})
				}
			}
		}
	}
	return all
}

func (r *Rank) attentionRun(s AttentionSpec) (*attentionRun, error) {
	t := &attentionRun{Rank: r, spec: s, dtype: types[s.DType],
		softmax: attention.Softmax{Scale: 1 / math.Sqrt(float64(s.HeadDim))}}
	bytes, err := t.plan()
	if err == nil {
		t.arena, err = r.Device.Arena("tensors of attention", bytes)
	}
	return t, err
}

// Workspace returns the backend's workspace in bytes, on the rank with most.
func (s *AttentionSpec) Workspace(ranks int, m machine.Machine) int64 {
	most := int64(0)
	if s.Backend != backends.Fused.String() {
		return most
	}
	for _, w := range s.rows() {
		for i := range min(w.UlyssesDegree(ranks), s.Heads) { // the ranks of a group may differ in heads
			most = max(most, gpu.FusedWorkspace(s.fused(w, ranks, i, m)))
		}
	}
	return most
}

// fused returns the shape of the cuDNN call of member i of a group that exchanges heads.
func (s *AttentionSpec) fused(w AttentionCase, ranks, i int, m machine.Machine) gpu.FusedShape {
	group, seq := w.UlyssesDegree(ranks), w.Seq
	outer := ranks / group
	mine := partition.Heads(s.Heads, group, i)
	shape := gpu.FusedShape{
		Batch: 1, SeqQ: (seq + outer - 1) / outer, Heads: mine.Len(),
		KVHeads: len(partition.KeyHeads(mine, s.Heads, s.KVHeads)),
		Dim:     s.HeadDim, DimV: s.HeadDim, Calls: outer, Training: true,
		Packed:        s.Documents != "" && backends.Packs(m.Arch, m.CUDNN),
		Deterministic: s.Deterministic && backends.KeepsMatrix(m.Arch, m.CUDNN),
	}
	if shape.SeqK = shape.SeqQ; w.Algorithm == "allgather" {
		shape.SeqK = seq
		if n := w.GatherHeads; n > 0 && n < s.KVHeads {
			shape.Heads, shape.KVHeads = n*(s.Heads/s.KVHeads), n
		}
	}
	return shape
}

type attentionRun struct {
	*Rank
	spec    AttentionSpec
	dtype   tensor.DType
	softmax attention.Softmax
	arena   *tensor.Arena
}

type pass struct {
	ring        ring.Ring
	schedule    *ring.Schedule
	softmax     attention.Softmax
	q, k, v, do View
	out         attention.Partial
	grads       attention.Grads
}

func (p *pass) forward() error {
	return p.ring.Forward(p.out, p.q, p.k, p.v, p.schedule, p.softmax)
}

func (p *pass) both() error {
	if err := p.forward(); err != nil {
		return err
	}
	return p.backward()
}

func (p *pass) backward() error {
	return p.ring.Backward(p.grads, p.do, p.q, p.k, p.v, p.out, p.schedule, p.softmax)
}

func (t *attentionRun) pass(w ring.Strategy, shape partition.Shape, rank int, arena *tensor.Arena) (*pass, error) {
	schedule, err := ring.New(w.Algorithm, t.spec.spec(w, shape), rank)
	if err != nil {
		return nil, err
	}
	n := partition.Count(shape.Layout.Spans(shape.SeqQ, shape.Size, rank))
	sum := tensor.F32
	if t.dtype == tensor.F64 {
		sum = tensor.F64
	}
	of := func(d tensor.DType, heads int) View { return arena.Alloc(d, 1, n, heads, t.spec.HeadDim) }
	h, kv := t.spec.Heads, t.spec.KVHeads
	return &pass{
		ring: ring.Ring{Arena: arena}, schedule: schedule, softmax: t.softmax,
		q: of(t.dtype, h), k: of(t.dtype, kv), v: of(t.dtype, kv), do: of(t.dtype, h),
		out:   attention.Partial{O: of(t.dtype, h), LSE: arena.Alloc(sum, 1, n, h, 1)},
		grads: attention.Grads{DQ: of(sum, h), DK: of(sum, kv), DV: of(sum, kv)},
	}, nil
}

// plan returns the bytes of the largest row. It runs all rows on an arena that only counts.
func (t *attentionRun) plan() (int64, error) {
	most := int64(0)
	count := func(w ring.Strategy, shape partition.Shape) error {
		meter := tensor.NewMeter()
		p, err := t.pass(w, shape, t.World.Rank(), meter)
		if err != nil {
			return err
		}
		p.ring = (&planner.Recorder{}).Ring()
		p.ring.Arena = meter
		err = p.both()
		most = max(most, meter.Peak())
		return err
	}
	ranks := t.World.Size()
	for _, w := range t.spec.rows() {
		for _, docs := range t.spec.sequences(w) {
			shape, err := t.spec.shape(w.Layout, docs, ranks)
			if err == nil {
				err = count(w.Strategy, shape)
			}
			if err != nil {
				return 0, err
			}
		}
	}
	return most, nil
}

func (t *attentionRun) row(ctx context.Context, w ring.Strategy, seq int) (*AttentionRow, error) {
	s, ranks := &t.spec, t.World.Size()
	shape, err := s.shape(w.Layout, []int{seq}, ranks)
	if err != nil {
		return nil, err
	}
	start := t.arena.Mark()
	defer t.arena.Release(start)
	p, err := t.load(ctx, w, shape, t.World.Rank(), t.World)
	if err != nil {
		return nil, err
	}
	pairs := sum(partition.Work(shape))
	row := &AttentionRow{Seq: seq, Algorithm: w.Algorithm, Gather: w.Gather, Layout: string(w.Layout), Backend: s.Backend,
		Ranks: ranks, FLOPs: FLOPs(pairs, s.Heads, s.HeadDim, s.HeadDim)}
	if err := t.share(ctx, row, p); err != nil {
		return nil, err
	}
	seconds, n, err := t.measure(ctx, s.Warmup, s.Iters, p.forward)
	if err != nil {
		return nil, fmt.Errorf("forward: %w", err)
	}
	row.Forward, row.Iters = rate(row.FLOPs, seconds, ranks), n
	if seconds, _, err = t.measure(ctx, s.Warmup, s.Iters, p.both); err != nil {
		return nil, fmt.Errorf("forward and backward: %w", err)
	}
	row.Both = rate(bothOfForward*row.FLOPs, seconds, ranks)
	row.Memory = t.arena.Peak()
	if s.Quick {
		return row, nil
	}
	if row.Hops, err = t.hops(ctx, p, row.Both.Seconds); err != nil {
		return nil, fmt.Errorf("traced pass: %w", err)
	}
	if ranks == 1 {
		return row, nil
	}
	return row, t.baselines(ctx, row, p)
}

// load returns a pass with random data over the ranks of world.
func (t *attentionRun) load(ctx context.Context, w ring.Strategy, shape partition.Shape, rank int,
	world comm.Exchanger) (*pass, error) {
	p, err := t.pass(w, shape, rank, t.arena)
	if err != nil {
		return nil, err
	}
	p.ring.Kernel, p.ring.Comm, p.ring.Mover, p.ring.Stream = t.Device.Kernel, world, t.Device.Ops, t.Device.Stream
	return p, t.random(ctx, 1, p.q, p.k, p.v, p.do)
}

// share sets the tokens and the traffic of the row, as the maximum over the ranks.
func (t *attentionRun) share(ctx context.Context, row *AttentionRow, p *pass) error {
	forward, backward, err := p.recorded()
	if err != nil {
		return err
	}
	most, err := t.slowest(ctx, float64(p.q.Len(tensor.Seq)), float64(forward.Sent), float64(backward.Sent))
	if err == nil {
		row.Tokens, row.SentForward, row.SentBackward = int(most[0]), int64(most[1]), int64(most[2])
	}
	return err
}

func (p *pass) recorded() (forward, backward planner.Recorder, err error) {
	bare := *p
	bare.ring = forward.Ring()
	if err = bare.forward(); err == nil {
		bare.ring = backward.Ring()
		err = bare.backward()
	}
	return forward, backward, err
}

// baselines measures two references for the row: the same calls without transfers, and one rank alone on its share of
// the tokens. All ranks run them at once, so that the temperature and power of the devices match the row's.
func (t *attentionRun) baselines(ctx context.Context, row *AttentionRow, p *pass) error {
	s := &t.spec
	p.ring.Comm = silent{} // the buffers still hold the other ranks' keys
	seconds, _, err := t.measure(ctx, s.Warmup, s.Iters, p.both)
	p.ring.Comm = t.World
	if err != nil {
		return fmt.Errorf("without transfers: %w", err)
	}
	row.Local = new(rate(bothOfForward*row.FLOPs, seconds, row.Ranks))

	t.arena.Release(tensor.Mark{})
	shape, err := s.shape(partition.LayoutName(row.Layout), []int{row.Tokens}, 1)
	if err != nil {
		return err
	}
	if p, err = t.load(ctx, ring.Strategy{Algorithm: "ring"}, shape, 0, silent{}); err != nil {
		return err
	}
	if seconds, _, err = t.measure(ctx, s.Warmup, s.Iters, p.both); err != nil {
		return fmt.Errorf("one rank alone: %w", err)
	}
	pairs := partition.Work(shape)[0]
	row.Alone = new(rate(bothOfForward*FLOPs(pairs, s.Heads, s.HeadDim, s.HeadDim), seconds, 1))
	row.Loss = new(1 - row.Both.TFLOPs/row.Alone.TFLOPs)
	return nil
}

type silent struct{}

func (silent) Exchange(_, _ []comm.Message) (comm.Pending, error) { return silent{}, nil }
func (silent) Wait()                                              {}
func (silent) Sync(context.Context) error                         { return nil }
