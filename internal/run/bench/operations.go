package bench

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/optim"
	"github.com/cprun/cprun/kernels"
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

// bytes returns an upper bound of an operation's tensors: AdamW with a copy, SwiGLU backward or the head.
func (s *OpsSpec) bytes() int64 {
	element := int64(types[s.DType].Size())
	params := 20 * int64(s.Params)
	mlp := 5 * int64(s.Tokens) * int64(s.Intermediate) * element
	head := (int64(s.Chunk)*int64(s.Vocab+s.Hidden) + int64(s.Vocab)*int64(s.Hidden)) * element
	embed := int64(s.Vocab)*int64(s.Hidden)*4 + 2*int64(s.Tokens)*int64(s.Hidden)*element
	return max(params, mlp, head, embed) + 1<<20
}

// An operation is a call on tensors of a shape.
type operation struct {
	name, shape string
	run         func()
}

// Ops measures every operation and passes it to emit, as Attention does.
func (r *Rank) Ops(ctx context.Context, s OpsSpec, emit func(Operation) error) (err error) {
	defer device.Caught(&err)
	b := &opsRun{Rank: r, ctx: ctx, s: s, t: types[s.DType], ops: r.Device.Ops}
	if b.arena, err = r.Device.Arena("tensors of operations", s.bytes()); err != nil {
		return err
	}
	for _, make := range b.all() {
		start := b.arena.Mark()
		o := make()
		if b.err != nil {
			return fmt.Errorf("%s: %w", o.name, b.err)
		}
		seconds, _, err := r.measure(ctx, 2, 0, func() error { o.run(); return nil })
		if err != nil {
			return fmt.Errorf("%s: %w", o.name, err)
		}
		b.arena.Release(start)
		w := b.work(o)
		row := Operation{Name: o.name, Shape: o.shape, Seconds: seconds,
			Rate: float64(w.Bytes) / seconds / 1e9, Unit: "GB/s"}
		if w.Rows > 0 {
			row.Rate, row.Unit = w.FLOPs()/seconds/1e12, "TFLOP/s"
		}
		if err := emit(row); err != nil {
			return err
		}
	}
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

type opsRun struct {
	*Rank
	ctx   context.Context
	s     OpsSpec
	t     tensor.DType
	ops   model.Ops
	arena *tensor.Arena
	seed  uint64
	err   error // the first error of allocating tensors
}

// act returns random activations.
func (b *opsRun) act(rows, heads, dim int) View { return b.noise(b.t, 1, rows, heads, dim) }

// f32 returns random parameters, norms or gradients.
func (b *opsRun) f32(shape ...int) View { return b.noise(tensor.F32, shape...) }

func (b *opsRun) noise(t tensor.DType, shape ...int) View {
	v := b.arena.Alloc(t, shape...)
	b.seed++
	if err := b.random(b.ctx, b.seed, v); err != nil && b.err == nil {
		b.err = err
	}
	return v
}

func (b *opsRun) scalar() View {
	v := b.arena.Alloc(tensor.F64, 1)
	b.ops.Zero(v)
	return v
}

// ids returns a token for each row, spread over the vocabulary.
func (b *opsRun) ids(rows int) View {
	v := b.arena.Alloc(tensor.I32, 1, rows, 1, 1)
	host, err := b.Device.HostVector("token ids", tensor.I32, rows)
	if err == nil {
		for i := range rows {
			tensor.Data[int32](host)[i] = int32(i * 7919 % b.s.Vocab)
		}
		b.Device.Store.Upload(v, host.Reshape(v.Shape()))
		if err = b.Device.Stream.Sync(b.ctx); err == nil {
			b.Device.FreeHostVector(host)
		}
	}
	if err != nil && b.err == nil {
		b.err = err
	}
	return v
}

// all lists every operation. The first two measure the peak rates.
func (b *opsRun) all() []func() operation {
	first := []func() operation{b.copyAll, b.linear("matrix product", b.s.Ceiling, b.s.Ceiling, b.s.Ceiling)}
	return slices.Concat(first, b.linears(), b.norms(), b.rest(), b.optimizer())
}

func (b *opsRun) copyAll() operation {
	n := b.s.Params
	dst, src := b.arena.Alloc(tensor.F32, n), b.f32(n)
	return operation{"copy", readable.Size(int64(n)), func() { b.ops.Copy(dst, src) }}
}

func (b *opsRun) linear(name string, rows, in, out int) func() operation {
	return func() operation {
		y, x, w := b.act(rows, 1, out), b.act(rows, 1, in), b.noise(b.t, 1, out, 1, in)
		return operation{name, dims(rows, in, out), func() { b.ops.Linear(y, x, w, View{}) }}
	}
}

func (b *opsRun) linears() []func() operation {
	s := b.s
	qkv := (s.Heads + 2*s.KVHeads) * s.HeadDim
	return []func() operation{
		b.linear("linear qkv", s.Tokens, s.Hidden, qkv),
		b.linear("linear out", s.Tokens, s.Heads*s.HeadDim, s.Hidden),
		b.linear("linear gate", s.Tokens, s.Hidden, s.Intermediate),
		b.linear("linear down", s.Tokens, s.Intermediate, s.Hidden),
		b.linear("linear head", s.Chunk, s.Hidden, s.Vocab),
		func() operation {
			dx, dy, w := b.act(s.Tokens, 1, s.Hidden), b.act(s.Tokens, 1, s.Intermediate),
				b.noise(b.t, 1, s.Intermediate, 1, s.Hidden)
			return operation{"linear gate dx", dims(s.Tokens, s.Intermediate, s.Hidden),
				func() { b.ops.LinearDX(dx, dy, w, false) }}
		},
		func() operation {
			dw, dy, x := b.f32(1, s.Intermediate, 1, s.Hidden), b.act(s.Tokens, 1, s.Intermediate),
				b.act(s.Tokens, 1, s.Hidden)
			return operation{"linear gate dw", dims(s.Intermediate, s.Tokens, s.Hidden),
				func() { b.ops.LinearDW(dw, dy, x, false) }}
		},
	}
}

func (b *opsRun) norms() []func() operation {
	s := b.s
	rows := s.Tokens
	inv := func() View { return b.f32(1, rows, 1, 1) }
	x := func() View { return b.act(rows, 1, s.Hidden) }
	angle := func() View { return b.f32(1, rows, 1, s.HeadDim/2) }
	shape, heads := dims(rows, s.Hidden), dims(rows, s.Heads, s.HeadDim)
	const eps = 1e-5
	return []func() operation{
		func() operation {
			y, i, in, w := x(), inv(), x(), b.f32(s.Hidden)
			return operation{"rmsnorm", shape, func() { b.ops.RMSNorm(y, i, in, w, eps) }}
		},
		func() operation {
			y, i, sum, in, add, w := x(), inv(), x(), x(), x(), b.f32(s.Hidden)
			return operation{"add rmsnorm", shape, func() { b.ops.AddRMSNorm(y, i, sum, in, add, w, eps) }}
		},
		func() operation {
			dx, dw, dy, in, i, w := x(), b.f32(s.Hidden), x(), x(), inv(), b.f32(s.Hidden)
			return operation{"rmsnorm backward", shape, func() { b.ops.RMSNormBackward(dx, dw, dy, in, i, w, false) }}
		},
		func() operation {
			y, in := b.act(rows, s.Heads, s.HeadDim), b.act(rows, s.Heads, s.HeadDim)
			cos, sin := angle(), angle()
			return operation{"rope", heads, func() { b.ops.NormRope(y, View{}, in, View{}, cos, sin, 0) }}
		},
		func() operation {
			dx, dy := b.act(rows, s.Heads, s.HeadDim), b.f32(1, rows, s.Heads, s.HeadDim)
			cos, sin := angle(), angle()
			return operation{"rope backward", heads,
				func() { b.ops.NormRopeBackward(dx, View{}, dy, View{}, View{}, View{}, cos, sin) }}
		},
		func() operation {
			y, in, i, w := b.act(rows, s.Heads, s.HeadDim), b.act(rows, s.Heads, s.HeadDim), b.f32(1, rows, s.Heads, 1),
				b.f32(s.HeadDim)
			cos, sin := angle(), angle()
			return operation{"norm rope", heads, func() { b.ops.NormRope(y, i, in, w, cos, sin, eps) }}
		},
	}
}

func (b *opsRun) rest() []func() operation {
	s := b.s
	x, mlp := func() View { return b.act(s.Tokens, 1, s.Intermediate) }, dims(s.Tokens, s.Intermediate)
	return []func() operation{
		func() operation {
			y, gate, up := x(), x(), x()
			return operation{"swiglu", mlp, func() { b.ops.GLU(y, gate, up, kernels.SiLU) }}
		},
		func() operation {
			dgate, dup, dy, gate, up := x(), x(), x(), x(), x()
			return operation{"swiglu backward", mlp, func() { b.ops.GLUBackward(dgate, dup, dy, gate, up, kernels.SiLU) }}
		},
		func() operation {
			y, table, ids := b.act(s.Tokens, 1, s.Hidden), b.noise(b.t, 1, s.Vocab, 1, s.Hidden), b.ids(s.Tokens)
			return operation{"embed", dims(s.Tokens, s.Hidden), func() { b.ops.Embed(y, table, ids) }}
		},
		func() operation {
			dtable, dy, ids := b.f32(1, s.Vocab, 1, s.Hidden), b.act(s.Tokens, 1, s.Hidden), b.ids(s.Tokens)
			return operation{"embed backward", dims(s.Tokens, s.Hidden),
				func() { b.ops.EmbedBackward(dtable, dy, ids) }}
		},
		func() operation {
			loss, y, ids := b.scalar(), b.act(s.Chunk, 1, s.Vocab), b.ids(s.Chunk)
			return operation{"cross entropy", dims(s.Chunk, s.Vocab),
				func() { b.ops.CrossEntropy(loss, y, ids, 1, 0, true) }}
		},
	}
}

func (b *opsRun) optimizer() []func() operation {
	n := b.s.Params
	shape := readable.Size(int64(n))
	return []func() operation{
		func() operation {
			v := b.f32(n)
			return operation{"zero", shape, func() { b.ops.Zero(v) }}
		},
		func() operation {
			dst, src := b.f32(n), b.f32(n)
			return operation{"accumulate", shape, func() { b.ops.Add(dst, src) }}
		},
		func() operation {
			sum, g := b.scalar(), b.f32(n)
			return operation{"gradient norm", shape, func() { b.Device.Optim.SumSquares(sum, g) }}
		},
		func() operation {
			p, g, m, v, sum := b.f32(n), b.f32(n), b.f32(n), b.arena.Alloc(tensor.F32, n), b.scalar()
			b.ops.Zero(v)
			c := View{}
			if b.t != tensor.F32 {
				c = b.noise(b.t, n)
			}
			h := optim.AdamStep{LR: 1e-4, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, MaxNorm: 1}
			return operation{"adamw", shape, func() { b.Device.Optim.AdamW(p, c, g, m, v, sum, h) }}
		},
	}
}

func dims(n ...int) string {
	var out []string
	for _, x := range n {
		out = append(out, readable.Size(int64(x)))
	}
	return strings.Join(out, " x ")
}
