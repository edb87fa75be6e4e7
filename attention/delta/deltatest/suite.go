// Package deltatest is the conformance suite of delta.Kernel. Every kernel passes Test, the reference included:
//
//	deltatest.Test(t, newRig, tensor.F32, tensor.BF16)
package deltatest

import (
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/tensor"
)

// Rig is a kernel under test, with its transfers.
type Rig struct {
	Kernel delta.Kernel
	// Upload returns a copy on the device of a dense host view; it may be the view itself.
	Upload func(host tensor.View) tensor.View
	// Download returns a host copy of a device view after all queued work.
	Download func(device tensor.View) (tensor.View, error)
	// Rounds reports that the kernel rounds factors of products to 16 bits for tensor cores, if q has 16 bits. Then errors
	// may be three times as large.
	Rounds bool
}

// bound returns the largest error of a result over its largest value.
func (r Rig) bound(dtype tensor.DType) float64 {
	if r.Rounds && dtype.Size() == 2 {
		return 3 * bounds[dtype]
	}
	return bounds[dtype]
}

// HostRig returns the rig of a kernel of host memory, whose work is done when sync returns.
func HostRig(k delta.Kernel, sync func() error) Rig {
	return Rig{Kernel: k, Upload: func(v tensor.View) tensor.View { return v },
		Download: func(v tensor.View) (tensor.View, error) { return v, sync() }}
}

// Case is one problem of the suite.
type Case struct {
	Name            string // seeds the numbers
	Batch           int
	KeyHeads, Heads int
	Dim, DimV       int
	Segments        []delta.Segment
	Decay           float64 // A of g = -A softplus(x)
	Drop            float64 // g of every fifth row, unless it is 0
	Beta            float64 // factor of beta = sigmoid(x)
	Gaps            bool    // views have gaps between and around rows, and o, dq, dk and dv their other type
	All             bool    // all segments are entered and left with states; else two of three are
}

// states returns the segments with a state before them, and with a gradient of the state after them.
func (c Case) states() (entered, followed []int) {
	for i := range c.Segments {
		if c.All || i%3 != 1 {
			entered = append(entered, i)
		}
		if c.All || i%3 != 2 {
			followed = append(followed, i)
		}
	}
	return entered, followed
}

func cases() (cs []Case) {
	add := func(name string, change func(*Case)) {
		c := Case{name, 1, 1, 1, 16, 16, docs(70), 1, 0, 1, false, false}
		change(&c)
		cs = append(cs, c)
	}
	add("one row", func(c *Case) { c.Segments = docs(1) })
	add("documents of 63, 64, 65 and 1 rows", func(c *Case) { c.Segments = docs(63, 64, 65, 1) })
	add("1000 rows of slow decay", func(c *Case) { c.Segments, c.Decay = docs(1000), 0.05 })
	add("no decay", func(c *Case) { c.Decay = 0 })
	add("strong decay", func(c *Case) { c.Drop = -20 })
	add("decay to zero among slow decay", func(c *Case) { c.Drop, c.Decay = -1e4, 0.05 })
	add("nothing replaced", func(c *Case) { c.Beta = 0 })
	add("two value heads per key head, batch 2", func(c *Case) { c.Batch, c.KeyHeads, c.Heads = 2, 2, 4 })
	add("three value heads per key head, some rows", func(c *Case) {
		c.Batch, c.KeyHeads, c.Heads, c.Gaps = 2, 2, 6, true
		c.Segments = []delta.Segment{{Lo: 3, Hi: 20}, {Lo: 20, Hi: 90}, {Lo: 100, Hi: 101}}
	})
	add("dim 32 and 64", func(c *Case) { c.Dim, c.DimV, c.Gaps = 32, 64, true })
	add("dim 64 and 32", func(c *Case) { c.Dim, c.DimV = 64, 32 })
	add("dim 128", func(c *Case) { c.Dim, c.DimV, c.Decay = 128, 128, 0.05 })
	return cs
}

// docs returns segments of these lengths, side by side.
func docs(lengths ...int) (s []delta.Segment) {
	at := 0
	for _, n := range lengths {
		s = append(s, delta.Segment{Lo: at, Hi: at + n})
		at += n
	}
	return s
}

