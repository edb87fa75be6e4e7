//go:build cuda

package gpu

import (
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// The operations of experts (internal/model.Experts). The host reads no route: grids cover the largest possible work,
// and blocks without work return.

// maxExperts bounds E by the shared memory that every GPU has: of a warp's keys and scores, and of a block's counts.
const maxExperts = 1024

// pairsArgs returns p as an argument of kernels. It panics unless p holds dense int32 views of matching shapes.
func pairsArgs(op string, p kernels.Pairs) *source.Pairs {
	all := []View{p.Tokens, p.Places, p.Starts}
	denseInts(op, all...)
	shape.Must(p.Tokens.Size() == p.Places.Size() && p.Starts.Size() > 1, op, all...)
	return &source.Pairs{
		Tokens: p.Tokens.Addr(), Places: p.Places.Addr(), Starts: p.Starts.Addr(),
		Count: int32(p.Tokens.Size()), Chosen: int32(p.Places.Cols()), Experts: int32(p.Starts.Size() - 1),
	}
}

// denseInts panics unless all views are dense and int32.
func denseInts(op string, vs ...View) {
	for _, v := range vs {
		shape.Must(v.DType() == tensor.I32 && v.IsDense(), op, vs...)
	}
}

// holds panics unless x is dense activations with a row for each place or token.
func holds(op string, x kernels.Operand, p kernels.Pairs) {
	denseActivations(op, x.View)
	rows := p.Tokens.Size()
	if x.ByToken {
		rows = p.Places.Rows()
	}
	shape.Must(x.Rows() == rows, op, x.View, p.Places)
}

// launchShared queues a kernel with dynamic shared memory: at most 48 KiB, which need no leave of the driver.
func (c *Ops) launchShared(program, name string, grid, block cuda.Dim, bytes int, args *cuda.Args) error {
	f, err := c.loader.Function(program, name, 0)
	if err == nil {
		c.stream.Launch(f, cuda.Launch{Grid: grid, Block: block, Shared: bytes}, args)
	}
	return err
}

// routeWarps returns the warps of a block, each with so many bytes of shared memory. extra bytes are the block's own.
func routeWarps(bytes, extra int) int {
	const most = 48 << 10
	return max(1, min(4, (most-extra)/max(bytes, 1)))
}

// checkRoute panics unless the views match. It returns the rows, E and k.
func checkRoute(op string, weight, choice, logits View, r kernels.Router) (rows, n, k int) {
	all := []View{weight, choice, logits}
	rows, n, k = logits.Rows(), logits.Cols(), choice.Cols()
	denseFloats(op, weight, logits)
	denseInts(op, choice)
	shape.Must(choice.Rows() == rows && weight.Size() == choice.Size() && 0 < k && k <= n && n <= maxExperts, op,
		all...)
	if r.Groups > 1 {
		shape.Must(n%r.Groups == 0 && r.Kept <= r.Groups && k <= r.Kept*(n/r.Groups), op, all...)
	}
	return rows, n, k
}

func routerArgs(a *cuda.Args, r kernels.Router) *cuda.Args {
	args := source.Router{Scale: r.Scale, Sigmoid: cInt(r.Sigmoid), Normalize: cInt(r.Normalize),
		Groups: int32(r.Groups), Kept: int32(r.Kept)}
	if r.Scale == 0 {
		args.Scale = 1
	}
	return cuda.Struct(a, &args)
}

// Route chooses k experts of each row of logits [T, E], by falling score plus correction, of equal ones the first, and
// sets their weights. A NaN counts as the largest score. It computes in float64. E is at most 1024.
func (c *Ops) Route(weight, choice, logits, correction View, r kernels.Router) {
	const op = "route"
	rows, n, k := checkRoute(op, weight, choice, logits, r)
	if !correction.IsZero() {
		denseFloats(op, correction)
		shape.Must(correction.Size() == n, op, logits, correction)
	}
	c.stream.Do(op, func() error {
		bytes := 8 * (2*n + r.Groups)
		warps := routeWarps(bytes, 0)
		args := new(cuda.Args).View(weight).View(choice).View(logits).View(correction).Int(rows).Int(n).Int(k)
		return c.launchShared("ops_experts", "route", cuda.Dim{X: ceilDiv(rows, warps)}, cuda.Dim{X: 32, Y: warps},
			warps*bytes, routerArgs(args, r))
	})
}

// ScaleChoices sets y to x times the element of scale of each choice, and unless it is the zero View, terms to x times
// weight. y may be x.
func (c *Ops) ScaleChoices(y, terms, x, weight, choice, scale View) {
	const op = "scale choices"
	n := choice.Size()
	denseFloats(op, y, x, scale)
	denseInts(op, choice)
	shape.Must(y.Size() == n && x.Size() == n, op, y, x, choice)
	if !terms.IsZero() {
		denseFloats(op, terms, weight)
		shape.Must(terms.Size() == n && weight.Size() == n, op, terms, weight, choice)
	}
	c.stream.Do(op, func() error {
		args := new(cuda.Args).View(y).View(terms).View(x).View(weight).View(choice).View(scale).Int(n)
		return c.launchShared("ops_experts", "scale_choices", cuda.Dim{X: ceilDiv(n, 256)}, cuda.Dim{X: 256}, 0, args)
	})
}

// RouteBackward sets dlogits, of the type of activations, given dweight. For the tokens of Count it adds the gradient
// given dshare, float32 [1, 1, 1, E], as that of the softmax of each row, unless that is the zero View.
func (c *Ops) RouteBackward(dlogits, dweight, choice, logits, dshare, tokens View, r kernels.Router) {
	const op = "route backward"
	rows, n, k := checkRoute(op, dweight, choice, logits, r)
	denseActivations(op, dlogits)
	shape.Must(dlogits.Rows() == rows && dlogits.Cols() == n, op, dlogits, logits)
	if !dshare.IsZero() {
		denseFloats(op, dshare)
		shape.Must(dshare.Size() == n, op, dshare, logits)
	}
	checkCounted(op, tokens, rows)
	c.stream.Do(op, func() error {
		bytes := 8 * 2 * n
		warps := routeWarps(bytes, 0)
		args := new(cuda.Args).View(dlogits).View(dweight).View(choice).View(logits).View(dshare).
			View(tokens).Int(rows).Int(n).Int(k)
		return c.launchShared("ops_experts", "route_backward_"+typeNames[dlogits.DType()],
			cuda.Dim{X: ceilDiv(rows, warps)}, cuda.Dim{X: 32, Y: warps}, warps*bytes, routerArgs(args, r))
	})
}

// checkCounted panics unless tokens are int32 for each row, or the zero View.
func checkCounted(op string, tokens View, rows int) {
	if !tokens.IsZero() {
		denseInts(op, tokens)
		shape.Must(tokens.Size() == rows, op, tokens)
	}
}

// Count adds the choices of each expert to load, float64 [1, 1, 1, E], and unless it is the zero View, the softmax of
// each row of logits to share, likewise. It counts the rows with tokens >= 0, or all with the zero View.
func (c *Ops) Count(load, share, choice, logits, tokens View) {
	const op = "count"
	rows, n, k := choice.Rows(), load.Size(), choice.Cols()
	denseInts(op, choice)
	shape.Must(load.DType() == tensor.F64 && load.IsDense() && 0 < n && n <= maxExperts, op, load)
	if !share.IsZero() {
		denseFloats(op, logits)
		shape.Must(share.DType() == tensor.F64 && share.IsDense() && share.Size() == n && logits.Rows() == rows &&
			logits.Cols() == n, op, share, logits, choice)
	}
	checkCounted(op, tokens, rows)
	c.stream.Do(op, func() error {
		const least = 64 // rows of a block
		bytes, extra := 8*2*n, 4*n
		warps, parts := routeWarps(bytes, extra), min(ceilDiv(rows, least), OpsWorkspace/(8*2*n), 512)
		args := new(cuda.Args).Addr(c.work()).View(choice).View(logits).View(tokens).Int(int(cInt(!share.IsZero()))).
			Int(rows).Int(n).Int(k)
		if err := c.launchShared("ops_experts", "count_parts", cuda.Dim{X: parts}, cuda.Dim{X: 32, Y: warps},
			warps*bytes+extra, args); err != nil || parts == 0 {
			return err
		}
		args = new(cuda.Args).View(load).View(share).Addr(c.work()).Int(parts).Int(n)
		return c.launch("ops_experts", "count_add", cuda.Dim{X: ceilDiv(2*n, 128)}, cuda.Dim{X: 128}, args)
	})
}

// Sort sets p for the choices.
func (c *Ops) Sort(p kernels.Pairs, choice View) {
	const op, threads, warps = "sort", 256, 8 // SORT_WARPS in ops_experts.cu
	to := pairsArgs(op, p)
	denseInts(op, choice)
	n, k, experts := choice.Size(), choice.Cols(), int(to.Experts)
	shape.Must(n == int(to.Count) && k == int(to.Chosen) && experts <= maxExperts, op, choice, p.Places, p.Starts)
	c.stream.Do(op, func() error {
		chunk := 2048 // pairs
		for ceilDiv(n, chunk) > (OpsWorkspace/4-experts)/experts {
			chunk *= 2
		}
		chunks, totals := ceilDiv(n, chunk), c.work()
		counts := totals + uint64(4*experts)
		args := new(cuda.Args).Addr(counts).View(choice).Int(n).Int(chunk).Int(experts)
		block := cuda.Dim{X: threads}
		if err := c.launchShared("ops_experts", "sort_count", cuda.Dim{X: chunks}, block, 4*experts, args); err != nil {
			return err
		}
		args = new(cuda.Args).Addr(counts).Addr(totals).Int(chunks)
		if err := c.launchShared("ops_experts", "sort_scan", cuda.Dim{X: experts}, cuda.Dim{X: 32}, 0, args); err != nil {
			return err
		}
		args = new(cuda.Args).View(p.Starts).Addr(totals).Int(experts)
		if err := c.launchShared("ops_experts", "sort_starts", cuda.Dim{X: 1}, cuda.Dim{X: 32}, 0, args); err != nil {
			return err
		}
		args = new(cuda.Args).View(p.Tokens).View(p.Places).View(p.Starts).Addr(counts).View(choice).Int(n).Int(k).
			Int(chunk).Int(experts)
		return c.launchShared("ops_experts", "sort_place", cuda.Dim{X: chunks}, block, 4*warps*experts, args)
	})
}

// groupNames begin the names of plain kernels.
var groupNames = [...]string{source.GroupForward: "group_linear_", source.GroupDX: "group_linear_dx_",
	source.GroupDW: "group_linear_dw_"}

// A groupCall is a product of stacked matrices: y = x w^T, dx = dy w, or dw = dy^T x.
type groupCall struct {
	kind       source.GroupProduct
	to         View
	a, b       kernels.Operand // x or dy; w or x
	p          kernels.Pairs
	out, in    int
	accumulate bool
}

// GroupLinear sets y [P, out] to each row of x [P or T, in] times the transpose of its expert's rows of w, or adds it.
func (c *Ops) GroupLinear(y View, x kernels.Operand, w View, p kernels.Pairs, accumulate bool) {
	c.groupProduct("group linear", groupCall{source.GroupForward, y, x, kernels.Operand{View: w}, p, y.Cols(), x.Cols(),
		accumulate})
}

// GroupLinearDX sets dx [P, in] to each row of dy [P or T, out] times its expert's rows of w, or adds it.
func (c *Ops) GroupLinearDX(dx View, dy kernels.Operand, w View, p kernels.Pairs, accumulate bool) {
	c.groupProduct("group linear dx", groupCall{source.GroupDX, dx, dy, kernels.Operand{View: w}, p, dy.Cols(),
		dx.Cols(), accumulate})
}

// GroupLinearDW sets each expert's rows of dw, float32, to its rows of dy transposed times those of x, or adds it.
func (c *Ops) GroupLinearDW(dw View, dy, x kernels.Operand, p kernels.Pairs, accumulate bool) {
	c.groupProduct("group linear dw", groupCall{source.GroupDW, dw, dy, x, p, dy.Cols(), x.Cols(), accumulate})
}

// stacked returns weights as an operand.
func stacked(w kernels.Scaled) kernels.Operand {
	return kernels.Operand{View: w.View, Factors: w.Factors}
}

// check panics unless the views match. It returns the pairs.
func (g *groupCall) check(op string) *source.Pairs {
	pairs := pairsArgs(op, g.p)
	if !g.a.Factors.IsZero() {
		denseActivations(op, g.to)
		shape.GroupScaledLinear(op, g.to, g.a, kernels.Scaled{View: g.b.View, Factors: g.b.Factors}, g.p)
		return pairs
	}
	holds(op, g.a, g.p)
	matrices, experts := g.b.View, int(pairs.Experts)
	if g.kind == source.GroupDW {
		holds(op, g.b, g.p)
		matrices = g.to
		denseActivations(op, g.a.View, g.b.View)
		denseFloats(op, g.to)
	} else {
		denseActivations(op, g.to, g.a.View, g.b.View)
		shape.Must(g.to.Rows() == int(pairs.Count), op, g.to, g.p.Places)
	}
	shape.Must(matrices.Rows() == experts*g.out && matrices.Cols() == g.in, op, g.to, g.a.View, g.b.View, g.p.Starts)
	return pairs
}

// groupProduct queues a product: on Hopper by its own kernels, if they support it.
func (c *Ops) groupProduct(op string, g groupCall) {
	pairs := g.check(op)
	if g.to.Size() == 0 || c.groupOnHopper(g.onHopper()) {
		return
	}
	c.stream.Do(op, func() error {
		t := g.a.DType()
		name, side, block, bytes := groupNames[g.kind]+typeNames[t], 128, cuda.Dim{X: 256}, 48<<10
		if t == tensor.F32 || g.out%8 != 0 || g.in%8 != 0 || !aligned16(g.to, g.a.View, g.b.View) {
			name, side, block, bytes = groupNames[g.kind]+"any_"+typeNames[t], 64, cuda.Dim{X: 16, Y: 16}, 2*16*65*4
		}
		grid := cuda.Dim{X: ceilDiv(g.to.Cols(), side)}
		if g.kind == source.GroupDW {
			grid.X, grid.Y = grid.X*ceilDiv(g.out, side), int(pairs.Experts)
		} else {
			grid.X *= int(pairs.Count)/side + int(pairs.Experts)
		}
		args := new(cuda.Args).View(g.to)
		for _, x := range []kernels.Operand{g.a, g.b} {
			args.View(x.View)
			if x.ByToken {
				args.View(g.p.Tokens)
			} else {
				args.Addr(0)
			}
		}
		cuda.Struct(args, pairs).Int(g.out).Int(g.in).Int(int(cInt(g.accumulate)))
		return c.launchShared("ops_group", name, grid, block, bytes, args)
	})
}

// experts names the program with most kernels of this file.
const experts = "ops_experts"

// rowsAtOnce is ROWS in ops_experts.cu: rows of a block, a warp each.
const rowsAtOnce = 8

// rowwise queues a kernel by rows of n elements. vs must be aligned for its vectors.
func (c *Ops) rowwise(op, program, kernel, name string, grid func(lanes int) cuda.Dim, n int, args *cuda.Args,
	vs ...View) {
	c.stream.Do(op, func() error {
		t := vs[0].DType()
		lanes := lanesOf(t)
		if n%lanes != 0 || !aligned16(vs...) {
			kernel, lanes = kernel+"any_", 1
		}
		return c.launchShared(program, kernel+name+typeNames[t], grid(lanes), cuda.Dim{X: 32, Y: rowsAtOnce},
			32*rowsAtOnce*lanes*4, args) // shared memory for group_sum
	})
}

// eachPlace returns the grid with a warp for each row.
func eachPlace(rows int) func(int) cuda.Dim {
	return func(int) cuda.Dim { return cuda.Dim{X: ceilDiv(rows, rowsAtOnce)} }
}

// GroupAdd adds to each row of y [P, n] its expert's row of bias, float32 [1, 1, 1, E*n].
func (c *Ops) GroupAdd(y, bias View, p kernels.Pairs) {
	const op = "group add"
	pairs, n := checkBias(op, bias, kernels.Operand{View: y}, View{}, p)
	args := cuda.Struct(new(cuda.Args).View(y).View(bias), pairs).Int(n)
	c.rowwise(op, experts, "group_add_", "", eachPlace(y.Rows()), n, args, y, bias)
}

// checkBias panics unless bias, float32 [1, 1, 1, E*n], dy [P or T, n], and weight, float32 for each pair or the zero
// View, match.
func checkBias(op string, bias View, dy kernels.Operand, weight View, p kernels.Pairs) (pairs *source.Pairs, n int) {
	pairs, n = pairsArgs(op, p), dy.Cols()
	holds(op, dy, p)
	denseFloats(op, bias)
	shape.Must(bias.Size() == int(pairs.Experts)*n, op, bias, dy.View, p.Starts)
	checkWeight(op, weight, p)
	return pairs, n
}

func checkWeight(op string, weight View, p kernels.Pairs) {
	if !weight.IsZero() {
		denseFloats(op, weight)
		shape.Must(weight.Size() == p.Places.Size(), op, weight, p.Places)
	}
}

// GroupSum adds to each expert's row of sum, float32 [1, 1, 1, E*n], the sum of its rows of dy [P or T, n], each times
// its weight unless that is the zero View.
func (c *Ops) GroupSum(sum View, dy kernels.Operand, weight View, p kernels.Pairs) {
	const op = "group sum"
	pairs, n := checkBias(op, sum, dy, weight, p)
	grid := func(lanes int) cuda.Dim { return cuda.Dim{X: ceilDiv(n, 32*lanes), Y: int(pairs.Experts)} }
	args := new(cuda.Args).View(sum).View(dy.View).Int(int(cInt(dy.ByToken))).View(weight)
	c.rowwise(op, experts, "group_sum_", "", grid, n, cuda.Struct(args, pairs).Int(n), dy.View)
}

// GroupDot adds to the element of each pair in dweight the product of its rows of dy [P or T, n] and of bias.
func (c *Ops) GroupDot(dweight View, dy kernels.Operand, bias View, p kernels.Pairs) {
	const op = "group dot"
	pairs, n := checkBias(op, bias, dy, dweight, p)
	args := new(cuda.Args).View(dweight).View(dy.View).Int(int(cInt(dy.ByToken))).View(bias)
	c.rowwise(op, experts, "group_dot_", "", eachPlace(int(pairs.Count)), n, cuda.Struct(args, pairs).Int(n), dy.View,
		bias)
}

// GroupGLU sets y [P, I] to act(gate) * up, the halves of the columns of x [P, 2*I].
func (c *Ops) GroupGLU(y, x View, act kernels.Activation) {
	const op = "group glu"
	rows, n := checkGLU(op, y, x, act)
	args := new(cuda.Args).View(y).View(x).Int(rows).Int(n)
	c.rowwise(op, experts, "group_"+gluNames[act], "", eachPlace(rows), n, args, y, x)
}

// checkGLU panics unless the views match. It returns the rows and columns of y.
func checkGLU(op string, y, x View, act kernels.Activation) (rows, n int) {
	rows, n = y.Rows(), y.Cols()
	denseActivations(op, y, x)
	shape.Must(x.Rows() == rows && x.Cols() == 2*n && gluNames[act] != "", op, y, x)
	return rows, n
}

// GroupGLUBackward sets, for y of GroupGLU and the weight w of a place's pair, dweight to the sum of da*y over I, dx to
// the gradient of x given w*da as that of y, and wy to w*y. dx may be x, and wy may be da.
func (c *Ops) GroupGLUBackward(dx, wy, dweight, da, x, weight View, p kernels.Pairs, act kernels.Activation) {
	const op = "group glu backward"
	pairs := pairsArgs(op, p)
	rows, n := checkGLU(op, da, x, act)
	denseActivations(op, dx, wy)
	shape.Must(rows == int(pairs.Count) && wy.Size() == da.Size() && dx.Size() == x.Size(), op, dx, wy, da, x)
	denseFloats(op, dweight, weight)
	checkWeight(op, dweight, p)
	checkWeight(op, weight, p)
	args := new(cuda.Args).View(dx).View(wy).View(dweight).View(da).View(x).View(weight)
	c.rowwise(op, experts, "group_"+gluNames[act], "backward_", eachPlace(rows), n, cuda.Struct(args, pairs).Int(n), dx,
		wy, da, x)
}

// GroupLinearGLU does GroupLinear, to x, and GroupGLU in one pass. It returns false if the kernels do not support that.
func (c *Ops) GroupLinearGLU(y, x View, from kernels.Operand, w kernels.Scaled, p kernels.Pairs,
	act kernels.Activation) bool {
	const op = "group linear glu"
	g := groupCall{source.GroupForward, x, from, stacked(w), p, x.Cols(), from.Cols(), false}
	g.check(op)
	checkGLU(op, y, x, act)
	h := g.onHopper()
	h.Product, h.Gated = source.GroupGLU, y
	return act == kernels.SiLU && c.groupOnHopper(h)
}

// GroupLinearDXGLUBackward does GroupLinearDX, to wy, and GroupGLUBackward, with dx in place of x, in one pass. It
// returns false if the kernels do not support that.
func (c *Ops) GroupLinearDXGLUBackward(x, wy, dweight View, dy kernels.Operand, w kernels.Scaled, weight View,
	p kernels.Pairs, act kernels.Activation) bool {
	const op = "group linear dx glu backward"
	g := groupCall{source.GroupDX, wy, dy, stacked(w), p, dy.Cols(), wy.Cols(), false}
	g.check(op)
	checkGLU(op, wy, x, act)
	denseFloats(op, dweight, weight)
	checkWeight(op, dweight, p)
	checkWeight(op, weight, p)
	n, parts, h := p.Places.Size(), ceilDiv(wy.Cols(), source.HopperGroupShapes[0].Width), g.onHopper()
	h.Product, h.Out, h.Gated, h.Weights, h.Sums = source.GroupGLUDX, x, wy, c.work(), c.work()+uint64(4*n)
	l, ok := h.Hopper()
	if !ok || c.loader.Device().Arch != hopperArch || act != kernels.SiLU || 4*n*(1+parts) > OpsWorkspace {
		return false
	}
	c.stream.Do("group glu_dx", func() error {
		grid, block := cuda.Dim{X: ceilDiv(n, 256)}, cuda.Dim{X: 256}
		args := new(cuda.Args).Addr(h.Weights).View(weight).View(p.Places).Int(n)
		if err := c.launch(experts, "group_weights", grid, block, args); err != nil {
			return err
		}
		if err := c.launchGroup(&l); err != nil {
			return err
		}
		args = new(cuda.Args).View(dweight).Addr(h.Sums).View(p.Places).Int(n).Int(parts)
		return c.launch(experts, "group_sums", grid, block, args)
	})
	return true
}

// Combine sets out [T, n] to add plus the sum over a token's choices, in their order, of weight times its row of y
// [P, n]. Without weight, the zero View, it is 1; without add, 0. out may be add.
func (c *Ops) Combine(out, add, y, weight View, p kernels.Pairs) {
	const op = "combine"
	pairs, rows, n := pairsArgs(op, p), out.Rows(), y.Cols()
	vs := []View{out, y}
	if !add.IsZero() {
		vs = append(vs, add)
	}
	denseActivations(op, vs...)
	shape.Must(y.Rows() == int(pairs.Count) && out.Cols() == n && rows == p.Places.Rows(), op, out, y, p.Places)
	shape.Must(add.IsZero() || add.Rows() == rows && add.Cols() == n, op, out, add)
	checkWeight(op, weight, p)
	c.stream.Do(op, func() error {
		kernel, lanes := "combine_", lanesOf(y.DType())
		if n%lanes != 0 || !aligned16(vs...) {
			kernel, lanes = "combine_any_", 1
		}
		threads := min(256, max(1, ceilDiv(n, 32*lanes))*32)
		args := cuda.Struct(new(cuda.Args).View(out).View(add).View(y).View(weight), pairs).Int(n)
		return c.launch("ops_experts", kernel+typeNames[y.DType()], cuda.Dim{X: rows}, cuda.Dim{X: threads}, args)
	})
}
