package command

import (
	"context"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/lab/top"
	"github.com/cprun/cprun/internal/launch"
)

// TopOptions are the flags of `cprun top`.
type TopOptions struct {
	Once   bool // print what is known now, on a terminal too
	Stdout io.Writer
	// Terminal is where it is drawn, if it is a terminal.
	Terminal *os.File
}

// Top shows a run; "" is the one of runs/ that has changed last. The status tells nothing of the run's own.
func Top(ctx context.Context, dir string, o TopOptions) (int, error) {
	if dir == "" {
		var err error
		if dir, err = newest("runs"); err != nil {
			return 0, err
		}
	}
	s, err := top.Open(dir)
	if err != nil {
		return 0, inputf("%w; name the directory of a run, as --run-dir has it", err)
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

// newest is the run in a directory whose logs or metrics have changed last.
func newest(runs string) (string, error) {
	all, err := filepath.Glob(filepath.Join(runs, "*"))
	if err != nil || len(all) == 0 {
		return "", inputf("there is no run in %s; name the directory of a run: cprun top RUN", terminal.Name(runs))
	}
	best, last := "", time.Time{}
	for _, dir := range all {
		for _, name := range []string{"config.yaml", "metrics.jsonl", "logs"} {
			if st, err := files.Stat(filepath.Join(dir, name)); err == nil && st.ModTime().After(last) {
				best, last = dir, st.ModTime()
			}
		}
	}
	if best == "" {
		return "", inputf("there is no run in %s; name the directory of a run: cprun top RUN", terminal.Name(runs))
	}
	return best, nil
}
