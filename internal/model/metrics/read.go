package metrics

import (
	"bytes"
	"encoding/json"
	"io"
	"time"
)

// ParseStep reads a line of a metrics.jsonl, without its end. ok is false for a line without a step, such as one that a
// crash has torn.
func ParseStep(line []byte) (s Step, ok bool) {
	if len(line) < 2 || line[0] != '{' || line[len(line)-1] != '}' {
		return s, false
	}
	s = Untrained(time.Time{}, 0, 0)
	s.ValLoss, s.Step = nil, -1
	return s, json.Unmarshal(line, &s) == nil && s.Step >= 0
}

// wholeStep reads a line that has its end.
func wholeStep(line []byte) (s Step, ok bool) {
	line, ended := bytes.CutSuffix(line, []byte("\n"))
	s, ok = ParseStep(line)
	return s, ok && ended
}

// EachStep calls f with every whole line of a metrics.jsonl, in the order of the file. Lines that are none
// of metrics, such as the last of a run that was killed, are counted and left out.
func EachStep(src io.Reader, f func(Step)) (torn int, err error) {
	err = eachLine(src, func(line []byte) error {
		if s, ok := wholeStep(line); ok {
			f(s)
		} else {
			torn++
		}
		return nil
	})
	return torn, err
}

// A Slice is one piece of work in a trace.
type Slice struct {
	Rank   int
	Lane   string // the stream: compute, attention comm, ...
	Name   string // of the work; "wait" is for another stream
	Label  string // where in the step: "step 2/forward/layer 0/hop 1 owner 3"
	Detail string // bytes and ranks of a transfer; the subject of a wait
	Start  float64
	Took   float64 // seconds, as is Start, from the begin of the trace
}

// EachSlice calls f with every piece of work in a trace of this package, the slices around them
// for parts of labels left out. A trace that a killed rank leaves is read up to its last whole line.
func EachSlice(src io.Reader, f func(Slice)) error {
	return eachLine(src, func(line []byte) error {
		e, ok := parseEvent(line)
		if !ok || e.Phase != "X" || e.Dur == nil || e.Args == nil {
			return nil
		}
		text := func(key string) string { s, _ := e.Args[key].(string); return s }
		f(Slice{
			Rank: e.PID, Lane: e.Category, Name: e.Name, Label: text("label"), Detail: text("detail"),
			Start: float64(e.TS) / 1e9, Took: float64(*e.Dur) / 1e9,
		})
		return nil
	})
}
