package metrics

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/cprun/cprun/internal/tensor"
)

// Trace writes the spans of one rank's streams as a Chrome trace, which Perfetto and
// chrome://tracing open: a process per rank, a thread per stream (lane), and a slice per
// piece of work with its label as an argument.
//
// The file has one event per line and is written as it comes, so that what a killed rank
// leaves can be read up to its last whole line. Times are microseconds since the trace was
// made; MergeTraces brings those of several ranks onto one clock.
type Trace struct {
	rank int
	base time.Time

	mu    sync.Mutex
	f     *os.File       // guarded by mu
	w     *bufio.Writer  // guarded by mu
	lanes map[string]int // guarded by mu; tid by name
	err   error          // guarded by mu; the first one
}

// traceEvent is an event of the Trace Event Format. Field order is that of the file.
type traceEvent struct {
	Phase    string         `json:"ph"` // X: a slice; M: metadata
	Name     string         `json:"name"`
	Category string         `json:"cat,omitempty"`
	PID      int            `json:"pid"`
	TID      int            `json:"tid"`
	TS       micros         `json:"ts"`
	Dur      *micros        `json:"dur,omitempty"`
	Args     map[string]any `json:"args,omitempty"`
}

// micros is nanoseconds, written as microseconds with three decimals and without rounding.
type micros int64

func (m micros) MarshalJSON() ([]byte, error) {
	sign := ""
	if m < 0 {
		sign, m = "-", -m
	}
	return fmt.Appendf(nil, "%s%d.%03d", sign, m/1000, m%1000), nil
}

func (m *micros) UnmarshalJSON(data []byte) error {
	x, err := strconv.ParseFloat(string(data), 64)
	*m = micros(math.Round(x * 1000))
	return err
}

// traceHeader is the first line of a trace file, up to the list of events. The clock is a
// string since JSON readers keep only 53 bits of a number.
const traceHeader = `{"displayTimeUnit":"ms","otherData":{"clock_start_unix_ns":"%d"},"traceEvents":[` + "\n"

const traceFooter = "\n]}\n"

// CreateTrace creates the trace of one rank, logs/trace-rank-0003.json in a run directory.
func CreateTrace(path string, rank int) (*Trace, error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, fmt.Errorf("trace of rank %d: %w", rank, err)
	}
	t := &Trace{rank: rank, base: time.Now(), f: f, w: bufio.NewWriterSize(f, 1<<16), lanes: map[string]int{}}
	fmt.Fprintf(t.w, traceHeader, t.base.UnixNano())
	t.event(traceEvent{Phase: "M", Name: "process_name", PID: rank, Args: map[string]any{"name": fmt.Sprintf("rank %d", rank)}}, "")
	t.event(traceEvent{Phase: "M", Name: "process_sort_index", PID: rank, Args: map[string]any{"sort_index": rank}}, ",\n")
	return t, nil
}

// Span adds one piece of work. It is what HostStream.Trace takes, and may be called from
// several streams at once. Lanes are numbered in the order in which they are first seen.
// Spans after Close are dropped.
func (t *Trace) Span(s tensor.Span) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.f == nil {
		return
	}
	tid, seen := t.lanes[s.Lane]
	if !seen {
		tid = len(t.lanes) + 1
		t.lanes[s.Lane] = tid
		t.event(traceEvent{Phase: "M", Name: "thread_name", PID: t.rank, TID: tid, Args: map[string]any{"name": s.Lane}}, ",\n")
		t.event(traceEvent{Phase: "M", Name: "thread_sort_index", PID: t.rank, TID: tid, Args: map[string]any{"sort_index": tid}}, ",\n")
	}
	dur := micros(s.Took)
	e := traceEvent{Phase: "X", Name: s.Name, Category: s.Lane, PID: t.rank, TID: tid, TS: micros(s.Start.Sub(t.base)), Dur: &dur}
	if s.Label != "" {
		e.Args = map[string]any{"label": s.Label}
	}
	t.event(e, ",\n")
}

// event writes e behind sep and keeps the first error for Close.
func (t *Trace) event(e traceEvent, sep string) {
	line, err := json.Marshal(e)
	if err == nil {
		_, err = t.w.WriteString(sep)
	}
	if err == nil {
		_, err = t.w.Write(line)
	}
	if t.err == nil {
		t.err = err
	}
}

// Close ends the list of events and returns the first error of any write.
func (t *Trace) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.f == nil {
		return nil
	}
	_, err := t.w.WriteString(traceFooter)
	err = errors.Join(t.err, err, t.w.Flush(), t.f.Close())
	t.f = nil
	if err != nil {
		return fmt.Errorf("trace of rank %d: %w", t.rank, err)
	}
	return nil
}

// MergeTraces writes the events of several ranks' traces to one file, on the clock of the
// earliest. Lines that are not whole, which a killed rank leaves, are left out, and a rank
// without a trace is skipped: a trace is read most when something went wrong. The file is
// written beside and renamed, and may be one of the paths. It is an error when none of the
// paths is a trace.
func MergeTraces(out string, paths ...string) error {
	starts := make([]int64, len(paths))
	first := int64(0)
	for i, path := range paths {
		starts[i] = traceStart(path)
		if starts[i] != 0 && (first == 0 || starts[i] < first) {
			first = starts[i]
		}
	}
	if first == 0 {
		return fmt.Errorf("merged trace %s: none of %d files is a trace of cprun: %w", out, len(paths), os.ErrNotExist)
	}
	f, err := os.CreateTemp(filepath.Dir(out), filepath.Base(out)+".tmp-*")
	if err != nil {
		return fmt.Errorf("merged trace: %w", err)
	}
	w := bufio.NewWriterSize(f, 1<<16)
	fmt.Fprintf(w, traceHeader, first)
	sep := ""
	for i, path := range paths {
		if err == nil && starts[i] != 0 {
			err = appendTrace(w, path, micros(starts[i]-first), &sep)
		}
	}
	w.WriteString(traceFooter) // a bufio.Writer keeps its error for Flush
	err = errors.Join(err, w.Flush(), f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), out)
	}
	if err != nil {
		return fmt.Errorf("merged trace: %w", errors.Join(err, os.Remove(f.Name())))
	}
	return nil
}

// traceStart is the clock in a trace's first line, or 0 where there is none.
func traceStart(path string) int64 {
	f, err := os.Open(path)
	if err != nil {
		return 0
	}
	defer f.Close()
	line, err := bufio.NewReader(f).ReadString('\n')
	var start int64
	if _, scan := fmt.Sscanf(line, traceHeader, &start); err != nil || scan != nil {
		return 0
	}
	return start
}

func appendTrace(w *bufio.Writer, path string, shift micros, sep *string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	r := bufio.NewReader(f)
	for {
		line, err := r.ReadBytes('\n')
		if err != nil && err != io.EOF {
			return err
		}
		if e, ok := parseEvent(line); ok {
			if e.Phase != "M" {
				e.TS += shift
			}
			moved, err := json.Marshal(e)
			if err != nil {
				return err
			}
			w.WriteString(*sep)
			w.Write(moved) // a bufio.Writer keeps its error for Flush
			*sep = ",\n"
		}
		if err == io.EOF {
			return nil
		}
	}
}

// parseEvent reads one line of a trace, which ends in a comma unless it is the last.
func parseEvent(line []byte) (e traceEvent, ok bool) {
	for len(line) > 0 && (line[len(line)-1] == '\n' || line[len(line)-1] == ',') {
		line = line[:len(line)-1]
	}
	return e, json.Unmarshal(line, &e) == nil && e.Phase != ""
}
