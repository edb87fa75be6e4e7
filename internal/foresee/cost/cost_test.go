package cost

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// rates returns a table of one kernel that computes 1e12 FLOP/s after its start, and of links of 1e9 bytes/s.
func rates(start float64) *Table {
	s := Set{Ranks: 2, CallSeconds: 1e-7}
	for _, q := range []int{64, 256, 1024} {
		for _, k := range []int{64, 256, 1024} {
			for _, mask := range []string{Full, Causal, Band} {
				if mask != Full && q != k {
					continue
				}
				pairs := float64(Tile(mask, q, k).Pairs())
				s.Attention = append(s.Attention, Attention{
					Backend: "flash", DType: "bf16", Mask: mask, Dim: 64, Heads: 4, KVHeads: 4, Queries: q, Keys: k,
					Seconds: start + AttentionFLOPs(pairs, 4, 64, 64)/1e12,
				})
			}
		}
	}
	for _, n := range []int64{1 << 10, 1 << 20, 1 << 30} {
		for _, call := range []string{"exchange", "all_reduce"} {
			s.Links = append(s.Links, Link{Pair: SameHost, Transport: "nccl", Call: call, Ranks: 2, Bytes: n,
				Seconds: 1e-5 + float64(n)/1e9})
		}
		s.Passes = append(s.Passes, Pass{Op: "copy", DType: "fp32", Bytes: n, Seconds: 1e-6 + float64(n)/1e12})
	}
	for _, n := range []int{64, 512, 4096} {
		s.Products = append(s.Products, Product{Kind: "linear", DType: "bf16", Rows: n, In: n, Out: n,
			Seconds: 2 * math.Pow(float64(n), 3) / 1e14})
	}
	return &Table{Version: Version, Machine: Machine{Device: "test", Arch: 90}, Sets: []Set{s}}
}

func call(q, k int, band partition.Band) planner.Call {
	return planner.Call{
		Backend: "flash", DType: tensor.BF16, Batch: 1, Heads: 4, KVHeads: 4, Dim: 64, DimV: 64, First: true,
		Last: true, Tiles: []partition.Tile{{Q: partition.Range{Hi: q}, K: partition.Range{Hi: k}, Band: band}},
	}
}

// At measured points the model returns the measured times.
func TestPointsAreThemselves(t *testing.T) {
	table := rates(20e-6)
	m := table.For(Job{Ranks: 2, PerHost: 2})
	for _, a := range table.Sets[0].Attention {
		c := call(a.Queries, a.Keys, Tile(a.Mask, a.Queries, a.Keys).Band)
		if got := m.Call(c); math.Abs(got/max(a.Seconds, m.kernels[attentionKey{"flash", "bf16", Full,
			false}].floor)-1) > 1e-9 {
			t.Errorf("%s of %d x %d: %v s, measured %v", a.Mask, a.Queries, a.Keys, got, a.Seconds)
		}
	}
	for _, l := range table.Sets[0].Links {
		if l.Call == "exchange" {
			if got := m.Exchange(false, l.Bytes, 1); math.Abs(got/l.Seconds-1) > 1e-9 {
				t.Errorf("%d bytes: %v s, measured %v", l.Bytes, got, l.Seconds)
			}
		}
	}
}

// Between points a time lies between theirs; a small tile costs its start, and twice the tiles of a long one twice.
func TestBetweenPoints(t *testing.T) {
	m := rates(20e-6).For(Job{Ranks: 2, PerHost: 2})
	last := 0.0
	for n := 1; n <= 1<<16; n *= 2 {
		got := m.Call(call(n, n, partition.Full()))
		if got < last || got < 20e-6 {
			t.Errorf("%d x %d: %v s, less than %v of a smaller one", n, n, got, last)
		}
		last = got
	}
	if one, four := m.Call(call(1<<14, 1<<14, partition.Full())),
		m.Call(call(1<<15, 1<<15, partition.Full())); math.Abs(four/one-4) > 0.01 {
		t.Errorf("four times the pairs take %v times as long", four/one)
	}
	full, causal := m.Call(call(1024, 1024, partition.Full())), m.Call(call(1024, 1024, partition.Causal()))
	if causal >= full || causal < full/2 {
		t.Errorf("causal %v s, full %v", causal, full)
	}
	if m.Exchange(false, 1<<20, 3) <= m.Exchange(false, 1<<20, 1) {
		t.Error("three messages start as fast as one")
	}
}

