package experiment

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/run/bench"
)

// Names in the directory of an experiment.
const (
	cellsName  = "cells"       // run directories, by cell and number of the run
	logName    = "cells.jsonl" // finished runs
	logPattern = "cells*.jsonl"
	lockName   = ".lock"
	csvName    = "results.csv"
	jsonName   = "results.json"
	reportName = "report.html"
)

const maxLog = 1 << 30

// Identity holds the properties shared by all starts of an experiment, by name.
type Identity map[string]string

// Header is the first line of cells.jsonl.
type Header struct {
	// properties of the first start, for results.json
	Version  int       `json:"version"`
	Identity Identity  `json:"experiment"`
	Created  time.Time `json:"created"`
	Command  string    `json:"command"`
	Commit   string    `json:"commit"`
	Machine  string    `json:"machine"`
	Device   string    `json:"device"`
}

// Store is the locked directory of an experiment.
type Store struct {
	Header
	Runs []Run    // finished runs
	Root *os.Root // the directory

	locks []*os.File
	log   *os.File
}

// Open creates or resumes the directory of an experiment. It fails if the directory belongs to another experiment. anew
// removes earlier results. share numbers, from 1, a task that runs a share of the cells at the same time as others; 0:
// all cells.
func Open(dir string, h Header, anew bool, share int) (*Store, error) {
	root, err := files.Make(dir)
	if err != nil {
		return nil, err
	}
	s := &Store{Header: h, Root: root}
	if err := s.open(anew, share); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

func (s *Store) open(anew bool, share int) error {
	if err := s.lock(share); err != nil {
		return err
	}
	if anew {
		if err := s.clear(); err != nil {
			return err
		}
	}
	name := logName
	if share > 0 {
		name = fmt.Sprintf("cells-%04d.jsonl", share)
	}
	var err error
	if s.log, err = files.Lockable(s.Root, name); err != nil {
		return err
	}
	if err := s.repair(); err != nil {
		return err
	}
	return s.readAll()
}

// lock keeps other starts out, of all cells or of this share.
func (s *Store) lock(share int) error {
	how := syscall.LOCK_EX
	if share > 0 {
		how = syscall.LOCK_SH
		if err := s.lockFile(fmt.Sprintf("%s-%04d", lockName, share), syscall.LOCK_EX); err != nil {
			return err
		}
	}
	return s.lockFile(lockName, how)
}

func (s *Store) lockFile(name string, how int) error {
	f, err := files.Lockable(s.Root, name)
	if err != nil {
		return err
	}
	s.locks = append(s.locks, f)
	// file systems without locks are accepted
	if errors.Is(syscall.Flock(int(f.Fd()), how|syscall.LOCK_NB), syscall.EWOULDBLOCK) {
		return fmt.Errorf("%s: another cprun scale is using it; wait for its end, or name another --out",
			terminal.Name(s.Root.Name()))
	}
	return nil
}

func (s *Store) clear() error {
	names, err := fs.Glob(s.Root.FS(), logPattern)
	if err != nil || len(names) == 0 {
		return err // not an experiment: do not delete its files
	}
	for _, name := range append([]string{cellsName, csvName, jsonName, reportName}, names...) {
		if err := s.Root.RemoveAll(name); err != nil {
			return err
		}
	}
	return nil
}

// repair removes an incomplete last line, and writes the header to a new file.
func (s *Store) repair() error {
	text, err := files.All(s.log, maxLog)
	if err != nil {
		return err
	}
	if n := bytes.LastIndexByte(text, '\n') + 1; n < len(text) {
		if err := s.log.Truncate(int64(n)); err != nil {
			return err
		}
		text = text[:n]
	}
	if _, err := s.log.Seek(0, io.SeekEnd); err != nil {
		return err
	}
	if len(text) > 0 {
		return nil
	}
	if err := s.write(s.Header); err != nil {
		return err
	}
	return files.Sync(s.Root)
}

// readAll reads the runs of all files of the directory, and the header of the first.
func (s *Store) readAll() error {
	names, err := fs.Glob(s.Root.FS(), logPattern)
	if err != nil {
		return err
	}
	own, on := s.Header, s.Header
	for _, name := range names {
		text, err := files.ReadIn(s.Root, name, maxLog)
		if err != nil {
			return err
		}
		h, runs, err := parseLog(text)
		if err != nil {
			return fmt.Errorf("%s: %w", terminal.Name(filepath.Join(s.Root.Name(), name)), err)
		}
		if h == nil {
			continue // a share that has just begun
		}
		if keys := own.Identity.differ(h.Identity); len(keys) > 0 {
			return fmt.Errorf("%s has results of an experiment that differs in %s; name another --out, or delete "+
				"them with --resume never", terminal.Name(s.Root.Name()), strings.Join(keys, ", "))
		}
		if name == logName {
			s.Header = *h
		} else {
			on = *h
		}
		s.Runs = append(s.Runs, runs...)
	}
	if len(names) > 1 { // the cells ran on the nodes of array tasks, not on the submitting host
		s.Machine, s.Device = on.Machine, on.Device
	}
	return nil
}

// parseLog reads the lines of a cells.jsonl, and ignores an incomplete last line.
func parseLog(text []byte) (h *Header, runs []Run, err error) {
	text = text[:bytes.LastIndexByte(text, '\n')+1]
	number := 0
	for line := range bytes.Lines(text) {
		if number++; number == 1 {
			h = &Header{}
			if err := json.Unmarshal(line, h); err != nil || h.Identity == nil {
				return nil, nil, errors.New("line 1: not the header of an experiment")
			}
			if h.Version != Version {
				return nil, nil, fmt.Errorf("line 1: version %d; this program reads version %d", h.Version, Version)
			}
			delete(h.Identity, "skip") // written by older versions; implied by the configs of the cells
			continue
		}
		var r Run
		if err := json.Unmarshal(line, &r); err != nil {
			return nil, nil, fmt.Errorf("line %d: %w", number, err)
		}
		runs = append(runs, r)
	}
	return h, runs, nil
}

func (id Identity) differ(o Identity) (keys []string) {
	all := maps.Clone(id)
	maps.Copy(all, o)
	for _, key := range slices.Sorted(maps.Keys(all)) {
		if id[key] != o[key] {
			keys = append(keys, key)
		}
	}
	return keys
}

// Append records a finished run on disk.
func (s *Store) Append(r Run) error {
	if err := s.write(r); err != nil {
		return err
	}
	s.Runs = append(s.Runs, r)
	return nil
}

func (s *Store) write(v any) error {
	text, err := json.Marshal(v)
	if err == nil {
		_, err = s.log.Write(append(text, '\n'))
	}
	if err == nil {
		err = s.log.Sync()
	}
	return err
}

// Dir returns the path of the directory.
func (s *Store) Dir() string { return s.Root.Name() }

// Prepare creates the directory of a cell with its config, and removes remains of a killed run with that number. It
// returns the paths of the run and of the config, relative to the store's.
func (s *Store) Prepare(cell string, run int, config []byte) (dir, file string, err error) {
	at := filepath.Join(cellsName, cell)
	dir, file = filepath.Join(at, fmt.Sprint(run)), filepath.Join(at, "cell.yaml")
	if err := s.Root.RemoveAll(dir); err != nil {
		return "", "", err
	}
	cells, err := files.Sub(s.Root, at)
	if err != nil {
		return "", "", err
	}
	defer cells.Close()
	return dir, file, files.WriteData(s.Root, file, config)
}

// WriteResults writes results.csv, results.json, and report.html unless report is nil.
func WriteResults(root *os.Root, r *Results, report func(io.Writer, *Results) error) error {
	err := errors.Join(files.Write(root, csvName, r.WriteCSV),
		files.Write(root, jsonName, func(w io.Writer) error { return files.WriteJSON(w, " ", r) }))
	if report != nil {
		err = errors.Join(err, files.Write(root, reportName, func(w io.Writer) error { return report(w, r) }))
	}
	return err
}

// Close unlocks and closes the directory.
func (s *Store) Close() {
	if s.log != nil {
		s.log.Close()
	}
	for _, f := range s.locks {
		f.Close()
	}
	s.Root.Close()
}

// Peek returns the runs of a directory without creating or locking anything. found is false if the directory is missing
// or belongs to another experiment.
func Peek(dir string, id Identity) (runs []Run, found bool) {
	names, _ := filepath.Glob(filepath.Join(dir, logPattern)) // a malformed pattern matches nothing; Open reports it
	for _, name := range names {
		text, err := files.Read(name, maxLog)
		if err != nil {
			continue
		}
		if h, list, err := parseLog(text); err == nil && h != nil && len(id.differ(h.Identity)) == 0 {
			runs, found = append(runs, list...), true
		}
	}
	return runs, found
}

// Unfinished returns the newest directory with the same experiment that is not done; "" if there is none.
func Unfinished(dirs []string, id Identity, done func(runs []Run) bool) string {
	slices.Sort(dirs)
	for _, dir := range slices.Backward(dirs) {
		if runs, found := Peek(dir, id); found && !done(runs) {
			return dir
		}
	}
	return ""
}

// Run is a finished run of a cell, a line of cells.jsonl.
type Run struct {
	Cell    string    `json:"cell"`
	Run     int       `json:"run"` // from 1
	Status  Status    `json:"status"`
	Error   string    `json:"error,omitempty"`
	Ended   time.Time `json:"ended"`
	Seconds float64   `json:"seconds"` // whole run, including its start
	Commit  string    `json:"commit"`  // version of cprun
	// relative to the file's directory; "": the cell cannot run
	Dir     string   `json:"dir"`
	Counted *Counted `json:"counted,omitempty"`
	Plan    Plan     `json:"plan"` // on the machine of the run
}

// A Plan is the prediction for a cell; 0 and nil mean unknown.
type Plan struct {
	Choices
	StepSeconds float64 `json:"step_seconds,omitempty"` // predicted
	Memory      *Memory `json:"memory,omitempty"`       // of the rank with most
}

// Total returns the sum of all kinds.
func (m *Memory) Total() int64 {
	return m.Weights + m.Gradients + m.Optimizer + m.Activations + m.Workspace
}

// Predict sets the prediction of the cell.
func (c *Cell) Predict(p Plan) {
	c.Choices, c.PredictedStepSeconds, c.Memory = p.Choices, p.StepSeconds, p.Memory
	if p.Memory != nil {
		c.PlannedMemoryBytes = p.Memory.Total()
	}
}

// Counted holds the measurements of a run after its warm-up.
type Counted = bench.Counted

// Settle sets the statuses and figures of the cells from their runs. If a run has two lines, the later one counts. A
// cell is done after repeat good runs, or one failed run.
func Settle(cells []Cell, runs []Run, repeat int) {
	of := map[string][]Run{}
	for _, r := range runs {
		list := of[r.Cell]
		if i := slices.IndexFunc(list, func(o Run) bool { return o.Run == r.Run }); i >= 0 {
			list[i] = r
		} else {
			of[r.Cell] = append(list, r)
		}
	}
	for i := range cells {
		if list := of[cells[i].ID]; len(list) > 0 {
			slices.SortFunc(list, func(a, b Run) int { return a.Run - b.Run })
			cells[i].settle(list, repeat)
		}
	}
}

func (c *Cell) settle(runs []Run, repeat int) {
	all := Counted{}
	c.Runs, c.RunDirs, c.Status, c.Error = 0, nil, Pending, ""
	if len(runs) >= repeat {
		c.Status = OK
	}
	for _, r := range runs {
		c.Predict(r.Plan)
		if r.Dir != "" {
			c.Runs, c.RunDirs = c.Runs+1, append(c.RunDirs, r.Dir)
		}
		if r.Status != OK && c.Error == "" {
			c.Status, c.Error = r.Status, r.Error
		}
		if r.Counted != nil {
			all.Add(r.Counted)
		}
	}
	if len(all.StepSeconds) == 0 {
		return
	}
	c.StepSeconds, c.StepSecondsMin, c.StepSecondsMax = bench.Median(all.StepSeconds), slices.Min(all.StepSeconds),
		slices.Max(all.StepSeconds)
	c.TokensPerSecond, c.TokensPerSecondPerDevice = bench.Median(all.TokensPerSecond),
		bench.Median(all.TokensPerSecondPerDevice)
	c.TFLOPsPerDevice, c.MFU, c.MemoryBytes = bench.Median(all.TFLOPsPerDevice), bench.Median(all.MFU), all.MemoryBytes
	if len(all.CommWaitSeconds) > 0 {
		c.CommWaitSeconds = new(bench.Median(all.CommWaitSeconds))
	}
}
