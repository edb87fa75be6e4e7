package worker

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"

	"github.com/cprun/cprun/comm"
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

// A session is a run of the trainer on this rank.
type session struct {
	job.Train
	cfg     *config.Config
	dev     device.Device
	world   comm.Communicator
	options train.Options
}

// session opens the device for a config and its memory, and calls run.
func (p *process) session(ctx context.Context, trains bool, run func(context.Context, *session) error) error {
	p.where.enter("setup")
	timed := p.start
	var s session
	if err := p.payload(&s.Train); err != nil {
		return err
	}
	if s.Machine.IsCPU() {
		p.start = nil // the line on the start is of no interest
	}
	planned := timed.time("plan")
	var err error
	s.cfg, err = config.Parse(filepath.Join(s.RunDir, "config.yaml"), []byte(s.Config),
		config.Options{Ranks: p.WorldSize, Device: s.Machine.Device()})
	if err != nil {
		return err
	}
	p.moves = s.cfg.Parallel.Transport
	memory := plan.MemoryOf
	if !trains {
		memory = plan.EvalMemoryOf
	}
	mem, err := memory(s.cfg, p.WorldSize, s.Machine)
	if err != nil {
		return err
	}
	planned()
	s.dev, s.world, err = p.device(ctx, device.CUDAOptions{
		Backend: s.cfg.Parallel.Backend, Compute: backend.DType(s.cfg), Machine: s.Machine,
		Planned: mem.Planned(), Workspace: mem.Fused(), HeadDim: s.cfg.Model.HeadDim,
		Deterministic: s.cfg.Train.Deterministic, Packed: s.cfg.Data.PackDocuments, SMMargin: s.cfg.Attention.SMMargin,
		Timed: timed.time,
	})
	if err == nil {
		if trains && s.Machine.IsCPU() { // at the start; see BoundGarbage
			debug.SetMemoryLimit(mem.Total + mem.HostTotal + s.HostData - plan.ProgramBytes)
		}
		s.options = train.Options{Room: mem.Room(), Report: p.report, Timed: timed.time, BoundGarbage: true}
		err = run(ctx, &s)
	}
	if trains {
		err = explain(err, s.cfg, p.WorldSize, s.Machine, &mem)
	}
	return err
}

func (p *process) train(ctx context.Context, s *session) (err error) {
	o := s.options
	o.Start = train.Start{Job: p.RunID, First: s.Generation, Generation: s.Generation + cmp.Or(s.World,
		int64(p.Restart)), Claimed: s.World > 0}
	o.RunDir, o.RunID, o.Version = s.RunDir, fmt.Sprintf("%s-%d", p.RunID, o.Start.Generation), s.Version
	o.ConfigYAML = string(s.cfg.YAML())
	// The launcher chose the first checkpoint. A restart resumes from the run's own.
	o.Resume, o.From = p.Restart > 0, s.From
	o.Stop, o.NoSave, o.Data = p.Stop(), s.NoSave, s.Data
	p.stopped, err = train.Run(ctx, s.cfg, s.dev, s.world, o)
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

func (p *process) eval(ctx context.Context, s *session) error {
	o := s.options
	o.From = s.From
	if s.LogProbs {
		return train.LogProbs(ctx, s.cfg, s.dev, s.world, o, p.sendLine)
	}
	e, err := train.Eval(ctx, s.cfg, s.dev, s.world, o)
	if err == nil && p.Rank == 0 {
		err = p.SendData(job.EventReport, 0, e)
	}
	return err
}

// verify runs the part of this side in a comparison of one rank with several.
func (p *process) verify(ctx context.Context, s *session) error {
	o := s.options
	o.RunDir = s.RunDir
	v, err := train.Verify(ctx, s.cfg, s.dev, s.world, o, train.Probing{Whole: s.Whole, Leak: s.Leak,
		Angles: p.WorldSize == 1, Routes: s.Routes})
	if err == nil && p.Rank == 0 {
		err = p.SendData(job.EventReport, 0, v)
	}
	return err
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
		if r.Text == "step" && p.start != nil && p.first == nil {
			p.first = p.start.time("first step")
		}
	case train.Validated:
		if p.Rank == 0 {
			_ = p.SendData(job.EventValidation, r.Step, progress.Number(r.Loss))
		}
	case train.Advanced:
		p.where.reach(r.Step)
		if p.start != nil {
			p.first()
			fmt.Fprintln(os.Stderr, p.start)
			p.start = nil
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
			ETA: r.Left, Line: r.Line,
		}
		if m.ValLoss != nil {
			s.ValLoss = new(progress.Number(*m.ValLoss))
		}
		_ = p.SendData(launch.EventProgress, r.Step, s)
	}
}
