package train

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/model/checkpoint"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/metrics"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/tensor"
)

// Options are the inputs of a run besides its config.
type Options struct {
	RunDir     string
	RunID      string // of this attempt: no other attempt on the run directory has it
	Version    string // of cprun, for checkpoints
	ConfigYAML string // the resolved config, for checkpoints

	Resume bool   // resume the newest checkpoint of the run directory, if there is one
	From   string // else from this checkpoint; "" for new weights

	Room state.Room // the memory that is taken before the first step

	NoSave bool // write no checkpoint: the run is a measurement
	Frozen bool // nothing is trained: the rank holds weights alone
	Locked bool // the launcher holds the lock of the run directory's checkpoints
	// Start is which start of the run directory this is; the zero value is the next.
	Start Start

	Stop   <-chan struct{} // closed when this rank is asked to stop
	Report func(Report)    // called on every rank, in order; may be nil

	// Timed is called when a part of the start begins; the function that it returns is called at the part's end. It
	// may be nil, and is called by several goroutines.
	Timed func(part string) (end func())
	// BoundGarbage says that the process is this rank's alone, and that it computes in memory of Go: see
	// state.BoundGarbage.
	BoundGarbage bool
}

// Start is which start of a run this is, as its launcher counts them.
type Start = checkpoint.Start

func (o *Options) timed(part string) (end func()) {
	if o.Timed == nil {
		return func() {}
	}
	return o.Timed(part)
}

func (o *Options) checkpoints() string { return filepath.Join(o.RunDir, "checkpoints") }

func (o *Options) report(r Report) {
	if o.Report != nil {
		o.Report(r)
	}
}

func (o *Options) notice(text string) { o.report(Report{Kind: Notice, Text: text}) }

// Kind is the kind of a Report.
type Kind int

// The kinds of reports.
const (
	Notice     Kind = iota // Text is for the user
	Phase                  // Text names the phase that the rank begins, for reports of failures
	Progressed             // a step was logged
	Advanced               // a step was done
	Saved                  // a checkpoint of Step is whole
	Validated              // Loss is the validation loss before the first step
	Stopped                // the run ends on request after a checkpoint of Step
)

// Report is an event of a rank, for its process.
type Report struct {
	Kind    Kind
	Step    int64 // steps done
	Steps   int64
	Text    string
	Loss    float64
	Metrics metrics.Step  // of Progressed, on rank 0
	Left    time.Duration // until the last step; negative: not known
	// Of Saved: from the beginning of the save until it was seen to be whole, and for how long
	// training stood still for it.
	Took, Stood time.Duration
}

type run struct {
	*Trainer
	opts   Options
	saver  *checkpoint.Saver
	dirs   runDirs
	out    metrics.Writer // rank 0
	trace  *metrics.Trace
	eta    metrics.ETA
	waited time.Duration // of the compute stream up to the last log
	logged int           // the step of that log
	began  int           // steps done before this run
	own    bool          // it goes on from a checkpoint of its own run directory
	saving saving        // the save that was begun and is not known to be whole

	savedAt  time.Time     // when the last save began, or the run
	longest  time.Duration // of the steps that count for the deadline
	deadline time.Duration // that was set for it; 0: none
}

type saving struct {
	step  int // 0: there is none
	began time.Time
	stood time.Duration // for how long training stood still for it
}

