package bench

import (
	"context"
	"fmt"
	"math"
	"strings"
	"syscall"
	"time"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// Attention holds the Rows of `bench attention` and their common Spec.
type Attention struct {
	Spec AttentionSpec  `json:"spec"`
	Rows []AttentionRow `json:"rows"`
	// Packed replaces Rows for packed documents.
	Packed []PackedRow `json:"packed,omitempty"`
}

// AttentionRow is attention over one sequence. Seconds and rates count on the slowest rank. Rates divide FLOPs by
// the number of ranks.
type AttentionRow struct {
	Seq       int    `json:"seq"` // global tokens
	Algorithm string `json:"algorithm"`
	Gather    string `json:"gather"` // when an all-gather sends its rows
	Layout    string `json:"layout"`
	Backend   string `json:"backend"`
	Ranks     int    `json:"ranks"`
	Tokens    int    `json:"tokens_per_rank"` // of the rank with most
	Iters     int    `json:"iters"`

	FLOPs   float64 `json:"flops"` // forward, of all ranks
	Forward Rate    `json:"forward"`
	Both    Rate    `json:"forward_backward"`

	// Local runs the same kernel calls without transfers. It is absent with one rank.
	Local *Rate `json:"forward_backward_without_transfers,omitempty"`
	// Alone runs one rank alone on its share of the tokens. It is absent with one rank.
	Alone *Rate `json:"forward_backward_alone,omitempty"`
	// Loss is the lost share of Alone's rate; negative for a gain.
	Loss *float64 `json:"loss,omitempty"`

	// SentForward and SentBackward are the bytes sent by the rank with most.
	SentForward  int64 `json:"sent_forward_bytes"`
	SentBackward int64 `json:"sent_backward_bytes"`
	Memory       int64 `json:"memory_bytes"` // tensors and buffers, without the kernel's workspace

	Hops []HopTimes `json:"hops,omitempty"` // of the slowest rank, traced
}

// Rate is a time and the rate on each device.
type Rate struct {
	Seconds float64 `json:"seconds"`
	TFLOPs  float64 `json:"tflops_per_device"` // 10^12 floating point operations a second
}

// FLOPs returns the floating-point operations of a forward pass of attention with the given visible (query, key) pairs
// per head: two products, over dim and over dimV. A causal sequence of S tokens has S(S+1)/2 pairs.
func FLOPs(pairs, heads, dim, dimV int) float64 {
	return 2 * float64(pairs) * float64(heads) * float64(dim+dimV)
}

// bothOfForward is the ratio of the FLOPs of both passes to those of the forward pass: seven products to two.
const bothOfForward = 3.5

func rate(flops, seconds float64, ranks int) Rate {
	if seconds <= 0 {
		return Rate{}
	}
	return Rate{Seconds: seconds, TFLOPs: flops / seconds / float64(ranks) / 1e12}
}

// attention measures every row, or packs of documents.
func (r *Rank) attention(ctx context.Context, s *AttentionSpec, emit func(Row) error) error {
	t := &attentionRun{Rank: r, spec: s}
	bytes, _, err := s.Demand(r.World.Size(), r.World.Rank(), r.Device.Machine)
	if err == nil {
		t.arena, err = r.Device.Arena("tensors of attention", bytes)
	}
	if err != nil {
		return err
	}
	if len(s.Packs) > 0 {
		return t.packed(ctx, emit)
	}
	for _, w := range s.rows() {
		row, err := t.row(ctx, w)
		if err != nil {
			//lint:ignore ST1005 S is the length of the sequence
			return fmt.Errorf("S=%s, %s: %w", readable.Size(int64(w.Seq)), w.Strategy, err)
		}
		if err := emit(Row{Attention: row}); err != nil {
			return err
		}
	}
	return nil
}

type attentionRun struct {
	*Rank
	spec  *AttentionSpec
	arena *tensor.Arena
}

// tensors holds the tensors of a forward and a backward pass on a rank.
type tensors struct {
	q, k, v, do View
	out         attention.Partial
	grads       attention.Grads
}

func newTensors(a *tensor.Arena, t tensor.DType, queries, keys, heads, kvHeads, dim int) tensors {
	sum := attention.AccumulatorType(t)
	q := func(t tensor.DType) View { return a.Alloc(t, 1, queries, heads, dim) }
	kv := func(t tensor.DType) View { return a.Alloc(t, 1, keys, kvHeads, dim) }
	return tensors{
		q: q(t), k: kv(t), v: kv(t), do: q(t),
		out:   attention.Partial{O: q(t), LSE: a.Alloc(sum, 1, queries, heads, 1)},
		grads: attention.Grads{DQ: q(sum), DK: kv(sum), DV: kv(sum)},
	}
}

// A pass is attention of one rank over a sequence.
type pass struct {
	tensors
	shape    partition.Shape
	ring     ring.Ring
	schedule *ring.Schedule
	softmax  attention.Softmax
}

func (p *pass) forward() error {
	return p.ring.Forward(p.out, p.q, p.k, p.v, p.schedule, p.softmax)
}

func (p *pass) backward() error {
	return p.ring.Backward(p.grads, p.do, p.q, p.k, p.v, p.out, p.schedule, p.softmax)
}

func (p *pass) both() error {
	if err := p.forward(); err != nil {
		return err
	}
	return p.backward()
}

// recorded runs both passes without devices and returns their records.
func (p *pass) recorded() (forward, backward planner.Recorder, err error) {
	bare := *p
	bare.ring = forward.Ring()
	if err = bare.forward(); err == nil {
		bare.ring = backward.Ring()
		err = bare.backward()
	}
	return forward, backward, err
}

// pass returns the pass of one of several ranks, with tensors of the arena.
func (s *AttentionSpec) pass(w ring.Strategy, docs []int, ranks, rank int, arena *tensor.Arena) (*pass, error) {
	shape, err := s.shape(w.Layout, docs, ranks)
	if err != nil {
		return nil, err
	}
	schedule, err := ring.New(w.Algorithm, w.Spec(shape, s.Heads, s.KVHeads), rank)
	if err != nil {
		return nil, err
	}
	n := partition.Count(shape.Layout.Spans(shape.SeqQ, shape.Size, rank))
	return &pass{
		tensors: newTensors(arena, types[s.DType], n, n, s.Heads, s.KVHeads, s.HeadDim),
		shape:   shape, ring: ring.Ring{Arena: arena}, schedule: schedule,
		softmax: attention.Softmax{Scale: 1 / math.Sqrt(float64(s.HeadDim))},
	}, nil
}

// load sets the devices of a pass and fills its tensors with random data.
func (t *attentionRun) load(ctx context.Context, p *pass, world comm.Exchanger) error {
	p.ring.Kernel, p.ring.Comm, p.ring.Mover, p.ring.Stream = t.Device.Kernel, world, t.Device.Ops, t.Device.Stream
	return t.random(ctx, 1, p.q, p.k, p.v, p.do)
}

// A sequence is the row of one sequence, with the further figures of packed documents.
type sequence struct {
	AttentionRow
	pass                      *pass
	user, imbalance, dispatch float64
}

// sequence measures both passes over the documents of a sequence.
func (t *attentionRun) sequence(ctx context.Context, w ring.Strategy, docs []int, e effort) (*sequence, error) {
	s, ranks, began := t.spec, t.World.Size(), time.Now()
	p, err := s.pass(w, docs, ranks, t.World.Rank(), t.arena)
	if err != nil {
		return nil, err
	}
	dispatch := time.Since(began).Seconds()
	sent, returned, err := p.recorded()
	if err == nil {
		err = t.load(ctx, p, t.World)
	}
	if err != nil {
		return nil, err
	}
	forward, n, err := t.measure(ctx, e, p.forward)
	if err != nil {
		return nil, fmt.Errorf("forward: %w", err)
	}
	calls := 0
	before, err := userSeconds()
	if err != nil {
		return nil, err
	}
	both, _, err := t.measure(ctx, e, func() error { calls++; return p.both() })
	if err != nil {
		return nil, fmt.Errorf("forward and backward: %w", err)
	}
	after, err := userSeconds()
	if err != nil {
		return nil, err
	}
	most, err := t.slowest(ctx, float64(p.q.Len(tensor.Seq)), float64(sent.Sent), float64(returned.Sent),
		(after-before)/float64(calls), dispatch)
	if err != nil {
		return nil, err
	}
	work := partition.Work(p.shape)
	flops := FLOPs(sum(work), s.Heads, s.HeadDim, s.HeadDim)
	return &sequence{
		AttentionRow: AttentionRow{
			Seq: sum(docs), Algorithm: w.Algorithm, Gather: w.Gather, Layout: string(w.Layout), Backend: s.Backend,
			Ranks: ranks, Tokens: int(most[0]), Iters: n, FLOPs: flops, Forward: rate(flops, forward, ranks),
			Both: rate(bothOfForward*flops, both, ranks), SentForward: int64(most[1]), SentBackward: int64(most[2]),
			Memory: t.arena.Peak(),
		},
		pass: p, user: most[3], dispatch: most[4],
		imbalance: 1 / partition.Balance(partition.WorkOfHeads(work, w.UlyssesDegree(ranks), s.Heads)),
	}, nil
}

func userSeconds() (float64, error) {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0, fmt.Errorf("time of the process: %w", err)
	}
	return time.Duration(u.Utime.Nano()).Seconds(), nil
}

