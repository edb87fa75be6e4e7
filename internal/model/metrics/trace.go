package metrics

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/tensor"
)

// Trace writes the spans of a rank's streams as a Chrome trace for Perfetto and chrome://tracing: a process per rank, a
// thread per stream (lane), a slice per piece of work, and around it a slice for each part of its label: step, pass,
// layer, hop.
//
// The file has one event per line and is written continuously, so that the trace of a killed rank is readable up to its
// last complete line. Times are microseconds since the creation of the trace; MergeTraces brings several ranks onto one
// clock.
type Trace struct {
	rank int
	base time.Time

	mu    sync.Mutex
	f     *os.File              // guarded by mu
	w     *bufio.Writer         // guarded by mu
	lanes map[string]*traceLane // guarded by mu; by name
	err   error                 // guarded by mu; the first one
}

type traceLane struct {
	tid  int
	open []openSlice // parts of the label of the last span, outermost first
	last time.Time   // its end
}

type openSlice struct {
	name  string
	began time.Time
}

// A traceEvent is an event of the Trace Event Format, with the fields in the order of the file.
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

// micros counts nanoseconds, written as microseconds with three decimals.
type micros int64

func (m micros) MarshalJSON() ([]byte, error) {
	return strconv.AppendFloat(nil, float64(m)/1000, 'f', 3, 64), nil
}

func (m *micros) UnmarshalJSON(data []byte) error {
	x, err := strconv.ParseFloat(string(data), 64)
	*m = micros(math.Round(x * 1000))
	return err
}

// traceHeader begins a trace file, up to the list of events. The clock is a string, since JSON readers keep only 53
// bits of a number.
const traceHeader = `{"displayTimeUnit":"ms","otherData":{"clock_start_unix_ns":"%d"},"traceEvents":[` + "\n"

const traceFooter = "\n]}\n"

// CreateTrace creates the trace of one rank in a directory. It replaces an earlier one.
func CreateTrace(dir *os.Root, name string, rank int) (*Trace, error) {
	d, err := files.Create(dir, name)
	if err == nil {
		err = d.Rename()
	}
	if err != nil {
		return nil, fmt.Errorf("trace of rank %d: %w", rank, err)
	}
	t := &Trace{rank: rank, base: time.Now(), f: d.File, w: bufio.NewWriterSize(d, 1<<16),
		lanes: map[string]*traceLane{}}
	fmt.Fprintf(t.w, traceHeader, t.base.UnixNano())
	t.event(traceEvent{Phase: "M", Name: "process_name", PID: rank, Args: map[string]any{"name": fmt.Sprintf("rank %d",
		rank)}}, "")
	t.event(traceEvent{Phase: "M", Name: "process_sort_index", PID: rank, Args: map[string]any{"sort_index": rank}},
		",\n")
	return t, nil
}

// Span adds one piece of work. It fits HostStream.Trace and is safe for concurrent use. Lanes are numbered in order of
// appearance. Spans after Close are dropped.
func (t *Trace) Span(s tensor.Span) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.f == nil {
		return
	}
	l := t.lanes[s.Lane]
	if l == nil {
		l = &traceLane{tid: len(t.lanes) + 1}
		t.lanes[s.Lane] = l
		t.event(traceEvent{Phase: "M", Name: "thread_name", PID: t.rank, TID: l.tid,
			Args: map[string]any{"name": s.Lane}},
			",\n")
		t.event(traceEvent{Phase: "M", Name: "thread_sort_index", PID: t.rank, TID: l.tid,
			Args: map[string]any{"sort_index": l.tid}}, ",\n")
	}
	parts := strings.FieldsFunc(s.Label, func(r rune) bool { return r == '/' })
	same := 0
	for same < min(len(parts), len(l.open)) && l.open[same].name == parts[same] {
		same++
	}
	t.shut(s.Lane, l, same)
	for _, p := range parts[same:] {
		l.open = append(l.open, openSlice{p, s.Start})
	}
	args := map[string]any{}
	if s.Label != "" {
		args["label"] = s.Label
	}
	if s.Detail != "" {
		args["detail"] = s.Detail
	}
	t.slice(s.Lane, l, s.Name, s.Start, s.Took, args)
	l.last = s.Start.Add(s.Took)
}

