// Package delta defines the gated delta rule (arXiv:2412.06464) independently of devices: a Kernel computes it over
// segments of a sequence, and Reference is the slow kernel that every fast one must match. A value head has a state
// S [dim, dimV], in which each row replaces the value of its key:
//
//	S <- e^g S;  u = beta (v - S'k);  S <- S + k u';  o = Scale S'q
//
// A segment turns S into M S + R. So each rank summarises its segments as maps M | R, the ranks exchange maps, Compose
// applies them, and each segment starts from its own state:
//
//	err := kernel.Summarize(args) // sets args.Maps
//	err = kernel.Compose(state, maps, before)
//	err = kernel.Forward(args)    // reads args.State and sets args.O
//
// The package is pure: no goroutines, no I/O, no clock, no cgo.
package delta

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto device memory; see package tensor.
type View = tensor.View

// Segment is rows [Lo, Hi) of every sample: one document, or a part of one.
type Segment = partition.Range

// Chunk is the most rows of one product of a Kernel.
const Chunk = 64

// Args are the arguments of a call. Views that it does not use may be zero. K and V have the type of Q. DO, O, DQ, DK
// and DV have it or the type of sums: float32, or float64 if Q is float64. All others have the type of sums. The last
// axis has stride 1; other strides are free.
type Args struct {
	Q, K    View // [batch, seq, keyHeads, dim]; value head h reads key head h / (heads/keyHeads)
	V       View // [batch, seq, heads, dimV]
	G, Beta View // [batch, seq, heads, 1]: the logarithm of the decay, at most 0, and the rate of replacement
	DO      View // like V: the gradient of O
	// State has the states before the segments in Entered, and DState the gradients of those after the ones in Followed:
	// [len(Entered)*batch, heads, dim, dimV], with sample b of the i-th at i*batch + b. Others are 0.
	State, DState View
	Maps, DMaps   View // M | R, and M' | N of gradients, of all segments: [len(Segments)*batch, heads, dim, dim+dimV]
	O             View // like V
	// The gradients of Q, K, V, G and Beta, like these. DQ and DK are sums over the value heads of a key head.
	DQ, DK, DV, DG, DBeta View

	Scale    float64   // of O, usually 1/sqrt(dim). +0 is an error.
	Segments []Segment // ascending, none empty, no overlap; a call reads and writes only their rows

	Entered, Followed []int // ascending places in Segments
}

// Names are the names of Views.
var Names = strings.Fields("q k v g beta do state dstate maps dmaps o dq dk dv dg dbeta")

// Views returns all views, in the order of Names.
func (a *Args) Views() []*View {
	return []*View{&a.Q, &a.K, &a.V, &a.G, &a.Beta, &a.DO, &a.State, &a.DState, &a.Maps, &a.DMaps, &a.O, &a.DQ, &a.DK,
		&a.DV, &a.DG, &a.DBeta}
}

// Kernel computes the rule on one device.
//
// Kernels keep states in the type of sums from chunk to chunk, whatever the type of Q. The decay between two rows is
// the exponential of the sum of G between them: a G of -1e4 in another row must not round it, and no exponent is
// positive.
//
// NaN and infinities propagate: if the definition makes a result NaN or infinite, so does the kernel, not always the
// same of the two. A kernel may break further results of the same segment, sample and key head. In O, these are at most
// Chunk-1 rows before the broken input.
//
// All calls queue work in order on the kernel's stream and do not wait for the device. One goroutine makes them.
// Segments, Entered and Followed may be reused when the call returns.
type Kernel interface {
	// Summarize sets Maps, given K, V, G and Beta. Like all calls, it also needs Q, of which it uses the shape.
	Summarize(a Args) error
	// Forward sets O, given State.
	Forward(a Args) error
	// SummarizeBackward sets DMaps, given DO. If dS is the gradient of the state after a segment, M' dS + N is that of
	// the state before it.
	SummarizeBackward(a Args) error
	// Backward sets DQ, DK, DV, DG and DBeta, given DO, State and DState.
	Backward(a Args) error
	// Compose sets dst to the map that applies earlier, then later: M2 M1 | M2 R1 + R2. If earlier is a state S, it
	// sets dst to the state M2 S + R2. The first axis has any length. dst may be later or earlier.
	Compose(dst, later, earlier View) error
}

