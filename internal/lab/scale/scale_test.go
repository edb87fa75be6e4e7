package scale

import (
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/lab/experiment"
)

// The output and exit status of a run become a status and a reason.
func TestOutcomeOfARun(t *testing.T) {
	const before = "step 1/5  loss 2.0\n[rank 0] something\n"
	for _, c := range []struct {
		code       int
		late       bool
		tail       string
		want       experiment.Status
		why, never string
	}{
		{0, false, before, experiment.OK, "", ""},
		{0, true, before, experiment.OK, "", ""}, // done within the grace time
		{75, true, before + "cprun: all workers have ended\n", experiment.Timeout, "limit of 5m",
			"workers"},
		{-1, true, before, experiment.Timeout, "5m", ""},
		{75, false, before, experiment.Failed, "stopped", ""},
		{-1, false, "", experiment.Failed, "killed", ""},
		{1, false, "", experiment.Failed, "exit status 1", ""},
		{2, false, "cprun: train.yaml:3: train.steps: missing\ntrain.yaml:4: x: unknown\n", experiment.Refused,
			"train.yaml:3: train.steps: missing; train.yaml:4: x: unknown", ""},
		{2, false, "cprun: this run does NOT fit the 80 GiB of one device\n", experiment.OutOfMemory, "does NOT fit",
			""},
		{
			1, false, before + "cprun: also rank 1 failed on host b (pid 3): x\ncprun: ended because of it: rank 2\n" +
				"cprun: rank 0 failed on host a (pid 2): forward: CUDA_ERROR_OUT_OF_MEMORY\n         of the arena\n  " +
				"at:    step 3\n  log:   /x\n  hint:  y\ncprun: a last word\n",
			experiment.OutOfMemory, "rank 0 failed on host a (pid 2): forward: CUDA_ERROR_OUT_OF_MEMORY; of the " +
				"arena; at:    step 3", "hint",
		},
		{
			1, false, "cprun: rank 1 failed on host a (pid 2): killed by SIGKILL (not by cprun: likely the kernel's " +
				"out-of-memory killer, or a user)\n  hint:  dmesg\n",
			experiment.Failed, "rank 1 failed", "dmesg",
		},
		{1, false, "cprun: could not start\n", experiment.Failed, "could not start", "cprun:"},
	} {
		s := &scale{e: &experiment.Experiment{Limit: 5 * time.Minute}}
		got, why := s.outcome(c.code, c.late, c.tail)
		if got != c.want || !strings.Contains(why, c.why) || c.never != "" && strings.Contains(why, c.never) ||
			strings.Contains(why, "\n") {
			t.Errorf("status %d, late %v, %q: %s, %q; want %s, %q", c.code, c.late, c.tail, got, why, c.want, c.why)
		}
	}
}
