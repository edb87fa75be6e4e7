package command

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"unicode/utf8"

	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/run/attend"
	"github.com/cprun/cprun/internal/run/job"
)

// Attention runs one distributed attention on given tensors and returns the exit status.
func Attention(ctx context.Context, spec attend.Spec, asJSON bool, o Options) (int, error) {
	ranks, err := o.spawns()
	if err != nil {
		return 0, err
	}
	spec.Device, spec.Machine = o.machine.Device(), o.machine
	notes, err := o.checkAttention(&spec, ranks)
	if err != nil {
		return 0, &InputError{err}
	}
	report := &attend.Report{}
	res, err := o.report(ctx, job.RoleAttention, ranks, notes, spec, report)
	if err != nil || res.ExitCode != launch.ExitDone {
		return res.ExitCode, err
	}
	if asJSON {
		return 0, printJSON(o.Stdout, report)
	}
	if !o.Quiet {
		how := "detected"
		if report.QKVLayoutDeclared {
			how = "declared"
		}
		fmt.Fprintf(o.Stdout, "%s: tensor layout %s (%s)\nranks %d, layout %s, algorithm %s, backend %s in %s: %.3f s, "+
			"balance %.2f\nwrote %s\n",
			terminal.Name(report.In), report.QKVLayout, how, report.Ranks, report.Layout, report.Algorithm, report.Backend,
			report.DType, report.Seconds, report.Balance, terminal.Name(report.Out))
	}
	return 0, nil
}

// checkAttention resolves autos and paths, checks the input, and returns notes for the user.
func (o *Options) checkAttention(spec *attend.Spec, ranks int) (notes []string, err error) {
	for _, p := range []struct {
		flag string
		path *string
	}{{"--in", &spec.In}, {"--out", &spec.Out}} {
		if *p.path == "" {
			return nil, fmt.Errorf("%s is missing: cprun attention --in case.safetensors --out result.safetensors",
				p.flag)
		}
		if *p.path, err = filepath.Abs(*p.path); err != nil {
			return nil, fmt.Errorf("%s: %w", p.flag, err)
		}
		if !utf8.ValidString(*p.path) { // workers get it as JSON
			return nil, fmt.Errorf("%s: %s is not UTF-8; give it another name", p.flag, terminal.Name(*p.path))
		}
	}
	c, err := attend.Open(spec.In)
	if err != nil {
		return nil, fmt.Errorf("--in: %w", err)
	}
	defer c.Close()
	// workers write a temporary file first, in the same directory
	f, err := os.CreateTemp(filepath.Dir(spec.Out), ".cprun-*")
	if err == nil {
		err = errors.Join(f.Close(), os.Remove(f.Name()))
	}
	if err != nil {
		return nil, fmt.Errorf("--out: %w; name a file in a writable directory", err)
	}
	if out, err := os.Stat(spec.Out); err == nil {
		if out.IsDir() {
			return nil, fmt.Errorf("--out: %s is a directory; name a file in it", terminal.Name(spec.Out))
		}
		if !out.Mode().IsRegular() { // the result would replace it
			return nil, fmt.Errorf("--out: %s is not a regular file; name another", terminal.Name(spec.Out))
		}
		if in, err := os.Stat(spec.In); err == nil && os.SameFile(in, out) {
			return nil, fmt.Errorf("--out: %s is also --in, which the result would overwrite; name another file",
				terminal.Name(spec.Out))
		}
	}
	if spec.DType == "auto" || spec.DType == "" {
		spec.DType = map[string]string{"cpu": "fp32", "cuda": "bf16"}[spec.Device]
	}
	if spec.Backend != "" { // report a typo with the flag
		if _, err := backends.ParseBackend(spec.Backend); err != nil {
			return nil, fmt.Errorf("--backend: %w", err)
		}
	}
	room := float64(spec.Machine.Memory) * float64(max(spec.Machine.GPUs, 1))
	if need := c.Needs(); room > 0 && need > room {
		return nil, fmt.Errorf("--in: %s: its tensors and the results take %.3g GiB of %.3g; use a shorter sequence, "+
			"or a larger machine", c.Path, need/(1<<30), room/(1<<30))
	}
	return o.chooseFor(spec, c, ranks)
}

func (o *Options) chooseFor(spec *attend.Spec, c *attend.Case, ranks int) (notes []string, err error) {
	m, batch := &c.Masks, c.Batch
	if m.Apart() { // each sample has its own mask and its own pass
		batch = 1
	}
	asked, docs := spec.Strategy, []int(nil)
	if len(m.Docs) == 1 && m.DocsKV == nil && c.SeqQ == c.SeqKV { // else no single list describes the documents
		docs = m.Docs[0]
	}
	spec.Strategy = config.DefaultStrategy(asked, config.RunShape{
		Device: spec.Device, Documents: docs != nil, Ranks: ranks, PerHost: ranks, Heads: c.Heads, KVHeads: c.KVHeads,
	})
	ruled := spec.Strategy
	spec.Backend = backends.Flash.String() // to check the rest of the spec first
	if err := spec.Check(c, ranks); err != nil {
		return nil, err
	}
	dtype, err := spec.Element()
	if err != nil {
		return nil, err
	}
	answer, notes, err := o.strategy(spec.Machine, plan.Question{
		Attentions: []backend.Request{{Strategy: ruled, Params: backends.Params{
			DType: dtype, Batch: batch, SeqQ: c.SeqQ, SeqKV: c.SeqKV, Heads: c.Heads, KVHeads: c.KVHeads,
			HeadDim: c.HeadDim, HeadDimV: c.HeadDimV,
			Causal: m.Causal, TopLeft: m.TopLeft, WindowLeft: m.Left, WindowRight: max(-1, m.Right),
			Slices: m.Slices != nil, Softcap: c.Softmax.Softcap != 0, ScaleNotAbove0: !(c.Softmax.Scale > 0),
			Documents: m.Docs != nil, DocumentKeys: m.DocsKV != nil, Training: c.Backward,
			Sink: c.Scores.Sink || c.Scores.OffByOne, Bias: c.Scores.Biased(), MaxLogit: c.Scores.MaxLogit,
			ContextSize: ranks,
		}}},
		Requested: asked, Docs: docs, Ranks: ranks, PerHost: ranks,
	})
	if err != nil {
		return nil, err
	}
	spec.Strategy = answer.Strategy
	return notes, spec.Check(c, ranks)
}
