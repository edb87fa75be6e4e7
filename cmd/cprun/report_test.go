package main

import (
	"os"
	"path/filepath"
	"testing"
)

// A complete and an interrupted run make a page. Other directories end with status 2, without a page.
func TestReport(t *testing.T) {
	t.Parallel()
	_, run := trained(t)
	said, _ := must(t, "report", run)
	contains(t, "report", said, "report.html")
	contains(t, "the page", content(t, run, "report.html"), "Content-Security-Policy", filepath.Base(run), "Loss",
		"Tile map")

	both := filepath.Join(t.TempDir(), "both.html")
	must(t, "report", run, "../../internal/lab/report/testdata/runs/allgather", "--out", both)
	contains(t, "the page of two runs", content(t, both), "<title>"+filepath.Base(run)+", allgather</title>")

	none := filepath.Join(t.TempDir(), "none.html")
	for _, args := range [][]string{{"report"}, {"report", t.TempDir(), "--out", none},
		{"report", filepath.Join(t.TempDir(), "gone"), "--out", none}, {"report", run, "../../go.mod", "--out", none}} {
		invalid(t, args, "cprun: ")
	}
	if _, err := os.Stat(none); err == nil {
		t.Error("a page of nothing was written")
	}
}
