package bench

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/foresee/cost"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/model/optim"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// OpsSpec is the shape of the operations of `bench ops`: one rank's part of a model.
type OpsSpec struct {
	Tokens       int    `json:"tokens"`
	Hidden       int    `json:"hidden"`
	Intermediate int    `json:"intermediate"`
	Heads        int    `json:"heads"`
	KVHeads      int    `json:"kv_heads"`
	HeadDim      int    `json:"head_dim"`
	Vocab        int    `json:"vocab"`
	Chunk        int    `json:"loss_chunk"` // tokens with logits in memory at once
	Params       int    `json:"params"`     // of the optimizer's step
	Ceiling      int    `json:"ceiling"`    // side of the matrix product that others are compared with
	DType        string `json:"dtype"`      // of activations
}

// Default sets the shape for a device: llama-3.2-3B at 32K tokens, or a small model on a CPU.
func (s *OpsSpec) Default(device string) {
	*s = OpsSpec{
		Tokens: 512, Hidden: 128, Intermediate: 352, Heads: 4, KVHeads: 2, HeadDim: 32,
		Vocab: 1024, Chunk: 256, Params: 1 << 18, Ceiling: 256, DType: "fp32",
	}
	if device != "cpu" {
		*s = OpsSpec{
			Tokens: 32 << 10, Hidden: 3072, Intermediate: 8192, Heads: 24, KVHeads: 8, HeadDim: 128,
			Vocab: 128256, Chunk: 4096, Params: 256 << 20, Ceiling: 8192, DType: "bf16",
		}
	}
}

// Operation is one operation of the model at one shape.
type Operation struct {
	Name    string  `json:"name"`
	Shape   string  `json:"shape"`
	Seconds float64 `json:"seconds"`
	Rate    float64 `json:"rate"`
	Unit    string  `json:"unit"`            // GB/s or TFLOP/s
	Share   float64 `json:"share,omitempty"` // of the fastest operation with the same unit; 0: unknown
}

// An operation is a call on operands of a shape.
type operation struct {
	name, shape string
	operands    operands
	run         func(on calls, v []View)
}

// calls holds the operations of a device, and the error of the last one that returns any.
type calls struct {
	model.Ops
	optim.Device
	delta.Kernel
	err *error
}

type operands []operand

// An operand is a tensor of an operation: random numbers, zeros, or tokens below vocab. Without a shape it is the zero
// View. choices is the experts of each token, sorted into the three operands before it. A scale other than 0 scales
// random numbers, then shift moves them.
type operand struct {
	dtype   tensor.DType
	shape   []int
	zero    bool
	vocab   int
	choices bool

	scale, shift float64
}

func (list operands) alloc(a *tensor.Arena) (views []View) {
	for _, o := range list {
		v := View{}
		if len(o.shape) > 0 {
			v = a.Alloc(o.dtype, o.shape...)
		}
		views = append(views, v)
	}
	return views
}

// work returns the cost.Work of an operation and the bytes of its operands, without running it.
func (o *operation) work() (w cost.Work, bytes int64) {
	a := tensor.NewMeter()
	record := cost.Recorder(func(x cost.Work) { w = x })
	o.run(calls{record, record, record, new(error)}, o.operands.alloc(a))
	return w, a.Peak()
}

