package state

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/optim"
	"github.com/cprun/cprun/tensor"
)

// Sharding selects the state that each rank keeps only in part (ZeRO, arXiv:1910.02054).
type Sharding int

// These are stages of ZeRO.
const (
	ShardNone       Sharding = iota // every rank has everything
	ShardOptimizer                  // masters and moments: stage 1
	ShardGradients                  // and gradients: stage 2
	ShardParameters                 // and the weights of the model: stage 3
)

// ShardingOf returns the Sharding for a value of memory.shard.
func ShardingOf(word string) Sharding {
	switch word {
	case "optimizer":
		return ShardOptimizer
	case "gradients":
		return ShardGradients
	case "parameters":
		return ShardParameters
	}
	return ShardNone
}

// Options describe the layout of a state.
type Options struct {
	Layout *model.FlatLayout
	Groups []Group // of each bucket of Layout
	Shard  Sharding
	// Compute is the type of the weights in the model. If it is not float32 they are a copy beside Masters; Masters
	// forces a copy.
	Compute  tensor.DType
	Masters  bool
	HalfWire bool // gradients move in bf16, if they are sharded
	AdamW    optim.AdamW
	Frozen   bool // only weights, for passes without training
}

// State holds the model and the optimizer in flat buffers, cut into buckets. A bucket has an equal part for each rank
// of its group: rank r owns part r. A buffer holds all elements, or only this rank's parts in order.
type State struct {
	Flat    *model.FlatLayout
	Masters View // float32: weights of the optimizer
	Grads   View // float32
	M, V    View // float32: moments of Masters
	// Staging is the place for gradients of each bucket in a backward pass; nil if that is Grads. Buckets that are not
	// needed at the same time share memory: see StageOf.
	Staging []View
	Wire    View // bf16: the bucket of gradients on its way to other ranks; zero: they move in float32

	compute View // in the type of activations, all or parts: Masters itself, or a copy
	vectors View // float32: all of the last bucket, if Masters holds parts; else zero
	// Gathered weights of each bucket, in memory shared by StageOf; nil if compute holds all.
	buffers []View

	groups []Group
	parts  []model.Bucket // this rank's part of each bucket in a buffer of parts
	shard  Sharding
	adamw  optim.AdamW
	all    []View // every buffer
}