// Test runs the suite with inputs of each type on one kernel from newRig.
//
// A result passes if its largest error against the reference, over the tensor's largest value, is within the bound of
// the inputs' type. Rows outside the segments and gaps between rows must keep their values.
func Test(t *testing.T, newRig func(testing.TB) Rig, dtypes ...tensor.DType) {
	rig := newRig(t)
	for n, dtype := range dtypes {
		t.Run(dtype.String(), func(t *testing.T) {
			for i, c := range cases() {
				if testing.Short() && n > 0 && i%4 != n { // types share most of a kernel
					continue
				}
				t.Run(c.Name, func(t *testing.T) { Check(t, rig, c, dtype) })
			}
			t.Run("pieces", func(t *testing.T) { checkPieces(t, rig, dtype) })
			t.Run("states in the type of sums", func(t *testing.T) { checkStates(t, rig, dtype) })
			t.Run("not finite", func(t *testing.T) { checkNonFinite(t, rig, dtype) })
		})
	}
	t.Run("faults", func(t *testing.T) { checkFaults(t, rig) })
}

// Check runs one case.
func Check(t *testing.T, rig Rig, c Case, dtype tensor.DType) {
	t.Helper()
	in := c.inputs(dtype)
	s := c.place(t, rig, dtype, in)
	s.run()
	for name, want := range c.answer(t, dtype.String(), in) {
		s.check(name, s.whole[name], want)
	}
}

// The suite names tensors as delta.Names does.
var inputs, results = delta.Names[:8], delta.Names[8:]

// A values holds tensors by name.
type values map[string][]float64

// shape returns the shape of a tensor. The sequence has two rows more than the segments.
func (c Case) shape(name string) [4]int {
	seq := c.Segments[len(c.Segments)-1].Hi + 2
	entered, followed := c.states()
	switch name {
	case "q", "k", "dq", "dk":
		return [4]int{c.Batch, seq, c.KeyHeads, c.Dim}
	case "g", "beta", "dg", "dbeta":
		return [4]int{c.Batch, seq, c.Heads, 1}
	case "state":
		return [4]int{len(entered) * c.Batch, c.Heads, c.Dim, c.DimV}
	case "dstate":
		return [4]int{len(followed) * c.Batch, c.Heads, c.Dim, c.DimV}
	case "maps", "dmaps":
		return [4]int{len(c.Segments) * c.Batch, c.Heads, c.Dim, c.Dim + c.DimV}
	}
	return [4]int{c.Batch, seq, c.Heads, c.DimV}
}

// typeOf returns the type of a tensor, given that of q.
func (c Case) typeOf(name string, dtype tensor.DType) tensor.DType {
	if slices.Contains([]string{"q", "k", "v", "do"}, name) ||
		slices.Contains([]string{"dq", "dk", "dv"}, name) && c.Gaps || name == "o" && !c.Gaps {
		return dtype
	}
	return attention.AccumulatorType(dtype)
}

// inputs draws the inputs, exact in their types. Rows outside the segments are NaN.
func (c Case) inputs(dtype tensor.DType) values {
	hash := fnv.New64a()
	hash.Write([]byte(c.Name))
	rng, in := rand.New(rand.NewPCG(hash.Sum64(), 1)), values{}
	for _, name := range inputs {
		n := c.shape(name)
		for i := range n[0] * n[1] * n[2] * n[3] {
			x, row := rng.NormFloat64(), i/n[3]/n[2]%n[1]
			switch name {
			case "q", "k":
				x /= math.Sqrt(float64(c.Dim))
			case "g":
				if x = -c.Decay * math.Log1p(math.Exp(x)); c.Drop != 0 && row%5 == 3 {
					x = c.Drop
				}
			case "beta":
				x = c.Beta / (1 + math.Exp(-x))
			}
			inside := func(s delta.Segment) bool { return s.Lo <= row && row < s.Hi }
			if !strings.HasSuffix(name, "state") && !slices.ContainsFunc(c.Segments, inside) {
				x = math.NaN()
			}
			in[name] = append(in[name], near.Round(x, c.typeOf(name, dtype)))
		}
	}
	return in
}

