package state

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/hf"
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

// PieceSlots is the number of pieces of an optimizer on the host that are on the device at once.
const PieceSlots = 3

// PieceSize is the most elements of each of the three vectors in a piece, enough for copies at the link's speed. Tests
// change it.
var PieceSize = 2 << 20

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
	Slots    int  // layers with sharded weights in memory at once; 0: LeastSlots
	Host     bool // masters and moments are in host memory; see Step
}

// State holds the model and the optimizer in flat buffers, cut into buckets. A bucket has an equal part for each rank
// of its group: rank r owns part r. A buffer holds all elements, or only this rank's parts in order.
type State struct {
	Flat    *model.FlatLayout
	Masters View // float32: weights of the optimizer
	Grads   View // float32
	M, V    View // float32: moments of Masters
	Factors View // float32: of all rows of matrices in E4M3
	OnHost  bool // Masters, M and V are in host memory, and pass through Pieces
	Pieces  [PieceSlots][3]View
	// Staging is the place for gradients of each bucket in a backward pass; nil if that is Grads. Buckets that are not
	// needed at the same time share memory: see StageOf.
	Staging []View
	Wire    View // bf16: the bucket of gradients on its way to other ranks; zero: they move in float32

	compute View // in the type of activations, all or parts: Masters itself, or a copy
	vectors View // float32: all of the last bucket, if Masters holds parts or is on the host; else zero
	// Gathered weights of each bucket, in memory shared by StageOf with slots; nil if compute holds all.
	buffers []View
	slots   int

	// The model reads matrices in E4M3 from codes, uint8, all or parts, which compute does not have.
	codes View
	// updated, in the type of compute, has the weights that Quantize reads: of a bucket, with keeps of all, and of a base
	// those of a Rows. Zero: Masters.
	updated View
	keeps   bool
	cut     View // of a base: the codes of a row of which this rank has a part

	// Base holds the weights that training does not change, without masters, moments and gradients; nil: none. With
	// ShardParameters it is in parts too. Its vectors are whole, in float32.
	Base   *State
	unread View // of Base; see model.Params

	groups []Group
	parts  []model.Range // this rank's part of each bucket in a buffer of parts
	copies int           // the parts of each bucket in compute, if that holds no whole buckets
	shard  Sharding
	adamw  optim.AdamW
	all    []View // every buffer
}

// New allocates the uninitialised state of one rank.
func New(a Allocator, o Options) (*State, error) {
	s := &State{Flat: o.Layout, groups: o.Groups, adamw: o.AdamW, copies: 1, OnHost: o.Host && !o.Frozen,
		slots: max(LeastSlots, min(o.Slots, len(o.Layout.Buckets)-2))} // no more stages than buckets
	if err := s.divide(); err != nil {
		return nil, err
	}
	if s.owned() < s.Flat.Size() { // else one rank has all parts
		s.shard = o.Shard
	}
	if s.shard == ShardParameters {
		s.copies = max(1, s.groups[0].Copies)
	}
	t := &taking{Allocator: a, host: s.OnHost}
	s.takeWeights(t, o)
	if !o.Frozen {
		s.takeTraining(t, o)
	}
	if o.Layout.Frozen != nil {
		if err := s.takeBase(t, o); err != nil {
			return nil, err
		}
	}
	s.all = t.device
	return s, t.err
}

// takeBase allocates the base. Each copy of the model divides it over its own ranks.
func (s *State) takeBase(t *taking, o Options) error {
	b := &State{Flat: o.Layout.Frozen, copies: 1}
	longest, row := 1, 0
	for _, p := range b.Flat.Params {
		if p.Kind == hf.Product {
			row = max(row, p.Shape[1])
		} else {
			longest = max(longest, p.Size())
		}
	}
	for _, g := range o.Groups {
		n := 1
		if o.Shard == ShardParameters {
			n = g.Size / max(1, g.Copies)
		}
		b.groups = append(b.groups, Group{Rank: g.Rank / max(1, g.Copies) % n, Size: n})
	}
	if err := b.divide(); err != nil {
		return err
	}
	read := int(b.owned())
	if int64(read) < b.Flat.Size() {
		b.shard = ShardParameters
	}
	b.compute = t.vector(Base, o.Compute, read-int(b.codesIn(1)))
	if b.Flat.CodesSize() > 0 {
		b.takeCodes(t, Base, 1)
		b.updated = t.vector(Base, o.Compute, max(row, min(LoadSize, int(b.Flat.CodesSize()))))
		b.cut = t.vector(Base, tensor.U8, row)
	}
	b.vectors = t.vector(Base, tensor.F32, int(b.Flat.Buckets[b.Flat.Vectors()].Size()))
	if !o.Frozen {
		b.unread = t.vector(Base, tensor.F32, longest)
	}
	if b.shard == ShardParameters {
		b.buffers = b.takeBuffers(t, Base, o.Compute, s.slots)
	}
	s.Base = b
	return nil
}

