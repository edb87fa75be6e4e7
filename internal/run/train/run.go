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
	"github.com/cprun/cprun/internal/text/data"
	"github.com/cprun/cprun/tensor"
)

// Options are the inputs of a run besides its config.
type Options struct {
	RunDir     string
	RunID      string // of this attempt; unique in the run directory
	Version    string // of cprun, for checkpoints
	ConfigYAML string // the resolved config, for checkpoints

	Data *data.Identity // of the files, for checkpoints; nil: unknown

	Resume bool   // resume from the newest checkpoint of the run directory, if there is one
	From   string // else from this checkpoint; "": new weights

	Room state.Room // memory to allocate before the first step

	NoSave bool // write no checkpoint
	Frozen bool // evaluate only: no gradients and moments
	Whole  int  // tokens of a sample, if data.seq_len is a prefix
	// Start numbers this start of the run directory; the zero value means the next one.
	Start Start

	Stop   <-chan struct{} // closed to stop this rank
	Report func(Report)    // called on every rank, in order; may be nil

	// Timed, if not nil, is called at the beginning of each part of the start, and its result at the end. Several
	// goroutines call it.
	Timed func(part string) (end func())
	// BoundGarbage limits Go's garbage. It is for processes with one rank; see state.BoundGarbage.
	BoundGarbage bool
}

// Start numbers a start of a run.
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
	Phase                  // the rank begins the phase Text
	Progressed             // a step was logged
	Advanced               // a step is done
	Saved                  // the checkpoint of Step is complete
	Validated              // Loss is the validation loss before the first step
	Stopped                // the run ends on request, after a checkpoint of Step
)

// Report is an event of a rank.
type Report struct {
	Kind    Kind
	Step    int64 // steps done
	Steps   int64
	Text    string
	Loss    float64
	Metrics metrics.Step  // with Progressed, on rank 0
	Line    bool          // with Progressed: the step gets a line of its own
	Left    time.Duration // predicted time of the remaining steps; negative: unknown
	// With Saved: the duration of the save, and of the pause of training.
	Took, Paused time.Duration
}

type run struct {
	*Trainer
	opts     Options
	saver    *checkpoint.Saver
	dirs     runDirs
	out      metrics.Writer // rank 0
	trace    *metrics.Trace
	eta      metrics.ETA
	answerer *answerer     // nil without log.samples
	waited   time.Duration // total wait of the compute stream at the last log
	logged   int           // the last logged step
	began    int           // steps done before this run
	own      bool          // the run resumed from its own directory
	saving   saving        // the save in progress
	best     best          // the validation with the lowest loss, to be saved
	kept     best          // that of checkpoints/best

	savedAt  time.Time     // start of the last save, or of the run
	longest  time.Duration // longest step so far
	deadline time.Duration // deadline of transfers derived from it; 0: none
}

type saving struct {
	step   int // 0: no save
	began  time.Time
	paused time.Duration // pause of training
}

// Run trains on this rank until the config's steps are done or any rank is asked to stop. Every rank of the world calls
// it with the same config. stopped reports that it ended on request. The same call then resumes from the checkpoint.
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

// A collectiveError occurs on all ranks at the same step, such as a loss that is not finite. The ranks finish their
// transfers.
type collectiveError struct{ error }

// Unwrap returns the error.
func (e collectiveError) Unwrap() error { return e.error }

// leaveTime bounds the wait of a failed run for its writes.
const leaveTime = 2 * time.Second

// run opens the outputs, trains, and closes them. cancel ends background work.
func (r *run) run(ctx context.Context, cancel context.CancelCauseFunc) (stopped bool, err error) {
	if err = r.open(ctx); err == nil {
		stopped, err = r.loop(ctx)
	}
	if err == nil {
		if r.blank > 0 {
			r.opts.notice(fmt.Sprintf("%d of %d steps had no targets and did not update the weights", r.blank, r.step))
		}
		err = r.clock.Close()
	}
	if err == nil || errors.As(err, &collectiveError{}) {
		return stopped, errors.Join(append([]error{err}, r.close(r.saver.Close)...)...)
	}
	// The other ranks wait in a transfer or a save. Abort ends that before this rank waits for anything.
	r.mesh.world.Abort(err)
	cancel(err)
	return false, withOwn(err, r.close(r.leave))
}