// A set holds the tensors of a case on a device. whole are buffers of NaN, in which the views of Args lie.
type set struct {
	testing.TB
	Rig
	delta.Args
	whole map[string]tensor.View
}

func (c Case) place(t testing.TB, rig Rig, dtype tensor.DType, in values) *set {
	s := &set{t, rig, delta.Args{Segments: c.Segments, Scale: 1 / math.Sqrt(float64(c.Dim))}, map[string]tensor.View{}}
	s.Entered, s.Followed = c.states()
	for i, view := range s.Views() {
		name := delta.Names[i]
		n := c.shape(name)
		m := n
		if c.Gaps {
			m = [4]int{n[0] + 1, n[1] + 1, n[2] + 2, n[3] + 3}
		}
		part := func(v tensor.View) tensor.View {
			for axis, x := range n {
				v = v.Slice(tensor.Axis(axis), (m[axis]-x)/2, (m[axis]-x)/2+x)
			}
			return v
		}
		host := tensor.New(c.typeOf(name, dtype), m[:]...)
		near.Encode(host, slices.Repeat([]float64{math.NaN()}, host.Size()))
		if i < len(inputs) {
			near.Encode(part(host), in[name])
		}
		s.whole[name] = rig.Upload(host)
		*view = part(s.whole[name])
	}
	return s
}

func (s *set) must(errs ...error) {
	s.Helper()
	if err := errors.Join(errs...); err != nil {
		s.Fatal(err)
	}
}

// call makes calls. A kernel must have its own copies of the lists.
func (s *set) call(calls ...func(delta.Args) error) {
	s.Helper()
	for _, f := range calls {
		a := s.Args
		a.Segments, a.Entered, a.Followed = slices.Clone(s.Segments), slices.Clone(s.Entered), slices.Clone(s.Followed)
		s.must(f(a))
		clear(a.Segments)
		clear(a.Entered)
		clear(a.Followed)
	}
}

// run makes every call except Compose.
func (s *set) run() {
	s.Helper()
	s.call(s.Kernel.Summarize, s.Kernel.SummarizeBackward, s.Kernel.Forward, s.Kernel.Backward)
}

func (s *set) read(v tensor.View) []float64 {
	s.Helper()
	host, err := s.Download(v)
	s.must(err)
	return near.Decode(host)
}

// answers holds results in float64 by name, type and broken input: the suite runs again with other kernels and
// instructions.
var answers sync.Map

// answer returns the results in float64.
func (c Case) answer(t testing.TB, key string, in values) values {
	t.Helper()
	key += fmt.Sprint(c)
	if a, ok := answers.Load(key); ok {
		return a.(values)
	}
	s := c.place(t, HostRig(delta.Reference{}, func() error { return nil }), tensor.F64, in)
	s.run()
	a := values{}
	for _, name := range results {
		a[name] = s.read(s.whole[name])
	}
	answers.Store(key, a)
	return a
}

// bounds are the errors that a kernel may have, over the largest value of a tensor: some roundings of sums and, with 16
// bits, two of an input.
var bounds = map[tensor.DType]float64{
	tensor.F64: 0x1p-46, tensor.F32: 0x1p-18, tensor.F16: 0x1p-10, tensor.BF16: 0x1p-7,
}

func (s *set) check(name string, v tensor.View, want []float64) {
	s.Helper()
	if err := near.Within(s.read(v), want, near.NonFinite, s.bound(s.Q.DType())); err != nil {
		s.Errorf("%s: %v", name, err)
	}
}

