package train

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/checkpoint"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/metrics"
	"github.com/cprun/cprun/internal/model/optim"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// Trainer is one rank's part of a run.
type Trainer struct {
	cfg      *config.Config
	dev      *Device
	mesh     *mesh
	att      *attend
	work     *model.Work
	sent     *tally // counts the traffic of att
	model    *model.Model
	share    *sharing
	schedule optim.Schedule
	scaler   *scaler
	arena    *tensor.Arena
	stage    *stage
	moves    *offload    // nil: no activations move to the host
	divides  []divided   // weights that ranks set together, until gather
	copies   [][]float32 // the newest copy for a checkpoint, by field; nil: checkpoints are written without
	train    *feed
	val      *feed    // nil without validation
	sources  []source // that val reads in turn

	// sums holds the sums of a step over all ranks: the loss, the ranks that want to stop or save, the squared norm of the
	// gradient, and the sums of routes.
	sums    View
	routes  routes
	stepMem []stepSums // a ring over the queued steps

	from     string // the checkpoint to resume from, or ""
	base     *base  // of the frozen weights, on rank 0; nil: none
	step     int    // queued optimizer steps
	consumed int64  // samples in them; with the seed, the exact position in the data
	tokens   int64  // tokens in them
	blank    int    // steps among them without targets
	stop     earlyStop

	// clock records the device's time at the beginning and the end of the queued steps and of the step before, as a
	// ring.
	clock   device.Clock
	waiting int // queued steps that are not finished
}

// Indices into sums.
const (
	sumLoss = iota
	sumStop
	sumDue
	sumNorm
	sumCount
)

// A stepSums is host memory for the sums before and after a step.
type stepSums struct{ in, out View }

// newTrainer builds the rank's model and its state, from a checkpoint if there is one to resume.
func newTrainer(ctx context.Context, cfg *config.Config, dev Device, world comm.Communicator, o *Options) (*Trainer,
	error) {
	t := &Trainer{cfg: cfg, dev: &dev, scaler: newScaler(&dev)}
	if err := t.meet(ctx, world, o); err != nil {
		return nil, err
	}
	if err := t.allocate(o); err != nil {
		return nil, err
	}
	if err := t.populate(ctx, o); err != nil {
		return nil, err
	}
	if err := t.feeds(ctx, o); err != nil {
		return nil, err
	}
	if cfg.Train.Samples > 0 {
		own := *cfg
		own.Train.Steps = min(cfg.Train.Steps, cfg.Train.StepsFrom(int64(t.step), t.consumed))
		t.cfg = &own
	}
	var err error
	if t.schedule, err = Schedule(t.cfg); err != nil {
		return nil, err
	}
	defer o.timed("buffers")()
	if err := t.build(o); err != nil {
		return nil, err
	}
	if owned := t.share.Owned(); cfg.Copies() && !o.NoSave && !o.Frozen {
		for range t.fields() {
			t.copies = append(t.copies, make([]float32, owned[len(owned)-1].Hi))
		}
	}
	if o.BoundGarbage {
		state.BoundGarbage(t.dev.Machine.Arch)
	}
	return t, t.share.publish()
}

// meet joins the other ranks, and agrees with them on the checkpoint to resume from.
func (t *Trainer) meet(ctx context.Context, world comm.Communicator, o *Options) (err error) {
	defer o.timed("meeting the ranks")()
	if t.mesh, err = newMesh(ctx, world, t.cfg.Parallel.Context, max(1, o.Room.Copies)); err != nil {
		return err
	}
	t.mesh.setDeadline(t.cfg.Parallel.TransferTimeout())
	from, err := t.fromRank0(ctx, o.newest)
	if err != nil {
		return fmt.Errorf("checkpoint to resume from: %w", err)
	}
	t.from = string(from)
	return nil
}

// Schedule returns the learning rate of a config's steps.
func Schedule(cfg *config.Config) (optim.Schedule, error) {
	s := cfg.LRSchedule
	return optim.NewSchedule(s.Name, cfg.Optimizer.LR, s.MinLR, s.WarmupSteps, cfg.Train.Steps)
}

