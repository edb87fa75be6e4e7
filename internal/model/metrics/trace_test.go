package metrics

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/tensor"
)

// A traceFile holds a trace in the form of its viewer.
type traceFile struct {
	TraceEvents []struct {
		Ph, Name string
		PID, TID int
		TS, Dur  float64
		Args     map[string]any
	}
}

func readTrace(t *testing.T, path string) traceFile {
	t.Helper()
	data := must.Have(os.ReadFile(path))
	var f traceFile
	if err := json.Unmarshal(data, &f); err != nil {
		t.Fatalf("%s is not JSON: %v\n%s", path, err, data)
	}
	return f
}

// writeTrace writes a trace with n spans in each of two lanes, from a goroutine per lane.
func writeTrace(t *testing.T, path string, rank, n int, base time.Time) {
	t.Helper()
	tr := must.Have(CreateTrace(rootAt(t, filepath.Dir(path)), filepath.Base(path), rank))
	var lanes sync.WaitGroup
	for _, lane := range []string{"compute", "transfer"} {
		lanes.Go(func() {
			for k := range n {
				tr.Span(tensor.Span{
					Lane: lane, Name: "work", Label: fmt.Sprintf("hop %d owner \"%d\"", k, rank),
					Start: base.Add(time.Duration(k) * time.Millisecond), Took: 1500 * time.Nanosecond,
				})
			}
		})
	}
	lanes.Wait()
	must.Do(t, tr.Close())
	tr.Span(tensor.Span{Lane: "late"}) // a stream may still run; the span is dropped
}

func TestTrace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace-rank-0003.json")
	writeTrace(t, path, 3, 20, time.Now())
	lanes, slices := map[int]string{}, map[string]int{}
	for _, e := range readTrace(t, path).TraceEvents {
		if e.PID != 3 {
			t.Errorf("event %+v has pid %d, want 3", e, e.PID)
		}
		switch {
		case e.Name == "thread_name":
			lanes[e.TID] = e.Args["name"].(string)
		case e.Ph == "X" && e.Name == "work":
			slices[lanes[e.TID]]++
			if e.Dur != 1.5 || e.Args["label"] == nil {
				t.Errorf("slice %+v, want 1.5 microseconds and a label", e)
			}
		}
	}
	if slices["compute"] != 20 || slices["transfer"] != 20 {
		t.Errorf("slices by lane: %v, want 20 in compute and transfer", slices)
	}
}

// Each part of a label has a slice around its work, from the first piece to the last in a row.
func TestTraceNests(t *testing.T) {
	path, base := filepath.Join(t.TempDir(), "trace.json"), time.Now()
	tr := must.Have(CreateTrace(rootAt(t, filepath.Dir(path)), filepath.Base(path), 0))
	for i, s := range []struct{ label, name, detail string }{
		{"", "early", ""},
		{"step 1/forward/layer 0", "norm", ""},
		{"step 1/forward/layer 0/hop 0 owner 1", "attention", ""},
		{"step 1/forward/layer 0/hop 1 owner 0", "wait", "exchange: 8 bytes from rank 0"},
		{"step 1/forward/layer 1", "norm", ""},
		{"step 1/optimizer", "update", ""},
		{"step 2/forward/layer 1", "norm", ""},
	} {
		tr.Span(tensor.Span{Lane: "compute", Name: s.name, Label: s.label, Detail: s.detail,
			Start: base.Add(time.Duration(10*i) * time.Millisecond), Took: 4 * time.Millisecond})
	}
	must.Do(t, tr.Close())
	got, from := map[string]bool{}, 0.0
	for _, e := range readTrace(t, path).TraceEvents {
		if e.Name == "early" {
			from = e.TS
		}
		if e.Ph == "X" {
			got[fmt.Sprintf("%s %.0f+%.0f %v", e.Name, (e.TS-from)/1000, e.Dur/1000, e.Args["detail"])] = true
		}
	}
	for _, want := range []string{
		"early 0+4 <nil>", "step 1 10+44 <nil>", "forward 10+34 <nil>", "layer 0 10+24 <nil>", "norm 10+4 <nil>",
		"hop 0 owner 1 20+4 <nil>", "attention 20+4 <nil>",
		"hop 1 owner 0 30+4 <nil>", "wait 30+4 exchange: 8 bytes from rank 0", "layer 1 40+4 <nil>", "norm 40+4 <nil>",
		"optimizer 50+4 <nil>", "update 50+4 <nil>",
		"step 2 60+4 <nil>", "forward 60+4 <nil>", "layer 1 60+4 <nil>", "norm 60+4 <nil>",
	} {
		if !got[want] {
			t.Errorf("no slice %q", want)
		}
		delete(got, want)
	}
	if len(got) > 0 {
		t.Errorf("slices too many: %v", got)
	}
}