// operations lists every operation. The first two measure the peak rates.
func (s *OpsSpec) operations() []operation {
	const eps = 1e-5
	tokens := func(rows int) operand { return operand{dtype: tensor.I32, shape: []int{1, rows, 1, 1}, vocab: s.Vocab} }
	rows, qkv := s.Tokens, (s.Heads+2*s.KVHeads)*s.HeadDim

	x, inv, w, hidden := s.act(rows, 1, s.Hidden), f32(1, rows, 1, 1), f32(s.Hidden), dims(rows, s.Hidden)
	q, dq, qInv, qNorm := s.act(rows, s.Heads, s.HeadDim), f32(1, rows, s.Heads, s.HeadDim), f32(1, rows, s.Heads, 1),
		f32(s.HeadDim)
	angle, heads := f32(1, rows, 1, s.HeadDim/2), dims(rows, s.Heads, s.HeadDim)
	m, mlp := s.act(rows, 1, s.Intermediate), dims(rows, s.Intermediate)
	mixed, before, filter := s.act(rows, 1, qkv), s.act(3, 1, qkv), f32(1, qkv, 1, 4)
	segment := []partition.Range{{Hi: rows}}
	table, dtable, logits := s.act(s.Vocab, 1, s.Hidden), f32(1, s.Vocab, 1, s.Hidden), s.act(s.Chunk, 1, s.Vocab)
	p, squares, params := f32(s.Params), f32(s.Params), readable.Size(int64(s.Params))
	squares.zero = true // negative ones have no root
	sum, rounded := operand{dtype: tensor.F64, shape: []int{1}, zero: true}, operand{}
	if types[s.DType] != tensor.F32 {
		rounded = operand{dtype: types[s.DType], shape: p.shape}
	}
	adam := optim.AdamStep{LR: 1e-4, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, MaxNorm: 1}

	return []operation{
		{"copy", params, operands{p, p}, func(on calls, v []View) { on.Copy(v[0], v[1]) }},
		s.linear("matrix product", s.Ceiling, s.Ceiling, s.Ceiling),
		s.linear("linear qkv", rows, s.Hidden, qkv),
		s.linear("linear out", rows, s.Heads*s.HeadDim, s.Hidden),
		s.linear("linear gate", rows, s.Hidden, s.Intermediate),
		s.linear("linear down", rows, s.Intermediate, s.Hidden),
		s.linear("linear head", s.Chunk, s.Hidden, s.Vocab),
		s.linearDX("linear gate dx", rows, s.Hidden, s.Intermediate),
		s.linearDW("linear gate dw", rows, s.Hidden, s.Intermediate),

		{"rmsnorm", hidden, operands{x, inv, x, w},
			func(on calls, v []View) { on.RMSNorm(v[0], v[1], v[2], v[3], eps) }},
		{"add rmsnorm", hidden, operands{x, inv, x, x, x, w},
			func(on calls, v []View) { on.AddRMSNorm(v[0], v[1], v[2], v[3], v[4], v[5], eps) }},
		{"rmsnorm backward", hidden, operands{x, w, x, x, inv, w},
			func(on calls, v []View) { on.RMSNormBackward(v[0], v[1], v[2], v[3], v[4], v[5], false) }},
		{"rope", heads, operands{q, q, angle, angle},
			func(on calls, v []View) { on.NormRope(v[0], View{}, v[1], View{}, v[2], v[3], 0) }},
		{"rope backward", heads, operands{q, dq, angle, angle},
			func(on calls, v []View) { on.NormRopeBackward(v[0], View{}, v[1], View{}, View{}, View{}, v[2], v[3]) }},
		{"norm rope", heads, operands{q, qInv, q, qNorm, angle, angle},
			func(on calls, v []View) { on.NormRope(v[0], v[1], v[2], v[3], v[4], v[5], eps) }},

		{"swiglu", mlp, operands{m, m, m},
			func(on calls, v []View) { on.GLU(v[0], v[1], v[2], kernels.SiLU) }},
		{"swiglu backward", mlp, operands{m, m, m, m, m},
			func(on calls, v []View) { on.GLUBackward(v[0], v[1], v[2], v[3], v[4], kernels.SiLU) }},
		{"conv", dims(rows, qkv), operands{mixed, mixed, before, filter},
			func(on calls, v []View) { on.Conv(v[0], v[1], v[2], v[3], segment) }},
		{"conv backward", dims(rows, qkv), operands{mixed, before, filter, mixed, mixed, before, filter},
			func(on calls, v []View) { on.ConvBackward(v[0], v[1], v[2], v[3], v[4], v[5], v[6], segment) }},
		{"embed", hidden, operands{x, table, tokens(rows)},
			func(on calls, v []View) { on.Embed(v[0], v[1], v[2]) }},
		{"embed backward", hidden, operands{dtable, x, tokens(rows)},
			func(on calls, v []View) { on.EmbedBackward(v[0], v[1], v[2]) }},
		{"cross entropy", dims(s.Chunk, s.Vocab), operands{sum, logits, tokens(s.Chunk)},
			func(on calls, v []View) { on.CrossEntropy(v[0], v[1], v[2], 1, 0, true) }},

		{"zero", params, operands{p}, func(on calls, v []View) { on.Zero(v[0]) }},
		{"accumulate", params, operands{p, p}, func(on calls, v []View) { on.Add(v[0], v[1]) }},
		{"gradient norm", params, operands{sum, p}, func(on calls, v []View) { on.SumSquares(v[0], v[1]) }},
		{"adamw", params, operands{p, rounded, p, p, squares, sum},
			func(on calls, v []View) { on.AdamW(v[0], v[1], v[2], v[3], v[4], v[5], adam) }},
	}
}

