package train

import (
	"time"

	"github.com/cprun/cprun/internal/model/config"
)

// What parallel.deadline: auto takes, so that a rank that stands still costs a run little, and
// one that is slow for a while, as a shared file system may make it, does not end it.
const (
	deadlineSteps = 20              // of the longest
	deadlineLeast = 2 * time.Minute // what a shared file system may stand still for
	deadlineMost  = 5 * time.Minute // but never less than deadlineMin of the longest steps
	deadlineMin   = 5

	// timedSteps have to be timed before, and the first, which sets things up, is not counted.
	timedSteps = 3
)

// deadlineOf returns how long a rank may stand still where the longest step takes so long.
func deadlineOf(longest time.Duration) time.Duration {
	return max(min(deadlineSteps*longest, deadlineMost), deadlineMin*longest, deadlineLeast)
}

// beat returns how often a rank that is at the disk says so to those that wait for it.
func beat(cfg *config.Config) time.Duration {
	return min(2*time.Second, cfg.Parallel.Patience()/4)
}

// hurry sets the deadline by the longest step of any rank so far. All ranks call it at the same
// points, with the same time.
func (r *run) hurry(step int, longest time.Duration) {
	if r.cfg.Parallel.Deadline != 0 || step-r.began < timedSteps {
		return
	}
	// A little longer is no reason to set it anew.
	if d := deadlineOf(longest); r.deadline == 0 || d > r.deadline*11/10 {
		r.deadline = d
		r.mesh.setDeadline(d)
	}
}