// row measures a sequence, its hops and its references.
func (t *attentionRun) row(ctx context.Context, w AttentionCase) (*AttentionRow, error) {
	s := t.spec
	defer t.arena.Release(t.arena.Mark())
	e := effort{warmup: s.Warmup, iters: s.Iters}
	if s.Seconds > 0 {
		e.heat, e.budget, e.most = s.Seconds/2, s.Seconds, math.MaxInt
	}
	x, err := t.sequence(ctx, w.Strategy, []int{w.Seq}, e)
	if err != nil {
		return nil, err
	}
	row := &x.AttentionRow
	if s.Quick {
		return row, nil
	}
	if row.Hops, err = t.hops(ctx, x.pass, row.Both.Seconds); err != nil {
		return nil, fmt.Errorf("traced pass: %w", err)
	}
	if row.Ranks == 1 {
		return row, nil
	}
	return row, t.baselines(ctx, row, x.pass, e)
}

// baselines measures two references for the row: the same calls without transfers, and one rank alone on its share of
// the tokens. All ranks run them at once, so that the temperature and power of the devices match the row's.
func (t *attentionRun) baselines(ctx context.Context, row *AttentionRow, p *pass, e effort) error {
	s := t.spec
	p.ring.Comm = silent{} // the buffers still hold the other ranks' keys
	seconds, _, err := t.measure(ctx, e, p.both)
	if err != nil {
		return fmt.Errorf("without transfers: %w", err)
	}
	row.Local = new(rate(bothOfForward*row.FLOPs, seconds, row.Ranks))

	t.arena.Release(tensor.Mark{})
	alone := ring.Strategy{Algorithm: "ring", Layout: partition.LayoutName(row.Layout)}
	if p, err = s.pass(alone, []int{row.Tokens}, 1, 0, t.arena); err == nil {
		err = t.load(ctx, p, silent{})
	}
	if err != nil {
		return err
	}
	if seconds, _, err = t.measure(ctx, e, p.both); err != nil {
		return fmt.Errorf("one rank alone: %w", err)
	}
	pairs := partition.Work(p.shape)[0]
	row.Alone = new(rate(bothOfForward*FLOPs(pairs, s.Heads, s.HeadDim, s.HeadDim), seconds, 1))
	row.Loss = new(1 - row.Both.TFLOPs/row.Alone.TFLOPs)
	return nil
}