// Run trains on this rank until the config's steps are done or some rank is asked to stop.
// Every rank of the world calls it with the same config. stopped says that it ended on
// request, with a checkpoint from which the same call goes on.
func Run(ctx context.Context, cfg *config.Config, dev Device, world comm.Communicator, o Options) (stopped bool,
	err error) {
	o.report(Report{Kind: Phase, Text: "setup"})
	t, err := newTrainer(ctx, cfg, dev, world, &o)
	if err != nil {
		return false, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	return (&run{Trainer: t, opts: o}).run(ctx, cancel)
}

// A together is an error that occurs on all ranks at the same step, such as a loss that is not finite. The ranks finish
// the transfers that they have begun.
type together struct{ error }

// Unwrap returns the error.
func (e together) Unwrap() error { return e.error }

// leaveTime bounds the wait of a failed run for its own writes.
const leaveTime = 2 * time.Second

// run does everything from the first to the last write. cancel ends the work beside the steps.
func (r *run) run(ctx context.Context, cancel context.CancelCauseFunc) (stopped bool, err error) {
	if err = r.open(ctx); err == nil {
		stopped, err = r.loop(ctx)
	}
	if err == nil {
		if r.blank > 0 {
			r.opts.notice(fmt.Sprintf("%d of %d steps had no target and updated nothing", r.blank, r.step))
		}
		err = r.clock.Close()
	}
	if err == nil || errors.As(err, &together{}) {
		return stopped, errors.Join(append([]error{err}, r.close(r.saver.Close)...)...)
	}
	// The others stand in the next transfer until they know, and their part of a save that was
	// begun with them: so they are told first, and nothing more is waited for.
	r.mesh.world.Abort(err)
	cancel(err)
	return false, withOwn(err, r.close(r.leave))
}

// withOwn adds this rank's own faults from closing its outputs. An err of another rank stays as text alone: a rank with
// a failed save may hear of its fault from another rank first, and is no victim.
func withOwn(err error, closing []error) error {
	var own []error
	for _, e := range closing {
		if e != nil && !comm.IsRemote(e) && !errors.Is(e, comm.ErrAborted) && !errors.Is(e, err) {
			own = append(own, e)
		}
	}
	switch mine := errors.Join(own...); {
	case mine == nil:
		return err
	case comm.IsRemote(err):
		return fmt.Errorf("%w\n(as another rank tells it: %v)", mine, err)
	default:
		return errors.Join(err, mine)
	}
}

func (r *run) open(ctx context.Context) (err error) {
	from := r.from
	r.logged = r.step
	if s, ok := r.dev.Stream.(tensor.WaitCounter); ok {
		s.CountWaits()
	}
	r.began, r.own = r.step, from != "" && filepath.Dir(from) == r.opts.checkpoints()
	if from != "" {
		r.opts.notice(fmt.Sprintf("going on from step %d of %s", r.step, from))
	}
	if r.dirs, err = openDirs(r.opts.RunDir); err != nil {
		return fmt.Errorf("run directory: %w", err)
	}
	c := r.cfg.Checkpoint
	r.saver, err = checkpoint.NewSaver(r.mesh.saves, checkpoint.Options{
		Dir: r.dirs.checkpoints, RunID: r.opts.RunID, Keep: c.Keep, Async: c.Async, Locked: r.opts.Locked,
		Beat:  beat(r.cfg),
		Start: r.opts.Start, Local: c.Local,
		Warn: func(err error) { r.opts.notice(err.Error()) },
	})
	if err != nil {
		return fmt.Errorf("checkpoints: %w", err)
	}
	if r.mesh.world.Rank() == 0 {
		l := r.cfg.Log
		r.out, err = metrics.Open(metrics.Options{Dir: r.dirs.run, Resumed: int64(r.step), TensorBoard: l.TensorBoard,
			Config: r.opts.ConfigYAML, Prometheus: l.Prometheus, Warn: r.opts.notice})
		if err != nil {
			return fmt.Errorf("metrics: %w", err)
		}
	}
	return r.openTrace(ctx)
}

// close ends the outputs, saves by the given function, and returns the errors.
func (r *run) close(saves func() error) (errs []error) {
	if r.saver != nil {
		err := r.blamed(saves())
		if err == nil {
			r.whole()
		}
		errs = append(errs, err)
	}
	if r.out != nil {
		errs = append(errs, r.out.Close())
	}
	if r.trace != nil {
		errs = append(errs, r.closeTrace(context.Background(), false))
	}
	return append(errs, r.dirs.close())
}

func (r *run) asked() bool {
	select {
	case <-r.opts.Stop:
		return true
	default:
		return false
	}
}

func (r *run) loop(ctx context.Context) (stopped bool, err error) {
	steps := r.cfg.Train.Steps
	if r.val != nil && r.step < steps {
		loss, err := r.validate(ctx)
		if err != nil {
			return false, err
		}
		r.opts.report(Report{Kind: Validated, Step: int64(r.step), Loss: loss})
		r.opts.notice(fmt.Sprintf("validation loss at step %d: %.4f", r.step, loss))
		if r.step == 0 && r.out != nil {
			if err := r.out.Write(metrics.Untrained(time.Now(), loss, float64(r.dev.Store.MemoryBytes()))); err != nil {
				return false, err
			}
		}
	}
	var queue []*flight
	done, due := r.step, false // steps finished; a checkpoint is due by time
	r.savedAt = time.Now()
	for done < steps {
		for !stopped && !due && len(queue) <= r.dev.RunAhead && r.step < steps &&
			(len(queue) == 0 || !r.drains(r.step)) {
			r.opts.report(Report{Kind: Phase, Text: "step", Step: int64(r.step)})
			f, err := r.queue(ctx)
			if err != nil {
				return false, err
			}
			queue = append(queue, f)
		}
		res, err := r.finish(ctx, queue[0])
		if err != nil {
			return false, err
		}
		queue = queue[1:]
		done = res.Step
		r.opts.report(Report{Kind: Advanced, Step: int64(done), Steps: int64(steps)})
		if err := r.after(ctx, res); err != nil {
			return false, err
		}
		if err := r.poll(); err != nil {
			return false, err
		}
		// The run finishes the queued steps before it stops or saves.
		stopped, due = stopped || res.Stop, due || res.Due
		if len(queue) > 0 {
			continue
		}
		if stopped || due || r.saves(done) {
			if err := r.save(ctx, stopped || done == steps); err != nil {
				return false, err
			}
			due = false
		}
		if stopped && done < steps {
			r.opts.report(Report{Kind: Stopped, Step: int64(done)})
			return true, r.settle(ctx)
		}
	}
	if r.step == r.began && !r.own { // nothing was left to do, and the checkpoint is another run's
		if err := r.save(ctx, true); err != nil {
			return false, err
		}
	}
	return false, r.settle(ctx)
}

func (r *run) queue(ctx context.Context) (*flight, error) {
	if r.step == r.began {
		defer r.opts.timed("queueing it")() // products get their algorithms then, and peers are reached
	}
	return r.begin(ctx, r.asked(), r.due())
}

// due reports whether the time for a checkpoint has come. Rank 0's clock decides.
func (r *run) due() bool {
	every := r.cfg.Checkpoint.Interval
	return every > 0 && !r.opts.NoSave && r.mesh.world.Rank() == 0 && r.saving.step == 0 &&
		time.Since(r.savedAt) >= every
}

// validates reports whether a validation follows a step, the n-th of the run; saves, whether a checkpoint
// does.
func (r *run) validates(n int) bool {
	return r.val != nil && (n%r.cfg.Data.Validation.Every == 0 || n == r.cfg.Train.Steps)
}

func (r *run) saves(n int) bool {
	every := r.cfg.Checkpoint.Every
	return !r.opts.NoSave && (n == r.cfg.Train.Steps || every > 0 && n%every == 0)
}

// drains reports whether the n-th step must be finished before another is queued.
func (r *run) drains(n int) bool {
	return r.validates(n) || r.saves(n) || r.trace != nil && n-r.began == r.cfg.Log.TraceSteps
}

func (r *run) validate(ctx context.Context) (float64, error) {
	r.opts.report(Report{Kind: Phase, Text: "validation", Step: int64(r.step)})
	return r.Validate(ctx)
}

// after logs a step, with the validation that is due.
func (r *run) after(ctx context.Context, res Result) error {
	r.eta = r.eta.Add(res.Took.Seconds())
	if res.Step-r.began > 1 { // the first sets things up
		r.longest = max(r.longest, res.Took)
	}
	steps, world := r.cfg.Train.Steps, r.mesh.world
	var val *metrics.Float
	if r.validates(res.Step) {
		loss, err := r.validate(ctx)
		if err != nil {
			return err
		}
		f := metrics.Float(loss)
		val = &f
	}
	var finite error
	if err := res.finite(); err != nil {
		finite = together{err} // by numbers that are the same on every rank
	}
	if finite == nil && res.Lowered > 0 {
		r.opts.notice(fmt.Sprintf("step %d: gradients overflowed in fp16, the step is skipped; loss scale %.0f",
			res.Step, res.Lowered))
	}
	if n := res.Blank; n > 0 && n&(n-1) == 0 { // the 1st, 2nd, 4th, …: they may be many
		r.opts.notice(fmt.Sprintf("step %d: none of its tokens is a target, so it is skipped and nothing is updated "+
			"(%d of %d steps so far)", res.Step, n, res.Step))
	}
	if r.trace != nil && res.Step-r.began >= r.cfg.Log.TraceSteps {
		if err := r.closeTrace(ctx, true); err != nil {
			return err
		}
	}
	if due := res.Step%r.cfg.Log.Every == 0 || res.Step == steps || val != nil || res.Stop || finite != nil; !due {
		return nil
	}
	waited, told := r.waitedFor()
	mean := -1.0
	if told {
		mean = (waited - r.waited).Seconds() / float64(res.Step-r.logged) // of the steps since the last log
	}
	most, err := maximum(ctx, world, float64(r.dev.Store.MemoryBytes()), mean, r.longest.Seconds(),
		res.Load.imbalance(), float64(res.Load.sent))
	r.waited, r.logged = waited, res.Step
	if err != nil {
		return fmt.Errorf("metrics of step %d: %w", res.Step, err)
	}
	r.hurry(res.Step, time.Duration(most[2]*float64(time.Second)))
	if world.Rank() != 0 {
		return finite
	}
	wait := metrics.Absent
	if told {
		wait = metrics.Float(most[1])
	}
	tps := metrics.PerSecond(float64(res.Tokens), res.Took.Seconds())
	tflops := metrics.TFLOPs(res.FLOPs, res.Took.Seconds(), world.Size())
	epoch := float64(res.Step) * float64(r.cfg.Train.GlobalBatchSize) / float64(r.train.loader.Samples())
	m := metrics.Step{
		Time: metrics.Time(time.Now()), Step: int64(res.Step), Epoch: metrics.Float(epoch),
		Loss: metrics.Float(res.Loss), GradNorm: metrics.Float(res.GradNorm), LR: metrics.Float(res.LR),
		Tokens: res.Trained, StepSeconds: metrics.Float(res.Took.Seconds()), TokensPerSecond: tps,
		TokensPerSecondPerDevice: metrics.PerDevice(tps, world.Size()), TFLOPsPerDevice: tflops,
		MFU: metrics.MFU(tflops, r.dev.PeakTFLOPs), MemoryBytes: int64(most[0]), CommWaitSeconds: wait,
		AttentionImbalance: metrics.Float(most[3]), AttentionBytes: metrics.Float(most[4]), ValLoss: val,
	}
	if err := r.out.Write(m); err != nil {
		return fmt.Errorf("metrics of step %d: %w", res.Step, err)
	}
	left, known := r.eta.Left(int64(steps - res.Step))
	if !known {
		left = -1
	}
	r.opts.report(Report{Kind: Progressed, Step: int64(res.Step), Steps: int64(steps), Metrics: m, Left: left})
	return finite
}

// runDirs holds open the directories that a rank writes into: no link in them leads out of the
// run directory, and one that is removed under the run is not made again.
type runDirs struct {
	run, checkpoints, logs *os.Root
}

// openDirs opens a run directory, which is there, and those in it.
func openDirs(path string) (d runDirs, err error) {
	if d.run, err = files.OpenDir(path); err != nil {
		return d, err
	}
	if d.checkpoints, err = files.Sub(d.run, "checkpoints"); err == nil {
		d.logs, err = files.Private(d.run, "logs")
	}
	if err != nil {
		return runDirs{}, errors.Join(err, d.close())
	}
	return d, nil
}

func (d *runDirs) close() error {
	var errs []error
	for _, root := range []*os.Root{d.logs, d.checkpoints, d.run} {
		if root != nil {
			errs = append(errs, root.Close())
		}
	}
	*d = runDirs{}
	return errors.Join(errs...)
}

// What parallel.deadline: auto takes, so that a rank that stands still costs a run little, and
// one that is slow for a while, as a shared file system may make it, does not end it.
const (
	deadlineSteps = 20              // of the longest
	deadlineLeast = 2 * time.Minute // what a shared file system may stand still for
	deadlineMost  = 5 * time.Minute // but never less than deadlineMin of the longest steps
	deadlineMin   = 5

	// timedSteps have to be timed before, and the first, which sets things up, is not counted.
	timedSteps = 3
)

// deadlineOf returns how long a rank may stand still where the longest step takes so long.
func deadlineOf(longest time.Duration) time.Duration {
	return max(min(deadlineSteps*longest, deadlineMost), deadlineMin*longest, deadlineLeast)
}

// beat returns how often a rank that is at the disk says so to those that wait for it.
func beat(cfg *config.Config) time.Duration {
	return min(2*time.Second, cfg.Parallel.TransferTimeout()/4)
}

// hurry sets the deadline by the longest step of any rank so far. All ranks call it at the same
// points, with the same time.
func (r *run) hurry(step int, longest time.Duration) {
	if r.cfg.Parallel.Deadline != 0 || step-r.began < timedSteps {
		return
	}
	// A little longer is no reason to set it anew.
	if d := deadlineOf(longest); r.deadline == 0 || d > r.deadline*11/10 {
		r.deadline = d
		r.mesh.setDeadline(d)
	}
}
