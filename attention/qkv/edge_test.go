package qkv_test

import (
	"strings"
	"testing"
	"unsafe"

	"github.com/cprun/cprun/attention/qkv"
	"github.com/cprun/cprun/tensor"
)

// window is a second allocation in name only: it begins inside the first.
type window struct {
	*tensor.Host
	skip int64
}

func (w *window) Ptr() unsafe.Pointer { return unsafe.Add(w.Host.Ptr(), w.skip) }
func (w *window) Bytes() int64        { return w.Host.Bytes() - w.skip }

func TestLayoutOfOverlappingMemory(t *testing.T) {
	shape := [4]int{2, 4, 2, 8}
	host := tensor.NewHost(4 * 512)
	at := func(m tensor.Memory, off int64) tensor.View { return tensor.Dense(m, tensor.F32, off, shape) }
	apart := tensor.New(tensor.F32, 2, 4, 2, 8)
	for _, c := range []struct {
		name    string
		q, k, v tensor.View
		want    qkv.Fit
	}{
		{"three tensors one behind another", at(host, 0), at(host, 128), at(host, 256), qkv.Inside},
		{"v is k", apart, at(host, 0), at(host, 0), qkv.Strided},
		{"v begins in the last element of k", apart, at(host, 0), at(host, 127), qkv.Strided},
		{"q is k", at(host, 0), at(host, 0), apart, qkv.Strided},
		{"a window onto other bytes", at(host, 0), at(&window{host, 512}, 0), apart, qkv.Exact},
		{"a window onto the same bytes", at(host, 0), at(&window{host, 508}, 0), apart, qkv.Strided},
		{"one key for all positions", apart, at(host, 0), tensor.NewView(tensor.NewHost(4*512), tensor.F32, 0, shape, [4]int64{64, 0, 8, 1}), qkv.Strided},
		{"one batch for all", apart, tensor.NewView(host, tensor.F32, 0, shape, [4]int64{0, 16, 8, 1}), at(tensor.NewHost(2048), 0), qkv.Strided},
	} {
		if l, fit := qkv.Detect(c.q, c.k, c.v); fit != c.want {
			t.Errorf("%s: found %v (%v), want %v", c.name, l, fit, c.want)
		}
		err := qkv.Verify(parse(t, "bshd_bshd_bshd"), c.q, c.k, c.v)
		if (err != nil) != (c.want == qkv.Strided) {
			t.Errorf("%s: declared separate tensors: %v", c.name, err)
		}
	}
}

// TestLayoutOfAPartOfABuffer takes parts of larger tensors. Dense strides alone make none of
// them canonical.
func TestLayoutOfAPartOfABuffer(t *testing.T) {
	dense := func() tensor.View { return tensor.New(tensor.F32, 3, 8, 4, 16) }
	slice := func(a tensor.Axis, lo, hi int) [3]tensor.View {
		return [3]tensor.View{dense().Slice(a, lo, hi), dense().Slice(a, lo, hi), dense().Slice(a, lo, hi)}
	}
	permuted := func(n [4]int, s [4]int64) [3]tensor.View {
		v := func() tensor.View { return tensor.NewView(tensor.NewHost(4*1536), tensor.F32, 0, n, s) }
		return [3]tensor.View{v(), v(), v()}
	}
	for _, c := range []struct {
		name  string
		views [3]tensor.View
		want  qkv.Fit
	}{
		{"whole", slice(tensor.Batch, 0, 3), qkv.Exact},
		{"the first positions of each batch", slice(tensor.Seq, 0, 4), qkv.Strided},
		{"the last positions of each batch", slice(tensor.Seq, 4, 8), qkv.Strided},
		{"half of the heads", slice(tensor.Heads, 0, 2), qkv.Strided},
		{"half of the channels", slice(tensor.Dim, 0, 8), qkv.Strided},
		{"the last batches", slice(tensor.Batch, 1, 3), qkv.Inside},
		{"heads before positions", permuted([4]int{3, 8, 4, 16}, [4]int64{512, 16, 128, 1}), qkv.Strided},
		{"channels first", permuted([4]int{3, 8, 4, 16}, [4]int64{512, 64, 1, 4}), qkv.Strided},
		{"positions before batches", permuted([4]int{3, 8, 4, 16}, [4]int64{64, 192, 16, 1}), qkv.Exact},
	} {
		q, k, v := c.views[0], c.views[1], c.views[2]
		if l, fit := qkv.Detect(q, k, v); fit != c.want {
			t.Errorf("%s: found %v (%v), want %v", c.name, l, fit, c.want)
		}
		got, err := qkv.Canonicalize(q, k, v, readView)
		if err != nil || (got.Copied == [3]bool{true, true, true}) != (c.want != qkv.Exact) || !got.Layout.Valid() {
			t.Errorf("%s: %v copied %v, %v", c.name, got.Layout, got.Copied, err)
		}
	}
}