// allocate allocates the weights, the optimizer's state, and the staging area.
func (t *Trainer) allocate(o *Options) error {
	defer o.timed("memory")()
	c, world := t.cfg.Optimizer, t.mesh.world
	adamw := optim.AdamW{Beta1: c.Betas[0], Beta2: c.Betas[1], Eps: c.Eps, WeightDecay: c.WeightDecay,
		MaxNorm: c.GradClip}
	flat := model.NewLayout(&t.cfg.Model.Config, world.Size())
	var groups []state.Group
	for _, b := range flat.Buckets {
		groups = append(groups, t.mesh.place(b))
	}
	_, host := t.cfg.Memory.Offloads()
	s, err := state.New(t.dev, state.Options{
		Layout: flat, Groups: groups,
		Shard: state.ShardingOf(t.cfg.Memory.Shard), Compute: t.dev.Compute, Masters: t.dev.Masters, AdamW: adamw,
		Frozen: o.Frozen, HalfWire: t.cfg.Precision.GradWire == "bf16", Host: host, Slots: o.Room.Slots,
	})
	if err != nil {
		return err
	}
	s.Zero(t.dev.Ops)
	var u *updater
	if s.OnHost {
		if u, err = newUpdater(t.dev, s); err != nil {
			return err
		}
	}
	t.share = newSharing(t.dev, s)
	t.share.updater = u
	t.stage, err = newStage(t.dev, int(max(flat.Size(), flat.FrozenSize())), s.OnHost)
	return err
}

// populate sets the state, connects the ranks' groups, prepares attention and pins host memory, all at the same time.
// The first keeps the cores busy, the second waits for other ranks, and the others for libraries.
func (t *Trainer) populate(ctx context.Context, o *Options) error {
	g, setting := errgroup.WithContext(ctx)
	g.Go(func() error {
		defer o.timed("groups")()
		return t.mesh.join(ctx, t.share.Gathers()) // an error of this rank does not cancel it, since the others take part
	})
	g.Go(func() error {
		defer o.timed("weights")()
		return checkpoint.OnAllRanks(setting, t.mesh.saves, beat(t.cfg), 0, func() error {
			return t.loadState(setting, o)
		})
	})
	g.Go(func() error { return t.rehearse(o) })
	g.Go(func() (err error) {
		defer o.timed("host memory for activations")()
		t.moves, err = newOffload(t.dev, o.Room.Layers, o.Room.Host)
		return err
	})
	if err := g.Wait(); err != nil {
		return err
	}
	var groups, weights []comm.Communicator
	for _, b := range t.share.Flat.Buckets {
		all, gathering := t.mesh.groups(b)
		groups, weights = append(groups, all), append(weights, gathering)
	}
	if err := t.share.join(t.mesh.state, groups, weights, t.mesh.across); err != nil {
		return err
	}
	defer o.timed("gathering them")()
	return t.gather()
}

// feeds opens the data. Ranks of another host may encode it for minutes.
func (t *Trainer) feeds(ctx context.Context, o *Options) error {
	defer o.timed("data")()
	in, err := newInputs(t.dev, t.cfg, o.Room.Tokens)
	if err != nil {
		return err
	}
	return checkpoint.OnAllRanks(ctx, t.mesh.saves, beat(t.cfg), 0, func() error { return t.openFeeds(o, in) })
}

func (t *Trainer) openFeeds(o *Options, in *inputs) (err error) {
	cfg := t.cfg
	tok := tokenizerOf(cfg)
	longer := *cfg
	longer.Data.SeqLen = max(cfg.Data.SeqLen, o.Whole)
	if t.train, err = newFeed(&longer, cfg.Data.Path, tok, cfg.Data.Shuffle, t.mesh, in); err != nil {
		return err
	}
	t.train.seqLen = cfg.Data.SeqLen
	if v := cfg.Data.Validation; v.Every > 0 && len(v.Path) > 0 {
		names := v.Path.Names()
		for i := range v.Path {
			if t.val, err = newFeed(cfg, v.Path[i:i+1], tok, false, t.mesh, in); err != nil {
				return fmt.Errorf("validation: %w", err)
			}
			t.sources = append(t.sources, source{names[i], t.val.loader})
		}
	}
	return nil
}

// A source is the samples of an entry of data.validation.path.
type source struct {
	name   string
	loader samples
}

