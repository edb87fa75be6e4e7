package bench

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/foresee/cost"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/kernels/gpu"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// CalibrateSpec selects the measurements of `bench calibrate` with one attention backend, for a cost table. All ranks
// measure at the same time.
type CalibrateSpec struct {
	Backend string `json:"backend"`
	DType   string `json:"dtype"` // of attention and activations
	Heads   int    `json:"heads"`
	KVHeads int    `json:"kv_heads"`
	Dims    []int  `json:"dims"`  // head dims
	Sizes   []int  `json:"sizes"` // queries and keys of a tile, in every combination
	Further int    `json:"further"`
	// Documents are document lengths; each call has DocumentTokens tokens of documents of one length.
	Documents      []int `json:"documents"`
	DocumentTokens int   `json:"document_tokens"`
	// MaskDims counts the first Dims with masks measured on the largest tile; 0: all.
	MaskDims int `json:"mask_dims"`
	// TransfersOnly measures only transfers.
	TransfersOnly bool `json:"transfers_only"`
	// Operations also measures operations of the model and transfers.
	Operations bool    `json:"operations"`
	Rows       []int   `json:"rows"` // rows of matrix products
	Sides      []int   `json:"sides"`
	Passes     []int   `json:"passes"` // tokens of elementwise operations
	Links      []int64 `json:"links"`  // bytes
	// Budget is the time of one figure in seconds.
	Budget float64 `json:"budget"`
	// Heat is the time in seconds to warm up the device before a second measurement of attention calls and products of
	// at least Long seconds. The second one counts. Each of its figures takes an eighth of Heat of its own work before.
	// 0: no second measurement.
	Heat float64 `json:"heat"`
	Long float64 `json:"long"`
	// Tolerance works as in Rank.
	Tolerance float64 `json:"tolerance"`
}

// Share gives a rank one KV head per core, up to 4. With fewer heads than cores, goroutines would wait for each other.
func (s *CalibrateSpec) Share(cores int) {
	const most = 4
	n := min(max(cores, 1), most)
	s.Heads, s.KVHeads = n*s.Heads, n*s.KVHeads
}

// Default sets the sizes of a measurement of about a minute.
func (s *CalibrateSpec) Default(device string) {
	if device == "cpu" {
		*s = CalibrateSpec{
			Backend: "flash", DType: "fp32", Heads: 2, KVHeads: 1, Dims: []int{32, 128},
			Sizes: []int{16, 64, 256, 1024}, Further: 256,
			Documents: []int{4, 16, 64, 128}, DocumentTokens: 512,
			Operations: true, Rows: []int{16, 128, 512, 2048}, Sides: []int{64, 256, 768}, Passes: []int{16, 128, 512},
			Links: []int64{1 << 10, 16 << 10, 256 << 10, 4 << 20}, Budget: 0.03,
			// The largest tiles take most of the time, and the savings of a mask differ by at most 11 % between head
			// dims.
			MaskDims: 1, Tolerance: 0.05,
		}
		return
	}
	*s = CalibrateSpec{
		Backend: "flash", DType: "bf16", Heads: 32, KVHeads: 8, Dims: []int{64, 128},
		Sizes: []int{256, 1024, 4096, 16384}, Further: 16384,
		Documents: []int{128, 512, 2048}, DocumentTokens: 16384,
		Operations: true, Rows: []int{128, 1024, 8192, 32768}, Sides: []int{1024, 4096, 16384},
		Passes: []int{128, 2048, 32768},
		Links:  []int64{16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20},
		Budget: 0.1, // most figures take far less
		// A card cools while the host plans cuDNN graphs and compiles kernels for new shapes. Measured cold, cuDNN was
		// 6 % ahead of flash; with both kept warm it is 4 % behind. The calls of a ring over four GPUs at 32K take 0.7
		// to 2.6 ms. After 50 ms the clock of an H200 has not settled: the second of two equal blocks took 17 % longer.
		Heat: 2, Long: 2e-4,
	}
}

// Workspace returns the workspace of fused attention for the largest tile, in bytes.
func (s *CalibrateSpec) Workspace() int64 {
	if s.Backend != "fused" {
		return 0
	}
	n := slices.Max(s.Sizes)
	return gpu.FusedWorkspace(gpu.FusedShape{
		Batch: 1, SeqQ: n, SeqK: n, Heads: s.Heads, KVHeads: s.KVHeads, Dim: slices.Max(s.Dims),
		DimV:  slices.Max(s.Dims),
		Calls: 2, Training: true,
	})
}