func TestLayoutDeclaredFalsely(t *testing.T) {
	at := memories(2000, 16)
	n := qkv.LayoutDims{Batch: 2, SeqQ: 3, SeqKV: 3, Heads: 4, KVHeads: 2, HeadDim: 8, HeadDimV: 8}
	placed := func(name string) qkv.QKV {
		p, err := qkv.Place(parse(t, name), tensor.F32, at, n)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	change := func(p qkv.QKV, f func(*qkv.QKV)) qkv.QKV { f(&p); return p }
	for _, c := range []struct {
		p        qkv.QKV
		declared string
		want     []string // none: no error
	}{
		{placed("sb(h+2h_g)d"), "sb(h+2h_g)d", nil},
		{placed("sb(h+2h_g)d"), "bs(h+2h_g)d", []string{"q has stride 64 on axis batch, the layout demands 192", "v has stride 128 on axis seq, the layout demands 64"}},
		{placed("sb(h+2h_g)d"), "sbg(h/g+2)d", []string{"k begins 32 elements behind q, the layout demands 16", "q has stride 16 on axis group, the layout demands 32"}},
		{placed("sb(h+2h_g)d"), "sb3hd", []string{"an axis of length 3 needs as many KV heads as query heads; q has shape [2 3 4 8], k [2 3 2 8]"}},
		{placed("sb(h+2h_g)d"), "t(h+2h_g)d", []string{"thd takes k and v of batch 1"}},
		{placed("sb(h+2h_g)d"), "thd_sbhd_sbhd", []string{"q has batch 2, the layout demands 1"}},
		{placed("sbhd_sb2hd"), "sb(h+2h_g)d", []string{"k lies in other memory than q"}},
		{placed("sbhd_sb2hd"), "sbhd_sbh2d", []string{"v begins 16 elements behind k, the layout demands 8", "k has stride 8 on axis group, the layout demands 16"}},
		{placed("sbhd_sbhd_sbhd"), "sbhd_sb2hd", []string{"v lies in other memory than k"}},
		{change(placed("sbhd_sbhd_sbhd"), func(p *qkv.QKV) { p.V.Memory, p.V.Offset = p.K.Memory, p.K.Offset }), "sbhd_sbhd_sbhd", []string{"overlap in memory"}},
		{change(placed("sbhd_sbhd_sbhd"), func(p *qkv.QKV) { p.Q.Shape[0] = 1 << 40 }), "sbhd_sbhd_sbhd", []string{"q has batch 1099511627776, k 2", "q has shape [1099511627776 3 4 8], more elements than its memory of 8000 bytes"}},
		{change(placed("sbhd_sbhd_sbhd"), func(p *qkv.QKV) { p.V.Offset = 1990 }), "sbhd_sbhd_sbhd", []string{"v has shape", "more elements than its memory of 8000 bytes has from element 1990 on"}},
		{change(placed("sb(h+2h_g)d"), func(p *qkv.QKV) {
			for _, d := range []*qkv.TensorDesc{&p.Q, &p.K, &p.V} {
				d.Offset += 1650
			}
		}), "sb(h+2h_g)d", []string{"an element lies outside its memory"}},
		{change(placed("sbhd_sbhd_sbhd"), func(p *qkv.QKV) { p.V.DType = tensor.BF16 }), "sbhd_sbhd_sbhd", []string{"q is float32, k float32, v bfloat16"}},
		{change(placed("sbhd_sbhd_sbhd"), func(p *qkv.QKV) { p.Q.Shape[2], p.Q.Shape[3] = 1, 4 }), "sbhd_sbhd_sbhd", []string{"q has 4 heads in 1 groups, k 2 heads"}},
		{qkv.QKV{}, "sbhd_sbhd_sbhd", []string{"q is no tensor"}},
	} {
		err := c.p.Verify(parse(t, c.declared))
		if len(c.want) == 0 && err != nil || len(c.want) > 0 && err == nil {
			t.Errorf("declared %s: %v", c.declared, err)
			continue
		}
		for _, want := range c.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("declared %s: %v\nwant %q", c.declared, err, want)
			}
		}
		if _, fit := c.p.DetectAs(parse(t, c.declared).Q, parse(t, c.declared).KV); len(c.want) == 0 && fit != qkv.Inside {
			t.Errorf("%s is found %v", c.declared, fit)
		}
	}
	p := placed("sbhd_sbhd_sbhd")
	if err := p.Verify(qkv.Layout{Q: qkv.SBHD, KV: qkv.BSHD, Packing: qkv.QKV3HD}); err == nil {
		t.Error("an unknown layout is accepted")
	}
}