// The model extrapolates to unmeasured sizes and dims, also larger ones, for a pair with a softmax besides its
// products, and for a mask with a constant overhead for each query.
func TestMasksAndDims(t *testing.T) {
	const heads, edge = 4, 40 // pairs for nothing, of each query under a causal mask
	seconds := func(mask string, n, dim int) float64 {
		pairs := float64(Tile(mask, n, n).Pairs())
		if mask == Causal {
			pairs += edge * float64(n)
		}
		return pairs * heads * (60 + 4*float64(dim)) / 1e11
	}
	s := Set{Ranks: 1}
	for _, dim := range []int{32, 128} {
		for _, n := range []int{64, 256, 1024} {
			for _, mask := range []string{Full, Causal} {
				s.Attention = append(s.Attention, Attention{
					Backend: "flash", DType: "bf16", Mask: mask, Dim: dim, Heads: heads, KVHeads: heads, Queries: n,
					Keys: n, Seconds: seconds(mask, n, dim),
				})
			}
		}
	}
	m := (&Table{Version: Version, Machine: Machine{Device: "test"}, Sets: []Set{s}}).For(Job{Ranks: 1, PerHost: 1})
	for _, dim := range []int{32, 48, 64, 96, 128} {
		for _, n := range []int{256, 512, 1024, 4096, 16384} {
			for mask, band := range map[string]partition.Band{Full: partition.Full(), Causal: partition.Causal()} {
				c := call(n, n, band)
				c.Dim, c.DimV = dim, dim
				if got, want := m.Call(c), seconds(mask, n, dim); math.Abs(got/want-1) > 0.04 {
					t.Errorf("%s, %d x %d, dim %d: %v s, want %v", mask, n, n, dim, got, want)
				}
			}
		}
	}
}

// Ranks of other hosts are as far as the network says, and a collective goes as fast as its slowest link.
func TestHosts(t *testing.T) {
	m := rates(0).For(Job{Ranks: 4, PerHost: 2, Net: 1e6})
	if near, far := m.Exchange(false, 1<<20, 1), m.Exchange(true, 1<<20, 1); far < 100*near {
		t.Errorf("the same host %v s, another %v", near, far)
	}
	if near, far := m.Reduce("all_reduce", 2, 1<<20), m.Reduce("all_reduce", 4, 1<<20); far < 100*near {
		t.Errorf("an all-reduce on one host %v s, on two %v", near, far)
	}
	fast := rates(0).For(Job{Ranks: 2, PerHost: 2, Link: 100e9})
	if got := fast.Exchange(false, 1<<30, 1); got > float64(1<<30)/50e9 {
		t.Errorf("a link of 100 GB/s takes %v s for 1 GiB", got)
	}
}

// A collective of other ranks than were measured carries its own share, and none is faster than the least time.
func TestReduceOfOtherRanks(t *testing.T) {
	m := rates(0).For(Job{Ranks: 4, PerHost: 4})
	two, four := m.Reduce("all_reduce", 2, 1<<30), m.Reduce("all_reduce", 4, 1<<30)
	if math.Abs(four/two-1.5) > 1e-9 { // (4-1)/4 over (2-1)/2
		t.Errorf("4 ranks take %v times as long as 2, want 1.5", four/two)
	}
	if want := 1e-5 + float64(1<<30)/1e9; math.Abs(two/want-1) > 1e-9 {
		t.Errorf("2 ranks take %v s, measured %v", two, want)
	}
	if got := m.Reduce("all_reduce", 2, 1); got < 1e-5 {
		t.Errorf("a byte takes %v s, and no collective less than 1e-5", got)
	}
}

