package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/launch/progress"
	"github.com/cprun/cprun/internal/model/config"
)

// ownNow works like own for a run directory as it is: it makes and locks nothing.
func (o *TrainOptions) ownNow(ctx context.Context, cfg *config.Config) (*origin, error) {
	if o.RunDir == "" {
		return nil, nil
	}
	run, err := filepath.Abs(o.RunDir)
	if err != nil {
		return nil, inputf("--run-dir: %w", err)
	}
	dir, err := files.OpenDir(checkpointsOf(run))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, inputf("--run-dir: %w; name another --run-dir", err)
	}
	defer dir.Close()
	return o.ownCheckpoint(ctx, dir, cfg)
}

// dry checks all that a start checks, and prints the plan of it.
func (o *TrainOptions) dry(ctx context.Context, path string, out *progress.Printer) (int, error) {
	at, err := o.place()
	if err != nil {
		return 0, err
	}
	perNode, device, err := o.resolve()
	if err != nil {
		return 0, err
	}
	o.machine.Hosts = hosts(&at, at.MaxAgents)
	r, err := o.checkInput(ctx, path, at.MaxAgents*cmp.Or(at.Workers, perNode), device)
	if err != nil {
		return 0, err
	}
	if own, err := o.ownNow(ctx, r.cfg); err != nil {
		return 0, err
	} else if own != nil {
		r.from = own
	}
	for _, w := range r.cfg.Warnings {
		out.Note("warning: " + w.String())
	}
	for _, line := range slices.Concat(dataLines(r.data, r.cfg), r.choice.notes) {
		out.Note(line)
	}
	begin := "new weights"
	if r.cfg.Model.From != "" {
		begin = "the weights of " + terminal.Name(r.cfg.Model.From)
	}
	if r.from != nil {
		begin = "the checkpoint " + terminal.Name(r.from.dir)
		for _, line := range r.from.notes {
			out.Note(line)
		}
	}
	p := &r.cfg.Parallel
	out.Note(fmt.Sprintf("dry run: nothing is wrong, and nothing was started. It would train for %d steps on %d "+
		"ranks (context %d x data %d), %s, %s, backend %s, from %s; cprun plan says more",
		r.cfg.Train.Steps, r.ranks, p.Context, p.Data, p.Algorithm, p.Layout, r.cfg.Parallel.Backend, begin))
	return 0, nil
}