// Place returns the view of this rank's part of a bucket of the base, and its range in the flat space.
func (s *State) Place(bucket int) (View, model.Range) {
	if bucket == s.Flat.Vectors() {
		return s.vectors, s.Flat.Buckets[bucket].Range
	}
	return s.Held(s.Read(bucket), bucket), s.HeldRange(bucket)
}

// takeWeights allocates masters, the model's copy, and memory to gather it.
func (s *State) takeWeights(t *taking, o Options) {
	read, parts := int(s.Flat.Size()), 0 // elements of compute, and parts of each bucket in it; 0: all
	if s.shard == ShardParameters {
		read, parts = s.held()*s.copies, s.copies
	}
	if o.Masters || o.Compute != tensor.F32 || s.OnHost || s.copies > 1 {
		s.Masters = t.optimizer(Weights, s.held())
		s.compute = t.vector(Compute, o.Compute, read-int(s.codesIn(int64(parts))))
	} else {
		s.Masters = t.vector(Weights, tensor.F32, read)
		s.compute = s.Masters
	}
	if s.Flat.CodesSize() > 0 {
		s.takeCodes(t, Compute, int64(parts))
		if s.compute != s.Masters {
			s.takeUpdated(t, o.Compute)
		}
	}
	if s.OnHost || s.shard != ShardNone && s.Masters.Size() < int(s.Flat.Size()) {
		s.vectors = t.vector(Compute, tensor.F32, int(s.Flat.Buckets[s.Flat.Vectors()].Size()))
	}
	if s.shard == ShardParameters {
		s.buffers = s.takeBuffers(t, Compute, o.Compute, s.slots)
	}
}

func (s *State) takeTraining(t *taking, o Options) {
	s.M, s.V = t.optimizer(Moments, s.held()), t.optimizer(Moments, s.held())
	for i := range s.Pieces {
		for j := range s.Pieces[i] {
			if s.OnHost {
				s.Pieces[i][j] = t.vector(Moments, tensor.F32, min(s.held(), PieceSize))
			}
		}
	}
	if s.shard >= ShardGradients {
		s.Grads = t.vector(Gradients, tensor.F32, s.held())
		s.Staging = stages(s.Flat, LeastSlots, View{}, func(_, n int) View { return t.vector(Gradients, tensor.F32, n) })
	} else {
		s.Grads = t.vector(Gradients, tensor.F32, int(s.Flat.Size()))
	}
	if o.HalfWire && s.shard != ShardNone {
		largest := slices.MaxFunc(s.Flat.Buckets, func(a, b model.Bucket) int { return cmp.Compare(a.Size(), b.Size()) })
		s.Wire = t.vector(Gradients, tensor.BF16, int(largest.Size()))
	}
}

// A taking allocates vectors. After an error it only counts them.
type taking struct {
	Allocator
	host   bool // the optimizer's vectors are in host memory
	device []View
	err    error
}

// vector allocates memory of the device.
func (t *taking) vector(what string, dtype tensor.DType, n int) View {
	v := t.take(func() (View, error) { return t.Vector(what, dtype, n) })
	t.device = append(t.device, v)
	return v
}

// optimizer allocates a float32 vector of the optimizer.
func (t *taking) optimizer(what string, n int) View {
	if !t.host {
		return t.vector(what, tensor.F32, n)
	}
	return t.take(func() (View, error) { return t.HostVector(what, tensor.F32, n) })
}

func (t *taking) take(from func() (View, error)) View {
	v, err := from()
	if err != nil {
		t.err, t.Allocator = err, Meter{}
		v, _ = from()
	}
	return v
}

// Zero queues the zeroing of every buffer.
func (s *State) Zero(ops model.Elementwise) { ops.Zero(s.all...) }

