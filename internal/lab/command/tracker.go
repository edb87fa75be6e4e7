package command

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/progress"
	"github.com/cprun/cprun/internal/run/job"
)

// tracker shows what the workers report.
type tracker struct {
	out   *progress.Printer
	start time.Time
	root  *os.Root         // the run directory
	first *progress.Number // validation loss at the first and at the newest validation
	last  *progress.Number
	loss  progress.Number
	steps int64

	again    string           // the command that goes on after a stop
	writes   string           // the command that has the model write, or ""
	measures bool             // dir is removed afterwards
	advanced func(step int64) // or nil
}

func (t *tracker) event(rank int, e launch.Event) {
	if rank != 0 {
		return
	}
	switch e.Kind {
	case launch.EventProgress:
		if t.advanced != nil {
			t.advanced(e.Step)
		}
		var s progress.Step
		if len(e.Data) == 0 || json.Unmarshal(e.Data, &s) != nil {
			return // a step that was not logged; the launcher notes that it was reached
		}
		if s.ValLoss != nil {
			t.last = s.ValLoss
			if t.first == nil {
				t.first = s.ValLoss
			}
		}
		if t.steps = s.Step; !math.IsNaN(float64(s.Loss)) { // the last step that had targets
			t.loss = s.Loss
		}
		t.out.Step(s)
	case job.EventNotice:
		var text string
		if json.Unmarshal(e.Data, &text) == nil {
			t.out.Note(text)
		}
	case job.EventValidation:
		var n progress.Number
		if json.Unmarshal(e.Data, &n) == nil {
			t.first, t.last = &n, &n
		}
	}
}

// maxLatest is more than the name of any checkpoint has, in bytes.
const maxLatest = 4 << 10

// summary says how a run ended and what it wrote. Failures have been reported already.
func (t *tracker) summary(res launch.Result) {
	switch {
	case res.ExitCode == launch.ExitDone:
		line := fmt.Sprintf("done in %s", readable.Duration(time.Since(t.start)))
		if t.steps > 0 {
			line += fmt.Sprintf(": loss %.4f", float64(t.loss))
		} else {
			line += ": no step was left to do"
		}
		if t.first != nil && t.last != nil {
			line += fmt.Sprintf(", validation loss %.4f -> %.4f", float64(*t.first), float64(*t.last))
		}
		t.out.Note(line)
	case res.Stopped && t.measures:
		t.out.Note("stopped; a measurement writes no checkpoint")
	case res.Stopped:
		t.out.Note("stopped after a checkpoint; go on with: " + t.again)
	default:
		return
	}
	if t.measures {
		return
	}
	saved := false
	for _, f := range []struct{ label, name string }{
		{"metrics", "metrics.jsonl"}, {"checkpoint", "checkpoints/latest"}, {"logs", "logs"}, {"trace", "trace.json"},
	} {
		name := f.name
		if f.label == "checkpoint" {
			data, err := files.ReadIn(t.root, name, maxLatest)
			if err != nil {
				continue
			}
			name = filepath.Join(checkpointsName, filepath.Base(strings.TrimSpace(string(data))))
			saved = true
		}
		if _, err := t.root.Stat(name); err == nil {
			t.out.Note(fmt.Sprintf("  %-11s %s", f.label, terminal.Name(filepath.Join(t.root.Name(), name))))
		}
	}
	if saved && t.writes != "" && res.ExitCode == launch.ExitDone { // else the last words are how to go on
		t.out.Note(fmt.Sprintf("  %-11s %s", "its text", t.writes))
	}
}
