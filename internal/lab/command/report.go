package command

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/lab/report"
	"github.com/cprun/cprun/internal/lab/top"
	"github.com/cprun/cprun/internal/launch"
)

// ReportOptions are the flags of `cprun report`.
type ReportOptions struct {
	Out     string // the page to write; "": report.html, in the run if there is only one
	Version string
	Stdout  io.Writer
}

// Report writes one HTML page of runs, or of an experiment.
func Report(paths []string, o ReportOptions) (int, error) {
	if err := checkReport("--out", o.Out); err != nil {
		return 0, err
	}
	in := report.Input{Commit: o.Version}
	for _, path := range paths {
		if err := in.Open(path); err != nil {
			return 0, &InputError{err}
		}
	}
	in.Title = title(&in)
	out := o.Out
	if out == "" {
		out = "report.html"
		if st, err := files.Stat(paths[0]); len(paths) == 1 && err == nil && st.IsDir() {
			out = filepath.Join(paths[0], out)
		}
	}
	if err := files.WriteTo(out, func(w io.Writer) error { return report.Write(w, in) }); err != nil {
		return 0, err
	}
	st, err := files.Stat(out)
	if err != nil {
		return 0, err
	}
	for _, r := range in.Runs {
		for _, m := range r.Missing {
			fmt.Fprintf(o.Stdout, "note: %s: %s\n", terminal.Name(r.Name), terminal.Text(m))
		}
	}
	fmt.Fprintf(o.Stdout, "wrote %s (%.1f MB); open it in a browser, it needs no network\n", terminal.Name(out),
		float64(st.Size())/1e6)
	return 0, nil
}

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

// TopOptions are the flags of `cprun top`.
type TopOptions struct {
	Once   bool // print the present state, also on a terminal
	Stdout io.Writer
	// Terminal is the file to draw on, if it is a terminal.
	Terminal *os.File
}

// Top shows a run; "" means the newest run in runs/. The exit status does not depend on the run's.
func Top(ctx context.Context, dir string, o TopOptions) (int, error) {
	if dir == "" {
		var err error
		if dir, err = newest("runs"); err != nil {
			return 0, err
		}
	}
	s, err := top.Open(dir)
	if err != nil {
		return 0, inputf("%w; name the directory of a run, such as runs/opticks-20261120-101500", err)
	}
	defer s.Close()
	if o.Once || !launch.Terminal(o.Terminal) {
		return 0, top.Print(o.Stdout, s)
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	defer signal.Stop(signals)
	screen, err := top.NewScreen()
	if err != nil {
		return 0, err
	}
	return 0, top.Live(ctx, s, screen, signals)
}

// newest returns the most recently changed run of a directory.
func newest(runs string) (string, error) {
	all, _ := filepath.Glob(filepath.Join(runs, "*")) // the pattern is right
	best, last := "", time.Time{}
	for _, dir := range all {
		for _, name := range []string{"config.yaml", "metrics.jsonl", "logs"} {
			if st, err := files.Stat(filepath.Join(dir, name)); err == nil && st.ModTime().After(last) {
				best, last = dir, st.ModTime()
			}
		}
	}
	if best == "" {
		return "", inputf("%s has no run; name the directory of one: cprun top RUN", terminal.Name(runs))
	}
	return best, nil
}