// Of figures for one point the fastest counts, whatever their order: noise only slows.
func TestTheFastestFigureCounts(t *testing.T) {
	want := rates(0).For(Job{Ranks: 2, PerHost: 2}).Exchange(false, 1<<20, 1)
	for _, first := range []bool{true, false} {
		table := rates(0)
		fast := table.Sets[0].Links
		slow := slices.Clone(fast)
		for i := range slow {
			slow[i].Seconds *= 7
		}
		if table.Sets[0].Links = append(slices.Clone(slow), fast...); first {
			table.Sets[0].Links = append(slices.Clone(fast), slow...)
		}
		if got := table.For(Job{Ranks: 2, PerHost: 2}).Exchange(false, 1<<20, 1); math.Abs(got/want-1) > 1e-9 {
			t.Errorf("the fastest first: %t: %v s, want %v", first, got, want)
		}
	}
}

// Ranks that share cores are slower by their number, and a machine that is faster by that.
func TestScales(t *testing.T) {
	c := call(1024, 1024, partition.Full())
	two := rates(0).For(Job{Ranks: 2, PerHost: 2, Cores: 2}).Call(c)
	if eight := rates(0).For(Job{Ranks: 8, PerHost: 8, Cores: 2}).Call(c); math.Abs(eight/two-4) > 1e-9 {
		t.Errorf("8 ranks on 2 cores take %v times as long as 2", eight/two)
	}
	if fast := rates(0).For(Job{Ranks: 2, PerHost: 2, FLOPs: 2}).Call(c); math.Abs(two/fast-2) > 1e-9 {
		t.Errorf("twice the FLOP/s: %v times as fast", two/fast)
	}
}

// Transfers between more ranks than cores have a set of their own. Their calls use the set of as many ranks as cores.
func TestSetsOfTransfersAlone(t *testing.T) {
	table := rates(0)
	four := Set{Ranks: 4}
	for _, l := range table.Sets[0].Links {
		l.Ranks, l.Seconds = 4, 5*l.Seconds
		four.Links = append(four.Links, l)
	}
	one := table.Sets[0]
	one.Ranks, one.Links = 1, nil
	two := rates(0).For(Job{Ranks: 2, PerHost: 2, Cores: 2})
	table.Sets = append(table.Sets, four, one)
	m, c := table.For(Job{Ranks: 4, PerHost: 4, Cores: 2}), call(1024, 1024, partition.Full())
	if got := m.Call(c) / two.Call(c); math.Abs(got-2) > 1e-9 {
		t.Errorf("four ranks on two cores compute %v times as long as two", got)
	}
	if got := m.Exchange(false, 1<<20, 1) / two.Exchange(false, 1<<20, 1); math.Abs(got-5) > 1e-9 {
		t.Errorf("a transfer of four takes %v times as long as of two, measured 5", got)
	}
	if !m.Has("flash", tensor.BF16) {
		t.Error("four ranks have no backend")
	}
}

// Whatever a table lacks, something stands for it.
func TestWhatIsNotThere(t *testing.T) {
	m := rates(0).For(Job{Ranks: 1, PerHost: 1})
	c := call(512, 512, partition.Full())
	c.Backend, c.DType = "fused", tensor.F16
	if m.Call(c) <= 0 {
		t.Error("another backend takes no time")
	}
	for _, op := range []string{"linear", "linear dw"} {
		if m.Work(Work{Op: op, DType: tensor.F16, Rows: 100, In: 100, Out: 100}) <= 0 {
			t.Errorf("%s takes no time", op)
		}
	}
	if m.Work(Work{Op: "swiglu", DType: tensor.BF16, Bytes: 1 << 20}) <= 0 {
		t.Error("a pass takes no time")
	}
}

