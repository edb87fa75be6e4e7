package command

import (
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/lab/report"
)

// ReportOptions are the flags of `cprun report`.
type ReportOptions struct {
	Out     string // the page to write; "": report.html in the run, or in the working directory for several
	Title   string // of the page; "": the names of what it shows
	Version string
	Stdout  io.Writer
}

// Report writes one HTML page of runs, or of an experiment.
func Report(paths []string, o ReportOptions) (int, error) {
	in := report.Input{Title: o.Title, Commit: o.Version}
	for _, path := range paths {
		if err := in.Open(path); err != nil {
			return 0, &InputError{err}
		}
	}
	if in.Title == "" {
		in.Title = title(&in)
	}
	out := o.Out
	if out == "" {
		out = "report.html"
		if st, err := files.Stat(paths[0]); len(paths) == 1 && err == nil && st.IsDir() {
			out = filepath.Join(paths[0], out)
		}
	}
	size := int64(0)
	err := files.WriteTo(out, func(d *files.Draft) error {
		if err := report.Write(d, in); err != nil {
			return err
		}
		st, err := d.Stat()
		if err == nil {
			size = st.Size()
		}
		return err
	})
	if err != nil {
		return 0, err
	}
	for _, r := range in.Runs {
		for _, m := range r.Missing {
			fmt.Fprintf(o.Stdout, "note: %s: %s\n", terminal.Name(r.Name), terminal.Text(m))
		}
	}
	fmt.Fprintf(o.Stdout, "wrote %s, %.1f MB: open it in a browser; it needs no network\n", terminal.Name(out),
		float64(size)/1e6)
	return 0, nil
}

// title names what a page shows.
func title(in *report.Input) string {
	var names []string
	if in.Experiment != nil {
		names = append(names, in.Experiment.Name)
	}
	for _, r := range in.Runs {
		names = append(names, r.Name)
	}
	if len(names) > 4 {
		names = append(names[:4], fmt.Sprintf("and %d more", len(names)-4))
	}
	return strings.Join(names, ", ")
}