func (t *Trainer) build(o *Options) (err error) {
	cfg, shape, room := t.cfg, &t.cfg.Model.Config, o.Room
	opt := model.Options{Recompute: model.Recompute(cfg.Memory.Recompute), LossChunk: cfg.Memory.LossChunk,
		Layers: room.Layers, Hooks: t.share.hooks()}
	t.share.label.streams = append([]tensor.Stream{t.dev.Stream}, t.dev.Copies...)
	if t.moves != nil {
		opt.Hooks.Keep, opt.Hooks.Bring = t.moves.keep, t.moves.bring
	}
	if t.arena, err = t.dev.Arena("activations", room.Activations); err != nil {
		return err
	}
	workspace, err := t.dev.Arena("buffers of the ring", room.RingBuffers)
	if err != nil {
		return err
	}
	t.sent = &tally{Exchanger: t.mesh.context}
	t.work = model.WorkOf(&t.cfg.Model.Config)
	t.att = newAttend(&ring.Ring{Kernel: t.dev.Kernel, Comm: t.sent, Mover: t.dev.Ops, Stream: t.dev.Stream,
		Arena: workspace},
		cfg, nil, t.mesh.context.Rank())
	t.att.recur = newRecur(t.att.ring, t.dev.Delta, t.dev.Ops, shape)
	if t.share.label.ring = t.att.ring; t.att.recur != nil {
		t.share.label.scan = t.att.scan
	}
	if err := checkUses(t.share.resident.Slot, t.share.Flat, shape, opt); err != nil {
		return err
	}
	t.model = model.New(shape, t.dev.Ops, t.att, t.share.Params(), opt)
	t.routes = newRoutes(shape)
	if err := t.routes.open(t.dev); err != nil {
		return err
	}
	count := sumCount + t.routes.sums()
	if t.sums, err = t.dev.Vector("sums of a step", tensor.F64, count); err != nil {
		return err
	}
	if t.clock, err = t.dev.NewClock(2 * t.clocked()); err != nil {
		return fmt.Errorf("clock of the steps: %w", err)
	}
	t.stepMem = make([]stepSums, t.dev.RunAhead+1)
	for i := range t.stepMem {
		for _, v := range []*View{&t.stepMem[i].in, &t.stepMem[i].out} {
			if *v, err = t.dev.HostVector("sums of a step", tensor.F64, count); err != nil {
				return err
			}
		}
	}
	return nil
}

// Result describes one optimizer step.
type Result struct {
	Step     int     // steps done, with this one
	Loss     float64 // mean over the valid targets of the step, before the update
	GradNorm float64 // before clipping, without the loss scale
	LR       float64
	FLOPs    float64 // model FLOPs of all ranks
	Tokens   int     // tokens of all ranks
	Load     load    // attention work of this rank's sequences
	// AuxLoss and Imbalance are as in metrics.Step.
	AuxLoss, Imbalance *metrics.Float
	Trained            int64 // tokens of all ranks in all steps so far
	Samples            int64 // likewise
	Stop               bool  // a rank was asked to stop
	Due                bool  // a checkpoint is due by time
	// Blank is n if this is the n-th step without targets. Such a step updates nothing, and its loss is NaN. Else 0.
	Blank   int
	Skipped bool    // the scaled gradients overflowed, so the step changed nothing
	Lowered float64 // the lowered loss scale; 0: unchanged
	// Took is the device's time from the end of the previous step to the end of this one. After a gap without queued
	// steps, such as a validation, it begins with this step.
	Took time.Duration
}

type inflight struct {
	r     Result
	valid int     // targets
	scale float64 // loss scale; 0: none
	out   View
	since int          // clock point at which Took begins
	done  tensor.Event // out is complete
}