// New allocates the uninitialised state of one rank.
func New(a Allocator, o Options) (*State, error) {
	s := &State{Flat: o.Layout, groups: o.Groups, adamw: o.AdamW}
	if err := s.divide(); err != nil {
		return nil, err
	}
	all, held := int(s.Flat.Size()), int(s.Flat.Size())
	if s.owned() < s.Flat.Size() { // else one rank has all parts
		s.shard = o.Shard
	}
	if s.shard != ShardNone {
		held = int(s.owned())
	}
	var err error
	vector := func(what string, t tensor.DType, n int) View {
		v, e := a.Vector(what, t, n)
		if e != nil {
			err, a = e, Meter{} // the remainder takes no memory
			v, _ = a.Vector(what, t, n)
		}
		s.all = append(s.all, v)
		return v
	}
	read := all // elements of compute
	if s.shard == ShardParameters {
		read = held
	}
	if o.Masters || o.Compute != tensor.F32 {
		s.Masters, s.compute = vector(Weights, tensor.F32, held), vector(Compute, o.Compute, read)
	} else {
		s.Masters = vector(Weights, tensor.F32, read)
		s.compute = s.Masters
	}
	if s.shard != ShardNone && s.Masters.Size() < all {
		s.vectors = vector(Compute, tensor.F32, int(s.Flat.Buckets[s.Flat.Vectors()].Size()))
	}
	if s.shard == ShardParameters {
		s.buffers = stages(s.Flat, s.vectors, func(n int) View { return vector(Compute, o.Compute, n) })
	}
	if o.Frozen {
		return s, err
	}
	s.M, s.V = vector(Moments, tensor.F32, held), vector(Moments, tensor.F32, held)
	if s.shard >= ShardGradients {
		s.Grads = vector(Gradients, tensor.F32, held)
		s.Staging = stages(s.Flat, View{}, func(n int) View { return vector(Gradients, tensor.F32, n) })
	} else {
		s.Grads = vector(Gradients, tensor.F32, all)
	}
	if o.HalfWire && s.shard != ShardNone {
		largest := slices.MaxFunc(s.Flat.Buckets, func(a, b model.Bucket) int { return cmp.Compare(a.Size(), b.Size()) })
		s.Wire = vector(Gradients, tensor.BF16, int(largest.Size()))
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

// Zero queues the zeroing of every buffer.
func (s *State) Zero(ops model.Elementwise) { ops.Zero(s.all...) }

// Params returns the state for the model.
func (s *State) Params() model.Params {
	p := model.Params{Layout: s.Flat, Weights: s.Masters, Vectors: s.vectors, Compute: s.compute,
		BucketCompute: s.buffers, Grads: s.Grads}
	if s.Staging != nil {
		p.Grads, p.BucketGrads = View{}, s.Staging
	}
	return p
}

// SumSquares adds the squares of this rank's gradients to sum. Over all ranks each gradient counts once, for any
// sharding and groups.
func (s *State) SumSquares(d optim.Device, sum View) {
	if int64(s.Grads.Size()) == s.owned() { // only parts, or everything
		d.SumSquares(sum, s.Grads)
		return
	}
	for b, bucket := range s.Flat.Buckets {
		if bucket.Size() > 0 {
			d.SumSquares(sum, s.Own(s.Grads, b))
		}
	}
}

// Update steps this rank's part of a bucket. norm2 is the square of the global gradient norm.
func (s *State) Update(d optim.Device, bucket int, norm2 View, u optim.Update) {
	p, c := s.Held(s.Masters, bucket), View{}
	vectors := bucket == s.Flat.Vectors()
	if s.compute != s.Masters && !vectors {
		c = s.Held(s.compute, bucket)
	}
	all := []optim.Segment{{Lo: 0, Hi: p.Size(), Decay: !vectors}}
	s.adamw.Step(d, p, c, s.Held(s.Grads, bucket), s.Held(s.M, bucket), s.Held(s.V, bucket), norm2, all, u)
}

// CopyCompute updates the compute copy of this rank's part of a bucket, if there is one.
func (s *State) CopyCompute(ops model.Elementwise, bucket int) {
	if s.compute != s.Masters && bucket != s.Flat.Vectors() {
		ops.Copy(s.Held(s.compute, bucket), s.Held(s.Masters, bucket))
	}
}

// Gathered returns the destination of an all-gather of a bucket's weights, and this rank's part; zero if every rank
// holds all. Buckets with the same Slot have the same destination.
func (s *State) Gathered(bucket int) (dst, src View) {
	switch {
	case s.shard == ShardNone || s.Flat.Buckets[bucket].Size() == 0:
		return View{}, View{}
	case bucket == s.Flat.Vectors() && !s.vectors.IsZero():
		return s.vectors, s.Own(s.Masters, bucket)
	case s.buffers != nil:
		return s.buffers[bucket], s.Own(s.compute, bucket)
	}
	return s.Whole(s.compute, bucket), s.Own(s.compute, bucket)
}

func (s *State) divide() error {
	if len(s.groups) != len(s.Flat.Buckets) {
		return fmt.Errorf("%d groups for %d buckets", len(s.groups), len(s.Flat.Buckets))
	}
	at := int64(0)
	for b, bucket := range s.Flat.Buckets {
		n := int64(s.groups[b].Size)
		if n < 1 || bucket.Size()%n != 0 {
			return fmt.Errorf("bucket %d of %d elements cannot be cut into %d equal parts", b, bucket.Size(), n)
		}
		s.parts = append(s.parts, model.Bucket{Lo: at, Hi: at + bucket.Size()/n})
		at += bucket.Size() / n
	}
	return nil
}

// Stages is the number of memories for whole buckets: of gradients in a backward pass, and of sharded weights.
const Stages = 4

// StageOf returns the memory of a whole bucket's gradients or weights. Layers alternate between two, so that one is
// transferred while the next is computed. The embedding and the head share a third, since they are at opposite ends of
// the pass. The vectors have the last, in use all the time.
func StageOf(flat *model.FlatLayout, bucket int) int {
	switch bucket {
	case model.Embedding, flat.Head():
		return 2
	case flat.Vectors():
		return 3
	}
	return bucket % 2
}

// stages allocates the memories, except given vectors, and returns the view of each bucket.
func stages(flat *model.FlatLayout, vectors View, vector func(n int) View) []View {
	var sizes [Stages]int64
	for b, bucket := range flat.Buckets {
		i := StageOf(flat, b)
		sizes[i] = max(sizes[i], bucket.Size())
	}
	var memories [Stages]View
	for i, n := range sizes {
		if memories[i] = vectors; i < Stages-1 || vectors.IsZero() {
			memories[i] = vector(int(n))
		}
	}
	var out []View
	for b, bucket := range flat.Buckets {
		out = append(out, Part(memories[StageOf(flat, b)], 0, int(bucket.Size())))
	}
	return out
}

// Slot numbers the memory of a bucket's gathered weights.
func (s *State) Slot(bucket int) int {
	if s.buffers == nil {
		return bucket
	}
	return StageOf(s.Flat, bucket)
}

// Group is the Size ranks that reduce a bucket's gradients, with this rank as member Rank. The groups of a bucket
// divide the world equally; each holds its own parameters.
type Group struct{ Rank, Size int }

// Groups returns the same group for each bucket of a layout.
func Groups(flat *model.FlatLayout, g Group) []Group {
	return slices.Repeat([]Group{g}, len(flat.Buckets))
}

// Group returns the group of a bucket.
func (s *State) Group(bucket int) Group { return s.groups[bucket] }

func (s *State) owned() int64 { return s.parts[len(s.parts)-1].Hi }

// Owned returns the range of this rank's part of each bucket in a buffer of parts.
func (s *State) Owned() []model.Bucket { return s.parts }

// Share returns the part of a bucket that this rank owns, in the flat space.
func (s *State) Share(bucket int) model.Bucket {
	lo, n := s.Flat.Buckets[bucket].Lo, s.parts[bucket].Size()
	r := int64(s.groups[bucket].Rank)
	return model.Bucket{Lo: lo + r*n, Hi: lo + (r+1)*n}
}

// Own returns this rank's part of a bucket in a flat buffer.
func (s *State) Own(v View, bucket int) View {
	r := s.Share(bucket)
	if int64(v.Size()) != s.Flat.Size() { // it holds parts
		r = s.parts[bucket]
	}
	return Part(v, int(r.Lo), int(r.Hi))
}

// Whole returns a bucket of a flat buffer that holds all.
func (s *State) Whole(v View, bucket int) View {
	b := s.Flat.Buckets[bucket]
	return Part(v, int(b.Lo), int(b.Hi))
}

// Held returns the part of a bucket in a flat buffer of the optimizer.
func (s *State) Held(v View, bucket int) View {
	if s.shard == ShardNone {
		return s.Whole(v, bucket)
	}
	return s.Own(v, bucket)
}

// HeldRange returns the range of Held in the flat space.
func (s *State) HeldRange(bucket int) model.Bucket {
	if s.shard == ShardNone {
		return s.Flat.Buckets[bucket]
	}
	return s.Share(bucket)
}

// Staged returns this rank's part of a bucket's staged gradients.
func (s *State) Staged(bucket int) View {
	n, r := int(s.parts[bucket].Size()), s.groups[bucket].Rank
	return Part(s.Staging[bucket], r*n, (r+1)*n)
}

// Sharded reports whether ranks keep only parts of some state.
func (s *State) Sharded() bool { return s.shard != ShardNone }

// Gathers reports whether passes gather weights in memory that buckets share.
func (s *State) Gathers() bool { return s.buffers != nil }

// Part returns the elements [lo, hi) of a vector.
func Part(v View, lo, hi int) View { return v.Slice(tensor.Dim, lo, hi) }
