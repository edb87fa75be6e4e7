// Package attentiontest is the conformance suite of attention.Kernel. Every kernel passes TestKernel and TestNonFinite,
// the reference included, and callers may rely on their bounds alone:
//
//	attentiontest.TestKernel(t, newRig, attentiontest.Options{DTypes: []tensor.DType{tensor.F32}})
package attentiontest

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Rig is a kernel under test, with its transfers.
type Rig struct {
	Kernel attention.Kernel
	// Sync waits for all queued work; nil: the kernel works at once.
	Sync func(context.Context) error
	// Upload copies buffers to new memory on the kernel's device, and Download copies memory back; nil: the kernel
	// computes on the host. One call takes all buffers of a case, as each transfer of a GPU takes a while to begin.
	Upload   func([]*tensor.Host) ([]tensor.Memory, error)
	Download func(dst []*tensor.Host, src []tensor.Memory) error
}

// Options are the capabilities of a kernel. The suite leaves out cases beyond them, without a skip.
type Options struct {
	DTypes     []tensor.DType // of q, k, v and do: float64, float32, float16, bfloat16
	MaxHeadDim int            // of q and k and of v; 0 for no limit
	// SameHeadDim leaves out cases with different head dims of k and v.
	SameHeadDim bool
	// Leaves selects further cases beyond the kernel, such as bands that a library has no mask for; nil: none.
	Leaves func(Case) bool
	// NoScores means that the kernel adds nothing to scores and keeps none, and returns an error for requests to do so.
	NoScores bool
	// Block is the most queries or keys of one product of the kernel. TestNonFinite allows a NaN to reach rows within
	// that distance of a tile, and rows of its own tile that see a key within that distance of it. 0: products contain
	// the rows of one tile alone.
	Block int
	// Sample runs TestNonFinite with one of so many NaNs and infinities, others from case to case; 0: all.
	Sample int
	// NoDelta means that a backward pass leaves Saved.Delta unset, as it may.
	NoDelta bool
}

func (o Options) takes(c Case) bool {
	switch {
	case o.MaxHeadDim > 0 && max(c.Dim, c.DimV) > o.MaxHeadDim, o.SameHeadDim && c.Dim != c.DimV:
		return false
	case o.NoScores && c.Scores != nil:
		return false
	}
	return o.Leaves == nil || !o.Leaves(c)
}

// TestKernel runs every case on one kernel from newRig.
//
// A result passes when its largest error against float64, over the largest value of the
// tensor, is at most twice the error of the reference in float32, plus a floor of a few
// roundings of a score: the relative error of a probability is the absolute error of its
// score. Rows and keys that nothing touches must keep their bits.
func TestKernel(t *testing.T, newRig func(testing.TB) Rig, opts Options) {
	rig := newRig(t)
	for _, dtype := range opts.DTypes {
		t.Run(dtype.String(), func(t *testing.T) {
			for _, c := range Cases() {
				if opts.takes(c) {
					t.Run(c.Name, func(t *testing.T) { check(t, rig, c, dtype, opts.NoDelta, known(t, c, dtype)) })
				}
			}
		})
	}
	t.Run("faults", func(t *testing.T) { checkFaults(t, rig) })
	if opts.NoScores {
		t.Run("scores are refused", func(t *testing.T) { checkRefused(t, rig, opts.DTypes[0]) })
	}
}

// Check runs one case with inputs of one type.
func Check(t *testing.T, rig Rig, c Case, dtype tensor.DType) {
	t.Helper()
	CheckWith(t, rig, c, dtype, Options{})
}

// CheckWith does what Check does, for a kernel of those capabilities.
func CheckWith(t *testing.T, rig Rig, c Case, dtype tensor.DType, opts Options) {
	t.Helper()
	Prepare(t, []Case{c}, []tensor.DType{dtype}).Check(t, rig, opts)
}

// Prepared cases have their expected results, for several kernels.
type Prepared []preparedCase

type preparedCase struct {
	Case
	dtype tensor.DType
	want  answer
}

// Prepare computes the expected results of cases in parallel, for inputs of each type.
func Prepare(t *testing.T, cases []Case, dtypes []tensor.DType) Prepared {
	t.Helper()
	var all Prepared
	for _, c := range cases {
		for _, dtype := range dtypes {
			all = append(all, preparedCase{Case: c, dtype: dtype})
		}
	}
	must(t, parallel(len(all), func(i int) (err error) {
		all[i].want, err = answerOf(all[i].Case, all[i].dtype)
		return err
	}))
	return all
}

// Check runs the cases on one kernel of those capabilities.
func (p Prepared) Check(t *testing.T, rig Rig, opts Options) {
	t.Helper()
	for _, c := range p {
		check(t, rig, c.Case, c.dtype, opts.NoDelta, c.want)
	}
}