// shut writes the open slices of a lane, except the first keep: they ended with the last span.
func (t *Trace) shut(lane string, l *traceLane, keep int) {
	for len(l.open) > keep {
		s := l.open[len(l.open)-1]
		l.open = l.open[:len(l.open)-1]
		t.slice(lane, l, s.name, s.began, l.last.Sub(s.began), nil)
	}
}

func (t *Trace) slice(lane string, l *traceLane, name string, at time.Time, took time.Duration, args map[string]any) {
	dur := micros(took)
	t.event(traceEvent{Phase: "X", Name: name, Category: lane, PID: t.rank, TID: l.tid, TS: micros(at.Sub(t.base)),
		Dur: &dur, Args: args}, ",\n")
}

// event writes e after sep and keeps the first error for Close.
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

// Close ends the list of events and returns the first write error.
func (t *Trace) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.f == nil {
		return nil
	}
	for name, l := range t.lanes {
		t.shut(name, l, 0)
	}
	_, err := t.w.WriteString(traceFooter)
	err = errors.Join(t.err, err, t.w.Flush(), t.f.Close())
	t.f = nil
	if err != nil {
		return fmt.Errorf("trace of rank %d: %w", t.rank, err)
	}
	return nil
}

// MergeTraces writes the events of several ranks' traces in a directory to one file there, on the clock of the
// earliest. It drops torn lines and skips missing traces, since traces matter most after a failure. It renames the
// finished file, which may replace one of the names. It fails if none of them is a trace.
func MergeTraces(dir *os.Root, out string, names ...string) error {
	starts := make([]int64, len(names))
	first := int64(0)
	for i, name := range names {
		starts[i] = traceStart(dir, name)
		if starts[i] != 0 && (first == 0 || starts[i] < first) {
			first = starts[i]
		}
	}
	if first == 0 {
		return fmt.Errorf("merged trace %s: none of %d files is a trace of cprun: %w", out, len(names), os.ErrNotExist)
	}
	err := files.Write(dir, out, func(dst io.Writer) error {
		w := bufio.NewWriterSize(dst, 1<<16)
		fmt.Fprintf(w, traceHeader, first)
		sep := ""
		for i, name := range names {
			if starts[i] == 0 {
				continue
			}
			if err := appendTrace(w, dir, name, micros(starts[i]-first), &sep); err != nil {
				return err
			}
		}
		w.WriteString(traceFooter) // Flush returns errors of a bufio.Writer
		return w.Flush()
	})
	if err != nil {
		return fmt.Errorf("merged trace: %w", err)
	}
	return nil
}

// traceStart returns the clock in a trace's first line, or 0.
func traceStart(dir *os.Root, name string) int64 {
	f, err := files.OpenIn(dir, name)
	if err != nil {
		return 0
	}
	defer f.Close()
	line, err := bufio.NewReader(io.LimitReader(f, maxLine)).ReadString('\n')
	var start int64
	if _, scan := fmt.Sscanf(line, traceHeader, &start); err != nil || scan != nil {
		return 0
	}
	return start
}

// appendTrace writes the events of a trace, shifted to another clock.
func appendTrace(w *bufio.Writer, dir *os.Root, name string, shift micros, sep *string) error {
	f, err := files.OpenIn(dir, name)
	if err != nil {
		return err
	}
	defer f.Close()
	return eachLine(f, func(line []byte) error {
		e, ok := parseEvent(line)
		if !ok {
			return nil
		}
		if e.Phase != "M" {
			e.TS += shift
		}
		moved, err := json.Marshal(e)
		if err != nil {
			return err
		}
		w.WriteString(*sep)
		_, err = w.Write(moved)
		*sep = ",\n"
		return err
	})
}

// parseEvent parses one line of a trace. Each line except the last ends in a comma.
func parseEvent(line []byte) (e traceEvent, ok bool) {
	for len(line) > 0 && (line[len(line)-1] == '\n' || line[len(line)-1] == ',') {
		line = line[:len(line)-1]
	}
	return e, json.Unmarshal(line, &e) == nil && e.Phase != ""
}
