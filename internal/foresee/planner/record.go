package planner

import (
	"context"
	"errors"
	"math"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/ring/scan"
	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto device memory; see package tensor.
type View = tensor.View

// Attention is one attention over ranks, apart from its schedule.
type Attention struct {
	Backend  string       // of package internal/model/backends
	DType    tensor.DType // of q, k and v, and of their messages
	Batch    int          // samples in one pass
	hf.Mixer              // its window is in the schedule
}

// A Recorder replaces the devices of one rank. A ring over it runs its real loop without data, and the Recorder records
// all requests. The zero value is ready for use.
//
//	var r planner.Recorder
//	err := r.Run(schedule, attention, rows, backward)
//	fmt.Println(r.Sent, r.Buffers())
type Recorder struct {
	// Kernel runs the calls in place of the Recorder; nil: calls are only counted.
	Kernel attention.Kernel

	Sent  int64  // bytes to other ranks
	Hops  []Hop  // one for each label, in order
	Works []Work // one for each forward pass of the kernel

	program *program // of the pass; nil: Hops and Works in its place
	arena   *tensor.Arena
	begun   int       // exchanges
	list    []message // of the present exchange
	places  []place   // in list, of each peer and direction
	pending []pending
	pass    Call // the fields that all calls of the kernel pass have
	work    Work
}

// A Hop is one turn of the ring's loop, or one exchange of heads.
type Hop struct {
	Label     string `json:"label"` // as in traces
	Tiles     int    `json:"tiles"` // of its kernel call
	Pairs     int    `json:"pairs"` // visible (query, key) pairs of one head
	SendTo    []int  `json:"send_to"`
	RecvFrom  []int  `json:"recv_from"`
	SendBytes int64  `json:"send_bytes"`
}

// Work is the load of one forward pass on the kernel: its heads, its calls, and the most rows of one.
type Work struct {
	Heads, KVHeads, Dim, DimV int
	Calls                     int
	Queries, Keys             int // rows
}

// Ring returns a ring over the Recorder.
func (r *Recorder) Ring() ring.Ring {
	if r.arena == nil {
		r.arena = tensor.NewMeter()
	}
	k := r.Kernel
	if k == nil {
		k = kernel{r}
	}
	return ring.Ring{Kernel: k, Comm: exchanger{r}, Mover: mover{r}, Stream: stream{r}, Arena: r.arena}
}

// Buffers returns the most bytes that the rings took of their arena.
func (r *Recorder) Buffers() int64 { return r.Ring().Arena.Peak() }

// Run runs one pass by the schedule of a rank that has that many rows.
func (r *Recorder) Run(s *ring.Schedule, a Attention, rows int, backward bool) error {
	data, sum := tensor.NewMeter(), attention.AccumulatorType(a.DType)
	view := func(t tensor.DType, heads, dim int) View { return data.Alloc(t, a.Batch, rows, heads, dim) }
	q, k, v := view(a.DType, a.Heads, a.Dim), view(a.DType, a.KVHeads, a.Dim), view(a.DType, a.KVHeads, a.DimV)
	o, x := view(a.DType, a.Heads, a.DimV), r.Ring()
	out := attention.Partial{O: o, LSE: view(sum, a.Heads, 1)}
	p := attention.Softmax{Scale: 1 / math.Sqrt(float64(a.Dim))}
	if !backward {
		return x.Forward(out, q, k, v, s, p)
	}
	dq, dk, dv := view(sum, a.Heads, a.Dim), view(sum, a.KVHeads, a.Dim), view(sum, a.KVHeads, a.DimV)
	return x.Backward(attention.Grads{DQ: dq, DK: dk, DV: dv}, o, q, k, v, out, s, p)
}

// Recur runs both passes of a layer with a recurrent state on a rank that has that many rows. It returns the bytes that
// each sends.
func (r *Recorder) Recur(x *partition.Segments, rank int, a Attention, rows int) (forward, backward int64, err error) {
	ring, data, d, n := r.Ring(), tensor.NewMeter(), a.Delta, len(x.Own[rank])
	s := scan.Scan{Kernel: delta.Idle{}, Comm: ring.Comm, Mover: mover{r}, Stream: ring.Stream, Arena: ring.Arena}
	states, halo := scan.NewStates(x, rank), scan.NewHalo(x, rank, d.Conv-1)
	in := data.Alloc(a.DType, a.Batch, rows, 1, d.Channels())
	before := data.Alloc(a.DType, n*a.Batch, d.Conv-1, 1, d.Channels())
	args := delta.Args{Q: data.Alloc(a.DType, a.Batch, rows, d.KeyHeads, d.Dim), Segments: make([]delta.Segment, n),
		State: data.Alloc(attention.AccumulatorType(a.DType), len(states.Forward.States)*a.Batch, d.Heads, d.Dim, d.DimV)}
	at := r.Sent
	err = errors.Join(s.Halo(before, in, halo), s.Forward(args, states, nil))
	forward, at = r.Sent-at, r.Sent
	err = errors.Join(err, s.HaloBackward(in, before, halo), s.Backward(args, states, nil))
	return forward, r.Sent - at, err
}

func bytes(v View) int64 { return int64(v.Size()) * int64(v.DType().Size()) }

func (r *Recorder) copy(n int64) {
	if r.program != nil && n > 0 {
		r.program.add(copies, int(n))
	}
}

func (r *Recorder) call(b *attention.Block) {
	if x := r.program; x != nil {
		c := r.pass
		c.KVHeads, c.DimV, c.Tiles, c.First, c.Last = b.K.Len(tensor.Heads), b.V.Len(tensor.Dim), b.Tiles, b.First,
			b.Last
		x.add(compute, len(x.calls))
		x.calls = append(x.calls, c)
		return
	}
	h := &r.Hops[len(r.Hops)-1]
	h.Tiles, h.Pairs = h.Tiles+len(b.Tiles), h.Pairs+partition.Pairs(b.Tiles)
	r.work.Calls++
	r.work.KVHeads, r.work.DimV = b.K.Len(tensor.Heads), b.V.Len(tensor.Dim)
	r.work.Keys = max(r.work.Keys, b.K.Len(tensor.Seq))
}

func (r *Recorder) begin(q View, backward bool) {
	batch, rows, heads, dim := q.Len(tensor.Batch), q.Len(tensor.Seq), q.Len(tensor.Heads), q.Len(tensor.Dim)
	r.pass = Call{DType: q.DType(), Backward: backward, Batch: batch, Heads: heads, Dim: dim}
	r.work = Work{Heads: heads, Dim: dim, Queries: rows, Keys: rows}
}

type kernel struct{ *Recorder }

// Forward implements attention.Kernel.
func (r kernel) Forward(_ View, _ attention.Partial, q View, _ attention.Softmax) (attention.ForwardPass, error) {
	r.begin(q, false)
	return forward(r), nil
}

// Backward implements attention.Kernel.
func (r kernel) Backward(_, _, q View, _ attention.Saved, _ attention.Softmax) (attention.BackwardPass, error) {
	r.begin(q, true)
	return backward(r), nil
}

// WaitsForKeys implements attention.Waiter.
func (r kernel) WaitsForKeys() bool { return r.program != nil && r.program.gated }

type forward struct{ *Recorder }

// Block implements attention.ForwardPass.
func (r forward) Block(b attention.Block) error {
	r.call(&b)
	return nil
}

// End implements attention.ForwardPass.
func (r forward) End() error {
	if r.work.Calls > 0 {
		r.Works = append(r.Works, r.work)
	}
	return nil
}

type backward struct{ *Recorder }

// Block implements attention.BackwardPass. Without tiles it only zeroes gradients.
func (r backward) Block(b attention.GradBlock) error {
	if len(b.Tiles) > 0 {
		r.call(&b.Block)
	} else if n := int64(b.Fresh.Len()); n > 0 {
		r.copy(n * (bytes(b.DK) + bytes(b.DV)) / int64(b.DK.Len(tensor.Seq)))
	}
	return nil
}

// Fold implements attention.BackwardPass. It reads two views and writes one.
func (r backward) Fold(f attention.Fold) error {
	r.copy(3 * (bytes(f.Src.DK) + bytes(f.Src.DV)))
	return nil
}

// End implements attention.BackwardPass.
func (backward) End() error { return nil }

type mover struct{ *Recorder }

// Copy implements ring.Mover.
func (r mover) Copy(dst, src View) { r.copy(bytes(dst) + bytes(src)) }

// Add implements ring.Mover. It reads two views and writes one.
func (r mover) Add(dst, src View) { r.copy(2*bytes(dst) + bytes(src)) }

// Zero implements scan.Mover.
func (r mover) Zero(vs ...View) {
	for _, v := range vs {
		r.copy(bytes(v))
	}
}

type stream struct{ *Recorder }

// Label implements tensor.Stream. A ring labels every hop before its work. The empty label ends the pass.
func (r stream) Label(name string) {
	if r.program == nil && name != "" {
		r.Hops = append(r.Hops, Hop{Label: name, SendTo: []int{}, RecvFrom: []int{}})
	}
}

func (stream) Labelled() string           { return "" }
func (stream) Record() tensor.Event       { return nil }
func (stream) Wait(tensor.Event)          {}
func (stream) Sync(context.Context) error { return nil }

type exchanger struct{ *Recorder }

// Exchange implements comm.Exchanger.
func (r exchanger) Exchange(send, recv []comm.Message) (comm.Pending, error) {
	r.begun++
	r.list = r.list[:0]
	for i := range send {
		n := bytes(send[i].View)
		r.Sent += n
		r.add(send[i].Peer, true, n)
	}
	for i := range recv {
		r.add(recv[i].Peer, false, bytes(recv[i].View))
	}
	number := 0
	if x := r.program; x != nil {
		number = len(x.exchanges)
		x.exchanges = append(x.exchanges, slices.Clone(r.list))
		x.add(begin, number)
	} else {
		r.Hops[len(r.Hops)-1].exchange(r.list)
	}
	r.pending = append(r.pending, pending{r.program, number})
	return &r.pending[len(r.pending)-1], nil
}

type place struct{ exchange, index int }

func (r *Recorder) add(peer int, sends bool, n int64) {
	at := 2 * peer
	if sends {
		at++
	}
	if at >= len(r.places) {
		r.places = append(r.places, make([]place, at+1-len(r.places))...)
	}
	p := &r.places[at]
	if p.exchange != r.begun {
		*p = place{r.begun, len(r.list)}
		r.list = append(r.list, message{peer: peer, sends: sends})
	}
	m := &r.list[p.index]
	m.bytes += n
	m.count++
}

func (h *Hop) exchange(list []message) {
	for i := range list {
		if m := &list[i]; m.sends {
			h.SendTo, h.SendBytes = append(h.SendTo, m.peer), h.SendBytes+m.bytes
		} else {
			h.RecvFrom = append(h.RecvFrom, m.peer)
		}
	}
}

type pending struct {
	program *program
	number  int
}

// Wait implements comm.Pending.
func (p *pending) Wait() {
	if p.program != nil {
		p.program.add(wait, p.number)
	}
}

// Gates implements comm.Gated. The ring then waits after the call, which overlaps the transfer.
func (p *pending) Gates() (list []comm.PeerGate) {
	for _, m := range p.program.exchanges[p.number] {
		if !m.sends {
			list = append(list, comm.PeerGate{Peer: m.peer})
		}
	}
	return list
}

// Sync implements comm.Pending.
func (*pending) Sync(context.Context) error { return nil }
