package command

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
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

// costsOf returns costs for every machine; nil: unknown.
func costsOf(c planner.Costs) func(machine.Machine, int, int) planner.Costs {
	return func(machine.Machine, int, int) planner.Costs { return c }
}

// assumed returns a machine in the form of --assume.
func assumed(t *testing.T, properties string) machine.Machine {
	t.Helper()
	return must.Have(machine.Assume(strings.Fields(properties)))
}

// planned decodes the JSON of cprun plan into to; nil: it returns the verbose text.
func planned(t *testing.T, path, assume string, costs func(machine.Machine, int, int) planner.Costs, to any,
	set ...string) string {
	t.Helper()
	var out strings.Builder
	_, err := Plan("../../../examples/bench/"+path, PlanOptions{
		Options: Options{NProc: "auto", Device: "auto", NodeRank: -1, LogLevel: "info", Stdout: &out, Stderr: os.Stderr,
			Costs: costs},
		Set: set, Assume: []string{assume}, JSON: to != nil, Verbose: to == nil,
	})
	if err == nil && to != nil {
		err = json.Unmarshal([]byte(out.String()), to)
	}
	if err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// `cprun plan` shows the choice by costs, and without costs follows the rules.
func TestPlanGoesByCosts(t *testing.T) {
	for _, c := range []struct {
		costs func(m machine.Machine, ranks, perHost int) planner.Costs
		want  string
	}{
		{nil, ""},
		{costsOf(nil), ""},
		{func(_ machine.Machine, ranks, perHost int) planner.Costs {
			if ranks != 8 || perHost != 8 {
				t.Errorf("%d ranks, %d a host", ranks, perHost)
			}
			return perPair{}
		}, "choice      by the costs of this machine"},
	} {
		text := planned(t, "llama-3.2-3b-32k.yaml", "arch=sm90,gpus=8", c.costs, nil, "parallel.algorithm=auto")
		if got := strings.Contains(text, "choice      "); got != (c.want != "") || !strings.Contains(text, c.want) {
			t.Errorf("want %q in\n%s", c.want, text)
		}
	}
}

// A backend chosen by costs is not reported as requested; a requested one is.
func TestPlanSaysWhoTookTheBackend(t *testing.T) {
	for set, want := range map[string][2]string{
		"attention.backend=auto": {"the fastest by the costs of this machine, where the rules have flash",
			"fused for flash"},
		"attention.backend=fused": {"asked for", " for "},
	} {
		var p struct {
			Choice    struct{ Backend, Ruled string }
			Attention struct{ Backend, Reason string }
		}
		planned(t, "llama-3.2-3b-128k.yaml", "gpu=h200,cudnn=9.19.0", costsOf(slowFlash{}), &p, set, "data.seq_len=16K")
		if got := [2]string{p.Attention.Reason, p.Choice.Backend + " for " + p.Choice.Ruled}; got != want ||
			p.Attention.Backend != "fused" {
			t.Errorf("%s: %+v, want %q", set, p, want)
		}
	}
}

// Workers read the config with the choice, which must not contain a margin that the chosen backend does not use.
func TestMarginGoesWithTheBackend(t *testing.T) {
	for gpu, want := range map[string]string{"gpu=h200,cudnn=9.19.0": "flash 16", "arch=sm90,cudnn=9.19.0": "flash 16",
		"arch=sm100,cudnn=9.19.0": "fused 0"} {
		var p struct {
			Config struct {
				Attention struct {
					Backend string
					Margin  int `json:"sm_margin"`
				}
			}
		}
		planned(t, "llama-3.2-3b-128k.yaml", gpu, nil, &p, "data.seq_len=16K", "attention.sm_margin=16")
		if a := p.Config.Attention; fmt.Sprint(a.Backend, " ", a.Margin) != want {
			t.Errorf("%s: %+v, want %s", gpu, a, want)
		}
	}
}

func TestE4M3NeedsHopper(t *testing.T) {
	for gpu, refused := range map[string]bool{"gpu=h200": false, "gpu=a100": true, "arch=sm100,memory=180G": true, "arch=cpu,memory=900G": false} {
		_, err := Plan("../../../examples/bench/llama-3.2-3b-32k.yaml", PlanOptions{
			Options: Options{NProc: "1", Device: "auto", NodeRank: -1, LogLevel: "info", Stdout: io.Discard, Stderr: os.Stderr},
			Set:     []string{"precision.linears=fp8", "data.seq_len=4K"}, Assume: []string{gpu},
		})
		if input := (*InputError)(nil); errors.As(err, &input) != refused || !refused && err != nil {
			t.Errorf("%s: %v", gpu, err)
		} else if refused && !strings.Contains(err.Error(), "precision.linears") {
			t.Errorf("%s: %v", gpu, err)
		}
	}
}