// begin queues an optimizer step; at most RunAhead others may be unfinished. The host waits only for the memory of a
// batch, which is free when the batch before the last is done.
func (t *Trainer) begin(ctx context.Context, stop, due bool) (f *inflight, err error) {
	defer device.Caught(&err)
	t.share.label.begin("step %d", t.step+1)
	defer t.share.label.end()
	stepSums, scaling := t.stepMem[t.step%len(t.stepMem)], t.scaler.begin(t.waiting)
	f = &inflight{out: stepSums.out, since: t.begins(t.step), scale: scaling.Scale}
	if t.waiting > 0 {
		f.since = t.ends(t.step - 1)
	}
	t.clock.Mark(t.begins(t.step))
	f.r = Result{Step: t.step + 1, LR: t.schedule(t.step)}
	f.valid, f.r.Tokens, f.r.FLOPs = t.totals()
	f.r.Trained = t.tokens + int64(f.r.Tokens)
	if f.valid == 0 {
		t.blank++
		f.r.Blank, f.r.Tokens, f.r.FLOPs = t.blank, 0, 0 // for rates
	}
	in := tensor.Data[float64](stepSums.in) // the last step that used it is finished
	clear(in)
	if stop {
		in[sumStop] = 1
	}
	if due {
		in[sumDue] = 1
	}
	t.dev.Store.Upload(t.sums, stepSums.in)
	if f.r.Blank > 0 {
		err = t.share.sum(t.sums) // stop and due
	} else {
		err = t.update(ctx, f, scaling.Skipped)
	}
	if err != nil {
		return nil, err
	}
	t.dev.Store.Download(stepSums.out, t.sums)
	t.clock.Mark(t.ends(t.step))
	f.done = t.dev.Stream.Record()
	t.waiting++
	t.step++
	t.consumed += int64(t.batch())
	f.r.Samples, t.tokens = t.consumed, f.r.Trained
	return f, t.prepare()
}

// update queues the passes and the optimizer of a step. The bias correction of the moments does not count blank steps
// and the skipped steps known to the host.
func (t *Trainer) update(ctx context.Context, f *inflight, skipped int) (err error) {
	if f.r.Load, err = t.passes(ctx, f); err != nil {
		return err
	}
	u := optim.Update{LR: f.r.LR, Scale: f.scale, Step: t.step - skipped - t.blank}
	return t.share.step(t.sums, state.Part(t.sums, sumNorm, sumNorm+1), u)
}

func (t *Trainer) finish(ctx context.Context, f *inflight) (Result, error) {
	if err := f.done.Sync(ctx); err != nil {
		return f.r, err
	}
	out := tensor.Data[float64](f.out)
	f.r.Loss = out[sumLoss] / float64(f.valid) // NaN if blank
	f.r.GradNorm = math.Sqrt(out[sumNorm]) / cmp.Or(f.scale, 1)
	f.r.Skipped, f.r.Lowered = t.scaler.finish(f.scale, f.r.GradNorm)
	f.r.Stop, f.r.Due = out[sumStop] > 0, out[sumDue] > 0
	f.r.AuxLoss, f.r.Imbalance = t.routes.results(out[sumCount:], f.r.Tokens)
	t.waiting--
	seconds, err := t.clock.Between(f.since, t.ends(f.r.Step-1))
	if err != nil {
		return f.r, fmt.Errorf("step %d: %w", f.r.Step, err)
	}
	f.r.Took = time.Duration(seconds * float64(time.Second))
	return f.r, nil
}

// clocked returns the number of steps in the clock's ring: those that may be queued, and the one before.
func (t *Trainer) clocked() int { return t.dev.RunAhead + 2 }

// begins and ends return the clock points of a step with n steps before it.
func (t *Trainer) begins(n int) int { return 2 * (n % t.clocked()) }
func (t *Trainer) ends(n int) int   { return t.begins(n) + 1 }

// prepare makes the layout and the schedules of the next step's first sequence while the device computes this step. For
// later micro batches the host is ahead of the device anyway.
func (t *Trainer) prepare() error {
	samples, _ := t.samplesOf(0)
	if !t.train.packed || len(samples) == 0 {
		return nil
	}
	t.train.next = t.train.lay(samples[0])
	return t.att.prepare(t.train.next)
}

// A Validation is the mean loss over the targets of all validation data.
type Validation struct {
	Loss    float64
	Sources map[string]metrics.Float // the same of each source; nil of one
}

// String formats the loss, and those of sources.
func (v Validation) String() string {
	text := fmt.Sprintf("%.4f", v.Loss)
	for _, name := range slices.Sorted(maps.Keys(v.Sources)) {
		text += fmt.Sprintf("  %s %.4f", name, float64(v.Sources[name]))
	}
	return text
}

