package worker

import (
	"context"

	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/run/attend"
	"github.com/cprun/cprun/internal/run/job"
)

func (p *process) attention(ctx context.Context) error {
	p.where.enter("attention")
	var spec attend.Spec
	if err := p.payload(&spec); err != nil {
		return err
	}
	c, err := attend.Open(spec.In)
	if err != nil {
		return err
	}
	defer c.Close()
	dtype, err := spec.Element()
	if err != nil {
		return err
	}
	dev, world, done, err := p.device(ctx, device.CUDAOptions{
		Backend: spec.Backend, Remedies: spec.Remedies, Compute: dtype, Machine: spec.Machine, Packed: c.Masks.Docs != nil,
	})
	if err != nil {
		return err
	}
	p.where.enter("attention")
	report, err := c.Run(ctx, spec, world, &dev)
	if err == nil && p.Rank == 0 {
		err = p.SendData(job.EventReport, 0, report)
	}
	if err != nil {
		return err
	}
	return done()
}
