package worker

import (
	"context"

	"github.com/cprun/cprun/internal/agent"
	"github.com/cprun/cprun/internal/attend"
)

func (p *process) attention(ctx context.Context) error {
	p.phase = "attention"
	var spec attend.Spec
	if err := p.payload(&spec); err != nil {
		return err
	}
	c, err := attend.Open(spec.In)
	if err != nil {
		return err
	}
	defer c.Close()
	report, err := c.Run(ctx, spec, p.world, p.stream)
	if err != nil || p.Rank != 0 {
		return err
	}
	return p.SendData(agent.EventReport, 0, report)
}
