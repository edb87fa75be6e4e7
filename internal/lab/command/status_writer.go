package command

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/lab/status"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/progress"
	"github.com/cprun/cprun/internal/launch/waits"
	"github.com/cprun/cprun/internal/run/job"
)

const (
	// statusEvery is the interval at which a node writes its status. It grows by statusPerNode for each node, which
	// limits the load on the shared file system.
	statusEvery   = time.Second
	statusPerNode = 25 * time.Millisecond
	// statusEnd bounds the wait for the last write: a hung file system must not keep a run from ending.
	statusEnd = 2 * time.Second
)

// A statusWriter writes the node's status into the run directory for cprun top. It has its own goroutine, so that a
// slow file system does not delay the run. It ignores errors, since the run does not need the status.
type statusWriter struct {
	every      time.Duration
	wake       chan struct{} // signals a change; capacity 1
	quit, done chan struct{}

	mu   sync.Mutex
	node status.Node // guarded by mu
	logs *os.Root    // guarded by mu; nil until the first start
}

// startStatus starts a statusWriter for a job of at most the given nodes.
func startStatus(job *launch.Job, nodes int) *statusWriter {
	t := &statusWriter{every: max(statusEvery, time.Duration(nodes)*statusPerNode), wake: make(chan struct{}, 1),
		quit: make(chan struct{}), done: make(chan struct{})}
	t.node = status.Node{
		Version: status.Version, Host: cmp.Or(job.Node, launch.Hostname()), PID: os.Getpid(), Begun: time.Now(),
		Every: t.every.Seconds(), State: status.Running, Ranks: job.NProc, RunID: job.RunID,
	}
	job.Watch, job.OnStatus = t.every, t.update
	go t.run() // ended by end
	return t
}

func (t *statusWriter) update(s *launch.Start, all []waits.WaitState) {
	rows := make([]status.Row, len(all))
	for i := range all {
		rows[i] = status.Row{WaitState: all[i], Resident: resident(all[i].PID)}
	}
	t.mu.Lock()
	n := &t.node
	n.RunID, t.logs = cmp.Or(s.RunID, n.RunID), s.Logs
	n.Start, n.Rows = s.Number, rows
	n.Rank, n.FirstRank, n.WorldSize = s.Ranks.NodeRank, s.Ranks.FirstRank, s.Ranks.WorldSize
	t.mu.Unlock()
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

func (t *statusWriter) run() {
	defer close(t.done)
	ticker := time.NewTicker(t.every)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C: // heartbeat
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

// end writes the run's last status and stops the goroutine. A nil statusWriter does nothing.
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

type tracker struct {
	out   *progress.Printer
	start time.Time
	root  *os.Root         // the run directory
	first *progress.Number // first and newest validation loss
	last  *progress.Number
	loss  progress.Number
	steps int64

	again    string           // the command that resumes the run
	writes   string           // the command that generates text, or ""
	measures bool             // the run writes no checkpoint
	advanced func(step int64) // or nil
}

func (t *tracker) event(rank int, e launch.Event) {
	if rank != 0 {
		return
	}
	switch e.Kind {
	case launch.EventProgress:
		if t.advanced != nil {
			t.advanced(e.Step)
		}
		var s progress.Step
		if len(e.Data) == 0 || json.Unmarshal(e.Data, &s) != nil {
			return // the worker logged no metrics for this step
		}
		if s.ValLoss != nil {
			t.last = s.ValLoss
			if t.first == nil {
				t.first = s.ValLoss
			}
		}
		if t.steps = s.Step; !math.IsNaN(float64(s.Loss)) { // a step without targets has no loss
			t.loss = s.Loss
		}
		t.out.Step(s)
	case job.EventNotice:
		var text string
		if json.Unmarshal(e.Data, &text) == nil {
			t.out.Note(text)
		}
	case job.EventValidation:
		var n progress.Number
		if json.Unmarshal(e.Data, &n) == nil {
			t.first, t.last = &n, &n
		}
	}
}

const maxLatest = 4 << 10

// summary prints the end of a run and its files. The launcher has already reported failures.
func (t *tracker) summary(res launch.Result) {
	switch {
	case res.ExitCode == launch.ExitDone:
		line := fmt.Sprintf("done in %s", readable.Duration(time.Since(t.start)))
		if t.steps > 0 {
			line += fmt.Sprintf(": loss %.4f", float64(t.loss))
		} else {
			line += ": no steps were left; to go on, raise train.steps or train.epochs"
		}
		if t.first != nil && t.last != nil {
			line += fmt.Sprintf(", validation loss %.4f -> %.4f", float64(*t.first), float64(*t.last))
		}
		t.out.Note(line)
	case res.Stopped && t.measures:
		t.out.Note("stopped; a measurement writes no checkpoint")
	case res.Stopped:
		t.out.Note("stopped after a checkpoint; to resume: " + t.again)
	default:
		return
	}
	if t.measures {
		return
	}
	dir, saved := t.root.Name(), false
	if now := movedTo(t.root); now != "" {
		t.out.Note(fmt.Sprintf("the run directory was moved during the run and is now %s; move it back to %s before you "+
			"repeat the command", terminal.Name(now), terminal.Name(dir)))
		dir, t.writes = now, strings.ReplaceAll(t.writes, dir, now)
	}
	for _, f := range []struct{ label, name string }{
		{"metrics", "metrics.jsonl"}, {"checkpoint", "checkpoints/latest"}, {"best", "checkpoints/best"}, {"logs", "logs"},
		{"trace", "trace.json"},
	} {
		name := f.name
		if f.label == "checkpoint" || f.label == "best" {
			data, err := files.ReadIn(t.root, name, maxLatest)
			if err != nil {
				continue
			}
			name = filepath.Join(checkpointsName, filepath.Base(strings.TrimSpace(string(data))))
			saved = true
		}
		if _, err := t.root.Stat(name); err == nil {
			t.out.Note(fmt.Sprintf("  %-11s %s", f.label, terminal.Name(filepath.Join(dir, name))))
		}
	}
	if saved && t.writes != "" && res.ExitCode == launch.ExitDone { // else the last line is the command to resume
		t.out.Note(fmt.Sprintf("  %-11s %s", "to try it", t.writes))
	}
}

// movedTo returns the present path of an open directory that was moved; "" if it was not, or the path is unknown.
func movedTo(root *os.Root) string {
	f, err := root.Open(".")
	if err != nil {
		return ""
	}
	defer f.Close()
	is, err := f.Stat()
	if at, errAt := os.Stat(root.Name()); err != nil || errAt == nil && os.SameFile(is, at) {
		return ""
	}
	now, _ := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	return now
}