// linear returns the product of rows tokens from in to out elements.
func (s *OpsSpec) linear(name string, rows, in, out int) operation {
	x, y, w := s.product(rows, in, out)
	return operation{name, dims(rows, in, out), operands{y, x, w},
		func(on calls, v []View) { on.Linear(v[0], v[1], v[2], View{}) }}
}

func (s *OpsSpec) linearDX(name string, rows, in, out int) operation {
	x, y, w := s.product(rows, in, out)
	return operation{name, dims(rows, out, in), operands{x, y, w},
		func(on calls, v []View) { on.LinearDX(v[0], v[1], v[2], false) }}
}

func (s *OpsSpec) linearDW(name string, rows, in, out int) operation {
	x, y, w := s.product(rows, in, out)
	w.dtype = tensor.F32
	return operation{name, dims(out, rows, in), operands{w, y, x},
		func(on calls, v []View) { on.LinearDW(v[0], v[1], v[2], false) }}
}

func (s *OpsSpec) scaledLinear(name string, rows, in, out int) operation {
	_, y, _ := s.product(rows, in, out)
	side := func(t tensor.DType, rows, cols int) operand { return operand{dtype: t, shape: []int{1, rows, 1, cols}} }
	return operation{name, dims(rows, in, out), operands{y, side(tensor.U8, rows, in), side(tensor.U8, out, in),
		side(tensor.F32, rows, 1), side(tensor.F32, out, 1)},
		func(on calls, v []View) {
			on.ScaledLinear(v[0], kernels.Scaled{View: v[1], Factors: v[3]}, kernels.Scaled{View: v[2], Factors: v[4]}, View{})
		}}
}

func (s *OpsSpec) product(rows, in, out int) (x, y, w operand) {
	return s.act(rows, 1, in), s.act(rows, 1, out), s.act(out, 1, in)
}

func (s *OpsSpec) act(rows, heads, dim int) operand {
	return operand{dtype: types[s.DType], shape: []int{1, rows, heads, dim}}
}

func f32(shape ...int) operand { return operand{dtype: tensor.F32, shape: shape} }

// An Experts is the shape of a layer of experts.
type Experts struct {
	Count  int `json:"count"`
	Chosen int `json:"chosen"` // of each token
	Hidden int `json:"hidden"`
	Width  int `json:"width"` // of an expert
}

