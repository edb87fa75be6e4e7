package worker

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/machine"
)

// A lack of memory is reported with its cause, the fix that fits what is free, and the memory by kind.
func TestLackOfMemoryIsExplained(t *testing.T) {
	cfg, err := config.Load("../../../examples/bench/llama-3.2-3b-32k.yaml", config.Options{Ranks: 2, Device: "cuda",
		NoFiles: true, Set: []string{"memory.shard=none", "memory.recompute=none", "memory.offload=off"}})
	if err != nil {
		t.Fatal(err)
	}
	cfg.Parallel.Backend = "flash"
	on := machine.Machine{Arch: 90, GPUs: 2, Flash: machine.BuiltFlash, Memory: 139 << 30, RAM: 500 << 30}
	mem, err := plan.Fit(cfg, 2, on, nil)
	if err != nil || !mem.Fits {
		t.Fatalf("%v, %s", err, mem.Verdict())
	}
	driver := errors.New("CUDA_ERROR_OUT_OF_MEMORY")
	for _, c := range []struct {
		err  error
		says []string
		not  string
	}{
		{&device.MemoryError{Of: "cuda:1", Need: mem.Planned(), Free: 70 << 30, Total: 139 << 30, Err: driver},
			[]string{"cuda:1", "70 GiB of 139 GiB are free", "nvidia-smi", "memory.recompute selective", "activations"},
			"ulimit"},
		{fmt.Errorf("slab: %w", &device.MemoryError{Of: "pinned host memory", Need: 1 << 30, Host: true, Err: driver}),
			[]string{"slab: pinned host memory: the run takes 1 GiB: CUDA", "ulimit -l", "optimizer"}, "nvidia-smi"},
	} {
		text := explain(c.err, cfg, 2, on, &mem).Error()
		for _, w := range append(c.says, driver.Error()+"\n", "\nmemory of the run by kind:\n", "total") {
			if strings.Count(text, w) != 1 && w != "activations" && w != "optimizer" || !strings.Contains(text, w) {
				t.Errorf("%d times %q in %s", strings.Count(text, w), w, text)
			}
		}
		if strings.Contains(text, c.not) {
			t.Errorf("%q in %s", c.not, text)
		}
	}
	if err := explain(driver, cfg, 2, on, &mem); err != driver {
		t.Errorf("another error became %v", err)
	}
}
