package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/attend"
	"github.com/cprun/cprun/internal/backend"
	"github.com/cprun/cprun/internal/launch"
)

// EventReport carries the attend.Report of rank 0.
const EventReport = "report"

// Attention runs one distributed attention on given tensors and returns the exit status.
func Attention(ctx context.Context, spec attend.Spec, asJSON bool, o Options) (int, error) {
	ranks, device, err := o.resolve()
	if err != nil {
		return 0, err
	}
	spec.Device, spec.Machine = device, o.machine
	notes, err := checkAttention(&spec, ranks)
	if err != nil {
		return 0, &InputError{err}
	}
	logs, err := os.MkdirTemp("", "cprun-attention-")
	if err != nil {
		return 0, fmt.Errorf("log directory: %w", err)
	}
	var report *attend.Report
	out := o.printer()
	for _, line := range notes {
		out.Note(line)
	}
	res := launch.Run(ctx, launch.Job{
		NProc: ranks, Argv: []string{"worker", string(RoleAttention)}, LogDir: logs, Payload: payload(spec),
		Stderr: out, Show: o.show(),
		OnEvent: func(rank int, e launch.Event) {
			if e.Kind == EventReport {
				report = &attend.Report{}
				if json.Unmarshal(e.Data, report) != nil {
					report = nil
				}
			}
		},
	})
	out.Close()
	if res.ExitCode != launch.ExitDone {
		return res.ExitCode, res.Err // the logs stay, since the report names them
	}
	os.RemoveAll(logs)
	if report == nil {
		return launch.ExitFailed, fmt.Errorf("rank 0 ended without its report")
	}
	if asJSON {
		enc := json.NewEncoder(o.Stdout)
		enc.SetIndent("", "  ")
		return 0, enc.Encode(report)
	}
	if !o.Quiet {
		fmt.Fprintf(o.Stdout, "%s: %d ranks, %s, %s, backend %s in %s: %.3f s, balance %.2f\nwrote %s\n",
			report.In, report.Ranks, report.Layout, report.Algorithm, report.Backend, report.DType, report.Seconds, report.Balance, report.Out)
	}
	return 0, nil
}

// checkAttention resolves autos and paths, and finds every fault that can be found here. The
// notes are for the user.
func checkAttention(spec *attend.Spec, ranks int) (notes []string, err error) {
	for _, p := range []struct {
		flag string
		path *string
	}{{"--in", &spec.In}, {"--out", &spec.Out}} {
		if *p.path == "" {
			return nil, fmt.Errorf("%s is missing: cprun attention --in case.safetensors --out result.safetensors", p.flag)
		}
		if *p.path, err = filepath.Abs(*p.path); err != nil {
			return nil, fmt.Errorf("%s: %w", p.flag, err)
		}
	}
	c, err := attend.Open(spec.In)
	if err != nil {
		return nil, fmt.Errorf("--in: %w", err)
	}
	defer c.Close()
	if info, err := os.Stat(filepath.Dir(spec.Out)); err != nil || !info.IsDir() {
		return nil, fmt.Errorf("--out: %s is not a directory", filepath.Dir(spec.Out))
	}
	if err := writable(filepath.Dir(spec.Out)); err != nil {
		return nil, fmt.Errorf("--out: %w; name a file in a directory that can be written to", err)
	}
	if out, err := os.Stat(spec.Out); err == nil {
		if out.IsDir() {
			return nil, fmt.Errorf("--out: %s is a directory; name a file in it", spec.Out)
		}
		if !out.Mode().IsRegular() { // it would be replaced by one
			return nil, fmt.Errorf("--out: %s is not a regular file; name another", spec.Out)
		}
		if in, err := os.Stat(spec.In); err == nil && os.SameFile(in, out) {
			return nil, fmt.Errorf("--out: %s is also --in, which the result would replace; name another file", spec.Out)
		}
	}
	auto := func(s *string, choice string) {
		if *s == "auto" || *s == "" {
			*s = choice
		}
	}
	auto(&spec.Layout, "zigzag")
	auto(&spec.Algorithm, "ring")
	auto(&spec.DType, map[string]string{"cpu": "fp32", "cuda": "bf16"}[spec.Device])
	want := attention.Auto
	if spec.Backend != "auto" && spec.Backend != "" {
		if want, err = attention.ParseBackend(spec.Backend); err != nil {
			return nil, fmt.Errorf("--backend: %w", err)
		}
	}
	return chooseFor(spec, c, ranks, want)
}

// writable makes a file in a directory, as the result is first made beside its name.
func writable(dir string) error {
	f, err := os.CreateTemp(dir, ".cprun-*")
	if err != nil {
		return err
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}

// chooseFor decides the backend of one attention on given tensors.
func chooseFor(spec *attend.Spec, c *attend.Case, ranks int, want attention.Backend) ([]string, error) {
	env, err := launch.Attention()
	if err != nil {
		return nil, err
	}
	spec.Backend = attention.Flash.String() // so that the rest of the spec is checked first
	if err := spec.Check(c, ranks); err != nil {
		return nil, err
	}
	dtype, err := spec.Element()
	if err != nil {
		return nil, err
	}
	m := spec.Machine
	p := attention.Params{
		Arch: m.Arch, CUDNN: m.CUDNN, Flash: m.Flash, Memory: m.Memory,
		Disabled: backend.Disabled(env.NoFlash, env.NoFused, env.NoUnfused), Want: want,
		DType: dtype, Format: attention.BSHD, Packing: attention.Separate, Contiguous: true,
		Batch: c.Batch, SeqQ: c.SeqQ, SeqKV: c.SeqKV, Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim, HeadDimV: c.HeadDimV,
		Causal: c.Causal, WindowLeft: c.Window, WindowRight: -1, Softcap: c.Softmax.Softcap != 0,
		Documents: len(c.Docs) > 0 && c.SeqQ == c.SeqKV, Training: c.Backward,
		ContextSize: ranks, Algorithm: spec.Algorithm, Layout: spec.Layout,
	}
	choice, err := attention.Select(p)
	if err != nil {
		return nil, err
	}
	spec.Backend = choice.Backend.String()
	return notesOf(env.Debug, choice.Explain), spec.Check(c, ranks)
}