func TestCanonicalizeLayout(t *testing.T) {
	dense := func(n ...int) tensor.View { return tensor.New(tensor.F32, n...) }
	q, k := dense(2, 4, 4, 8), dense(2, 4, 2, 8)
	t.Run("only what is strided is copied", func(t *testing.T) {
		v := dense(2, 4, 2, 16).Slice(tensor.Dim, 0, 8)
		c, err := qkv.Canonicalize(q, k, v, readView)
		if err != nil || c.Copied != [3]bool{false, false, true} || c.Layout.String() != "bshd_bshd_bshd" || c.Q != q || c.K != k {
			t.Errorf("%+v, %v", c, err)
		}
	})
	t.Run("tensors that share memory are copied", func(t *testing.T) {
		if c, err := qkv.Canonicalize(q, k, k, readView); err != nil || c.Layout.String() != "bshd_bshd_bshd" || c.K == c.V {
			t.Errorf("%+v, %v", c, err)
		}
	})
	t.Run("copies from an arena", func(t *testing.T) {
		arena := tensor.NewHostArena(1 << 16)
		c, err := qkv.Canonicalize(q, k, k, func(x tensor.View) tensor.View {
			n := x.Shape()
			y := arena.Alloc(x.DType(), n[:]...)
			tensor.Copy(y, x)
			return y
		})
		if err != nil || c.Layout.String() != "bshd_bshd_bshd" {
			t.Errorf("%+v, %v", c, err)
		}
	})
	for _, c := range []struct {
		name    string
		q, k, v tensor.View
		copy    func(tensor.View) tensor.View
		want    string
	}{
		{"a copy of another shape", q, k, k, func(tensor.View) tensor.View { return q }, "copy of k for a known layout"},
		{"a copy of another type", q, k, k, func(x tensor.View) tensor.View { return tensor.New(tensor.F64, 2, 4, 2, 8) }, "not a dense view of its shape and type"},
		{"no copy", q, k, k, func(x tensor.View) tensor.View { return x }, "overlap; each must have memory of its own"},
		{"heads that do not divide", dense(2, 4, 3, 8), k, dense(2, 4, 2, 8), readView, "q has 3 heads in 1 groups, k 2 heads"},
		{"no heads", dense(2, 4, 0, 8), dense(2, 4, 0, 8), dense(2, 4, 0, 8), readView, "q has 0 heads in 1 groups"},
		{"batches", dense(3, 4, 4, 8), k, dense(2, 4, 2, 8), readView, "q has batch 3, k 2"},
		{"head dims", dense(2, 4, 4, 9), k, dense(2, 4, 2, 8), readView, "q has head dim 9, k 8"},
		{"lengths of k and v", q, k, dense(2, 5, 2, 8), readView, "k has shape [2 4 2 8], v [2 5 2 8]"},
		{"no views", tensor.View{}, tensor.View{}, tensor.View{}, readView, "q is no tensor"},
	} {
		if got, err := qkv.Canonicalize(c.q, c.k, c.v, c.copy); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %+v, %v, want %q", c.name, got, err, c.want)
		}
	}
}