// withOwn adds this rank's own errors from closing its outputs. If err comes from another rank, only its text stays:
// otherwise a rank whose save failed, but which first saw the error of another rank, would count as a victim.
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
		return fmt.Errorf("%w\n(another rank reported: %v)", mine, err)
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
	if r.cfg.Log.Samples.Every > 0 {
		if r.answerer, err = r.openAnswerer(); err != nil {
			return err
		}
	}
	if r.dirs, err = openDirs(r.opts.RunDir); err != nil {
		return fmt.Errorf("run directory: %w", err)
	}
	c := r.cfg.Checkpoint
	r.saver, err = checkpoint.NewSaver(r.mesh.saves, checkpoint.Options{
		Dir: r.dirs.checkpoints, RunID: r.opts.RunID, Keep: c.Keep, Async: r.copies != nil,
		Beat:  beat(r.cfg),
		Start: r.opts.Start,
		Warn:  func(err error) { r.opts.notice(err.Error()) },
	})
	if err == nil && r.savesBest() {
		r.kept, err = r.findBest(ctx)
	}
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

// close closes the outputs and ends saves by the given function. It returns all errors.
func (r *run) close(saves func() error) (errs []error) {
	if r.saver != nil {
		err := r.blamed(saves())
		if err == nil {
			r.saved()
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

func (r *run) loop(ctx context.Context) (stopped bool, err error) {
	steps := r.cfg.Train.Steps
	if r.endsEarly() && r.step < steps {
		r.opts.notice(fmt.Sprintf("training ended early at step %d: %s; to train on, raise train.early_stop.patience, or "+
			"write 0", r.step, r.stop))
		steps = r.step
	}
	if r.val != nil && r.step < steps {
		v, err := r.validated(ctx)
		if err != nil {
			return false, err
		}
		r.opts.report(Report{Kind: Validated, Step: int64(r.step), Loss: v.Loss})
		r.opts.notice(fmt.Sprintf("validation loss at step %d: %s", r.step, v))
		if r.step == 0 && r.out != nil {
			m := metrics.Untrained(time.Now(), v.Loss, float64(r.dev.Store.MemoryBytes()))
			m.ValLosses = v.Sources
			if err := r.out.Write(m); err != nil {
				return false, err
			}
		}
	}
	var queue []*inflight
	done, due := r.step, false // finished steps; whether a checkpoint is due by time
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
		if r.endsEarly() && done < steps {
			r.opts.notice(fmt.Sprintf("step %d: training ends early: %s", done, r.stop))
			steps = done
		}
		if err := r.poll(); err != nil {
			return false, err
		}
		// finish the queued steps before stopping or saving
		stopped, due = stopped || res.Stop, due || res.Due
		if len(queue) > 0 {
			continue
		}
		if stopped || due || done == steps || r.saves(done) || r.best.Step == done {
			if err := r.save(ctx, stopped || done == steps); err != nil {
				return false, err
			}
			due = false
		}
		if stopped && done < steps {
			r.opts.report(Report{Kind: Stopped, Step: int64(done)})
			return true, r.flush(ctx)
		}
	}
	if r.step == r.began && !r.own { // no steps to do, and the checkpoint belongs to another run
		if err := r.save(ctx, true); err != nil {
			return false, err
		}
	}
	return false, r.flush(ctx)
}

func (r *run) queue(ctx context.Context) (*inflight, error) {
	if r.step == r.began {
		defer r.opts.timed("queueing it")() // includes algorithm selection and connections to peers
	}
	select {
	case <-r.opts.Stop:
		return r.begin(ctx, true, r.due())
	default:
		return r.begin(ctx, false, r.due())
	}
}

// due reports whether checkpoint.interval has passed, by rank 0's clock.
func (r *run) due() bool {
	every := r.cfg.Checkpoint.Interval
	return every > 0 && !r.opts.NoSave && r.mesh.world.Rank() == 0 && r.saving.step == 0 &&
		time.Since(r.savedAt) >= every
}

// validates and saves report whether a validation or a checkpoint follows the n-th step.
func (r *run) validates(n int) bool {
	return r.val != nil && (n%r.cfg.Data.Validation.Every == 0 || n == r.cfg.Train.Steps)
}

func (r *run) saves(n int) bool {
	every := r.cfg.Checkpoint.Every
	return !r.opts.NoSave && (n == r.cfg.Train.Steps || every > 0 && n%every == 0)
}

// lines bounds the lines of a run with log.every auto, not counting the first few and validations.
const lines = 60

// prints reports whether the n-th step gets a line in any case. With log.every auto these are the first and the last
// one, every n-th with n of 1, 2, 5, 10, 20, …, and before that the same numbers, so that slow steps show early.
func (r *run) prints(n int) bool {
	steps, every := r.cfg.Train.Steps, r.cfg.Log.Every
	if every == 0 {
		every = roundUp((steps + lines - 1) / lines)
	}
	return n == steps || n%every == 0 || r.cfg.Log.Every == 0 && (n == r.began+1 || n < every && n == roundUp(n))
}

// roundUp returns the least of 1, 2, 5, 10, 20, 50, … that is at least n.
func roundUp(n int) int {
	for unit := 1; ; unit *= 10 {
		for _, round := range []int{unit, 2 * unit, 5 * unit} {
			if round >= n {
				return round
			}
		}
	}
}

// endsEarly reports whether train.early_stop ends the run. All ranks have the same losses.
func (r *run) endsEarly() bool {
	n := r.cfg.Train.EarlyStop.Patience
	return n > 0 && r.stop.Since >= n
}

// drains reports whether the n-th step must finish before another is queued. The first one does: a full queue of the
// device would hold the host in the second, and it would report the first only when that is done.
func (r *run) drains(n int) bool {
	return n == r.began+1 || r.validates(n) || r.answersAfter(n) || r.saves(n) ||
		r.trace != nil && n-r.began == r.cfg.Log.TraceSteps
}

func (r *run) validated(ctx context.Context) (Validation, error) {
	r.opts.report(Report{Kind: Phase, Text: "validation", Step: int64(r.step)})
	return r.Validate(ctx)
}

// after logs a finished step, and validates if that is due.
func (r *run) after(ctx context.Context, res Result) error {
	r.eta = r.eta.Add(res.Took.Seconds())
	if res.Step-r.began > 1 { // the first step includes setup
		r.longest = max(r.longest, res.Took)
	}
	steps, world := r.cfg.Train.Steps, r.mesh.world
	var val *metrics.Float
	var v Validation
	if r.validates(res.Step) {
		var err error
		if v, err = r.validated(ctx); err != nil {
			return err
		}
		val = new(metrics.Float(v.Loss))
		r.stop.add(v.Loss, r.cfg.Train.EarlyStop.MinDelta)
		if err := r.isBest(v.Loss); err != nil {
			return err
		}
	}
	var answers []metrics.Sample
	if r.answersAfter(res.Step) {
		var err error
		if answers, err = r.answers(ctx); err != nil {
			return err
		}
	}
	var finite error
	if err := res.finite(); err != nil {
		finite = collectiveError{err} // computed from sums that are equal on all ranks
	}
	if finite == nil && res.Lowered > 0 {
		r.opts.notice(fmt.Sprintf("step %d: skipped, since gradients overflowed in fp16; loss scale now %.0f",
			res.Step, res.Lowered))
	}
	if n := res.Blank; n > 0 && n&(n-1) == 0 { // the 1st, 2nd, 4th, …, to bound the notices
		r.opts.notice(fmt.Sprintf("step %d: skipped, since it has no targets (%d of %d steps so far)", res.Step, n,
			res.Step))
	}
	if r.trace != nil && res.Step-r.began >= r.cfg.Log.TraceSteps {
		if err := r.closeTrace(ctx, true); err != nil {
			return err
		}
	}
	line := r.prints(res.Step) || val != nil || answers != nil || res.Stop || finite != nil
	if !line && r.cfg.Log.Every > 0 {
		return nil
	}
	waited, known := r.waitedFor()
	mean := -1.0
	if known {
		mean = (waited - r.waited).Seconds() / float64(res.Step-r.logged) // per step since the last log
	}
	most, err := maximum(ctx, world, float64(r.dev.Store.MemoryBytes()), mean, r.longest.Seconds(),
		res.Load.imbalance(), float64(res.Load.sent))
	r.waited, r.logged = waited, res.Step
	if err != nil {
		return fmt.Errorf("metrics of step %d: %w", res.Step, err)
	}
	r.updateDeadline(res.Step, time.Duration(most[2]*float64(time.Second)))
	if world.Rank() != 0 {
		return finite
	}
	wait := metrics.Absent
	if known {
		wait = metrics.Float(most[1])
	}
	tps := metrics.PerSecond(float64(res.Tokens), res.Took.Seconds())
	tflops := metrics.TFLOPs(res.FLOPs, res.Took.Seconds(), world.Size())
	epoch := float64(res.Samples) / float64(r.train.loader.Epoch())
	m := metrics.Step{
		Time: metrics.Time(time.Now()), Step: int64(res.Step), Epoch: metrics.Float(epoch),
		Loss: metrics.Float(res.Loss), GradNorm: metrics.Float(res.GradNorm), LR: metrics.Float(res.LR),
		Tokens: res.Trained, StepSeconds: metrics.Float(res.Took.Seconds()), TokensPerSecond: tps,
		TokensPerSecondPerDevice: tps / metrics.Float(world.Size()), TFLOPsPerDevice: tflops,
		MFU: metrics.MFU(tflops, r.dev.PeakTFLOPs), MemoryBytes: int64(most[0]), CommWaitSeconds: wait,
		AttentionImbalance: metrics.Float(most[3]), AttentionBytes: metrics.Float(most[4]), ValLoss: val,
		AuxLoss: res.AuxLoss, ExpertImbalance: res.Imbalance,
		EarlyStop: res.Step < steps && r.endsEarly(), ValLosses: v.Sources,
		Samples: answers,
	}
	if err := r.out.Write(m); err != nil {
		return fmt.Errorf("metrics of step %d: %w", res.Step, err)
	}
	left, ok := r.eta.Left(int64(steps - res.Step))
	if !ok {
		left = -1
	}
	r.opts.report(Report{Kind: Progressed, Step: int64(res.Step), Steps: int64(steps), Metrics: m, Left: left,
		Line: line})
	return finite
}

// runDirs holds the open directories of a run. Writes follow no symbolic link out of them, and do not recreate a
// removed directory.
type runDirs struct {
	run, checkpoints, logs *os.Root
}

// openDirs opens an existing run directory and its subdirectories.
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

// Bounds of parallel.deadline: auto. A hung rank should cost little time, but a pause such as one of a shared file
// system must not end the run.
const (
	deadlineSteps = 20              // times the longest step
	deadlineLeast = 2 * time.Minute // longest pause of a shared file system
	deadlineMost  = 5 * time.Minute // unless deadlineMin steps take longer
	deadlineMin   = 5

	// timedSteps is the number of steps to time first, including the first one, which does not count.
	timedSteps = 3
)

// deadlineOf returns the deadline of transfers for the duration of the longest step.
func deadlineOf(longest time.Duration) time.Duration {
	return max(min(deadlineSteps*longest, deadlineMost), deadlineMin*longest, deadlineLeast)
}

// beat returns the interval of heartbeats from a rank in file I/O to the ranks that wait for it.
func beat(cfg *config.Config) time.Duration {
	return min(2*time.Second, cfg.Parallel.TransferTimeout()/4)
}

// updateDeadline derives the deadline of transfers from the longest step of any rank. All ranks call it at the same
// points with the same time.
func (r *run) updateDeadline(step int, longest time.Duration) {
	if r.cfg.Parallel.Deadline != 0 || step-r.began < timedSteps {
		return
	}
	// ignore small increases
	if d := deadlineOf(longest); r.deadline == 0 || d > r.deadline*11/10 {
		r.deadline = d
		r.mesh.setDeadline(d)
	}
}
