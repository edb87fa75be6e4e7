package worker

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/progress"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/run/job"
	"github.com/cprun/cprun/internal/run/train"
)

func (p *process) train(ctx context.Context) (err error) {
	job, cfg, err := p.task()
	if err != nil {
		return err
	}
	mem, err := plan.MemoryOf(cfg, p.WorldSize, job.Machine)
	if err != nil {
		return err
	}
	defer func() { err = explain(err, cfg, p.WorldSize, job.Machine, &mem) }()
	dev, world, done, err := p.device(ctx, p.deviceFor(job, cfg, &mem))
	if err != nil {
		return err
	}
	defer func() {
		if err == nil {
			err = done()
		}
	}()
	start := train.Start{Job: p.RunID, First: job.Generation, Generation: job.Generation + cmp.Or(job.World,
		int64(p.Restart)), Claimed: job.World > 0}
	stopped, err := train.Run(ctx, cfg, dev, world, train.Options{
		RunDir: job.RunDir, RunID: fmt.Sprintf("%s-%d", p.RunID, start.Generation), Version: job.Version,
		ConfigYAML: string(cfg.YAML()),
		// The launcher chose the first checkpoint. A restart resumes from the run's own.
		Resume: p.Restart > 0, From: job.From, Locked: true,
		Start: start,
		Room:  mem.Room(),
		Stop:  p.Stop(), Report: p.report, NoSave: job.NoSave, Timed: p.start.time, BoundGarbage: job.Machine.IsCPU(),
	})
	p.quiet = stopped
	return err
}

// explain adds to a lack of memory, each on lines of its own, the fix and the memory of the run by kind.
func explain(err error, cfg *config.Config, ranks int, on machine.Machine, mem *plan.Memory) error {
	var lack *device.MemoryError
	if !errors.As(err, &lack) {
		return err
	}
	return fmt.Errorf("%w\n%s", err, mem.Shortage(cfg, ranks, on, lack.Free, lack.Host))
}

func (p *process) eval(ctx context.Context) (err error) {
	task, cfg, err := p.task()
	if err != nil {
		return err
	}
	mem, err := plan.EvalMemoryOf(cfg, p.WorldSize, task.Machine)
	if err != nil {
		return err
	}
	dev, world, done, err := p.device(ctx, p.deviceFor(task, cfg, &mem))
	if err != nil {
		return err
	}
	o := train.Options{From: task.From, Room: mem.Room(), Report: p.report, Timed: p.start.time,
		BoundGarbage: task.Machine.IsCPU()}
	if task.LogProbs {
		err = train.LogProbs(ctx, cfg, dev, world, o, p.sendLine)
	} else {
		var e train.Evaluation
		if e, err = train.Eval(ctx, cfg, dev, world, o); err == nil && p.Rank == 0 {
			err = p.SendData(job.EventReport, 0, e)
		}
	}
	if err != nil {
		return err
	}
	return done()
}

// verify runs the part of this side in a comparison of one rank with several.
func (p *process) verify(ctx context.Context) (err error) {
	task, cfg, err := p.task()
	if err != nil {
		return err
	}
	mem, err := plan.MemoryOf(cfg, p.WorldSize, task.Machine)
	if err != nil {
		return err
	}
	defer func() { err = explain(err, cfg, p.WorldSize, task.Machine, &mem) }()
	dev, world, done, err := p.device(ctx, p.deviceFor(task, cfg, &mem))
	if err != nil {
		return err
	}
	v, err := train.Verify(ctx, cfg, dev, world, train.Options{RunDir: task.RunDir, Room: mem.Room(), Report: p.report,
		Timed: p.start.time, BoundGarbage: task.Machine.IsCPU()}, train.Probing{Whole: task.Whole, Leak: task.Leak})
	if err == nil && p.Rank == 0 {
		err = p.SendData(job.EventReport, 0, v)
	}
	if err != nil {
		return err
	}
	return done()
}

// sendLine sends a line of JSON in pieces, each far below the largest event.
func (p *process) sendLine(s train.Sequence) error {
	line, err := json.Marshal(s)
	if err != nil {
		return err
	}
	for piece := range slices.Chunk(append(line, '\n'), 1<<16) {
		if err := p.SendData(job.EventOutput, 0, string(piece)); err != nil {
			return err
		}
	}
	return nil
}

func (p *process) task() (task job.Train, cfg *config.Config, err error) {
	p.where.enter("setup")
	p.start = &start{began: time.Now()}
	if err := p.payload(&task); err != nil {
		return task, nil, err
	}
	p.started = task.Machine.IsCPU() // on a CPU the line on the start is of no interest
	cfg, err = config.Parse(filepath.Join(task.RunDir, "config.yaml"), []byte(task.Config),
		config.Options{Ranks: p.WorldSize, Device: task.Machine.Device()})
	if err == nil {
		p.moves = cfg.Parallel.Transport
	}
	return task, cfg, err
}

func (p *process) deviceFor(task job.Train, cfg *config.Config, mem *plan.Memory) device.CUDAOptions {
	return device.CUDAOptions{
		Backend: cfg.Parallel.Backend, Remedies: task.Remedies, Compute: backend.DType(cfg), Machine: task.Machine,
		Reserve: mem.Planned(), Workspace: mem.Fused(), HeadDim: cfg.Model.HeadDim,
		Deterministic: cfg.Train.Deterministic, Packed: cfg.Data.PackDocuments, SMMargin: cfg.Attention.SMMargin,
		Timed: p.start.time,
	}
}

// report sends the trainer's reports to the launcher. It ignores errors: they mean that the launcher is gone, which
// ends this process anyway.
func (p *process) report(r train.Report) {
	switch r.Kind {
	case train.Notice:
		if p.Rank == 0 {
			_ = p.SendData(job.EventNotice, 0, r.Text)
		}
	case train.Phase:
		p.where.enter(r.Text)
		p.where.reach(r.Step)
		if r.Text == "step" && p.first == nil {
			p.first = p.start.time("first step")
		}
	case train.Validated:
		if p.Rank == 0 {
			_ = p.SendData(job.EventValidation, r.Step, progress.Number(r.Loss))
		}
	case train.Advanced:
		p.where.reach(r.Step)
		if !p.started {
			p.started = true
			p.first()
			fmt.Fprintln(os.Stderr, p.start)
		}
		_ = p.Send(launch.Event{Kind: launch.EventProgress, Step: r.Step})
	case train.Saved:
		_ = p.Send(launch.Event{Kind: launch.EventCheckpoint, Step: r.Step})
		if p.Rank == 0 {
			_ = p.SendData(job.EventNotice, 0,
				fmt.Sprintf("checkpoint of step %d: saved in %.1f s (training paused for %.1f s)",
					r.Step, r.Took.Seconds(), r.Paused.Seconds()))
		}
	case train.Stopped:
		p.where.reach(r.Step)
	case train.Progressed:
		m := r.Metrics
		s := progress.Step{
			Step: r.Step, Steps: r.Steps, Loss: progress.Number(m.Loss), GradNorm: progress.Number(m.GradNorm),
			LR: progress.Number(m.LR), TokensPerSecond: progress.Number(m.TokensPerSecond),
			ETASeconds: progress.Number(r.Left.Seconds()),
		}
		if m.ValLoss != nil {
			v := progress.Number(*m.ValLoss)
			s.ValLoss = &v
		}
		_ = p.SendData(launch.EventProgress, r.Step, s)
	}
}
