package worker

import (
	"context"
	"fmt"
	"os"

	"github.com/cprun/cprun/internal/agent"
	"github.com/cprun/cprun/internal/backend"
	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/device"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/progress"
	"github.com/cprun/cprun/internal/plan"
	"github.com/cprun/cprun/internal/train"
)

func (p *process) train(ctx context.Context) (err error) {
	p.phase, p.start = "setup", newStart()
	var job agent.TrainJob
	if err := p.payload(&job); err != nil {
		return err
	}
	p.started = job.Machine.Arch == 0 // a CPU's start has no parts worth a line
	cfg, err := config.Load(job.Config, config.Options{Ranks: p.WorldSize, Device: job.Machine.Device()})
	if err != nil {
		return err
	}
	mem, err := plan.MemoryOf(cfg, p.WorldSize, job.Machine)
	if err != nil {
		return err
	}
	dev, world, done, err := p.device(ctx, device.CUDAOptions{
		Backend: cfg.Attention.Backend, Compute: backend.DType(cfg), Machine: job.Machine,
		Reserve: mem.Planned(), Workspace: mem.Fused(), HeadDim: cfg.Model.HeadDim, Deterministic: cfg.Train.Deterministic, Packed: cfg.Data.PackDocuments,
		Timed: p.start.time,
	})
	if err != nil {
		return err
	}
	defer func() {
		if err == nil {
			err = done()
		}
	}()
	stopped, err := train.Run(ctx, cfg, dev, world, train.Options{
		RunDir: job.RunDir, RunID: fmt.Sprintf("%s-%d", p.RunID, p.Restart), Version: job.Version, ConfigYAML: string(cfg.YAML()),
		// The launcher has found where a job begins. A restarted one goes on from what it had.
		Resume: p.Restart > 0, From: job.From, Locked: true,
		Stop: p.Stop(), Report: p.report, NoSave: job.NoSave, Timed: p.start.time,
	})
	p.quiet = stopped
	return err
}

// report passes on what the trainer tells. An event that cannot be sent means that the
// launcher is gone, which ends this process by itself.
func (p *process) report(r train.Report) {
	switch r.Kind {
	case train.Notice:
		if p.Rank == 0 {
			_ = p.SendData(agent.EventNotice, 0, r.Text)
		}
	case train.Phase:
		p.phase, p.step = r.Text, r.Step
		if r.Text == "step" && p.first == nil {
			p.first = p.start.time("first step")
		}
	case train.Validated:
		if p.Rank == 0 {
			_ = p.SendData(agent.EventValidation, r.Step, progress.Number(r.Loss))
		}
	case train.Advanced:
		p.step = r.Step
		if !p.started {
			p.started = true
			p.first()
			fmt.Fprintln(os.Stderr, p.start)
		}
		_ = p.Send(launch.Event{Kind: launch.EventProgress, Step: r.Step})
	case train.Saved:
		_ = p.Send(launch.Event{Kind: launch.EventCheckpoint, Step: r.Step})
	case train.Stopped:
		p.step = r.Step
	case train.Progressed:
		m := r.Metrics
		s := progress.Step{
			Step: r.Step, Steps: r.Steps, Loss: progress.Number(m.Loss), GradNorm: progress.Number(m.GradNorm),
			LR: progress.Number(m.LR), TokensPerSecond: progress.Number(m.TokensPerSecond), ETASeconds: progress.Number(r.Left.Seconds()),
		}
		if m.ValLoss != nil {
			v := progress.Number(*m.ValLoss)
			s.ValLoss = &v
		}
		_ = p.SendData(launch.EventProgress, r.Step, s)
	}
}
