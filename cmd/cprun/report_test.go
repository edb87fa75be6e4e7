package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A complete and an interrupted run make a page. Other directories end with status 2, without a page.
func TestReport(t *testing.T) {
	_, run := trained(t)
	said, _ := must(t, "report", run)
	page, err := os.ReadFile(filepath.Join(run, "report.html"))
	if err != nil || !strings.Contains(said, "report.html") {
		t.Fatalf("%v; it said %s", err, said)
	}
	for _, w := range []string{"Content-Security-Policy", filepath.Base(run), "Loss", "Tile map"} {
		if !strings.Contains(string(page), w) {
			t.Errorf("the page does not have %q", w)
		}
	}

	both := filepath.Join(t.TempDir(), "both.html")
	must(t, "report", run, "../../internal/lab/report/testdata/runs/allgather", "--out", both)
	if page, err = os.ReadFile(both); err != nil || !strings.Contains(string(page),
		"<title>"+filepath.Base(run)+", allgather</title>") {
		t.Errorf("the page of two runs: %v", err)
	}

	none := filepath.Join(t.TempDir(), "none.html")
	for _, args := range [][]string{{"report"}, {"report", t.TempDir(), "--out", none},
		{"report", filepath.Join(t.TempDir(), "gone"), "--out", none}, {"report", run, "../../go.mod", "--out", none}} {
		if code, _, stderr := cprun(t, args...); code != 2 || stderr == "" {
			t.Errorf("%q: status %d, %s", args, code, stderr)
		}
	}
	if _, err := os.Stat(none); err == nil {
		t.Error("a page of nothing was written")
	}
}
