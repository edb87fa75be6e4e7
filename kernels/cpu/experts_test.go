package cpu

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// dealt returns sorted pairs of tokens, each with the k experts that choose returns.
func dealt(c *Kernels, tokens, experts, k int, choose func() []int) kernels.Pairs {
	var choice []int32
	for range tokens {
		for _, e := range choose()[:k] {
			choice = append(choice, int32(e))
		}
	}
	i32 := func(shape ...int) tensor.View { return tensor.New(tensor.I32, shape...) }
	p := kernels.Pairs{Tokens: i32(1, tokens*k, 1, 1), Places: i32(1, tokens, k, 1), Starts: i32(1, experts+1, 1, 1)}
	c.Sort(p, tensor.FromSlice(choice, 1, tokens, k, 1))
	return p
}

// TestExpertRows checks that grouped products have the bits of one product for each token and expert: they do not depend
// on other tokens, on the split of the work, or on whether rows are gathered.
func TestExpertRows(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(3))
	atLevels(t, func(t *testing.T) {
		c, rng := newTestCPU(t), rand.New(rand.NewPCG(1, 1))
		const tokens, experts, k, in, out = 150, 6, 2, 301, 70
		spread, same := func() []int { return rng.Perm(experts) }, func() []int { return []int{4, 1} }
		for _, choose := range []func() []int{spread, same} {
			p := dealt(c, tokens, experts, k, choose)
			x, w := normal(rng, 1, tokens, 1, in), normal(rng, 1, experts*out, 1, in)
			y, one := tensor.New(tensor.F32, 1, tokens*k, 1, out), tensor.New(tensor.F32, 1, tokens*k, 1, out)
			c.GroupLinear(y, kernels.Operand{View: x, ByToken: true}, w, p, false)
			settle(t, c)
			pairsOf("", p).each(0, tokens*k, func(i, e int) {
				token := int(tensor.Data[int32](p.Tokens)[i])
				c.Linear(one.Slice(tensor.Seq, i, i+1), x.Slice(tensor.Seq, token, token+1),
					w.Slice(tensor.Seq, e*out, (e+1)*out), tensor.View{})
			})
			settle(t, c)
			if !slices.Equal(tensor.Data[float32](y), tensor.Data[float32](one)) {
				t.Error("a row of a grouped product has not the bits of its own product")
			}
		}
	})
}

// TestExpertFaults checks that mismatched views panic, and that a choice of no expert poisons the stream.
func TestExpertFaults(t *testing.T) {
	c := newTestCPU(t)
	f := func(shape ...int) tensor.View { return tensor.New(tensor.F32, shape...) }
	i32 := func(shape ...int) tensor.View { return tensor.New(tensor.I32, shape...) }
	byToken := func(v tensor.View) kernels.Operand { return kernels.Operand{View: v, ByToken: true} }
	const tokens, experts, k, in, out = 5, 4, 2, 3, 6
	p := dealt(c, tokens, experts, k, func() []int { return []int{2, 0} })
	rows := func(n int) tensor.View { return f(1, n, 1, out) }
	x, w, wide := f(1, tokens, 1, in), f(1, experts*out, 1, in), f(1, tokens*k, 1, 2*out)
	weight, choice, logits := f(1, tokens, k, 1), i32(1, tokens, k, 1), f(1, tokens, 1, experts)
	none, act, load := tensor.View{}, kernels.SiLU, tensor.New(tensor.F64, 1, 1, 1, experts)
	for name, call := range map[string]func(){
		"places of operand": func() { c.GroupLinear(rows(tokens*k), kernels.Operand{View: x}, w, p, false) },
		"places of result":  func() { c.GroupLinear(rows(tokens), byToken(x), w, p, false) },
		"stacked":           func() { c.GroupLinear(rows(tokens*k), byToken(x), f(1, out, 1, in), p, false) },
		"stacked dx": func() {
			c.GroupLinearDX(f(1, tokens*k, 1, in+1), byToken(rows(tokens)), w, p, false)
		},
		"stacked dw": func() {
			c.GroupLinearDW(f(1, out, 1, in), byToken(rows(tokens)), byToken(x), p, false)
		},
		"type of dw": func() {
			c.GroupLinearDW(tensor.New(tensor.BF16, 1, experts*out, 1, in), byToken(rows(tokens)), byToken(x), p, false)
		},
		"bias":          func() { c.GroupAdd(rows(tokens*k), f(out), p) },
		"sum":           func() { c.GroupSum(f(out), byToken(rows(tokens)), none, p) },
		"weight of sum": func() { c.GroupSum(f(experts*out), byToken(rows(tokens)), f(tokens), p) },
		"dot":           func() { c.GroupDot(weight, kernels.Operand{View: rows(tokens)}, f(experts*out), p) },
		"halves":        func() { c.GroupGLU(rows(tokens*k), rows(tokens*k), act) },
		"halves of gradient": func() {
			c.GroupGLUBackward(rows(tokens*k), rows(tokens*k), weight, rows(tokens*k), rows(tokens*k), weight, p, act)
		},
		"dweight": func() {
			c.GroupGLUBackward(wide, rows(tokens*k), f(tokens), rows(tokens*k), wide, weight, p, act)
		},
		"combine":        func() { c.Combine(rows(tokens+1), none, rows(tokens*k), weight, p) },
		"addend":         func() { c.Combine(rows(tokens), rows(tokens+1), rows(tokens*k), weight, p) },
		"choices":        func() { c.Sort(p, i32(1, tokens, k+1, 1)) },
		"type of places": func() { p := p; p.Places = f(1, tokens, k, 1); c.Sort(p, choice) },
		"too many choices": func() {
			c.Route(f(1, tokens, 9, 1), i32(1, tokens, 9, 1), logits, none, kernels.Router{})
		},
		"correction": func() { c.Route(weight, choice, logits, f(3), kernels.Router{}) },
		"groups": func() {
			c.Route(weight, choice, logits, none, kernels.Router{Groups: 3, Kept: 1})
		},
		"kept groups": func() {
			c.Route(weight, choice, logits, none, kernels.Router{Groups: 4, Kept: 1})
		},
		"dlogits": func() {
			c.RouteBackward(f(1, tokens, 1, 3), weight, choice, logits, none, none, kernels.Router{})
		},
		"dshare": func() {
			c.RouteBackward(logits, weight, choice, logits, f(3), none, kernels.Router{})
		},
		"tokens": func() {
			c.RouteBackward(logits, weight, choice, logits, f(experts), i32(3), kernels.Router{})
		},
		"type of load":    func() { c.Count(f(experts), none, choice, logits, none) },
		"share":           func() { c.Count(load, tensor.New(tensor.F64, 3), choice, logits, none) },
		"tokens of count": func() { c.Count(load, none, choice, logits, i32(3)) },
	} {
		refuses(t, name, "do not fit together", call)
	}
	settle(t, c)
	for _, bad := range []int32{experts, -1} {
		c := newTestCPU(t)
		choices := slices.Repeat([]int32{1}, tokens*k)
		choices[7] = bad
		c.Sort(p, tensor.FromSlice(choices, 1, tokens, k, 1))
		want := fmt.Sprintf("choice %d of token 3 is none of %d experts", bad, experts)
		if err := c.stream.Sync(context.Background()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}
