package train

import (
	"slices"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/tensor"
)

// A noAttention leaves its results unchanged.
type noAttention struct{}

func (noAttention) Forward(int, attention.Partial, View, View, View) error { return nil }

func (noAttention) Backward(int, attention.Grads, View, View, View, View, attention.Partial) error {
	return nil
}

// Sharing and offloading rely on this: a model announces each use of weights, the gradients of every bucket begin and end
// once per pass, two buckets with the same staging buffer are never open at the same time, and a layer is brought before
// the first use of its segment.
func TestHooksComeInTheOrderOfTheTransfers(t *testing.T) {
	input, away := model.Retain{Save: model.SaveInput}, model.Retain{Save: model.SaveInput, Host: true}
	nothing := model.Retain{Save: model.SaveNothing}
	for n := range 8 {
		tied := n%2 == 1
		layers := [][]model.Retain{nil, {away, away, away, away, away}, {away, nothing, input, nothing, nothing},
			{input, nothing, nothing, away, nothing}}[n/2]
		back := [][]int{{5, 4, 3, 2, 1}, {5, 4, 3, 2, 1}, {3, 4, 5, 4, 3, 1, 2, 1}, {4, 5, 4, 1, 2, 3, 2, 1}}[n/2]
		moves := [][]int{nil, {1, 2, 3, 4, 5, -5, -4, -3, -2, -1}, {1, -1}, {4, -4}}[n/2]
		cfg := &hf.Config{
			Architecture: hf.Qwen3, VocabSize: 11, HiddenSize: 8, IntermediateSize: 12, NumHiddenLayers: 5,
			NumAttentionHeads: 2, NumKeyValueHeads: 1, HeadDim: 4, RMSNormEps: 1e-6, TieWordEmbeddings: tied,
		}
		stream := tensor.NewHostStream("compute")
		dev := Device{Stream: stream, Ops: cpu.New(stream), Compute: tensor.F32}
		flat := model.NewLayout(cfg, 2)
		var used, open, moved []int
		announced := model.NoBucket
		ended := map[int]bool{}
		slot := map[int]int{} // staging buffer of each open bucket
		hooks := model.Hooks{
			Use: func(b, next int) error {
				if len(used) > 0 && b != announced {
					t.Errorf("case %d: bucket %d is used, and %d was announced", n, b, announced)
				}
				used, announced = append(used, b), next
				return nil
			},
			Begin: func(b int) bool {
				if ended[b] || slices.Contains(open, b) {
					t.Errorf("case %d: bucket %d begins twice", n, b)
				}
				for _, other := range open {
					if flat.Buckets[b].Size() > 0 && flat.Buckets[other].Size() > 0 &&
						slot[other] == state.StageOf(flat, b, state.LeastSlots) {
						t.Errorf("case %d: buckets %d and %d are staged in one memory", n, b, other)
					}
				}
				open, slot[b] = append(open, b), state.StageOf(flat, b, state.LeastSlots)
				return false
			},
			Done: func(b int) error {
				i := slices.Index(open, b)
				if i < 0 {
					t.Fatalf("case %d: bucket %d ends and has not begun", n, b)
				}
				open, ended[b] = slices.Delete(open, i, i+1), true
				return nil
			},
			Keep: func(layer int, _ []View) {
				moved = append(moved, flat.Layer(layer))
				if b := used[len(used)-1]; b != flat.Layer(layer) {
					t.Errorf("case %d: layer %d is kept after the use of bucket %d", n, layer, b)
				}
			},
			Bring: func(layer int, _ []View) {
				moved = append(moved, -flat.Layer(layer))
				if b := used[len(used)-1]; b != flat.Layer(layer) || slices.Contains(open, b) {
					t.Errorf("case %d: layer %d is brought after the use of bucket %d, open %v", n, layer, b, open)
				}
			},
		}
		n := int(flat.Size())
		weights, grads := tensor.New(tensor.F32, n), tensor.New(tensor.F32, n)
		m := model.New(cfg, dev.Ops, noAttention{}, model.Params{Layout: flat, Weights: weights, Compute: weights,
			Grads: grads}, model.Options{Hooks: hooks, Layers: layers})
		ids := tensor.New(tensor.I32, 1, 3, 1, 1)
		table := tensor.New(tensor.F32, 1, 3, 1, 2)
		b := model.Batch{IDs: ids, Targets: ids, Cos: table, Sin: table}
		arena := tensor.NewHostArena(0)
		if err := m.ForwardBackward(arena, b, tensor.New(tensor.F64, 1), 1); err != nil {
			t.Fatal(err)
		}
		if err := stream.Close(); err != nil {
			t.Fatal(err)
		}
		want := append([]int{flat.Embedding(), flat.Vectors(), 1, 2, 3, 4, 5, flat.Head()}, back...)
		if tied {
			want[7] = flat.Embedding()
		}
		if !slices.Equal(moved, moves) {
			t.Errorf("case %d: layers are moved in the order %v, want %v", n, moved, moves)
		}
		if !slices.Equal(used, want) || announced != model.NoBucket {
			t.Errorf("case %d: buckets are used in the order %v, then %d, want %v", n, used, announced, want)
		}
		for b, bucket := range flat.Buckets {
			if bucket.Size() > 0 && !ended[b] {
				t.Errorf("case %d: the gradients of bucket %d never end", n, b)
			}
		}
	}
}
