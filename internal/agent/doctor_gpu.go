package agent

import (
	"fmt"
	"path/filepath"
	"strings"

	"github.com/cprun/cprun/internal/backend"
	"github.com/cprun/cprun/internal/plan"
)

// gpus is the lines on GPUs, their links and the libraries that a run on them loads, and the
// machine that such a run would find.
func gpus() ([]finding, backend.Machine) {
	devices, _ := filepath.Glob("/dev/nvidia[0-9]*")
	if !backend.Built {
		if len(devices) == 0 {
			return []finding{{"GPUs", "none; runs go to the CPU", ""}}, backend.CPU()
		}
		return []finding{{"GPUs", fmt.Sprintf("%d, which this binary cannot use: it was built for the CPU", len(devices)), ""}}, backend.CPU()
	}
	m, list, err := backend.Find()
	switch {
	case err != nil:
		return []finding{{"GPUs", err.Error(), "look at nvidia-smi; choose GPUs of one kind with CUDA_VISIBLE_DEVICES, or run with --device cpu"}}, backend.CPU()
	case len(list) == 0:
		return []finding{{"GPUs", "none is seen; runs go to the CPU", ""}}, backend.CPU()
	}
	var out []finding
	for _, g := range list {
		out = append(out, finding{fmt.Sprintf("GPU %d", g.Ordinal), fmt.Sprintf("%s, sm%d, %d SMs, %s", g.Name, g.Arch, g.SMs, plan.Bytes(g.Memory)), ""})
	}
	out = append(out, links(list))
	for _, l := range backend.Libraries() {
		f := finding{l.Name, l.Version, ""}
		if l.Problem != "" { // the text of the loader names the fix
			f = finding{l.Name, "cannot be used", l.Problem}
		}
		out = append(out, f)
	}
	return out, m
}

// links says which GPUs reach each other's memory, which copies between them go through.
func links(list []backend.GPU) finding {
	if len(list) == 1 {
		return finding{"links", "one GPU", ""}
	}
	var without []string
	for _, g := range list {
		if len(g.Peers) < len(list)-1 {
			without = append(without, fmt.Sprintf("GPU %d reaches %d of %d others", g.Ordinal, len(g.Peers), len(list)-1))
		}
	}
	if len(without) == 0 {
		return finding{"links", "every GPU reaches the memory of every other", ""}
	}
	return finding{"links", strings.Join(without, "; ") + ": transfers between the rest go through the host's memory, by NCCL", ""}
}

// indented keeps the lines of a value below each other.
func indented(s string) string { return strings.ReplaceAll(s, "\n", "\n                        ") }
