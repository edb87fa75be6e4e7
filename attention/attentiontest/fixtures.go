package attentiontest

import (
	"bytes"
	"embed"
	"encoding/json"
	"path"
	"strconv"
	"strings"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

//go:embed testdata/*.safetensors
var fixtureFiles embed.FS

// FixtureTolerance is the largest error of a float32 result against a fixture, over the
// largest value of the tensor.
const FixtureTolerance = 1e-5

// Fixture is an attention that was computed elsewhere in float64: inputs, results and mask of
// a whole sequence in global order, float32 on the host.
type Fixture struct {
	Name          string
	Q, K, V, DOut tensor.View
	Mask          partition.Mask
	Softmax       attention.Softmax
	Out, LSE      tensor.View // LSE: [batch, seq, heads, 1]
	DQ, DK, DV    tensor.View
}

// Fixtures reads all fixtures.
func Fixtures(t testing.TB) []Fixture {
	t.Helper()
	names, err := fixtureFiles.ReadDir("testdata")
	if err != nil {
		t.Fatal(err)
	}
	var all []Fixture
	for _, n := range names {
		data, err := fixtureFiles.ReadFile(path.Join("testdata", n.Name()))
		if err != nil {
			t.Fatal(err)
		}
		f, err := safetensors.New(n.Name(), bytes.NewReader(data), int64(len(data)))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, readFixture(t, strings.TrimSuffix(n.Name(), ".safetensors"), f))
	}
	return all
}

func readFixture(t testing.TB, name string, f *safetensors.File) Fixture {
	t.Helper()
	x := Fixture{Name: name}
	for _, v := range []struct {
		name string
		to   *tensor.View
	}{{"q", &x.Q}, {"k", &x.K}, {"v", &x.V}, {"dout", &x.DOut}, {"out", &x.Out}, {"lse", &x.LSE}, {"dq", &x.DQ},
		{"dk", &x.DK}, {"dv", &x.DV}} {
		info, ok := f.Info(v.name)
		if !ok {
			t.Fatalf("fixture %s has no tensor %q", name, v.name)
		}
		var shape []int
		for _, n := range info.Shape {
			shape = append(shape, int(n))
		}
		*v.to = tensor.New(tensor.F32, shape...)
		if err := f.ReadFloat32(v.name, tensor.Data[float32](*v.to), 0); err != nil {
			t.Fatal(err)
		}
	}
	// The file has LSE as [batch, heads, seq]: the same memory, seen as [batch, seq, heads, 1].
	n := x.Q.Shape()
	x.LSE = tensor.NewView(x.LSE.Memory(), tensor.F32, 0, [4]int{n[0], n[1], n[2], 1},
		[4]int64{int64(n[1] * n[2]), 1, int64(n[1]), 1})

	meta := f.Metadata()
	number := func(key string, otherwise float64) float64 {
		if meta[key] == "" {
			return otherwise
		}
		y, err := strconv.ParseFloat(meta[key], 64)
		if err != nil {
			t.Fatalf("fixture %s, %s: %v", name, key, err)
		}
		return y
	}
	var docs []int
	if err := json.Unmarshal([]byte(meta["docs"]), &docs); err != nil {
		t.Fatalf("fixture %s, docs: %v", name, err)
	}
	var err error
	x.Mask, err = partition.NewMask(meta["causal"] == "true", int(number("window", -1)), n[1], x.K.Len(tensor.Seq),
		docs)
	if err != nil {
		t.Fatalf("fixture %s: %v", name, err)
	}
	x.Softmax = attention.Softmax{Scale: number("scale", 0), Softcap: number("softcap", 0)}
	return x
}

// TestFixtures runs every fixture on one kernel, in one call over the whole sequence.
func TestFixtures(t *testing.T, newRig func(testing.TB) Rig) {
	rig := newRig(t)
	for _, f := range Fixtures(t) {
		t.Run(f.Name, func(t *testing.T) {
			n, m := f.Q.Shape(), f.K.Shape()
			c := Case{Batch: n[0], SeqQ: n[1], SeqK: m[1], Heads: n[2], KVHeads: m[2], Dim: n[3],
				DimV: f.V.Len(tensor.Dim), Softmax: f.Softmax}
			c.Tiles = partition.Plan(partition.Shape{SeqQ: n[1], SeqKV: m[1], Size: 1, Layout: partition.Contiguous{},
				Mask: f.Mask}, 0, 0)
			s, err := c.computed(rig, Dense, tensor.F32,
				inputs{q: read(f.Q), k: read(f.K), v: read(f.V), do: read(f.DOut)})
			must(t, err)
			f.Check(t, attention.Partial{O: s.out, LSE: s.acc.LSE}, s.grads)
		})
	}
}

// Check compares results in global order, float32 or float64 on the host, with the fixture's.
func (f Fixture) Check(t testing.TB, acc attention.Partial, grads attention.Grads) {
	t.Helper()
	for _, r := range []struct {
		name      string
		got, want tensor.View
	}{{"out", acc.O, f.Out}, {"lse", acc.LSE, f.LSE}, {"dq", grads.DQ, f.DQ}, {"dk", grads.DK, f.DK},
		{"dv", grads.DV, f.DV}} {
		Compare(t, r.name, r.got, r.want, FixtureTolerance)
	}
}

// Compare fails if an element of got differs from want by more than tolerance times the largest finite |want|, or is
// NaN. It prints the first such coordinate. Both are float32 or float64 host views.
func Compare(t testing.TB, name string, got, want tensor.View, tolerance float64) {
	t.Helper()
	if got.Shape() != want.Shape() {
		t.Errorf("%s has shape %v, want %v", name, got.Shape(), want.Shape())
		return
	}
	g, w := read(got), read(want)
	report(t, name, want, g, w, largest(w), func(int) float64 { return tolerance })
}
