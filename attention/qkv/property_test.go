package qkv_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/qkv"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

const poolElements = 2048

// pool is the memories that random tensors lie in, full of random numbers.
func pool(rng *rand.Rand) []*tensor.Host {
	mems := make([]*tensor.Host, 3)
	for i := range mems {
		v := tensor.New(tensor.F32, poolElements)
		for j := range tensor.Data[float32](v) {
			tensor.Data[float32](v)[j] = float32(rng.NormFloat64())
		}
		mems[i] = v.Memory().(*tensor.Host)
	}
	return mems
}

// randomQKV is three tensors in a random layout, at random places, and then, more often than
// not, with something about them changed that makes a layout wrong, or only seem so.
func randomQKV(rng *rand.Rand, mems []*tensor.Host) qkv.QKV {
	for {
		n := qkv.LayoutDims{Batch: 1 + rng.IntN(3), SeqKV: 1 + rng.IntN(3), KVHeads: 1 + rng.IntN(3), HeadDim: 1 + rng.IntN(4)}
		n.SeqQ, n.Heads, n.HeadDimV = n.SeqKV, n.KVHeads*(1+rng.IntN(3)), n.HeadDim
		if rng.IntN(4) == 0 {
			n.SeqQ = 1 + rng.IntN(4)
		}
		if rng.IntN(4) == 0 {
			n.HeadDimV = 1 + rng.IntN(4)
		}
		all := qkv.Layouts()
		offset := func() int64 { return int64(rng.IntN(2) * rng.IntN(200)) }
		base := func(i int) qkv.Base { return qkv.Base{Memory: mems[i], Offset: offset()} }
		first := rng.IntN(3)
		at := qkv.Bases{Q: base(0), K: base(first), V: base(rng.IntN(3))}
		t, err := qkv.Place(all[rng.IntN(len(all))], tensor.F32, at, n)
		if err != nil {
			continue
		}
		for range rng.IntN(3) {
			change(rng, &t, mems)
		}
		if inside(&t.Q) && inside(&t.K) && inside(&t.V) {
			return t
		}
	}
}

// change alters one thing about one of the tensors.
func change(rng *rand.Rand, t *qkv.QKV, mems []*tensor.Host) {
	three := []*qkv.TensorDesc{&t.Q, &t.K, &t.V}
	d, a, b := three[rng.IntN(3)], rng.IntN(5), rng.IntN(5)
	switch rng.IntN(11) {
	case 0: // a permuted view: the strides of two axes change places
		d.Strides[a], d.Strides[b] = d.Strides[b], d.Strides[a]
	case 1: // a shift
		d.Offset += int64(rng.IntN(9) - 4)
	case 2: // a broadcast axis
		d.Strides[a] = 0
	case 3: // every second element
		d.Strides[a] *= 2
	case 4: // backwards
		d.Offset += int64(d.Shape[a]-1) * d.Strides[a]
		d.Strides[a] = -d.Strides[a]
	case 5: // other memory
		d.Memory = mems[rng.IntN(3)]
	case 6: // one tensor in the place of another
		d.Offset, d.Memory = three[a%3].Offset, three[a%3].Memory
	case 7: // a part of all three: the batches or positions of a larger buffer
		a %= 2
		for _, d := range three {
			if d.Shape[a] > 1 {
				d.Offset += d.Strides[a]
				d.Shape[a]--
			}
		}
	case 8: // a part of the channels
		if t.Q.Shape[4] > 1 {
			t.Q.Shape[4]--
			t.K.Shape[4]--
		}
	case 9: // a length that the others do not have
		d.Shape[a] = 1 + rng.IntN(4)
	case 10: // any strides
		for a := range d.Strides {
			d.Strides[a] = int64(rng.IntN(25))
		}
	}
}

