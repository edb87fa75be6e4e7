package command

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/lab/status"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/waits"
)

// The status of a run is written during the run, at each start, and at the end. No goroutine stays.
func TestTellerTellsOfARun(t *testing.T) {
	defer goleak.VerifyNone(t)
	logs := must.Have(os.OpenRoot(t.TempDir()))
	defer logs.Close()
	job := launch.Job{RunID: "alone", NProc: 1}
	live := startStatus(&job, 100)
	if want := 100 * statusPerNode; job.Watch != want {
		t.Errorf("on 100 nodes every %v, want %v", job.Watch, want)
	}
	until := func(want string, ok func(n *status.Node) bool) {
		t.Helper()
		for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
			nodes, err := status.Read(logs)
			if err == nil && len(nodes) == 1 && ok(&nodes[0]) {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("%s: %+v, %v", want, nodes, err)
			}
		}
	}
	start := &launch.Start{Number: 1, Ranks: launch.RankRange{NodeRank: 1, FirstRank: 2, WorldSize: 3}, Logs: logs}
	job.OnStatus(start, nil)
	until("a start", func(n *status.Node) bool {
		return n.RunID == "alone" && n.Start == 1 && n.Rank == 1 && n.FirstRank == 2 && n.WorldSize == 3 &&
			n.State == status.Running && n.PID == os.Getpid()
	})
	start.RunID = "id"
	job.OnStatus(start, []waits.WaitState{{Rank: 0, PID: os.Getpid(), Step: 7}})
	until("a step", func(n *status.Node) bool {
		return n.RunID == "id" && len(n.Rows) == 1 && n.Rows[0].Step == 7 && n.Rows[0].Resident > 0
	})
	live.end(launch.Result{ExitCode: 1, Err: errors.New("refused")})
	until("the end", func(n *status.Node) bool {
		return n.State == status.Ended && n.ExitCode == 1 && n.Why == "refused" && n.Rows == nil
	})
	if left, _ := filepath.Glob(filepath.Join(logs.Name(), "*")); len(left) != 1 {
		t.Errorf("it leaves %v", left)
	}
	(*statusWriter)(nil).end(launch.Result{})
}
