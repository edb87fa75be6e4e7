package qkv_test

import (
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/qkv"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/tensor"
)

// layoutNames are the names of TransformerEngine, with the packings for fewer KV heads.
const layoutNames = `bs3hd sb3hd t3hd bsh3d sbh3d th3d
bs(h+2h_g)d sb(h+2h_g)d t(h+2h_g)d bsg(h/g+2)d sbg(h/g+2)d tg(h/g+2)d
bshd_bs2hd sbhd_sb2hd thd_t2hd bshd_bsh2d sbhd_sbh2d thd_th2d
bshd_bshd_bshd sbhd_sbhd_sbhd thd_thd_thd
sbhd_bshd_bshd bshd_sbhd_sbhd thd_bshd_bshd thd_sbhd_sbhd`

func TestLayoutNames(t *testing.T) {
	var names []string
	for _, l := range qkv.Layouts() {
		names = append(names, l.String())
		if again, err := qkv.Parse(l.String()); err != nil || again != l || !l.Valid() {
			t.Errorf("%v is read as %v, %v", l, again, err)
		}
	}
	if want := strings.Fields(layoutNames); !slices.Equal(names, want) {
		t.Errorf("layouts %v, want %v", names, want)
	}
	for _, name := range []string{"", "sbhd", "sb3hd ", "SB3HD", "sbhd_bs2hd", "sbhd_bshd_sbhd", "layout(0,1,3)", "sb(h+2g)d"} {
		if l, err := qkv.Parse(name); err == nil || !strings.Contains(err.Error(), "sbhd_sb2hd") {
			t.Errorf("%q is read as %v, %v", name, l, err)
		}
	}
	mixed := qkv.Layout{Q: qkv.SBHD, KV: qkv.BSHD, Packing: qkv.KV2HD}
	if mixed.Valid() || mixed.String() != "layout(1,0,3)" {
		t.Errorf("%v is valid: %t", mixed, mixed.Valid())
	}
	if _, err := qkv.Place(mixed, tensor.F32, qkv.Bases{}, qkv.LayoutDims{}); err == nil {
		t.Errorf("%v has places", mixed)
	}
}