// Validate returns the loss over the first samples of each source of validation data, always the same ones; NaN without
// targets. No step may be queued.
func (t *Trainer) Validate(ctx context.Context) (v Validation, err error) {
	defer device.Caught(&err)
	t.share.label.begin("validation after step %d", t.step)
	defer t.share.label.end()
	all, targets := 0.0, 0
	v.Sources = map[string]metrics.Float{}
	for _, s := range t.sources {
		t.val.loader = s.loader
		sum, valid, err := t.validate(ctx)
		if err != nil {
			return v, err
		}
		all, targets = all+sum, targets+valid
		v.Sources[s.name] = metrics.Float(sum / float64(valid))
	}
	if len(t.sources) == 1 {
		v.Sources = nil
	}
	v.Loss = all / float64(targets)
	return v, nil
}

// validate returns the sum of the losses over the samples of val, and the number of targets. It distributes the samples
// over the data groups.
func (t *Trainer) validate(ctx context.Context) (sum float64, valid int, err error) {
	stepSums := t.stepMem[0]
	clear(tensor.Data[float64](stepSums.in))
	t.dev.Store.Upload(t.sums, stepSums.in)
	size := t.cfg.Train.MicroBatchSize
	fewer := 0 // passes than group 0, which has the most
	total := t.val.total(t.cfg)
	for first := int64(0); first < total; first += int64(size) {
		var samples []int64
		for s := first; s < min(total, first+int64(size)); s++ {
			valid += t.val.loader.Valid(s)
			samples = append(samples, s)
		}
		groups, rank := t.val.groups(samples), int(first/int64(size))%t.mesh.dataSize
		if rank == 0 {
			fewer += len(groups)
		}
		if rank != t.mesh.dataRank {
			continue
		}
		fewer -= len(groups)
		for _, g := range groups {
			if _, err := t.forward(ctx, t.val, all(g), state.Part(t.sums, sumLoss, sumLoss+1), nil); err != nil {
				return 0, 0, err
			}
		}
	}
	if err := t.share.idle(fewer); err != nil {
		return 0, 0, err
	}
	if err := t.share.sum(t.sums); err != nil {
		return 0, 0, fmt.Errorf("validation loss: %w", err)
	}
	t.dev.Store.Download(stepSums.out, t.sums)
	if err := t.dev.Stream.Sync(ctx); err != nil {
		return 0, 0, err
	}
	return tensor.Data[float64](stepSums.out)[sumLoss], valid, nil
}

// forward queues a forward pass over a group of a feed, which adds its losses to sums. set, unless nil, changes the
// batch before.
func (t *Trainer) forward(ctx context.Context, f *feed, g group, sums View, set func(*microBatch)) (b *microBatch,
	err error) {
	if b, err = f.batch(ctx, g.samples, g.trained); err != nil {
		return nil, err
	}
	if set != nil {
		set(b)
	}
	if err := t.att.begin(b); err != nil {
		return nil, err
	}
	if err := t.model.Forward(t.arena, b.Batch, sums); err != nil {
		return nil, err
	}
	b.done()
	return b, nil
}

// flush waits for all work of the device, on all streams.
func (t *Trainer) flush(ctx context.Context) error {
	t.share.flush()
	return t.dev.Stream.Sync(ctx)
}

// finite returns an error if training diverged. The weights are then spoilt, or unchanged for many steps, so the run
// must not write another checkpoint.
func (r *Result) finite() error {
	switch {
	case r.Skipped && r.Lowered > 0 && r.Lowered < leastScale:
		return fmt.Errorf("step %d: %w: loss %v, and gradients overflow in fp16 even with a loss scale of %v; set "+
			"precision.compute: bf16, lower optimizer.lr, or set optimizer.grad_clip",
			r.Step, errDiverged, r.Loss, 2*r.Lowered)
	case r.Skipped:
		return nil
	}
	spoilt := func(x float64) bool { return math.IsNaN(x) || math.IsInf(x, 0) }
	if spoilt(r.Loss) && r.Blank == 0 || spoilt(r.GradNorm) {
		return fmt.Errorf("step %d: %w: loss %v, gradient norm %v; no checkpoint of it is written. Lower optimizer.lr, "+
			"set optimizer.grad_clip, or check the samples of this step",
			r.Step, errDiverged, r.Loss, r.GradNorm)
	}
	return nil
}

var errDiverged = errors.New("training diverged")

func maximum(ctx context.Context, world comm.Communicator, xs ...float64) ([]float64, error) {
	v := tensor.FromSlice(xs, len(xs))
	err := comm.Finish(ctx)(world.AllReduce(v, comm.Max))
	return tensor.Data[float64](v), err
}