// Calibrate measures everything, and passes the parts of the set to emit, as Attention does.
func (r *Rank) Calibrate(ctx context.Context, s CalibrateSpec, emit func(cost.Set) error) (err error) {
	defer device.Caught(&err)
	r.Budget, r.Tolerance = s.Budget, s.Tolerance
	c := &calibration{Rank: r, spec: s, dtype: types[s.DType]}
	parts := []func(context.Context) (cost.Set, error){c.attention}
	if s.Operations {
		parts = append(parts, c.products, c.passes, c.host, c.links)
	}
	if s.TransfersOnly {
		parts = []func(context.Context) (cost.Set, error){c.links}
	}
	for _, part := range parts {
		set, err := part(ctx)
		if err != nil {
			return err
		}
		set.Ranks = r.World.Size()
		if err := emit(set); err != nil {
			return err
		}
	}
	return nil
}

type calibration struct {
	*Rank
	spec  CalibrateSpec
	dtype tensor.DType
	warm  float64 // seconds of warm-up before settled measures
}

// settled returns the median time of work after c.warm seconds of warm-up.
func (c *calibration) settled(ctx context.Context, work func() error) (float64, error) {
	turns := 1
	if c.warm > 0 {
		one, _, err := c.measure(ctx, 1, minIters, work)
		if err != nil {
			return 0, err
		}
		turns = int(c.warm/max(one, 1e-9)) + 1
	}
	seconds, _, err := c.measure(ctx, turns, 0, work)
	return seconds, err
}

func (c *calibration) attention(ctx context.Context) (set cost.Set, err error) {
	n, dim := slices.Max(c.spec.Sizes), slices.Max(c.spec.Dims)
	arena, err := c.Device.Arena("tensors of attention", c.attentionBytes(n, dim))
	if err != nil {
		return set, err
	}
	if c.spec.Heat > 0 {
		c.Budget = c.spec.Budget / 5 // again measures long calls with the whole budget
	}
	for _, t := range c.tiles() {
		rows, err := c.tile(ctx, arena, t)
		if err != nil {
			return set, err
		}
		set.Attention = append(set.Attention, rows...)
	}
	if c.spec.Heat > 0 {
		c.Budget = c.spec.Budget
		return set, c.again(ctx, arena, set.Attention)
	}
	return set, nil
}

// A tileOf is a tile to measure, or several equal ones in one call.
type tileOf struct {
	mask      string
	q, k, dim int
	tiles     int // number of tiles with cost.Documents
}

func (c *calibration) tiles() (list []tileOf) {
	n := slices.Max(c.spec.Sizes)
	for i, dim := range c.spec.Dims {
		masked := c.spec.MaskDims == 0 || i < c.spec.MaskDims
		for _, q := range c.spec.Sizes {
			for _, k := range c.spec.Sizes {
				masks := []string{cost.Full}
				if q == k && (masked || q < n) {
					masks = []string{cost.Full, cost.Causal, cost.Band}
				}
				for _, mask := range masks {
					list = append(list, tileOf{mask, q, k, dim, 0})
				}
			}
		}
		for _, n := range c.spec.Documents {
			list = append(list, tileOf{cost.Documents, n, n, dim, c.spec.DocumentTokens / n})
		}
	}
	return list
}

// again measures long calls a second time, on a device as warm as in a training step. Each tile has two rows.
func (c *calibration) again(ctx context.Context, arena *tensor.Arena, rows []cost.Attention) error {
	long := false
	for i, t := range c.tiles() {
		pair := rows[2*i : 2*i+2]
		if max(pair[0].Seconds, pair[1].Seconds) < c.spec.Long {
			continue
		}
		if !long {
			if err := c.heat(ctx, arena); err != nil {
				return err
			}
		}
		long = true
		c.warm = c.spec.Heat / 8
		hot, err := c.tile(ctx, arena, t)
		if c.warm = 0; err != nil {
			return err
		}
		for j := range pair {
			if pair[j].Seconds >= c.spec.Long {
				pair[j] = hot[j]
			}
		}
	}
	return nil
}

func (c *calibration) heat(ctx context.Context, arena *tensor.Arena) error {
	defer arena.Release(arena.Mark())
	p, err := c.load(ctx, arena, tileOf{cost.Full, slices.Max(c.spec.Sizes), slices.Max(c.spec.Sizes),
		slices.Max(c.spec.Dims), 0})
	if err != nil {
		return err
	}
	one, _, err := c.measure(ctx, 1, minIters, func() error { return p.backward(c.Device.Kernel, 1) })
	if err != nil {
		return err
	}
	_, _, err = c.measure(ctx, 1, int(c.spec.Heat/one)+1, func() error { return p.backward(c.Device.Kernel, 1) })
	return err
}