type silent struct{}

func (silent) Exchange(_, _ []comm.Message) (comm.Pending, error) { return silent{}, nil }
func (silent) Wait()                                              {}
func (silent) Sync(context.Context) error                         { return nil }

// what describes the measurement: "attention, causal, 32:8 heads of 128, bf16".
func (s *AttentionSpec) what() string {
	parts := []string{"attention", map[bool]string{true: "causal", false: "full"}[s.Causal]}
	if s.Window >= 0 {
		parts = append(parts, fmt.Sprintf("window %d", s.Window))
	}
	parts = append(parts, fmt.Sprintf("%d:%d heads of %d", s.Heads, s.KVHeads, s.HeadDim), s.DType)
	if s.Deterministic {
		parts = append(parts, "deterministic")
	}
	return strings.Join(parts, ", ")
}

// flopUnit returns a readable unit for a rate, and its factor from TFLOP/s.
func flopUnit(tflops float64) (unit string, scale float64) {
	if tflops < 0.5 {
		return "GFLOP/s", 1e3
	}
	return "TFLOP/s", 1
}

// pattern names an algorithm in a table, with the gather mode if one is set.
func pattern(algorithm, gather string) string {
	if algorithm != "allgather" || gather == "" || gather == ring.Auto {
		return algorithm
	}
	return algorithm + " (" + gather + ")"
}

