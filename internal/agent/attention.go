package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cprun/cprun/internal/attend"
	"github.com/cprun/cprun/internal/launch"
)

// EventReport carries the attend.Report of rank 0.
const EventReport = "report"

// Attention runs one distributed attention on given tensors and returns the exit status.
func Attention(ctx context.Context, spec attend.Spec, asJSON bool, o Options) (int, error) {
	ranks, _, err := o.resolve()
	if err != nil {
		return 0, err
	}
	if err := checkAttention(&spec, ranks); err != nil {
		return 0, &InputError{err}
	}
	logs, err := os.MkdirTemp("", "cprun-attention-")
	if err != nil {
		return 0, fmt.Errorf("log directory: %w", err)
	}
	var report *attend.Report
	out := o.printer()
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

// checkAttention resolves autos and paths, and finds every fault that can be found here.
func checkAttention(spec *attend.Spec, ranks int) (err error) {
	for _, p := range []struct {
		flag string
		path *string
	}{{"--in", &spec.In}, {"--out", &spec.Out}} {
		if *p.path == "" {
			return fmt.Errorf("%s is missing: cprun attention --in case.safetensors --out result.safetensors", p.flag)
		}
		if *p.path, err = filepath.Abs(*p.path); err != nil {
			return fmt.Errorf("%s: %w", p.flag, err)
		}
	}
	c, err := attend.Open(spec.In)
	if err != nil {
		return fmt.Errorf("--in: %w", err)
	}
	defer c.Close()
	if info, err := os.Stat(filepath.Dir(spec.Out)); err != nil || !info.IsDir() {
		return fmt.Errorf("--out: %s is not a directory", filepath.Dir(spec.Out))
	}
	auto := func(s *string, choice string) {
		if *s == "auto" || *s == "" {
			*s = choice
		}
	}
	auto(&spec.Layout, "zigzag")
	auto(&spec.Algorithm, "ring")
	auto(&spec.Backend, "flash")
	auto(&spec.DType, "fp32")
	return spec.Check(c, ranks)
}
