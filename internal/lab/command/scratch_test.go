package command

import (
	"os"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/launch"
)

// The directory of a failed command stays, since a report names its logs.
func TestScratch(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	for _, status := range []int{launch.ExitDone, launch.ExitFailed, launch.ExitStopped, launch.ExitInterrupted} {
		s := must.Have(newScratch("cprun-test-"))
		must.Do(t, s.end(status))
		if _, err := os.Stat(s.path); (err == nil) != (status == launch.ExitFailed) {
			t.Errorf("after status %d: %v", status, err)
		}
	}
}
