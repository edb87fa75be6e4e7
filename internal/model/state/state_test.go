package state

import (
	"errors"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

func layout(ranks int) *model.FlatLayout {
	return model.NewLayout(&hf.Config{
		Architecture: hf.Llama, VocabSize: 37, HiddenSize: 8, IntermediateSize: 12, NumHiddenLayers: 2,
		NumAttentionHeads: 2, NumKeyValueHeads: 1, HeadDim: 4, RMSNormEps: 1e-6,
	}, ranks)
}

// The parts of a bucket tile it over its group, and the parts of a rank tile its shard.
func TestPartsTile(t *testing.T) {
	flat := layout(4)
	sizes := []int{4, 2, 1, 4, 2}
	for b, bucket := range flat.Buckets {
		at := bucket.Lo
		for rank := range sizes[b] {
			groups := make([]Group, len(sizes))
			for i, n := range sizes {
				groups[i] = Group{Rank: rank % n, Size: n}
			}
			shard := ShardGradients + Sharding(rank%2)
			s := must.Have(New(Meter{}, Options{Layout: flat, Groups: groups, Shard: shard, Compute: tensor.BF16}))
			if part := s.Share(b); part.Lo != at {
				t.Errorf("bucket %d, rank %d: the part begins at %d, want %d", b, rank, part.Lo, at)
			}
			at = s.Share(b).Hi
			next := int64(0)
			for i, part := range s.Owned() {
				if part.Lo != next || part.Size() != flat.Buckets[i].Size()/int64(sizes[i]) {
					t.Errorf("bucket %d of %v is held at %v, want %d elements from %d on", i, sizes, part,
						flat.Buckets[i].Size()/int64(sizes[i]), next)
				}
				next = part.Hi
			}
			if int64(s.Masters.Size()) != next || s.M.Size() != s.Masters.Size() || s.Grads.Size() != s.Masters.Size() {
				t.Errorf("%d masters, %d moments and %d gradients for parts of %d", s.Masters.Size(), s.M.Size(),
					s.Grads.Size(), next)
			}
		}
		if at != bucket.Hi {
			t.Errorf("bucket %d: the parts end at %d, want %d", b, at, bucket.Hi)
		}
	}
}

// Each sharding takes the bytes of its stage of ZeRO, and buffers of the largest layer, embedding and vectors.
func TestBytesOfShardings(t *testing.T) {
	const ranks = 4
	flat := layout(ranks)
	all, whole := flat.Size(), func(b int) int64 { return flat.Buckets[b].Size() }
	buffers := whole(flat.Layer(0)) + whole(flat.Layer(1)) + max(whole(flat.Embedding()), whole(flat.Head()))
	vectors := whole(flat.Vectors())
	for _, c := range []struct {
		shard                         Sharding
		masters                       bool
		weights, compute, grads, m, v int64
	}{
		{ShardNone, false, all, 0, all, all, all},
		{ShardOptimizer, false, all, 0, all, all / ranks, all / ranks},
		{ShardGradients, true, all / ranks, all + vectors, all/ranks + buffers + vectors, all / ranks, all / ranks},
		{ShardParameters, false, all / ranks, buffers + vectors, all/ranks + buffers + vectors, all / ranks, all / ranks},
		{ShardParameters, true, all / ranks, all/ranks + buffers + vectors, all/ranks + buffers + vectors, all / ranks,
			all / ranks},
	} {
		meter := Meter{}
		o := Options{Layout: flat, Groups: Groups(flat, Group{Size: ranks}), Shard: c.shard, Compute: tensor.F32,
			Masters: c.masters}
		must.Have(New(meter, o))
		want := Meter{Weights: 4 * c.weights, Compute: 4 * c.compute, Gradients: 4 * c.grads, Moments: 4 * (c.m + c.v)}
		for what, n := range want {
			if meter[what] != n {
				t.Errorf("sharding %d, masters %t: %s take %d bytes, want %d", c.shard, c.masters, what, meter[what], n)
			}
		}
	}
}

// Copies keep Copies parts of each bucket on a rank, and the masters in float32 beside them.
func TestBytesOfCopies(t *testing.T) {
	flat := layout(4)
	meters := map[int]Meter{}
	for _, copies := range []int{1, 2} {
		meters[copies] = Meter{}
		o := Options{Layout: flat, Groups: Groups(flat, Group{Rank: 3, Size: 4, Copies: copies}), Shard: ShardParameters,
			Compute: tensor.BF16}
		must.Have(New(meters[copies], o))
	}
	more := meters[2][Compute] - meters[1][Compute]
	if want := 2 * flat.Size() / 4; more != want || meters[2][Weights] != meters[1][Weights] {
		t.Errorf("two copies take %d bytes more, want %d", more, want)
	}
}

// A limited is an Allocator that fails after some vectors.
type limited struct {
	Meter
	left int
}

func (l *limited) Vector(what string, t tensor.DType, n int) (View, error) {
	if l.left--; l.left < 0 {
		return View{}, errors.New("no memory for " + what)
	}
	return l.Meter.Vector(what, t, n)
}

// Wherever memory ends, New returns the first error.
func TestNoMemory(t *testing.T) {
	flat := layout(2)
	o := Options{Layout: flat, Groups: Groups(flat, Group{Size: 2}), Shard: ShardParameters, Compute: tensor.BF16}
	for left := 0; ; left++ {
		s, err := New(&limited{Meter: Meter{}, left: left}, o)
		if err == nil {
			if left != len(s.all) {
				t.Errorf("%d vectors were enough for %d", left, len(s.all))
			}
			return
		}
	}
}

func TestGroupsThatDoNotFitAreRefused(t *testing.T) {
	flat := layout(4)
	for what, groups := range map[string][]Group{
		"none":         nil,
		"no ranks":     slices.Repeat([]Group{{}}, len(flat.Buckets)),
		"odd division": Groups(flat, Group{Size: 7}),
	} {
		if _, err := New(Meter{}, Options{Layout: flat, Groups: groups, Compute: tensor.F32}); err == nil {
			t.Errorf("%s: no error", what)
		}
	}
}

// The memory of batches is allocated once, and again only for larger batches.
func TestBatchesGrow(t *testing.T) {
	for _, packed := range []bool{false, true} {
		m, f := Meter{}, Format{Pairs: 4, Packed: packed}
		b := must.Have(NewBatches(m, f, 100))
		// Lists of 100 tokens take 128 words; the tables have four pairs for each token.
		want := int64(2*4*2*128 + 2*4*4*100)
		if packed {
			want = 2 * 4 * (2*128 + 2*4*128)
		}
		if m[Inputs] != want {
			t.Errorf("packed %t: %d bytes for 100 tokens, want %d", packed, m[Inputs], want)
		}
		if err := b.Grow(0, 90); err != nil || m[Inputs] != want {
			t.Errorf("packed %t: a smaller batch took memory (%v)", packed, err)
		}
		if err := b.Grow(1, 200); err != nil || m[Inputs] != want+6*int64(f.Words(200)) {
			t.Errorf("packed %t: a batch of 200 tokens took %d bytes, want %d (%v)", packed, m[Inputs]-want,
				6*f.Words(200), err)
		}
	}
}

// vectors implements Allocator and counts its allocations.
type vectors struct {
	Meter
	count int
}

func (v *vectors) Vector(what string, t tensor.DType, n int) (View, error) {
	v.count++
	return v.Meter.Vector(what, t, n)
}

// Batches that grow a little 1,000 times take few allocations, and not many times the memory of the last one.
func TestBatchesGrowSlowly(t *testing.T) {
	for _, packed := range []bool{false, true} {
		m, f := &vectors{Meter: Meter{}}, Format{Pairs: 4, Packed: packed}
		b := must.Have(NewBatches(m, f, 1000))
		tokens := 1000
		for i := range 1000 {
			tokens += 64
			must.Do(t, errors.Join(b.Grow(i%2, tokens), b.GrowTables(tokens)))
		}
		exact := Meter{}
		must.Have(NewBatches(exact, f, tokens))
		if m.count > 60 || m.Meter[Inputs] > 5*exact[Inputs]+4*2*4*int64(tokens) {
			t.Errorf("packed %t: %d vectors of %d bytes, where the last ones need %d", packed, m.count, m.Meter[Inputs],
				exact[Inputs])
		}
	}
}