// grouped returns the products of experts with equal numbers of tokens, with scaled also those in E4M3. As in a model,
// rows of tokens are gathered, except in gradients of inputs in E4M3.
func (s *OpsSpec) grouped(tokens int, e Experts, scaled bool) (list []operation) {
	pairs := tokens * e.Chosen
	side := func(cols int, byToken bool) operand {
		rows := map[bool]int{true: tokens, false: pairs}[byToken]
		return s.act(rows, 1, cols)
	}
	order := func(rows, cols int) operand {
		return operand{dtype: tensor.I32, shape: []int{1, rows, cols, 1}, zero: true}
	}
	choice := operand{dtype: tensor.I32, shape: []int{1, tokens, e.Chosen, 1}, vocab: e.Count, choices: true}
	for _, m := range []struct {
		in, out int
		byToken bool // the input, else the gradient of the output
	}{{e.Hidden, 2 * e.Width, true}, {e.Width, e.Hidden, false}} {
		add := func(y, x, w operand, run func(on calls, v []View, p kernels.Pairs), factors ...operand) {
			list = append(list, operation{"grouped product", dims(e.Count, pairs, m.in, m.out),
				slices.Concat(operands{y, x, w}, factors,
					operands{order(pairs, 1), order(tokens, e.Chosen), order(e.Count+1, 1), choice}),
				func(on calls, v []View) { run(on, v, pairsOf(v[3+len(factors):])) }})
		}
		of := func(v View, byToken bool) kernels.Operand { return kernels.Operand{View: v, ByToken: byToken} }
		x, dy, w := side(m.in, m.byToken), side(m.out, !m.byToken), side(m.in, false)
		w.shape = []int{1, e.Count * m.out, 1, m.in}
		dw := w
		dw.dtype = tensor.F32
		add(side(m.out, false), x, w, func(on calls, v []View, p kernels.Pairs) {
			on.GroupLinear(v[0], of(v[1], m.byToken), v[2], p, false)
		})
		add(side(m.in, false), dy, w, func(on calls, v []View, p kernels.Pairs) {
			on.GroupLinearDX(v[0], of(v[1], !m.byToken), v[2], p, false)
		})
		add(dy, x, dw, func(on calls, v []View, p kernels.Pairs) {
			on.GroupLinearDW(v[2], of(v[0], !m.byToken), of(v[1], m.byToken), p, false)
		})
		if !scaled {
			continue
		}
		codes := func(x operand) operand { x.dtype = tensor.U8; return x }
		rows := f32(1, x.shape[1], 1, 1)
		add(side(m.out, false), codes(x), codes(w), func(on calls, v []View, p kernels.Pairs) {
			x := kernels.Operand{View: v[1], Factors: v[3], ByToken: m.byToken}
			on.GroupScaledLinear(v[0], x, kernels.Scaled{View: v[2], Factors: v[4]}, p)
		}, rows, f32(1, w.shape[1], 1, 1))
		dy, w = side(m.out, false), s.act(m.in, e.Count, m.out)
		add(side(m.in, false), codes(dy), codes(w), func(on calls, v []View, p kernels.Pairs) {
			on.GroupScaledLinear(v[0], kernels.Operand{View: v[1], Factors: v[3]}, kernels.Scaled{View: v[2]}, p)
		}, f32(1, pairs, 1, 1))
	}
	return list
}

// rule returns the calls of a gated delta rule over one segment. Keys have length 1, the decay is slow, and beta is
// within (0, 1).
func (s *OpsSpec) rule(rows int, d hf.Delta) (list []operation) {
	q, v, g := s.act(rows, d.KeyHeads, d.Dim), s.act(rows, d.Heads, d.DimV), f32(1, rows, d.Heads, 1)
	state, maps := f32(1, d.Heads, d.Dim, d.DimV), f32(1, d.Heads, d.Dim, d.Dim+d.DimV)
	k, decay, beta := q, g, g
	k.scale, decay.scale, decay.shift, beta.scale, beta.shift = 1/math.Sqrt(float64(d.Dim)), 0.01, -0.1, 0.05, 0.5
	for _, call := range []func(delta.Kernel, delta.Args) error{delta.Kernel.Summarize, delta.Kernel.Forward,
		delta.Kernel.SummarizeBackward, delta.Kernel.Backward} {
		list = append(list, operation{"delta rule", dims(rows, d.Heads, d.Dim),
			operands{q, k, v, decay, beta, v, state, state, maps, maps, v, q, q, v, g, g}, func(on calls, v []View) {
				a := delta.Args{Scale: 1, Segments: []delta.Segment{{Hi: rows}}, Entered: []int{0}, Followed: []int{0}}
				for i, to := range a.Views() {
					*to = v[i]
				}
				*on.err = call(on, a)
			}})
	}
	return list
}

func pairsOf(v []View) kernels.Pairs { return kernels.Pairs{Tokens: v[0], Places: v[1], Starts: v[2]} }

// ops measures every operation.
func (r *Rank) ops(ctx context.Context, s *OpsSpec, emit func(Row) error) error {
	return r.eachOperation(ctx, s.operations(), 0, func(o *operation, w cost.Work, run func() error) error {
		seconds, _, err := r.measure(ctx, effort{warmup: 2}, run)
		if err != nil {
			return err
		}
		row := Operation{Name: o.name, Shape: o.shape, Seconds: seconds, Rate: float64(w.Bytes) / seconds / 1e9,
			Unit: "GB/s"}
		if w.Rows > 0 {
			row.Rate, row.Unit = w.FLOPs()/seconds/1e12, "TFLOP/s"
		}
		return emit(Row{Ops: &row})
	})
}

