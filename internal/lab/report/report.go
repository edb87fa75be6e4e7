// Package report draws runs and experiments: one HTML page that asks nothing of any network, at most
// MaxPage bytes long. The figures are data (payload.go) that Apache ECharts draws in the browser. What a
// page is made of, errors and names too, may come from anybody: it reaches the page as escaped text or JSON only.
package report

import (
	"bytes"
	"fmt"
	"io"

	"github.com/cprun/cprun/internal/lab/experiment"
	"github.com/cprun/cprun/internal/model/metrics"
)

// MaxPage is the longest page, in bytes.
const MaxPage = 5_000_000

// Input is the content of a page.
type Input struct {
	Title   string
	Command string // that made the results, as a shell reads it; "" if each run has its own
	Commit  string // the program's version
	Machine string // for a reader

	Experiment *experiment.Results // nil: none
	// Plans are the plan.json of the experiment's cells, by cell; without one a cell is not in the roofline.
	Plans map[string]*Plan
	Runs  []Run
}

// A Run is the content of a run directory.
type Run struct {
	Name    string // that tells it from the others of the page
	Command string // the last that started or continued it; "" if the log is gone
	Commit  string
	Machine string
	Ended   string // the end in the log; "" for a run that goes on, or was killed

	Steps   []metrics.Step  // ascending, thinned if the file has more than a page can show
	Lines   int             // steps in the file
	Plan    *Plan           // nil: no plan.json
	Slices  []metrics.Slice // of steps, and of the first ranks of the trace
	Traced  int             // ranks of the trace
	Missing []string        // files that are absent or cannot be read, and the figures that need them
}

// points bounds the points of a run in a figure of its own.
const points = 2000

// Write writes the page. Where all points of all runs make it longer than MaxPage, it has fewer of
// them, and says so.
func Write(w io.Writer, in Input) error {
	for n := points; ; n /= 2 {
		var page bytes.Buffer
		if err := render(&page, in, build(in, n)); err != nil {
			return fmt.Errorf("report: %w", err)
		}
		if page.Len() <= MaxPage {
			_, err := w.Write(page.Bytes())
			return err
		}
		if n < 20 {
			return fmt.Errorf("report: the page would have %d bytes, of which %d are allowed; name fewer runs", page.Len(),
				MaxPage)
		}
	}
}

// build makes the contents of a page, with up to n points of a run in a figure.
func build(in Input, n int) *page {
	p := &page{Title: in.Title}
	if e := in.Experiment; e != nil {
		p.experiment(e, in.Plans)
	}
	if len(in.Runs) > 0 {
		p.runs(in.Runs, n)
	}
	return p
}