// merge calls MergeTraces for paths in one directory.
func merge(t *testing.T, out string, paths ...string) error {
	t.Helper()
	names := make([]string, len(paths))
	for i, p := range paths {
		names[i] = filepath.Base(p)
	}
	return MergeTraces(rootAt(t, filepath.Dir(out)), filepath.Base(out), names...)
}

func TestMergeTraces(t *testing.T) {
	dir := t.TempDir()
	path := func(rank int) string { return filepath.Join(dir, fmt.Sprintf("trace-rank-%04d.json", rank)) }
	// Without its monotonic reading: the wall clock and the monotonic one are not read in the same instant.
	base := time.Now().Add(time.Second).Round(0)
	for rank := range 3 {
		writeTrace(t, path(rank), rank, 5, base)
	}
	data := must.Have(os.ReadFile(path(1)))
	out := filepath.Join(dir, "trace.json")
	paths := []string{path(0), path(1), path(2), filepath.Join(dir, "trace-rank-0003.json")}
	whole := -1
	// For every cut of rank 1's file, the merged trace has all slices of the other ranks.
	for cut := len(data); cut >= 0; cut -= 7 {
		must.Do(t, os.WriteFile(path(1), data[:cut], 0o644))
		if err := merge(t, out, paths...); err != nil {
			t.Fatalf("cut at %d: %v", cut, err)
		}
		count, first := map[int]int{}, map[int]float64{}
		for _, e := range readTrace(t, out).TraceEvents {
			if e.Ph == "X" && e.Name == "work" {
				if count[e.PID] == 0 {
					first[e.PID] = e.TS
				}
				count[e.PID]++
			}
		}
		if count[0] != 10 || count[2] != 10 || count[1] > 10 {
			t.Fatalf("cut at %d: slices by rank %v, want 10 of ranks 0 and 2", cut, count)
		}
		if whole < 0 {
			whole = count[1]
			// The spans of all ranks began at the same time.
			if d := first[2] - first[0]; math.Abs(d) > 0.0005 {
				t.Errorf("ranks 0 and 2 lie %v microseconds apart, want 0", d)
			}
		}
	}
	if whole != 10 {
		t.Errorf("the whole file of rank 1 gave %d slices, want 10", whole)
	}
	if left, _ := filepath.Glob(out + ".tmp*"); len(left) > 0 {
		t.Errorf("left behind %v", left)
	}
	if err := merge(t, out, filepath.Join(dir, "none")); err == nil {
		t.Error("a merge of nothing gave no error")
	}
}

func FuzzMergeTraces(f *testing.F) {
	f.Add([]byte("{\"displayTimeUnit\":\"ms\",\"otherData\":{\"clock_start_unix_ns\":\"17\"},\"traceEvents\":[\n{\"ph\":\"X\",\"name\":\"a\",\"pid\":1,\"tid\":2,\"ts\":1.5,\"dur\":2},\n{\"ph\":\"X\",\"na"))
	f.Add([]byte("{}"))
	f.Add([]byte(""))
	f.Fuzz(func(t *testing.T, data []byte) {
		in := filepath.Join(t.TempDir(), "in")
		must.Do(t, os.WriteFile(in, data, 0o644))
		out := in + ".out"
		if err := merge(t, out, in); err == nil {
			merged, err := os.ReadFile(out)
			if err != nil || !json.Valid(merged) {
				t.Errorf("merge of %q is not JSON: %q, %v", data, merged, err)
			}
		}
	})
}