func (c *calibration) attentionBytes(n, dim int) int64 {
	a := tensor.NewMeter()
	c.call(a, n, n, dim)
	return a.Peak()
}

// A call holds the tensors of a pass over one block, or several with the same keys.
type call struct {
	q, k, v, o, do View
	acc            attention.Partial
	saved          attention.Saved
	grads          attention.Grads
	softmax        attention.Softmax
	tiles          []partition.Tile
}

func (c *calibration) call(a *tensor.Arena, q, k, dim int) *call {
	h, kv, sum := c.spec.Heads, c.spec.KVHeads, tensor.F32
	of := func(t tensor.DType, n, heads int) View { return a.Alloc(t, 1, n, heads, dim) }
	p := &call{
		q: of(c.dtype, q, h), k: of(c.dtype, k, kv), v: of(c.dtype, k, kv), o: of(c.dtype, q, h), do: of(c.dtype, q, h),
		grads:   attention.Grads{DQ: of(sum, q, h), DK: of(sum, k, kv), DV: of(sum, k, kv)},
		softmax: attention.Softmax{Scale: 1 / math.Sqrt(float64(dim))},
	}
	p.acc = attention.Partial{O: p.o, LSE: a.Alloc(sum, 1, q, h, 1)}
	if c.dtype != sum {
		p.acc.O = of(sum, q, h)
	}
	p.saved = attention.Saved{O: p.o, LSE: p.acc.LSE, Delta: a.Alloc(sum, 1, q, h, 1)}
	return p
}

func (c *calibration) load(ctx context.Context, arena *tensor.Arena, t tileOf) (*call, error) {
	n := max(t.tiles, 1)
	p := c.call(arena, n*t.q, n*t.k, t.dim)
	p.tiles = (&cost.Attention{Mask: t.mask, Queries: t.q, Keys: t.k, Tiles: t.tiles}).MeasuredTiles()
	return p, c.random(ctx, 1, p.q, p.k, p.v, p.do)
}

// tile measures a tile forward and backward: a pass with one block, and the extra cost of a second block.
func (c *calibration) tile(ctx context.Context, arena *tensor.Arena, t tileOf) (rows []cost.Attention, err error) {
	defer arena.Release(arena.Mark())
	defer func() {
		if err != nil {
			err = fmt.Errorf("attention of %d queries and %d keys, %s, head dim %d: %w", t.q, t.k, t.mask, t.dim, err)
		}
	}()
	p, err := c.load(ctx, arena, t)
	if err != nil {
		return nil, err
	}
	row := cost.Attention{
		Backend: c.spec.Backend, DType: c.spec.DType, Mask: t.mask, Dim: t.dim,
		Heads: c.spec.Heads, KVHeads: c.spec.KVHeads, Queries: t.q, Keys: t.k, Tiles: t.tiles,
	}
	forward, backward := row, row
	backward.Backward = true
	for _, m := range []struct {
		row  *cost.Attention
		pass func(blocks int) error
	}{
		{&forward, func(n int) error { return p.forward(c.Device.Kernel, n) }},
		{&backward, func(n int) error { return p.backward(c.Device.Kernel, n) }},
	} {
		seconds, err := c.settled(ctx, func() error { return m.pass(1) })
		if err != nil {
			return nil, err
		}
		m.row.Seconds = seconds
		if t.mask != cost.Full || max(t.q, t.k) > c.spec.Further {
			continue
		}
		both, err := c.settled(ctx, func() error { return m.pass(2) })
		if err != nil {
			return nil, err
		}
		m.row.Further = max(both-seconds, seconds/10) // noise may make the difference negative
	}
	return []cost.Attention{forward, backward}, nil
}

func (p *call) block(i, n int) attention.Block {
	return attention.Block{K: p.k, V: p.v, Tiles: p.tiles, First: i == 0, Last: i == n-1}
}

func (p *call) forward(kernel attention.Kernel, blocks int) error {
	pass, err := kernel.Forward(p.o, p.acc, p.q, p.softmax)
	for i := 0; i < blocks && err == nil; i++ {
		err = pass.Block(p.block(i, blocks))
	}
	if err != nil {
		return err
	}
	return pass.End()
}

