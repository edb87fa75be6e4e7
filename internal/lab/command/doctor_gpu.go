package command

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/model/machine"
)

// gpus is the lines on GPUs, their links and the libraries that a run on them loads, and the
// machine that such a run would find.
func gpus() ([]finding, machine.Machine) {
	devices := deviceFiles()
	if !machine.Built {
		if devices == 0 {
			return []finding{{"GPUs", "none; runs go to the CPU", ""}}, machine.CPU()
		}
		return []finding{{"GPUs", fmt.Sprintf("%d, which this binary cannot use: it was built for the CPU", devices),
			""}}, machine.CPU()
	}
	m, list, err := machine.Find()
	switch {
	case errors.Is(err, machine.ErrNoDriver) && devices == 0:
		return []finding{{"GPUs", fmt.Sprintf("none; runs go to the CPU\nto use GPUs: %v", err), ""}}, machine.CPU()
	case errors.Is(err, machine.ErrNoDriver):
		return []finding{{"GPUs", fmt.Sprintf("%d, without a driver that can be loaded", devices),
			err.Error() + "; in a container, have its libraries mounted; or run with --device cpu"}}, machine.CPU()
	case err != nil:
		return []finding{{"GPUs", err.Error(),
				"look at nvidia-smi; choose GPUs of one kind with CUDA_VISIBLE_DEVICES, or run with --device cpu"}},
			machine.CPU()
	case len(list) == 0:
		return []finding{{"GPUs", "none is seen; runs go to the CPU", ""}}, machine.CPU()
	}
	out := cards(list)
	out = append(out, links(list))
	for _, l := range machine.Libraries() {
		f := finding{l.Name, l.Version, ""}
		if l.Problem != "" { // the text of the loader names the fix
			f = finding{l.Name, "cannot be used", l.Problem}
		}
		out = append(out, f)
	}
	return out, m
}

// cards lists GPUs, neighbours that are alike on one line.
func cards(list []machine.GPU) (out []finding) {
	first := 0
	for _, g := range list {
		f := finding{fmt.Sprintf("GPU %d", g.Ordinal), fmt.Sprintf("%s, sm%d, %d SMs, %s", g.Name, g.Arch, g.SMs,
			readable.Bytes(g.Memory)), ""}
		if n := len(out); n > 0 && out[n-1].value == f.value {
			out[n-1].what = fmt.Sprintf("GPUs %d to %d", first, g.Ordinal)
			continue
		}
		first, out = g.Ordinal, append(out, f)
	}
	return out
}

// deviceFiles counts the GPUs that the system has made files for, which takes no driver's library.
func deviceFiles() int {
	files, _ := filepath.Glob("/dev/nvidia[0-9]*") // the pattern is right
	return len(files)
}

// links says which GPUs reach each other's memory, which copies between them go through.
func links(list []machine.GPU) finding {
	if len(list) == 1 {
		return finding{"links", "one GPU", ""}
	}
	var without []string
	for _, g := range list {
		if len(g.Peers) < len(list)-1 {
			without = append(without, fmt.Sprintf("GPU %d reaches %d of %d others", g.Ordinal, len(g.Peers),
				len(list)-1))
		}
	}
	if len(without) == 0 {
		return finding{"links", "every GPU reaches the memory of every other", ""}
	}
	return finding{"links", strings.Join(without, "; ") + ": transfers between the rest go through the host's " +
		"memory, by NCCL", ""}
}

// indented keeps the lines of a value below each other.
func indented(s string) string { return strings.ReplaceAll(s, "\n", "\n                        ") }