// line returns the row in one line, for progress.
func (r *AttentionRow) line() string {
	unit, scale := flopUnit(max(r.Forward.TFLOPs, r.Both.TFLOPs))
	return fmt.Sprintf("S=%s %s: forward %s, forward and backward %s %s per device",
		readable.Size(int64(r.Seq)), r.Algorithm, readable.Number(scale*r.Forward.TFLOPs),
		readable.Number(scale*r.Both.TFLOPs), unit)
}

func (a *Attention) tables(on string) []readable.Table {
	most := 0.0
	for _, r := range a.Rows {
		most = max(most, r.Forward.TFLOPs, r.Both.TFLOPs)
	}
	unit, scale := flopUnit(most)
	t := readable.Table{
		Title: fmt.Sprintf("%s, %s layout; %s; %s per device, slowest rank", a.Spec.what(),
			strings.Join(a.Spec.Layouts, ", "), on, unit),
		Head: []string{"S", "pattern", "backend", "forward ms", unit, "both ms", unit, "no transfers", "alone", "loss",
			"sent", "memory"},
		Notes: []string{
			"both: forward and backward, 3.5 times the FLOPs of forward",
			"no transfers: the same kernel calls without transfers",
			"alone: one rank on its share of the tokens; loss: share of that rate lost in both",
			"sent: bytes of a rank, forward and backward",
		},
	}
	for _, r := range a.Rows {
		local, alone, loss := "", "", ""
		if r.Local != nil && r.Alone != nil && r.Loss != nil {
			local, alone, loss = readable.Number(scale*r.Local.TFLOPs), readable.Number(scale*r.Alone.TFLOPs),
				readable.Percent(*r.Loss)
		}
		t.Add(readable.Size(int64(r.Seq)), a.way(&r), r.Backend, readable.Number(1e3*r.Forward.Seconds),
			readable.Number(scale*r.Forward.TFLOPs),
			readable.Number(1e3*r.Both.Seconds), readable.Number(scale*r.Both.TFLOPs), local, alone, loss,
			readable.Bytes(r.SentForward+r.SentBackward), readable.Bytes(r.Memory))
	}
	out := []readable.Table{t}
	for _, r := range a.Rows {
		if r.Ranks > 1 && len(r.Hops) > 0 {
			out = append(out, r.hopTable())
		}
	}
	return out
}

func (a *Attention) way(r *AttentionRow) string {
	if len(a.Spec.Layouts) > 1 {
		return r.Layout + ", " + pattern(r.Algorithm, r.Gather)
	}
	return pattern(r.Algorithm, r.Gather)
}

func (r *AttentionRow) hopTable() readable.Table {
	t := readable.Table{
		Title: fmt.Sprintf("hops at S=%s, %s, on the slowest rank, ms", readable.Size(int64(r.Seq)), r.Algorithm),
		Head:  []string{"hop", "compute", "quiet", "transfer", "wait"},
		Notes: []string{"compute: kernels; quiet: the same kernels without transfers",
			"transfer: transfers without kernels; wait: idle compute stream"},
	}
	for _, h := range r.Hops {
		t.Add(h.Pass+" "+h.Label, readable.Number(1e3*h.Compute), readable.Number(1e3*h.Quiet),
			readable.Number(1e3*h.Transfer),
			readable.Number(1e3*h.Wait))
	}
	return t
}