func (p *call) backward(kernel attention.Kernel, blocks int) error {
	pass, err := kernel.Backward(p.grads.DQ, p.do, p.q, p.saved, p.softmax)
	for i := 0; i < blocks && err == nil; i++ {
		err = pass.Block(attention.GradBlock{
			Block: p.block(i, blocks), KeyGrads: attention.KeyGrads{DK: p.grads.DK, DV: p.grads.DV},
			Fresh: partition.Range{Hi: p.k.Len(tensor.Seq)},
		})
	}
	if err != nil {
		return err
	}
	return pass.End()
}

func (c *calibration) products(ctx context.Context) (set cost.Set, err error) {
	rows, side := slices.Max(c.spec.Rows), slices.Max(c.spec.Sides)
	arena, err := c.Device.Arena("tensors of products", c.productBytes(rows, side, side)+c.coldBytes())
	if err != nil {
		return set, err
	}
	ops := c.Device.Ops
	heat := c.spec.Heat // before the next long product
	for _, n := range c.spec.Rows {
		for _, in := range c.spec.Sides {
			for _, out := range c.spec.Sides {
				mark := arena.Mark()
				list, err := c.operandsOf(ctx, arena, n, in, out)
				at := 0
				next := func() *operands { at++; return &list[at%len(list)] }
				for _, op := range []struct {
					kind string
					run  func(o *operands)
				}{
					// list[0] is in the cache, as is the output of the previous operation in a step.
					{"linear", func(o *operands) { ops.Linear(o.y, list[0].x, o.w, View{}) }},
					{"linear dx", func(o *operands) { ops.LinearDX(o.x, list[0].y, o.w, false) }},
					{"linear dw", func(o *operands) { ops.LinearDW(o.dw, list[0].y, o.x, false) }},
				} {
					seconds, work := 0.0, func() error { op.run(next()); return nil }
					if err == nil {
						seconds, _, err = c.measure(ctx, 1, 0, work)
					}
					if err == nil && heat > 0 && seconds >= c.spec.Long {
						c.warm, heat = heat, c.spec.Heat/8
						seconds, err = c.settled(ctx, work)
						c.warm = 0
					}
					set.Products = append(set.Products, cost.Product{Kind: op.kind, DType: c.spec.DType, Rows: n,
						In: in, Out: out, Seconds: seconds})
				}
				if arena.Release(mark); err != nil {
					return set, fmt.Errorf("product of %s: %w", dims(n, in, out), err)
				}
			}
		}
	}
	return set, nil
}

type operands struct{ x, y, w, dw View }

// cold is the size of the operands that a CPU's operations rotate through. It exceeds a core's own cache, since a step
// returns to weights and activations only after all others.
const cold = 16 << 20

// coldBytes returns the memory for cold operands, in addition to those of one product.
func (c *calibration) coldBytes() int64 {
	if c.Device.Machine.Arch != 0 {
		return 0
	}
	return cold
}

// productBytes returns an upper bound of the operands' bytes.
func (c *calibration) productBytes(n, in, out int) int64 {
	const align = 4 << 8 // for four operands
	return int64(c.dtype.Size())*int64(n*in+n*out+in*out) + 4*int64(in*out) + align
}

const mostOperands = 16

func (c *calibration) turns(bytes int64) int64 { return min(1+c.coldBytes()/bytes, mostOperands) }

func (c *calibration) operandsOf(
	ctx context.Context, arena *tensor.Arena, n, in, out int,
) (list []operands, err error) {
	of := func(shape ...int) View {
		v := arena.Alloc(c.dtype, shape...)
		if err == nil {
			err = c.random(ctx, 1, v)
		}
		return v
	}
	for range c.turns(c.productBytes(n, in, out)) {
		o := operands{of(1, n, 1, in), of(1, n, 1, out), of(1, out, 1, in), arena.Alloc(tensor.F32, 1, out, 1, in)}
		list = append(list, o)
	}
	return list, err
}