// parallel calls f for 0 to n-1.
func parallel(n int, f func(int) error) error {
	var wg sync.WaitGroup
	errs := make([]error, n)
	for i := range n {
		wg.Go(func() { errs[i] = f(i) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// An answer holds the inputs of a case, the results in float64, the results of the definition in the kernel's own
// arithmetic, and the magnitude of sums of dq and dk.
type answer struct {
	in            inputs
	oracle, plain *set
	size          map[string]float64
}

// answers holds the answers to Cases, by name and type: the suite runs again with other kernels and instructions.
var answers sync.Map

// known returns answerOf a case of Cases, computed once.
func known(t *testing.T, c Case, dtype tensor.DType) answer {
	t.Helper()
	key := fmt.Sprint(c.Name, dtype)
	if a, ok := answers.Load(key); ok {
		return a.(answer)
	}
	a, err := answerOf(c, dtype)
	must(t, err)
	answers.Store(key, a)
	return a
}

func answerOf(c Case, dtype tensor.DType) (a answer, err error) {
	hash := fnv.New64a()
	hash.Write([]byte(c.Name))
	a.in = c.inputs(rand.New(rand.NewPCG(hash.Sum64(), 1)), dtype)
	if a.oracle, err = c.exact(a.in); err != nil {
		return a, err
	}
	a.plain = a.oracle
	if attention.AccumulatorType(dtype) == tensor.F32 {
		a.plain, err = c.computed(Rig{Kernel: attention.NewReference[float32](nil)}, Dense, dtype, a.in)
	}
	a.size = map[string]float64{}
	a.size["dq"], a.size["dk"] = c.termSizes(a.in, a.oracle)
	return a, err
}

// exact returns the results in float64, from one call.
func (c Case) exact(in inputs) (*set, error) {
	c.Calls = 1
	return c.computed(Rig{Kernel: attention.NewReference[float64](nil)}, Dense, tensor.F64, in)
}

// computed returns the tensors of the case after a training step of the rig.
func (c Case) computed(rig Rig, l Layout, dtype tensor.DType, in inputs) (*set, error) {
	s := newSet(c, l, dtype)
	s.fill(in)
	device, err := s.upload(rig)
	if err == nil {
		err = c.run(rig, device)
	}
	if err == nil {
		err = rig.fetch(s.views(), device.views())
	}
	return s, err
}

func check(t *testing.T, rig Rig, c Case, dtype tensor.DType, noDelta bool, want answer) {
	t.Helper()
	tested, err := c.computed(rig, c.Layout, dtype, want.in)
	must(t, err)
	oracle, plain, floor := want.oracle.results(), want.plain.results(), c.floor(want.in, dtype)
	touchedQ, touchedK := c.touched()
	for n, r := range tested.results() {
		if noDelta && r.name == "delta" {
			continue
		}
		rows := touchedQ
		if r.name == "dk" || r.name == "dv" {
			rows = touchedK
		}
		compare(t, r.name, r.view, oracle[n].view, plain[n].view, want.size[r.name], floor, rows)
	}
	tested.checkSentinels(t)
}

// run computes a training step: a forward pass and a backward pass.
func (c Case) run(rig Rig, s *set) error {
	forward, err := rig.Kernel.Forward(s.out, s.acc, s.q, c.softmax(s))
	if err != nil {
		return err
	}
	calls := c.calls()
	for i, call := range calls {
		if err := forward.Block(call.block(s, calls, i)); err != nil {
			return err
		}
		scribble(call.tiles) // the kernel must have its own copy
	}
	if err := forward.End(); err != nil {
		return err
	}
	backward, err := rig.Kernel.Backward(s.grads.DQ, s.do, s.q,
		attention.Saved{O: s.out, LSE: s.acc.LSE, Delta: s.delta}, c.softmax(s))
	if err != nil {
		return err
	}
	calls = c.calls()
	for i, call := range calls {
		if err := c.grads(backward, s, calls, i); err != nil {
			return err
		}
		scribble(call.tiles)
	}
	if rig.Sync != nil {
		return rig.Sync(context.Background())
	}
	return nil
}

// grads adds the i-th block of the backward pass and its fold. The pass ends after the last block, and
// the last fold comes after that.
func (c Case) grads(pass attention.BackwardPass, s *set, calls []call, i int) error {
	call := calls[i]
	b := attention.GradBlock{
		Block: call.block(s, calls, i), KeyGrads: attention.KeyGrads{DK: call.of(s.grads.DK), DV: call.of(s.grads.DV)},
		Fresh: call.part(c.fresh()),
	}
	rows := call.part(c.folded())
	b.FoldNext = rows.Len() > 0
	if err := pass.Block(b); err != nil {
		return err
	}
	if i == len(calls)-1 {
		if err := pass.End(); err != nil {
			return err
		}
	}
	if !b.FoldNext {
		return nil
	}
	src := attention.KeyGrads{DK: call.of(s.other.DK), DV: call.of(s.other.DV)}
	return pass.Fold(attention.Fold{Dst: b.KeyGrads, Lo: rows.Lo, Src: src.Rows(rows.Lo, rows.Hi)})
}

func scribble(tiles []partition.Tile) {
	for i := range tiles {
		tiles[i] = partition.Tile{Q: partition.Range{Lo: -1, Hi: 1 << 30}, K: partition.Range{Lo: -1, Hi: 1 << 30},
			Band: partition.Full()}
	}
}

// floor returns the error that even a perfect order of summation may have: roundings of a score of the
// case's magnitude in the accumulator's type, and two of a 16 bit input's type. In float32 there are
// four on the way to a gradient: the score, its exponential, dP - delta and their product. The
// float64 oracle rounds too, which sixteen roundings of float64 allow for.
func (c Case) floor(in inputs, dtype tensor.DType) float64 {
	magnitude := 1 + c.scoreMagnitude(in)
	switch dtype {
	case tensor.F64:
		return 16 * math.Exp2(-53) * magnitude
	case tensor.F32:
		return 4 * math.Exp2(-24) * magnitude
	case tensor.F16:
		return 2*math.Exp2(-24)*magnitude + 2*math.Exp2(-11)
	case tensor.BF16:
		return 2*math.Exp2(-24)*magnitude + 2*math.Exp2(-8)
	}
	panic(fmt.Sprintf("attentiontest: inputs of %v", dtype))
}

// checkFaults gives wrong arguments, which are errors and never results or panics.
func checkFaults(t *testing.T, rig Rig) {
	c := Case{Batch: 1, SeqQ: 4, SeqK: 4, Heads: 2, KVHeads: 2, Dim: 8, DimV: 8, Softmax: attention.Softmax{Scale: 1}}
	type asked struct {
		*set
		tiles []partition.Tile
		p     attention.Softmax
	}
	for _, f := range []struct {
		name  string
		wrong func(a *asked)
	}{
		{"LSE too short", func(a *asked) { a.acc.LSE = a.acc.LSE.Slice(tensor.Seq, 0, 3) }},
		{"values of another length", func(a *asked) { a.v = a.v.Slice(tensor.Seq, 0, 3) }},
		{"heads no multiple", func(a *asked) {
			a.q, a.acc.O, a.acc.LSE = a.q.Slice(tensor.Heads, 0, 1), a.acc.O.Slice(tensor.Heads, 0, 1),
				a.acc.LSE.Slice(tensor.Heads, 0, 1)
			a.out = a.acc.O
		}},
		{"tile outside", func(a *asked) { a.tiles[0].K.Hi = 5 }},
		{"negative softcap", func(a *asked) { a.p.Softcap = -1 }},
	} {
		t.Run(f.name, func(t *testing.T) {
			device, err := newSet(c, Dense, tensor.F32).upload(rig)
			must(t, err)
			a := &asked{device, []partition.Tile{tile(0, 4, 0, 4, partition.Full())}, c.Softmax}
			f.wrong(a)
			pass, err := rig.Kernel.Forward(a.out, a.acc, a.q, a.p)
			if err == nil {
				err = pass.Block(attention.Block{K: a.k, V: a.v, Tiles: a.tiles, First: true, Last: true})
			}
			if err == nil {
				t.Error("a forward pass took it without an error")
			}
		})
	}
}

// checkRefused holds that a kernel that adds nothing to scores says so, in both passes.
func checkRefused(t *testing.T, rig Rig, dtype tensor.DType) {
	c := Case{Batch: 1, SeqQ: 4, SeqK: 4, Heads: 2, KVHeads: 2, Dim: 8, DimV: 8, Softmax: attention.Softmax{Scale: 1},
		Scores: &Scores{Max: true}}
	s, err := newSet(c, Dense, dtype).upload(rig)
	must(t, err)
	if _, err := rig.Kernel.Forward(s.out, s.acc, s.q, c.softmax(s)); err == nil {
		t.Error("a forward pass took it without an error")
	}
	if _, err := rig.Kernel.Backward(s.grads.DQ, s.do, s.q, attention.Saved{O: s.out, LSE: s.acc.LSE, Delta: s.delta},
		c.softmax(s)); err == nil {
		t.Error("a backward pass took it without an error")
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
