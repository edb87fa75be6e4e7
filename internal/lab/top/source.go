package top

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/lab/status"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/metrics"
)

const (
	// silence is the tolerated time without a status, in addition to three intervals. Network file systems show files
	// late.
	silence = 10 * time.Second
	// recent is the number of logged steps used to predict the remaining time.
	recent = 32
)

// Source reads a run directory. It is not safe for concurrent use.
type Source struct {
	root *os.Root
	view View // of the last reading
	log  follower
	host string

	took   []float64 // recent step times in seconds
	before metrics.Step
	text   []byte        // the last config
	heard  map[int]heard // by node
}

// A heard records the time of a node's last status by its clock, and the time of its arrival by ours.
type heard struct {
	written time.Time
	seen    time.Time
	moved   bool // changed since the first reading
}

// Open opens a run directory.
func Open(dir string) (*Source, error) {
	root, err := files.OpenDir(dir)
	if err != nil {
		return nil, err
	}
	s := &Source{root: root, heard: map[int]heard{}}
	if name, err := filepath.Abs(dir); err == nil {
		s.view.Name = terminal.Name(filepath.Base(name))
	}
	s.host, _ = os.Hostname() // on an error, no launcher counts as local
	s.log = follower{root: root, add: s.add, forget: s.forget}
	return s, nil
}

// Close closes the directory.
func (s *Source) Close() error { return s.root.Close() }

func (s *Source) add(m metrics.Step) {
	v := &s.view
	if m.ValLoss != nil && m.ValLoss.Known() {
		v.Val, v.ValStep, v.Validated = float64(*m.ValLoss), m.Step, true
	}
	if m.Step == 0 {
		return // the validation before the first step
	}
	if steps := m.Step - s.before.Step; s.before.Step > 0 && steps > 0 {
		took := time.Time(m.Time).Sub(time.Time(s.before.Time)).Seconds() / float64(steps)
		if took > 0 {
			s.took = append(s.took, took)
			s.took = s.took[max(0, len(s.took)-recent):]
		}
	}
	s.before = m
	v.Last, v.Logged = m, true
	v.loss.add(float64(m.Loss))
	v.rate.add(float64(m.TokensPerSecond))
}

// forget drops the data of a replaced metrics file.
func (s *Source) forget() {
	v := &s.view
	v.Last, v.Logged, v.Validated, v.loss, v.rate = metrics.Step{}, false, false, series{}, series{}
	s.took, s.before = nil, metrics.Step{}
}

// Look reads the present state.
func (s *Source) Look(now time.Time) *View {
	v := &s.view
	v.Now, v.Faults, v.Nodes, v.Rows, v.Events, v.Why = now, nil, nil, nil, nil, ""
	s.fault(s.log.poll())
	configured := s.config()
	v.Saved = s.saved()
	logs, err := files.OpenDirIn(s.root, "logs")
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		s.fault(err)
	default:
		v.Nodes, err = status.Read(logs)
		s.fault(err)
		v.Events = events(logs)
		logs.Close()
	}
	s.judge(configured)
	s.estimate()
	out := *v
	out.loss.points, out.rate.points = slices.Clone(v.loss.points), slices.Clone(v.rate.points)
	return &out
}

func (s *Source) fault(err error) {
	if err != nil {
		s.view.Faults = append(s.view.Faults, terminal.Clip(terminal.Line(err.Error()), maxText))
	}
}

// config reads the config, and reports whether there is one.
func (s *Source) config() bool {
	text, err := files.ReadIn(s.root, "config.yaml", config.MaxFile)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			s.fault(err)
		}
		return false
	}
	if bytes.Equal(text, s.text) {
		return true
	}
	s.text = text
	c, err := config.Parse("config.yaml", text, config.Options{NoFiles: true})
	if err != nil {
		return true // written by another version
	}
	s.view.Steps = int64(c.Train.Steps)
	s.view.About = terminal.Clip(terminal.Line(fmt.Sprintf("%s, %d layers of %d, sequences of %d tokens, %d a step",
		c.Model.Architecture, c.Model.NumHiddenLayers, c.Model.HiddenSize, c.Data.SeqLen, c.Train.GlobalBatchSize)),
		maxText)
	return true
}

const maxLatest = 4 << 10

// saved returns the step of the newest checkpoint; 0 without one.
func (s *Source) saved() (step int64) {
	text, err := files.ReadIn(s.root, "checkpoints/latest", maxLatest)
	if err == nil {
		_, err = fmt.Sscanf(string(text), "step-%d", &step)
	}
	if err != nil {
		return 0
	}
	return max(0, step)
}

