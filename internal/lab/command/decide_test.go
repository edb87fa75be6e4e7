package command

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/partition"
)

// perPair implements planner.Costs for a machine with fast links.
type perPair struct{}

func (perPair) Call(c planner.Call) float64 { return 1e-12 * float64(partition.Pairs(c.Tiles)*c.Heads) }
func (perPair) Exchange(_ bool, bytes int64, _ int) float64 {
	return 1e-5 + float64(bytes)/450e9
}
func (perPair) Copy(bytes int64) float64 { return float64(bytes) / 3e12 }
func (perPair) Host(int) float64         { return 0 }

// slowFlash implements planner.Costs for a machine on which cuDNN is faster.
type slowFlash struct{ perPair }

func (s slowFlash) Call(c planner.Call) float64 {
	if c.Backend == "flash" {
		return 1e-3 + 2*s.perPair.Call(c)
	}
	return s.perPair.Call(c)
}

// `cprun plan` shows the choice by costs, and without costs follows the rules.
func TestPlanGoesByCosts(t *testing.T) {
	for _, c := range []struct {
		costs func(m machine.Machine, ranks, perHost int) planner.Costs
		want  string
	}{
		{nil, ""},
		{func(machine.Machine, int, int) planner.Costs { return nil }, ""},
		{func(_ machine.Machine, ranks, perHost int) planner.Costs {
			if ranks != 8 || perHost != 8 {
				t.Errorf("%d ranks, %d a host", ranks, perHost)
			}
			return perPair{}
		}, "choice      by the costs of this machine"},
	} {
		var out bytes.Buffer
		_, err := Plan("../../../examples/bench/llama-3.2-3b-32k.yaml", PlanOptions{
			Options: Options{NProc: "auto", Device: "auto", NodeRank: -1, LogLevel: "info", Stdout: &out,
				Stderr: os.Stderr, Costs: c.costs},
			Set: []string{"parallel.algorithm=auto"}, Assume: []string{"arch=sm90,gpus=8"}, Verbose: true,
		})
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(out.String(), "choice      "); got != (c.want != "") ||
			!strings.Contains(out.String(), c.want) {
			t.Errorf("want %q in\n%s", c.want, out.String())
		}
	}
}

// A backend chosen by costs is not reported as requested; a requested one is.
func TestPlanSaysWhoTookTheBackend(t *testing.T) {
	reason := func(set ...string) (reason, took string) {
		var out strings.Builder
		_, err := Plan("../../../examples/bench/llama-3.2-3b-128k.yaml", PlanOptions{
			Options: Options{NProc: "auto", Device: "auto", NodeRank: -1, LogLevel: "info", Stdout: &out,
				Stderr: os.Stderr,
				Costs:  func(machine.Machine, int, int) planner.Costs { return slowFlash{} }},
			Set: append(set, "data.seq_len=16K"), Assume: []string{"gpu=h200,cudnn=9.19.0"}, JSON: true,
		})
		if err != nil {
			t.Fatal(err)
		}
		var p struct {
			Choice    struct{ Backend, Ruled string }
			Attention struct{ Backend, Reason string }
		}
		if err := json.Unmarshal([]byte(out.String()), &p); err != nil || p.Attention.Backend != "fused" {
			t.Fatalf("%+v, %v", p, err)
		}
		return p.Attention.Reason, p.Choice.Backend + " for " + p.Choice.Ruled
	}
	if why, took := reason(); why != "the fastest by the costs of this machine, where the rules have flash" ||
		took != "fused for flash" {
		t.Errorf("%q, %q", why, took)
	}
	if why, took := reason("attention.backend=fused"); why != "asked for" || took != " for " {
		t.Errorf("%q, %q", why, took)
	}
}

// Workers read the config with the choice, which must not contain a margin that the chosen backend does not use.
func TestMarginGoesWithTheBackend(t *testing.T) {
	for gpu, want := range map[string]string{"gpu=h200,cudnn=9.19.0": "flash 16", "arch=sm90,cudnn=9.19.0": "flash 16",
		"arch=sm100,cudnn=9.19.0": "fused 0"} {
		var out bytes.Buffer
		_, err := Plan("../../../examples/bench/llama-3.2-3b-128k.yaml", PlanOptions{
			Options: Options{NProc: "auto", Device: "auto", NodeRank: -1, LogLevel: "info", Stdout: &out,
				Stderr: os.Stderr},
			Set: []string{"data.seq_len=16K", "attention.sm_margin=16"}, Assume: []string{gpu}, JSON: true,
		})
		if err != nil {
			t.Fatal(err)
		}
		var p struct {
			Config struct {
				Attention struct {
					Backend string
					Margin  int `json:"sm_margin"`
				}
			}
		}
		if err := json.NewDecoder(&out).Decode(&p); err != nil {
			t.Fatal(err)
		}
		if a := p.Config.Attention; fmt.Sprint(a.Backend, " ", a.Margin) != want {
			t.Errorf("%s: %+v, want %s", gpu, a, want)
		}
	}
}