// eachOperation calls f with every operation; run runs it. Runs take turns with operands of up to cold further bytes.
func (r *Rank) eachOperation(ctx context.Context, list []operation, cold int64,
	f func(o *operation, w cost.Work, run func() error) error) error {
	most := int64(0)
	for i := range list {
		_, bytes := list[i].work()
		most = max(most, bytes)
	}
	arena, err := r.Device.Arena("tensors of operations", most+cold)
	if err != nil {
		return err
	}
	on := calls{r.Device.Ops, r.Device.Optim, r.Device.Delta, new(error)}
	for i := range list {
		o, start := &list[i], arena.Mark()
		w, turns, err := r.turns(ctx, arena, o, cold)
		if err == nil {
			at := 0
			err = f(o, w, func() error { at++; o.run(on, turns[at%len(turns)]); return *on.err })
		}
		if err != nil {
			return fmt.Errorf("%s of %s: %w", o.name, o.shape, err)
		}
		arena.Release(start)
	}
	return nil
}

const mostTurns = 16

// turns returns the work of an operation, and the operands of its runs. A product keeps its input: in a step it is in
// the cache, as the output of the previous operation.
func (r *Rank) turns(ctx context.Context, a *tensor.Arena, o *operation, cold int64) (w cost.Work, turns [][]View,
	err error) {
	w, bytes := o.work()
	for i := range min(1+cold/bytes, mostTurns) {
		turns = append(turns, o.operands.alloc(a))
		for j, v := range turns[i] {
			switch x := o.operands[j]; {
			case v.IsZero():
			case i > 0:
				r.Device.Ops.Copy(v, turns[0][j])
			case x.zero:
				r.Device.Ops.Zero(v)
			case x.vocab > 0:
				if err = r.tokens(ctx, v, x.vocab); x.choices {
					r.Device.Ops.Sort(pairsOf(turns[i][j-3:]), v)
				}
			default:
				if err = r.random(ctx, uint64(j), v); x.scale != 0 {
					r.Device.Ops.Affine(v, v, x.scale, x.shift)
				}
			}
			if err != nil {
				return w, nil, err
			}
		}
		if w.Rows > 0 {
			turns[i][1] = turns[0][1]
		}
	}
	return w, turns, nil
}

// tokens sets v to tokens spread over the vocabulary.
func (r *Rank) tokens(ctx context.Context, v View, vocab int) error {
	host, err := r.Device.HostVector("token ids", tensor.I32, v.Size())
	if err != nil {
		return err
	}
	for i := range v.Size() {
		tensor.Data[int32](host)[i] = int32(i * 7919 % vocab)
	}
	r.Device.Store.Upload(v, host.Reshape(v.Shape()))
	if err := r.Device.Stream.Sync(ctx); err != nil {
		return err
	}
	r.Device.FreeHostVector(host)
	return nil
}

// Compare sets the Share of each operation: its rate divided by the fastest rate with the same unit. On a GPU that is
// the copy or the large product. On a CPU, smaller ones may be faster, since their data stay in the caches.
func Compare(rows []Operation) {
	fastest := map[string]float64{} // by unit
	for _, r := range rows {
		fastest[r.Unit] = max(fastest[r.Unit], r.Rate)
	}
	for i := range rows {
		rows[i].Share = rows[i].Rate / fastest[rows[i].Unit]
	}
}

func operationTable(on string, rows []Operation) readable.Table {
	t := readable.Table{Title: "operations; " + on, Head: []string{"operation", "shape", "µs", "rate", "",
		"of ceiling"}}
	for _, r := range rows {
		share := ""
		if r.Share > 0 {
			share = readable.Percent(r.Share)
		}
		rate, unit := r.Rate, r.Unit
		if u, scale := flopUnit(r.Rate); r.Unit == "TFLOP/s" {
			rate, unit = scale*r.Rate, u
		}
		t.Add(r.Name, r.Shape, readable.Number(1e6*r.Seconds), readable.Number(rate), unit, share)
	}
	return t
}

func dims(n ...int) string {
	var out []string
	for _, x := range n {
		out = append(out, readable.Size(int64(x)))
	}
	return strings.Join(out, " x ")
}
