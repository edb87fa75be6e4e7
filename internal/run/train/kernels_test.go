package train

import (
	"slices"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// Each kind of layer has the kernels of its own calls.
func TestKernelsOfLayersAreThoseLaunched(t *testing.T) {
	var k struct {
		attention.Kernel
		attention.Launches
	}
	a := &attend{ring: &ring.Ring{Kernel: &k}, kernels: map[hf.Mixer][]string{}, cfg: &hf.Config{NumHiddenLayers: 2,
		SlidingWindow: 3, LayerTypes: []string{"sliding_attention", "full_attention"}}}
	for _, call := range []struct {
		layer int
		names []string
	}{{0, []string{"a", "b", "a"}}, {1, []string{"c"}}, {1, []string{"d", "c"}}, {0, []string{"b"}}} {
		for _, name := range call.names {
			k.Launch(name)
		}
		a.note(a.cfg.Layer(call.layer).Mixer)
	}
	for layer, want := range [][]string{{"a", "b"}, {"c", "d"}} {
		if got := a.kernels[a.cfg.Layer(layer).Mixer]; !slices.Equal(got, want) {
			t.Errorf("layer %d: %v, want %v", layer, got, want)
		}
	}
}

// alike serves a sample of these tokens.
type alike struct {
	samples
	ids []int32
}

func (a alike) Load(_ int64, _ []partition.Span, ids, _ []int32, _ []int) error {
	copy(ids, a.ids)
	return nil
}

// The tries of a probe put different tokens into a place, tokens of the shard first.
func TestTriesOfAProbeDiffer(t *testing.T) {
	for _, c := range []struct{ ids, want []int32 }{
		{[]int32{5, 6, 5, 7}, []int32{6, 7, 8}}, {[]int32{9, 9, 9, 9}, []int32{0, 1, 2}},
		{[]int32{1, 2, 3, 4}, []int32{1, 2, 4}},
	} {
		for try, want := range c.want {
			ids := make([]int32, 4)
			err := changed{alike{ids: c.ids}, 2, 10, try}.Load(0, []partition.Span{{Len: 4, Stride: 1}}, ids, nil, nil)
			if err != nil || ids[2] != want || ids[0] != c.ids[0] || ids[3] != c.ids[3] {
				t.Errorf("%v, try %d: %v, %v", c.ids, try, ids, err)
			}
		}
	}
}
