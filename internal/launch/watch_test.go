package launch

import (
	"bytes"
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/launch/waits"
)

// TestWatchTellsWhatTheWorkersAreAt checks that the workers' states are published repeatedly, a stopped worker's
// included, and none before and after them.
func TestWatchTellsWhatTheWorkersAreAt(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out bytes.Buffer
	calls, whole, last := 0, 0, []waits.WaitState{{}}
	job := Job{
		NProc: 3, Argv: []string{"worker", "watched"}, Logs: logsIn(t, filepath.Join(t.TempDir(), "logs")),
		Stderr: &out, Node: "node-a", Watch: 5 * time.Millisecond,
		OnStatus: func(s *Start, rows []waits.WaitState) {
			if calls++; calls == 1 && len(rows) > 0 || s.Ranks.WorldSize != 3 || s.Logs == nil {
				t.Errorf("call %d: start %+v, %d rows", calls, s, len(rows))
			}
			last = rows
			if len(rows) != 3 || rows[2].State != stateStopped || len(rows[0].Waits) == 0 || len(rows[1].Waits) == 0 {
				return // the workers have not started, or were too busy to answer
			}
			for i, s := range rows {
				if s.Rank != i || s.Host != "node-a" || s.PID == 0 {
					t.Errorf("row %d is of rank %d on %q, pid %d", i, s.Rank, s.Host, s.PID)
				}
			}
			if whole++; whole == 3 {
				cancel()
			}
		},
	}
	if r := Run(ctx, job); whole < 3 || last != nil || r.Err == nil {
		t.Errorf("seen whole %d times, at the end %v; %+v\n%s", whole, last, r, out.String())
	}
}
