package train

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/optim"
	"github.com/cprun/cprun/internal/tensor"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// Trainer is one rank's part of a run.
type Trainer struct {
	cfg      *config.Config
	dev      Device
	mesh     *mesh
	att      *attend
	model    *model.Model
	state    *state
	schedule optim.Schedule
	arena    *tensor.Arena
	train    *feed
	val      *feed // nil without validation

	// sums is what the ranks add up in a step: the loss, and how many were asked to stop.
	sums View

	step     int   // optimizer steps done
	consumed int64 // samples consumed: with the seed, the exact position in the data
	tokens   int64 // trained on so far
}

// Indices into sums.
const (
	sumLoss = iota
	sumStop
	sumCount
)

// newTrainer builds the rank's model and state, with weights not yet set.
func newTrainer(ctx context.Context, cfg *config.Config, dev Device, world comm.Communicator) (*Trainer, error) {
	t := &Trainer{cfg: cfg, dev: dev}
	var err error
	if t.mesh, err = newMesh(ctx, world, cfg.Parallel.Context); err != nil {
		return nil, err
	}
	if t.train, err = newFeed(cfg, cfg.Data.Path, cfg.Data.Shuffle, t.mesh); err != nil {
		return nil, err
	}
	if v := cfg.Data.Validation; v.Every > 0 && v.Path != "" {
		if t.val, err = newFeed(cfg, v.Path, false, t.mesh); err != nil {
			return nil, fmt.Errorf("validation: %w", err)
		}
	}
	o, s := cfg.Optimizer, cfg.LRSchedule
	if t.schedule, err = optim.NewSchedule(s.Name, o.LR, s.MinLR, s.WarmupSteps, cfg.Train.Steps); err != nil {
		return nil, err
	}
	shape := &cfg.Model.Config
	params := model.Layout(shape)
	adamw := optim.AdamW{Beta1: o.Betas[0], Beta2: o.Betas[1], Eps: o.Eps, WeightDecay: o.WeightDecay, MaxNorm: o.GradClip}
	t.state = newState(dev, params, adamw, world.Rank(), world.Size(), cfg.Memory.Shard == "optimizer")
	alloc := func(n int64) tensor.Memory { return dev.Alloc(n) }
	opt := model.Options{Recompute: model.Recompute(cfg.Memory.Recompute), LossChunk: cfg.Memory.LossChunk}
	size, err := activations(cfg, t.mesh, opt)
	if err != nil {
		return nil, err
	}
	t.arena = tensor.NewArena(size, alloc)
	n := cfg.Data.SeqLen
	t.att = newAttend(&ring.Ring{Kernel: dev.Kernel, Comm: t.mesh.context, Stream: dev.Stream, Arena: tensor.NewArena(0, alloc)},
		shape, cfg.Parallel.Algorithm, partition.Shape{SeqQ: n, SeqKV: n, Size: t.mesh.context.Size()}, t.mesh.context.Rank())
	weights := part(t.state.weights, 0, int(model.FlatSize(params)))
	grads := part(t.state.grads, 0, int(model.FlatSize(params)))
	t.model = model.New(shape, dev.Ops, t.att, model.Params{Weights: weights, Compute: weights, Grads: grads}, opt)
	t.sums = tensor.Dense(dev.Alloc(8*sumCount), tensor.F64, 0, [4]int{1, 1, 1, sumCount})
	return t, nil
}

// activations is the bytes that the model takes of the arena, for all of a sample's documents
// cut as one; those of a sample that is cut into several may be a few tokens more.
func activations(cfg *config.Config, m *mesh, opt model.Options) (int64, error) {
	layout, err := partition.New(cfg.Parallel.Layout, []int{cfg.Data.SeqLen})
	if err != nil {
		return 0, err
	}
	tokens := partition.Count(layout.Spans(cfg.Data.SeqLen, m.context.Size(), m.context.Rank()))
	batch := cfg.Train.MicroBatchSize
	if cfg.Data.PackDocuments { // see feed.groups
		batch = 1
	}
	need := model.Plan(&cfg.Model.Config, opt, batch, tokens, tensor.F32)
	return max(need.Activations, need.Validation), nil
}

// Result is what one optimizer step found.
type Result struct {
	Loss     float64 // mean over the valid targets of the step, before the update
	GradNorm float64 // before clipping
	LR       float64
	FLOPs    float64 // model FLOPs of all ranks
	Tokens   int     // of all ranks
	Stop     bool    // some rank was asked to stop
	Took     time.Duration
}

// samplesOf lists the samples of one micro batch of this rank's data group: the n-th
// micro batch of the step. Groups take turns, so that the order in which samples are
// consumed does not depend on how many groups share them.
func (t *Trainer) samplesOf(micro int) []int64 {
	size := t.cfg.Train.MicroBatchSize
	first := t.consumed + int64((micro*t.mesh.dataSize+t.mesh.dataRank)*size)
	out := make([]int64, size)
	for i := range out {
		out[i] = t.train.loader.Index(first + int64(i))
	}
	return out
}

// totals is the valid targets, the tokens and the FLOPs of the whole step, over all groups:
// every rank finds the same without reading the data of others.
func (t *Trainer) totals() (valid int, flops float64) {
	n, loader := t.cfg.Train.GlobalBatchSize, t.train.loader
	if !t.train.packed { // all samples are alike
		return n * loader.Valid(0), float64(n) * model.FLOPs(&t.cfg.Model.Config, loader.Docs(0))
	}
	for i := range n {
		sample := loader.Index(t.consumed + int64(i))
		valid += loader.Valid(sample)
		flops += model.FLOPs(&t.cfg.Model.Config, loader.Docs(sample))
	}
	return valid, flops
}