func parse(t testing.TB, name string) qkv.Layout {
	t.Helper()
	l, err := qkv.Parse(name)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// memories is three allocations of n float32 each.
func memories(n int64, offset int64) qkv.Bases {
	at := func() qkv.Base { return qkv.Base{Memory: tensor.NewHost(4 * n), Offset: offset} }
	return qkv.Bases{Q: at(), K: at(), V: at()}
}

// TestLayoutTable places every layout with lengths of every kind that it can hold, and says
// by which name it is found: its own, unless another name means the same addresses.
func TestLayoutTable(t *testing.T) {
	type dims = qkv.LayoutDims
	mha := dims{Batch: 2, SeqQ: 3, SeqKV: 3, Heads: 4, KVHeads: 4, HeadDim: 8, HeadDimV: 8}
	gqa := dims{Batch: 2, SeqQ: 3, SeqKV: 3, Heads: 4, KVHeads: 2, HeadDim: 8, HeadDimV: 8}
	mqa := dims{Batch: 2, SeqQ: 3, SeqKV: 3, Heads: 4, KVHeads: 1, HeadDim: 8, HeadDimV: 8}
	cross := dims{Batch: 2, SeqQ: 5, SeqKV: 3, Heads: 4, KVHeads: 2, HeadDim: 8, HeadDimV: 8}
	mla := dims{Batch: 2, SeqQ: 3, SeqKV: 3, Heads: 4, KVHeads: 4, HeadDim: 12, HeadDimV: 8}
	one := func(n dims) dims { n.Batch = 1; return n }
	const none = "none"
	for _, c := range []struct {
		of   string
		n    dims
		want string // "" for the same
	}{
		{"bs3hd", mha, ""}, {"sb3hd", mha, ""}, {"bsh3d", mha, ""}, {"sbh3d", mha, ""},
		{"bs3hd", gqa, none}, {"sbh3d", gqa, none}, {"sb3hd", mla, none}, {"sb3hd", cross, none}, {"t3hd", mha, none},
		{"t3hd", one(mha), "bs3hd"}, {"sb3hd", one(mha), ""}, {"th3d", one(mha), "bsh3d"}, {"bsh3d", one(mha), ""},
		{"bs(h+2h_g)d", mha, "bs3hd"}, {"bs(h+2h_g)d", gqa, ""}, {"sb(h+2h_g)d", gqa, ""}, {"sb(h+2h_g)d", mqa, ""},
		{"sb(h+2h_g)d", one(mqa), ""}, {"t(h+2h_g)d", one(gqa), "bs(h+2h_g)d"}, {"sb(h+2h_g)d", cross, none}, {"sb(h+2h_g)d", mla, none},
		{"bsg(h/g+2)d", mha, "bsh3d"}, {"bsg(h/g+2)d", gqa, ""}, {"sbg(h/g+2)d", gqa, ""}, {"sbg(h/g+2)d", mqa, "sb(h+2h_g)d"},
		{"tg(h/g+2)d", one(gqa), "bsg(h/g+2)d"}, {"tg(h/g+2)d", gqa, none}, {"bsg(h/g+2)d", mla, none},
		{"bshd_bs2hd", gqa, ""}, {"sbhd_sb2hd", gqa, ""}, {"bshd_bs2hd", cross, ""}, {"sbhd_sb2hd", mla, none}, {"thd_t2hd", one(cross), "bshd_bs2hd"},
		{"bshd_bsh2d", gqa, ""}, {"sbhd_sbh2d", gqa, ""}, {"bshd_bsh2d", mqa, "bshd_bs2hd"}, {"sbhd_sbh2d", mla, none}, {"thd_th2d", one(gqa), "bshd_bsh2d"},
		{"bshd_bshd_bshd", gqa, ""}, {"sbhd_sbhd_sbhd", gqa, ""}, {"sbhd_sbhd_sbhd", mla, ""}, {"bshd_bshd_bshd", mla, ""},
		{"sbhd_sbhd_sbhd", cross, ""}, {"sbhd_sbhd_sbhd", mqa, ""}, {"sbhd_sbhd_sbhd", one(mha), ""}, {"thd_thd_thd", one(cross), "bshd_bshd_bshd"},
		{"sbhd_bshd_bshd", gqa, ""}, {"bshd_sbhd_sbhd", mla, ""}, {"sbhd_bshd_bshd", one(gqa), "bshd_bshd_bshd"},
		{"thd_bshd_bshd", gqa, ""}, {"thd_sbhd_sbhd", cross, ""}, {"thd_sbhd_sbhd", one(cross), "bshd_bshd_bshd"}, {"thd_thd_thd", gqa, none},
	} {
		l := parse(t, c.of)
		for _, offset := range []int64{0, 40} {
			p, err := qkv.Place(l, tensor.F32, memories(1000, offset), c.n)
			if (err != nil) != (c.want == none) {
				t.Errorf("%v of %+v: %v", l, c.n, err)
			}
			if err != nil {
				continue
			}
			want, fit := l, qkv.Exact
			if c.want != "" {
				want = parse(t, c.want)
			}
			if offset > 0 {
				fit = qkv.Inside
			}
			if got, gotFit := p.Detect(); got != want || gotFit != fit {
				t.Errorf("%v of %+v at element %d is found as %v (%v), want %v (%v)", l, c.n, offset, got, gotFit, want, fit)
			}
			if err := p.Verify(l); err != nil {
				t.Errorf("%v of %+v: %v", l, c.n, err)
			}
			if as, fit := p.DetectAs(l.Q, l.KV); as.Q != l.Q || as.KV != l.KV || fit == qkv.Strided {
				t.Errorf("%v of %+v is found as %v (%v) in its formats", l, c.n, as, fit)
			}
			if !slices.Contains(p.Layouts(), l) {
				t.Errorf("%v of %+v is not among %v", l, c.n, p.Layouts())
			}
		}
	}
}

// TestLayoutMultiQuerySplit is a user's case: 16 query heads and 1 KV head, split out of one
// tensor [2048, batch, 16 + 2*1, 64] of float16. Taken for three separate tensors, fused and
// flash attention differed by 6.1953; after copies by 0.00195.
func TestLayoutMultiQuerySplit(t *testing.T) {
	for _, batch := range []int{1, 2, 3} {
		const seq, heads, dim = 2048, 16 + 2*1, 64
		mem := tensor.NewHost(2 * seq * int64(batch) * heads * dim)
		packed := splitSBHD(mem, tensor.F16, seq, batch, heads, dim)
		q, k, v := packed.Slice(tensor.Heads, 0, 16), packed.Slice(tensor.Heads, 16, 17), packed.Slice(tensor.Heads, 17, 18)
		l, fit := qkv.Detect(q, k, v)
		if l.String() != "sb(h+2h_g)d" || fit != qkv.Exact {
			t.Errorf("batch %d: found %v (%v)", batch, l, fit)
		}
		p := qkv.Describe(q, k, v)
		if slices.ContainsFunc(p.Layouts(), func(l qkv.Layout) bool { return l.Packing == qkv.Separate }) {
			t.Errorf("batch %d: taken for separate tensors: %v", batch, p.Layouts())
		}
		if again := replace(t, l, &p); !slices.ContainsFunc([]qkv.QKV{again}, func(a qkv.QKV) bool {
			x, y, z, ok := a.Views()
			return ok && samePlaces(x, q) && samePlaces(y, k) && samePlaces(z, v)
		}) {
			t.Errorf("batch %d: the layout addresses %+v, the views are %+v", batch, again, p)
		}
		err := qkv.Verify(parse(t, "sbhd_sbhd_sbhd"), q, k, v)
		if err == nil || !strings.Contains(err.Error(), "layout sbhd_sbhd_sbhd declared: q has stride") || !strings.Contains(err.Error(), "on axis seq, the layout demands") {
			t.Errorf("batch %d: a false declaration gives %v", batch, err)
		}
		if c, err := qkv.Canonicalize(q, k, v, readView); err != nil || c.Copied != [3]bool{} || c.Layout != l {
			t.Errorf("batch %d: %+v, %v; a known layout needs no copy", batch, c, err)
		}
	}
}

// splitSBHD is a dense tensor [seq, batch, heads, dim] as a view on our axes.
func splitSBHD(mem tensor.Memory, d tensor.DType, seq, batch, heads, dim int) tensor.View {
	token := int64(heads * dim)
	return tensor.NewView(mem, d, 0, [4]int{batch, seq, heads, dim}, [4]int64{token, int64(batch) * token, int64(dim), 1})
}

// samePlaces reports whether two views have the same elements at the same addresses.
func samePlaces(a, b tensor.View) bool {
	if a.Memory() != b.Memory() || a.Offset() != b.Offset() || a.DType() != b.DType() || a.Shape() != b.Shape() {
		return false
	}
	for x, n := range a.Shape() {
		if n > 1 && a.Stride(tensor.Axis(x)) != b.Stride(tensor.Axis(x)) {
			return false
		}
	}
	return true
}

// TestLayoutMultiQuerySplitNumbers is the same case, smaller, with numbers: through the
// detected layout attention is that of dense copies, bit for bit, by the reference on float16
// and by the CPU's kernel on float32; through sbhd_sbhd_sbhd it is far from it.
func TestLayoutMultiQuerySplitNumbers(t *testing.T) {
	defer goleak.VerifyNone(t)
	stream := tensor.NewHostStream("compute")
	defer stream.Close()
	sync := func() {
		if err := stream.Sync(t.Context()); err != nil {
			t.Error(err)
		}
	}
	const seq, batch, heads, dim = 64, 2, 18, 64
	half := tensor.NewHost(2 * seq * batch * heads * dim)
	bits := tensor.Data[uint16](tensor.Dense(half, tensor.F16, 0, [4]int{1, 1, 1, seq * batch * heads * dim}))
	single := tensor.NewHost(4 * seq * batch * heads * dim)
	floats := tensor.Data[float32](tensor.Dense(single, tensor.F32, 0, [4]int{1, 1, 1, len(bits)}))
	for i := range bits { // halves in [1, 2) and (-2, -1], and the same as singles
		m := uint32(i*2654435761) >> 22
		sign := uint32(i*40503) >> 3 & 1
		bits[i] = uint16(sign<<15 | 15<<10 | m)
		floats[i] = (1 + float32(m)/1024) * (1 - 2*float32(sign))
	}
	for _, c := range []struct {
		name   string
		mem    *tensor.Host
		dtype  tensor.DType
		kernel attention.Kernel
		sync   func()
	}{
		{"reference, float16", half, tensor.F16, attention.NewReference[float32](nil), func() {}},
		{"cpu, float32", single, tensor.F32, cpu.New(stream), sync},
	} {
		t.Run(c.name, func(t *testing.T) {
			packed := splitSBHD(c.mem, c.dtype, seq, batch, heads, dim)
			p := qkv.Describe(packed.Slice(tensor.Heads, 0, 16), packed.Slice(tensor.Heads, 16, 17), packed.Slice(tensor.Heads, 17, 18))
			l, _ := p.Detect()
			again := replace(t, l, &p)
			q, k, v, ok := again.Views()
			if !ok {
				t.Fatalf("%v gives no views", l)
			}
			want := attend(t, c.kernel, c.sync, read(&p.Q), read(&p.K), read(&p.V))
			if got := attend(t, c.kernel, c.sync, q, k, v); !slices.EqualFunc(got, want, slices.Equal) {
				t.Errorf("attention through %v is not that of dense copies", l)
			}
			wrong := replace(t, parse(t, "sbhd_sbhd_sbhd"), &p)
			q, k, v, _ = wrong.Views()
			if got := attend(t, c.kernel, c.sync, q, k, v); slices.EqualFunc(got, want, slices.Equal) {
				t.Error("attention through sbhd_sbhd_sbhd is the same; the case shows nothing")
			}
		})
	}
}

// TestLayoutOnCPUKernel runs the kernel that a run uses on every layout: through the
// layout's own addresses its result is that of dense copies, bit for bit.
func TestLayoutOnCPUKernel(t *testing.T) {
	defer goleak.VerifyNone(t)
	stream := tensor.NewHostStream("compute")
	defer stream.Close()
	kernel := cpu.New(stream)
	sync := func() {
		if err := stream.Sync(t.Context()); err != nil {
			t.Error(err)
		}
	}
	for _, l := range qkv.Layouts() {
		n := qkv.LayoutDims{Batch: 2, SeqQ: 37, SeqKV: 37, Heads: 6, KVHeads: 2, HeadDim: 16, HeadDimV: 16}
		if l.Q == qkv.THD {
			n.Batch = 1
		}
		if l.Packing == qkv.QKV3HD || l.Packing == qkv.QKVH3D {
			n.KVHeads = n.Heads
		}
		at := memories(2*37*18*16, 0)
		for m, base := range []qkv.Base{at.Q, at.K, at.V} {
			for i, xs := 0, hostFloats(base.Memory); i < len(xs); i++ {
				xs[i] = float32((i*7919+m*31)%1009)/500 - 1
			}
		}
		p, err := qkv.Place(l, tensor.F32, at, n)
		if err != nil {
			t.Fatal(err)
		}
		want := attend(t, kernel, sync, read(&p.Q), read(&p.K), read(&p.V))
		if got := attendGroups(t, kernel, sync, &p); !slices.EqualFunc(got, want, slices.Equal) {
			t.Errorf("attention through %v is not that of dense copies", l)
		}
	}
}

func hostFloats(m tensor.Memory) []float32 {
	return tensor.Data[float32](tensor.Dense(m, tensor.F32, 0, [4]int{1, 1, 1, int(m.Bytes() / 4)}))
}