func (s *Source) judge(configured bool) {
	v := &s.view
	v.At, v.Starts, v.Begun, v.Heard = v.Last.Step, 0, time.Time{}, 0
	if len(v.Nodes) == 0 {
		v.State = NotStarted
		if v.Logged || configured {
			v.State, v.Why = Unknown, "no status in logs: the launcher has another version, or the directory is private to "+
				"another user"
		}
		return
	}
	lead := &v.Nodes[0]
	v.Begun = lead.Begun
	fresh := 0
	for i := range v.Nodes {
		n := &v.Nodes[i]
		v.Starts = max(v.Starts, n.Start)
		if age := s.age(n); n.State == status.Running && !s.overdue(n, age) {
			fresh++
			v.Rows = append(v.Rows, n.Rows...)
		} else if i == 0 {
			v.Heard = age
		}
	}
	slices.SortStableFunc(v.Rows, func(a, b status.Row) int { return cmp.Compare(a.Rank, b.Rank) })
	for _, r := range v.Rows {
		v.At = max(v.At, r.Step)
	}
	switch ended := slices.IndexFunc(v.Nodes, func(n status.Node) bool { return n.State == status.Ended }); {
	case fresh > 0 && slices.ContainsFunc(v.Rows, func(r status.Row) bool { return r.State != "starts" }):
		v.State = Running
	case fresh > 0 && len(v.Rows) == 0 && (v.Starts > 0 || v.Logged):
		v.State = Between
	case fresh > 0:
		v.State = Starting
	case ended >= 0:
		v.State, v.Why = Failed, v.Nodes[ended].Why
		if s, known := endings[v.Nodes[ended].ExitCode]; known {
			v.State = s
		}
	case s.gone(lead):
		v.State = Dead
	default:
		v.State = Silent
	}
}

var endings = map[int]State{launch.ExitDone: Done, launch.ExitStopped: Stopped, launch.ExitInterrupted: Interrupted}

// age returns the time since a node's last status, by its clock at first, later by this host's.
func (s *Source) age(n *status.Node) time.Duration {
	h, known := s.heard[n.Rank]
	if !h.written.Equal(n.Written) {
		h = heard{n.Written, s.view.Now, known}
		s.heard[n.Rank] = h
	}
	if h.moved {
		return s.view.Now.Sub(h.seen)
	}
	return max(0, s.view.Now.Sub(n.Written))
}

// overdue reports whether a node's status is too old, or its launcher is gone.
func (s *Source) overdue(n *status.Node, age time.Duration) bool {
	every := time.Duration(n.Every * float64(time.Second))
	return age > silence+3*every || age > 2*every && s.gone(n)
}

// gone reports whether a local launcher has exited.
func (s *Source) gone(n *status.Node) bool {
	return n.Host == s.host && n.PID > 1 && errors.Is(unix.Kill(n.PID, 0), unix.ESRCH)
}

// estimate predicts the remaining time from the median of the last steps, which ignores pauses such as restarts.
func (s *Source) estimate() {
	v := &s.view
	v.Left, v.Timed = 0, false
	if len(s.took) == 0 || v.Steps <= 0 || !v.State.lives() {
		return
	}
	took := slices.Sorted(slices.Values(s.took))
	left := float64(max(0, v.Steps-v.At)) * took[len(took)/2]
	if const100Years := 100 * 365 * 24 * 3600.0; left < const100Years {
		v.Left, v.Timed = time.Duration(left*float64(time.Second)), true
	}
}

const (
	// maxBehind bounds the first read from the end of a metrics.jsonl, in bytes: about 130,000 steps.
	maxBehind = 64 << 20
	// maxLine bounds a line of metrics, in bytes; runs write about 500.
	maxLine = 64 << 10
)

// follower reads the new lines of a metrics.jsonl. The run may be on another host, and the file may be truncated,
// removed, or replaced: a resumed run drops the steps after its checkpoint.
type follower struct {
	root   *os.Root
	add    func(metrics.Step)
	forget func() // called when the file is another one

	file   fs.FileInfo // the last file; nil: none
	offset int64       // bytes read
	begun  []byte      // incomplete last line
	skip   bool        // ignore this line: it is too long, or its beginning is missing
}

// poll reads the new lines. A missing file is not an error.
func (f *follower) poll() error {
	// reopen it each time, since a network file system checks for changes only then
	file, err := files.OpenIn(f.root, "metrics.jsonl")
	if errors.Is(err, fs.ErrNotExist) {
		f.reset(nil)
		return nil
	}
	if err != nil {
		return err
	}
	defer file.Close()
	now, err := file.Stat()
	if err != nil {
		return err
	}
	if f.file == nil || !os.SameFile(now, f.file) || now.Size() < f.offset {
		f.reset(now)
		f.offset = max(0, now.Size()-maxBehind)
		f.skip = f.offset > 0
	}
	n, err := io.Copy(lines{f}, io.NewSectionReader(file, f.offset, maxBehind))
	f.offset += n
	return err
}

func (f *follower) reset(now fs.FileInfo) {
	if f.file != nil {
		f.forget()
	}
	f.file, f.offset, f.begun, f.skip = now, 0, nil, false
}

// lines splits written data into lines.
type lines struct{ *follower }

func (l lines) Write(p []byte) (int, error) {
	for rest := p; ; {
		line, after, whole := bytes.Cut(rest, []byte("\n"))
		if !l.skip {
			l.begun = append(l.begun, line...)
			l.skip = len(l.begun) > maxLine
		}
		if !whole {
			return len(p), nil
		}
		if s, ok := metrics.ParseStep(l.begun); ok && !l.skip {
			l.add(s)
		}
		l.begun, l.skip, rest = l.begun[:0], false, after
	}
}