func inside(d *qkv.TensorDesc) bool {
	lo, hi := d.Offset, d.Offset
	for a, n := range d.Shape {
		lo += min(0, int64(n-1)*d.Strides[a])
		hi += max(0, int64(n-1)*d.Strides[a])
	}
	return lo >= 0 && hi < poolElements
}

// read copies the elements one by one, by their addresses, to dense [batch, seq, heads, dim].
func read(d *qkv.TensorDesc) tensor.View {
	out := tensor.New(d.DType, d.Shape[0], d.Shape[1], d.Shape[2]*d.Shape[3], d.Shape[4])
	size := int64(d.DType.Size())
	from, to := hostBytes(d.Memory), tensor.Bytes(out)
	for i, c := range coords(d.Shape) {
		at := element(d, c).at * size
		copy(to[int64(i)*size:int64(i+1)*size], from[at:])
	}
	return out
}

func hostBytes(m tensor.Memory) []byte {
	return tensor.Bytes(tensor.Dense(m, tensor.U8, 0, [4]int{1, 1, 1, int(m.Bytes())}))
}

func readView(v tensor.View) tensor.View {
	t := qkv.Describe(v, v, v)
	return read(&t.K)
}

// attend is out and lse of causal attention, as bits, [batch, seq, heads, dimV + 1].
func attend(t testing.TB, kernel attention.Kernel, sync func(), q, k, v tensor.View) [][]uint32 {
	t.Helper()
	n := q.Shape()
	n[3] = v.Len(tensor.Dim)
	acc := attention.Partial{O: tensor.New(tensor.F32, n[0], n[1], n[2], n[3]), LSE: tensor.New(tensor.F32, n[0], n[1], n[2], 1)}
	tiles := []partition.Tile{{
		Q: partition.Range{Hi: q.Len(tensor.Seq)}, K: partition.Range{Hi: k.Len(tensor.Seq)},
		Band: partition.Band{Lo: -partition.Unbounded, Hi: k.Len(tensor.Seq) - q.Len(tensor.Seq)},
	}}
	pass, err := kernel.Forward(acc.O, acc, q, attention.Softmax{Scale: 0.5})
	if err == nil {
		err = pass.Block(attention.Block{K: k, V: v, Tiles: tiles, First: true, Last: true})
	}
	if err == nil {
		err = pass.End()
	}
	if err != nil {
		t.Fatal(err)
	}
	sync()
	var rows [][]uint32
	for i := range q.Rows() * n[2] {
		row := []uint32{math.Float32bits(tensor.Data[float32](acc.LSE)[i])}
		for _, x := range tensor.Data[float32](acc.O)[i*n[3] : (i+1)*n[3]] {
			row = append(row, math.Float32bits(x))
		}
		rows = append(rows, row)
	}
	return rows
}

// attendGroups is attend, one KV head at a time, of tensors that a layout has placed.
func attendGroups(t testing.TB, kernel attention.Kernel, sync func(), p *qkv.QKV) [][]uint32 {
	heads, r := p.Q.Shape[2]*p.Q.Shape[3], p.Q.Shape[3]
	rows := make([][]uint32, p.Q.Shape[0]*p.Q.Shape[1]*heads)
	for g := range p.Groups() {
		q, k, v := p.Group(g)
		for i, row := range attend(t, kernel, sync, q, k, v) {
			rows[i/r*heads+g*r+i%r] = row
		}
	}
	return rows
}

// replace is q, k and v as a kernel finds them that is told no strides.
func replace(t testing.TB, l qkv.Layout, p *qkv.QKV) qkv.QKV {
	t.Helper()
	n, ok := p.Dims()
	if !ok {
		t.Fatalf("%v found for tensors without lengths", l)
	}
	again, err := qkv.Place(l, p.Q.DType, p.Bases(), n)
	if err != nil {
		t.Fatal(err)
	}
	return again
}

