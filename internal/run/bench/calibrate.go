package bench

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/foresee/cost"
	"github.com/cprun/cprun/internal/model/hf"
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
	// PairDims counts the first Dims with a tile of every pair of Sizes, the others with squares; 0: all.
	PairDims int `json:"pair_dims"`
	// TransfersOnly measures only transfers.
	TransfersOnly bool `json:"transfers_only"`
	// Operations also measures operations of the model and transfers.
	Operations bool    `json:"operations"`
	Rows       []int   `json:"rows"` // rows of matrix products
	Sides      []int   `json:"sides"`
	Experts    Experts `json:"experts"` // zero: no grouped products
	// Delta is the shape of a gated delta rule, and DeltaRows its rows. Many take more than a GPU's workspace.
	Delta     hf.Delta `json:"delta"`
	DeltaRows []int    `json:"delta_rows"`
	Passes    []int    `json:"passes"` // tokens of elementwise operations
	Links     []int    `json:"links"`  // bytes
	// Budget is the time of one figure in seconds.
	Budget float64 `json:"budget"`
	// Heat is the time in seconds to warm up the device before a second measurement of attention calls and products of
	// at least Long seconds. The second one counts. Its first figure takes Heat of its own work before, each other an
	// eighth. 0: no second measurement.
	Heat float64 `json:"heat"`
	Long float64 `json:"long"`
	// Tolerance ends a figure when its iterations differ by less than this share.
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
			Delta: hf.Delta{KeyHeads: 2, Heads: 4, Dim: 32, DimV: 32}, DeltaRows: []int{128, 2048},
			Links: []int{1 << 10, 16 << 10, 256 << 10, 4 << 20}, Budget: 0.03,
			// The largest tiles take most of the time, and the savings of a mask differ by at most 11 % between head
			// dims.
			MaskDims: 1, Tolerance: 0.05,
		}
		return
	}
	*s = CalibrateSpec{
		Backend: "flash", DType: "bf16", Heads: 32, KVHeads: 8, Dims: []int{64, 128, 256, 512}, PairDims: 2,
		Sizes: []int{256, 1024, 4096, 16384}, Further: 16384,
		Documents: []int{128, 512, 2048}, DocumentTokens: 16384,
		Operations: true, Rows: []int{128, 1024, 8192, 32768}, Sides: []int{1024, 4096, 16384},
		Experts:   Experts{Count: 128, Chosen: 8, Hidden: 2048, Width: 768}, // of Qwen3-30B-A3B
		Delta:     hf.Delta{KeyHeads: 16, Heads: 32, Dim: 128, DimV: 128},   // of Qwen3.5-9B
		DeltaRows: []int{1024, 8192, 32768, 131072},
		Passes:    []int{128, 2048, 32768},
		Links:     []int{16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20},
		Budget:    0.1, // most figures take far less
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

// calibrate measures everything and passes the parts of the set to emit.
func (r *Rank) calibrate(ctx context.Context, s *CalibrateSpec, emit func(Row) error) error {
	c := &calibration{Rank: r, spec: *s, dtype: types[s.DType]}
	parts := []func(context.Context, *cost.Set) error{c.attention}
	if s.Operations {
		parts = append(parts, c.operations(c.products()), c.operations(c.passes()), c.host, c.links)
	}
	if s.TransfersOnly {
		parts = []func(context.Context, *cost.Set) error{c.links}
	}
	for _, part := range parts {
		set := cost.Set{Ranks: r.World.Size()}
		if err := part(ctx, &set); err != nil {
			return err
		}
		if err := emit(Row{Calibrate: &set}); err != nil {
			return err
		}
	}
	return nil
}

type calibration struct {
	*Rank
	spec  CalibrateSpec
	dtype tensor.DType
}

// effort returns the effort of one figure, after heat seconds of warm-up.
func (c *calibration) effort(heat float64) effort {
	e := effort{heat: heat, budget: c.spec.Budget, tolerance: c.spec.Tolerance}
	if heat > 0 {
		e.warmup = minIters // the first may prepare kernels
	}
	return e
}

// attention measures every call, then long ones again, on a device as warm as in a training step.
func (c *calibration) attention(ctx context.Context, set *cost.Set) error {
	n, dim := slices.Max(c.spec.Sizes), slices.Max(c.spec.Dims)
	meter := tensor.NewMeter()
	c.call(meter, n, n, dim)
	arena, err := c.Device.Arena("tensors of attention", meter.Peak())
	if err != nil {
		return err
	}
	set.Attention = c.tiles()
	cold, hot := c.effort(0), c.effort(c.spec.Heat)
	if hot.heat > 0 {
		cold.budget /= 5 // long calls have the whole budget later
	}
	for i := range set.Attention {
		if err := c.tile(ctx, arena, &set.Attention[i], cold); err != nil {
			return err
		}
	}
	for i := range set.Attention {
		if row := &set.Attention[i]; hot.heat > 0 && row.Seconds >= c.spec.Long {
			if err := c.tile(ctx, arena, row, hot); err != nil {
				return err
			}
			hot.heat = c.spec.Heat / 8
		}
	}
	return nil
}

// tiles lists the calls to measure, forward and backward: a tile of every pair of sizes, square ones with every mask,
// and documents.
func (c *calibration) tiles() (list []cost.Attention) {
	add := func(mask string, q, k, dim, tiles int) {
		for _, backward := range []bool{false, true} {
			list = append(list, cost.Attention{Backend: c.spec.Backend, DType: c.spec.DType, Backward: backward, Mask: mask,
				Dim: dim, Heads: c.spec.Heads, KVHeads: c.spec.KVHeads, Queries: q, Keys: k, Tiles: tiles})
		}
	}
	n := slices.Max(c.spec.Sizes)
	for i, dim := range c.spec.Dims {
		masked := c.spec.MaskDims == 0 || i < c.spec.MaskDims
		for _, q := range c.spec.Sizes {
			for _, k := range c.spec.Sizes {
				if q != k && c.spec.PairDims > 0 && i >= c.spec.PairDims {
					continue
				}
				add(cost.Full, q, k, dim, 0)
				if q == k && (masked || q < n) {
					add(cost.Causal, q, k, dim, 0)
					add(cost.Band, q, k, dim, 0)
				}
			}
		}
		for _, n := range c.spec.Documents {
			add(cost.Documents, n, n, dim, c.spec.DocumentTokens/n)
		}
	}
	return list
}

// A call holds the tensors of a pass over one block, or several with the same keys.
type call struct {
	tensors
	acc     attention.Partial
	delta   View
	softmax attention.Softmax
	tiles   []partition.Tile
}

func (c *calibration) call(a *tensor.Arena, q, k, dim int) *call {
	p := &call{tensors: newTensors(a, c.dtype, q, k, c.spec.Heads, c.spec.KVHeads, dim),
		softmax: attention.Softmax{Scale: 1 / math.Sqrt(float64(dim))}}
	p.acc, p.delta = p.out, a.Alloc(tensor.F32, 1, q, c.spec.Heads, 1)
	if c.dtype != tensor.F32 {
		p.acc.O = a.Alloc(tensor.F32, 1, q, c.spec.Heads, dim)
	}
	return p
}

// tile measures a call of one block, and for small tiles the extra cost of a second block.
func (c *calibration) tile(ctx context.Context, arena *tensor.Arena, row *cost.Attention, e effort) (err error) {
	defer arena.Release(arena.Mark())
	defer func() {
		if err != nil {
			err = fmt.Errorf("attention of %d queries and %d keys, %s, head dim %d: %w", row.Queries, row.Keys, row.Mask,
				row.Dim, err)
		}
	}()
	n := max(row.Tiles, 1)
	p := c.call(arena, n*row.Queries, n*row.Keys, row.Dim)
	p.tiles = row.MeasuredTiles()
	if err := c.random(ctx, 1, p.q, p.k, p.v, p.do); err != nil {
		return err
	}
	pass := p.forward
	if row.Backward {
		if err := p.forward(c.Device.Kernel, 1); err != nil { // for the output and LSE
			return err
		}
		pass = p.backward
	}
	row.Seconds, _, err = c.measure(ctx, e, func() error { return pass(c.Device.Kernel, 1) })
	if err != nil || row.Mask != cost.Full || max(row.Queries, row.Keys) > c.spec.Further {
		return err
	}
	both, _, err := c.measure(ctx, e, func() error { return pass(c.Device.Kernel, 2) })
	row.Further = max(both-row.Seconds, row.Seconds/10) // noise may make the difference negative
	return err
}

func (p *call) block(i, n int) attention.Block {
	return attention.Block{K: p.k, V: p.v, Tiles: p.tiles, First: i == 0, Last: i == n-1}
}

func (p *call) forward(kernel attention.Kernel, blocks int) error {
	pass, err := kernel.Forward(p.out.O, p.acc, p.q, p.softmax)
	for i := 0; i < blocks && err == nil; i++ {
		err = pass.Block(p.block(i, blocks))
	}
	if err != nil {
		return err
	}
	return pass.End()
}

func (p *call) backward(kernel attention.Kernel, blocks int) error {
	saved := attention.Saved{O: p.out.O, LSE: p.out.LSE, Delta: p.delta}
	pass, err := kernel.Backward(p.grads.DQ, p.do, p.q, saved, p.softmax)
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

// products lists matrix products of every size.
func (c *calibration) products() (list []operation) {
	s := &OpsSpec{DType: c.spec.DType}
	for _, n := range c.spec.Rows {
		for _, in := range c.spec.Sides {
			for _, out := range c.spec.Sides {
				list = append(list, s.linear("linear", n, in, out), s.linearDX("linear dx", n, in, out),
					s.linearDW("linear dw", n, in, out))
				if c.Device.Machine.MultipliesE4M3() {
					list = append(list, s.scaledLinear("scaled linear", n, in, out))
				}
			}
		}
		if c.spec.Experts.Count > 0 {
			list = append(list, s.grouped(n, c.spec.Experts, c.Device.Machine.MultipliesE4M3())...)
		}
	}
	for _, n := range c.spec.DeltaRows {
		list = append(list, s.rule(n, c.spec.Delta)...)
	}
	return list
}

// passes lists the elementwise operations of `bench ops` at several lengths.
func (c *calibration) passes() (list []operation) {
	for _, tokens := range c.spec.Passes {
		for _, o := range c.opsSpec(tokens).operations() {
			if w, _ := o.work(); w.Rows == 0 {
				list = append(list, o)
			}
		}
	}
	return list
}

// cold is the size of the operands that a CPU's operations rotate through. It exceeds a core's own cache, since a step
// returns to weights and activations only after all others.
const cold = 16 << 20

// operations returns a part that measures operations, with bytes as a plan counts them, and long products again.
func (c *calibration) operations(list []operation) func(context.Context, *cost.Set) error {
	return func(ctx context.Context, set *cost.Set) error {
		bytes, hot := int64(cold), c.effort(c.spec.Heat)
		if c.Device.Machine.Arch != 0 {
			bytes = 0
		}
		return c.eachOperation(ctx, list, bytes, func(o *operation, w cost.Work, run func() error) error {
			seconds, _, err := c.measure(ctx, c.effort(0), run)
			if err == nil && w.Rows > 0 && hot.heat > 0 && seconds >= c.spec.Long {
				seconds, _, err = c.measure(ctx, hot, run)
				hot.heat = c.spec.Heat / 8
			}
			dtype := cost.Name(w.DType)
			if w.Rows > 0 {
				set.Products = append(set.Products, cost.Product{Kind: w.Op, DType: dtype, Rows: w.Rows, In: w.In, Out: w.Out,
					Seconds: seconds})
			} else {
				set.Passes = append(set.Passes, cost.Pass{Op: w.Op, DType: dtype, Bytes: w.Bytes, Seconds: seconds})
			}
			return err
		})
	}
}

func (c *calibration) opsSpec(tokens int) *OpsSpec {
	s := &OpsSpec{}
	s.Default(c.Device.Machine.Device())
	s.DType, s.Params = c.spec.DType, max(s.Params*tokens/s.Tokens, 1024)
	s.Chunk = min(s.Chunk, tokens)
	s.Tokens = tokens
	return s
}

var hostCopies = []int{64 << 10, 1 << 20, 16 << 20}

// host measures copies between device and host, and the host's time to queue a call.
func (c *calibration) host(ctx context.Context, set *cost.Set) error {
	most := slices.Max(hostCopies)
	arena, err := c.Device.Arena("copies", int64(most)+1<<10)
	if err != nil {
		return err
	}
	there := arena.Alloc(tensor.F32, most/4)
	here, err := c.Device.HostVector("copies", tensor.F32, most/4)
	if err != nil {
		return err
	}
	defer c.Device.FreeHostVector(here)
	for _, n := range hostCopies {
		d, h := there.Slice(tensor.Dim, 0, n/4), here.Slice(tensor.Dim, 0, n/4)
		for _, op := range []struct {
			name string
			run  func()
		}{{"upload", func() { c.Device.Store.Upload(d, h) }}, {"download", func() { c.Device.Store.Download(h, d) }}} {
			seconds, _, err := c.measure(ctx, c.effort(0), func() error { op.run(); return nil })
			if err != nil {
				return fmt.Errorf("%s of %s: %w", op.name, readable.Bytes(int64(n)), err)
			}
			set.Passes = append(set.Passes, cost.Pass{Op: op.name, DType: "fp32", Bytes: int64(n), Seconds: seconds})
		}
	}
	set.CallSeconds, err = c.queueing(ctx, there.Slice(tensor.Dim, 0, 1))
	return err
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
func (c *calibration) links(ctx context.Context, set *cost.Set) error {
	if c.World.Size() == 1 {
		return nil
	}
	s := &CommSpec{Sizes: c.spec.Links, Calls: Calls, Iters: minIters, Warmup: 1}
	return c.comm(ctx, s, func(t Transfer) error {
		pair := cost.SameHost
		if t.Transport == "tcp" {
			pair = cost.OtherHost
		}
		set.Links = append(set.Links, cost.Link{Pair: pair, Transport: t.Transport, Call: t.Call, Ranks: c.World.Size(),
			Bytes: t.Bytes, Seconds: t.Seconds})
		return nil
	})
}

// CostTables returns a cost table for a terminal, with the smallest and the largest measurement of each kind of work.
func CostTables(t *cost.Table) []readable.Table {
	var out []readable.Table
	for i := range t.Sets {
		s := &t.Sets[i]
		table := readable.Table{
			Title: fmt.Sprintf("cost table of %s, %d rank%s at once", t.Machine.Device, s.Ranks,
				map[bool]string{false: "s"}[s.Ranks == 1]),
			Head: []string{"work", "from", "µs", "rate", "to", "µs", "rate", "", "points"},
		}
		names, points := pointsOf(s)
		for _, name := range names {
			low, high := slices.MinFunc(points[name], smaller), slices.MaxFunc(points[name], smaller)
			table.Add(name, low.size, readable.Number(1e6*low.seconds), readable.Number(low.rate()), high.size,
				readable.Number(1e6*high.seconds), readable.Number(high.rate()), low.unit, fmt.Sprint(len(points[name])))
		}
		if s.CallSeconds > 0 {
			table.Notes = []string{fmt.Sprintf("the host needs %s µs to queue a call", readable.Number(1e6*s.CallSeconds))}
		}
		out = append(out, table)
	}
	return out
}

// A point is the time of an amount of work, with a unit of 1e9 a second.
type point struct {
	unit, size      string
	amount, seconds float64
}

func (p point) rate() float64 { return p.amount / p.seconds / 1e9 }

func smaller(a, b point) int { return cmp.Compare(a.amount, b.amount) }

// pointsOf returns the points of each kind of work, and the kinds in order.
func pointsOf(s *cost.Set) (names []string, points map[string][]point) {
	points = make(map[string][]point)
	add := func(name, unit, size string, amount, seconds float64) {
		if len(points[name]) == 0 {
			names = append(names, name)
		}
		points[name] = append(points[name], point{unit, size, amount, seconds})
	}
	for _, a := range s.Attention {
		way := map[bool]string{true: "backward", false: "forward"}[a.Backward]
		add(fmt.Sprintf("%s %s, %s, %d, %s", a.Backend, a.DType, a.Mask, a.Dim, way), "GFLOP/s", dims(a.Queries, a.Keys),
			FLOPs(max(a.Tiles, 1)*cost.Tile(a.Mask, a.Queries, a.Keys).Pairs(), a.Heads, a.Dim, a.Dim), a.Seconds)
	}
	for _, p := range s.Products {
		add(p.Kind+" "+p.DType, "GFLOP/s", dims(p.Rows, p.In, p.Out),
			cost.Work{Rows: p.Rows, In: p.In, Out: p.Out}.FLOPs(), p.Seconds)
	}
	for _, p := range s.Passes {
		add(p.Op+" "+p.DType, "GB/s", readable.Bytes(p.Bytes), float64(p.Bytes), p.Seconds)
	}
	for _, k := range s.Links {
		add(fmt.Sprintf("%s, %s", k.Call, k.Transport), "GB/s", readable.Bytes(k.Bytes), float64(k.Bytes), k.Seconds)
	}
	return names, points
}