// runAhead is the micro batches whose tokens stand in memory at once: one that is computed
// and one that waits, so that the device is never idle for want of data.
const runAhead = 2

// Step runs one optimizer step. stop says that this rank was asked to stop.
func (t *Trainer) Step(ctx context.Context, stop bool) (Result, error) {
	start := time.Now()
	r := Result{LR: t.schedule(t.step), Tokens: t.cfg.Train.GlobalBatchSize * t.cfg.Data.SeqLen}
	valid, flops := t.totals()
	r.FLOPs = flops
	sums := tensor.Data[float64](t.sums) // the stream is idle between steps
	clear(sums)
	if stop {
		sums[sumStop] = 1
	}
	if err := t.dev.Ops.Zero(t.state.grads); err != nil {
		return r, err
	}
	micros := t.cfg.Train.GlobalBatchSize / (t.cfg.Train.MicroBatchSize * t.mesh.dataSize)
	var done [runAhead]tensor.Event
	for m := range micros {
		if e := done[m%runAhead]; e != nil {
			if err := e.Sync(ctx); err != nil {
				return r, err
			}
		}
		if err := t.forwardBackward(t.samplesOf(m), valid); err != nil {
			return r, err
		}
		done[m%runAhead] = t.dev.Stream.Record()
	}
	if err := ordered(t.mesh.world.AllReduce(t.sums, comm.Sum)); err != nil {
		return r, fmt.Errorf("loss reduction: %w", err)
	}
	if err := t.state.step(t.dev, t.mesh.world, r.LR, t.step); err != nil {
		return r, err
	}
	if err := t.dev.Stream.Sync(ctx); err != nil {
		return r, err
	}
	r.Loss = sums[sumLoss] / float64(max(valid, 1))
	r.GradNorm = math.Sqrt(tensor.Data[float64](t.state.norm)[0])
	r.Stop = sums[sumStop] > 0
	r.Took = time.Since(start)
	t.step++
	t.consumed += int64(t.cfg.Train.GlobalBatchSize)
	t.tokens += int64(r.Tokens)
	return r, nil
}

// forwardBackward adds the gradients of one micro batch.
func (t *Trainer) forwardBackward(samples []int64, valid int) error {
	for _, g := range t.train.groups(samples) {
		b, err := t.train.batch(g)
		if err != nil {
			return err
		}
		t.att.begin(b.layout, b.docs)
		loss := part(t.sums, sumLoss, sumLoss+1)
		if err := t.model.ForwardBackward(t.arena, b.Batch, loss, 1/float64(max(valid, 1))); err != nil {
			return err
		}
	}
	return nil
}

// Validate is the mean loss over the first samples of the validation data, the same ones
// each time. Samples are dealt out to the data groups; a group without one has no part.
func (t *Trainer) Validate(ctx context.Context) (float64, error) {
	t.dev.Stream.Label("validation")
	defer t.dev.Stream.Label("")
	sums := tensor.Data[float64](t.sums)
	clear(sums)
	size, valid := t.cfg.Train.MicroBatchSize, 0
	total := min(int64(t.cfg.Data.Validation.Steps*size*t.mesh.dataSize), t.val.loader.Samples())
	for first := int64(0); first < total; first += int64(size) {
		var samples []int64
		for s := first; s < min(total, first+int64(size)); s++ {
			valid += t.val.loader.Valid(s)
			samples = append(samples, s)
		}
		if int(first/int64(size))%t.mesh.dataSize != t.mesh.dataRank {
			continue
		}
		for _, g := range t.val.groups(samples) {
			b, err := t.val.batch(g)
			if err != nil {
				return 0, err
			}
			t.att.begin(b.layout, b.docs)
			if err := t.model.Forward(t.arena, b.Batch, part(t.sums, sumLoss, sumLoss+1)); err != nil {
				return 0, err
			}
		}
	}
	if err := ordered(t.mesh.world.AllReduce(t.sums, comm.Sum)); err != nil {
		return 0, fmt.Errorf("validation loss: %w", err)
	}
	if err := t.dev.Stream.Sync(ctx); err != nil {
		return 0, err
	}
	return sums[sumLoss] / float64(max(valid, 1)), nil
}

// finite is an error for a run that has diverged. Its weights are already spoilt, so it must
// not write another checkpoint.
func (r *Result) finite(step int) error {
	if math.IsNaN(r.Loss) || math.IsInf(r.Loss, 0) || math.IsNaN(r.GradNorm) || math.IsInf(r.GradNorm, 0) {
		return fmt.Errorf("step %d: %w: loss %v, gradient norm %v; the newest checkpoint is from before it: lower optimizer.lr, set optimizer.grad_clip, or look at the samples of this step",
			step, errDiverged, r.Loss, r.GradNorm)
	}
	return nil
}

var errDiverged = errors.New("training diverged")

// maximum is the largest value over all ranks.
func maximum(ctx context.Context, world comm.Communicator, xs ...float64) ([]float64, error) {
	v := tensor.FromSlice(xs, len(xs))
	p, err := world.AllReduce(v, comm.Max)
	if err != nil {
		return nil, err
	}
	if err := p.Sync(ctx); err != nil {
		return nil, err
	}
	return tensor.Data[float64](v), nil
}
