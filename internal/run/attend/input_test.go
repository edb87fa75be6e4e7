package attend

import (
	"bytes"
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/internal/model/qkv"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// lengthsOf returns lengths for a layout that differ where possible.
func lengthsOf(l qkv.Layout) qkv.LayoutDims {
	n := qkv.LayoutDims{Batch: 2, SeqQ: 9, SeqKV: 9, Heads: 4, KVHeads: 2, HeadDim: 8, HeadDimV: 8}
	if l.Packing == qkv.QKV3HD || l.Packing == qkv.QKVH3D {
		n.KVHeads = 4
	}
	if l.Packing == qkv.KV2HD || l.Packing == qkv.KVH2D {
		n.Heads, n.KVHeads = 8, 4
	}
	if l.Packing == qkv.Separate {
		n.HeadDimV = 6
	}
	if l.KV == qkv.THD {
		n.Batch = 1
	}
	return n
}

// filled returns a dense tensor [batch, seq, heads, dim] with distinct numbers.
func filled(salt, batch, seq, heads, dim int) View {
	v := tensor.New(tensor.F32, batch, seq, heads, dim)
	for i := range tensor.Data[float32](v) {
		tensor.Data[float32](v)[i] = float32(math.Sin(float64(i*7 + salt)))
	}
	return v
}

// packed writes a case with q, k and v in a layout. The numbers are equal for all layouts with the same lengths.
func packed(t *testing.T, l qkv.Layout, n qkv.LayoutDims, meta map[string]string) string {
	t.Helper()
	var entries []safetensors.Entry
	add := func(name string, shape []int, v View) {
		entries = append(entries, safetensors.Floats(name, safetensors.F32, shape, tensor.Data[float32](v)))
	}
	place, m := l, n
	if l.Q == qkv.THD && l.KV != qkv.THD { // documents as a batch
		m.SeqQ, place.Q = n.Batch*n.SeqQ, qkv.BSHD
	}
	var buffers []View
	for _, shape := range l.Shapes(m) {
		size := 1
		for _, d := range shape {
			size *= d
		}
		buffers = append(buffers, tensor.New(tensor.F32, size))
	}
	three, err := place.Bind(buffers, n)
	if err != nil {
		t.Fatal(err)
	}
	q, k, v := filled(1, n.Batch, n.SeqQ, n.Heads, n.HeadDim), filled(2, n.Batch, n.SeqKV, n.KVHeads, n.HeadDim),
		filled(3, n.Batch, n.SeqKV, n.KVHeads, n.HeadDimV)
	r := n.Heads / n.KVHeads
	for g := range three.Groups() {
		gq, gk, gv := three.Group(g)
		tensor.Copy(gq, q.Slice(tensor.Heads, g*r, (g+1)*r))
		tensor.Copy(gk, k.Slice(tensor.Heads, g, g+1))
		tensor.Copy(gv, v.Slice(tensor.Heads, g, g+1))
	}
	path := filepath.Join(t.TempDir(), "packed.safetensors")
	for i, shape := range l.Shapes(m) {
		add(l.Tensors()[i], shape, buffers[i])
	}
	add("dout", output(n), filled(4, n.Batch, n.SeqQ, n.Heads, n.HeadDimV))
	if err := safetensors.WriteFile(path, meta, entries); err != nil {
		t.Fatal(err)
	}
	return path
}

func with(meta map[string]string, pairs ...string) map[string]string {
	out := maps.Clone(meta)
	for i := 0; i < len(pairs); i += 2 {
		out[pairs[i]] = pairs[i+1]
	}
	return out
}

// Every layout, declared or detected, gives the same bits as three separate tensors, for any rows of a rank.
func TestEveryLayoutGivesTheSameBits(t *testing.T) {
	spec := Spec{Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ring", Backend: "flash"}, DType: "fp32"}
	detected := 0
	for _, l := range qkv.Layouts() {
		n := lengthsOf(l)
		meta := map[string]string{"causal": "true", "window": "5"}
		want, _ := run(t, packed(t, qkv.Layout{}, n, meta), 3, spec)
		if l.KV == qkv.THD {
			meta["docs"] = "[4,5]"
			want, _ = run(t, packed(t, qkv.Layout{}, n, meta), 3, spec)
		} else if l.Q == qkv.THD {
			meta["docs"] = "[9,9]"
		}
		check := func(path string, declared bool) {
			t.Helper()
			got, report := run(t, path, 3, spec)
			if report.QKVLayout != l.String() || report.QKVLayoutDeclared != declared {
				t.Errorf("%v: reported as %s, declared %t", l, report.QKVLayout, report.QKVLayoutDeclared)
			}
			if len(got) != 5 {
				t.Errorf("%v: results %v", l, slices.Sorted(maps.Keys(got)))
			}
			for name, w := range want {
				if !slices.Equal(got[name], w) {
					t.Errorf("%v: %s is not that of three tensors", l, name)
				}
			}
		}
		check(packed(t, l, n, with(meta, "layout", l.String())), true)
		if l.Packing == qkv.Separate && (l.Q != l.KV || l.Q == qkv.SBHD) {
			continue // the order of axes of separate tensors is declared, not detected
		}
		if l.Packing == qkv.QKVHeads { // only the metadata can divide the heads
			meta["heads"] = "4"
		}
		check(packed(t, l, n, meta), false)
		detected++
	}
	if detected != 20 {
		t.Errorf("%d layouts were detected", detected)
	}
}

// Layouts are distinguished by the lengths of dout, by the metadata, or not at all.
func TestDetection(t *testing.T) {
	for _, c := range []struct {
		shapes shapes
		meta   map[string]string
		layout string // "": refused
		says   []string
	}{
		{shapes{"qkv": {2, 9, 3, 5, 8}}, map[string]string{"heads": "5"}, "bs3hd", nil},
		{shapes{"qkv": {2, 9, 3, 5, 8}}, map[string]string{"heads": "9"}, "bsg(h/g+2)d", nil},
		{shapes{"qkv": {2, 9, 3, 5, 8}}, nil, "", []string{"bs3hd", "bsg(h/g+2)d", "layout"}},
		{shapes{"qkv": {2, 9, 3, 3, 8}, "dout": {2, 9, 3, 8}}, nil, "", []string{"bs3hd", "bsh3d"}},
		{shapes{"qkv": {2, 9, 3, 3, 8}, "dout": {2, 9, 3, 8}}, map[string]string{"layout": "bsh3d"}, "bsh3d", nil},
		{shapes{"qkv": {9, 2, 3, 5, 8}, "dout": {2, 9, 5, 8}}, nil, "sb3hd", nil},
		{shapes{"qkv": {2, 9, 8, 8}}, map[string]string{"heads": "4"}, "bs(h+2h_g)d", nil},
		{shapes{"qkv": {2, 9, 8, 8}}, map[string]string{"kv_heads": "1"}, "bs(h+2h_g)d", nil},
		{shapes{"qkv": {2, 9, 8, 8}}, nil, "", []string{"heads or kv_heads", "bs(h+2h_g)d and sb(h+2h_g)d"}},
		{shapes{"qkv": {2, 9, 8, 16}, "dout": {2, 9, 4, 16}}, nil, "", []string{"heads or kv_heads", "bs(h+2h_g)d"}},
		{shapes{"qkv": {2, 9, 8, 16}, "dout": {2, 9, 6, 16}}, map[string]string{"head_dim": "16"}, "",
			[]string{"heads or kv_heads", "bs(h+2h_g)d"}},
		{shapes{"qkv": {2, 9, 8, 16}, "dout": {2, 9, 4, 16}}, map[string]string{"kv_heads": "2"}, "bs(h+2h_g)d", nil},
		{shapes{"qkv": {9, 2, 8, 16}, "dout": {2, 9, 4, 16}}, map[string]string{"heads": "4"}, "sb(h+2h_g)d", nil},
		{shapes{"qkv": {2, 9, 8, 16}, "dout": {2, 9, 4, 16}}, map[string]string{"layout": "bs(h+2h_g)d"}, "bs(h+2h_g)d",
			nil},
		{shapes{"qkv": {9, 8, 16}, "dout": {1, 9, 4, 16}}, map[string]string{"docs": "[4,5]"}, "",
			[]string{"heads or kv_heads", "t(h+2h_g)d"}},
		{shapes{"qkv": {9, 8, 16}, "dout": {1, 9, 4, 16}}, map[string]string{"docs": "[4,5]", "heads": "4"},
			"t(h+2h_g)d", nil},
		{shapes{"qkv": {9, 3, 5, 8}}, map[string]string{"docs": "[4,5]", "heads": "5"}, "t3hd", nil},
		{shapes{"qkv": {9, 3, 5, 8}}, map[string]string{"docs": "[4,5]"}, "",
			[]string{"t3hd", "tg(h/g+2)d", "heads or kv_heads"}},
		{shapes{"qkv": {9, 3, 5, 8}}, map[string]string{"heads": "3"}, "bs(h+2h_g)d", nil},
		{shapes{"qkv": {2, 9, 4, 3, 8}}, nil, "bsh3d", nil}, // equal to bsg(h/g+2)d with a group per head
		{shapes{"qkv": {2, 9, 4, 5, 8}}, nil, "bsg(h/g+2)d", nil},
		{shapes{"q": {2, 9, 4, 8}, "kv": {2, 7, 2, 4, 8}}, nil, "bshd_bs2hd", nil},
		{shapes{"q": {2, 9, 4, 8}, "kv": {2, 7, 4, 2, 8}}, nil, "bshd_bsh2d", nil},
		{shapes{"q": {2, 9, 4, 8}, "kv": {2, 7, 2, 2, 8}}, nil, "", []string{"bshd_bs2hd", "bshd_bsh2d"}},
		{shapes{"q": {2, 9, 4, 8}, "kv": {2, 7, 2, 2, 8}}, map[string]string{"layout": "bsh2d"}, "bshd_bsh2d", nil},
		{shapes{"q": {9, 2, 4, 8}, "k": {9, 2, 2, 8}, "v": {9, 2, 2, 8}}, map[string]string{"layout": "sbhd"},
			"sbhd_sbhd_sbhd", nil},
		{shapes{"q": {9, 4, 8}, "k": {9, 2, 8}, "v": {9, 2, 8}}, nil, "thd_thd_thd", nil},
		{shapes{"q": {18, 4, 8}, "k": {2, 9, 2, 8}, "v": {2, 9, 2, 8}}, map[string]string{"layout": "thd_bshd_bshd"},
			"", []string{"docs"}},
		{shapes{"q": {18, 4, 8}, "k": {2, 9, 2, 8}, "v": {2, 9, 2, 8}}, map[string]string{"layout": "thd_bshd_bshd",
			"docs": "[8,10]"}, "", []string{"[8,10]", "of 9 keys"}},
		{shapes{"qkv": {2, 9, 3, 5, 8}, "q": {2, 9, 5, 8}}, nil, "", []string{`"q"`, `"qkv"`}},
		{shapes{"qkv": {2, 9, 3, 5, 8}}, map[string]string{"layout": "bshd"}, "", []string{"[q k v]", "[qkv]"}},
		{shapes{"qkv": {2, 9, 3, 5, 8}}, map[string]string{"layout": "bs4hd"}, "", []string{"bs4hd", "bs3hd"}},
		{shapes{"qkv": {2, 9, 3, 5, 8}}, map[string]string{"layout": "bs3hd", "head_dim": "9"}, "",
			[]string{"head dim 8"}},
		{shapes{"qkv": {2, 9, 3, 5, 8}, "dout": {2, 9, 4, 8}}, map[string]string{"layout": "bs3hd"}, "",
			[]string{"dout"}},
		{shapes{"qkv": {2, 9, 4, 2, 8}}, nil, "", []string{"fit no layout", "bs3hd"}},
		{shapes{"q": {2, 9, 4, 8}, "k": {2, 9, 2, 8}, "v": {2, 9, 2, 8}}, map[string]string{"heads": "8"}, "",
			[]string{"query heads 4"}},
		{shapes{"qkv": {2, 9, 3, 5, 8}}, map[string]string{"heads": "many"}, "", []string{`"heads"`}},
	} {
		path := write(t, c.shapes, c.meta)
		got, err := Open(path)
		if err != nil {
			if c.layout != "" {
				t.Errorf("%v, %v: %v", c.shapes, c.meta, err)
			}
			for _, w := range c.says {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%v, %v: %v does not say %q", c.shapes, c.meta, err, w)
				}
			}
			if strings.Contains(err.Error(), "heads or kv_heads") != slices.Contains(c.says, "heads or kv_heads") {
				t.Errorf("%v, %v: %v names metadata that do not help", c.shapes, c.meta, err)
			}
			continue
		}
		if got.Input.Layout.String() != c.layout {
			t.Errorf("%v, %v: detected %v, want %q", c.shapes, c.meta, got.Input.Layout, c.layout)
		}
		got.Close()
	}
}

// Unknown tensors and metadata are refused by name, since they may mean another attention.
func TestNothingIsIgnored(t *testing.T) {
	refused := func(s shapes, meta map[string]string, says ...string) {
		t.Helper()
		c, err := Open(write(t, s, meta))
		if err == nil {
			c.Close()
			t.Errorf("%v, %v: not refused", s, meta)
			return
		}
		for _, w := range says {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%v, %v: %v does not say %q", s, meta, err, w)
			}
		}
	}
	for _, name := range []string{"attn_bias", "sinks", "slopes", "mask", "attn_mask", "key_padding_mask",
		"cu_seqlens_q", "Q", "dqkv", "x"} {
		refused(good.with(name, 1, 1, 9, 9), nil, `tensor "`+name+`"`, "qkv", "dout")
	}
	for key, value := range map[string]string{
		"bias": "alibi", "mask": "causal", "attn_mask": "x", "window_size": "3", "window_size_left": "3",
		"cu_seqlens": "[0,9]", "cu_seqlens_q": "[0,9]", "dropout_p": "0.1", "q_ranges": "[]", "block_mask": "x",
		"score_mod": "x", "alibi_slopes": "x", "softmax_type": "learnable", "prefix": "4", "Heads": "4",
		"causl": "true", "is_causal": "true", "softmax_scale": "2", "attention_type": "sliding", "sliding": "4",
		"bottom_right": "true", "q_lens": "[9]", "is_decoder": "true", "temperature": "2",
	} {
		refused(good, map[string]string{key: value}, `metadata "`+key+`"`, "causal, window, docs")
	}
	// Results of another run, and descriptions, change nothing.
	c, err := Open(write(t, good.with("out", 1).with("lse", 1).with("dq", 1).with("dk", 1).with("dv", 1),
		map[string]string{"format": "pt", "__tool": "x", "comment": "mask", "case": "17", "author": "x", "seed": "1",
			"max_logit": "false", "sink": ""}))
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

// FuzzMetadata checks that accepted metadata has known names and a mask with the lengths of the file.
func FuzzMetadata(f *testing.F) {
	for _, s := range []string{
		"causal=true\nwindow=3", "docs=[4,5]", "docs=[[4,5]]", "softcap=1e400", "scale=nan", "layout=sbhd",
		"layout=bshd\nheads=4", "window=-9223372036854775808",
		"head_dim=8\nkv_heads=2", "mask=x", "__x=y", "docs=[9223372036854775807,9223372036854775807,11]", "=x",
		"causal=top_left", "window=1,2", "sink=off_by_one",
		"docs=[[9],[0,9]]\ncausal=true", "docs=[4,5]\ndocs_kv=[9,0]\nwindow=2,3",
		"slices=[[0,9,0,9,\"causal\"],[1,3,2,9,\"full\"]]",
		"slices=[[0,1,0,1,\"full\"]]\ncausal=false\nwindow=-1\ndocs=[]", "docs=[[9],[9]]\ndocs_kv=[[9],[9]]",
	} {
		f.Add(s, uint8(0))
	}
	f.Add("layout=bs3hd", uint8(1))
	f.Add("heads=3", uint8(1))
	f.Add("layout=thd_bshd_bshd\ndocs=[9,9]", uint8(3))
	f.Add("layout=bsh2d", uint8(2))
	cases := []shapes{good, {"qkv": {2, 9, 3, 3, 8}}, {"q": {2, 9, 4, 8}, "kv": {2, 9, 2, 2, 8}}, {"q": {18, 4, 8},
		"k": {2, 9, 2, 8}, "v": {2, 9, 2, 6}}}
	f.Fuzz(func(t *testing.T, text string, which uint8) {
		meta := map[string]string{}
		for _, line := range strings.Split(text, "\n") {
			key, value, _ := strings.Cut(line, "=")
			meta[key] = value
		}
		var entries []safetensors.Entry
		for name, shape := range cases[int(which)%len(cases)] {
			n := 1
			for _, d := range shape {
				n *= d
			}
			entries = append(entries, safetensors.Floats(name, safetensors.F32, shape, make([]float32, n)))
		}
		var b bytes.Buffer
		if err := safetensors.Write(&b, meta, entries); err != nil {
			return // not UTF-8
		}
		file, err := safetensors.New("fuzz", bytes.NewReader(b.Bytes()), int64(b.Len()))
		if err != nil {
			return
		}
		c, err := read("fuzz", file)
		if err != nil {
			if !strings.Contains(err.Error(), "fuzz") {
				t.Fatalf("%q: %v does not name the file", text, err)
			}
			return
		}
		if err := accepted(c, meta); err != nil {
			t.Fatalf("%q: %v", text, err)
		}
	})
}

// accepted returns the fault of a case that was wrongly accepted.
func accepted(c *Case, meta map[string]string) error {
	for key := range meta {
		known := slices.Contains(metadataKeys, key) || slices.Contains(harmless, key) || strings.HasPrefix(key, "__")
		if !known && (strings.Contains(key, "mask") || strings.Contains(key, "window") || strings.Contains(key,
			"causal")) {
			return fmt.Errorf("metadata %q is taken", key)
		}
	}
	if err := acceptedMasks(c); err != nil {
		return err
	}
	if math.IsNaN(c.Softmax.Scale) || math.IsInf(c.Softmax.Scale, 0) || c.Softmax.Softcap < 0 {
		return fmt.Errorf("%+v", c)
	}
	if c.Batch < 1 || c.SeqQ < 1 || c.SeqKV < 1 || c.Heads < 1 || c.KVHeads < 1 || c.Heads%c.KVHeads != 0 ||
		!slices.Contains(qkv.Layouts(), c.Input.Layout) {
		return fmt.Errorf("%+v", c)
	}
	return nil
}
