package report

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/lab/experiment"
	"github.com/cprun/cprun/internal/model/metrics"
)

const (
	maxSteps   = 50_000    // kept steps of a run
	maxSlices  = 1_000_000 // kept pieces of a trace
	maxPlan    = 64 << 20  // bytes of a plan.json, which has a part for each rank
	maxLog     = 16 << 20  // bytes of a launcher.log to search
	maxTrace   = 2 << 30   // bytes of a trace.json
	maxResults = 64 << 20  // bytes of a results.json
	maxValues  = 4 << 20   // values in a JSON file
)

const resultsFile = "results.json"

// Open adds a path to the page: a run directory, the directory of an experiment, or its
// results.json.
func (in *Input) Open(path string) error {
	dir, name := path, ""
	if st, err := files.Stat(path); err != nil {
		return err
	} else if !st.IsDir() {
		dir, name = filepath.Dir(path), filepath.Base(path)
	}
	root, err := files.OpenDir(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	if name == "" {
		if st, err := root.Stat(resultsFile); err == nil && st.Mode().IsRegular() {
			name = resultsFile
		}
	}
	if name != "" {
		return in.openExperiment(root, name)
	}
	run, err := readRun(root)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	abs, _ := filepath.Abs(path) // "" if the working directory is gone
	run.Name = filepath.Base(cmp.Or(abs, path))
	in.Runs = append(in.Runs, *run)
	return nil
}

func (in *Input) openExperiment(root *os.Root, name string) error {
	if in.Experiment != nil {
		return errors.New("a page shows one experiment; write another page for the second")
	}
	data, err := readJSON(root, name, maxResults)
	if err != nil {
		return err
	}
	res, err := experiment.Decode(bytes.NewReader(data))
	if err != nil {
		return fmt.Errorf("%s: %w", terminal.Name(filepath.Join(root.Name(), name)), err)
	}
	in.Experiment, in.Plans = res, plansOf(root, res)
	return nil
}

// OfExperiment returns the input for results and for the plans in their directory.
func OfExperiment(dir string, res *experiment.Results) Input {
	in := Input{Title: res.Name, Commit: res.Commit, Experiment: res}
	if root, err := files.OpenDir(dir); err == nil { // without it the page has no roofline
		defer root.Close()
		in.Plans = plansOf(root, res)
	}
	return in
}

// plansOf returns the plan.json of the first run of each cell, if it is in the directory of the experiment.
func plansOf(root *os.Root, res *experiment.Results) map[string]*Plan {
	plans := map[string]*Plan{}
	for _, c := range res.Cells {
		if len(c.RunDirs) > 0 {
			if p, err := readPlan(root, filepath.Join(c.RunDirs[0], "plan.json")); err == nil {
				plans[c.ID] = p
			}
		}
	}
	return plans
}

// readRun reads a run directory, also while the run goes on. It needs metrics.jsonl or plan.json. Run.Missing names
// other files that are missing or damaged.
func readRun(root *os.Root) (*Run, error) {
	r := &Run{}
	errMetrics := r.readSteps(root)
	p, errPlan := readPlan(root, "plan.json")
	if errMetrics != nil && errPlan != nil {
		return nil, fmt.Errorf("not a run directory: %w; %w", errMetrics, errPlan)
	}
	r.miss(errMetrics, "metrics.jsonl", "no curves")
	r.miss(errPlan, "plan.json", "no layout and no model size")
	if r.Plan = p; p != nil {
		r.Machine = p.Machine
	}
	r.miss(r.readLog(root), "logs/launcher.log", "no command and no version")
	r.miss(r.readTrace(root), "trace.json", "no timeline; set log.trace_steps to get one")
	return r, nil
}

func (r *Run) miss(err error, name, effect string) {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		r.Missing = append(r.Missing, fmt.Sprintf("%s is missing: %s", name, effect))
	case err != nil:
		r.Missing = append(r.Missing, fmt.Sprintf("%s cannot be read (%v): %s", name, err, effect))
	}
}

func (r *Run) readSteps(root *os.Root) error {
	f, err := files.OpenIn(root, "metrics.jsonl")
	if err != nil {
		return err
	}
	defer f.Close()
	kept, last := thinner{most: maxSteps}, int64(-1)
	torn, err := metrics.EachStep(f, func(s metrics.Step) {
		if s.Step <= last {
			return // each step once, in order
		}
		last = s.Step
		r.Lines++
		kept.add(s)
	})
	r.Steps = kept.steps()
	if torn > 0 {
		r.Missing = append(r.Missing, fmt.Sprintf("metrics.jsonl: %d incomplete lines are left out", torn))
	}
	return err
}

// readLog reads the newest start in launcher.log, "--- TIME cprun VERSION: COMMAND", and its end.
func (r *Run) readLog(root *os.Root) error {
	f, err := files.OpenIn(root, "logs/launcher.log")
	if err != nil {
		return err
	}
	defer f.Close()
	lines := bufio.NewScanner(io.LimitReader(f, maxLog))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := strings.ToValidUTF8(lines.Text(), "?")
		if rest, ok := strings.CutPrefix(line, "--- "); ok {
			_, rest, _ = strings.Cut(rest, " ")
			version, command, ok := strings.Cut(rest, ": ")
			if ok && strings.HasPrefix(version, "cprun ") {
				r.Commit, r.Command, r.Ended = strings.TrimPrefix(version, "cprun "), command, ""
			}
			continue
		}
		if _, text, ok := strings.Cut(line, " "); ok && strings.HasPrefix(text, "done in ") {
			r.Ended = "done"
		}
	}
	return nil // after a line that is too long, the lines before it are enough
}

func (r *Run) readTrace(root *os.Root) error {
	f, err := files.OpenIn(root, "trace.json")
	if err != nil {
		return err
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil {
		return err
	} else if st.Size() > maxTrace {
		return fmt.Errorf("%d bytes exceed the limit of %d", st.Size(), maxTrace)
	}
	ranks := map[int]bool{} // true for the drawn ones
	return metrics.EachSlice(f, func(s metrics.Slice) {
		drawn, seen := ranks[s.Rank]
		if !seen {
			drawn = len(ranks) < maxLanes
			ranks[s.Rank], r.Traced = drawn, r.Traced+1
		}
		if _, ok := stepOf(s.Label); ok && drawn && len(r.Slices) < maxSlices {
			r.Slices = append(r.Slices, s)
		}
	})
}

func readJSON(root *os.Root, name string, most int64) ([]byte, error) {
	data, err := files.ReadIn(root, name, most)
	if err != nil {
		return nil, err
	}
	return data, files.Modest(data, maxValues)
}

// Plan is a plan.json. Fields that an older version did not write are zero.
type Plan struct{ plan.Plan }

func readPlan(root *os.Root, name string) (*Plan, error) {
	data, err := readJSON(root, name, maxPlan)
	if err != nil {
		return nil, err
	}
	var p Plan
	if err := json.Unmarshal(data, &p); err != nil {
		return nil, err
	}
	slices.SortStableFunc(p.Partition.PerRank, func(a, b plan.RankPart) int { return cmp.Compare(a.Rank, b.Rank) })
	return &p, nil
}

func (p *Plan) option(path string) string {
	if p == nil {
		return ""
	}
	name, key, _ := strings.Cut(path, ".")
	section, _ := p.Config[name].(map[string]any)
	return experiment.Text(section[key])
}