// TestLayoutProperty holds detection against the address of every element: of random tensors
// it finds exactly the layouts that are right, and attention through the layout found, or
// through that of the copies, is attention of dense copies, bit for bit.
func TestLayoutProperty(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 12))
	mems := pool(rng)
	kernel, sync := attention.NewReference[float32](nil), func() {}
	fits := map[qkv.Fit]int{}
	found := map[qkv.Layout]int{}
	for i := range 3000 {
		p := randomQKV(rng, mems)
		l, fit := checkDetection(t, &p)
		fits[fit]++
		if q, k, v, ok := p.Views(); ok && sameLengths(&p) {
			checkCanonical(t, q, k, v)
		}
		if t.Failed() {
			t.Fatalf("case %d: %+v", i, p)
		}
		if fit == qkv.Strided || p.Q.Shape[0] != p.K.Shape[0] {
			continue
		}
		found[l]++
		again := replace(t, l, &p)
		want := attend(t, kernel, sync, read(&p.Q), read(&p.K), read(&p.V))
		if !slices.EqualFunc(attendGroups(t, kernel, sync, &again), want, slices.Equal) {
			t.Fatalf("case %d: attention through %v differs from attention of a dense copy: %+v", i, l, p)
		}
	}
	for _, f := range []qkv.Fit{qkv.Strided, qkv.Inside, qkv.Exact} {
		if fits[f] < 150 {
			t.Errorf("only %d random cases are %v", fits[f], f)
		}
	}
	for _, p := range []qkv.Packing{qkv.Separate, qkv.QKV3HD, qkv.QKVH3D, qkv.KV2HD,
		qkv.KVH2D, qkv.QKVHeads, qkv.QKVGroups} {
		if l := (qkv.Layout{Q: qkv.SBHD, KV: qkv.SBHD, Packing: p}); found[l] == 0 {
			t.Errorf("no random case is %v", l)
		}
	}
}

// checkDetection holds Layouts, Detect, DetectAs and Verify against the definition.
func checkDetection(t *testing.T, p *qkv.QKV) (qkv.Layout, qkv.Fit) {
	t.Helper()
	want := describing(p)
	if got := p.Layouts(); !slices.Equal(got, want) {
		t.Errorf("layouts %v found, %v are right", got, want)
	}
	l, fit := p.Detect()
	if (fit != qkv.Strided) != (len(want) > 0) || fit != qkv.Strided && !slices.Contains(want, l) {
		t.Errorf("%v found (%v), right are %v", l, fit, want)
	}
	if fit == qkv.Exact && !startsItsMemory(l, p) {
		t.Errorf("%v found exact although it starts inside a buffer", l)
	}
	for _, l := range qkv.Layouts() {
		right := slices.Contains(want, l)
		if err := p.Verify(l); (err == nil) != right {
			t.Errorf("declared %v: %v, right are %v", l, err, want)
		}
		if as, fit := p.DetectAs(l.Q, l.KV); right && fit == qkv.Strided ||
			fit != qkv.Strided && (as.Q != l.Q || as.KV != l.KV || !slices.Contains(want, as)) {
			t.Errorf("%v found (%v) for %v and %v, right are %v", as, fit, l.Q, l.KV, want)
		}
	}
	return l, fit
}

// checkCanonical demands that a second pass after copies knows the layout, and that what is
// read through it is what the views hold.
func checkCanonical(t *testing.T, q, k, v tensor.View) {
	t.Helper()
	_, fit := qkv.Detect(q, k, v)
	c, err := qkv.Canonicalize(q, k, v, readView)
	if err != nil {
		t.Error(err)
		return
	}
	if copied := c.Copied != [3]bool{}; copied == (fit == qkv.Exact) {
		t.Errorf("views that are %v: copied is %t", fit, copied)
	}
	was, is := qkv.Describe(q, k, v), qkv.Describe(c.Q, c.K, c.V)
	again := replace(t, c.Layout, &is)
	for _, x := range []struct{ from, to *qkv.TensorDesc }{{&was.Q, &again.Q}, {&was.K, &again.K}, {&was.V, &again.V}} {
		if !slices.Equal(tensor.Bytes(read(x.from)), tensor.Bytes(read(x.to))) {
			t.Errorf("what %v holds after copies is not what the views hold", c.Layout)
		}
	}
}