// passes measures the elementwise operations of `bench ops` at several lengths. It counts bytes as a plan does, and
// rotates operands as products does.
func (c *calibration) passes(ctx context.Context) (set cost.Set, err error) {
	most := c.opsSpec(slices.Max(c.spec.Passes))
	arena, err := c.Device.Arena("tensors of passes", most.bytes()+c.coldBytes())
	if err != nil {
		return set, err
	}
	for _, tokens := range c.spec.Passes {
		s := c.opsSpec(tokens)
		b := &opsRun{Rank: c.Rank, ctx: ctx, s: s, t: c.dtype, ops: c.Device.Ops, arena: arena}
		list := slices.Concat([]func() operation{b.copyAll}, b.norms(), b.rest(), b.optimizer())
		for _, make := range list {
			mark := arena.Mark()
			o := make()
			w, list, at := b.work(o), []operation{o}, 0
			for range c.turns(w.Bytes) - 1 {
				list = append(list, make())
			}
			if b.err != nil {
				return set, fmt.Errorf("%s: %w", o.name, b.err)
			}
			seconds, _, err := c.measure(ctx, 1, 0, func() error { at++; list[at%len(list)].run(); return nil })
			if err != nil {
				return set, fmt.Errorf("%s: %w", o.name, err)
			}
			arena.Release(mark)
			set.Passes = append(set.Passes, cost.Pass{Op: w.Op, DType: cost.Name(w.DType), Bytes: w.Bytes,
				Seconds: seconds})
		}
	}
	return set, nil
}

func (c *calibration) opsSpec(tokens int) OpsSpec {
	s := OpsSpec{}
	s.Default(c.Device.Machine.Device())
	s.DType, s.Params = c.spec.DType, max(s.Params*tokens/s.Tokens, 1024)
	s.Chunk = min(s.Chunk, tokens)
	s.Tokens = tokens
	return s
}

// work returns the cost.Work of an operation without running it.
func (b *opsRun) work(o operation) (w cost.Work) {
	ops, optimizer := b.ops, b.Device.Optim
	record := cost.Recorder(func(x cost.Work) { w = x })
	b.ops, b.Device.Optim = record, record
	o.run()
	b.ops, b.Device.Optim = ops, optimizer
	return w
}

var hostCopies = []int{64 << 10, 1 << 20, 16 << 20}

// host measures copies between device and host, and the host's time to queue a call.
func (c *calibration) host(ctx context.Context) (set cost.Set, err error) {
	most := slices.Max(hostCopies)
	arena, err := c.Device.Arena("copies", int64(most)+1<<10)
	if err != nil {
		return set, err
	}
	there, here := arena.Alloc(tensor.F32, most/4), View{}
	if here, err = c.Device.HostVector("copies", tensor.F32, most/4); err != nil {
		return set, err
	}
	defer c.Device.FreeHostVector(here)
	for _, n := range hostCopies {
		d, h := there.Slice(tensor.Dim, 0, n/4), here.Slice(tensor.Dim, 0, n/4)
		for _, op := range []struct {
			name string
			run  func()
		}{{"upload", func() { c.Device.Store.Upload(d, h) }}, {"download", func() { c.Device.Store.Download(h, d) }}} {
			seconds, _, err := c.measure(ctx, 1, 0, func() error { op.run(); return nil })
			if err != nil {
				return set, fmt.Errorf("%s of %s: %w", op.name, readable.Bytes(int64(n)), err)
			}
			set.Passes = append(set.Passes, cost.Pass{Op: op.name, DType: "fp32", Bytes: int64(n), Seconds: seconds})
		}
	}
	set.CallSeconds, err = c.queueing(ctx, there.Slice(tensor.Dim, 0, 1))
	return set, err
}

const queued = 256

// queueing returns the host's time to queue one tiny call, on the slowest rank.
func (c *calibration) queueing(ctx context.Context, v View) (float64, error) {
	var took []float64
	for range 5 {
		if err := c.Device.Stream.Sync(ctx); err != nil {
			return 0, err
		}
		start := time.Now()
		for range queued {
			c.Device.Ops.Zero(v)
		}
		took = append(took, time.Since(start).Seconds()/queued)
	}
	most, err := c.slowest(ctx, Median(took))
	if err != nil {
		return 0, err
	}
	return most[0], c.Device.Stream.Sync(ctx)
}

// links measures transfers between neighbours and collectives on every transport.
func (c *calibration) links(ctx context.Context) (set cost.Set, err error) {
	if c.World.Size() == 1 {
		return set, nil
	}
	s := CommSpec{Sizes: c.spec.Links, Calls: Calls, Iters: minIters, Warmup: 1}
	err = c.Comm(ctx, s, func(t Transfer) error {
		pair := cost.SameHost
		if t.Transport == "tcp" {
			pair = cost.OtherHost
		}
		set.Links = append(set.Links, cost.Link{Pair: pair, Transport: t.Transport, Call: t.Call, Ranks: c.World.Size(),
			Bytes: t.Bytes, Seconds: t.Seconds})
		return nil
	})
	return set, err
}