// checkPieces cuts a document, chains the maps of its pieces and holds their results to those of the whole.
func checkPieces(t *testing.T, rig Rig, dtype tensor.DType) {
	c := Case{"pieces", 2, 2, 4, 16, 32, docs(230), 0.05, 0, 1, false, true}
	in := c.inputs(dtype)
	want := c.answer(t, dtype.String(), in)
	c.Segments = docs(30, 65, 1, 134)
	n, none := len(c.Segments), make([]float64, 3*len(in["state"]))
	in["state"], in["dstate"] = append(in["state"], none...), append(none, in["dstate"]...)
	s := c.place(t, rig, dtype, in)
	part := func(v tensor.View, i int) tensor.View { return v.Slice(tensor.Batch, i*c.Batch, (i+1)*c.Batch) }
	compose := func(dst, later, earlier tensor.View) { s.must(rig.Kernel.Compose(dst, later, earlier)) }
	s.call(s.Kernel.Summarize, s.Kernel.SummarizeBackward)
	for i := range n - 1 {
		compose(part(s.State, i+1), part(s.Maps, i), part(s.State, i))
		j := n - 1 - i
		compose(part(s.DState, j-1), part(s.DMaps, j), part(s.DState, j))
	}
	s.call(s.Kernel.Forward, s.Kernel.Backward)
	for _, name := range results[2:] {
		s.check(name, s.whole[name], want[name])
	}

	second := s.read(part(s.State, 1))
	compose(part(s.State, 0), part(s.Maps, 0), part(s.State, 0)) // in place: the state, the earlier and the later map
	if !slices.Equal(s.read(part(s.State, 0)), second) {
		t.Error("a state composed in place differs from one in other memory")
	}
	for i := 1; i < n; i++ {
		compose(part(s.Maps, 0), part(s.Maps, i), part(s.Maps, 0))
		compose(part(s.DMaps, n-1-i), part(s.DMaps, n-1-i), part(s.DMaps, n-i))
	}
	s.check("maps", part(s.Maps, 0), want["maps"])
	s.check("dmaps", part(s.DMaps, 0), want["dmaps"])
}

// checkStates holds M to e^(sum of g) I where beta is 0: in the type of sums, whatever the type of q, k and v.
func checkStates(t *testing.T, rig Rig, dtype tensor.DType) {
	c := Case{"states", 1, 1, 1, 16, 16, docs(1000), 1e-3, 0, 0, false, false}
	in := c.inputs(dtype)
	s := c.place(t, rig, dtype, in)
	s.call(s.Kernel.Summarize, s.Kernel.SummarizeBackward)
	sum := 0.0
	for _, g := range in["g"][:1000] {
		sum += g
	}
	for _, v := range []tensor.View{s.Maps, s.DMaps} {
		for i, x := range s.read(v) {
			row, col, want := i/32, i%32, 0.0
			if row == col {
				want = math.Exp(sum)
			}
			if col < 16 && !(math.Abs(x-want) <= 1e-5) {
				t.Fatalf("M[%d, %d] = %v, want %v", row, col, x, want)
			}
		}
	}
}

// checkNonFinite puts a NaN or an infinity into each input, in the second of three documents.
func checkNonFinite(t *testing.T, rig Rig, dtype tensor.DType) {
	c := Case{"not finite", 2, 2, 4, 16, 16, docs(5, 90, 9), 1, 0, 1, false, true}
	in := c.inputs(dtype)
	clean := c.answer(t, dtype.String(), in)
	for at, name := range inputs {
		for i, value := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
			if testing.Short() && (at+i+int(dtype))%3 > 0 {
				continue
			}
			b, row, n := i%2, []int{94, 5, 80}[i], c.shape(name)
			heads, index := n[2], ((b*n[1]+row)*n[2]+(at+i)%n[2])*n[3]+i*(n[3]-1)/2
			if strings.HasSuffix(name, "state") { // it reaches all rows
				heads, index, row = n[1], ((c.Batch+b)*n[1]+(at+i)%n[1])*n[2]*n[3]+i*37, 0
			}
			keyHead := (at + i) % heads * c.KeyHeads / heads
			bad := maps.Clone(in)
			bad[name] = slices.Clone(in[name])
			bad[name][index] = value
			want := c.answer(t, fmt.Sprint(name, value), bad)
			s := c.place(t, rig, dtype, bad)
			s.run()
			for _, result := range results {
				got, good, bad := s.read(s.whole[result]), clean[result], want[result]
				d, err := near.Of(good, good, near.NonFinite)
				s.must(err)
				for j, x := range got {
					missed := finite(good[j]) && !finite(bad[j]) && finite(x)
					strayed := !(near.Gap(x, good[j], near.NonFinite) <= rig.bound(dtype)*d.Largest) &&
						!c.reaches(b, row, keyHead, result, j)
					if missed || strayed {
						t.Fatalf("%v in %s, batch %d, row %d: %s[%d] is %v, without it %v, in float64 %v", value, name,
							b, row, result, j, x, good[j], bad[j])
					}
				}
			}
		}
	}
}