// TestLayoutOfNothing: views without elements have no wrong address, and no memory to hold.
func TestLayoutOfNothing(t *testing.T) {
	q, k := tensor.New(tensor.F32, 2, 0, 4, 8), tensor.New(tensor.F32, 2, 6, 2, 8)
	v := tensor.New(tensor.F32, 2, 6, 2, 8)
	for _, c := range [][3]tensor.View{
		{q, k, v}, {q, k.Slice(tensor.Seq, 3, 3), v.Slice(tensor.Seq, 2, 2)}, {tensor.New(tensor.F32, 2, 6, 4, 8), k.Slice(tensor.Seq, 3, 3), v.Slice(tensor.Seq, 3, 3)},
	} {
		got, err := qkv.Canonicalize(c[0], c[1], c[2], readView)
		if err != nil || qkv.Verify(got.Layout, got.Q, got.K, got.V) != nil {
			t.Errorf("%v: %+v, %v", c, got, err)
		}
	}
}

// A broadcast view of more elements than integers can count must not fit by overflow: 2^32
// times 2^32 positions of one element have the batch stride 2^64, which is 0.
func TestLayoutOfHugeBroadcast(t *testing.T) {
	mem := tensor.NewHost(4096)
	huge := tensor.NewView(mem, tensor.F32, 0, [4]int{2, 1 << 32, 1 << 32, 1}, [4]int64{})
	if l, fit := qkv.Detect(huge, huge, huge); fit != qkv.Strided {
		t.Errorf("found %v (%v)", l, fit)
	}
	if err := qkv.Verify(parse(t, "bshd_bshd_bshd"), huge, huge, huge); err == nil || !strings.Contains(err.Error(), "so some overlap") {
		t.Errorf("declared: %v", err)
	}
}

func detectionCases(t testing.TB) map[string][3]tensor.View {
	packed := splitSBHD(tensor.NewHost(2*64*2*18*64), tensor.F16, 64, 2, 18, 64)
	dense := func(heads int) tensor.View { return tensor.New(tensor.BF16, 2, 64, heads, 64) }
	return map[string][3]tensor.View{
		"packed":   {packed.Slice(tensor.Heads, 0, 16), packed.Slice(tensor.Heads, 16, 17), packed.Slice(tensor.Heads, 17, 18)},
		"separate": {dense(16), dense(4), dense(4)},
		"strided":  {dense(16).Slice(tensor.Dim, 0, 32), dense(4).Slice(tensor.Dim, 0, 32), dense(4)},
	}
}

func TestDetectLayoutAllocatesNothing(t *testing.T) {
	for name, x := range detectionCases(t) {
		l, _ := qkv.Detect(x[0], x[1], x[2])
		if n := testing.AllocsPerRun(100, func() { l, _ = qkv.Detect(x[0], x[1], x[2]) }); n != 0 {
			t.Errorf("%s: %g allocations to find %v", name, n, l)
		}
	}
}

func BenchmarkDetectLayout(b *testing.B) {
	for name, x := range detectionCases(b) {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				qkv.Detect(x[0], x[1], x[2])
			}
		})
	}
}