// A GPU that works for long is slower than short figures of it. The rate of long calls bounds all rates of attention, and
// a second block is not charged for the warmth of the card.
func TestKeptUp(t *testing.T) {
	table := rates(0)
	flops := AttentionFLOPs(1<<28, 4, 64, 64)
	table.Sets[0].Attention = append(table.Sets[0].Attention, Attention{ // both blocks together at 0.8e12
		Backend: "flash", DType: "bf16", Mask: Full, Dim: 64, Heads: 4, KVHeads: 4, Queries: 1 << 14, Keys: 1 << 14,
		Seconds: flops / 1e12, Further: 1.5 * flops / 1e12,
	})
	gpu := table.For(Job{Ranks: 2, PerHost: 2})
	long := call(1<<14, 1<<14, partition.Full())
	if got := gpu.Call(long); math.Abs(got/(flops/0.8e12)-1) > 1e-9 {
		t.Errorf("a call takes %v s, %v where it is kept up", got, flops/0.8e12)
	}
	long.First = false
	if got := gpu.Call(long); math.Abs(got/(flops/0.8e12)-1) > 1e-9 {
		t.Errorf("a further block takes %v s, the first %v", got, flops/0.8e12)
	}
	long.First, table.Machine.Arch = true, 0
	if got := table.For(Job{Ranks: 2, PerHost: 2}).Call(long); math.Abs(got/(flops/1e12)-1) > 1e-9 {
		t.Errorf("on a CPU a call takes %v s, measured %v", got, flops/1e12)
	}
}

// A fold takes the same time for any number of keys. So beyond the most keys of the table, the extra time of a further
// block halves with each doubling.
func TestFurtherBlockFades(t *testing.T) {
	table := rates(0)
	for i := range table.Sets[0].Attention {
		if a := &table.Sets[0].Attention[i]; a.Mask == Full && !a.Backward {
			a.Further = 1.4 * a.Seconds
		}
	}
	table.Machine.Arch = 0
	m, most := table.For(Job{Ranks: 2, PerHost: 2}), 0
	for _, a := range table.Sets[0].Attention {
		most = max(most, a.Keys)
	}
	for _, x := range []struct {
		keys int
		want float64
	}{{most / 2, 1.4}, {most, 1.4}, {2 * most, 1.2}, {8 * most, 1.05}} {
		c := call(most, x.keys, partition.Full())
		first := m.Call(c)
		c.First = false
		if got := m.Call(c) / first; math.Abs(got-x.want) > 1e-9 {
			t.Errorf("%d keys of at most %d: a further block takes %v of the first, want %v", x.keys, most, got, x.want)
		}
	}
}

func TestShippedTables(t *testing.T) {
	all, err := Shipped()
	if err != nil || len(all) == 0 {
		t.Fatalf("%d tables, %v", len(all), err)
	}
	for _, table := range all {
		if table.Date == "" || table.Command == "" || table.Source == "" || table.Program == "" {
			t.Errorf("%s does not say where it comes from", table.Machine.Device)
		}
	}
	h200, exact, err := Reference(Machine{Device: "NVIDIA H200", Arch: 90})
	if err != nil || !exact {
		t.Fatalf("no table of an H200: %v", err)
	}
	m := h200.For(Job{Ranks: 4, PerHost: 4})
	// docs/benchmarks: a causal forward pass over 32K tokens, 611 TFLOP/s.
	c := call(32<<10, 32<<10, partition.Causal())
	c.Backend, c.Heads, c.KVHeads, c.Dim, c.DimV = "fused", 32, 8, 128, 128
	flops := AttentionFLOPs(float64(partition.Pairs(c.Tiles)), 32, 128, 128)
	if rate := flops / m.Call(c) / 1e12; rate < 550 || rate > 680 {
		t.Errorf("causal attention of 32K tokens: %.0f TFLOP/s", rate)
	}
	// cuBLASLt makes 777 TFLOP/s of this product in bf16, and 1,525 in E4M3.
	bf16 := m.Work(Work{Op: "linear", DType: tensor.BF16, Rows: 16384, In: 3072, Out: 8192})
	e4m3 := m.Work(Work{Op: "scaled linear", DType: tensor.U8, Rows: 16384, In: 3072, Out: 8192})
	if ratio := bf16 / e4m3; ratio < 1.8 || ratio > 2.1 {
		t.Errorf("a product in E4M3 takes %v s, in bf16 %v", e4m3, bf16)
	}
	bf16 = m.Work(Work{Op: "group linear", DType: tensor.BF16, Rows: 131072, In: 2048, Out: 1536})
	e4m3 = m.Work(Work{Op: "group scaled linear", DType: tensor.U8, Rows: 131072, In: 2048, Out: 1536})
	if ratio := bf16 / e4m3; ratio < 1.5 || ratio > 1.8 {
		t.Errorf("experts in E4M3 take %v s, in bf16 %v", e4m3, bf16)
	}
	if table, exact, err := Reference(Machine{Device: "NVIDIA B200", Arch: 100}); err != nil || exact || table == nil {
		t.Errorf("a B200: %v, %v", exact, err)
	}
}

