package command

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/standing"
	"github.com/cprun/cprun/internal/launch/status"
)

const (
	// statusEvery is the time between two writings of a node's status. Each node adds statusPerNode, so that many nodes
	// do not wear out their shared file system.
	statusEvery   = time.Second
	statusPerNode = 25 * time.Millisecond
	// statusEnd bounds the wait for the last writing: a file system that hangs must not keep a run from ending.
	statusEnd = 2 * time.Second
)

// A statusWriter writes the node's status into the run directory, for cprun top. Its goroutine keeps a slow file system
// from delaying the run. It ignores errors: they change nothing about the run.
type statusWriter struct {
	every      time.Duration
	wake       chan struct{} // there is something new to tell; room for one
	quit, done chan struct{}

	mu   sync.Mutex
	node status.Node // guarded by mu
	logs *os.Root    // guarded by mu; nil before the first start
}

// startStatus starts a statusWriter for a job on at most nodes nodes. It asks where at each start of the workers for
// the run's id and the directory of its logs, which stays the caller's.
func startStatus(job *launch.Job, nodes int, where func() (runID string, logs *os.Root)) *statusWriter {
	t := &statusWriter{every: max(statusEvery, time.Duration(nodes)*statusPerNode), wake: make(chan struct{}, 1),
		quit: make(chan struct{}), done: make(chan struct{})}
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	t.node = status.Node{
		Version: status.Version, Host: cmp.Or(job.Node, host), PID: os.Getpid(), Begun: time.Now(),
		Every: t.every.Seconds(), State: status.Running, Ranks: job.NProc,
	}
	job.Watch, job.OnStanding = t.every, t.standing
	before := job.OnStart
	job.OnStart = func(s *launch.Start) error {
		if before != nil {
			if err := before(s); err != nil {
				return err
			}
		}
		t.start(s, where)
		return nil
	}
	go t.run() // ended by end
	return t
}

// start notes the next start of the workers.
func (t *statusWriter) start(s *launch.Start, where func() (string, *os.Root)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := &t.node
	n.RunID, t.logs = where()
	n.Start, n.Rows = s.Number, nil
	n.Rank, n.FirstRank, n.WorldSize = s.Place.NodeRank, s.Place.FirstRank, s.Place.WorldSize
	t.changed()
}

// changed wakes the writer.
func (t *statusWriter) changed() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// standing records the state of the workers.
func (t *statusWriter) standing(all []standing.Standing) {
	rows := make([]status.Row, len(all))
	for i := range all {
		rows[i] = status.Row{Standing: all[i], Resident: resident(all[i].PID)}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.node.Rows = rows
	t.changed()
}

// run writes until the end.
func (t *statusWriter) run() {
	defer close(t.done)
	ticker := time.NewTicker(t.every)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C: // nothing is new, but that the launcher lives
			t.write()
		case <-t.wake:
			t.write()
			ticker.Reset(t.every + t.every/2)
		case <-t.quit:
			t.write()
			return
		}
	}
}

// write writes the file.
func (t *statusWriter) write() {
	t.mu.Lock()
	n, logs := t.node, t.logs
	t.mu.Unlock()
	if logs == nil {
		return
	}
	n.Written = time.Now()
	_ = status.Write(logs, &n)
}

// end writes the end of the run here. A nil statusWriter does nothing.
func (t *statusWriter) end(res launch.Result) {
	if t == nil {
		return
	}
	t.mu.Lock()
	t.node.State, t.node.ExitCode, t.node.Rows = status.Ended, res.ExitCode, nil
	switch {
	case res.First != nil:
		t.node.Why = res.First.Error()
	case res.Err != nil:
		t.node.Why = res.Err.Error()
	}
	t.mu.Unlock()
	close(t.quit)
	select {
	case <-t.done:
	case <-time.After(statusEnd):
	}
}

// resident returns the host memory of a process, in bytes; 0: not known.
func resident(pid int) int64 {
	if pid == 0 {
		return 0
	}
	text, err := files.Read(fmt.Sprintf("/proc/%d/statm", pid), 1<<10)
	fields := bytes.Fields(text)
	if err != nil || len(fields) < 2 {
		return 0
	}
	pages, err := strconv.ParseInt(string(fields[1]), 10, 64)
	if err != nil {
		return 0
	}
	return pages * int64(os.Getpagesize())
}