// FuzzDetect holds detection against the definition for any lengths, offsets and strides.
func FuzzDetect(f *testing.F) {
	mems := []tensor.Memory{tensor.NewHost(4 * poolElements), tensor.NewHost(4 * poolElements)}
	seed := func(shapes []byte, offsets []uint16, strides []int16) {
		data := slices.Clone(shapes)
		for _, x := range offsets {
			data = append(data, byte(x), byte(x>>8))
		}
		for _, x := range strides {
			data = append(data, byte(x), byte(x>>8))
		}
		f.Add(data)
	}
	// batch, q length, kv length, groups, heads of one, dim, dimV, memories of q, k, v.
	seed([]byte{1, 2, 2, 1, 3, 3, 3, 0, 0, 0}, []uint16{0, 16, 20}, []int16{24, 48, 16, 4, 1, 24, 48, 4, 4, 1, 24, 48, 4, 4, 1})
	seed([]byte{1, 2, 2, 0, 0, 3, 3, 0, 1, 1}, []uint16{0, 0, 4}, []int16{12, 4, 4, 4, 1, 24, 8, 4, 4, 1, 24, 8, 4, 4, 1})
	seed([]byte{0, 3, 3, 1, 1, 1, 1, 0, 0, 0}, []uint16{7, 11, 13}, []int16{0, 16, 8, 2, 1, 0, 16, 8, 8, 1, 0, 16, 8, 8, 1})
	seed([]byte{1, 1, 1, 1, 1, 1, 1, 0, 1, 1}, []uint16{0, 0, 0}, []int16{0, 0, 0, 0, 0, 8, 4, 2, 2, 1, -8, 4, 2, 2, 1})
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) < 10+6+30 {
			return
		}
		n, memory := [7]int{}, [3]tensor.Memory{}
		for i := range n {
			n[i] = 1 + int(data[i]%4)
		}
		for i := range memory {
			memory[i] = mems[data[7+i]%2]
		}
		numbers := data[10:]
		next := func() int64 {
			x := int64(int16(uint16(numbers[0]) | uint16(numbers[1])<<8))
			numbers = numbers[2:]
			return x
		}
		p := qkv.QKV{
			Q: qkv.TensorDesc{Shape: [5]int{n[0], n[1], n[3], n[4], n[5]}},
			K: qkv.TensorDesc{Shape: [5]int{n[0], n[2], n[3], 1, n[5]}},
			V: qkv.TensorDesc{Shape: [5]int{n[0], n[2], n[3], 1, n[6]}},
		}
		three := []*qkv.TensorDesc{&p.Q, &p.K, &p.V}
		for i, d := range three {
			d.Memory, d.DType, d.Offset = memory[i], tensor.F32, next()
		}
		for _, d := range three {
			for a := range d.Strides {
				d.Strides[a] = next()
			}
			if !inside(d) {
				if err := p.Verify(qkv.Layout{}); err == nil {
					t.Errorf("declared a layout of a tensor outside its memory: %+v", d)
				}
				return
			}
		}
		checkDetection(t, &p)
	})
}

func FuzzParseLayout(f *testing.F) {
	for _, l := range qkv.Layouts() {
		f.Add(l.String())
	}
	f.Add("sbhd_sb3hd")
	f.Add("")
	f.Fuzz(func(t *testing.T, name string) {
		l, err := qkv.Parse(name)
		if err == nil && (l.String() != name || !l.Valid()) {
			t.Errorf("%q is read as %v", name, l)
		}
		if err != nil && l != (qkv.Layout{}) {
			t.Error(fmt.Sprint("a layout beside an error: ", l))
		}
	})
}