func TestKept(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	table := rates(1e-6)
	table.Program, table.Machine.Device, table.Machine.Count = "any build", "GPU of/../ours", 2
	if got, err := Own(table.Machine); got != nil || err != nil {
		t.Fatalf("before: %v, %v", got, err)
	}
	if _, err := table.Keep(); err != nil {
		t.Fatal(err)
	}
	if got, err := Own(table.Machine); err != nil || got == nil ||
		len(got.Sets[0].Attention) != len(table.Sets[0].Attention) {
		t.Errorf("%v, %v", got, err)
	}
	other := table.Machine
	other.Count++
	if got, err := Own(other); got != nil || err != nil {
		t.Errorf("another machine: %v, %v", got, err)
	}
}

// documents returns a table with a call of that many tiles.
func documents(mask string, tiles int) string {
	const call = `{"backend":"flash","dtype":"bf16","mask":%q,"dim":64,"heads":4,"kv_heads":4,"queries":16,` +
		`"keys":16,"tiles":%d,"seconds":1}`
	return fmt.Sprintf(`{"version":1,"machine":{"device":"x"},"sets":[{"ranks":1,"attention":[`+call+`]}]}`, mask,
		tiles)
}

// A call of documents as calibrations measure it is taken.
func TestDecodeDocuments(t *testing.T) {
	if _, err := Decode([]byte(documents("documents", 128))); err != nil {
		t.Error(err)
	}
}

