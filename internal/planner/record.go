package planner

import (
	"context"
	"math"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto device memory; see package tensor.
type View = tensor.View

// Attention is one attention over ranks, apart from its schedule.
type Attention struct {
	Backend       string       // of package attention/backends
	DType         tensor.DType // of q, k and v, and of their messages
	Deterministic bool
	Batch         int // samples in one pass
	Heads         int // of q
	KVHeads       int // of k and v
	Dim, DimV     int // of a head of k, and of v
}

// A Recorder is the devices of one rank without data: a ring over it runs its real loop, and the Recorder counts
// what the loop asks for. The zero value is ready for use.
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

	arena *tensor.Arena
	bare  bool // keep no Hops and no Works
	early Hop  // exchanges since the last hop ended, which belong to the next

	open     bool // the last of Hops has not ended
	program  *program
	messages []message      // of the present exchange
	places   map[toward]int // in messages, where there are many
	pending  []pending
	prices   *prices // nil: no program
	pass     Call    // the fields that all calls of the kernel pass have
	work     Work
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

// Work is the largest of what one forward pass asks of the kernel.
type Work struct {
	Heads, KVHeads int
	Calls          int
	Queries, Keys  int // rows
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
func (r *Recorder) Buffers() int64 { return r.arena.Peak() }

// Run runs one pass by the schedule of a rank that has that many rows.
func (r *Recorder) Run(s *ring.Schedule, a Attention, rows int, backward bool) error {
	data, sum := tensor.NewMeter(), attention.AccumulatorType(a.DType)
	view := func(t tensor.DType, heads, dim int) View { return data.Alloc(t, a.Batch, rows, heads, dim) }
	q, k, v := view(a.DType, a.Heads, a.Dim), view(a.DType, a.KVHeads, a.Dim), view(a.DType, a.KVHeads, a.DimV)
	o, x := view(a.DType, a.Heads, a.DimV), r.Ring()
	out, p := attention.Partial{O: o, LSE: view(sum, a.Heads, 1)}, attention.Softmax{Scale: 1 / math.Sqrt(float64(a.Dim))}
	if !backward {
		return x.Forward(out, q, k, v, s, p)
	}
	g := attention.Grads{DQ: view(sum, a.Heads, a.Dim), DK: view(sum, a.KVHeads, a.Dim), DV: view(sum, a.KVHeads, a.DimV)}
	return x.Backward(g, o, q, k, v, out, s, p)
}

// bytes returns the size of a view.
func bytes(v View) int64 { return int64(v.Size()) * int64(v.DType().Size()) }

// hop returns where exchanges and calls are counted.
func (r *Recorder) hop() *Hop {
	if r.open {
		return &r.Hops[len(r.Hops)-1]
	}
	return &r.early
}

// step adds a step to the program.
func (r *Recorder) step(s step) { r.program.steps = append(r.program.steps, s) }

// copy records a pass over memory that reads and writes that many bytes together.
func (r *Recorder) copy(n int64) {
	if r.prices != nil && n > 0 {
		r.step(step{kind: copies, seconds: r.prices.copy(n)})
	}
}

// call records a kernel call.
func (r *Recorder) call(k View, b *attention.Block) {
	if r.prices != nil {
		c := r.pass
		c.KVHeads, c.DimV, c.Tiles, c.First, c.Last = k.Len(tensor.Heads), b.V.Len(tensor.Dim), b.Tiles, b.First, b.Last
		r.step(step{kind: compute, seconds: r.prices.call(&c)})
	}
	if !r.bare {
		h := r.hop()
		h.Tiles, h.Pairs = h.Tiles+len(b.Tiles), h.Pairs+partition.Pairs(b.Tiles)
		r.work.Calls++
		r.work.KVHeads, r.work.Keys = k.Len(tensor.Heads), max(r.work.Keys, k.Len(tensor.Seq))
	}
}

// begin begins a pass of the kernel.
func (r *Recorder) begin(q View, backward bool) {
	r.pass = Call{DType: q.DType(), Backward: backward, Batch: q.Len(tensor.Batch), Heads: q.Len(tensor.Heads), Dim: q.Len(tensor.Dim)}
	if p := r.prices; p != nil {
		r.pass.Backend, r.pass.Deterministic = p.a.Backend, p.a.Deterministic
	}
	r.work = Work{Heads: r.pass.Heads, Queries: q.Len(tensor.Seq), Keys: q.Len(tensor.Seq)}
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

type forward struct{ *Recorder }

// Block implements attention.ForwardPass.
func (r forward) Block(b attention.Block) error {
	r.call(b.K, &b)
	return nil
}

// End implements attention.ForwardPass.
func (r forward) End() error {
	if !r.bare && r.work.Calls > 0 {
		r.Works = append(r.Works, r.work)
	}
	return nil
}

type backward struct{ *Recorder }

// Block implements attention.BackwardPass. Without tiles it only zeroes gradients.
func (r backward) Block(b attention.GradBlock) error {
	if len(b.Tiles) > 0 {
		r.call(b.K, &b.Block)
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

type stream struct{ *Recorder }

// Label implements tensor.Stream. The empty label, of a ring without one, ends a hop.
func (r stream) Label(name string) {
	if r.bare {
		return
	}
	if r.open = name != ""; r.open {
		h := r.early
		h.Label, h.SendTo, h.RecvFrom = name, append([]int{}, h.SendTo...), append([]int{}, h.RecvFrom...)
		r.Hops, r.early = append(r.Hops, h), Hop{}
	}
}

func (stream) Record() tensor.Event       { return nil }
func (stream) Wait(tensor.Event)          {}
func (stream) Sync(context.Context) error { return nil }

type exchanger struct{ *Recorder }

// Exchange implements comm.Exchanger.
func (r exchanger) Exchange(send, recv []comm.Message) (comm.Pending, error) {
	r.messages = r.messages[:0]
	for i := range send {
		n := bytes(send[i].View)
		r.Sent += n
		r.add(toward{send[i].Peer, true}, n)
	}
	for i := range recv {
		r.add(toward{recv[i].Peer, false}, bytes(recv[i].View))
	}
	if !r.bare {
		r.hop().exchange(r.messages)
	}
	number := 0
	if r.prices != nil {
		number = r.beginExchange()
	}
	r.pending = append(r.pending, pending{r.Recorder, number})
	return &r.pending[len(r.pending)-1], nil
}

// toward is one direction of the link with a peer.
type toward struct {
	peer  int
	sends bool
}

// fewMessages is the number of messages up to which a search finds one faster than a map.
const fewMessages = 8

// add adds a message of n bytes to those of the present exchange with the same peer and direction.
func (r *Recorder) add(t toward, n int64) {
	same := func(i int) bool { return i >= 0 && i < len(r.messages) && r.messages[i].toward == t }
	i := len(r.messages) - 1 // most come one after the other
	for i >= 0 && i < fewMessages && !same(i) {
		i--
	}
	if !same(i) {
		i = r.places[t] // of an earlier exchange, perhaps
	}
	if !same(i) {
		i = len(r.messages)
		r.messages = append(r.messages, message{toward: t})
		if r.places == nil {
			r.places = map[toward]int{}
		}
		r.places[t] = i
	}
	r.messages[i].bytes += n
	r.messages[i].count++
}

// exchange adds the peers and bytes of an exchange.
func (h *Hop) exchange(list []message) {
	for i := range list {
		if m := &list[i]; m.sends {
			h.SendTo, h.SendBytes = append(h.SendTo, m.peer), h.SendBytes+m.bytes
		} else {
			h.RecvFrom = append(h.RecvFrom, m.peer)
		}
	}
}

// A pending is an exchange of a program that has begun.
type pending struct {
	r      *Recorder
	number int
}

// Wait implements comm.Pending.
func (p *pending) Wait() {
	if p.r.prices != nil {
		p.r.step(step{kind: wait, exchange: p.number})
	}
}

// Sync implements comm.Pending.
func (*pending) Sync(context.Context) error { return nil }

// kind is what a step of a program does.
type kind uint8

const (
	compute kind = iota // for so many seconds
	copies              // likewise, of memory
	carry               // likewise, of cores that send
	begin               // an exchange
	wait                // for an exchange
)

// A step is one thing that a rank queues.
type step struct {
	kind     kind
	exchange int     // of begin and wait
	seconds  float64 // of compute, copies and carry
}

// A message is all bytes of one exchange between two ranks, one way.
type message struct {
	toward
	count   int // of messages
	link    int // of the rank: 0 to its host, 1 to others
	bytes   int64
	seconds float64
}

// A program is all that a rank does in a pass, in order.
type program struct {
	rank      int
	host      float64 // seconds to queue one thing
	steps     []step
	exchanges [][]message
}

// beginExchange adds the present exchange to the program, with its times, and returns its number.
func (r *Recorder) beginExchange() int {
	p, x := r.prices, r.program
	list := append([]message(nil), r.messages...)
	own, total := p.at.host(x.rank), 0.0
	for i := range list {
		m := &list[i]
		if p.at.host(m.peer) != own {
			m.link = 1
		}
		if m.seconds = p.transfer(x.rank, m); m.sends {
			total += m.seconds
		}
		if p.at.Shared {
			m.seconds = 0
		}
	}
	if p.at.Shared { // cores do what links do elsewhere, and none is left to compute beside them
		r.step(step{kind: carry, seconds: total})
	}
	x.exchanges = append(x.exchanges, list)
	n := len(x.exchanges) - 1
	r.step(step{kind: begin, exchange: n})
	return n
}

// prices are the costs of one attention at one place. Each is asked for once.
type prices struct {
	a         Attention
	at        Place
	costs     Costs
	calls     map[callKey]float64
	transfers map[transferKey]float64
	copied    map[int64]float64
}

func newPrices(a Attention, at Place, c Costs) *prices {
	return &prices{a: a, at: at, costs: c, calls: map[callKey]float64{}, transfers: map[transferKey]float64{}, copied: map[int64]float64{}}
}

// program runs a pass and returns what its rank queues.
func (p *prices) program(s *ring.Schedule, rows int, backward bool) (*program, error) {
	r := Recorder{bare: true, prices: p, program: &program{rank: s.Rank, host: p.costs.Host(1)}}
	err := r.Run(s, p.a, rows, backward)
	return r.program, err
}

// A transferKey determines the time of messages: all ranks of a host are alike, and so are those of different ones.
type transferKey struct {
	link, count int
	bytes       int64
}

func (p *prices) transfer(rank int, m *message) float64 {
	key := transferKey{m.link, m.count, m.bytes}
	t, ok := p.transfers[key]
	if !ok {
		from, to := p.at.First+rank, p.at.First+m.peer
		if !m.sends {
			from, to = to, from
		}
		t = p.costs.Exchange(from, to, m.bytes, m.count)
		p.transfers[key] = t
	}
	return t
}

func (p *prices) copy(n int64) float64 {
	t, ok := p.copied[n]
	if !ok {
		t = p.costs.Copy(n)
		p.copied[n] = t
	}
	return t
}

// fewTiles is the most tiles of a call that are compared one by one.
const fewTiles = 4

// A callKey determines the time of a call.
type callKey struct {
	n           int
	tiles       [fewTiles]partition.Tile
	many        *partition.Tile // the first of more tiles: groups of heads have the same
	heads, kv   int
	first, last bool
	backward    bool
}

func (p *prices) call(c *Call) float64 {
	key := callKey{n: len(c.Tiles), heads: c.Heads, kv: c.KVHeads, first: c.First, last: c.Last, backward: c.Backward}
	if len(c.Tiles) <= fewTiles {
		copy(key.tiles[:], c.Tiles)
	} else {
		key.many = &c.Tiles[0]
	}
	t, ok := p.calls[key]
	if !ok {
		if t = p.costs.Call(*c); math.IsNaN(t) {
			t = math.Inf(1)
		}
		p.calls[key] = t
	}
	return t
}
