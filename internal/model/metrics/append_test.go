package metrics

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
)

// A full disk delays lines and loses none: they reach the file in order once there is space.
func TestAppendToAFullDisk(t *testing.T) {
	full := must.Have(os.OpenFile("/dev/full", os.O_WRONLY, 0))
	defer full.Close()
	path := filepath.Join(t.TempDir(), "log")
	room := must.Have(os.Create(path))
	defer room.Close()
	told := 0
	a := appender{File: full, full: func() { told++ }}
	for _, line := range []string{"one\n", "two\n"} {
		must.Do(t, a.append([]byte(line)))
	}
	if err := a.flush(); err == nil || told != 1 {
		t.Errorf("flush to a full disk: %v; told %d times, want once", err, told)
	}
	a.File = room
	must.Do(t, a.append([]byte("three\n")))
	must.Do(t, a.flush())
	if text, err := os.ReadFile(path); err != nil || string(text) != "one\ntwo\nthree\n" {
		t.Errorf("the file holds %q, %v", text, err)
	}
	a.File = full
	if err := a.append(make([]byte, maxUnwritten+1)); err == nil {
		t.Error("more than the limit is kept without an error")
	}
	if err := (&appender{File: nil}).append([]byte("x")); err == nil {
		t.Error("an error that is no full disk is kept back")
	}
}

// Sync and Close write the lines that a full disk delayed.
func TestMetricsAfterAFullDisk(t *testing.T) {
	dir := t.TempDir()
	told := ""
	j := must.Have(OpenJSONL(rootAt(t, dir), "metrics.jsonl", 0, func(text string) { told = text }))
	if j.f.full(); told == "" {
		t.Error("nobody hears of the full disk")
	}
	size := func(name string) int64 {
		st := must.Have(os.Stat(name))
		return st.Size()
	}
	path := filepath.Join(dir, "metrics.jsonl")
	j.f.unwritten = []byte("first\n")
	if err := j.Sync(); err != nil || size(path) != 6 {
		t.Errorf("after Sync %d bytes, %v", size(path), err)
	}
	j.f.unwritten = []byte("second\n")
	if err := j.Close(); err != nil || size(path) != 13 {
		t.Errorf("after Close %d bytes, %v", size(path), err)
	}
	tb := must.Have(CreateTensorBoard(rootAt(t, dir), 0, ""))
	events, err := filepath.Glob(filepath.Join(dir, "events.*"))
	if err != nil || len(events) != 1 {
		t.Fatal(events, err)
	}
	before := size(events[0])
	tb.f.unwritten = []byte("event")
	if err := tb.Close(); err != nil || size(events[0]) != before+5 {
		t.Errorf("after Close of TensorBoard %d bytes more, %v", size(events[0])-before, err)
	}
}