var needs = map[string]string{
	"delta summarize":          "q k v g beta maps",
	"delta forward":            "q k v g beta state o",
	"delta summarize backward": "q k v g beta do dmaps",
	"delta backward":           "q k v g beta do state dstate dq dk dv dg dbeta",
}

// Check returns the arguments without the views that a call does not use, and all that is wrong with the others.
// Kernels call it before they queue anything. The calls are "delta summarize", "delta forward", "delta summarize
// backward" and "delta backward".
func (a Args) Check(call string) (Args, error) {
	c := checker{call: call}
	q, v, n := a.Q.Shape(), a.V.Shape(), len(a.Segments)*a.Q.Len(tensor.Batch)
	v[0], v[1] = q[0], q[1]
	row, state, maps := [4]int{q[0], q[1], v[2], 1}, [4]int{n, v[2], q[3], v[3]}, [4]int{n, v[2], q[3], q[3] + v[3]}
	shapes := [][4]int{q, q, v, row, row, v, state, state, maps, maps, v, q, q, v, row, row}
	shapes[6][0], shapes[7][0] = len(a.Entered)*q[0], len(a.Followed)*q[0]
	in, sum := a.Q.DType(), attention.AccumulatorType(a.Q.DType())
	for i, view := range a.Views() {
		types := []tensor.DType{sum}
		switch name := Names[i]; {
		case name == "q":
			types = []tensor.DType{tensor.F64, tensor.F32, tensor.F16, tensor.BF16}
		case name == "k" || name == "v":
			types[0] = in
		case slices.Contains([]string{"do", "o", "dq", "dk", "dv"}, name):
			types = append(types, in)
		}
		if slices.Contains(strings.Fields(needs[call]), Names[i]) {
			c.view(Names[i], *view, shapes[i], types...)
		} else {
			*view = View{}
		}
	}
	if q[2] == 0 || v[2]%q[2] != 0 {
		c.fault("%d value heads are not a multiple of %d key heads", v[2], q[2])
	}
	if math.Float64bits(a.Scale) == 0 {
		c.fault("Scale is not set; it is usually 1/sqrt(dim)")
	}
	end := 0
	for _, s := range a.Segments {
		if s.Lo < end || s.Hi <= s.Lo || s.Hi > q[1] {
			c.fault("segment %v begins before row %d, is empty, or ends after row %d", s, end, q[1])
		}
		end = s.Hi
	}
	for _, list := range [][]int{a.Entered, a.Followed} {
		for i, at := range list {
			if at < 0 || at >= len(a.Segments) || i > 0 && at <= list[i-1] {
				c.fault("place %d in %v, Entered or Followed, is not one of %d segments or does not ascend", at, list,
					len(a.Segments))
			}
		}
	}
	return a, errors.Join(c.faults...)
}

// CheckCompose returns all that is wrong with the arguments of Kernel.Compose, or nil.
func CheckCompose(dst, later, earlier View) error {
	c, want := checker{call: "delta compose"}, later.Shape()
	c.view("later", later, want, tensor.F32, tensor.F64)
	if want[3] <= want[2] {
		c.fault("later has shape %v, which is no map: it needs more columns than rows", want)
	}
	if earlier.Len(tensor.Dim) != want[3] {
		want[3] -= want[2]
	}
	c.view("earlier", earlier, want, later.DType())
	c.view("dst", dst, want, later.DType())
	return errors.Join(c.faults...)
}

type checker struct {
	call   string
	faults []error
}

func (c *checker) fault(format string, args ...any) {
	c.faults = append(c.faults, fmt.Errorf(c.call+": "+format, args...))
}

func (c *checker) view(name string, v View, shape [4]int, types ...tensor.DType) {
	if !slices.Contains(types, v.DType()) || v.Shape() != shape ||
		v.Len(tensor.Dim) > 1 && v.Stride(tensor.Dim) != 1 {
		c.fault("%s is %v; it must have shape %v, type %v and stride 1 on its last axis", name, v, shape, types)
	}
}

// Idle is a Kernel that computes nothing, for loops that only count resources.
type Idle struct{}

// Summarize does nothing.
func (Idle) Summarize(Args) error { return nil }

// Forward does nothing.
func (Idle) Forward(Args) error { return nil }

// SummarizeBackward does nothing.
func (Idle) SummarizeBackward(Args) error { return nil }

// Backward does nothing.
func (Idle) Backward(Args) error { return nil }

// Compose does nothing.
func (Idle) Compose(_, _, _ View) error { return nil }