func TestDecodeFaults(t *testing.T) {
	for text, want := range map[string]string{
		`{"version":2}`: "version 2", `{"version":1}`: "machine.device",
		`{"version":1,"machine":{"device":"x"}}`: "no sets", `[`: "cost table",
		`{"version":1,"machine":{"device":"x"},"sets":[{"ranks":0}]}`: "0 ranks",
		`{"version":1,"machine":{"device":"x"},"sets":[{"ranks":1,"links":[{"pair":"moon","bytes":1,"ranks":1,` +
			`"seconds":1}]}]}`: "link 1",
		`{"version":1,"machine":{"device":"x"},"sets":[{"ranks":1,"products":[{"rows":1,"in":1,"out":-1,` +
			`"seconds":1}]}]}`: "product 1",
		`{"version":1,"machine":{"device":"x"},"sets":[{"ranks":1,"passes":[{"op":"copy","bytes":1,` +
			`"seconds":0}]}]}`: "pass 1",
		`{"version":1,"machine":{"device":"x"},"sets":[{"ranks":1,"attention":[{"mask":"full","dim":1,` +
			`"heads":1,"kv_heads":2,"seconds":1}]}]}`: "attention 1",
		documents("documents", 1<<40): "attention 1", documents("documents", 0): "attention 1", documents("causal",
			4): "attention 1",
	} {
		if _, err := Decode([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

// What is read is a table that answers with times, and is written as it was.
func FuzzDecode(f *testing.F) {
	var b bytes.Buffer
	seed, many := rates(1e-6), call(1, 1, partition.Causal())
	packed := Attention{Backend: "flash", DType: "bf16", Mask: Documents, Dim: 64, Heads: 4, KVHeads: 4, Queries: 16,
		Keys: 16, Tiles: 8, Seconds: 1e-5}
	seed.Sets[0].Attention, many.Tiles = append(seed.Sets[0].Attention, packed), packed.MeasuredTiles()
	if err := seed.Encode(&b); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes())
	f.Add([]byte(`{"version":1,"machine":{"device":"x"},"sets":[{"ranks":1}],"later":3}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		table, err := Decode(text)
		if err != nil {
			return
		}
		m := table.For(Job{Ranks: 3, PerHost: 2, Cores: 2})
		for what, s := range map[string]float64{
			"call": m.Call(call(100, 50, partition.Causal())), "documents": m.Call(many), "exchange": m.Exchange(true,
				1000, 2), "reduce": m.Reduce("all_reduce", 3, 1000),
			"copy": m.Copy(1000), "product": m.Work(Work{Op: "linear", DType: tensor.F32, Rows: 3, In: 4, Out: 5}),
			"host": m.Host(7),
		} {
			if !(s >= 0) || math.IsInf(s, 0) {
				t.Fatalf("%s takes %v s", what, s)
			}
		}
		var out bytes.Buffer
		if err := table.Encode(&out); err != nil {
			t.Fatal(err)
		}
		if _, err := Decode(out.Bytes()); err != nil {
			t.Fatal(err)
		}
	})
}

// Of two measurements the less is kept, of one block and of two.
func TestKeepLess(t *testing.T) {
	set := func(one, further, other, call float64) *Set {
		return &Set{
			Attention: []Attention{{Seconds: one, Further: further}, {Seconds: other}},
			Products:  []Product{{Seconds: other}},
			Passes:    []Pass{{Seconds: other}}, Links: []Link{{Seconds: other}}, CallSeconds: call,
		}
	}
	s := set(4, 6, 3, 2)
	s.KeepLess(set(5, 3, 7, 1)) // of two blocks 8 s, not 10
	if want := set(4, 4, 3, 1); !reflect.DeepEqual(s, want) {
		t.Errorf("%+v, want %+v", s, want)
	}
	if s.KeepLess(&Set{CallSeconds: 9}); s.CallSeconds != 1 { // of a part that was not measured again nothing is lost
		t.Errorf("%+v", s)
	}
}

// Calls of many documents take the times measured for such calls, and interpolate between two lengths. Calls of few
// tiles are unaffected.
func TestDocumentsSideBySide(t *testing.T) {
	table := rates(0)
	docs := func(n, tiles int, seconds float64) Attention {
		return Attention{Backend: "flash", DType: "bf16", Mask: Documents, Dim: 64, Heads: 4, KVHeads: 4, Queries: n,
			Keys: n, Tiles: tiles, Seconds: seconds}
	}
	of := func(a Attention) planner.Call {
		c := call(1, 1, partition.Causal())
		c.Tiles = a.MeasuredTiles()
		return c
	}
	short, long, few := docs(16, 64, 3e-4), docs(256, 4, 2e-4), docs(256, 3, 1e-3)
	plain := table.For(Job{Ranks: 1, PerHost: 1}).Call(of(few))
	table.Sets[0].Attention = append(table.Sets[0].Attention, short, long)
	m := table.For(Job{Ranks: 1, PerHost: 1})
	for _, a := range []Attention{short, long} {
		if got := m.Call(of(a)); math.Abs(got/a.Seconds-1) > 1e-9 {
			t.Errorf("%d documents of %d: %v s, measured %v", a.Tiles, a.Keys, got, a.Seconds)
		}
	}
	if got := m.Call(of(few)); got != plain {
		t.Errorf("three documents: %v s, without figures of many %v", got, plain)
	}
	// A document of 64 tokens is slowed down by others by the mean of documents of 16 and of 256, on a logarithmic
	// scale.
	apart := func(a Attention) float64 {
		return rates(0).For(Job{Ranks: 1, PerHost: 1}).Call(of(a)) / m.Call(of(a))
	}
	if got, want := apart(docs(64, 16, 1)), math.Sqrt(apart(short)*apart(long)); math.Abs(got/want-1) > 1e-9 {
		t.Errorf("documents of 64 differ by %v, want %v", got, want)
	}
}

// A product that is narrower than any measured takes at least the copy of its bytes; grouped products and those in E4M3
// have own rates.
func TestNarrowAndGroupedProducts(t *testing.T) {
	table := rates(0)
	set := &table.Sets[0]
	add := func(kind, dtype string, seconds float64) {
		set.Products = append(set.Products,
			Product{Kind: kind, DType: dtype, Rows: 4096, In: 4096, Out: 4096, Seconds: seconds})
	}
	add("group linear", "bf16", 4*math.Pow(4096, 3)/1e14)
	add("scaled linear", "e4m3", math.Pow(4096, 3)/1e14)
	add("group scaled linear", "e4m3", 3*math.Pow(4096, 3)/1e14)
	m := table.For(Job{Ranks: 1, PerHost: 1})
	arena := tensor.NewMeter()
	x, narrow := arena.Alloc(tensor.BF16, 1, 4096, 1, 4096), arena.Alloc(tensor.BF16, 1, 4096, 1, 16)
	scaled := kernels.Scaled{View: arena.Alloc(tensor.U8, 1, 4096, 1, 4096), Factors: arena.Alloc(tensor.F32, 4096)}
	seconds := func(run func(r Recorder)) (t float64) {
		run(func(w Work) { t += m.Work(w) })
		return t
	}
	const mib = 1 << 20
	for what, c := range map[string]struct{ got, want float64 }{
		"wide": {seconds(func(r Recorder) { r.Linear(x, x, x, View{}) }), 2 * math.Pow(4096, 3) / 1e14},
		"x, y and weights of 16 columns": {seconds(func(r Recorder) { r.Linear(narrow, x, narrow, View{}) }),
			m.Copy(32*mib + 2*mib/8)},
		"with its sum": {seconds(func(r Recorder) { r.Linear(x, narrow, narrow, x) }), m.Copy(64*mib + 2*mib/8)},
		"grouped": {seconds(func(r Recorder) {
			r.GroupLinear(x, kernels.Operand{View: x}, x, kernels.Pairs{}, false)
		}), 4 * math.Pow(4096, 3) / 1e14},
		"in E4M3": {seconds(func(r Recorder) { r.ScaledLinear(x, scaled, scaled, x) }), math.Pow(4096, 3) / 1e14},
		"grouped in E4M3": {seconds(func(r Recorder) {
			r.GroupScaledLinear(x, kernels.Operand{View: scaled.View, Factors: scaled.Factors}, scaled, kernels.Pairs{})
		}), 3 * math.Pow(4096, 3) / 1e14},
		"codes of pairs": {seconds(func(r Recorder) {
			r.GroupQuantize(scaled, kernels.Operand{View: narrow, ByToken: true}, View{}, kernels.Pairs{})
		}), m.Copy(32*mib + 16*mib + mib/64)},
		"x and its codes": {seconds(func(r Recorder) { r.Quantize(scaled, kernels.Scaled{}, x, View{}) }),
			m.Copy(32*mib + 16*mib + mib/64)},
		"x and its codes by row and column": {seconds(func(r Recorder) { r.Quantize(scaled, scaled, x, View{}) }),
			m.Copy(32*mib + 32*mib + mib/32)},
	} {
		if math.Abs(c.got/c.want-1) > 0.02 {
			t.Errorf("%s: %v s, want %v", what, c.got, c.want)
		}
	}
}

// A call of the delta rule counts the rows of its segments, and one without segments nothing.
func TestRecordedRule(t *testing.T) {
	m := tensor.NewMeter()
	a := delta.Args{Q: m.Alloc(tensor.BF16, 2, 16, 3, 32), K: m.Alloc(tensor.BF16, 2, 16, 3, 32),
		V: m.Alloc(tensor.BF16, 2, 16, 6, 8), Segments: []delta.Segment{{Lo: 1, Hi: 4}, {Lo: 5, Hi: 9}}}
	var got []Work
	record := Recorder(func(w Work) { got = append(got, w) })
	for i, call := range []func(delta.Kernel, delta.Args) error{delta.Kernel.Summarize, delta.Kernel.Forward,
		delta.Kernel.SummarizeBackward, delta.Kernel.Backward} {
		got = nil
		none := a
		none.Segments = nil
		if err := errors.Join(call(record, a), call(record, none)); err != nil {
			t.Fatal(err)
		}
		want := 2 * 7 * 6 * (10*delta.Chunk*32 + 6*32*32)
		if i == 3 { // also the gradients of both factors
			want *= 3
		}
		if len(got) != 1 || got[0].FLOPs() != float64(want) {
			t.Errorf("call %d: %+v; want %d FLOPs", i, got, want)
		}
	}
}
