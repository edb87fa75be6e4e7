package command

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cprun/cprun/internal/lab/status"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/waits"
)

// The status of a run is written during the run, at each start, and at the end. No goroutine stays.
func TestTellerTellsOfARun(t *testing.T) {
	defer goleak.VerifyNone(t)
	logs, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer logs.Close()
	refused := errors.New("refused")
	before := error(nil)
	job := launch.Job{NProc: 1, OnStart: func(*launch.Start) error { return before }}
	live := startStatus(&job, 100, func() (string, *os.Root) { return "id", logs })
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
	if err := job.OnStart(&launch.Start{Number: 1, Ranks: launch.RankRange{NodeRank: 0, FirstRank: 0,
		WorldSize: 3}}); err != nil {
		t.Fatal(err)
	}
	until("a start", func(n *status.Node) bool {
		return n.RunID == "id" && n.Start == 1 && n.WorldSize == 3 && n.State == status.Running && n.PID == os.Getpid()
	})
	job.OnStatus([]waits.WaitState{{Rank: 0, PID: os.Getpid(), Step: 7}})
	until("a step", func(n *status.Node) bool {
		return len(n.Rows) == 1 && n.Rows[0].Step == 7 && n.Rows[0].Resident > 0
	})
	before = refused
	if err := job.OnStart(&launch.Start{Number: 2}); err != refused {
		t.Errorf("the caller's own OnStart: %v", err)
	}
	live.end(launch.Result{ExitCode: 1, Err: refused})
	until("the end", func(n *status.Node) bool {
		return n.State == status.Ended && n.ExitCode == 1 && n.Why == "refused" && n.Rows == nil
	})
	if left, _ := filepath.Glob(filepath.Join(logs.Name(), "*")); len(left) != 1 {
		t.Errorf("it leaves %v", left)
	}
	(*statusWriter)(nil).end(launch.Result{})
}