// Params returns the state for the model.
func (s *State) Params() model.Params {
	p := model.Params{Layout: s.Flat, Weights: s.Masters, Vectors: s.vectors, Compute: s.compute, Codes: s.codes,
		Factors: s.Factors, BucketCompute: s.buffers, Grads: s.Grads}
	if s.compute == s.Masters && s.buffers == nil {
		p.Compute = Part(s.compute, int(s.Flat.CodesSize()), s.compute.Size())
	}
	if s.Staging != nil {
		p.Grads, p.BucketGrads = View{}, s.Staging
	}
	if s.Base != nil {
		base := s.Base.Params()
		base.Unread = s.Base.unread
		p.Frozen = &base
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

// Update steps this rank's part of a bucket, if the optimizer's state is on the device. norm2 is the square of the
// global gradient norm.
func (s *State) Update(d optim.Device, bucket int, norm2 View, u optim.Update) {
	s.Step(d, bucket, 0, s.Held(s.Masters, bucket), s.Held(s.M, bucket), s.Held(s.V, bucket), norm2, u)
}

// Step steps a piece of this rank's part of a bucket from element lo, given its masters and moments on the device.
func (s *State) Step(d optim.Device, bucket, lo int, p, m, v, norm2 View, u optim.Update) {
	n := p.Size()
	s.adamw.Step(d, p, s.Copied(bucket, lo, n), Part(s.Held(s.Grads, bucket), lo, lo+n), m, v, norm2,
		bucket != s.Flat.Vectors(), u)
}

// Copied returns the model's copy of n elements of this rank's part of a bucket from lo; zero if the model reads
// Masters.
func (s *State) Copied(bucket, lo, n int) View {
	switch {
	case s.Flat.Scaled(bucket):
		if s.updated.IsZero() {
			return View{}
		}
		for b := range bucket {
			if s.keeps { // the matrices in E4M3 come first
				lo += int(s.HeldRange(b).Size())
			}
		}
		return Part(s.updated, lo, lo+n)
	case bucket != s.Flat.Vectors() && s.compute != s.Masters:
		return Part(s.Held(s.compute, bucket), lo, lo+n)
	case bucket == s.Flat.Vectors() && s.OnHost:
		r := s.HeldRange(bucket)
		at := int(r.Lo-s.Flat.Buckets[bucket].Lo) + lo
		return Part(s.vectors, at, at+n)
	}
	return View{}
}

// CopyCompute updates the model's copy of this rank's part of a bucket, if there is one.
func (s *State) CopyCompute(ops model.Elementwise, bucket int) {
	held := s.Held(s.Masters, bucket)
	if c := s.Copied(bucket, 0, held.Size()); !c.IsZero() {
		ops.Copy(c, held)
	}
}

// Gathered returns the destination of an all-gather of a bucket's weights, and this rank's part; zero if every rank
// holds all. Buckets with the same Slot have the same destination.
func (s *State) Gathered(bucket int) (dst, src View) {
	switch {
	case s.shard == ShardNone || s.Flat.Buckets[bucket].Size() == 0 || s.Masters.IsZero() && bucket == s.Flat.Vectors():
		return View{}, View{}
	case bucket == s.Flat.Vectors() && s.OnHost:
		return s.vectors, s.Copied(bucket, 0, int(s.parts[bucket].Size()))
	case bucket == s.Flat.Vectors() && !s.vectors.IsZero():
		return s.vectors, s.Own(s.Masters, bucket)
	case s.buffers != nil:
		return s.buffers[bucket], s.chunk(bucket)
	}
	return s.Whole(s.Read(bucket), bucket), s.Own(s.Read(bucket), bucket)
}

// Spread returns the destination of an all-gather of a bucket's updated weights between the copies of the model, and
// this rank's part; zero without copies.
func (s *State) Spread(bucket int) (dst, src View) {
	if s.copies == 1 || bucket == s.Flat.Vectors() {
		return View{}, View{}
	}
	return s.chunk(bucket), s.Own(s.Read(bucket), bucket)
}

// chunk returns the parts of a bucket in codes or compute.
func (s *State) chunk(bucket int) View {
	v, p, n := s.Read(bucket), s.parts[bucket], int64(s.copies)
	return Part(v, int(p.Lo*n-s.skipped(v)), int(p.Hi*n-s.skipped(v)))
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
		s.parts = append(s.parts, model.Range{Lo: at, Hi: at + bucket.Size()/n})
		at += bucket.Size() / n
	}
	return nil
}

// LeastSlots is the number of layers with gradients in memory at once in a backward pass: one is transferred while the
// next is computed. Sharded weights have as many slots, or more.
const LeastSlots = 2

// Stages returns the number of memories for whole buckets, of gradients or weights, with slots for layers.
func Stages(slots int) int { return 2*slots + 2 }

// StageOf returns the memory of a whole bucket. Layers take the slots in turn, and their matrices in E4M3 others. The
// embedding and the head share one, since they are at opposite ends of the pass. The vectors have theirs all the time.
func StageOf(flat *model.FlatLayout, bucket, slots int) int {
	switch key := flat.Buckets[bucket].Key; key.Part {
	case model.LayerMatrices:
		return key.Layer % slots
	case model.AllVectors:
		return slots + 1
	case model.ScaledMatrices:
		return slots + 2 + key.Layer%slots
	}
	return slots
}

// stages allocates the memories, except given vectors, and returns the view of each bucket.
func stages(flat *model.FlatLayout, slots int, vectors View, vector func(stage, n int) View) []View {
	sizes, memories := make([]int64, Stages(slots)), make([]View, Stages(slots))
	for b, bucket := range flat.Buckets {
		i := StageOf(flat, b, slots)
		sizes[i] = max(sizes[i], bucket.Size())
	}
	for i, n := range sizes {
		if memories[i] = vectors; i != slots+1 || vectors.IsZero() {
			memories[i] = vector(i, int(n))
		}
	}
	var out []View
	for b, bucket := range flat.Buckets {
		out = append(out, Part(memories[StageOf(flat, b, slots)], 0, int(bucket.Size())))
	}
	return out
}

// Slot numbers the memory of a bucket's gathered weights.
func (s *State) Slot(bucket int) int {
	if s.buffers == nil {
		return bucket
	}
	return StageOf(s.Flat, bucket, s.slots)
}

// Group is the Size ranks that reduce a bucket's gradients, with this rank as member Rank. The groups of a bucket
// divide the world equally; each holds its own parameters.
//
// With ShardParameters, Copies above 1 divides the weights over Size/Copies ranks only, so that a host gathers them
// without the network (arXiv:2306.10209, hpZ). Each copy has one of every Copies neighbours in the group, and they have
// the same weights. All groups have the same Copies.
type Group struct{ Rank, Size, Copies int }

// Groups returns the same group for each bucket of a layout.
func Groups(flat *model.FlatLayout, g Group) []Group {
	return slices.Repeat([]Group{g}, len(flat.Buckets))
}

// Group returns the group of a bucket.
func (s *State) Group(bucket int) Group { return s.groups[bucket] }

func (s *State) owned() int64 { return s.parts[len(s.parts)-1].Hi }

// held returns the elements of a flat buffer of the optimizer.
func (s *State) held() int {
	if s.shard == ShardNone {
		return int(s.Flat.Size())
	}
	return int(s.owned())
}

// Owned returns the range of this rank's part of each bucket in a buffer of parts.
func (s *State) Owned() []model.Range { return s.parts }

// Share returns the part of a bucket that this rank owns, in the flat space.
func (s *State) Share(bucket int) model.Range {
	lo, n := s.Flat.Buckets[bucket].Lo, s.parts[bucket].Size()
	r := int64(s.groups[bucket].Rank)
	return model.Range{Lo: lo + r*n, Hi: lo + (r+1)*n}
}

// partsIn returns the number of parts of each bucket that one of the state's flat buffers holds; 0: it holds all.
func (s *State) partsIn(v View) int64 {
	switch {
	case (v == s.compute || v == s.codes) && s.shard == ShardParameters:
		return int64(s.copies)
	case v == s.compute, v == s.codes, v == s.Grads && s.shard < ShardGradients, s.shard == ShardNone:
		return 0
	}
	return 1
}

// Own returns this rank's part of a bucket in one of the state's flat buffers.
func (s *State) Own(v View, bucket int) View {
	r := s.Share(bucket)
	if n := s.partsIn(v); n > 0 {
		part := s.parts[bucket]
		r.Lo = part.Lo*n + int64(s.groups[bucket].Rank)%n*part.Size()
		r.Hi = r.Lo + part.Size()
	}
	return Part(v, int(r.Lo-s.skipped(v)), int(r.Hi-s.skipped(v)))
}

// Whole returns a bucket of a flat buffer that holds all.
func (s *State) Whole(v View, bucket int) View {
	b := s.Flat.Buckets[bucket]
	return Part(v, int(b.Lo-s.skipped(v)), int(b.Hi-s.skipped(v)))
}

// Held returns the part of a bucket in a flat buffer of the optimizer.
func (s *State) Held(v View, bucket int) View {
	if s.shard == ShardNone {
		return s.Whole(v, bucket)
	}
	return s.Own(v, bucket)
}

// HeldRange returns the range of Held in the flat space.
func (s *State) HeldRange(bucket int) model.Range {
	if s.shard == ShardNone {
		return s.Flat.Buckets[bucket].Range
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
