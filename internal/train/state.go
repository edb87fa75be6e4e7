package train

import (
	"github.com/cprun/cprun/internal/checkpoint"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/optim"
	"github.com/cprun/cprun/internal/plan"
	"github.com/cprun/cprun/internal/tensor"
)

// sharding says what of the state a rank keeps of its own part alone (ZeRO, arXiv:1910.02054).
type sharding int

const (
	shardNone      sharding = iota // everything is on every rank
	shardOptimizer                 // masters and moments: stage 1
	shardGradients                 // and gradients: stage 2
)

func shardingOf(word string, ranks int) sharding {
	switch {
	case ranks == 1: // its part is everything
		return shardNone
	case word == "optimizer":
		return shardOptimizer
	case word == "gradients":
		return shardGradients
	}
	return shardNone
}

// state is the model and the optimizer in flat buffers. They are cut into buckets, and each
// bucket into as many equal parts as there are ranks: rank r owns part r of every bucket. A
// buffer holds all elements, or the parts that this rank owns, one behind the other.
type state struct {
	flat       *model.FlatLayout
	rank, size int
	shard      sharding
	adamw      optim.AdamW

	masters View // float32: what is stepped
	compute View // all, in the type of activations: masters itself, unless the device keeps both
	vectors View // float32: all of the last bucket, where masters holds parts; else zero
	grads   View // float32
	m, v    View // float32 moments of what is stepped

	// staging is, for each bucket, where a backward pass adds its gradients, where grads holds
	// parts. Buckets that a pass does not need at once share memory: see plan.StageOf.
	staging []View
}

// newState allocates the state of one of size ranks, all zero.
func newState(d *Device, flat *model.FlatLayout, a optim.AdamW, rank, size int, shard sharding) (*state, error) {
	s := &state{flat: flat, rank: rank, size: size, shard: shard, adamw: a}
	all := int(flat.Size())
	held := all
	if shard != shardNone {
		held = all / size
	}
	var zero []View
	var err error
	vec := func(what string, t tensor.DType, n int) (v View) {
		if err == nil {
			v, err = d.Vector(what, t, n)
			zero = append(zero, v)
		}
		return v
	}
	if !d.Masters {
		s.masters = vec("weights", tensor.F32, all)
		s.compute = s.masters
	} else {
		s.masters, s.compute = vec("weights", tensor.F32, held), vec("weights", d.Compute, all)
		if shard != shardNone {
			s.vectors = vec("weights", tensor.F32, int(flat.Buckets[flat.Vectors()].Size()))
		}
	}
	s.m, s.v = vec("moments", tensor.F32, held), vec("moments", tensor.F32, held)
	if shard == shardGradients {
		s.grads = vec("gradients", tensor.F32, held)
		var mem [plan.Stages]View
		for i, n := range plan.Staging(flat) {
			mem[i] = vec("gradients", tensor.F32, int(n))
		}
		if err == nil {
			for b, bucket := range flat.Buckets {
				s.staging = append(s.staging, part(mem[plan.StageOf(flat, b)], 0, int(bucket.Size())))
			}
		}
	} else {
		s.grads = vec("gradients", tensor.F32, all)
	}
	if err != nil {
		return nil, err
	}
	return s, d.Ops.Zero(zero...)
}

// params is the state as the model sees it.
func (s *state) params() model.Params {
	p := model.Params{Layout: s.flat, Weights: s.masters, Vectors: s.vectors, Compute: s.compute, Grads: s.grads}
	if s.staging != nil {
		p.Grads, p.BucketGrads = View{}, s.staging
	}
	return p
}

// share is the part of a bucket that this rank owns, in the flat space.
func (s *state) share(bucket int) checkpoint.Range {
	b := s.flat.Buckets[bucket]
	n := b.Size() / int64(s.size)
	return checkpoint.Range{Lo: b.Lo + int64(s.rank)*n, Hi: b.Lo + int64(s.rank+1)*n}
}

// own is that part of a flat buffer.
func (s *state) own(v View, bucket int) View {
	r := s.share(bucket)
	if int64(v.Size()) != s.flat.Size() { // it holds parts
		b := s.flat.Buckets[bucket]
		r = checkpoint.Range{Lo: b.Lo / int64(s.size), Hi: b.Hi / int64(s.size)}
	}
	return part(v, int(r.Lo), int(r.Hi))
}

// whole is a bucket of a flat buffer that holds all.
func (s *state) whole(v View, bucket int) View {
	b := s.flat.Buckets[bucket]
	return part(v, int(b.Lo), int(b.Hi))
}

// held is what a flat buffer of the optimizer holds of a bucket.
func (s *state) held(v View, bucket int) View {
	if s.shard == shardNone {
		return s.whole(v, bucket)
	}
	return s.own(v, bucket)
}

// heldRange is held in the flat space.
func (s *state) heldRange(bucket int) checkpoint.Range {
	if s.shard == shardNone {
		return checkpoint.Range(s.flat.Buckets[bucket])
	}
	return s.share(bucket)
}

// sumSquares adds the squares of the gradients that this rank owns to sum. Over all ranks
// these are every gradient once, however they are sharded.
func (s *state) sumSquares(d optim.Device, sum View) {
	if s.grads.Size()*s.size == int(s.flat.Size()) { // parts alone, or one rank
		d.SumSquares(sum, s.grads)
		return
	}
	for b, bucket := range s.flat.Buckets {
		if bucket.Size() > 0 {
			d.SumSquares(sum, s.own(s.grads, b))
		}
	}
}

// update steps what this rank holds of a bucket. norm2 is the square of the norm of the whole
// gradient.
func (s *state) update(d optim.Device, bucket int, norm2 View, u optim.Update) {
	p, c := s.held(s.masters, bucket), View{}
	vectors := bucket == s.flat.Vectors()
	if s.compute != s.masters && !vectors {
		c = s.held(s.compute, bucket)
	}
	all := []optim.Segment{{Lo: 0, Hi: p.Size(), Decay: !vectors}}
	s.adamw.Step(d, p, c, s.held(s.grads, bucket), s.held(s.m, bucket), s.held(s.v, bucket), norm2, all, u)
}

// copyCompute sets the compute copy of what this rank holds of a bucket, where there is one.
func (s *state) copyCompute(ops model.Ops, bucket int) {
	if s.compute != s.masters && bucket != s.flat.Vectors() {
		ops.Copy(s.held(s.compute, bucket), s.held(s.masters, bucket))
	}
}

// gathered is where the ranks' parts of a bucket's weights come together, and this rank's; zero
// where every rank holds all.
func (s *state) gathered(bucket int) (dst, src View) {
	switch {
	case s.shard == shardNone || s.flat.Buckets[bucket].Size() == 0:
		return View{}, View{}
	case bucket == s.flat.Vectors() && !s.vectors.IsZero():
		return s.vectors, s.own(s.masters, bucket)
	}
	return s.whole(s.compute, bucket), s.own(s.compute, bucket)
}

func part(v View, lo, hi int) View { return v.Slice(tensor.Dim, lo, hi) }