func finite(x float64) bool { return x-x == 0 }

// reaches reports whether a broken input of the second document, in that sample, row and key head, may break element i
// of a result.
func (c Case) reaches(b, row, keyHead int, result string, i int) bool {
	n := c.shape(result)
	first, second, head, heads := i/n[3]/n[2]/n[1], i/n[3]/n[2]%n[1], i/n[3]%n[2], n[2]
	there := first == b && second >= 5 && second < 95 && (result != "o" || second > row-delta.Chunk)
	if strings.HasSuffix(result, "maps") {
		there, head, heads = first == c.Batch+b, second, n[1]
	}
	return there && head*c.KeyHeads/heads == keyHead
}

// checkFaults gives wrong arguments, which are errors.
func checkFaults(t *testing.T, rig Rig) {
	c := Case{"faults", 1, 2, 4, 16, 16, docs(4, 4), 1, 0, 1, false, true}
	in := c.inputs(tensor.F32)
	one := func(v *tensor.View) { *v = v.Slice(tensor.Batch, 0, 1) }
	wide := tensor.NewView(rig.Upload(tensor.New(tensor.F32, 640)).Memory(), tensor.F32, 0, c.shape("k"),
		[4]int64{640, 64, 32, 2})
	f64 := func(v *tensor.View) { shape := v.Shape(); *v = rig.Upload(tensor.New(tensor.F64, shape[:]...)) }
	for name, wrong := range map[string]func(*set){
		"no scale":              func(s *set) { s.Scale = 0 },
		"no beta":               func(s *set) { s.Beta = tensor.View{} },
		"another dim of k":      func(s *set) { s.K = s.K.Slice(tensor.Dim, 0, 8) },
		"another length of v":   func(s *set) { s.V = s.V.Slice(tensor.Seq, 0, 9) },
		"another type of v":     func(s *set) { f64(&s.V) },
		"another type of g":     func(s *set) { f64(&s.G) },
		"gaps in rows of k":     func(s *set) { s.K = wide },
		"heads no multiple":     func(s *set) { s.Q = s.V.Slice(tensor.Heads, 0, 3); s.K = s.Q },
		"segments that overlap": func(s *set) { s.Segments = []delta.Segment{{Lo: 0, Hi: 5}, {Lo: 4, Hi: 8}} },
		"an empty segment":      func(s *set) { s.Segments = docs(4, 0) },
		"a segment too long":    func(s *set) { s.Segments = docs(4, 7) },
		"a place twice":         func(s *set) { s.Entered = []int{1, 1} },
		"a place below 0":       func(s *set) { s.Followed = []int{-1, 0} },
		"a place too large":     func(s *set) { s.Followed = []int{0, 2} },
		"states of one segment": func(s *set) { one(&s.State); one(&s.DState); one(&s.Maps); one(&s.DMaps) },
	} {
		s := c.place(t, rig, tensor.F32, in)
		wrong(s)
		k := s.Kernel
		for i, f := range []func(delta.Args) error{k.Summarize, k.Forward, k.SummarizeBackward, k.Backward} {
			if f(s.Args) == nil {
				t.Errorf("%s: call %d took it without an error", name, i)
			}
		}
	}
	s := c.place(t, rig, tensor.F32, in)
	for i, x := range [][3]tensor.View{{s.State, s.State, s.State}, {s.State, s.Maps, s.Maps}, {s.State, s.Maps, s.V}} {
		if rig.Kernel.Compose(x[0], x[1], x[2]) == nil {
			t.Errorf("Compose took wrong views %d without an error", i)
		}
	}
}
